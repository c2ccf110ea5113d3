"""Alignment of two point clouds by a similarity transform."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SimilarityTransform:
    """The map ``x -> scale * rotation @ x + translation``.

    Attributes
    ----------
    scale : float
    rotation : ndarray of shape (d, d)
        Orthogonal; its determinant is 1 unless a reflection was allowed and fits better.
    translation : ndarray of shape (d,)
    """

    scale: float
    rotation: Floats
    translation: Floats

    def __post_init__(self) -> None:
        for array in (self.rotation, self.translation):
            array.setflags(write=False)

    def apply(self, points: ArrayLike) -> Floats:
        """Map `points` of shape (n, d), or one point of shape (d,)."""
        moved: Floats = self.scale * np.asarray(points, dtype=np.float64) @ self.rotation.T + self.translation
        return moved


def umeyama(
    source: ArrayLike, target: ArrayLike, *, scale: bool = True, reflection: bool = False
) -> SimilarityTransform:
    """Find the similarity transform that brings `source` closest to `target`.

    Least squares over rotation, translation and (if asked for) scale and reflection, in closed form
    by a singular value decomposition: Kabsch 1976, Umeyama 1991.

    Parameters
    ----------
    source : array-like of shape (n, d)
    target : array-like of shape (n, d)
        Row i is where row i of `source` should go.
    scale : bool, default=True
        Whether the transform may stretch; False keeps lengths (Kabsch).
    reflection : bool, default=False
        Whether it may mirror.

    Returns
    -------
    SimilarityTransform

    Raises
    ------
    ValueError
        Where the clouds do not determine a rotation: too few points, all on one spot, or all in a
        subspace that leaves a turn free.

    Examples
    --------
    >>> import numpy as np
    >>> corner = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    >>> turned = 3 * corner @ np.array([[0.0, 1.0], [-1.0, 0.0]]) + [5, 6]
    >>> transform = umeyama(corner, turned)
    >>> round(transform.scale, 6), np.allclose(transform.apply(corner), turned)
    (3.0, True)
    """
    source_, target_ = _cloud(source, "source"), _cloud(target, "target")
    if source_.shape != target_.shape:
        raise ValueError(f"source and target must have one shape; got {source_.shape} and {target_.shape}")
    n, d = source_.shape
    source_mean, target_mean = source_.mean(axis=0), target_.mean(axis=0)
    # Centred clouds of size one: the singular values below are then free of the units.
    source_, source_size = _centred(source_, source_mean, "source")
    target_, target_size = _centred(target_, target_mean, "target")
    left, spread, right = np.linalg.svd(target_.T @ source_)
    needed = d if reflection else d - 1
    if np.sum(spread > spread[0] * d * 1e-14) < needed or spread[0] < 1e-14:
        raise ValueError(
            f"source and target leave the rotation open: {n} points that together span fewer than {needed} "
            f"of {d} dimensions; use more points, or points in general position"
        )
    signs = np.ones(d)
    if not reflection and np.linalg.det(left) * np.linalg.det(right) < 0:
        signs[-1] = -1
    rotation = (left * signs) @ right
    factor = float(np.sum(spread * signs)) * target_size / source_size if scale else 1.0
    return SimilarityTransform(factor, rotation, target_mean - factor * rotation @ source_mean)


def _cloud(points: ArrayLike, name: str) -> Floats:
    cloud = np.asarray(points, dtype=np.float64)
    if cloud.ndim != 2 or 0 in cloud.shape:
        raise ValueError(f"{name} must have shape (points, dimensions), neither of them 0; got {cloud.shape}")
    if not np.all(np.isfinite(cloud)):
        raise ValueError(f"{name} holds NaN or infinity")
    return cloud


def _centred(cloud: Floats, mean: Floats, name: str) -> tuple[Floats, float]:
    centred = cloud - mean
    size = float(np.linalg.norm(centred))
    if size <= 1e-14 * float(np.linalg.norm(cloud)) or size == 0:
        raise ValueError(f"all points of {name} lie on one spot, which leaves rotation and scale open")
    return centred / size, size
