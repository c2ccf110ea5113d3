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

from nearveil.audit._law import Law, Watch
from nearveil.audit._report import Check
from nearveil.audit.ballots import Ballot, Read, twin
from nearveil.ledger import Ledger, OverBudgetError
from nearveil.privacy.accounting import PldAccountant
from nearveil.privacy.noise import Source
from nearveil.votes import ExhaustedError

Conduct = Callable[[Source, float], Check]

_PREDICTED = 2_000  # queries of either database, where labels alone are seen
_MOST_ANSWERED, _MOST_SCREENED = 12, 16  # caps of the estimators that are used up
_CLOSE = 0.995  # of a cost: accountants round up, each on a grid of its own
_LARGEST_FILTER, _LARGEST_SCREENED = 40.0, 20.0  # epsilon of an account that pays whatever is asked; with screenings
_LARGEST_DELTA = 0.1  # of that account
ACCOUNT, LEDGER = "audit", "audit.db"
_STRENGTHS = ("epsilon", "delta", "nominal_epsilon", "vote_noise")


def vote_checks(ballot: Ballot) -> tuple[Conduct, ...]:
    """Return the checks of a voting estimator's conduct."""
    checks = {
        "predict": lambda source, mistake: _predict(ballot, source, mistake),
        "the guarantee's price": lambda _, __: _price(ballot),
        "caps": lambda _, __: _caps(ballot),
        "the account": lambda _, __: _account(ballot),
        "copies": lambda _, __: _copies(ballot),
    }
    if hasattr(ballot.own, "answer_once") and ballot.plan.screening is None:
        checks["answers under a key"] = lambda _, __: _keys(ballot)
    fitted = _fit(ballot, clone(ballot.own))
    return (*(named_check(name, found) for name, found in checks.items()), frozen_check(fitted))


def named_check(name: str, find: Callable[[Source, float], str | None]) -> Conduct:
    """Return a check that fails where something was found.

    `find`: ``find(source, mistake)`` returns what is wrong, or None.
    """

    def check(source: Source, mistake: float) -> Check:
        found = find(source, mistake)
        return Check(name, "passed") if found is None else Check(name, "failed", found)

    return check


def frozen_check(estimator: Any) -> Conduct:
    """Return a check that no parameter that is set later changes the guarantee of what was fitted.

    `estimator`: Fitted.
    """

    def find(source: Source, mistake: float) -> str | None:
        del source, mistake
        before = estimator.guarantee
        given = estimator.get_params(deep=False)
        for name in (one for one in _STRENGTHS if given.get(one)):
            other = copy.deepcopy(estimator)
            try:
                after = other.set_params(**{name: given[name] / 64}).guarantee
            except ValueError:  # it refuses, or says that it is not fitted any more
                continue
            if (after.epsilon, after.delta) != (before.epsilon, before.delta):
                return f"{name} that is set after fit changes the guarantee, and not the noise"
        return None

    return named_check("parameters set later", find)


def _predict(ballot: Ballot, source: Source, mistake: float) -> str | None:
    """Judge what `predict` returns by the stated law of the votes."""
    if not ballot.known:
        return None
    if ballot.labelled:
        watch = Watch(Law(coins=ballot.label_coins))
    else:
        watch = Watch(
            Law(lambda read, at: ballot.uniforms(read.values, at), lambda read, at: ballot.coins(read.values, at))
        )
    for pair in ballot.pairs:
        for which, database in (("first", pair.first), ("second", pair.second)):
            voter = twin(ballot, source).fit(database.X, database.y)
            found = voter.predict(np.tile(ballot.query, (_PREDICTED, 1)))
            watch.see(f"{pair.name} ({which} input)", found if ballot.labelled else ballot.read(found), database)
    return watch.misfit(mistake)


def _price(ballot: Ballot) -> str | None:
    """Compare what the plan's public figures cost with what the guarantee states."""
    plan, stated = ballot.plan, ballot.guarantee
    cost = _cost(ballot, plan, plan.max_answered, plan.max_screened, stated.delta)
    if stated.epsilon >= _CLOSE * cost:
        return None
    return f"the guarantee states epsilon {stated.epsilon:.4g} for what costs {cost:.4g}"


def _caps(ballot: Ballot) -> str | None:
    """Ask for more than the plan allows, in small parts and at once."""
    for voter in _small(ballot):
        session = _opened(ballot, _fit(ballot, voter))
        for count in (1, 2, session.queries + 3, 1):
            session.ask(voter, count)
        if session.complaint is not None:
            return session.complaint
    return None


def _copies(ballot: Ballot) -> str | None:
    """Ask an estimator with its copies and pickles, without an account and on one that would pay for all of them."""
    for voter in _small(ballot):
        alone = _opened(ballot, _fit(ballot, voter))
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
                epsilon=_LARGEST_FILTER if ballot.plan.screening is None else _LARGEST_SCREENED,
                delta=_LARGEST_DELTA,
            )
            payer = _fit(ballot, clone(voter).set_params(account=account))
            shared, kept = _opened(ballot, payer), pickle.dumps(payer)
            for other in (payer, pickle.loads(kept), pickle.loads(kept)):  # noqa: S301
                shared.ask(other, shared.queries)
        found = alone.complaint or shared.complaint
        if found is not None:
            return f"copies together: {found}"
    return None


