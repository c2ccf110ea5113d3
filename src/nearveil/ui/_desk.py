"""What the page can ask for. The private image is held in memory while its question is asked, and its feature after."""

import hashlib
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nearveil.features import load_image
from nearveil.ledger import Ledger, new_key
from nearveil.ledger._amounts import shown_up
from nearveil.ledger._figures import refusal
from nearveil.privacy._guarantee import factor
from nearveil.privacy.noise import Source
from nearveil.release._channel import RandomizedResponse, checked_epsilon
from nearveil.retrieval._protocol_client import ClientProtocol
from nearveil.retrieval._wire_public import PublicPart
from nearveil.service import Classified, Client, GalleryInfo, Nearest, UnansweredError
from nearveil.service._dummies import _unpacked
from nearveil.ui._budget import balance_of, previewed
from nearveil.ui._errors import Trouble
from nearveil.ui._outlook import EPSILONS, K, Outlook, Singles, outlook, share_around
from nearveil.ui._picture import Candidate, Picture, placed
from nearveil.ui._purse import Purse

MOST_SHOWN = 240  # candidates in the server's pane
_MOST_IMAGES = 4000  # candidates that come with thumbnails
_MOST_SEEN = 2000  # candidates that the gallery page keeps
_MOST_PENDING = 16  # questions that are paid for and wait
_HEX = 24  # bytes of a message at either end


@dataclass(frozen=True)
class Question:
    """What is asked, besides the image.

    Attributes
    ----------
    epsilon : float
    gallery : str
    candidates : float or None
        None for a protected gallery, which has no candidates.
    hide : bool
        Whether the message goes among those of the dummies.
    """

    epsilon: float
    gallery: str
    candidates: float | None = None
    hide: bool = False


@dataclass
class Last:
    """The last answer: what the gallery page draws.

    Attributes
    ----------
    feature : ndarray of shape (d,)
        Private.
    sets : tuple of int
    seen : dict of int to Candidate
    map_id : str
        Of the map that all this is about.
    """

    feature: Singles | None = field(default=None, repr=False)
    sets: tuple[int, ...] = ()
    seen: dict[int, Candidate] = field(default_factory=dict, repr=False)
    map_id: str = ""


