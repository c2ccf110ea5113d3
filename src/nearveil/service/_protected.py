"""A gallery whose records may not be shown: they vote, with noise, on sets of public images."""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from nearveil.ledger import (
    Account,
    AccountError,
    KeyConflictError,
    KeySpentError,
    Ledger,
    LedgerError,
    OverBudgetError,
)
from nearveil.release import MessageError
from nearveil.retrieval import Index, IndexStoreError, MapChanged, NotPublishedError, Query, RefusalCode, WireError
from nearveil.retrieval._protocol_server import _CODES, _refusal
from nearveil.retrieval._wire_schema import read
from nearveil.service._errors import NotOfferedError, ServiceError, SpentError, UnavailableError
from nearveil.service._galleries import OpenGallery
from nearveil.service._model import Classification, GalleryInfo
from nearveil.service._protected_account import Paid, Terms, open_terms, opened, promise_of, set_key
from nearveil.service._protected_checks import check_binding, check_counts, check_indexes, check_part, checked_classes
from nearveil.service._protected_records import PrivateVoters
from nearveil.service._protected_sets import PublicSets, all_sets
from nearveil.votes import ExhaustedError

_LOG = logging.getLogger(__name__)
_PATIENCE = 2.0  # seconds that another process has to store what it paid for; counting takes far less
_POLL = 0.02
_SHOWN = "this gallery is protected: it shows nothing of its records and only classifies"

Place = tuple[str, int]
"""The fingerprint of a map, and the number of one of its sets."""


