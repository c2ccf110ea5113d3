"""Histograms of oriented gradients: what an image looks like, without learning anything from any image."""

from collections.abc import Callable

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float32]

_ORIENTATIONS = 9
_CELLS = 4  # along each side
_BLOCK = 2  # cells along each side of a block
_LEAST_SIDE = 8  # below, a cell is a single pixel
_CHUNK = 512  # images between two steps of progress; large beside the cost of handing a chunk to a process


def hog(
    images: ArrayLike, *, n_jobs: int | None = None, progress: Callable[[int], object] | None = None
) -> NDArray[np.float32]:
    """Return the histograms of oriented gradients of images, by scikit-image (the extra `images`).

    Nine orientations, 4 x 4 cells an image (a cell's side is that of the image divided by four, rounded down;
    what is left over at the right and at the bottom has no cell), blocks of 2 x 2 cells, normalised by L2-Hys.
    In colour, the channel with the strongest gradient counts at each pixel. A row depends on its own image
    alone, bit for bit: neither on the other images nor on `n_jobs`.

    Parameters
    ----------
    images : array of shape (n, height, width) or (n, height, width, 3)
        uint8, or floats from 0 to 1; both sides at least 8. Floats are multiplied by 255, so that an image has
        the same histograms in either form.
    n_jobs : int, default=None
        Number of processes, as in joblib: None is one, -1 is one for each core.
    progress : callable, default=None
        Called with the number of images finished since it was called last.

    Returns
    -------
    array of shape (n, 324), float32
        Between 0 and 1: nine blocks, four cells each, nine orientations each. Zeros for an image of one colour.

    Raises
    ------
    ValueError
        If the images are not as described.
    ModuleNotFoundError
        If scikit-image is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> edge = np.zeros((1, 28, 28), dtype=np.uint8)
    >>> edge[:, :, 14:] = 255  # dark at the left, bright at the right: all gradients point along the rows
    >>> row = hog(edge)[0].reshape(3, 3, 2, 2, 9)
    >>> row.shape, bool(row[..., 0].any()), bool(row[..., 1:].any())
    ((3, 3, 2, 2, 9), True, False)
    """
    checked = _check(images)
    _require()
    parts = (checked[start : start + _CHUNK] for start in range(0, len(checked), _CHUNK))
    rows = np.empty((len(checked), (_CELLS - _BLOCK + 1) ** 2 * _BLOCK**2 * _ORIENTATIONS), dtype=np.float32)
    done = 0
    for part in Parallel(n_jobs=n_jobs, return_as="generator")(delayed(_histograms)(part) for part in parts):
        rows[done : done + len(part)] = part
        done += len(part)
        if progress is not None:
            progress(len(part))
    return rows


def _check(images: ArrayLike) -> NDArray[np.uint8] | NDArray[np.floating]:
    try:
        array = np.asarray(images)
    except ValueError:
        raise ValueError("images must all have one size: resize them first") from None
    if not (array.ndim == 3 or (array.ndim == 4 and array.shape[3] == 3)):
        raise ValueError("images must have shape (n, height, width) or (n, height, width, 3)")
    if not len(array):
        raise ValueError("images must hold at least one image")
    if min(array.shape[1:3]) < _LEAST_SIDE:
        raise ValueError(f"images must have at least {_LEAST_SIDE} pixels a side, not {array.shape[1:3]}")
    if array.dtype == np.uint8:
        return array
    # Written so that NaN fails, too.
    if not (np.issubdtype(array.dtype, np.floating) and array.min() >= 0 and array.max() <= 1):
        raise ValueError(
            "images must be uint8, or floats from 0 to 1 without NaN: divide by the largest value possible"
        )
    return array


def _require() -> None:
    try:
        import skimage.feature  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("images: HOG needs scikit-image: pip install nearveil[images]") from missing


def _histograms(images: NDArray[np.uint8] | NDArray[np.floating]) -> Floats:
    from skimage.feature import hog as of_one

    # In the images' own precision k / 255 * 255 is exactly k, so that both forms of an image agree.
    grey_levels = images if images.dtype == np.uint8 else images * 255
    size = images.shape[1] // _CELLS, images.shape[2] // _CELLS
    blocks = _CELLS - _BLOCK + 1  # of a side such as 15 scikit-image makes a fifth cell
    rows = [
        of_one(
            one.astype(np.float64, order="C"),
            orientations=_ORIENTATIONS,
            pixels_per_cell=size,
            cells_per_block=(_BLOCK, _BLOCK),
            feature_vector=False,
            channel_axis=-1 if one.ndim == 3 else None,
        )[:blocks, :blocks].ravel()
        for one in grey_levels
    ]
    return np.asarray(rows, dtype=np.float32)
