"""What a client does, step by step: one logic for programs that wait and for those that do not.

Requests are a function of messages, of nonces and of public things: never of the feature, of scores or of what was
chosen (``docs/theory/service.md``; attacked by ``tests/service/test_client_wire.py``).
"""

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from nearveil.frames import DEFAULT_LIMITS, HEADER_BYTES
from nearveil.gallery.items import LARGEST_ORIGINAL
from nearveil.protocol.wire import PublicPart, read
from nearveil.service._client_errors import QuestionError, ReplyError
from nearveil.service._dummies import Payer
from nearveil.service._model import Galleries, GalleryInfo, GalleryKind
from nearveil.service._private_image import Features, Images, decoded
from nearveil.service._replies import (
    Now,
    Patience,
    Steps,
    Tally,
    bytes_of,
    done,
    etag_of,
    frame_of,
    json_of,
    printed,
    refusal,
    replied,
)
from nearveil.service._schedule import EXTRACTION_PERIOD, end_slot
from nearveil.service._transport import Request, Response

if TYPE_CHECKING:
    from nearveil.service._steps_classify import KeptModel

_SAME = 1e-9  # of fractions
_MOST_MAPS = 4  # that are kept
_LEAST_REPLY = 1 << 16  # bytes: there must be room for words
_KINDS: dict[GalleryKind, str] = {
    "open": "it is protected, and answers classify only: it shows no candidates",
    "protected": "it is open, and has no model: nearest asks it",
}
_NONE: dict[GalleryKind, str] = {
    "open": "none is open, and a protected one answers classify only",
    "protected": "none is protected, and only a protected one has a model",
}


