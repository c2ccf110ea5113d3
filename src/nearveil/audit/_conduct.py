"""Conduct: voting estimators used as their users use them, and whether caps, accounts and copies keep to the plan."""

import copy
import math
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from sklearn.base import clone

from nearveil.audit._experiment import Floats, Law, LawTest
from nearveil.audit._readers import Read, VoteReader, make_twin
from nearveil.audit.report import Check
from nearveil.ledger import Ledger, OverBudgetError
from nearveil.privacy.accounting import PldAccountant
from nearveil.privacy.noise import Source
from nearveil.private_knn import ExhaustedError

Conduct = Callable[[Source, float], Check]

_PREDICTED = 2_000  # queries of either database, where labels alone are seen
_MOST_ANSWERED, _MOST_SCREENED = 12, 16  # caps of the estimators that are used up
_CLOSE = 0.995  # of a cost: accountants round up, each on a grid of its own
_LARGEST_FILTER, _LARGEST_SCREENED = 40.0, 20.0  # epsilon of an account that pays whatever is asked; with screenings
_LARGEST_DELTA = 0.1  # of that account
ACCOUNT, LEDGER = "audit", "audit.db"
_STRENGTHS = ("epsilon", "delta", "nominal_epsilon", "vote_noise")


def make_vote_checks(reader: VoteReader) -> tuple[Conduct, ...]:
    """Return the checks of a voting estimator's conduct."""
    checks = {
        "predict": lambda source, alpha: _check_predict(reader, source, alpha),
        "the guarantee's price": lambda _, __: _check_price(reader),
        "caps": lambda _, __: _check_caps(reader),
        "the account": lambda _, __: _check_account(reader),
        "copies": lambda _, __: _check_copies(reader),
    }
    if hasattr(reader.own, "answer_once") and reader.plan.screening is None:
        checks["answers under a key"] = lambda _, __: _check_keys(reader)
    fitted = _fit(reader, clone(reader.own))
    return (*(make_check(name, found) for name, found in checks.items()), make_frozen_check(fitted))


def make_check(name: str, find: Callable[[Source, float], str | None]) -> Conduct:
    """Return a check that fails where ``find(source, alpha)`` returns what is wrong, and not None."""

    def check(source: Source, alpha: float) -> Check:
        found = find(source, alpha)
        return Check(name, "passed") if found is None else Check(name, "failed", found)

    return check


def make_frozen_check(estimator: Any) -> Conduct:
    """Return a check that no parameter that is set later changes the guarantee of a fitted estimator."""

    def find(source: Source, alpha: float) -> str | None:
        del source, alpha
        before = estimator.guarantee
        given = estimator.get_params(deep=False)
        for name in (one for one in _STRENGTHS if given.get(one)):
            other = copy.deepcopy(estimator)
            try:
                after = other.set_params(**{name: given[name] / 64}).guarantee
            except (AttributeError, ValueError):  # a fitted release refuses every change
                continue
            if (after.epsilon, after.delta) != (before.epsilon, before.delta):
                return f"{name} that is set after fit changes the guarantee, and not the noise"
        return None

    return make_check("parameters set later", find)


def _check_predict(reader: VoteReader, source: Source, alpha: float) -> str | None:
    """Judge what `predict` returns by the stated law of the votes."""
    if not reader.known:
        return None
    if reader.labelled:
        law = Law(coins=reader.list_label_coins)
    else:
        law = Law(
            uniforms=lambda read, records: reader.compute_uniforms(read.values, records),
            coins=lambda read, records: reader.list_coins(read.values, records),
        )
    test = LawTest(law)
    for pair in reader.pairs:
        for which, records in (("first", pair.first), ("second", pair.second)):
            voter = make_twin(reader, source).fit(records.X, records.y)
            found = voter.predict(np.tile(reader.query, (_PREDICTED, 1)))
            test.add(f"{pair.name} ({which} input)", found if reader.labelled else reader.read(found), records)
    return test.find_misfit(alpha)


def _check_price(reader: VoteReader) -> str | None:
    """Compare what the plan's public figures cost with what the guarantee states."""
    plan, stated = reader.plan, reader.guarantee
    cost = _compute_cost(reader, plan, plan.max_answered, plan.max_screened, stated.delta)
    if stated.epsilon >= _CLOSE * cost:
        return None
    return f"the guarantee states epsilon {stated.epsilon:.4g} for what costs {cost:.4g}"


def _check_caps(reader: VoteReader) -> str | None:
    """Ask for more than the plan allows, in small parts and at once."""
    for voter in _make_small(reader):
        session = _open(reader, _fit(reader, voter))
        for count in (1, 2, session.queries + 3, 1):
            session.ask(voter, count)
        if session.complaint is not None:
            return session.complaint
    return None


def _check_copies(reader: VoteReader) -> str | None:
    """Ask an estimator with its copies and pickles, without an account and on one that would pay for all of them."""
    for voter in _make_small(reader):
        alone = _open(reader, _fit(reader, voter))
        alone.ask(voter, 1)
        for other in (copy.copy(voter), copy.deepcopy(voter), pickle.loads(pickle.dumps(voter))):  # noqa: S301
            alone.ask(other, alone.queries)
        with open_ledger() as ledger:
            account = ledger.open_account(
                ACCOUNT,
                owner=ACCOUNT,
                protects="database",
                unit=voter.guarantee.unit,
                relation="add-remove",
                epsilon=_LARGEST_FILTER if reader.plan.screening is None else _LARGEST_SCREENED,
                delta=_LARGEST_DELTA,
            )
            payer = _fit(reader, clone(voter).set_params(account=account))
            shared, kept = _open(reader, payer), pickle.dumps(payer)
            for other in (payer, pickle.loads(kept), pickle.loads(kept)):  # noqa: S301
                shared.ask(other, shared.queries)
        found = alone.complaint or shared.complaint
        if found is not None:
            return f"copies together: {found}"
    return None


