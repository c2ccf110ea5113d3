"""How voting estimators are read: which records put them to the test, and what they state about their answers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy.special import ndtr
from sklearn.base import clone

from nearveil.audit._experiment import Floats, Pair
from nearveil.audit._law import Coin, gaussian_uniforms
from nearveil.privacy import Guarantee
from nearveil.privacy.events import NoisyScreening
from nearveil.privacy.noise import Source
from nearveil.votes import PateClassifier, VotePlan

DIMENSION = 16
LARGEST_VALUE = 2.0**-17  # of released votes: noise lies on a grid of at most 2^-16 of its scale
_ROOM = 10**9  # queries: so many that nothing is promised, and no accountant is asked for long

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Database:
    """Private records, and what they say about the query, without noise."""

    X: Floats
    y: NDArray[Any]
    sums: Floats  # with every record in the sample
    without: Floats  # where the record in question is not in the sample, or not in the database


@dataclass(frozen=True, eq=False)
class Read:
    """Answers to queries, one row each."""

    answered: Bools
    values: Floats  # released numbers; 0 where a query was declined
    labels: NDArray[Any]


class Ballot(ABC):
    """Reads the answers of one voting estimator, whose parameters count; what it was fitted on does not.

    `own`: The same estimator without account and source, not fitted.
    `query`: What is asked: the place of the record in question.
    `pairs`: Of databases with and without that record.
    """

    labelled: ClassVar[bool] = False

    def __init__(self, voter: Any) -> None:
        self.own = clone(voter).set_params(ledger=None, account=None, source=None, **self._public(voter))
        self.length = float(getattr(voter, "feature_norm", None) or 1.0)
        rows = np.eye(DIMENSION)[:2] * self.length
        probe = clone(self.own).fit(rows, np.stack([self.vote(1), self.vote(0)]))
        self.plan: VotePlan = probe.plan_
        self.guarantee: Guarantee = probe.guarantee
        self.query: Floats = rows[0]
        self.pairs = self._pairs()

    @property
    def queries(self) -> int:
        """How many queries the plan allows."""
        return int(self.plan.max_answered if self.plan.screening is None else self.plan.max_screened)

    @property
    def known(self) -> bool:
        """Whether the law of an answer is stated exactly."""
        return True

    def events(self, plan: VotePlan) -> tuple[DpEvent, DpEvent | None]:
        """Return what a vote and a screening are, derived from a plan's public figures, not from its own events."""
        votes = self._sampled(self._event(plan.vote_noise))
        if plan.screening is None:
            return votes, None
        screening = NoisyScreening(plan.screening.noise, plan.screening.threshold, plan.n_neighbors)
        return votes, self._sampled(screening if self._whole else screening.gaussian)

    @property
    def _whole(self) -> bool:
        """Whether a vote is 0 or 1."""
        return True

    def _sampled(self, event: DpEvent) -> DpEvent:
        rate = self.plan.sampling_rate
        return event if rate == 1 else PoissonSampledDpEvent(rate, event)

    def passes(self, database: Database) -> float:
        """Return the chance that a screening passes."""
        screening, rate = self.plan.screening, self.plan.sampling_rate
        if screening is None:
            return 1.0
        tops = [
            (float(sums.max()) - screening.threshold) / screening.noise for sums in (database.sums, database.without)
        ]
        return float(np.dot([rate, 1 - rate], ndtr(tops)))

    def losses(self, values: Floats, pair: Pair) -> Floats:
        """Return the log-likelihood ratio of released numbers, of shape (..., k), first world against second."""
        inside, outside = (self._distance(values - database.sums) for database in (pair.first, pair.second))
        return mixed(self.plan.sampling_rate, outside - inside)

    def uniforms(self, values: Floats, database: Database) -> list[Floats]:
        """Return numbers that are uniform if released numbers, of shape (n, k), follow the stated law."""
        rate = self.plan.sampling_rate
        inside, outside = (
            self._distribution((values - sums) / self.plan.vote_noise) for sums in (database.sums, database.without)
        )
        return list((rate * inside + (1 - rate) * outside).T)

    def coins(self, values: Floats, database: Database) -> list[Coin]:
        """Return coins that released numbers toss."""
        del values, database
        return []

    def consistent(self, read: Read) -> Bools:
        """Say of each query whether its label follows from the released numbers."""
        return np.ones(len(read.answered), dtype=np.bool_)

    def label_coins(self, labels: NDArray[Any], database: Database) -> list[Coin]:
        """Return coins that labels toss, where nothing but labels is seen."""
        del labels, database
        return []

    def _distance(self, off: Floats) -> Floats:
        return np.asarray((off**2).sum(axis=-1) / (2 * self.plan.vote_noise**2))

    def _distribution(self, off: Floats) -> Floats:
        return gaussian_uniforms(off)

    def _public(self, voter: Any) -> dict[str, Any]:
        """Return parameters that the audit chooses, because they are public and about the records."""
        del voter
        return {}

    @abstractmethod
    def read(self, answers: Any) -> Read:
        """Read what `answer` returned."""

    @abstractmethod
    def _event(self, noise: float) -> DpEvent:
        """Return what one vote with so much noise must be charged as."""

    @abstractmethod
    def vote(self, kind: int) -> Any:
        """Return the label of a record that votes against the one in question (0), or as it does (1)."""

    @abstractmethod
    def worth(self, kind: int) -> Floats:
        """Return what that record adds to the sums."""

    def _pairs(self) -> tuple[Pair, ...]:
        """Return databases with and without a record at the query; the farthest that votes against it makes room."""
        k, rate = self.plan.n_neighbors, self.plan.sampling_rate
        others = k if rate == 1 else int(1.2 * (k + 9 * np.sqrt(k) + 40) / rate)
        angles = np.linspace(0.2, 1.2, others)
        axis = np.eye(DIMENSION)[1] * self.length
        rows = np.outer(np.cos(angles), self.query) + np.outer(np.sin(angles), axis)
        pairs = []
        for against, name in self._tallies().items():
            kinds = np.zeros(others, dtype=np.int64)
            kinds[: k - against] = 1
            sums = (k - against) * self.worth(1) + against * self.worth(0)
            moved = sums + self.worth(1) - self.worth(0)
            y = np.stack([self.vote(kind) for kind in (1, *kinds)])
            more = Database(np.vstack([self.query, rows]), y, moved, sums)
            pairs.append(Pair(name, more, Database(rows, y[1:], sums, sums)))
        return tuple(pairs)

    def _tallies(self) -> dict[int, str]:
        """Return how many of the voters are against the record in question, and what to call that."""
        return {self.plan.n_neighbors: "one record more, against all others"}


def twin(ballot: Ballot, source: Source | None) -> Any:
    """Return an estimator with the same noise and room for all queries of an audit, each of which is drawn afresh.

    Returns: Not fitted.
    """
    plan = ballot.plan
    changed: dict[str, Any] = {
        "epsilon": None,
        "vote_noise": plan.vote_noise,
        "max_answered": _ROOM,
        "source": source,
    }
    if plan.screening is not None:
        changed |= {
            "screening_noise": plan.screening_noise,
            "threshold": plan.threshold,
            "max_screened": _ROOM,
        }
    if not isinstance(ballot.own, PateClassifier):
        changed["n_neighbors"] = plan.n_neighbors
    return clone(ballot.own).set_params(**changed)


def mixed(rate: float, loss: Floats) -> Floats:
    """Return the loss of a mechanism that sees the record with probability `rate`."""
    return loss if rate == 1 else np.logaddexp(np.log1p(-rate), np.log(rate) + loss)
