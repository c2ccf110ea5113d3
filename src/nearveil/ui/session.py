"""What the page can ask for. The private image is in memory while its question is asked, and its feature after."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nearveil.client import GalleryInfo, UnansweredError
from nearveil.client.clients import Client
from nearveil.ledger import Account, Debit, KeyConflictError, KeySpentError, Ledger, new_key
from nearveil.ledger.budget import format_up
from nearveil.ledger.history import make_refusal
from nearveil.mechanisms.covers.covers import checked_epsilon
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source
from nearveil.search.outlook import EPSILONS, Outlook, Singles, make_outlook
from nearveil.ui._views import (
    Last,
    Picture,
    Trouble,
    describe_balance,
    describe_new_listing,
    describe_spoiled,
    make_image_address,
    preview_cost,
    view_classified,
    view_free,
    view_nearest,
)
from nearveil.wire.client import ClientProtocol, K, PublicPart


class Purse:
    """Pays from one account, and remembers its last debit, whose message is all that the other side was sent.

    The account may be set later, before anything is paid: what is refused earlier leaves no ledger behind.
    """

    account: Account

    def __init__(self, account: Account | None = None) -> None:
        if account is not None:
            self.account = account
        self.debit: Debit | None = None

    def begin(self) -> None:
        """Forget the debit of the question before."""
        self.debit = None

    def spend(self, guarantee: Guarantee, key: str, /) -> Debit:
        """Debit the account."""
        self.debit = self.account.spend(guarantee, key)
        return self.debit


_NOTHING = "Nothing is told about your image, whatever it is."
_MOST_IMAGES = 4000  # candidates that come with thumbnails
_MOST_WAITING = 16  # questions that are paid for and have no answer
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """What is asked, besides the image."""

    epsilon: float
    gallery: str
    candidates: float | None = None  # none for the newest map


@dataclass(frozen=True, eq=False)
class WaitingQuestion:
    """A question that is paid for and has no answer."""

    question: Question
    info: GalleryInfo  # of the gallery, as it was listed then
    row: Singles = field(repr=False)  # the feature. Private
    asked: int  # when; seconds since 1970


class PageSession:
    """Asks a server or an index for the page, one question at a time. The private image stays in memory.

    Parameters
    ----------
    client : Client
        Of a server or of an index here; `purse` is its account.
    purse : Purse
    ledger : Ledger
        That the account is in.
    where : str
        What is asked, in words: an address without secrets, or a folder.
    gallery : str, optional
        The only one to offer.
    rng : Source, optional
        Of messages; for tests. The operating system's randomness otherwise.

    Examples
    --------
    >>> session = PageSession(client, purse, ledger, "https://birds.example:8321")  # doctest: +SKIP
    """

    def __init__(
        self,
        client: Client,
        purse: Purse,
        ledger: Ledger,
        where: str,
        *,
        gallery: str | None = None,
        rng: Source | None = None,
    ) -> None:
        self.client, self.purse, self.ledger, self.where = client, purse, ledger, where
        self._gallery, self._rng = gallery, rng
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._outlooks: dict[str, Outlook] = {}
        self._pictures: dict[str, Picture] = {}
        self._waiting: dict[str, WaitingQuestion] = {}  # by key
        self._last = Last()

    def about(self) -> dict[str, Any]:
        """Return what is known without a server: whom the page asks, who pays, and what waits for an answer."""
        waiting = [
            {"key": key, "asked": one.asked, "epsilon": one.question.epsilon, "gallery": one.question.gallery}
            for key, one in list(self._waiting.items())
        ]
        return {"where": self.where, "balance": self.balance(), "waiting": waiting}

    def galleries(self) -> dict[str, Any]:
        """Return what there is to ask."""
        infos = [one for one in self.client.galleries() if self._gallery in (None, one.name)]
        if not infos:
            raise Trouble(404, "question", "There is no gallery here that may be asked.")
        return {
            "galleries": [
                {
                    "name": one.name,
                    "kind": one.kind,
                    "candidates": sorted(set(one.candidates)),
                    "newest": one.candidates[0] if one.candidates else None,
                    "published": one.is_published,
                    "extractor": one.extractor,
                    "offers": one.offers,
                    "copy": self._count_copy(one),
                    "promise": None if one.promise is None else one.promise.words,
                }
                for one in infos
            ],
        }

    def balance(self) -> dict[str, Any]:
        """Return what is left of the account that pays."""
        return describe_balance(self.purse.account)

    def map(self, gallery: str, candidates: float | None = None) -> dict[str, Any]:
        """Return what the public map of a gallery says, and what can be expected of it."""
        public = self.client.map(candidates, gallery=gallery)
        found = self._find_outlook(public)
        return {
            "map": public.map.map_id,
            "gallery": gallery,
            "candidates": public.candidates,
            "items": public.map.n_items,
            "set_size": public.map.set_size,
            "n_sets": public.map.n_sets,
            "reach": round(found.reach, 4),
            "learned_for": public.epsilon,
            "k": K,
            "curve": {
                "epsilon": EPSILONS,
                "expected": [round(found.expected(epsilon), 4) for epsilon in EPSILONS],
                "ceiling": [round(found.ceiling(epsilon), 4) for epsilon in EPSILONS],
                "floor": round(found.floor, 4),
                "whole": found.whole,
            },
        }

    def preview(self, epsilon: float) -> dict[str, Any]:
        """Return what a question would cost, and what it would promise. Nothing is spent."""
        if epsilon == 0:
            left = self.balance()["left_words"]
            return {"allowed": True, "cost": "0", "before": left, "after": left, "words": "", "promise": _NOTHING}
        guarantee = ClientProtocol(checked_epsilon(epsilon)).guarantee
        return {**preview_cost(self.purse.account, guarantee), "promise": str(guarantee)}

    def ask(self, image: bytes, question: Question, listens: Callable[[], bool] = lambda: True) -> dict[str, Any]:
        """Ask about an image file with a new key, and return all that the page shows: the same image again pays again.

        `listens` says whether somebody still waits; an answer that nobody hears waits for :meth:`again`.
        """
        if question.epsilon == 0:
            return self._ask_for_nothing(image, question.gallery)
        checked_epsilon(question.epsilon)
        with self._take_turn():
            info, row = self._prepare(image, question.gallery)
            cost = self._check_cost(question.epsilon)
            asked = WaitingQuestion(question, info, row, int(time.time()))
            return {**self._answer(new_key(), asked, listens), "cost": cost}

    def sync(self, gallery: str) -> dict[str, Any]:
        """Fetch a gallery's codes, or what changed of them. The page does so by a button, never because of an image."""
        with self._take_turn():
            self._check_gallery(gallery)
            copy = self.client.sync(gallery=gallery)
            return {"items": len(copy), "fetched": copy.fetched}

    def _ask_for_nothing(self, image: bytes, gallery: str) -> dict[str, Any]:
        """Search the copy that is here, or ask a sealed question; nothing is paid, and nothing waits."""
        with self._take_turn():
            self._check_gallery(gallery)
            return view_free(self.client.nearest(image, None, 0, gallery=gallery), self.balance())

    def _count_copy(self, info: GalleryInfo) -> int:
        copy = self.client.home(gallery=info.name) if "codes" in info.offers else None
        return 0 if copy is None else len(copy)

    def classify(self, image: bytes, gallery: str) -> dict[str, Any]:
        """Classify an image file by the model of a protected gallery. Nothing is paid, and nothing waits."""
        with self._take_turn():
            self._check_gallery(gallery)
            return view_classified(self.client.classify(image, gallery=gallery), self.balance())

    def again(self, key: str, listens: Callable[[], bool] = lambda: True) -> dict[str, Any]:
        """Ask a paid question without an answer again: the same message, for nothing. :meth:`about` lists keys."""
        with self._take_turn():
            if key not in self._waiting:
                raise Trouble(404, "question", "This question waits for no answer here. Load the page anew.")
            return {**self._answer(key, self._waiting[key], listens), "cost": "0"}

    def picture(self, gallery: str, candidates: float | None = None) -> dict[str, Any]:
        """Return the map as a picture, with what the last answer showed. Nothing is asked but for the map."""
        public = self.client.map(candidates, gallery=gallery)
        name = public.map.map_id
        with self._looking:
            if name not in self._pictures:
                self._pictures = {name: Picture(public)}
            picture, last = self._pictures[name], self._last
        known = last if last.map_id == name else Last()
        return picture.draw(dict(known.seen), known.feature, known.named_set, make_image_address)

    def _answer(self, key: str, asked: WaitingQuestion, listens: Callable[[], bool]) -> dict[str, Any]:
        """Return the answer to a question. It waits if it is paid for and nobody has heard the answer."""
        trouble: Exception | None = None
        self.purse.begin()
        try:
            found = self._send(asked.row, asked.info, asked.question, key)
            waits = not listens()
        except Exception as error:
            trouble, waits = self._judge_failure(error, waits=key in self._waiting)
        self._waiting.pop(key, None)
        if waits:
            self._waiting[key] = asked
            for old in list(self._waiting)[:-_MOST_WAITING]:
                del self._waiting[old]
        if trouble is not None:
            raise trouble
        return found

    def _send(self, row: Singles, info: GalleryInfo, question: Question, key: str) -> dict[str, Any]:
        public = self.client.map(question.candidates, gallery=info.name)
        if public.fingerprint != info.fingerprint:  # the row is of no use there, and its width need not show it
            self.galleries()
            raise describe_new_listing()
        # Decided by the gallery, never by the image.
        images = "thumbnails" in public.offers and public.map.set_size <= _MOST_IMAGES
        nearest = self.client.nearest(
            row,
            min(K, public.map.set_size),
            question.epsilon,
            question.candidates,
            gallery=info.name,
            thumbnails=images,
            key=key,
            rng=self._rng,
        )
        # The gallery may have taken a new map in between; then nothing is said by the one before.
        same = (nearest.n_sets, nearest.found.codes.shape[1]) == (public.map.n_sets, public.table.width)
        share = round(nearest.expected_share or 0.0, 4) if same else None
        if same:
            self._last = self._last.update(nearest, public, row, images=images)
        view = view_nearest(nearest, self._read_message(), self.balance(), images=images)
        return {**view, "map": public.map.map_id, "share": share}

    def _judge_failure(self, error: Exception, *, waits: bool) -> tuple[Exception, bool]:
        """Return what is told of a question that failed, and whether it waits: it is paid for, and asking can help."""
        if isinstance(error, (KeySpentError, KeyConflictError)):
            return error, False
        if isinstance(error, UnansweredError):
            return error, error.again
        if self.purse.debit is None:  # not looked at yet: what waited before waits on, unless its gallery is another
            return error, waits and not isinstance(error, Trouble)
        _LOG.error("a question failed: %s", type(error).__name__)
        return describe_spoiled(), True

    def _read_message(self) -> bytes:
        """Return the message that was sent, as the ledger stores it."""
        debit = self.purse.debit
        return b"" if debit is None or debit.message is None else debit.message

    def _find_outlook(self, public: PublicPart) -> Outlook:
        name = public.map.map_id
        with self._looking:
            if name not in self._outlooks:
                self._outlooks[name] = make_outlook(public)
                for old in list(self._outlooks)[:-8]:
                    del self._outlooks[old]
            return self._outlooks[name]

    def _prepare(self, image: bytes, name: str) -> tuple[GalleryInfo, Singles]:
        """Return a gallery and the feature of an image for it. What is sent next goes out at the end of a slot."""
        self._check_gallery(name)
        info, (row,) = self.client.prepare([image], gallery=name)
        return info, row

    def _check_gallery(self, name: str) -> None:
        if self._gallery not in (None, name):
            raise Trouble(404, "question", "There is no gallery of this name here. Load the page anew.")

    def _check_cost(self, epsilon: float) -> str:
        """Return what the account will pay, or refuse before anything is sent; the debit itself looks again."""
        found = self.purse.account.preview(ClientProtocol(epsilon).guarantee)
        if not found.allowed:
            raise make_refusal(found)
        return format_up(found.cost)

    @contextmanager
    def _take_turn(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise Trouble(409, "busy", "A question is under way. Wait for its answer, or a minute.", again=True)
        try:
            yield
        finally:
            self._lock.release()
