"""Adapters for voting estimators: worst-case records, and the stated law of answers."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy.special import ndtr
from sklearn.base import clone

from nearveil.audit._experiment import (
    DIMENSION,
    Bools,
    Coin,
    Floats,
    Pair,
    compute_gaussian_uniforms,
    compute_laplace_uniforms,
)
from nearveil.privacy import Guarantee
from nearveil.privacy.events import ClippedVotes, GaussianNoisyMax, LaplaceNoisyMax, NoisyScreening, VoteHistogram
from nearveil.privacy.noise import Source
from nearveil.private_knn import PateClassifier, PrivateKNeighborsRegressor
from nearveil.private_knn.plan import VotePlan

LARGEST_VALUE = 2.0**-17  # of released votes: the grid of the noise is at most 2^-16 of its scale
_UNLIMITED = 10**9  # queries
_FAR = 12.0  # standard deviations that noise never exceeds


@dataclass(frozen=True, eq=False)
class VotingRecords:
    """Private records, and their exact votes on the query."""

    X: Floats
    y: NDArray[Any]
    sums: Floats  # with every record in the sample
    without: Floats  # without the target record


@dataclass(frozen=True, eq=False)
class Read:
    """Answers to queries, one row each."""

    answered: Bools
    values: Floats  # released numbers; 0 for declined queries
    labels: NDArray[Any]


class VoteReader(ABC):
    """Adapter for one voting estimator. It uses the parameters of the estimator, not its records."""

    labelled: ClassVar[bool] = False

    def __init__(self, voter: Any) -> None:
        # An unfitted clone without account and source.
        self.voter = clone(voter).set_params(ledger=None, account=None, source=None, **self._choose_parameters(voter))
        self.length = float(getattr(voter, "feature_norm", None) or 1.0)
        rows = np.eye(DIMENSION)[:2] * self.length
        probe = clone(self.voter).fit(rows, np.stack([self.vote(1), self.vote(0)]))
        self.plan: VotePlan = probe.plan_
        self.guarantee: Guarantee = probe.guarantee
        self.query: Floats = rows[0]  # the position of the target record
        self.pairs = self._make_pairs()  # records with and without the target

    @property
    def queries(self) -> int:
        """Number of queries that the plan allows."""
        return int(self.plan.max_answered if self.plan.screening is None else self.plan.max_screened)

    @property
    def has_exact_law(self) -> bool:
        """Whether the law of an answer is known exactly."""
        return True

    @property
    def _whole(self) -> bool:
        """Whether a vote is 0 or 1."""
        return True

    def derive_events(self, plan: VotePlan) -> tuple[DpEvent, DpEvent | None]:
        """Return the events of a vote and a screening, derived from public parameters, not from the plan's events."""
        votes = self._sample(self._charge(plan.vote_noise))
        if plan.screening is None:
            return votes, None
        screening = NoisyScreening(plan.screening.noise, plan.screening.threshold, plan.n_neighbors)
        return votes, self._sample(screening if self._whole else screening.gaussian)

    def _sample(self, event: DpEvent) -> DpEvent:
        rate = self.plan.sampling_rate
        return event if rate == 1 else PoissonSampledDpEvent(rate, event)

    def _mix(self, inside: Any, outside: Any) -> Any:
        """Average over whether the target is in the sample."""
        rate = self.plan.sampling_rate
        return rate * inside + (1 - rate) * outside

    def compute_passing(self, records: VotingRecords) -> float:
        """Return the probability that a screening passes."""
        screening = self.plan.screening
        if screening is None:
            return 1.0
        tops = ((float(sums.max()) - screening.threshold) / screening.noise for sums in (records.sums, records.without))
        return float(self._mix(*map(ndtr, tops)))

    def compute_losses(self, values: Floats, pair: Pair) -> Floats:
        """Return the log-likelihood ratio of released numbers, of shape (..., k), first world against second."""
        inside, outside = (self._measure_distance(values - records.sums) for records in (pair.first, pair.second))
        rate, loss = self.plan.sampling_rate, outside - inside
        return loss if rate == 1 else np.logaddexp(np.log1p(-rate), np.log(rate) + loss)

    def compute_uniforms(self, values: Floats, records: VotingRecords) -> list[Floats]:
        """Return the stated distribution function at released numbers, of shape (n, k)."""
        deviations = ((values - sums) / self.plan.vote_noise for sums in (records.sums, records.without))
        return list(self._mix(*map(self._distribute, deviations)).T)

    def list_coins(self, values: Floats, records: VotingRecords) -> list[Coin]:
        """Return the coins of released numbers."""
        del values, records
        return []

    def list_label_coins(self, labels: NDArray[Any], records: VotingRecords) -> list[Coin]:
        """Return the coins of labels, if only labels are released."""
        del labels, records
        return []

    def are_consistent(self, read: Read) -> Bools:
        """Return, for each query, whether its label follows from the released numbers."""
        return np.ones(len(read.answered), dtype=np.bool_)

    def _measure_distance(self, deviations: Floats) -> Floats:
        return np.asarray((deviations**2).sum(axis=-1) / (2 * self.plan.vote_noise**2))

    def _distribute(self, deviations: Floats) -> Floats:
        return compute_gaussian_uniforms(deviations)

    def _choose_parameters(self, voter: Any) -> dict[str, Any]:
        """Return public parameters that depend on the records of the audit."""
        del voter
        return {}

    @abstractmethod
    def read(self, answers: Any) -> Read:
        """Convert the result of `answer`."""

    @abstractmethod
    def _charge(self, noise: float) -> DpEvent:
        """Return the event of one vote with this noise."""

    @abstractmethod
    def vote(self, kind: int) -> Any:
        """Return the label of a record that votes against the target (0), or with it (1)."""

    @abstractmethod
    def weigh(self, kind: int) -> Floats:
        """Return the contribution of that record to the sums."""

    def _make_pairs(self) -> tuple[Pair, ...]:
        """Return records with and without the target at the query; it displaces the farthest opposing voter."""
        k, rate = self.plan.n_neighbors, self.plan.sampling_rate
        count = k if rate == 1 else int(1.2 * (k + 9 * np.sqrt(k) + 40) / rate)
        angles = np.linspace(0.2, 1.2, count)
        axis = np.eye(DIMENSION)[1] * self.length
        rows = np.outer(np.cos(angles), self.query) + np.outer(np.sin(angles), axis)
        pairs = []
        for against, name in self._list_tallies().items():
            kinds = np.zeros(count, dtype=np.int64)
            kinds[: k - against] = 1
            sums = (k - against) * self.weigh(1) + against * self.weigh(0)
            moved = sums + self.weigh(1) - self.weigh(0)
            y = np.stack([self.vote(kind) for kind in (1, *kinds)])
            more = VotingRecords(np.vstack([self.query, rows]), y, moved, sums)
            pairs.append(Pair(name, more, VotingRecords(rows, y[1:], sums, sums)))
        return tuple(pairs)

    def _list_tallies(self) -> dict[int, str]:
        """Return the numbers of opposing voters to test, with a name for each."""
        return {self.plan.n_neighbors: "one record more, against all others"}


