"""Map features of one model into the space of another, learned from images that both sides share."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.privacy.checks import check_rows
from nearveil.privatemail.manifold import umeyama

Floats = NDArray[np.float64]

_MIN_ANCHORS = 8
_FLAT = 1e-6  # directions that vary less are rounding of float32 rows
_SHORT = 1e-100  # shorter vectors have no direction: their squares underflow
_INSIDE = 1 - 1e-12  # the largest norm of the target mean


@dataclass(frozen=True, eq=False)
class Bridge:
    """A map from the features of one model to the unit features of another; see :func:`fit_bridge`."""

    source_mean: Floats
    target_mean: Floats
    matrix: Floats

    def apply(self, features: ArrayLike, *, row_exact: bool = False) -> NDArray[np.float32]:
        """Map features to float32 rows of norm one, (n, d_target); with `row_exact`, each depends on its own only."""
        # The matrix gives the direction from the target mean; the length makes the norm one. Every finite feature is
        # mapped: whether a query is answered must not depend on its content.
        rows = check_rows(features, "features")
        if rows.shape[1] != len(self.source_mean):
            raise ValueError(f"features must have {len(self.source_mean)} columns, not {rows.shape[1]}")
        with np.errstate(all="ignore"):  # `_extend` handles overflow, whatever NumPy's settings are
            centred = rows - self.source_mean
            if row_exact:
                return np.concatenate([self._extend(_multiply_exactly(row, self.matrix)) for row in centred])
            return self._extend(centred @ self.matrix)

    def _extend(self, directions: Floats) -> NDArray[np.float32]:
        """Return the unit rows in the given directions from the target mean."""
        lengths = np.linalg.norm(directions, axis=1)
        valid = np.isfinite(lengths) & (lengths > _SHORT)
        directions[valid] /= lengths[valid, None]
        directions[~valid] = np.eye(1, directions.shape[1])
        along = (directions * self.target_mean).sum(axis=1)
        # |mean + t direction| = 1 has one solution t > 0, because the mean has a norm below one.
        steps = -along + np.sqrt(np.maximum(0, along**2 + 1 - (self.target_mean * self.target_mean).sum()))
        return np.asarray(self.target_mean + steps[:, None] * directions, dtype=np.float32)


def fit_bridge(source: ArrayLike, target: ArrayLike) -> Bridge:
    """Learn a map from the features of one model to those of another.

    Anchors are public images that both sides have. Each side extracts their features with its own model, so the map
    depends on nothing private and costs no privacy. Both sets of anchors are projected to their principal components
    and aligned by a rotation or reflection and a scale (:func:`~nearveil.privatemail.manifold.umeyama`).
    A rotation keeps lengths, so directions in which queries vary more than anchors are not amplified. Parts of a
    feature outside the anchors' components are lost.

    Parameters
    ----------
    source, target : array-like of shape (n, d_source) and (n, d_target)
        Row i of both is the same image. Rows of norm one, up to 0.001. More anchors, and anchors that resemble the
        queries, are better.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> rows = rng.normal(size=(60, 5))
    >>> rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    >>> rotation = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    >>> bridge = fit_bridge(rows[:50], rows[:50] @ rotation)
    >>> bool(np.allclose(bridge.apply(rows[50:]), rows[50:] @ rotation, atol=1e-6))
    True
    """
    source_rows, target_rows = _check_anchors(source, "source"), _check_anchors(target, "target")
    if len(source_rows) != len(target_rows):
        counts = f"{len(source_rows)} and {len(target_rows)}"
        raise ValueError(f"source and target must have one row for each anchor; got {counts}")
    if len(source_rows) < _MIN_ANCHORS:
        raise ValueError(f"source and target must hold at least {_MIN_ANCHORS} anchors, not {len(source_rows)}")
    source_mean, target_mean = source_rows.mean(axis=0), target_rows.mean(axis=0)
    source_rows, target_rows = source_rows - source_mean, target_rows - target_mean
    # The mean of different unit rows has a norm below one; rounding must not lift it above.
    target_mean *= min(1, _INSIDE / max(float(np.linalg.norm(target_mean)), _SHORT))
    source_axes, target_axes = _find_components(source_rows, "source"), _find_components(target_rows, "target")
    count = min(len(source_axes), len(target_axes))
    source_axes, target_axes = source_axes[:count], target_axes[:count]
    fit = umeyama(source_rows @ source_axes.T, target_rows @ target_axes.T, reflection=True)
    return Bridge(source_mean, target_mean, fit.scale * source_axes.T @ fit.rotation.T @ target_axes)


def _multiply_exactly(row: Floats, matrix: Floats) -> Floats:
    """Return row @ matrix, shape (1, n), by NumPy's own sums, which have a fixed order and use one thread."""
    return np.asarray(np.add.reduce(row[:, None] * matrix, axis=0, keepdims=True))


def _find_components(centred: Floats, name: str) -> Floats:
    """Return the principal directions in which the anchors vary, the strongest first."""
    _, sizes, axes = np.linalg.svd(centred, full_matrices=False)
    count = int(np.sum(sizes > _FLAT * np.sqrt(len(centred))))
    if not count:
        raise ValueError(f"{name}: all anchors have the same feature; use different images")
    return np.asarray(axes[:count])


def _check_anchors(rows: ArrayLike, name: str) -> Floats:
    anchors = check_rows(rows, name)
    norms = np.linalg.norm(anchors, axis=1, keepdims=True)
    if not np.allclose(norms, 1, atol=1e-3):
        raise ValueError(f"{name} must have rows of norm one")
    return np.asarray(anchors / norms)
