"""Protected galleries: private records that are never shown, and the published models that an account pays for."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from nearveil.cluster import cut_rows
from nearveil.errors import NearveilError
from nearveil.features.backbones import name_extractor
from nearveil.gallery import Index
from nearveil.ledger import Account, AccountError, KeySpentError, Ledger, LedgerError, OverBudgetError
from nearveil.ledger.budget import PlanBudget
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_integer
from nearveil.privacy.noise import secure_source
from nearveil.private_knn import PrivateDiscriminant
from nearveil.private_knn.discriminant import Forecast, plan_publications
from nearveil.private_knn.plan import VotePlan
from nearveil.private_knn.published import MOST_CLASSES
from nearveil.private_knn.spending import find_account
from nearveil.server.errors import ServiceError
from nearveil.server.galleries import Gallery
from nearveil.wire.schema import GalleryInfo, GuaranteeInfo

_CHUNK = 1024  # rows
_SAME_IMAGE = 1e-5  # two features of one image differ by less, in each number
_MAX_CLASS_LENGTH = 200
_KEY = re.compile(r"model:([0-9]{1,9})")
_MIN_COST = 0.99  # of the requested epsilon: a calibrated plan costs at least that
_POLL_INTERVAL = 0.02  # seconds
_VOTES_OWNER = "nearveil.service"  # owner of accounts that paid for votes on sets, in earlier versions
_STORE_TIMEOUT = 30.0  # seconds that another process has to store the model that it paid for
_NOISE = (
    "the model would be noise alone: the noise hides the records of each class. Collect more records, open the gallery "
    "with a larger epsilon or fewer publications, or allow noise (allow_noise=True, --allow-noise)"
)
_LOST = "another process paid for this publication and stored nothing: publish again, which takes another publication"


@dataclass(frozen=True, eq=False)
class Records:
    """Private features and labels of one moment."""

    features: NDArray[np.float32] = field(repr=False)
    labels: NDArray[np.str_] = field(repr=False)
    has_unlabelled: bool = field(repr=False)  # whether records without a class were left out
    groups: NDArray[np.str_] | None = field(default=None, repr=False)  # of each record

    def __repr__(self) -> str:
        return "Records(private)"


def load_records(index: Index, classes: Sequence[str], group: str | None = None) -> Records:
    """Load all records of the classes. The label of a record is the first folder of its name.

    Its group is its metadata value of the key `group`; records without one are a group each.
    """
    # Whether a record is left out depends on that record alone, so two galleries that differ in one record still do.
    names, snapshot = frozenset(classes), index.snapshot()
    labels: dict[int, str] = {}
    groups: dict[int, str] = {}
    for chunk in cut_rows(len(snapshot), _CHUNK):
        # Lenient: an item that was deleted since the snapshot is left out.
        items = index.items(snapshot.ids[chunk], lenient=True, originals=False)
        labels |= {item.id: item.name.partition("/")[0] if "/" in item.name else "" for item in items}
        groups |= {item.id: json.dumps(item.metadata.get(group or "", {"id": item.id})) for item in items}
    mask = np.array([labels.get(number) in names for number in snapshot.ids.tolist()], dtype=np.bool_)
    ids = snapshot.ids[mask].tolist()
    has_unlabelled = any(label not in names for label in labels.values())
    names_of = None if group is None else np.array([groups[number] for number in ids], np.str_)
    label_rows = np.array([labels[number] for number in ids], np.str_)
    return Records(snapshot.features[mask], label_rows, has_unlabelled, names_of)


def share_images(records: Records, public: Index) -> bool:
    """Return whether an image is in both indexes, judging by features."""
    for chunk in cut_rows(len(records.features), _CHUNK):
        rows = records.features[chunk]
        nearest = public.features(public.search(rows, 1)[0][:, 0])
        if (np.abs(nearest - rows).max(axis=1) < _SAME_IMAGE).any():
            return True
    return False


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the public list of classes, sorted."""
    names = [] if isinstance(classes, str) else list(classes)
    are_valid = all(
        isinstance(name, str) and 0 < len(name) <= _MAX_CLASS_LENGTH and "/" not in name and name.isprintable()
        for name in names
    )
    if not are_valid or not 2 <= len(names) <= MOST_CLASSES or len(set(names)) != len(names):
        raise ValueError(f"classes must be 2 to {MOST_CLASSES} different names of 1 to {_MAX_CLASS_LENGTH} characters")
    return tuple(sorted(names))


