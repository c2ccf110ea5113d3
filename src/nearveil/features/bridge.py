"""Two models meet: features of one are carried into the space of the other through images that both know."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.privatemail.manifold import umeyama

Floats = NDArray[np.float64]

_LEAST = 8  # anchors
_FLAT = 1e-6  # of rows of norm one in float32, what varies less is rounding
_SHORT = 1e-100  # below, the squares of a row's numbers are lost, and with them its direction
_INSIDE = 1 - 1e-12  # the most that the mean's norm may be


@dataclass(frozen=True, eq=False)
class Bridge:
    """A map from the features of one model to the unit features of another; :func:`fit_bridge` learns it."""

    source_mean: Floats
    target_mean: Floats
    matrix: Floats

    def apply(self, features: ArrayLike, *, row_exact: bool = False) -> NDArray[np.float32]:
        """Carry features of shape (n, d_source) over; return float32 rows of norm one, shape (n, d_target).

        The map tells in which direction from the mean a feature lies; how far is taken such that it has norm one. Every
        finite feature has an image: whether a query is answered must not depend on what it asks. With `row_exact`, each
        row is a function of its own feature alone, to the last bit, as private records need it; that is slower.
        """
        rows = _check_numbers(features, "features")
        if rows.shape[1] != len(self.source_mean):
            raise ValueError(f"features must have {len(self.source_mean)} columns, not {rows.shape[1]}")
        with np.errstate(all="ignore"):  # what is not finite is seen to here, however the caller set numpy
            centred = rows - self.source_mean
            if row_exact:
                return np.concatenate([self._carry(_multiply_exactly(row, self.matrix)) for row in centred])
            return self._carry(centred @ self.matrix)

    def _carry(self, ways: Floats) -> NDArray[np.float32]:
        """Return the unit features that lie in some directions from the mean."""
        lengths = np.linalg.norm(ways, axis=1)
        told = np.isfinite(lengths) & (lengths > _SHORT)
        ways[told] /= lengths[told, None]
        ways[~told] = np.eye(1, ways.shape[1])
        along = (ways * self.target_mean).sum(axis=1)
        # |mean + t way| = 1: the mean has a norm below one, so that there is one t above zero.
        further = -along + np.sqrt(np.maximum(0, along**2 + 1 - (self.target_mean * self.target_mean).sum()))
        carried: NDArray[np.float32] = (self.target_mean + further[:, None] * ways).astype(np.float32)
        return carried


def fit_bridge(source: ArrayLike, target: ArrayLike) -> Bridge:
    """Learn a map from the features of one model to those of another.

    Anchors are images that both sides know and that are nobody's secret. Each side extracts their features by its own
    model; what comes out depends on nothing private, and costs no privacy. Both clouds of anchors are written in their
    principal components, as many as both have, and brought together by a turn and a scale, mirrored if that fits
    better (:func:`~nearveil.privatemail.manifold.umeyama`).
    A turn keeps lengths: directions in which the anchors hardly vary, but
    queries may, are not blown up. What a feature has outside of the anchors' components is lost.

    Parameters
    ----------
    source, target : array-like of shape (n, d_source) and (n, d_target)
        Row i of both is the same image. Rows of norm one, up to 0.001. More anchors, and anchors of the kind that
        will be asked for, are better.

    Returns
    -------
    Bridge

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> known = rng.normal(size=(60, 5))
    >>> known /= np.linalg.norm(known, axis=1, keepdims=True)
    >>> turn = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    >>> bridge = fit_bridge(known[:50], known[:50] @ turn)
    >>> bool(np.allclose(bridge.apply(known[50:]), known[50:] @ turn, atol=1e-6))
    True
    """
    here, there = _check_anchors(source, "source"), _check_anchors(target, "target")
    if len(here) != len(there):
        raise ValueError(f"source and target must have one row for each anchor; got {len(here)} and {len(there)}")
    if len(here) < _LEAST:
        raise ValueError(f"source and target must hold at least {_LEAST} anchors, not {len(here)}")
    here_mean, there_mean = here.mean(axis=0), there.mean(axis=0)
    here, there = here - here_mean, there - there_mean
    # Rows of norm one that differ have a mean of norm below one; rounding must not put it outside.
    there_mean *= min(1, _INSIDE / max(float(np.linalg.norm(there_mean)), _SHORT))
    here_axes, there_axes = _find_components(here, "source"), _find_components(there, "target")
    count = min(len(here_axes), len(there_axes))
    here_axes, there_axes = here_axes[:count], there_axes[:count]
    found = umeyama(here @ here_axes.T, there @ there_axes.T, reflection=True)
    return Bridge(here_mean, there_mean, found.scale * here_axes.T @ found.rotation.T @ there_axes)


def _multiply_exactly(row: Floats, matrix: Floats) -> Floats:
    """Return row @ matrix, shape (1, n), by NumPy's own sums: they have one order, and use one thread."""
    product: Floats = np.add.reduce(row[:, None] * matrix, axis=0, keepdims=True)
    return product


def _find_components(centred: Floats, name: str) -> Floats:
    """Return the principal directions in which the anchors vary at all, the strongest first."""
    _, sizes, axes = np.linalg.svd(centred, full_matrices=False)
    count = int(np.sum(sizes > _FLAT * np.sqrt(len(centred))))
    if not count:
        raise ValueError(f"{name}: all anchors have the same feature; use different images")
    kept: Floats = axes[:count]
    return kept


def _check_numbers(rows: ArrayLike, name: str) -> Floats:
    array = np.asarray(rows)
    if array.dtype.kind not in "fiu" or array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{name} must be an array of numbers of shape (n, dimensions), not empty")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must not hold NaN or infinity")
    return array.astype(np.float64)


def _check_anchors(rows: ArrayLike, name: str) -> Floats:
    checked = _check_numbers(rows, name)
    norms = np.linalg.norm(checked, axis=1, keepdims=True)
    if not np.allclose(norms, 1, atol=1e-3):
        raise ValueError(f"{name} must have rows of norm one")
    exact: Floats = checked / norms
    return exact
