"""The server's half of the protocol: bytes of any request in, bytes of a reply out, and never an exception."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearveil.gallery.answers import (
    IMAGE_HEADER_BYTES,
    LARGEST_ORIGINAL,
    Answer,
    Bytes,
    Extras,
)
from nearveil.gallery.errors import NotPublishedError
from nearveil.gallery.items import StoredItem
from nearveil.gallery.publishing import Published
from nearveil.mechanisms import MessageError
from nearveil.wire.client import MapChanged, PublicPart, PublicRequest, Query, Refusal, RefusalCode, decode_frame
from nearveil.wire.frames import DEFAULT_LIMITS, HEADER_BYTES, Limits, WireError, WireSizeError, WireVersionError
from nearveil.wire.home import CodesGroup, CodesSource, Text

if TYPE_CHECKING:
    from nearveil.gallery.index import Index

_LOG = logging.getLogger(__name__)
_LONGEST = 500  # characters of what went wrong
_CODES: dict[type[WireError], RefusalCode] = {
    WireVersionError: RefusalCode.VERSION,
    WireSizeError: RefusalCode.TOO_LARGE,
}


@dataclass(frozen=True, eq=False)
class ServedMap:
    """One published map of a gallery with the index behind it: what a server answers from."""

    index: "Index"
    published: Published = field(repr=False)
    name: str  # of the gallery
    extractor: str = ""  # the name of what makes the features
    offers: tuple[Extras, ...] = ("thumbnails",)
    alive: NDArray[np.bool_] | None = field(default=None, repr=False)  # items at one moment; None: read for each answer

    def make_public_part(self) -> PublicPart:
        """Return what clients of the map must know."""
        release = self.published.release
        return PublicPart(
            gallery=self.name,
            revision=self.published.revision,
            mechanism=release.name,
            epsilon=release.guarantee.epsilon,
            candidates=float(release.candidates),
            public_digest=release.public_digest,
            mean=release.mean_,
            map=release.map_,
            table=self.published.table,
            extractor=self.extractor,
            fingerprint=self.index.extractor,
            offers=self.offers,
        )

    def make_codes_source(self, known: dict[bytes, CodesGroup]) -> CodesSource:
        """Return all codes that are still there, for search at home; `known` holds groups that were hashed before."""
        columns: tuple[Extras, ...] = ("names", "metadata")
        texts: dict[str, Text] = {
            column: partial(self.read_extras, kind=column, most=0) for column in columns if column in self.offers
        }
        return CodesSource(self.make_public_part(), *self.read_alive(), texts, known)

    def read_alive(self) -> tuple[NDArray[np.uint32], Bytes]:
        """Return ids, rising, and codes of all items that are still there."""
        alive = self.index.alive(self.published) if self.alive is None else self.alive
        return self.published.ids[alive], self.published.codes[alive]

    def answer(self, query: Query, most: int) -> Answer:
        """Return an answer, its body of at most `most` bytes; images that would be more are not read."""
        alive = self.index.alive(self.published) if self.alive is None else self.alive
        found = self.published.answer(query.message, alive)
        left = most - (found.nbytes - HEADER_BYTES)
        if query.extras != "none":
            left -= IMAGE_HEADER_BYTES * len(found.ids)
        if left < 0:
            raise WireSizeError("the answer is too large")
        if query.extras == "none":
            return found
        images = tuple(self.read_extras(found.ids, query.extras, left))
        if sum(map(len, images)) > left:
            raise WireSizeError("the answer is too large")
        return Answer(found.ids, found.codes, query.extras, images)

    def read_extras(self, ids: NDArray[np.uint32], kind: Extras, most: int) -> Sequence[bytes]:
        """Return a thumbnail, an original or a name for each id; empty where there is none, or none any more.

        WireSizeError, before anything is read, where images are more than `most` bytes.
        """
        if kind in ("names", "metadata"):
            return self.index.texts(ids, kind)
        whole = kind == "originals"
        held = self.index.stored_bytes(ids, "original" if whole else "thumbnail")
        if held > most:
            raise WireSizeError("the images are too large")
        found = {item.id: item for item in self.index.items(ids, lenient=True, originals=whole)}
        items = [found.get(number) for number in ids.tolist()]
        if not whole:
            return [b"" if item is None else item.thumbnail for item in items]
        return _contents(items, most - held)


def _contents(items: Sequence[StoredItem | None], most: int) -> list[bytes]:
    """Return originals; files among them may have `most` bytes together."""
    sizes = [_size(item.original) for item in items if item is not None and isinstance(item.original, Path)]
    if sum(sizes) > most or max(sizes, default=0) > LARGEST_ORIGINAL:
        raise WireSizeError("the images are too large")
    return [b"" if item is None else item.read_original() or b"" for item in items]


def _size(path: Path) -> int:
    return path.lstat().st_size if path.is_file() else 0


def serve_maps(
    index: "Index", name: str, *, extractor: str = "", offers: tuple[Extras, ...] = ("thumbnails",)
) -> tuple[ServedMap, ...]:
    """Return the maps that an index keeps, newest first, ready for ``ServerProtocol(*serve_maps(index, name))``.

    `name`: Of the gallery.
    `extractor`: The name of what makes the features.
    `offers`: Of "thumbnails", "originals" and "names".
    """
    maps = index.maps()
    if not maps:
        raise NotPublishedError(f"{name}: nothing was published yet: call publish(epsilon)")
    return tuple(ServedMap(index, published, name, extractor, offers) for published in maps)


class ServerProtocol:
    """Replies to requests. It keeps nothing of them.

    Every answer to a query on one map has the same number of candidates, in the order of their ids; deleted items
    are replaced by others.

    Parameters
    ----------
    current : ServedMap
        What is published now.
    *earlier : ServedMap
        Published before and still answered, each with its own sets, for clients that fetched its map.
    limits : Limits, optional
        The largest requests that are read, and the largest answers that are made.
    """

    def __init__(self, current: ServedMap, *earlier: ServedMap, limits: Limits = DEFAULT_LIMITS) -> None:
        self._current, self._limits = current, limits
        self._maps = {served.published.public_id: served for served in (*earlier, current)}
        self._public = current.make_public_part().to_bytes()

    def reply(self, data: bytes) -> bytes:
        """Reply to a request, whatever it holds.

        Parameters
        ----------
        data : bytes

        Returns
        -------
        bytes
            A public part, an answer, word that the map has changed, or a refusal.
        """
        request = self._read(data, PublicRequest, Query)
        if isinstance(request, bytes):
            return request
        return self._public if isinstance(request, PublicRequest) else self._reply_to(request)

    def answer(self, data: bytes) -> bytes:
        """Reply to a query, and refuse everything else.

        Parameters
        ----------
        data : bytes

        Returns
        -------
        bytes
            An answer, word that the map has changed, or a refusal.
        """
        request = self._read(data, Query)
        return request if isinstance(request, bytes) else self._reply_to(request)

    def _read(self, data: bytes, *expected: type[PublicRequest | Query]) -> Any:
        """Return what was asked, or the bytes of a refusal."""
        try:
            return decode_frame(data, *expected, limits=self._limits)
        except WireError as error:
            return _refusal(_CODES.get(type(error), RefusalCode.MALFORMED), error)

    def _reply_to(self, query: Query) -> bytes:
        served = self._maps.get(query.message.public_id)
        if served is None:
            return MapChanged(self._current.name, self._current.published.revision).to_bytes()
        if query.extras != "none" and query.extras not in served.offers:
            return _refusal(RefusalCode.NOT_OFFERED, f"this gallery does not offer {query.extras}")
        try:
            return served.answer(query, self._limits.answer).to_bytes()
        except WireSizeError:
            return _refusal(RefusalCode.TOO_LARGE, "the answer is larger than this server sends: ask for fewer extras")
        except MessageError as error:
            return _refusal(RefusalCode.MALFORMED, error)
        except Exception:
            # A disk, a database, an item that cannot be shown: the server's own affair, told to its log alone.
            _LOG.exception("no answer could be made")
            return _refusal(RefusalCode.FAILED, "the server could not make an answer")


def _refusal(code: RefusalCode, reason: object) -> bytes:
    # An error may quote what was sent; what does not print is not sent back.
    words = "".join(letter if letter.isprintable() else "?" for letter in str(reason)[:_LONGEST])
    return Refusal(code, words).to_bytes()
