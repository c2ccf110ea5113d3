"""Membership inference: is a record in the database that answers? One record more, and a query at the record."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr
from sklearn.base import clone

from nearveil.audit._experiment import Coins, Experiment, Floats, Pair
from nearveil.privacy.noise import Source
from nearveil.votes import PateClassifier, PrivateKNeighborsClassifier

_DIMENSION = 16
_NEAR = 0.05  # of a cluster around its canary
_LARGEST_CLUSTER = 128
_TRIALS = 1_000_000

Voter = PrivateKNeighborsClassifier | PateClassifier


@dataclass(frozen=True, eq=False)
class Database:
    """Private records, and the votes that the query gets with every record in the sample.

    Attributes
    ----------
    X : ndarray of shape (n, d)
    y : ndarray of shape (n,)
    votes : tuple of int
        For class 0 and for class 1.
    """

    X: Floats
    y: NDArray[np.int64]
    votes: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Answered:
    """What was answered in many runs of the whole plan.

    Attributes
    ----------
    asked : ndarray of bool, shape (n, q)
        Whether a query was screened: none is, once the cap on answers is reached.
    passed : ndarray of bool, shape (n, q)
    votes : ndarray of shape (n, q, 2)
        Zero where a query did not pass.
    """

    asked: NDArray[np.bool_]
    passed: NDArray[np.bool_]
    votes: Floats


def membership_experiment(voter: Voter) -> Experiment:
    """Return the experiment of a voting classifier: all queries of its plan are asked at one record.

    Parameters
    ----------
    voter : PrivateKNeighborsClassifier or PateClassifier
        Votes on classes. Its parameters count; what it was fitted on does not.

    Returns
    -------
    Experiment
    """
    if getattr(voter, "votes", "classes") != "classes":
        raise ValueError('voter must vote on "classes" to be audited')
    own = clone(voter).set_params(classes=[0, 1], ledger=None, account=None, source=None)
    teachers = isinstance(own, PateClassifier)
    pairs = _teacher_pairs(own) if teachers else _neighbor_pairs(own)
    planned = own.fit(pairs[0].first.X, pairs[0].first.y)
    plan, promise = planned.plan_, planned.guarantee
    queries = plan.max_screened if plan.screening is not None else plan.max_answered

    def run(database: Database, runs: int, source: Source) -> Answered:
        twin = _twin(own, plan, runs * queries, source).fit(database.X, database.y)
        answers = twin.answer(np.tile(np.eye(_DIMENSION)[0], (runs * queries, 1)))
        passed = answers.answered.reshape(runs, queries)
        # The plan stops at its cap. Every query is drawn afresh, so stopping is all that a cap does.
        before = np.cumsum(passed, axis=1) - passed
        asked = before < plan.max_answered
        votes = np.nan_to_num(answers.votes).reshape(runs, queries, 2)
        kept = passed & asked
        return Answered(asked, kept, np.where(kept[:, :, None], votes, 0.0))

    # The default teacher names its record's class at the record's own place, whoever else is with it.
    known = not teachers or own.estimator is None
    laplace = teachers and own.mechanism == "lnmax"
    return Experiment(
        name=_name(own),
        promise=promise,
        pairs=pairs,
        run=run,
        log_ratio=(lambda seen, pair: _log_ratio(plan, seen, pair, laplace=laplace)) if known else None,
        exact=known,
        numbers=lambda seen: np.column_stack([seen.passed.sum(axis=1), seen.votes.sum(axis=1)]),
        together=None if teachers or plan.n_neighbors > _LARGEST_CLUSTER or queries > 1 else _together(own, plan),
        trials=_TRIALS if known and queries == 1 and plan.sampling_rate == 1 else 100_000,
    )


def _name(voter: Any) -> str:
    if isinstance(voter, PateClassifier):
        return f"pate ({voter.mechanism})"
    sampled = "" if voter.sampling_rate == 1 else f", rate {voter.sampling_rate:g}"
    return f"private-knn ({'votes' if voter.max_screened == 0 else 'screened votes'}{sampled})"


def _twin(own: Any, plan: Any, queries: int, source: Source) -> Any:
    """Return a voter with the same noise and room for many runs: each query is drawn afresh, whatever the caps are."""
    changed: dict[str, Any] = {
        "epsilon": None,
        "vote_noise": plan.vote_noise,
        "max_answered": queries,
        "source": source,
    }
    if plan.screening is not None:
        changed |= {
            "screening_noise": plan.screening_noise,
            "threshold": plan.threshold,
            "max_screened": queries,
        }
    if not isinstance(own, PateClassifier):
        changed["n_neighbors"] = plan.n_neighbors
    return clone(own).set_params(**changed)


def _neighbor_pairs(voter: Any) -> tuple[Pair, ...]:
    """Return databases with and without a record of class 0 at the query; the last of class 1 makes room for it."""
    probe = clone(voter).fit(np.eye(_DIMENSION)[:2], [0, 1]).plan_
    k, rate = probe.n_neighbors, probe.sampling_rate
    others = k if rate == 1 else int(1.2 * (k + 9 * np.sqrt(k) + 40) / rate)
    names = {k: "one record more, against all others"}
    if rate == 1:
        names[k // 2 + 1] = "a record that flips the plurality"
        if probe.threshold is not None:
            names[int(min(max(round(probe.threshold), 1), k))] = "a record at the screening's threshold"
    query = np.eye(_DIMENSION)[0]
    angles = np.linspace(0.2, 1.2, others)
    rows = np.outer(np.cos(angles), query) + np.outer(np.sin(angles), np.eye(_DIMENSION)[1])
    pairs = []
    for against, name in names.items():
        y = np.ones(others, dtype=np.int64)
        y[: k - against] = 0
        without = Database(rows, y, (k - against, against))
        more = Database(np.vstack([query, rows]), np.append(0, y), (k - against + 1, against - 1))
        pairs.append(Pair(name, more, without))
    return tuple(pairs)


def _teacher_pairs(voter: Any) -> tuple[Pair, ...]:
    """Return databases with and without a record of class 1; teachers without records name class 0."""
    rows = np.eye(_DIMENSION)[:2]
    most = voter.n_teachers
    without = Database(rows[1:], np.array([0]), (most, 0))
    return (Pair("a record alone with its teacher", Database(rows, np.array([1, 0]), (most - 1, 1)), without),)


def _log_ratio(plan: Any, seen: Answered, pair: Pair, *, laplace: bool) -> Floats:
    """Return the exact log-likelihood ratio: the record is in each of the fresh samples with the sampling rate."""
    rate, scale = plan.sampling_rate, plan.vote_noise
    off = [seen.votes - np.array(database.votes) for database in (pair.first, pair.second)]
    if laplace:
        inside, outside = (np.abs(one).sum(axis=2) / scale for one in off)
    else:
        inside, outside = ((one**2).sum(axis=2) / (2 * scale**2) for one in off)
    total = np.where(seen.passed, _mixed(rate, outside - inside), 0.0)
    if plan.screening is not None:
        score_in, score_out = (
            (max(votes) - plan.threshold) / plan.screening_noise for votes in (pair.first.votes, pair.second.votes)
        )
        ratios = [_mixed(rate, np.asarray(log_ndtr(sign * score_in) - log_ndtr(sign * score_out))) for sign in (1, -1)]
        total = total + np.where(seen.asked, np.where(seen.passed, ratios[0], ratios[1]), 0.0)
    return np.asarray(total.sum(axis=1))


def _mixed(rate: float, loss: Floats) -> Floats:
    """Return the loss of a mechanism that sees the record with probability `rate`."""
    return loss if rate == 1 else np.logaddexp(np.log1p(-rate), np.log(rate) + loss)


def _together(own: Any, plan: Any) -> Any:
    """Return one run with many canaries, each with neighbours of its own, so that it touches one answer alone."""

    def run(coins: Coins, pair: Pair, source: Source) -> Answered:
        against = pair.second.votes[1]
        k, count = plan.n_neighbors, len(coins)
        generator = np.random.default_rng(4)
        canaries = generator.standard_normal((count, _DIMENSION))
        canaries /= np.linalg.norm(canaries, axis=1, keepdims=True)
        around = generator.standard_normal((count, k, _DIMENSION))
        around *= (_NEAR * np.arange(1, k + 1) / k)[:, None] / np.linalg.norm(around, axis=2, keepdims=True)
        rows = np.concatenate([canaries[coins], (canaries[:, None] + around).reshape(-1, _DIMENSION)])
        y = np.ones((count, k), dtype=np.int64)
        y[:, : k - against] = 0
        twin = _twin(own, plan, count, source).fit(rows, np.concatenate([np.zeros(int(coins.sum()), int), y.ravel()]))
        answers = twin.answer(canaries)
        votes = np.nan_to_num(answers.votes)[:, None]
        return Answered(np.ones((count, 1), dtype=bool), answers.answered[:, None], votes)

    return run if plan.sampling_rate == 1 else None