def check_indexes(private: Index, public: Index) -> None:
    """Refuse a pair that cannot keep the guarantee."""
    if private._database.url == public._database.url:
        raise ValueError("private and public must be different indexes: public items are not protected")
    public.assert_open()
    private.assert_row_exact()
    if (private.extractor, private.dimension) != (public.extractor, public.dimension):
        raise ValueError("private and public must have the features of one extractor")


def check_records(records: Records, public: Index) -> None:
    """Refuse records that cannot be protected, before the debit and without naming a record."""
    if not len(public):
        raise ValueError("public: the index is empty, and the model needs public items")
    if records.has_unlabelled:
        raise ValueError("private has a record of no class: classes must list all first folders, and be public")
    if not len(records.labels):
        raise ValueError("private has no records to publish")
    if share_images(records, public):
        raise ValueError("an item is in both indexes: delete it from one. A public copy is not protected")


def check_binding(private: Index, account: Account) -> None:
    """Bind records to their account, and keep them private from then on, in every process."""
    # Records that another account has paid for are refused: each guarantee would ignore the other.
    opening = account.history()[0].hash
    if private.bind(opening) != opening:
        raise ValueError(
            "ledger, account: a model of this index was paid for from another account, and both guarantees would add "
            "up. Use that account; for a second guarantee, index the records again"
        )


def check_terms(account: Account, model: PrivateDiscriminant) -> None:
    """Raise ValueError if an account was opened for other terms than those of the models."""
    if account.owner == _VOTES_OWNER:
        raise ValueError(
            "account: an earlier version opened it for records that vote on sets, and this version publishes a "
            "model. Earlier answers cannot be taken back. For a model, use a new account, and index the records "
            "again: both guarantees then apply to the records, and add up"
        )
    budget = account._budget
    if not isinstance(budget, PlanBudget) or (account.protects, account.relation) != ("database", "add-remove"):
        raise ValueError("account must have been opened for a protected gallery, with a plan: use another name")
    epsilon = float(model.epsilon or 0)
    if not _MIN_COST * epsilon <= account.epsilon <= epsilon / _MIN_COST or account.delta != model.delta:
        terms = f"{account.epsilon:.4g} and {account.delta:.4g}"
        raise ValueError(f"epsilon and delta must be those of the account, {terms}: they never change")
    if model.unit != account.unit:
        raise ValueError(f"unit must be that of the account, {account.unit!r}, which never changes")
    if budget.limits != (model.publications,):
        raise ValueError(f"publications must be those of the account, {budget.limits[0]}: they never change")


def make_plan(model: PrivateDiscriminant) -> tuple[VotePlan, Guarantee]:
    """Return the plan of all models and its guarantee; ValueError if no plan keeps the terms."""
    assert model.epsilon is not None
    plan = plan_publications(model.epsilon, model.delta, model.publications)
    return plan, plan.guarantee(model.delta, unit=model.unit, source=secure_source())


@dataclass(frozen=True)
class Publication:
    """A published model: paid for, stored, and public."""

    number: int  #: from 1
    model: bytes = field(repr=False)

    @cached_property
    def version(self) -> str:
        """The SHA-256 of the model."""
        return hashlib.sha256(self.model).hexdigest()


@dataclass(eq=False)
class Publications:
    """The models that an account has paid for and stored. One key is one debit and one model."""

    account: Account | None = None  # None until it is opened
    paid: int = 0
    _stored: dict[int, Publication] = field(default_factory=dict, repr=False)
    _last_sequence: int = -1

    @property
    def newest(self) -> Publication | None:
        """The newest stored model."""
        return self._stored[max(self._stored)] if self._stored else None

    @cached_property
    def promise(self) -> GuaranteeInfo:
        """The guarantee of everything that the account ever pays for."""
        assert self.account is not None
        guarantee = self.account.guarantee
        facts = {name: getattr(guarantee, name) for name in ("epsilon", "delta", "protects", "unit", "sound")}
        return GuaranteeInfo(**facts, words=str(guarantee))

    def refresh(self) -> None:
        """Load new entries of the ledger, of any process. One caller at a time."""
        if self.account is None or self.account.receipt().sequence == self._last_sequence:
            return
        for entry in self.account.history():
            if entry.sequence <= self._last_sequence:
                continue
            self._last_sequence = entry.sequence
            match = _KEY.fullmatch(entry.key or "")
            if match is None:
                continue
            number = int(match[1])
            if entry.kind == "debit":
                self.paid = max(self.paid, number + 1)
            elif entry.message is not None:
                self._stored[number] = Publication(number + 1, entry.message)

    def wait_for_others(self, timeout: float) -> Publication | None:
        """Return the model that another process is publishing, when it is stored; None if there is none in time."""
        end = time.monotonic() + timeout
        self.refresh()
        if not self.paid or self.paid - 1 in self._stored:
            return None
        while time.monotonic() < end:
            time.sleep(_POLL_INTERVAL)
            self.refresh()
            if self.paid - 1 in self._stored:
                return self.newest
        return None


