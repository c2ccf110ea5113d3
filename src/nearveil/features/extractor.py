"""Extractors turn images into unit features. HOG and colour need no network."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import ArrayLike, NDArray

from nearveil.errors import NearveilError
from nearveil.features.images import Pixels, resize

Floats = NDArray[np.float32]
Progress = Callable[[int], object]


class FeatureError(NearveilError, ValueError):
    """Some images have no feature: the extractor gave zeros, NaN or infinity for those at `positions`."""

    def __init__(self, name: str, positions: tuple[int, ...]) -> None:
        super().__init__(
            f"images: the extractor {name!r} gave zeros, NaN or infinity for {len(positions)} of them: "
            "leave them out, or use another extractor"
        )
        self.positions = positions


class Extractor(ABC):
    """Images to rows of norm one; every row is a function of its own image, up to rounding.

    A subclass says what it is (the parameters below) and defines ``_rows``; and ``_exact_row``, if it is not row-exact
    but can be. Its `fingerprint` is the SHA-256 of its identity.

    Parameters
    ----------
    name : str
        For people.
    identity : dict
        All that decides what a row is: two extractors of one identity give one image one row. Of what JSON can write.
    dimension : int
        Length of a row.
    side : int
        An image is resized to ``side`` x ``side`` pixels first: bicubic, without regard for its shape.
    batch : int, default=8
        How many images ``_rows`` is given at most.
    row_exact : bool, default=False
        Whether a row of ``_rows`` is a function of its own image alone, to the last bit: whatever else is in the batch,
        and however many threads there are. If not, ``extract(images, row_exact=True)`` makes such rows.
    """

    def __init__(
        self,
        *,
        name: str,
        identity: dict[str, Any],
        dimension: int,
        side: int,
        batch: int = 8,
        row_exact: bool = False,
    ) -> None:
        self.name = name
        self.dimension = dimension
        self.side = side
        self.row_exact = row_exact
        self._batch = batch
        whole = {"features": 1, "resize": "bicubic", "side": side, **identity}
        self.fingerprint = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()

    def __repr__(self) -> str:
        """Name the kind and its sizes."""
        return f"{type(self).__name__}(dimension={self.dimension}, side={self.side})"

    @abstractmethod
    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        """Map images of shape (n, side, side, 3) to rows of shape (n, dimension)."""

    def _exact_row(self, image: NDArray[np.uint8]) -> NDArray[Any]:
        """Map one image, shape (1, side, side, 3), to its row, which nothing else may change by a single bit."""
        del image
        raise ValueError(f"row_exact: {self.name!r} has no row-exact way: use another extractor for private records")

    def extract(self, images: Sequence[Pixels], *, row_exact: bool = False, progress: Progress | None = None) -> Floats:
        """Return the features of images. Nothing is written to disk.

        Parameters
        ----------
        images : sequence of ndarray of shape (height, width, 3), uint8
            Of any sizes, as :func:`load_image` gives them.
        row_exact : bool, default=False
            Whether each row must be a function of its own image alone, to the last bit. Private records that vote need
            that (``docs/theory/private-knn.md``). Networks then get one image at a time, on one thread of the CPU.
        progress : callable, optional
            Called with the number of images finished since it was called last.

        Returns
        -------
        ndarray of shape (n, dimension), float32
            Rows of norm one. Images without a feature raise a ValueError whose `positions` says which.
        """
        for image in images:
            _check(image)
        alone = row_exact and not self.row_exact
        step, rows_of = (1, self._exact_row) if alone else (self._batch, self._rows)
        found = np.empty((len(images), self.dimension), dtype=np.float32)
        lost: list[int] = []
        for start in range(0, len(images), step):
            some = np.stack([resize(image, self.side) for image in images[start : start + step]])
            rows, sound = unit_rows(rows_of(some))
            found[start : start + len(some)] = rows
            lost += [start + int(position) for position in np.flatnonzero(~sound)]
            if progress is not None:
                progress(len(some))
        if alone and len(images):
            self._check_repeats(images[0], found[0])
        if lost:
            raise FeatureError(self.name, tuple(lost))
        return found

    def _check_repeats(self, image: Pixels, row: Floats) -> None:
        """Raise if an image has another row after others were extracted: the network draws numbers, or remembers."""
        again, _ = unit_rows(self._exact_row(resize(image, self.side)[None]))
        if again[0].tobytes() != row.tobytes():
            raise ValueError(
                f"row_exact: the extractor {self.name!r} gives one image different rows: it draws random numbers, or "
                "remembers earlier images; use another for private records"
            )


def _check(image: object) -> None:
    if not (
        isinstance(image, np.ndarray)
        and image.dtype == np.uint8
        and image.ndim == 3
        and image.shape[2] == 3
        and image.size
    ):
        raise ValueError("images must be uint8 arrays of shape (height, width, 3), none of them empty: use load_image")


def unit_rows(rows: NDArray[Any]) -> tuple[Floats, NDArray[np.bool_]]:
    """Return rows of norm one, and which of them are sound; the others are zero."""
    wide = rows.astype(np.float64)
    sound = np.isfinite(wide).all(axis=1)
    wide[~sound] = 0
    largest = np.abs(wide).max(axis=1, initial=0)
    sound &= largest > 0
    wide /= np.where(sound, largest, 1)[:, None]  # so that no square is too large or too small
    norms = np.where(sound, np.linalg.norm(wide, axis=1), 1)
    return (wide / norms[:, None]).astype(np.float32), sound


_ORIENTATIONS = 9
_CELLS = 4  # along each side
_BLOCK = 2  # cells along each side of a block
_LEAST_SIDE = 8  # below, a cell is a single pixel
_CHUNK = 512  # images between two steps of progress; large beside the cost of handing a chunk to a process


def hog(
    images: ArrayLike, *, n_jobs: int | None = None, progress: Callable[[int], object] | None = None
) -> NDArray[np.float32]:
    """Return the histograms of oriented gradients of images, by scikit-image (the extra `images`): shape (n, 324).

    Nine orientations, 4 x 4 cells, blocks of 2 x 2 cells, normalised by L2-Hys. In colour, the channel with the
    strongest gradient counts at each pixel. A row depends on its own image alone, bit for bit; it is between 0 and 1,
    and zero for an image of one colour. Images are uint8, or floats from 0 to 1, with at least 8 pixels a side.
    """
    checked = _check_images(images)
    _need_skimage()
    parts = (checked[start : start + _CHUNK] for start in range(0, len(checked), _CHUNK))
    rows = np.empty((len(checked), (_CELLS - _BLOCK + 1) ** 2 * _BLOCK**2 * _ORIENTATIONS), dtype=np.float32)
    done = 0
    for part in Parallel(n_jobs=n_jobs, return_as="generator")(delayed(_make_histograms)(part) for part in parts):
        rows[done : done + len(part)] = part
        done += len(part)
        if progress is not None:
            progress(len(part))
    return rows


def _check_images(images: ArrayLike) -> NDArray[np.uint8] | NDArray[np.floating]:
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


def _need_skimage() -> None:
    try:
        import skimage.feature  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("images: HOG needs scikit-image: pip install nearveil[images]") from missing


def _make_histograms(images: NDArray[np.uint8] | NDArray[np.floating]) -> Floats:
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


_HOG_SIDE = 128
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
            side=_HOG_SIDE,
            batch=64,
            row_exact=True,
        )

    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        parts = (hog(images), _count_colours(images), _choose_layout(images))
        # A part may be zero (no edges, middle grey everywhere); the histogram never is.
        return np.hstack([unit_rows(part)[0] for part in parts])


def _count_colours(images: NDArray[np.uint8]) -> Floats:
    levels = (images // (256 // _LEVELS)).astype(np.intp)
    bins = (levels[..., 0] * _LEVELS + levels[..., 1]) * _LEVELS + levels[..., 2]
    counts = [np.bincount(one.ravel(), minlength=_LEVELS**3) for one in bins]
    return np.asarray(np.sqrt(np.asarray(counts) / bins[0].size), dtype=np.float32)


def _choose_layout(images: NDArray[np.uint8]) -> Floats:
    block = _HOG_SIDE // _PLACES
    places = images.reshape(len(images), _PLACES, block, _PLACES, block, 3).mean(axis=(2, 4), dtype=np.float64)
    return np.asarray(places.reshape(len(images), -1) / 255 - 0.5, dtype=np.float32)