class Desk:
    """Asks for the page, one question at a time.

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
    dummies : sequence of Path
        Public images to hide among.
    rng : Source, optional
        Of messages; for tests. The operating system's randomness otherwise.
    keys : callable, optional
        Names questions; random by default.
    """

    def __init__(
        self,
        client: Client,
        purse: Purse,
        ledger: Ledger,
        where: str,
        *,
        gallery: str | None = None,
        dummies: Sequence[Path] = (),
        rng: Source | None = None,
        keys: Callable[[], str] = new_key,
    ) -> None:
        self.client, self.purse, self.ledger, self.where = client, purse, ledger, where
        self._gallery, self._dummies, self._rng, self._keys = gallery, tuple(dummies), rng, keys
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._infos: dict[str, GalleryInfo] = {}
        self._outlooks: dict[str, Outlook] = {}
        self._pictures: dict[str, Picture] = {}
        self._pending: dict[tuple[bytes, Question], str] = {}
        self._rows: dict[str, list[Singles]] = {}
        self._last = Last()

    def galleries(self) -> dict[str, Any]:
        """Return what there is to ask, and who pays."""
        infos = [one for one in self.client.galleries() if self._gallery in (None, one.name)]
        if not infos:
            raise Trouble(404, "question", "There is no gallery here that may be asked.")
        self._infos = {one.name: one for one in infos}
        return {
            "where": self.where,
            "galleries": [
                {
                    "name": one.name,
                    "kind": one.kind,
                    "candidates": sorted(set(one.candidates)),
                    "newest": one.candidates[0] if one.candidates else None,
                    "extractor": one.extractor,
                    "promise": None if one.promise is None else one.promise.words,
                }
                for one in infos
            ],
            "balance": self.balance(),
            "dummies": len(self._dummies),
        }

    def balance(self) -> dict[str, Any]:
        """Return what is left of the account that pays."""
        return balance_of(self.purse.account)

    def map(self, gallery: str, candidates: float | None) -> dict[str, Any]:
        """Return what the public map of a gallery says, and what can be expected of it."""
        public = self.client.map(candidates, gallery=gallery)
        found = self._outlook(public)
        return {
            "gallery": gallery,
            "candidates": public.candidates,
            "items": public.map.n_items,
            "set_size": public.map.set_size,
            "n_sets": public.map.n_sets,
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
        promise = ClientProtocol(checked_epsilon(epsilon)).guarantee
        return {**previewed(self.purse.account, promise), "promise": str(promise)}

    def ask(self, image: bytes, question: Question) -> dict[str, Any]:
        """Ask. A question that failed after it was paid for is asked again with its key, for nothing.

        Parameters
        ----------
        image : bytes
            Of a file. Private.
        question : Question

        Returns
        -------
        dict
            All that the page shows.
        """
        checked_epsilon(question.epsilon)
        with self._alone():
            # Decoded, and made a feature, before anything is sent: how long that takes shows nowhere.
            info = self._info(question.gallery)
            row = self.client._asker.features.rows([load_image(image)], info)[0]
            mark = hashlib.sha256(image).digest(), question
            key = self._pending.get(mark)
            if key is None:
                self._check_budget(question.epsilon)
                key = self._keys()
            self.purse.debit = None
            try:
                found = self._asked(row, info, question, key)
            except UnansweredError as error:
                if error.again:
                    self._wait_with(mark, key)
                else:
                    self._pending.pop(mark, None)
                raise
            self._pending.pop(mark, None)
            return found

    def picture(self, gallery: str, candidates: float | None) -> dict[str, Any]:
        """Return the map as a picture, with what the last answer showed. Nothing is asked but for the map."""
        public = self.client.map(candidates, gallery=gallery)
        name = public.map.map_id
        with self._looking:
            if name not in self._pictures:
                self._pictures = {name: Picture(public)}
            picture, last = self._pictures[name], self._last
        known = last if last.map_id == name else Last()
        return picture.drawn(dict(known.seen), known.feature, known.sets, shown_image)

    def _asked(self, row: Singles, info: GalleryInfo, question: Question, key: str) -> dict[str, Any]:
        public = self.client.map(question.candidates, gallery=info.name)
        if info.kind == "protected":
            classified = self.client.classify(row, question.epsilon, gallery=info.name, key=key, rng=self._rng)
            return self._classified(classified, public)
        # Decided by the gallery, never by the image.
        images = "thumbnails" in public.offers and public.map.set_size <= _MOST_IMAGES
        nearest = self.client.nearest(
            row,
            min(K, public.map.set_size),
            question.epsilon,
            question.candidates,
            gallery=info.name,
            thumbnails=images,
            dummies=self._hiding(info) if question.hide else (),
            key=key,
            rng=self._rng,
        )
        # The gallery may have taken a new map in between; then nothing is said by the one before.
        same = (nearest.n_sets, nearest.found.codes.shape[1]) == (public.map.n_sets, public.table.width)
        if same:
            self._remember(nearest, public, row, images=images)
        share = round(share_around(public, row, nearest.sets), 4) if same else None
        return {**self._found(nearest, images=images), "share": share}

    def _found(self, nearest: Nearest, *, images: bool) -> dict[str, Any]:
        answer = nearest.found.answer
        pictures = answer.images if images else ()
        epsilon = nearest.guarantee.epsilon
        return {
            "kind": "nearest",
            "saw": {
                **self._message(nearest.sets, nearest.n_sets),
                "candidates": [
                    {
                        "id": int(number),
                        "name": nearest.names.get(int(number), ""),
                        "image": shown_image(pictures[place]) if images else "",
                    }
                    for place, number in enumerate(answer.ids[:MOST_SHOWN])  # by id: the same for every image
                ],
                "total": nearest.candidates,
                "bytes_sent": nearest.bytes_sent,
                "bytes_received": nearest.bytes_received,
            },
            "got": [
                {
                    "id": match.id,
                    "name": match.name,
                    "similarity": round(match.similarity, 4),
                    "image": shown_image(match.image or b""),
                }
                for match in nearest.matches
            ],
            **self._paid(epsilon, str(nearest.guarantee), nearest.n_sets, repeated=nearest.repeated),
        }

    def _classified(self, found: Classified, public: PublicPart) -> dict[str, Any]:
        sets = tuple(int(message["sets"][0]) for message in self._messages())
        promise = found.query_guarantee
        return {
            "kind": "classified",
            "saw": {**self._message(sets, public.map.n_sets), "candidates": [], "total": 0},
            "label": found.label,
            "votes": sorted(found.votes.items(), key=lambda one: -one[1]),
            "gallery_promise": found.gallery_promise.words,
            **self._paid(promise.epsilon, str(promise), public.map.n_sets, repeated=found.repeated),
        }

    def _paid(self, epsilon: float, promise: str, n_sets: int, *, repeated: bool) -> dict[str, Any]:
        left = self.balance()
        return {
            "epsilon": epsilon,
            "promise": promise,
            "odds": factor(epsilon) if epsilon < 14 else "more than a million",
            "right": round(RandomizedResponse(epsilon, n_sets).hit, 4),
            "cost": "0" if repeated else shown_up(epsilon),
            "repeated": repeated,
            "balance": left,
        }

    def _message(self, sets: tuple[int, ...], n_sets: int) -> dict[str, Any]:
        sent = [message.to_bytes() for message in self._messages()]
        return {
            "messages": [{"bytes": len(one), "hex": shortened(one)} for one in sent],
            "sets": list(sets),
            "n_sets": n_sets,
        }

    def _messages(self) -> Sequence[Any]:
        debit = self.purse.debit
        return () if debit is None or debit.message is None else _unpacked(debit.message)

    def _remember(self, nearest: Nearest, public: PublicPart, row: Singles, *, images: bool) -> None:
        answer = nearest.found.answer
        seen = dict(self._last.seen) if self._last.map_id == public.map.map_id else {}
        count = min(len(answer.ids), _MOST_SEEN)
        where = placed(public, answer.codes[:count])
        for place, number in enumerate(answer.ids[:count].tolist()):
            before = seen.pop(number, None)
            sets = frozenset(nearest.sets) | (before.sets if before else frozenset())
            image = answer.images[place] if images else b""
            seen[number] = Candidate(nearest.names.get(number, ""), image, where[place], sets)
        for number in list(seen)[:-_MOST_SEEN]:
            del seen[number]
        self._last = Last(np.asarray(row, np.float32), nearest.sets, seen, public.map.map_id)

    def _outlook(self, public: PublicPart) -> Outlook:
        name = public.map.map_id
        with self._looking:
            if name not in self._outlooks:
                self._outlooks[name] = outlook(public)
                for old in list(self._outlooks)[:-8]:
                    del self._outlooks[old]
            return self._outlooks[name]

    def _info(self, name: str) -> GalleryInfo:
        if name not in self._infos:
            self.galleries()
        if name not in self._infos:
            raise Trouble(404, "question", "There is no gallery of this name here. Load the page anew.")
        return self._infos[name]

    def _check_budget(self, epsilon: float) -> None:
        """Refuse what the account cannot pay before anything is sent; the debit itself looks again."""
        found = self.purse.account.preview(ClientProtocol(epsilon).guarantee)
        if not found.allowed:
            raise refusal(found)

    def _hiding(self, info: GalleryInfo) -> list[Singles]:
        """Return the features of the dummies, made once."""
        if info.fingerprint not in self._rows:
            self._rows[info.fingerprint] = list(self.client._asker.features.rows(self._dummies, info))
        return self._rows[info.fingerprint]

    def _wait_with(self, mark: tuple[bytes, Question], key: str) -> None:
        self._pending[mark] = key
        for old in list(self._pending)[:-_MOST_PENDING]:
            del self._pending[old]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise Trouble(409, "busy", "A question is under way. Wait for its answer, or a minute.", again=True)
        try:
            yield
        finally:
            self._lock.release()


def shown_image(content: bytes) -> str:
    """Return a thumbnail as an address that needs no request; empty if there is none."""
    return f"data:image/webp;base64,{b64encode(content).decode()}" if content else ""


def shortened(content: bytes) -> str:
    """Return bytes in hexadecimal, their middle left out.

    Examples
    --------
    >>> shortened(bytes(60))[-12:], shortened(b"NVM")
    ('00 00 00 00', '4e 56 4d')
    """
    if len(content) <= 2 * _HEX:
        return content.hex(" ")
    return f"{content[:_HEX].hex(' ')} … {content[-_HEX:].hex(' ')}"
