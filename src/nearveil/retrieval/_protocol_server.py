"""The server's half of the protocol: bytes of any request in, bytes of a reply out, and never an exception."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms import MessageError
from nearveil.mechanisms.covers.covers import MappedRelease
from nearveil.retrieval._answer import IMAGE_HEADER_BYTES, Answer, Extras
from nearveil.retrieval._codes import Bytes, Codes
from nearveil.retrieval._server import mapped_answer
from nearveil.retrieval._wire import DEFAULT_LIMITS, HEADER_BYTES, Limits, WireError, WireSizeError, WireVersionError
from nearveil.retrieval._wire_public import PublicPart
from nearveil.retrieval._wire_schema import MapChanged, PublicRequest, Query, Refusal, RefusalCode, read

_LOG = logging.getLogger(__name__)
_LONGEST = 500  # characters of what went wrong
_CODES: dict[type[WireError], RefusalCode] = {
    WireVersionError: RefusalCode.VERSION,
    WireSizeError: RefusalCode.TOO_LARGE,
}


class Gallery(Protocol):
    """What a server has published of one revision, and answers from.

    Attributes
    ----------
    name : str
    revision : int
    release : MappedRelease
        Fitted, and indexed on the gallery.
    ids : ndarray of shape (N,), uint32
        Of the items, in the order in which they were indexed. Answers hold these.
    codes : ndarray of shape (N, b), uint8
        Of the items, in the same order.
    table : Codes
        What codes are read by.
    extractor, fingerprint : str
        Of the features.
    offers : tuple of {"thumbnails", "originals", "names"}
    """

    @property
    def name(self) -> str: ...

    @property
    def revision(self) -> int: ...

    @property
    def release(self) -> MappedRelease: ...

    @property
    def ids(self) -> NDArray[np.uint32]: ...

    @property
    def codes(self) -> Bytes: ...

    @property
    def table(self) -> Codes: ...

    @property
    def extractor(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def offers(self) -> tuple[Extras, ...]: ...

    def alive(self) -> NDArray[np.bool_]:
        """Return, shape (N,), which items may still be handed out: all but those that were deleted since."""
        ...

    def extras(self, ids: NDArray[np.uint32], kind: Extras, most: int, /) -> Sequence[bytes]:
        """Return a thumbnail, original or name for each id, empty where there is none.

        WireSizeError where they are more than `most` bytes together, before they are read.
        """
        ...


class ServerProtocol:
    """Replies to requests. It keeps nothing of them.

    Every answer to a query on one map has the same number of candidates, in the order of their ids; deleted items
    are replaced by others.

    Parameters
    ----------
    current : Gallery
        What is published now.
    *earlier : Gallery
        Published before and still answered, each with its own sets, for clients that fetched its map.
    limits : Limits, optional
        The largest requests that are read, and the largest answers that are made.
    """

    def __init__(self, current: Gallery, *earlier: Gallery, limits: Limits = DEFAULT_LIMITS) -> None:
        self._current, self._limits = current, limits
        self._galleries = {gallery.release.public_id: gallery for gallery in (*earlier, current)}
        self._public = public_part(current).to_bytes()

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
            return read(data, *expected, limits=self._limits)
        except WireError as error:
            return _refusal(_CODES.get(type(error), RefusalCode.MALFORMED), error)

    def _reply_to(self, query: Query) -> bytes:
        gallery = self._galleries.get(query.message.public_id)
        if gallery is None:
            return MapChanged(self._current.name, self._current.revision).to_bytes()
        if query.extras != "none" and query.extras not in gallery.offers:
            return _refusal(RefusalCode.NOT_OFFERED, f"this gallery does not offer {query.extras}")
        try:
            return _answer(query, gallery, self._limits.answer).to_bytes()
        except WireSizeError:
            return _refusal(RefusalCode.TOO_LARGE, "the answer is larger than this server sends: ask for fewer extras")
        except MessageError as error:
            return _refusal(RefusalCode.MALFORMED, error)
        except Exception:
            # A disk, a database, an item that cannot be shown: the server's own affair, told to its log alone.
            _LOG.exception("no answer could be made")
            return _refusal(RefusalCode.FAILED, "the server could not make an answer")


def public_part(gallery: Gallery) -> PublicPart:
    """Return what clients of a gallery must know."""
    release = gallery.release
    return PublicPart(
        gallery=gallery.name,
        revision=gallery.revision,
        mechanism=release.name,
        epsilon=release.guarantee.epsilon,
        candidates=float(release.candidates),
        public_digest=release.public_digest,
        mean=release.mean_,
        map=release.map_,
        table=gallery.table,
        extractor=gallery.extractor,
        fingerprint=gallery.fingerprint,
        offers=gallery.offers,
    )


def _answer(query: Query, gallery: Gallery, most: int) -> Answer:
    """Return an answer, its body of at most `most` bytes; images that would be more are not read."""
    found = mapped_answer(gallery, query.message, gallery.alive())
    left = most - (found.nbytes - HEADER_BYTES)
    if query.extras != "none":
        left -= IMAGE_HEADER_BYTES * len(found.ids)
    if left < 0:
        raise WireSizeError("the answer is too large")
    if query.extras == "none":
        return found
    images = tuple(gallery.extras(found.ids, query.extras, left))
    if sum(map(len, images)) > left:
        raise WireSizeError("the answer is too large")
    return Answer(found.ids, found.codes, query.extras, images)


def _refusal(code: RefusalCode, reason: object) -> bytes:
    # An error may quote what was sent; what does not print is not sent back.
    words = "".join(letter if letter.isprintable() else "?" for letter in str(reason)[:_LONGEST])
    return Refusal(code, words).to_bytes()
