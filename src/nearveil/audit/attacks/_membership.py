"""Membership inference: is a record in the database that answers? One record more, and queries at the record."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.audit._conduct import vote_checks
from nearveil.audit._experiment import Coins, Experiment, Floats, Pair, trials_for
from nearveil.audit._law import Coin, Law
from nearveil.audit.ballots import DIMENSION, LARGEST_VALUE, Ballot, ClassVotes, Database, Read, ballot_of, twin
from nearveil.privacy.noise import Source
from nearveil.votes import PateClassifier, PrivateKNeighborsRegressor

_NEAR = 0.05  # of a cluster around its canary
_LARGEST_CLUSTER = 128


@dataclass(frozen=True, eq=False)
class Answered:
    """What was answered in many runs of the whole plan."""

    passed: NDArray[np.bool_]  # whether a query would be answered if there were no cap
    asked: NDArray[np.bool_]  # whether a query is asked: none is, once the cap on answers is reached
    values: Floats  # released numbers
    labels: NDArray[Any]

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Whether a query was answered."""
        return self.passed & self.asked

    @property
    def numbers(self) -> Floats:
        """All that is seen: how many answers, the sum of each released number, and how often each label came."""
        there = self.answered
        labels = np.where(there.reshape(*there.shape, *[1] * (self.labels.ndim - 2)), self.labels, 0)
        flat = labels.sum(axis=1).reshape(len(there), -1)
        return np.column_stack([there.sum(axis=1), np.where(there[:, :, None], self.values, 0.0).sum(axis=1), flat])


def membership_experiment(voter: Any) -> Experiment:
    """Return the experiment of a voting estimator: all queries of its plan are asked at one record.

    `voter`: Its parameters count; what it was fitted on does not.
    """
    ballot = ballot_of(voter)
    queries = ballot.queries

    def run(database: Database, runs: int, source: Source) -> Answered:
        fitted = twin(ballot, source).fit(database.X, database.y)
        return _answered(ballot, ballot.read(fitted.answer(np.tile(ballot.query, (runs * queries, 1)))), queries)

    return Experiment(
        name=_name(ballot),
        promise=ballot.guarantee,
        pairs=ballot.pairs,
        run=run,
        log_ratio=(lambda seen, pair: _log_ratio(ballot, seen, pair)) if ballot.known else None,
        exact=ballot.known,
        numbers=lambda seen: seen.numbers,
        together=_together(ballot),
        law=_law(ballot),
        checks=vote_checks(ballot),
        trials=trials_for(ballot.guarantee.delta),
    )


def _answered(ballot: Ballot, read: Read, queries: int) -> Answered:
    """Cut answers into runs. The plan stops at its cap, and stopping is all that a cap does."""
    passed = read.answered.reshape(-1, queries)
    asked = np.asarray(np.cumsum(passed, axis=1) - passed < ballot.plan.max_answered)
    values, labels = (array.reshape(*passed.shape, *array.shape[1:]) for array in (read.values, read.labels))
    return Answered(passed, asked, values, labels)


def _name(ballot: Ballot) -> str:
    voter = ballot.own
    if isinstance(voter, PateClassifier):
        return f"pate ({voter.mechanism})"
    sampled = "" if voter.sampling_rate == 1 else f", rate {voter.sampling_rate:g}"
    if isinstance(voter, PrivateKNeighborsRegressor):
        return f"private-knn ({voter.method}{sampled})"
    kind = "" if voter.votes == "classes" else f"{voter.votes} "
    return f"private-knn ({'' if ballot.plan.screening is None else 'screened '}{kind}votes{sampled})"


def _law(ballot: Ballot) -> Law:
    """Return what is stated about answers: screenings and votes, cap or not, since every query is drawn afresh."""

    def released(seen: Answered) -> Floats:
        return seen.values[seen.passed]

    def uniforms(seen: Answered, database: Database) -> list[Floats]:
        return ballot.uniforms(released(seen), database)

    def coins(seen: Answered, database: Database) -> list[Coin]:
        screened = [] if ballot.plan.screening is None else [(seen.passed.ravel(), ballot.passes(database))]
        return [*screened, *ballot.coins(released(seen), database)]

    def consistent(seen: Answered) -> NDArray[np.bool_]:
        count = seen.passed.size
        values, labels = (array.reshape(count, *array.shape[2:]) for array in (seen.values, seen.labels))
        return ballot.consistent(Read(seen.passed.ravel(), values, labels))

    continuous = bool(ballot.uniforms(ballot.pairs[0].second.sums[None], ballot.pairs[0].second))
    width = len(ballot.pairs[0].second.sums)
    return Law(
        uniforms=uniforms if ballot.known else None,
        coins=coins if ballot.known else None,
        values=released if continuous else None,
        largest_value=LARGEST_VALUE,
        largest_row=LARGEST_VALUE**width,
        consistent=consistent if ballot.labelled else None,
    )


def _log_ratio(ballot: Ballot, seen: Answered, pair: Pair) -> Floats:
    """Return the exact log-likelihood ratio: the record is in each of the fresh samples with the sampling rate."""
    total = np.where(seen.answered, ballot.losses(seen.values, pair), 0.0)
    if ballot.plan.screening is not None:
        first, second = (ballot.passes(database) for database in (pair.first, pair.second))
        passed, declined = np.log(first / second), np.log1p(-first) - np.log1p(-second)
        total = total + np.where(seen.asked, np.where(seen.passed, passed, declined), 0.0)
    return np.asarray(total.sum(axis=1))


def _together(ballot: Ballot) -> Any:
    """Return one run with many canaries, each with neighbours of its own, so that it touches one answer alone."""
    own, plan = ballot.own, ballot.plan
    if isinstance(own, PateClassifier) or not isinstance(ballot, ClassVotes):
        return None
    if plan.n_neighbors > _LARGEST_CLUSTER or ballot.queries > 1 or plan.sampling_rate < 1:
        return None

    def run(coins: Coins, pair: Pair, source: Source) -> Answered:
        against = round(float(pair.second.sums[1]))
        k, count = plan.n_neighbors, len(coins)
        generator = np.random.default_rng(4)
        canaries = generator.standard_normal((count, DIMENSION))
        canaries *= ballot.length / np.linalg.norm(canaries, axis=1, keepdims=True)
        around = generator.standard_normal((count, k, DIMENSION))
        near = ballot.length * _NEAR * np.arange(1, k + 1) / k
        around *= near[:, None] / np.linalg.norm(around, axis=2, keepdims=True)
        rows = np.concatenate([canaries[coins], (canaries[:, None] + around).reshape(-1, DIMENSION)])
        kinds = np.zeros((count, k), dtype=np.int64)
        kinds[:, : k - against] = 1
        votes = np.stack([ballot.vote(0), ballot.vote(1)])
        y = np.concatenate([votes[np.ones(int(coins.sum()), dtype=np.int64)], votes[kinds.ravel()]])
        return _answered(ballot, ballot.read(twin(ballot, source).fit(rows, y).answer(canaries)), 1)

    return run
