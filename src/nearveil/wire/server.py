"""The server's half of the protocol: decode a query, encode the reply, never raise."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nearveil.errors import NearveilError
from nearveil.gallery.answers import IMAGE_HEADER_BYTES, LARGEST_ORIGINAL, Answer, Extras
from nearveil.gallery.codes import Bytes
from nearveil.gallery.errors import NotPublishedError
from nearveil.gallery.publishing import Published
from nearveil.mechanisms import MessageError
from nearveil.wire.codes import CodesGroup, CodesSource, Text
from nearveil.wire.frames import HEADER_BYTES, Kind, WireError, WireSizeError, WireVersionError
from nearveil.wire.messages import MapChanged, PublicPart, Query, Refusal, RefusalCode, decode_frame

if TYPE_CHECKING:
    from nearveil.gallery.index import Index

_LOG = logging.getLogger(__name__)
_LONGEST = 500  # characters of a reason


class ExtrasError(NearveilError):
    """A query asks for extras that the gallery does not offer."""


_CODES: dict[type[Exception], RefusalCode] = {
    WireVersionError: RefusalCode.VERSION,
    WireSizeError: RefusalCode.TOO_LARGE,
    ExtrasError: RefusalCode.NOT_OFFERED,
}


@dataclass(frozen=True, eq=False)
class ServedMap:
    """A published map of a gallery, with its index."""

    index: "Index"
    published: Published = field(repr=False)
    name: str  # of the gallery
    extractor: str = ""  # its name
    offers: tuple[Extras, ...] = ("thumbnails",)
    alive: NDArray[np.bool_] | None = field(default=None, repr=False)  # live items; None: read for each answer

    def make_public_part(self) -> PublicPart:
        """Return the public part of the map."""
        published = self.published
        return PublicPart(
            gallery=self.name,
            revision=published.revision,
            mechanism=published.terms.mechanism,
            epsilon=float(published.terms.epsilon),
            candidates=float(published.terms.candidates),
            public_digest=published.public_digest,
            space=published.space,
            map=published.map,
            table=published.table,
            extractor=self.extractor,
            fingerprint=self.index.extractor,
            offers=self.offers,
            code_recall=published.code_recall,
        )

    def make_codes_source(self, known: dict[bytes, CodesGroup]) -> CodesSource:
        """Return the codes of all live items, for local search; `known` caches groups by digest."""
        columns: tuple[Extras, ...] = ("names", "metadata")
        offered = [column for column in columns if column in self.offers]
        texts: dict[str, Text] = {kind: partial(self.read_extras, kind=kind, most=0) for kind in offered}
        return CodesSource(self.make_public_part(), *self.read_alive(), texts, known)

    def read_alive(self) -> tuple[NDArray[np.uint32], Bytes]:
        """Return the sorted ids and the codes of all live items."""
        alive = self._find_alive()
        return self.published.ids[alive], self.published.codes[alive]

    def _find_alive(self) -> NDArray[np.bool_]:
        return self.index.alive(self.published) if self.alive is None else self.alive

    def answer(self, query: Query) -> Answer:
        """Return an answer within the limit of its kind; images that would exceed it are not read."""
        if query.extras not in ("none", *self.offers):
            raise ExtrasError(f"this gallery does not offer {query.extras}")
        answer = self.published.answer(query.message, self._find_alive())
        left = Kind.ANSWER.limit + HEADER_BYTES - answer.nbytes
        if query.extras != "none":
            left -= IMAGE_HEADER_BYTES * len(answer.ids)
            images = tuple(self.read_extras(answer.ids, query.extras, left))
            left -= sum(map(len, images))
            answer = Answer(answer.ids, answer.codes, query.extras, images)
        if left < 0:
            raise WireSizeError("the answer is larger than the limit: request fewer extras")
        return answer

    def read_extras(self, ids: NDArray[np.uint32], kind: Extras, most: int) -> Sequence[bytes]:
        """Return an image or a text for each id, or nothing; WireSizeError first if images have over `most` bytes."""
        if kind in ("names", "metadata"):
            return self.index.texts(ids, kind)
        whole = kind == "originals"
        left = most - self.index.stored_bytes(ids, "original" if whole else "thumbnail")
        if left < 0:
            raise WireSizeError("the images are larger than the limit: request fewer extras")
        items = {item.id: item for item in self.index.items(ids, lenient=True, originals=whole)}
        ordered = [items.get(number) for number in ids.tolist()]
        if not whole:
            return [b"" if item is None else item.thumbnail for item in ordered]
        paths = [item.original for item in ordered if item is not None and isinstance(item.original, Path)]
        sizes = [path.lstat().st_size for path in paths if path.is_file()]
        if sum(sizes) > left or max(sizes, default=0) > LARGEST_ORIGINAL:
            raise WireSizeError("the images are larger than the limit: request fewer extras")
        return [b"" if item is None else item.read_original() or b"" for item in ordered]


def serve_maps(
    index: "Index", name: str, *, extractor: str = "", offers: tuple[Extras, ...] = ("thumbnails",)
) -> tuple[ServedMap, ...]:
    """Return the maps of an index, newest first, for ``ServerProtocol(*serve_maps(index, name))``.

    `name` is that of the gallery, `extractor` that of the extractor of its features.
    """
    maps = index.maps()
    if not maps:
        raise NotPublishedError(f"{name}: no map is published. Call publish(epsilon)")
    return tuple(ServedMap(index, published, name, extractor, offers) for published in maps)


class ServerProtocol:
    """Replies to queries, without state.

    Every answer to a query on one map has the same number of candidates, in the order of their ids; other items replace
    deleted ones. Maps that were published `earlier` are still answered, each with its own sets, for clients that
    fetched them.
    """

    def __init__(self, current: ServedMap, *earlier: ServedMap) -> None:
        self._current = current
        self._maps = {served.published.public_id: served for served in (*earlier, current)}

    def answer(self, data: bytes) -> bytes:
        """Reply to any bytes with the frame of an answer, of a changed map, or of a refusal; never raise."""
        try:
            query: Query = decode_frame(data, Query)
        except WireError as error:
            return _refuse(error)
        served = self._maps.get(query.message.public_id)
        if served is None:
            return MapChanged(self._current.name, self._current.published.revision).to_bytes()
        try:
            return served.answer(query).to_bytes()
        except (WireSizeError, ExtrasError, MessageError) as error:
            return _refuse(error)
        except Exception:  # for example of a disk or a database: the details are for the server's log alone
            _LOG.exception("no answer could be made")
            return Refusal(RefusalCode.FAILED, "the server could not make an answer").to_bytes()


def _refuse(error: Exception) -> bytes:
    # An error may quote the request; unprintable characters are not sent back.
    words = "".join(letter if letter.isprintable() else "?" for letter in str(error)[:_LONGEST])
    return Refusal(_CODES.get(type(error), RefusalCode.MALFORMED), words).to_bytes()
