"""Checks of voting estimators in normal use: predictions, caps, accounts and copies must follow the plan."""

import copy
import math
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
from dp_accounting import DpEvent
from sklearn.base import clone

from nearveil.audit._experiment import CheckRun, Floats, LawTest, make_check, make_frozen_check
from nearveil.ledger import Ledger, OverBudgetError
from nearveil.privacy.accounting import PldAccountant
from nearveil.privacy.noise import Source
from nearveil.private_knn import ExhaustedError
from nearveil.private_knn.plan import VotePlan
from studies.audits.readers import AnswerRows, VoteReader, count_queries, make_twin

_PREDICTIONS = 2_000  # of either database
_SMALL_CAPS = {"answered": 12, "screened": 16}  # of estimators that the checks exhaust
_CLOSE = 0.995  # relative, of a cost: accountants round up on different grids
_LARGE_EPSILON, _LARGE_SCREENED_EPSILON = 40.0, 20.0  # of an account that can pay for all copies
_LARGE_DELTA = 0.1
ACCOUNT, LEDGER = "audit", "audit.db"


def make_vote_checks(reader: VoteReader) -> tuple[CheckRun, ...]:
    """Return the checks of a voting estimator's conduct."""
    checks = {
        "the guarantee's price": _check_price,
        "caps": _check_caps,
        "the account": _check_account,
        "copies": _check_copies,
    }
    return (
        make_check("predict", partial(_check_predict, reader)),
        *(make_check(name, lambda *_, find=find: find(reader)) for name, find in checks.items()),
        make_frozen_check(_fit(reader, clone(reader.voter))),
    )


def _check_predict(reader: VoteReader, source: Source, alpha: float) -> str | None:
    """Test the results of `predict` by the stated law of the votes."""
    if not reader.has_exact_law:
        return None
    test = LawTest(reader.state_prediction_law())
    for pair in reader.pairs:
        for which, records in (("first", pair.first), ("second", pair.second)):
            voter = make_twin(reader, source).fit(records.X, records.y)
            predictions = voter.predict(np.tile(reader.query, (_PREDICTIONS, 1)))
            test.add(f"{pair.name} ({which} input)", predictions, records)
    return test.find_misfit(alpha)


def _check_price(reader: VoteReader) -> str | None:
    """Compare the cost of the plan with the epsilon of the guarantee."""
    stated = reader.guarantee
    cost = _compute_cost(reader, reader.plan, reader.plan.caps, stated.delta)
    if stated.epsilon >= _CLOSE * cost:
        return None
    return f"the guarantee states epsilon {stated.epsilon:.4g} for a cost of {cost:.4g}"


def _on_small_estimators(check: Callable[[VoteReader, Any], str | None]) -> Callable[[VoteReader], str | None]:
    """Run a check on each small estimator of a reader, up to the first problem."""
    return lambda reader: next(filter(None, (check(reader, voter) for voter in _make_small(reader))), None)


@_on_small_estimators
def _check_caps(reader: VoteReader, voter: Any) -> str | None:
    """Ask for more than the plan allows, in small batches and at once."""
    session = VotingSession(reader, _fit(reader, voter).plan_)
    for count in (1, 2, session.queries + 3, 1):
        session.ask(voter, count)
    return session.complaint


@_on_small_estimators
def _check_copies(reader: VoteReader, voter: Any) -> str | None:
    """Ask an estimator, its copies and its pickles, without an account and with one that could pay for all."""
    alone = VotingSession(reader, _fit(reader, voter).plan_)
    alone.ask(voter, 1)
    for twin in (copy.copy(voter), copy.deepcopy(voter), pickle.loads(pickle.dumps(voter))):  # noqa: S301
        alone.ask(twin, alone.queries)
    with open_ledger() as ledger:
        account = ledger.open_account(
            ACCOUNT,
            owner=ACCOUNT,
            protects="database",
            unit=voter.guarantee.unit,
            relation="add-remove",
            epsilon=_LARGE_EPSILON if reader.plan.screening is None else _LARGE_SCREENED_EPSILON,
            delta=_LARGE_DELTA,
        )
        payer = _fit(reader, clone(voter).set_params(account=account))
        shared, pickled = VotingSession(reader, payer.plan_), pickle.dumps(payer)
        for twin in (payer, pickle.loads(pickled), pickle.loads(pickled)):  # noqa: S301
            shared.ask(twin, shared.queries)
    problem = alone.complaint or shared.complaint
    return problem and f"copies together: {problem}"


