"""What turns images into unit features: one interface, whatever network stands behind it."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.features._images import Pixels, resize

Floats = NDArray[np.float32]
Progress = Callable[[int], object]


class FeatureError(ValueError):
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
    """Images to rows of norm one; every row is a function of its own image.

    A subclass says what it is (the parameters below) and defines ``_rows``.

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

    Attributes
    ----------
    name : str
    fingerprint : str
        SHA-256 of the identity.
    dimension : int
    side : int
    """

    def __init__(self, *, name: str, identity: dict[str, Any], dimension: int, side: int, batch: int = 8) -> None:
        self.name = name
        self.dimension = dimension
        self.side = side
        self._batch = batch
        whole = {"features": 1, "resize": "bicubic", "side": side, **identity}
        self.fingerprint = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dimension={self.dimension}, side={self.side})"

    @abstractmethod
    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        """Map images of shape (n, side, side, 3) to rows of shape (n, dimension)."""

    def extract(self, images: Sequence[Pixels], *, progress: Progress | None = None) -> Floats:
        """Return the features of images.

        Nothing is written to disk.

        Parameters
        ----------
        images : sequence of ndarray of shape (height, width, 3), uint8
            Of any sizes, as :func:`load_image` gives them.
        progress : callable, optional
            Called with the number of images finished since it was called last.

        Returns
        -------
        ndarray of shape (n, dimension), float32
            Rows of norm one.

        Raises
        ------
        ValueError
            If an image is not as described.
        FeatureError
            If an image has no feature; its attribute `positions` says which.
        """
        for image in images:
            _check(image)
        found = np.empty((len(images), self.dimension), dtype=np.float32)
        lost: list[int] = []
        for start in range(0, len(images), self._batch):
            some = np.stack([resize(image, self.side) for image in images[start : start + self._batch]])
            rows, sound = unit_rows(self._rows(some))
            found[start : start + len(some)] = rows
            lost += [start + int(position) for position in np.flatnonzero(~sound)]
            if progress is not None:
                progress(len(some))
        if lost:
            raise FeatureError(self.name, tuple(lost))
        return found


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
