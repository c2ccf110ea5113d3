"""Alignment of two point clouds by a similarity transform."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_FLAT = 1e-14  # singular values of clouds of size one below this are rounding


@dataclass(frozen=True, eq=False)
class SimilarityTransform:
    """The map ``x -> scale * rotation @ x + translation``.

    Attributes
    ----------
    scale : float
    rotation : ndarray of shape (d, d)
        Orthogonal; its determinant is 1 unless a reflection was allowed and fits better.
    translation : ndarray of shape (d,)

    Examples
    --------
    >>> SimilarityTransform(2.0, np.eye(2), np.array([1.0, 0.0])).apply([1.0, 1.0])
    array([3., 2.])
    """

    scale: float
    rotation: Floats
    translation: Floats

    def __post_init__(self) -> None:
        for name in ("rotation", "translation"):
            own = np.array(getattr(self, name), dtype=np.float64)
            own.setflags(write=False)
            object.__setattr__(self, name, own)

    def apply(self, points: ArrayLike) -> Floats:
        """Map `points` of shape (n, d), or one point of shape (d,)."""
        given = _numbers(points, "points")
        if given.ndim not in (1, 2) or given.shape[-1] != len(self.translation):
            raise ValueError(f"points must have {len(self.translation)} columns; got shape {given.shape}")
        moved: Floats = self.scale * given @ self.rotation.T + self.translation
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
    # Clouds of mean zero and size one: the singular values below are then free of the units.
    source_, source_mean, source_size = _centred(source_, "source")
    target_, target_mean, target_size = _centred(target_, "target")
    left, spread, right = np.linalg.svd(target_.T @ source_)
    needed = d if reflection else max(d - 1, 1)
    if np.sum(spread > _FLAT) < needed:
        raise ValueError(
            f"source and target leave the rotation open: {n} points that together span fewer than {needed} "
            f"of {d} dimensions; use more points, or points in general position"
        )
    signs = np.ones(d)
    if not reflection and np.linalg.det(left) * np.linalg.det(right) < 0:
        signs[-1] = -1
        if np.sum(spread * signs) <= _FLAT or (d > 1 and spread[-2] - spread[-1] <= _FLAT):
            raise ValueError(
                "source and target leave the rotation open: one mirrors the other and no turn comes closest; "
                "use reflection=True, or points in general position"
            )
    rotation = (left * signs) @ right
    factor = float(np.sum(spread * signs)) * (target_size / source_size) if scale else 1.0
    return SimilarityTransform(factor, rotation, target_mean - factor * rotation @ source_mean)


def _numbers(points: ArrayLike, name: str) -> Floats:
    array = np.asarray(points)
    if array.dtype.kind not in "fiub":  # text or complex numbers; the values are nobody's business
        raise ValueError(f"{name} must hold real numbers; got dtype {array.dtype}")
    return array.astype(np.float64)


def _cloud(points: ArrayLike, name: str) -> Floats:
    cloud = _numbers(points, name)
    if cloud.ndim != 2 or 0 in cloud.shape:
        raise ValueError(f"{name} must have shape (points, dimensions), neither of them 0; got {cloud.shape}")
    if not np.all(np.isfinite(cloud)):
        raise ValueError(f"{name} holds NaN or infinity")
    return cloud


def _centred(cloud: Floats, name: str) -> tuple[Floats, Floats, float]:
    """Return the cloud shifted to mean zero and scaled to size one, its mean, and its size."""
    shifted = cloud - cloud[0]  # points on one spot are then exactly zero
    largest = float(np.max(np.abs(shifted)))
    if largest <= 4 * np.finfo(float).eps * float(np.max(np.abs(cloud))):
        raise ValueError(f"all points of {name} lie on one spot, which leaves rotation and scale open")
    shifted = shifted / largest
    mean = shifted.mean(axis=0)
    centred = shifted - mean
    size = float(np.linalg.norm(centred))
    return centred / size, cloud[0] + largest * mean, largest * size