@_on_small_estimators
def _check_account(reader: VoteReader, voter: Any) -> str | None:
    """Compare the charges of an account with the cost of the answers."""
    with open_ledger() as ledger:
        payer = _fit(reader, voter.set_params(ledger=ledger, account=ACCOUNT))
        session = VotingSession(reader, payer.plan_)
        for count in (1, session.queries + 3):
            session.ask(payer, count)
        return session.complaint or session.find_unpaid(ledger)


class VotingSession:
    """Counts all queries to one plan, by an estimator and its copies."""

    def __init__(self, reader: VoteReader, plan: VotePlan) -> None:
        self._reader, self._plan, self.queries = reader, plan, count_queries(plan)
        self._screened = self._answered = 0
        self._wrong = False

    def ask(self, voter: Any, count: int) -> None:
        """Ask at the target record; a refusal counts as no answer."""
        with suppress(ExhaustedError, OverBudgetError):
            self.count([self._reader.read(voter.answer(np.tile(self._reader.query, (count, 1))))])

    def count(self, answers: Iterable[AnswerRows]) -> None:
        """Count answers and screenings."""
        for read in answers:
            self._screened += len(read.answered)
            self._answered += int(read.answered.sum())
            self._wrong |= not self._reader.are_consistent(read).all()

    @property
    def complaint(self) -> str | None:
        """The violation of the plan, if any."""
        most = min(self._plan.max_answered, self.queries)
        if self._answered > most:
            return f"{self._answered} queries were answered where {most} are allowed"
        return "a label does not follow from the votes" if self._wrong else None

    def find_unpaid(self, ledger: Ledger) -> str | None:
        """Describe answers that the account was not charged for."""
        counts = {"answered": self._answered, "screened": min(self._screened, self._plan.max_screened)}
        charged = [charge for entry in ledger.account(ACCOUNT).history() for charge in entry.events]
        delta = self._reader.voter.delta
        paid, cost = compute_epsilon(charged, delta), _compute_cost(self._reader, self._plan, counts, delta)
        if paid >= _CLOSE * cost:
            return None
        return f"the account was charged epsilon {paid:.4g} for a cost of {cost:.4g}"


def _compute_cost(reader: VoteReader, plan: VotePlan, counts: Mapping[Any, int], delta: float) -> float:
    """Return the epsilon of this many votes and screenings."""
    return compute_epsilon(((event, counts[part]) for part, event in reader.derive_events(plan).items()), delta)


def compute_epsilon(events: Iterable[tuple[DpEvent, int]], delta: float) -> float:
    """Return the epsilon of composed events, each this many times."""
    accountant = PldAccountant()
    for event, times in events:
        if times:
            accountant.compose(event, times)
    return float(accountant.epsilon(delta))


def _make_small(reader: VoteReader) -> Iterator[Any]:
    """Yield the estimator, with smaller caps if needed; then one with fewer screenings than answers."""
    plan = reader.plan
    caps = {f"max_{part}": min(cap, _SMALL_CAPS[part]) for part, cap in plan.caps.items()}
    within = all(getattr(plan, name) == most for name, most in caps.items())
    yield clone(reader.voter) if within else make_twin(reader, None).set_params(**caps)
    if plan.screening is not None:
        few = min(plan.max_screened, _SMALL_CAPS["answered"] // 2)
        scale = math.sqrt(max(1.0, 2 * few / plan.max_answered))  # of the noise, so that the cost does not grow
        yield make_twin(reader, None).set_params(
            max_answered=2 * few,
            max_screened=few,
            vote_noise=scale * plan.vote_noise,
            screening_noise=scale * plan.screening.noise,
        )


def _fit(reader: VoteReader, voter: Any) -> Any:
    records = reader.pairs[0].first
    return voter.fit(records.X, records.y)


def find_private(export: bytes, rows: Floats) -> str | None:
    """Describe private data in an export."""
    if any(row.tobytes() in export for row in rows):
        return "it holds a private row"
    return "it holds the address of the ledger" if LEDGER.encode() in export else None


@contextmanager
def open_ledger() -> Iterator[Ledger]:
    """Open a temporary ledger."""
    with tempfile.TemporaryDirectory() as folder, Ledger(f"{folder}/{LEDGER}") as ledger:
        yield ledger