def _account(ballot: Ballot) -> str | None:
    """Compare what an account was charged with what was done."""
    for voter in _small(ballot):
        with open_ledger() as ledger:
            payer = _fit(ballot, voter.set_params(ledger=ledger, account=ACCOUNT))
            session = _opened(ballot, payer)
            for count in (1, session.queries + 3):
                session.ask(payer, count)
            found = session.complaint or session.unpaid(ledger)
        if found is not None:
            return found
    return None


def _keys(ballot: Ballot) -> str | None:
    """Ask twice under each key: the same answer, paid for once."""
    with open_ledger() as ledger:
        voter = _fit(ballot, next(_small(ballot)).set_params(ledger=ledger, account=ACCOUNT))
        session, known = _opened(ballot, voter), {}
        for number in range(session.queries + 2):
            try:
                known[f"key {number}"] = voter.answer_once(ballot.query, f"key {number}")
            except ExhaustedError:
                break
        session.take(ballot.read(one) for one in known.values())
        before = ledger.account(ACCOUNT).history()
        again = {key: voter.answer_once(ballot.query, key) for key in known}
        if any(not np.array_equal(known[key].votes, again[key].votes) for key in known):
            return "a key was answered anew"
        if len({one.votes.tobytes() for one in known.values()}) < len(known):
            return "two keys have the same answer"
        if ledger.account(ACCOUNT).history() != before:
            return "a key that was answered before was charged again"
        return session.complaint or session.unpaid(ledger)


class Session:
    """Everything that was asked of one plan, of an estimator and of its copies together."""

    def __init__(self, ballot: Ballot, plan: Any, delta: float) -> None:
        self._ballot, self._plan, self._delta = ballot, plan, delta
        self._screened = self._answered = 0
        self._wrong = False

    @property
    def queries(self) -> int:
        """How many queries the plan allows."""
        return int(self._plan.max_answered if self._plan.screening is None else self._plan.max_screened)

    def ask(self, voter: Any, count: int) -> None:
        """Ask at the record in question; one that refuses has answered nothing."""
        try:
            answers = voter.answer(np.tile(self._ballot.query, (count, 1)))
        except (ExhaustedError, OverBudgetError):
            return
        self.take([self._ballot.read(answers)])

    def take(self, answers: Iterable[Read]) -> None:
        """Count what was answered."""
        for read in answers:
            self._screened += len(read.answered)
            self._answered += int(read.answered.sum())
            self._wrong |= not self._ballot.consistent(read).all()

    @property
    def complaint(self) -> str | None:
        """What went beyond the plan."""
        most = min(self._plan.max_answered, self.queries)
        if self._answered > most:
            return f"{self._answered} queries were answered where {most} are allowed"
        return "a label does not follow from the votes" if self._wrong else None

    def unpaid(self, ledger: Ledger) -> str | None:
        """Say what the account was not charged for."""
        charged = PldAccountant()
        for entry in ledger.account(ACCOUNT).history():
            for event, times in entry.events:
                charged.compose(event, times)
        paid, delta = charged.epsilon(self._delta), self._delta
        cost = _cost(self._ballot, self._plan, self._answered, min(self._screened, self._plan.max_screened), delta)
        if paid >= _CLOSE * cost:
            return None
        return f"the account was charged epsilon {paid:.4g} for what costs {cost:.4g}"


def _cost(ballot: Ballot, plan: Any, answered: int, screened: int, delta: float) -> float:
    """Return what so many votes and screenings cost."""
    accountant = PldAccountant()
    for event, times in zip(ballot.events(plan), (answered, screened), strict=True):
        if event is not None and times:
            accountant.compose(event, times)
    return float(accountant.epsilon(delta))


def _small(ballot: Ballot) -> Iterator[Any]:
    """Return the estimator itself, or one with smaller caps; then one with fewer screenings than answers."""
    plan = ballot.plan
    caps = {"max_answered": min(plan.max_answered, _MOST_ANSWERED)}
    if plan.screening is not None:
        caps["max_screened"] = min(plan.max_screened, _MOST_SCREENED)
    within = all(getattr(plan, name) == most for name, most in caps.items())
    yield clone(ballot.own) if within else twin(ballot, None).set_params(**caps)
    if plan.screening is not None:
        few = min(plan.max_screened, _MOST_ANSWERED // 2)
        more = math.sqrt(max(1.0, 2 * few / plan.max_answered))  # noise, so that it costs no more
        yield twin(ballot, None).set_params(
            max_answered=2 * few,
            max_screened=few,
            vote_noise=more * plan.vote_noise,
            screening_noise=more * plan.screening.noise,
        )


def _opened(ballot: Ballot, voter: Any) -> Session:
    return Session(ballot, voter.plan_, voter.delta)


def _fit(ballot: Ballot, voter: Any) -> Any:
    database = ballot.pairs[0].first
    return voter.fit(database.X, database.y)


@contextmanager
def open_ledger() -> Iterator[Ledger]:
    """Open a ledger that lasts as long as a check."""
    with tempfile.TemporaryDirectory() as folder, Ledger(f"{folder}/{LEDGER}") as ledger:
        yield ledger