def _check_account(reader: VoteReader) -> str | None:
    """Compare what an account was charged with what was done."""
    for voter in _make_small(reader):
        with open_ledger() as ledger:
            payer = _fit(reader, voter.set_params(ledger=ledger, account=ACCOUNT))
            session = _open(reader, payer)
            for count in (1, session.queries + 3):
                session.ask(payer, count)
            found = session.complaint or session.find_unpaid(ledger)
        if found is not None:
            return found
    return None


def _check_keys(reader: VoteReader) -> str | None:
    """Ask twice under each key: the same answer, paid for once."""
    with open_ledger() as ledger:
        voter = _fit(reader, next(_make_small(reader)).set_params(ledger=ledger, account=ACCOUNT))
        session, known = _open(reader, voter), {}
        for number in range(session.queries + 2):
            try:
                known[f"key {number}"] = voter.answer_once(reader.query, f"key {number}")
            except ExhaustedError:
                break
        session.take(reader.read(one) for one in known.values())
        before = ledger.account(ACCOUNT).history()
        again = {key: voter.answer_once(reader.query, key) for key in known}
        if any(not np.array_equal(known[key].votes, again[key].votes) for key in known):
            return "a key was answered anew"
        if len({one.votes.tobytes() for one in known.values()}) < len(known):
            return "two keys have the same answer"
        if ledger.account(ACCOUNT).history() != before:
            return "a key that was answered before was charged again"
        return session.complaint or session.find_unpaid(ledger)


class VotingSession:
    """Everything that was asked of one plan, of an estimator and of its copies together."""

    def __init__(self, reader: VoteReader, plan: Any, delta: float) -> None:
        self._reader, self._plan, self._delta = reader, plan, delta
        self._screened = self._answered = 0
        self._wrong = False

    @property
    def queries(self) -> int:
        """How many queries the plan allows."""
        return int(self._plan.max_answered if self._plan.screening is None else self._plan.max_screened)

    def ask(self, voter: Any, count: int) -> None:
        """Ask at the record in question; one that refuses has answered nothing."""
        try:
            answers = voter.answer(np.tile(self._reader.query, (count, 1)))
        except (ExhaustedError, OverBudgetError):
            return
        self.take([self._reader.read(answers)])

    def take(self, answers: Iterable[Read]) -> None:
        """Count what was answered."""
        for read in answers:
            self._screened += len(read.answered)
            self._answered += int(read.answered.sum())
            self._wrong |= not self._reader.are_consistent(read).all()

    @property
    def complaint(self) -> str | None:
        """What went beyond the plan."""
        most = min(self._plan.max_answered, self.queries)
        if self._answered > most:
            return f"{self._answered} queries were answered where {most} are allowed"
        return "a label does not follow from the votes" if self._wrong else None

    def find_unpaid(self, ledger: Ledger) -> str | None:
        """Say what the account was not charged for."""
        charged = PldAccountant()
        for entry in ledger.account(ACCOUNT).history():
            for event, times in entry.events:
                charged.compose(event, times)
        paid, delta = charged.epsilon(self._delta), self._delta
        cost = _compute_cost(
            self._reader, self._plan, self._answered, min(self._screened, self._plan.max_screened), delta
        )
        if paid >= _CLOSE * cost:
            return None
        return f"the account was charged epsilon {paid:.4g} for what costs {cost:.4g}"


def _compute_cost(reader: VoteReader, plan: Any, answered: int, screened: int, delta: float) -> float:
    """Return what so many votes and screenings cost."""
    accountant = PldAccountant()
    for event, times in zip(reader.derive_events(plan), (answered, screened), strict=True):
        if event is not None and times:
            accountant.compose(event, times)
    return float(accountant.epsilon(delta))


def _make_small(reader: VoteReader) -> Iterator[Any]:
    """Return the estimator itself, or one with smaller caps; then one with fewer screenings than answers."""
    plan = reader.plan
    caps = {"max_answered": min(plan.max_answered, _MOST_ANSWERED)}
    if plan.screening is not None:
        caps["max_screened"] = min(plan.max_screened, _MOST_SCREENED)
    within = all(getattr(plan, name) == most for name, most in caps.items())
    yield clone(reader.own) if within else make_twin(reader, None).set_params(**caps)
    if plan.screening is not None:
        few = min(plan.max_screened, _MOST_ANSWERED // 2)
        more = math.sqrt(max(1.0, 2 * few / plan.max_answered))  # noise, so that it costs no more
        yield make_twin(reader, None).set_params(
            max_answered=2 * few,
            max_screened=few,
            vote_noise=more * plan.vote_noise,
            screening_noise=more * plan.screening.noise,
        )


def _open(reader: VoteReader, voter: Any) -> VotingSession:
    return VotingSession(reader, voter.plan_, voter.delta)


def _fit(reader: VoteReader, voter: Any) -> Any:
    records = reader.pairs[0].first
    return voter.fit(records.X, records.y)


def find_private(export: bytes, rows: Floats) -> str | None:
    """Say what an export holds that must not leave."""
    if any(row.tobytes() in export for row in rows):
        return "it holds a private row"
    return "it holds the address of the ledger" if LEDGER.encode() in export else None


@contextmanager
def open_ledger() -> Iterator[Ledger]:
    """Open a ledger that lasts as long as a check."""
    with tempfile.TemporaryDirectory() as folder, Ledger(f"{folder}/{LEDGER}") as ledger:
        yield ledger