class PublicationError(NearveilError, ValueError):
    """A model is not published: it would be noise alone, or all publications are used up. Nothing was paid."""


class ProtectedGallery(Gallery):
    """Publish a model of private records, and show nothing else of them. Clients classify locally.

    The model is a linear discriminant with noise. One account pays for it before it is computed; the ledger stores it,
    and all clients get the same bytes. Changed records change nothing until :meth:`publish` is called again. Serving
    reads no record. Both sides, with proofs: ``docs/theory/two-sided.md``.

    Parameters
    ----------
    private : Index
        Records, with rows that are row-exact (``Index.add(items, row_exact=True)``). The label of a record is the first
        folder of its name: "benign/scan 3.png" is "benign". :meth:`publish` binds the index to the account; it is
        private from then on: maps of it are deleted, and no process serves it as an open gallery.
    public : Index
        Public images with the same features, without labels. None of them may be a private record.
    name : str
    classes : sequence of str
        The public list of labels, complete.
    epsilon, delta, publications : float, float, int
        Of all models that the gallery will ever publish, together, and how many that may be. They cannot be changed
        later. A process that is killed while it publishes uses one up.
    unit : str, default="record"
        The meaning of one record, the unit of protection and of the account; clients see it. Use "person with all
        images" only if each person has one record, or with `group`.
    group : str, optional
        A key of the records' metadata, such as "person": records of equal values are protected together, and add as
        much to the model as one record.
    ledger, account : Ledger, Path or str, optional; Account or str
        :meth:`publish` opens the account in the ledger if there is none of that name.
    extractor : str, default=""
        Display name of the feature extractor. Built-in extractors need none.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from nearveil.gallery import Item
    >>> folder = tempfile.TemporaryDirectory()
    >>> path, rng = Path(folder.name), np.random.default_rng(0)
    >>> angles = rng.uniform(0, np.pi, 300)
    >>> rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    >>> private, public = (Index.create(path / name, dimension=2, extractor="toy") for name in ("mine", "all"))
    >>> records = (Item(row, "right/scan" if row[0] > 0 else "left/scan") for row in rows[:200])
    >>> _ = private.add(records, row_exact=True)
    >>> _ = public.add(Item(row) for row in rows[200:])
    >>> gallery = ProtectedGallery(
    ...     private, public, "scans", classes=["left", "right"], epsilon=2.0, delta=1e-6,
    ...     ledger=path / "ledger.db", account="scans",
    ... )
    >>> bool(gallery.forecast().accuracy > 0.9)  # private: do not publish it
    True
    >>> gallery.publish().number
    1
    >>> print(gallery.info().promise.words)
    Seeing the answers makes any conclusion about whether any one record is in the database at most 7.4 times as
    likely as it would be otherwise, plus 1.0e-6.
    >>> gallery.close(); folder.cleanup()
    """

    _refusal = "This gallery is protected: it shows nothing of its records but its model."

    def __init__(
        self,
        private: Index,
        public: Index,
        name: str,
        *,
        classes: Sequence[str],
        epsilon: float,
        delta: float,
        publications: int = 1,
        unit: str = "record",
        group: str | None = None,
        ledger: Ledger | Path | str | None = None,
        account: Account | str,
        extractor: str = "",
    ) -> None:
        super().__init__(name)
        self._classes = check_classes(classes)
        check_integer(publications, "publications", 1)
        # Its epsilon and delta are of all publications together, and fixed by the account.
        unit = f"{group} with all records" if group is not None and unit == "record" else unit
        self._model = PrivateDiscriminant(epsilon, delta, classes=self._classes, unit=unit, publications=publications)
        self._group = group
        check_indexes(private, public)
        self._private, self._public = private, public
        self._extractor = extractor or name_extractor(public.extractor)
        self._payer, self._lock = account, threading.Lock()
        self._publications = Publications()
        if ledger is not None and isinstance(account, Account):
            raise ValueError("account must be the name of an account in the ledger")
        if ledger is None and isinstance(account, str):
            raise ValueError("ledger must be given: account is only a name")
        with ExitStack() as stack:
            self._ledger = stack.enter_context(Ledger(ledger)) if isinstance(ledger, (Path, str)) else ledger
            self._refresh()
            if self.account is None:
                make_plan(self._model)  # raises if the terms cannot be kept
            self._resources = stack.pop_all()  # the ledger, if it was opened here

    @property
    def is_published(self) -> bool:
        """Whether there was a model at the last `refresh`."""
        return self._publications.newest is not None

    @property
    def account(self) -> Account | None:
        """The account that pays; None before the first publication."""
        return self._publications.account

    @property
    def publications_left(self) -> int:
        """How many models may still be published."""
        if self.account is None:
            return self._model.publications
        return sum(count for _, count in self.account.remaining())

    def info(self) -> GalleryInfo:
        """Return the public information about the gallery. Except for the model, it does not depend on the records."""
        newest = self._publications.newest
        return GalleryInfo(
            name=self.name,
            kind="protected",
            candidates=(),
            offers=(),
            extractor=self._extractor,
            fingerprint=self._public.extractor,
            dimension=self._public.dimension,
            revision=0 if newest is None else newest.number,
            version="" if newest is None else newest.version,
            promise=None if self.account is None else self._publications.promise,
        )

    def model(self) -> bytes:
        """Return the newest model, for ``PublicDiscriminant.from_bytes``: the same bytes for all clients."""
        newest = self._publications.newest
        if newest is None:
            raise ServiceError("unknown", "This gallery has published no model yet.")
        return newest.model

    def forecast(self) -> Forecast:
        """Estimate the accuracy of a model that would be published now. For the owner of the records only.

        Nothing is paid or released. The forecast is computed from the records without a guarantee: never publish it,
        and keep it out of logs.
        """
        records = self._load_records()
        public = self._public.snapshot().features
        return self._model.forecast(records.features, records.labels, public, groups=records.groups)

    def publish(self, *, allow_noise: bool = False) -> Publication:
        """Publish a model of the current records. The account pays first; then the ledger stores the model.

        If another process is publishing now, its model is awaited and returned, and nothing is paid. With `allow_noise`
        a model is published even if it is expected to be noise alone.

        Raises
        ------
        PublicationError
            If the model would be noise alone, or all publications are used up.
        ValueError
            If the records cannot be protected: one has no class, or is a public image, or is bound to another account.
        """
        with self._lock:
            self._refresh()
            if other := self._publications.wait_for_others(_STORE_TIMEOUT):
                return other
            key = f"model:{self._publications.paid}"
            records, public = self._load_records(), self._public.snapshot().features
            private: Any = {"X": records.features, "y": records.labels, "groups": records.groups}
            forecast = self._model.forecast(**private, public=public)
            if forecast.is_noise and not allow_noise:
                raise PublicationError(_NOISE)
            plan, guarantee = make_plan(self._model)
            account = find_account(self._ledger, self._payer, plan, guarantee)
            assert account is not None
            check_binding(self._private, account)
            self._refresh()
            try:
                with account.spend(guarantee.part(plan.parts["answered"]), key) as debit:
                    if not debit.repeated:
                        model = clone(self._model).fit(**private, public=public).export()
                        debit.store(model.to_bytes())
            except OverBudgetError:
                raise PublicationError(
                    f"publications are used up: the account has paid for all {self._model.publications} that it was "
                    "opened for, and never pays for more. The newest model stays available"
                ) from None
            except KeySpentError:
                if self._publications.wait_for_others(_STORE_TIMEOUT) is None:
                    raise PublicationError(_LOST) from None
            self._publications.refresh()
            assert self._publications.newest is not None
            return self._publications.newest

    def refresh(self) -> None:
        """Load the newest model."""
        try:
            with self._lock:
                self._refresh()
        except LedgerError:
            raise ServiceError("unavailable", "The ledger cannot be read now. Try again later.") from None

    def close(self) -> None:
        """Close both indexes, and the ledger if it was opened here."""
        self._public.close()
        self._private.close()
        self._resources.close()

    def __repr__(self) -> str:
        return f"<ProtectedGallery {self.name}>"

    def _refresh(self) -> None:
        """Look up the account, if it was opened, and load the models that it has paid for."""
        account = self._payer
        if self.account is None and isinstance(account, str) and self._ledger is not None:
            with suppress(AccountError):  # :meth:`publish` opens it
                account = self._ledger.account(account)
        if self.account is None and isinstance(account, Account):
            check_terms(account, self._model)
            check_binding(self._private, account)
            self._publications.account = account
        self._publications.refresh()

    def _load_records(self) -> Records:
        """Load the records; ValueError if they cannot be protected."""
        records = load_records(self._private, self._classes, self._group)
        check_records(records, self._public)
        return records
