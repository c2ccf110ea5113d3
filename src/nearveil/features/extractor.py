"""Extractors map images to unit features. HOG and colour need no network."""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.cluster import Tick
from nearveil.errors import NearveilError
from nearveil.features.images import Pixels, resize
from nearveil.lazy import require_extra

Floats = NDArray[np.float32]
Result = TypeVar("Result")

_ORIENTATIONS = 9  # of :func:`hog`
_CELLS = 4  # along each side
_BLOCK = 2  # cells along each side of a block
_MIN_SIDE = 8  # smaller images have cells of a single pixel

_HOG_SIDE = 128  # of `HogColor`
_LEVELS = 4  # of a channel in the histogram: 64 colours
_TILES = 4  # along each side of the layout
_EDGES = 324


class FeatureError(NearveilError, ValueError):
    """The extractor gave zeros, NaN or infinity for the images at `positions`."""

    def __init__(self, name: str, positions: tuple[int, ...]) -> None:
        super().__init__(
            f"images: the extractor {name!r} gave zeros, NaN or infinity for {len(positions)} of them: "
            "omit them, or use another extractor"
        )
        self.positions = positions


def map_in_threads(
    function: Callable[[Any], Result], values: Sequence[Any], threads: int | None = None
) -> Generator[Result]:
    """Apply a function to values in threads, by default OMP_NUM_THREADS or all cores, and yield results in order."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(threads or (int(limit) if limit.isdecimal() else 0) or cores) as pool:
        yield from pool.map(function, values)


class Extractor(ABC):
    """Maps images to rows of norm one; every row depends on its own image only, up to rounding.

    A subclass passes the parameters below and defines ``_rows``; and ``_exact_row``, if ``_rows`` is not row-exact. Its
    `fingerprint` is the SHA-256 of its identity.

    Parameters
    ----------
    name : str
        A display name.
    identity : dict
        JSON values that determine the rows: extractors of equal identity give an image the same row.
    dimension : int
        Length of a row.
    side : int
        Images are resized to ``side`` x ``side`` pixels first: bicubic, ignoring the aspect ratio.
    batch : int, default=8
        The most images that ``_rows`` receives at a time.
    row_exact : bool, default=False
        Whether a row of ``_rows`` depends on its own image only, to the last bit: for any batch and any number of
        threads. If not, ``extract(images, row_exact=True)`` computes such rows.
    """

    _parallel = False  # whether threads may call `_rows` and `_exact_row` at the same time

    def __init__(
        self, *, name: str, identity: dict[str, Any], dimension: int, side: int, batch: int = 8, row_exact: bool = False
    ) -> None:
        self.name = name
        self.dimension = dimension
        self.side = side
        self.row_exact = row_exact
        self._batch = batch
        full = {"features": 1, "resize": "bicubic", "side": side, **identity}
        self.fingerprint = hashlib.sha256(json.dumps(full, sort_keys=True).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, without those that each process makes for itself."""
        return {name: value for name, value in vars(self).items() if name not in ("_cpu_module", "_session")}

    def __repr__(self) -> str:
        """Return the class and its sizes."""
        return f"{type(self).__name__}(dimension={self.dimension}, side={self.side})"

    def _limit_threads(self) -> AbstractContextManager[None]:
        """Prepare calls of `_rows` and `_exact_row` in threads."""
        return nullcontext()

    @abstractmethod
    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        """Map images of shape (n, side, side, 3) to rows of shape (n, dimension)."""

    def _exact_row(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        """Map one image, shape (1, side, side, 3), to its row; nothing else may change a bit of it."""
        del images
        raise ValueError(f"row_exact: {self.name!r} has no row-exact way: use another extractor for private records")

    def extract(self, images: Sequence[Pixels], *, row_exact: bool = False, tick: Tick | None = None) -> Floats:
        """Compute the features of images, rows of norm one (n, dimension). Nothing is written to disk.

        Images without a feature raise a `FeatureError`, which holds their `positions`.

        `images` are arrays of shape (height, width, 3), uint8, of any size, as :func:`load_image` returns them. With
        `row_exact`, each row depends on its own image only, to the last bit, as private records that vote need it
        (``docs/theory/private-knn.md``): networks then process one image at a time, each on one CPU thread.
        """
        for image in images:
            if getattr(image, "dtype", None) != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
                raise ValueError("images must be non-empty uint8 arrays of shape (height, width, 3): use load_image")
        single = row_exact and not self.row_exact
        step, rows_of = (1, self._exact_row) if single else (self._batch, self._rows)
        features = np.empty((len(images), self.dimension), dtype=np.float32)
        missing: list[int] = []
        starts = range(0, len(images), step)

        def compute(start: int) -> tuple[Floats, NDArray[np.bool_]]:
            return unit_rows(rows_of(np.stack([resize(image, self.side) for image in images[start : start + step]])))

        computed = map_in_threads(compute, [*starts, *starts[: int(single)]], None if self._parallel else 1)
        with self._limit_threads(), closing(computed) as parts:
            for start, (rows, valid) in zip(starts, parts, strict=False):
                features[start : start + len(rows)] = rows
                missing += [start + int(position) for position in np.flatnonzero(~valid)]
                if tick is not None:
                    tick(len(rows))
            for again, _ in parts:  # the first image once more
                if again[0].tobytes() != features[0].tobytes():
                    raise ValueError(
                        f"row_exact: the extractor {self.name!r} gives one image different rows: it is random, or "
                        "depends on earlier images; use another extractor for private records"
                    )
        if missing:
            raise FeatureError(self.name, tuple(missing))
        return features


def unit_rows(rows: NDArray[Any]) -> tuple[Floats, NDArray[np.bool_]]:
    """Return rows of norm one, and a mask of the valid rows; invalid rows are zero."""
    doubles = rows.astype(np.float64)
    valid = np.isfinite(doubles).all(axis=1)
    doubles[~valid] = 0
    maxima = np.abs(doubles).max(axis=1, initial=0)
    valid &= maxima > 0
    doubles /= np.where(valid, maxima, 1)[:, None]  # so that no square overflows or underflows
    norms = np.where(valid, np.linalg.norm(doubles, axis=1), 1)
    return (doubles / norms[:, None]).astype(np.float32), valid


def hog(images: ArrayLike, *, tick: Tick | None = None) -> Floats:
    """Compute oriented gradients (n, 324) of images, uint8 or floats in [0, 1], at least 8 pixels a side."""
    # Nine orientations, 4 x 4 cells, blocks of 2 x 2 cells, L2-Hys. A row depends on its own image only, bit for bit.
    pixels = _check_images(images)
    with require_extra("images"):
        from skimage.feature import hog as compute_hog
    blocks = _CELLS - _BLOCK + 1  # for a side such as 15, scikit-image adds a fifth cell
    rows = np.empty((len(pixels), blocks**2 * _BLOCK**2 * _ORIENTATIONS), dtype=np.float32)
    for number, image in enumerate(pixels):
        # In the precision of the images, k / 255 * 255 is exactly k, so that both forms of an image agree.
        grey_levels = image if image.dtype == np.uint8 else image * 255
        rows[number] = compute_hog(
            grey_levels.astype(np.float64, order="C"),
            orientations=_ORIENTATIONS,
            pixels_per_cell=(pixels.shape[1] // _CELLS, pixels.shape[2] // _CELLS),
            cells_per_block=(_BLOCK, _BLOCK),
            feature_vector=False,
            channel_axis=-1 if image.ndim == 3 else None,
        )[:blocks, :blocks].ravel()
        if tick is not None:
            tick(1)
    return rows


def _check_images(images: ArrayLike) -> NDArray[np.uint8] | NDArray[np.floating]:
    try:
        array = np.asarray(images)
    except ValueError:
        raise ValueError("images must all have one size: resize them first") from None
    if not (array.ndim == 3 or (array.ndim == 4 and array.shape[3] == 3)) or not len(array):
        raise ValueError("images must have shape (n, height, width) or (n, height, width, 3), at least one image")
    if min(array.shape[1:3]) < _MIN_SIDE:
        raise ValueError(f"images must have at least {_MIN_SIDE} pixels a side, not {array.shape[1:3]}")
    floating = np.issubdtype(array.dtype, np.floating)
    # NaN fails these comparisons as well.
    if array.dtype != np.uint8 and not (floating and array.min() >= 0 and array.max() <= 1):
        raise ValueError(
            "images must be uint8, or floats from 0 to 1 without NaN: divide by the largest value possible"
        )
    return array


class HogColor(Extractor):
    """Histograms of oriented gradients and colours: needs scikit-image and Pillow, no network and no weights.

    Three parts of equal weight: the edges (:func:`hog` at 128 x 128 pixels, 324 numbers); the frequency of each of 64
    colours (square roots of the shares); and the mean colour of 4 x 4 tiles, less the middle grey (48 numbers).
    A row depends on its image only, bit for bit. Much weaker than a network, but trained on no images.

    Examples
    --------
    >>> import numpy as np
    >>> red, blue = np.zeros((2, 40, 40, 3), dtype=np.uint8)
    >>> red[..., 0], blue[..., 2] = 255, 255
    >>> rows = HogColor().extract([red, red[:20], blue])
    >>> rows.shape, np.round(rows @ rows[0], 3)
    ((3, 436), array([ 1.   ,  1.   , -0.167], dtype=float32))
    """

    _parallel = True

    def __init__(self) -> None:
        super().__init__(
            name="HOG and colour",
            identity={"parts": ["hog 9 4 2", f"colours {_LEVELS}", f"layout {_TILES}"]},
            dimension=_EDGES + _LEVELS**3 + 3 * _TILES**2,
            side=_HOG_SIDE,
            batch=64,
            row_exact=True,
        )

    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        levels = (images // (256 // _LEVELS)).astype(np.intp)
        bins = (levels[..., 0] * _LEVELS + levels[..., 1]) * _LEVELS + levels[..., 2]
        counts = np.array([np.bincount(image.ravel(), minlength=_LEVELS**3) for image in bins])
        side = _HOG_SIDE // _TILES
        tiles = images.reshape(len(images), _TILES, side, _TILES, side, 3).mean(axis=(2, 4), dtype=np.float64)
        layout = (tiles.reshape(len(images), -1) / 255 - 0.5).astype(np.float32)
        parts = (hog(images), np.sqrt(counts / bins[0].size).astype(np.float32), layout)
        # A part may be zero (no edges, or only middle grey); the histogram never is.
        return np.hstack([unit_rows(part)[0] for part in parts])