class Asker:
    """Knows the galleries and their maps, and sends what it is given.

    `account`: Who pays.
    `token`: Keys of requests differ between tokens: a server refuses a key that another token has used.
    `watched`: Whether somebody else sees when requests are sent. A gallery in this process is nobody else.
    """

    def __init__(
        self, account: Payer | None, features: Features, patience: Patience, token: str, *, watched: bool
    ) -> None:
        self.account, self.features = account, features
        self.patience, self._token, self._watched = patience, token, watched
        self._infos: tuple[GalleryInfo, ...] | None = None
        self._maps: dict[tuple[str, float | None], tuple[str, PublicPart]] = {}
        self.models: dict[str | None, KeptModel] = {}  # by the name that was asked for

    def galleries(self, tally: Tally | None = None) -> Steps[tuple[GalleryInfo, ...]]:
        """Ask for the galleries that there are."""
        response = yield from replied(Request("galleries"), self.patience, tally or Tally())
        self._infos = json_of(response, Galleries).galleries
        return self._infos

    def prepared(self, images: Images, name: str | None) -> Steps[tuple[GalleryInfo, list[NDArray[Any]]]]:
        """Return an open gallery and the features of images for it, before the first request of their question.

        Images are decoded before anything is sent, and made features as well if the extractor was given, or the gallery
        listed before. If not, the list is asked for in between. After either a slot ends.
        """
        tally = Tally(heard=(yield Now()))
        given = yield from done(lambda: decoded(images))
        if self.features.needs_gallery(given):
            if not self._lists(name):
                yield from self.end_slot(tally.heard, EXTRACTION_PERIOD)
            info = yield from self.gallery(name, "open", tally)
            rows = yield from done(lambda: self.features.extracted(given, info))
            yield from self.end_slot(tally.heard, EXTRACTION_PERIOD)
        else:
            rows = yield from done(lambda: self.features.extracted(given))
            if any(image.ndim > 1 for image in given):
                yield from self.end_slot(tally.heard, EXTRACTION_PERIOD)
            info = yield from self.gallery(name, "open")
        self.features.check(given, rows, info)
        return info, rows

    def end_slot(self, since: float, period: float) -> Steps[None]:
        """Wait for the end of a slot of private work, if somebody watches."""
        if self._watched:
            yield from end_slot(since, period)

    def original(self, number: int, gallery: str | None) -> Steps[bytes]:
        """Ask for one original: the request says which one."""
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 32:
            raise QuestionError("id", "it must be the id of an item, a whole number of 32 bits")
        info = yield from self.gallery(gallery, "open")
        request = Request("original", info.name, number=number, most=LARGEST_ORIGINAL)
        return bytes_of((yield from replied(request, self.patience, Tally())))

    def payer(self, gallery: str | None) -> Steps[Payer]:
        """Return who pays, or say that there must be somebody, unless the gallery cannot be asked at all."""
        if self.account is None:
            yield from self.gallery(gallery, "open")
            raise QuestionError("account", "somebody must pay: give the client an account of a ledger")
        return self.account

    def map(self, gallery: str | None, candidates: float | None) -> Steps[PublicPart]:
        """Ask for the map of an open gallery: the same request as before a question."""
        info = yield from self.gallery(gallery, "open")
        return (yield from self.public(info, candidates, Tally()))

    def gallery(self, name: str | None, kind: GalleryKind, tally: Tally | None = None) -> Steps[GalleryInfo]:
        """Return what is known of a gallery: of the one that is named, or of the only one of its kind."""
        infos = self._infos if self._lists(name) else None
        if infos is None:
            infos = yield from self.galleries(tally)
        if name is None:
            fitting = [one for one in infos if one.kind == kind]
            if len(fitting) != 1:
                many = "name one of them" if fitting else _NONE[kind]
                raise QuestionError("gallery", f"there are {_listed(infos)}: {many}")
            return _published(fitting[0])
        found = next((one for one in infos if one.name == name), None)
        if found is None:
            raise QuestionError("gallery", f"there is none named {printed(str(name))!r}; there are {_listed(infos)}")
        if found.kind != kind:
            raise QuestionError("gallery", f"{found.name}: {_KINDS[kind]}")
        return _published(found)

    def public(self, info: GalleryInfo, candidates: float | None, tally: Tally) -> Steps[PublicPart]:
        """Return the map of a gallery as it is now. What is held already is not sent again."""
        etag, kept = self._maps.get((info.name, candidates), ("", None))
        most = HEADER_BYTES + DEFAULT_LIMITS.public_part
        request = Request("map", info.name, candidates=candidates, etag=etag, most=most)
        response = yield from replied(request, self.patience, tally)
        if response.status == 304 and kept is not None:
            return kept
        with self._forgetting(info.name):
            if response.status != 200:
                raise refusal(response)
            data = frame_of(response)
            public: PublicPart = yield from done(lambda: read(data, PublicPart))
            if candidates is not None and abs(public.candidates - candidates) > _SAME:
                raise ReplyError("the server sent the map of another fraction than candidates asks for")
            if public.fingerprint != info.fingerprint or len(public.mean) != info.dimension:
                raise ReplyError("the gallery has other features than when it was listed: ask again")
        self._maps[info.name, candidates] = etag_of(response), public
        self._drop(list(self._maps)[:-_MOST_MAPS])
        return public

    def question(self, info: GalleryInfo, body: bytes, nonce: str, *, most: int, tally: Tally) -> Steps[Response]:
        """Send the frame of a query. The same frame with the same nonce is the same request, at any time.

        The key of a debit is not sent in any form: it may be short, and the server could guess it.
        """
        told = f"{self._token}\0query\0{info.name}\0".encode() + body
        key = hmac.digest(nonce.encode(), told, "sha256").hex()[:32]
        request = Request("query", info.name, body, key, most=max(most, _LEAST_REPLY))
        return (yield from replied(request, self.patience, tally))

    def _lists(self, name: str | None) -> bool:
        return self._infos is not None and any(name in (None, one.name) for one in self._infos)

    @contextmanager
    def _forgetting(self, gallery: str) -> Iterator[None]:
        """Look anew next time if a gallery is not what it was."""
        try:
            yield
        except ValueError:
            self._infos = None
            self._drop([place for place in list(self._maps) if place[0] == gallery])
            raise

    def _drop(self, places: list[tuple[str, float | None]]) -> None:
        for place in places:
            self._maps.pop(place, None)  # another thread may have been faster


@contextmanager
def telling(key: str) -> Iterator[None]:
    """Tell whoever interrupts or cancels a question that may be paid for how to go on."""
    try:
        yield
    except Exception:
        raise
    except BaseException as stopped:
        stopped.add_note(f"key={key!r} asks the same again: it is paid for at most once")
        raise


def _published(info: GalleryInfo) -> GalleryInfo:
    if not info.is_published:
        what = "map" if info.kind == "open" else "model"
        raise QuestionError("gallery", f"{info.name} has no {what} yet: publish one, or ask another")
    return info


def _listed(infos: tuple[GalleryInfo, ...]) -> str:
    return ", ".join(f"{one.name} ({one.kind})" for one in infos) or "no galleries"
