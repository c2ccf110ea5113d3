"""An index as the server's half of the protocol sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms import Covers
from nearveil.retrieval._answer import Extras, name_bytes
from nearveil.retrieval._codes import Bytes, Codes
from nearveil.retrieval._index import Index
from nearveil.retrieval._index_errors import NotPublishedError
from nearveil.retrieval._index_items import StoredItem
from nearveil.retrieval._original_files import LARGEST_ORIGINAL
from nearveil.retrieval._published import Published
from nearveil.retrieval._wire import WireSizeError


@dataclass(frozen=True, eq=False)
class Served:
    """A published map with its index behind it: a gallery for ``ServerProtocol``. Made by :func:`served`."""

    index: Index
    published: Published = field(repr=False)
    name: str
    extractor: str
    offers: tuple[Extras, ...]

    @property
    def revision(self) -> int:
        """Of the gallery that the map was learned on."""
        return self.published.revision

    @property
    def release(self) -> Covers:
        """The server's half of the release."""
        return self.published.release

    @property
    def ids(self) -> NDArray[np.uint32]:
        """Of the items, shape (n,)."""
        return self.published.ids

    @property
    def codes(self) -> Bytes:
        """Of the items, shape (n, b)."""
        return self.published.codes

    @property
    def table(self) -> Codes:
        """What codes are read by."""
        return self.published.table

    @property
    def fingerprint(self) -> str:
        """Of what makes the features."""
        return self.index.extractor

    def alive(self) -> NDArray[np.bool_]:
        """Return which items were not deleted since, shape (n,): read anew for every answer."""
        return self.index.alive(self.published)

    def extras(self, ids: NDArray[np.uint32], kind: Extras, most: int, /) -> Sequence[bytes]:
        """Return a thumbnail, an original or a name for each id; empty where there is none, or none any more.

        WireSizeError where images are more than `most` bytes: sizes are looked at before anything is read.
        """
        if kind == "names":
            named = {item.id: item.name for item in self.index.items(ids, lenient=True, originals=False)}
            return [name_bytes(named.get(number, "")) for number in ids.tolist()]
        whole = kind == "originals"
        held = self.index.stored_bytes(ids, "original" if whole else "thumbnail")
        if held > most:
            raise WireSizeError("the images are too large")
        found = {item.id: item for item in self.index.items(ids, lenient=True, originals=whole)}
        items = [found.get(number) for number in ids.tolist()]
        if not whole:
            return [b"" if item is None else item.thumbnail for item in items]
        return _contents(items, most - held)


def served(
    index: Index, name: str, *, extractor: str = "", offers: tuple[Extras, ...] = ("thumbnails",)
) -> tuple[Served, ...]:
    """Return the maps that an index keeps, newest first, ready for ``ServerProtocol(*served(index, name))``.

    Parameters
    ----------
    index : Index
    name : str
        Of the gallery.
    extractor : str, default=""
        The name of what makes the features.
    offers : tuple of {"thumbnails", "originals", "names"}, default=("thumbnails",)

    Returns
    -------
    tuple of Served
    """
    maps = index.maps()
    if not maps:
        raise NotPublishedError(f"{name}: nothing was published yet: call publish(epsilon)")
    return tuple(Served(index, published, name, extractor, offers) for published in maps)


def _contents(items: Sequence[StoredItem | None], most: int) -> list[bytes]:
    """Return originals; files among them may have `most` bytes together."""
    sizes = [_size(item.original) for item in items if item is not None and isinstance(item.original, Path)]
    if sum(sizes) > most or max(sizes, default=0) > LARGEST_ORIGINAL:
        raise WireSizeError("the images are too large")
    return [b"" if item is None else item.read_original() or b"" for item in items]


def _size(path: Path) -> int:
    return path.lstat().st_size if path.is_file() else 0
