"""Features without a network: edges and colours."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.features._extractor import Extractor, Floats, unit_rows
from nearveil.features._hog import hog

_SIDE = 128
_LEVELS = 4  # of a channel in the histogram: 64 colours
_PLACES = 4  # along each side of the layout
_EDGES = 324


class HogColor(Extractor):
    """Histograms of oriented gradients beside colours: needs scikit-image and Pillow, no network and no weights.

    Three parts of equal weight: the edges (:func:`hog` at 128 x 128 pixels, 324 numbers); how often each of 64 colours
    occurs (square roots of the shares); and the mean colour at 4 x 4 places, less the middle grey (48 numbers).
    A row depends on its image alone, bit for bit. Much weaker than a network, but it learnt from nobody's images.

    Examples
    --------
    >>> import numpy as np
    >>> red, blue = np.zeros((2, 40, 40, 3), dtype=np.uint8)
    >>> red[..., 0], blue[..., 2] = 255, 255
    >>> rows = HogColor().extract([red, red[:20], blue])
    >>> rows.shape, np.round(rows @ rows[0], 3)
    ((3, 436), array([ 1.   ,  1.   , -0.167], dtype=float32))
    """

    def __init__(self) -> None:
        super().__init__(
            name="HOG and colour",
            identity={"parts": ["hog 9 4 2", f"colours {_LEVELS}", f"layout {_PLACES}"]},
            dimension=_EDGES + _LEVELS**3 + 3 * _PLACES**2,
            side=_SIDE,
            batch=64,
            row_exact=True,
        )

    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        parts = (hog(images), _colours(images), _layout(images))
        # A part may be zero (no edges, middle grey everywhere); the histogram never is.
        return np.hstack([unit_rows(part)[0] for part in parts])


def _colours(images: NDArray[np.uint8]) -> Floats:
    levels = (images // (256 // _LEVELS)).astype(np.intp)
    bins = (levels[..., 0] * _LEVELS + levels[..., 1]) * _LEVELS + levels[..., 2]
    counts = [np.bincount(one.ravel(), minlength=_LEVELS**3) for one in bins]
    return np.asarray(np.sqrt(np.asarray(counts) / bins[0].size), dtype=np.float32)


def _layout(images: NDArray[np.uint8]) -> Floats:
    block = _SIDE // _PLACES
    places = images.reshape(len(images), _PLACES, block, _PLACES, block, 3).mean(axis=(2, 4), dtype=np.float64)
    return np.asarray(places.reshape(len(images), -1) / 255 - 0.5, dtype=np.float32)