class ClassReader(VoteReader):
    """Votes on classes, by neighbours or teachers, hard or soft."""

    labelled = True

    @property
    def has_exact_law(self) -> bool:
        """True except for custom teachers: the default teacher returns the class of a record at its position."""
        return not self._is_pate or self.voter.estimator is None

    @property
    def _is_pate(self) -> bool:
        return isinstance(self.voter, PateClassifier)

    @property
    def _is_laplace(self) -> bool:
        return self._is_pate and self.voter.mechanism == "lnmax"

    @property
    def _whole(self) -> bool:
        return getattr(self.voter, "votes", "classes") != "soft"

    def read(self, answers: Any) -> Read:
        """Convert labels, and votes for both classes."""
        return Read(answers.answered, np.nan_to_num(answers.votes), np.asarray(answers.labels))

    def are_consistent(self, read: Read) -> Bools:
        """Return whether each label is the class with the most votes."""
        expected = np.where(read.answered, read.values.argmax(axis=1), -1)
        return np.asarray(read.labels == expected)

    def list_label_coins(self, labels: NDArray[Any], records: VotingRecords) -> list[Coin]:
        """Return the coins of each class and of declined queries."""
        passes = self.compute_passing(records)
        wins = (self._compute_win(float(sums[0] - sums[1])) for sums in (records.sums, records.without))
        chance = float(self._mix(*wins))
        # Screening and vote use independent samples, so the probabilities multiply.
        return [(labels == 0, passes * chance), (labels == 1, passes * (1 - chance)), (labels == -1, 1 - passes)]

    def _compute_win(self, ahead: float) -> float:
        """Return the probability that class 0 wins with this lead."""
        if not self._is_laplace:
            return float(ndtr(ahead / (math.sqrt(2) * self.plan.vote_noise)))
        deviations = abs(ahead) / self.plan.vote_noise  # the difference of two Laplace variables
        loses = math.exp(-deviations) * (2 + deviations) / 4
        return 1 - loses if ahead > 0 else loses

    def _choose_parameters(self, voter: Any) -> dict[str, Any]:
        del voter
        return {"classes": [0, 1], "abstain_label": -1}

    def _charge(self, noise: float) -> DpEvent:
        if self._is_pate:
            return (LaplaceNoisyMax if self._is_laplace else GaussianNoisyMax)(noise)
        return VoteHistogram(noise)

    def _measure_distance(self, deviations: Floats) -> Floats:
        if self._is_laplace:
            return np.asarray(np.abs(deviations).sum(axis=-1) / self.plan.vote_noise)
        return super()._measure_distance(deviations)

    def _distribute(self, deviations: Floats) -> Floats:
        return compute_laplace_uniforms(deviations) if self._is_laplace else super()._distribute(deviations)

    def vote(self, kind: int) -> Any:
        return np.int64(1 - kind) if self._whole else self.weigh(kind)

    def weigh(self, kind: int) -> Floats:
        return np.asarray(np.eye(2)[1 - kind])

    def _make_pairs(self) -> tuple[Pair, ...]:
        if not self._is_pate:
            return super()._make_pairs()
        rows, most = np.eye(DIMENSION)[:2], float(self.voter.n_teachers)
        before, after = np.array([most, 0.0]), np.array([most - 1, 1.0])
        # Teachers without records vote for class 0.
        without = VotingRecords(rows[1:], np.array([0]), before, before)
        return (Pair("a record alone with its teacher", VotingRecords(rows, np.array([1, 0]), after, before), without),)

    def _list_tallies(self) -> dict[int, str]:
        k, names = self.plan.n_neighbors, super()._list_tallies()
        if self.plan.sampling_rate == 1:
            names[k // 2 + 1] = "a record that flips the plurality"
            if self.plan.threshold is not None:
                names[int(min(max(round(self.plan.threshold), 1), k))] = "a record at the screening's threshold"
        return names


class LabelReader(VoteReader):
    """Votes on many labels at once, each record clipped."""

    labelled = True

    def read(self, answers: Any) -> Read:
        """Convert labels, votes and the scaled sum of the weights."""
        weights = [] if self._scale is None else [answers.weight * self._scale]
        values = np.column_stack([answers.votes, *weights])
        return Read(answers.answered, np.nan_to_num(values), np.asarray(answers.labels))

    def are_consistent(self, read: Read) -> Bools:
        """Return whether the labels are those with enough votes."""
        expected = np.where(read.answered[:, None], self._compute_surplus(read.values) > 0, -1)
        return np.asarray((read.labels == expected).all(axis=1))

    def list_label_coins(self, labels: NDArray[Any], records: VotingRecords) -> list[Coin]:
        """Return the coin of each label."""
        noise = self.plan.vote_noise * (1.0 if self._scale is None else math.hypot(1.0, 1 / (2 * self._scale)))
        chances = (ndtr(self._compute_surplus(sums) / noise) for sums in (records.sums, records.without))
        return list(zip((labels == 1).T, self._mix(*chances), strict=True))

    def _compute_surplus(self, values: Floats) -> Floats:
        """Return the votes of each label minus the required number."""
        return values if self._scale is None else values[..., :-1] - values[..., -1:] / (2 * self._scale)

    @property
    def _scale(self) -> float | None:
        """The factor of the released weights, a multiple of 2^-20; None if none are released."""
        clip = float(self.voter.clip)
        scales = {"binary": math.sqrt(max(clip, 1.0)), "nonnegative": clip}
        scale = scales.get(self.voter.votes)
        return None if scale is None else math.floor(scale * 2**20) / 2**20

    def _choose_parameters(self, voter: Any) -> dict[str, Any]:
        # Enough labels for the clip to matter: one record votes for the first half, another for the second.
        self._half = max(1, math.floor(voter.clip or 1)) if voter.votes == "binary" else 1
        return {"classes": list(range(2 * self._half)), "abstain_label": -1}

    def _charge(self, noise: float) -> DpEvent:
        return ClippedVotes(noise, self.voter.clip, self.voter.votes)

    def vote(self, kind: int) -> Any:
        if self.voter.votes == "signed":
            return np.array([self.voter.clip if kind else -self.voter.clip, 0.0])
        size = 1.0 if self.voter.votes == "binary" else self.voter.clip
        return np.repeat([size, 0.0] if kind else [0.0, size], self._half)

    def weigh(self, kind: int) -> Floats:
        weight = min(1.0, self.voter.clip / np.abs(self.vote(kind)).sum())
        return np.append(self.vote(kind) * weight, [] if self._scale is None else weight * self._scale)


class MeanReader(VoteReader):
    """The mean of the voters' numbers, read as their sum, with all numbers at the ends of the range."""

    @property
    def has_exact_law(self) -> bool:
        """True if noise practically never leaves the range, because clipping changes the law."""
        ends = self.plan.n_neighbors * self._reach
        sums = [records.sums for pair in self.pairs for records in (pair.first, pair.second)]
        farthest = max(float(np.abs(values).max()) for values in sums)
        return farthest + _FAR * self.plan.vote_noise < ends and self.plan.sampling_rate == 1

    @property
    def _reach(self) -> float:
        return (float(self.voter.high) - float(self.voter.low)) / 2

    def read(self, answers: Any) -> Read:
        """Compute the sum from the mean."""
        answered, middle = ~np.isnan(answers), (float(self.voter.low) + float(self.voter.high)) / 2
        sums = (np.nan_to_num(answers, nan=middle) - middle) * self.plan.n_neighbors
        return Read(answered, np.where(answered, sums, 0.0)[:, None], np.empty((len(answered), 0)))

    def _charge(self, noise: float) -> DpEvent:
        return GaussianDpEvent(noise / (2 * self._reach))

    def vote(self, kind: int) -> Any:
        return np.float64(self.voter.high if kind else self.voter.low)

    def weigh(self, kind: int) -> Floats:
        return np.array([self._reach if kind else -self._reach])

    def _list_tallies(self) -> dict[int, str]:
        return {self.plan.n_neighbors // 2 + 1: "a number at one end of the range, or at the other"}


class MedianReader(MeanReader):
    """The median by bisection, read as its steps. All voters are at the ends of the range, so each step is a coin."""

    @property
    def has_exact_law(self) -> bool:
        """True if all steps use the same voters."""
        return self.plan.sampling_rate == 1

    def read(self, answers: Any) -> Read:
        """Compute the steps: 1 for up, 0 for down."""
        answered, depth = ~np.isnan(answers), int(self.voter.depth)
        part = (np.nan_to_num(answers, nan=self.voter.low) - self.voter.low) / (2 * self._reach)
        cells = np.clip(np.floor(part * 2**depth), 0, 2**depth - 1).astype(np.int64)
        steps = (cells[:, None] >> np.arange(depth)[::-1]) & 1
        return Read(answered, np.where(answered[:, None], steps, 0).astype(np.float64), np.empty((len(answered), 0)))

    def compute_losses(self, values: Floats, pair: Pair) -> Floats:
        """Return the log-likelihood ratio of steps, of shape (..., depth)."""
        first, second = (self._compute_up(records) for records in (pair.first, pair.second))
        return np.asarray(
            np.where(values > 0, math.log(first / second), math.log((1 - first) / (1 - second))).sum(axis=-1)
        )

    def compute_uniforms(self, values: Floats, records: VotingRecords) -> list[Floats]:
        """Return nothing: steps are coins."""
        del values, records
        return []

    def list_coins(self, values: Floats, records: VotingRecords) -> list[Coin]:
        """Return the coin of each step."""
        return [(step > 0, self._compute_up(records)) for step in values.T]

    def _compute_up(self, records: VotingRecords) -> float:
        """Return the probability of a step up: half the noisy surplus of high voters is positive."""
        surplus = float(records.sums[0]) / self._reach
        return float(ndtr(surplus / 2 / self.plan.vote_noise))

    def _charge(self, noise: float) -> DpEvent:
        return GaussianDpEvent(noise / math.sqrt(self.voter.depth))


def make_reader(voter: Any) -> VoteReader:
    """Return the adapter for an estimator."""
    if isinstance(voter, PrivateKNeighborsRegressor):
        return MeanReader(voter) if voter.method == "mean" else MedianReader(voter)
    return ClassReader(voter) if getattr(voter, "votes", "classes") in ("classes", "soft") else LabelReader(voter)


def make_twin(reader: VoteReader, source: Source | None) -> Any:
    """Return an unfitted estimator with the same noise and without limits on queries."""
    plan = reader.plan
    parameters = {"epsilon": None, "vote_noise": plan.vote_noise, "max_answered": _UNLIMITED, "source": source}
    if plan.screening is not None:
        parameters |= {"screening_noise": plan.screening_noise, "threshold": plan.threshold, "max_screened": _UNLIMITED}
    if not isinstance(reader.voter, PateClassifier):
        parameters["n_neighbors"] = plan.n_neighbors
    return clone(reader.voter).set_params(**parameters)
