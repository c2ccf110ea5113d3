"""Publications of a protected gallery: its records, the checks before they are used, and the account that pays."""

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nearveil.gallery import Index
from nearveil.ledger import Account
from nearveil.ledger.budget import PlanBudget
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_integer
from nearveil.privacy.noise import secure_source
from nearveil.private_knn.discriminant import plan_publications
from nearveil.private_knn.plan import VotePlan
from nearveil.private_knn.published import MOST_CLASSES
from nearveil.wire.schema import GuaranteeInfo

_CHUNK = 1024  # rows
_SAME_IMAGE = 1e-5  # two features of one image differ by less, in each number
_MAX_CLASS_LENGTH = 200
_KEY = re.compile(r"model:([0-9]{1,9})")
_MIN_COST = 0.99  # of the requested epsilon: a calibrated plan costs at least that
_POLL_INTERVAL = 0.02  # seconds
_VOTES_OWNER = "nearveil.service"  # owner of accounts that paid for votes on sets, in earlier versions


@dataclass(frozen=True, eq=False)
class Records:
    """Private features and labels of one moment."""

    features: NDArray[np.float32] = field(repr=False)
    labels: NDArray[np.str_] = field(repr=False)
    has_unlabelled: bool = field(repr=False)  # whether records without a class were left out

    def __repr__(self) -> str:
        return "Records(private)"


def load_records(index: Index, classes: Sequence[str]) -> Records:
    """Load all records of the classes. The label of a record is the first folder of its name."""
    # Whether a record is left out depends on that record alone, so two galleries that differ in one record still do.
    names, snapshot = frozenset(classes), index.snapshot()
    labels: dict[int, str] = {}
    for chunk in _split(len(snapshot)):
        # Lenient: an item that was deleted since the snapshot is left out.
        items = index.items(snapshot.ids[chunk], lenient=True, originals=False)
        labels |= {item.id: item.name.partition("/")[0] if "/" in item.name else "" for item in items}
    mask = np.array([labels.get(number) in names for number in snapshot.ids.tolist()], dtype=np.bool_)
    ids = snapshot.ids[mask].tolist()
    has_unlabelled = any(label not in names for label in labels.values())
    return Records(snapshot.features[mask], np.array([labels[number] for number in ids], np.str_), has_unlabelled)


def share_images(records: Records, public: Index) -> bool:
    """Return whether an image is in both indexes, judging by features."""
    for chunk in _split(len(records.features)):
        rows = records.features[chunk]
        nearest = public.features(public.search(rows, 1)[0][:, 0])
        if (np.abs(nearest - rows).max(axis=1) < _SAME_IMAGE).any():
            return True
    return False


def _split(count: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, count, _CHUNK))


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the public list of classes, sorted."""
    names = [] if isinstance(classes, str) else list(classes)
    are_valid = all(
        isinstance(name, str) and 0 < len(name) <= _MAX_CLASS_LENGTH and "/" not in name and name.isprintable()
        for name in names
    )
    if not are_valid or not 2 <= len(names) <= MOST_CLASSES or len(set(names)) != len(names):
        raise ValueError(
            f"classes must list 2 to {MOST_CLASSES} different folder names of at most {_MAX_CLASS_LENGTH} characters"
        )
    return tuple(sorted(names))


def check_indexes(private: Index, public: Index) -> None:
    """Refuse a pair that cannot keep the guarantee."""
    if private._database.url == public._database.url:
        raise ValueError("private and public must be different indexes: public images are not protected")
    public.assert_open()
    private.assert_row_exact()
    if (private.extractor, private.dimension) != (public.extractor, public.dimension):
        raise ValueError("private and public must have the features of one extractor")


def check_records(records: Records, public: Index) -> None:
    """Refuse records that cannot be protected, before the debit and without naming a record."""
    if not len(public):
        raise ValueError("public: the index is empty, and the model needs public images")
    if records.has_unlabelled:
        raise ValueError(
            "private has a record with a first folder that is not in classes: the list must be complete, and public"
        )
    if not len(records.labels):
        raise ValueError("private has no records to publish")
    if share_images(records, public):
        raise ValueError(
            "an image is in both indexes, private and public. The public copy is not protected: delete it from one"
        )


def check_binding(private: Index, account: Account) -> None:
    """Bind records to their account, and keep them private from then on, in every process."""
    # Records that another account has paid for are refused: each guarantee would ignore the other.
    opening = account.history()[0].hash
    if private.bind(opening) != opening:
        raise ValueError(
            "ledger, account: a model of this index was paid for from another account, and both guarantees would add "
            "up. Use that account; for a second guarantee, index the records again"
        )


@dataclass(frozen=True)
class Terms:
    """The fixed terms of a gallery's account. Epsilon and delta are of all publications together."""

    epsilon: float
    delta: float
    publications: int
    unit: str  # what one record is

    def __post_init__(self) -> None:
        check_integer(self.publications, "publications", 1)

    def check(self, account: Account) -> None:
        """Raise ValueError if an account was opened for other terms."""
        if account.owner == _VOTES_OWNER:
            raise ValueError(
                "account: an earlier version opened it for records that vote on sets, and this version publishes a "
                "model. Earlier answers cannot be taken back. For a model, use a new account, and index the records "
                "again: both guarantees then apply to the records, and add up"
            )
        budget = account._budget
        if not isinstance(budget, PlanBudget) or (account.protects, account.relation) != ("database", "add-remove"):
            raise ValueError("account must have been opened for a protected gallery, with a plan: use another name")
        if not _MIN_COST * self.epsilon <= account.epsilon <= self.epsilon / _MIN_COST or account.delta != self.delta:
            raise ValueError(
                f"epsilon and delta must be those of the account, {account.epsilon:.4g} and {account.delta:.4g}: they "
                "never change"
            )
        if self.unit != account.unit:
            raise ValueError(
                f"unit must be that of the account, {account.unit!r}: it defines one record, for clients too, and "
                "never changes"
            )
        if budget.limits != (self.publications,):
            raise ValueError(f"publications must be those of the account, {budget.limits[0]}: they never change")

    def plan(self) -> tuple[VotePlan, Guarantee]:
        """Return the plan of all publications and its guarantee; ValueError if no plan keeps the terms."""
        plan = plan_publications(self.epsilon, self.delta, self.publications)
        return plan, plan.guarantee(self.delta, unit=self.unit, source=secure_source())


@dataclass(frozen=True)
class Publication:
    """A published model: paid for, stored, and public.

    Attributes
    ----------
    number : int
        From 1.
    model : bytes
    """

    number: int
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

    @property
    def next_key(self) -> str:
        """The key of the next debit."""
        return f"model:{self.paid}"

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
