"""What turns images into unit features: one interface, whatever network stands behind it."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.errors import NearveilError
from nearveil.features._images import Pixels, resize

Floats = NDArray[np.float32]
Progress = Callable[[int], object]


class FeatureError(NearveilError, ValueError):
    """Some images have no feature: the extractor gave numbers without a direction (zeros, NaN or infinity).

    Attributes
    ----------
    positions : tuple of int
        Which of the images that were given.
    """

    def __init__(self, name: str, positions: tuple[int, ...]) -> None:
        super().__init__(
            f"images: the extractor {name!r} gave zeros, NaN or infinity for {len(positions)} of them: "
            "leave them out, or use another extractor"
        )
        self.positions = positions


class Extractor(ABC):
    """Images to rows of norm one; every row is a function of its own image, up to rounding.

    A subclass says what it is (the parameters below) and defines ``_rows``; and ``_exact_row``, if it is not row-exact
    but can be.

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
        and however many threads there are.

    Attributes
    ----------
    name : str
    fingerprint : str
        SHA-256 of the identity.
    dimension : int
    side : int
    row_exact : bool
        Whether all rows of this extractor are row-exact. If not, ``extract(images, row_exact=True)`` makes them so.
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
        return f"{type(self).__name__}(dimension={self.dimension}, side={self.side})"

    @abstractmethod
    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        """Map images of shape (n, side, side, 3) to rows of shape (n, dimension)."""

    def _exact_row(self, image: NDArray[np.uint8]) -> NDArray[Any]:
        """Map one image, shape (1, side, side, 3), to its row, which nothing else may change by a single bit."""
        del image
        raise ValueError(f"row_exact: {self.name!r} has no row-exact way: use another extractor for private records")

    def extract(self, images: Sequence[Pixels], *, row_exact: bool = False, progress: Progress | None = None) -> Floats:
        """Return the features of images.

        Nothing is written to disk.

        Parameters
        ----------
        images : sequence of ndarray of shape (height, width, 3), uint8
            Of any sizes, as :func:`load_image` gives them.
        row_exact : bool, default=False
            Whether each row must be a function of its own image alone, to the last bit. Private records that vote need
            that (``docs/theory/private-knn.md``); queries and open galleries do not. Networks then get one image at a
            time, on one thread of the CPU.
        progress : callable, optional
            Called with the number of images finished since it was called last.

        Returns
        -------
        ndarray of shape (n, dimension), float32
            Rows of norm one.

        Raises
        ------
        ValueError
            If an image is not as described; if rows must be exact, and the extractor has no way to make them so, or
            gives one image different rows.
        FeatureError
            If an image has no feature; its attribute `positions` says which.
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
    """Return rows of norm one, and which of them are sound; the others are zero.

    Examples
    --------
    >>> import numpy as np
    >>> unit_rows(np.array([[3.0, 4.0], [0.0, 0.0], [np.nan, 1.0]]))
    (array([[0.6, 0.8], [0. , 0. ], [0. , 0. ]], dtype=float32), array([ True, False, False]))
    """
    wide = rows.astype(np.float64)
    sound = np.isfinite(wide).all(axis=1)
    wide[~sound] = 0
    largest = np.abs(wide).max(axis=1, initial=0)
    sound &= largest > 0
    wide /= np.where(sound, largest, 1)[:, None]  # so that no square is too large or too small
    norms = np.where(sound, np.linalg.norm(wide, axis=1), 1)
    return (wide / norms[:, None]).astype(np.float32), sound