class ProtectedGallery:
    """Classify by private records, of which nothing else is shown. Both sides are protected.

    A message names one of the sets of a public map, which was learned on public images alone. The private records that
    are nearest to the mean image of that set vote, with noise, paid from one account. What a set was answered
    is kept in the ledger and told to everybody who names the set, for nothing; so each set is paid for once, ever.
    Both promises, with proofs: ``docs/theory/two-sided.md``.

    Parameters
    ----------
    private : Index
        Records that vote, with rows that are row-exact (``Index.add(items, row_exact=True)``). The label of one is the
        first folder of its name: "benign/scan 3.png" is "benign". The index is bound to the account, and private from
        then on: maps of it are deleted, and no process serves it as an open gallery.
    public : Index
        Public images with the same features, published. None of them may be a private record.
    name : str
    classes : sequence of str
        The public list of labels, complete.
    epsilon, delta : float
        Of all answers that the gallery will ever give, together. They cannot be changed later.
    answers : int, optional
        How many sets may ever be answered; a quarter more than the newest map has, unless the account is there already:
        a crash may cost one. A new map has new sets: plan for those that you will publish.
    answers_per_client : int, optional
        How many new answers one client may cause. Answers that are there already are free.
    unit : str, default="record"
        What one record is, and so what is protected; clients are told. Give "person with all images" only where each
        person has one record. It must be the account's unit.
    ledger : Ledger, Path or str, optional
        Where the account is.
    account : Account or str
        Opened where there is none of that name.
    extractor : str, default=""
        The name of what makes the features.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from nearveil.retrieval import Item
    >>> folder = tempfile.TemporaryDirectory()
    >>> place, rng = Path(folder.name), np.random.default_rng(0)
    >>> angles = rng.uniform(0, np.pi, 300)
    >>> rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    >>> private, public = (Index.create(place / where, dimension=2, extractor="toy") for where in ("mine", "all"))
    >>> records = (Item(row, "right/scan" if row[0] > 0 else "left/scan") for row in rows[:200])
    >>> _ = private.add(records, row_exact=True)
    >>> _ = public.add(Item(r) for r in rows[200:])
    >>> _ = public.publish(4.0, 0.25, n_sets=4)
    >>> gallery = ProtectedGallery(
    ...     private, public, "scans", classes=["left", "right"], epsilon=2.0, delta=1e-6,
    ...     ledger=place / "ledger.db", account="scans",
    ... )
    >>> print(gallery.info().promise.words)
    Whoever sees the answers comes to any conclusion about whether any one record is in the database with at most 7.4
    times the probability that it would have otherwise, plus 1.0e-6.
    >>> gallery.close(); folder.cleanup()
    """

    def __init__(
        self,
        private: Index,
        public: Index,
        name: str,
        *,
        classes: Sequence[str],
        epsilon: float,
        delta: float,
        answers: int | None = None,
        answers_per_client: int | None = None,
        unit: str = "record",
        ledger: Ledger | Path | str | None = None,
        account: Account | str,
        extractor: str = "",
    ) -> None:
        known = checked_classes(classes)
        check_counts(answers=answers, answers_per_client=answers_per_client)
        self._open = OpenGallery(public, name, offers=(), extractor=extractor)
        check_indexes(private, public, known)
        self._private, self._public = private, public
        self._sets = {one.public_id: one for one in all_sets(public)}
        newest = next(iter(self._sets.values()))
        self._ledger, self._ours = opened(ledger, account)
        try:
            self._terms = open_terms(
                self._ledger,
                account,
                n_classes=len(known),
                epsilon=epsilon,
                delta=delta,
                answers=answers,
                unit=unit,
                sets=newest.count,
            )
            check_binding(private, self._terms.account)
            self._per_client, self._promise = answers_per_client, promise_of(self._terms.account)
            check_part(answers_per_client, self._terms.answers)
            self._paid = Paid(self._terms.account, known)
            self._paid.refresh()
            self._voters = PrivateVoters(private, known, self._terms.account, self._terms.noise, self._terms.answers)
            self._voters.on(newest)
        except BaseException:
            self._close_ledger()
            raise
        self._lock = threading.Lock()
        self._dead: set[tuple[Place, int]] = set()
        self._failed: set[Place] = set()
        self._given: set[str] = set()  # clients that have a quota

    @property
    def name(self) -> str:
        """Of the gallery, as clients call it."""
        return self._open.name

    @property
    def terms(self) -> Terms:
        """What its account was opened for."""
        return self._terms

    def info(self) -> GalleryInfo:
        """Return what a client may know before it asks: of the public images, and the promise."""
        return self._open.info().model_copy(update={"kind": "protected", "promise": self._promise})

    def map(self, candidates: float | None = None) -> bytes:
        """Return the frame of a map of the public images: the newest, or the newest for a fraction.

        Parameters
        ----------
        candidates : float, optional

        Returns
        -------
        bytes
        """
        return self._open.map(candidates)

    def query(self, data: bytes) -> NoReturn:
        """Refuse: candidates, codes, names and images of records are not shown."""
        del data
        raise NotOfferedError(_SHOWN)

    def original(self, number: int) -> NoReturn:
        """Refuse: originals of records are not shown."""
        del number
        raise NotOfferedError(_SHOWN)

    def classify(self, data: bytes, client: str) -> Classification | bytes:
        """Answer a message by votes: stored ones where its set was answered before, else new ones that are paid for.

        Parameters
        ----------
        data : bytes
            The frame of a query.
        client : str
            Who pays, if the answer is new.

        Returns
        -------
        Classification or bytes
            Votes; or a frame, word that the map has changed, or a refusal.

        Raises
        ------
        SpentError
            If the answer would be new, and the gallery's or the client's answers are used up.
        UnavailableError
            If an index or the ledger does not answer.
        """
        try:
            query = read(data, Query)
        except WireError as error:
            return _refusal(_CODES.get(type(error), RefusalCode.MALFORMED), error)
        sets = self._find(query.message.public_id)
        if sets is None:
            return MapChanged(self.name, self._open.info().revision).to_bytes()
        if query.extras != "none":
            return _refusal(RefusalCode.NOT_OFFERED, f"this gallery does not offer {query.extras}")
        try:
            number = sets.named(query.message)
        except MessageError as error:
            return _refusal(RefusalCode.MALFORMED, error)
        votes = dict(zip(self._paid.classes, self._votes(sets, number, client), strict=True))
        return Classification(label=max(votes, key=votes.__getitem__), votes=votes, promise=self._promise)

    def refresh(self) -> None:
        """Look whether something new was published of the public images."""
        self._open.refresh()
        known = self._sets
        try:
            found = all_sets(self._public)
        except NotPublishedError:
            found = []
        except IndexStoreError:
            raise UnavailableError("the gallery cannot be read now: ask again later") from None
        self._sets = {one.public_id: known.get(one.public_id, one) for one in found}

    def close(self) -> None:
        """Close both indexes, and the ledger if it was opened here."""
        self._open.close()
        self._private.close()
        self._close_ledger()

    def __repr__(self) -> str:
        return f"<ProtectedGallery {self.name}>"

    def _close_ledger(self) -> None:
        if self._ours and self._ledger is not None:
            self._ledger.close()

    def _find(self, public_id: str) -> PublicSets | None:
        """Return the public map that a message names. A map of the private index is none, whoever published it."""
        if public_id not in self._sets:
            self.refresh()
        return self._sets.get(public_id)

    def _votes(self, sets: PublicSets, number: int, client: str) -> tuple[float, ...]:
        place = sets.public_id, number
        found = self._paid.votes(*place)
        if found is not None:
            return found
        try:
            with self._lock:
                return self._answer(sets, place, client)
        except ServiceError:
            raise
        except Exception as error:
            reason = type(error).__name__
            if not isinstance(error, IndexStoreError | LedgerError):
                self._failed.add(place)  # it would fail again, and be paid for again
        # Outside of the handler: the error's context may hold what must not be shown.
        _LOG.warning("a protected gallery could not answer: %s", reason)
        raise UnavailableError("the gallery cannot answer now: ask again later")

    def _answer(self, sets: PublicSets, place: Place, client: str) -> tuple[float, ...]:
        """Return the votes on a set, counted and paid for if nobody has yet. Who stored first is who is shown."""
        if place in self._failed:
            raise UnavailableError("the gallery could not count these votes: its operator must see to it")
        attempt = -1
        while (found := self._stored(place)) is None:
            attempt, before = self._paid.attempts(*place), attempt
            if attempt <= before:
                raise LedgerError("an attempt that was made is not in the ledger")
            key = set_key(*place, attempt)
            try:
                self._voters.on(sets).answer_once(sets.prototypes[place[1]], key, client=self._payer(client))
            except (KeySpentError, KeyConflictError):
                continue  # another process has just taken this attempt
            except (OverBudgetError, ExhaustedError):
                spent = self._spent()
            else:
                continue
            raise SpentError(spent)
        return found

    def _stored(self, place: Place) -> tuple[float, ...] | None:
        """Return the votes that are stored for a set, after waiting for whoever may be counting them right now."""
        until = time.monotonic() + _PATIENCE
        self._paid.refresh()
        while (found := self._paid.votes(*place)) is None:
            attempt = self._paid.unfinished(*place)
            if attempt is None or (place, attempt) in self._dead:
                return None
            if time.monotonic() >= until:
                self._dead.add((place, attempt))  # whoever paid for it will not answer: it is paid for once more
                return None
            time.sleep(_POLL)
            self._paid.refresh()
        return found

    def _payer(self, client: str) -> str | None:
        """Return whose quota pays too, given when it is first needed; a quota that was given stays as it is."""
        if self._per_client is None:
            return None
        if client not in self._given:
            try:
                self._terms.account.balance(client=client)
            except AccountError:
                self._terms.account.quota(client, plan=[(self._terms.event, self._per_client)])
            self._given.add(client)
        return client

    def _spent(self) -> str:
        whose = "your" if self._terms.account.remaining() else "the gallery's"
        return f"{whose} new answers are used up; what was answered before is answered still, to everybody"
