"""Adapters for voting estimators: worst-case records, and the stated law of answers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy.special import ndtr
from sklearn.base import clone

from nearveil.audit._experiment import DIMENSION, Bools, Coin, Floats, Law, Pair, compute_losses, compute_uniforms
from nearveil.privacy import Guarantee
from nearveil.privacy.events import ClippedVotes, GaussianNoisyMax, LaplaceNoisyMax, NoisyScreening, VoteHistogram
from nearveil.privacy.noise import Source
from nearveil.private_knn import PrivateKNeighborsRegressor
from nearveil.private_knn.plan import VotePlan
from studies.pate import PateClassifier

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


def make_records_pair(name: str, X: Floats, y: NDArray[Any], sums: Floats, without: Floats) -> Pair:
    """Return records with and without the first one, the target."""
    return Pair(name, VotingRecords(X, y, sums, without), VotingRecords(X[1:], y[1:], without, without))


@dataclass(frozen=True, eq=False)
class AnswerRows:
    """Answers to queries, one row each."""

    answered: Bools
    values: Floats  # released numbers; 0 for declined queries
    labels: NDArray[Any]  # shape (n, m); -1 for declined queries


class VoteReader:
    """Adapter for one voting estimator. It uses the parameters of the estimator, not its records."""

    labelled: ClassVar[bool] = False  # whether answers have labels
    multilabel: ClassVar[bool] = False  # whether an answer may have none or several
    whole = True  # whether a vote is 0 or 1
    laplace = False  # whether the noise is Laplace noise, not Gaussian
    weight_scale = 0.0  # factor of the released weights; 0 if none are released
    has_exact_law = True  # whether the law of an answer is known exactly

    def __init__(
        self, voter: Any, votes: Any, weights: Any, charge: Callable[[float], DpEvent], **parameters: Any
    ) -> None:
        # Labels of records that vote against the target (0) or with it (1), and their contributions to the sums.
        self.votes, self.weights = np.asarray(votes), np.asarray(weights, dtype=np.float64)
        self.charge = charge  # from noise to the event of one vote
        # An unfitted clone without account and source.
        self.voter = clone(voter).set_params(ledger=None, account=None, source=None, **parameters)
        self.length = float(getattr(voter, "feature_norm", None) or 1.0)
        rows = np.eye(DIMENSION)[:2] * self.length
        probe = clone(self.voter).fit(rows, self.votes[[1, 0]])
        self.plan: VotePlan = probe.plan_
        self.guarantee: Guarantee = probe.guarantee
        self.query: Floats = rows[0]  # the position of the target record
        self.pairs = self._make_pairs()  # records with and without the target

    def read(self, answers: Any) -> AnswerRows:
        """Convert the result of `answer`."""
        values = answers.votes.reshape(len(answers.answered), -1)
        if answers.weight is not None:
            values = np.column_stack([values, answers.weight * self.weight_scale])
        return AnswerRows(answers.answered, np.nan_to_num(values), np.reshape(answers.labels, (len(values), -1)))

    def decide(self, values: Floats) -> NDArray[Any]:
        """Return the labels that follow from released numbers, shape (n, m)."""
        return np.empty((len(values), 0))

    def _compute_chances(self, sums: Floats) -> Floats:
        """Return the probability of each label of an answer, given its exact sums."""
        raise NotImplementedError

    def derive_events(self, plan: VotePlan) -> dict[str, DpEvent]:
        """Return the events of a screening and a vote, derived from public parameters, not from the plan's events."""
        events = {"answered": self.charge(plan.vote_noise)}
        if plan.screening is not None:
            screening = NoisyScreening(plan.screening.noise, plan.screening.threshold, plan.n_neighbors)
            events["screened"] = screening if self.whole else screening.gaussian
        rate = self.plan.sampling_rate
        return {part: event if rate == 1 else PoissonSampledDpEvent(rate, event) for part, event in events.items()}

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
        rate, noise = self.plan.sampling_rate, self.plan.vote_noise
        loss = compute_losses(values, pair.first.sums, pair.second.sums, noise, laplace=self.laplace)
        return np.asarray(loss if rate == 1 else np.logaddexp(np.log1p(-rate), np.log(rate) + loss))

    def compute_uniforms(self, values: Floats, records: VotingRecords) -> list[Floats]:
        """Return the stated distribution function at released numbers, of shape (n, k)."""
        deviations = ((values - sums) / self.plan.vote_noise for sums in (records.sums, records.without))
        return list(self._mix(*(compute_uniforms(part, laplace=self.laplace) for part in deviations)).T)

    def list_coins(self, values: Floats, records: VotingRecords) -> list[Coin]:
        """Return the coins of released numbers."""
        del values, records
        return []

    def state_prediction_law(self) -> Law:
        """Return the law of the results of `predict`: of labels, coins of each and of declined queries."""

        def list_label_coins(labels: NDArray[Any], records: VotingRecords) -> list[Coin]:
            has_label = labels == 1 if self.multilabel else labels[:, None] == np.arange(2)
            passes = self.compute_passing(records)
            chances = self._mix(*map(self._compute_chances, (records.sums, records.without)))
            # Screening and vote use independent samples, so the probabilities multiply.
            declined = [] if self.multilabel else [(labels == -1, 1 - passes)]
            return [*zip(has_label.T, passes * chances, strict=True), *declined]

        if self.labelled:
            return Law(coins=list_label_coins)
        return Law(
            uniforms=lambda predictions, records: self.compute_uniforms(self.read(predictions).values, records),
            coins=lambda predictions, records: self.list_coins(self.read(predictions).values, records),
        )

    def are_consistent(self, read: AnswerRows) -> Bools:
        """Return, for each query, whether its labels follow from the released numbers."""
        expected = np.where(read.answered[:, None], self.decide(read.values), -1)
        return np.asarray((read.labels == expected).all(axis=1))

    def _make_pairs(self) -> tuple[Pair, ...]:
        """Return records with and without the target at the query; it displaces the farthest opposing voter."""
        k, rate = self.plan.n_neighbors, self.plan.sampling_rate
        count = k if rate == 1 else int(1.2 * (k + 9 * np.sqrt(k) + 40) / rate)
        angles = np.linspace(0.2, 1.2, count)
        axis = np.eye(DIMENSION)[1] * self.length
        rows = np.outer(np.cos(angles), self.query) + np.outer(np.sin(angles), axis)
        pairs = []
        for against, name in self._list_tallies().items():
            kinds = np.append(1, np.arange(count) < k - against).astype(np.int64)  # the target's, then the others'
            sums = (k - against) * self.weights[1] + against * self.weights[0]
            moved = sums + self.weights[1] - self.weights[0]
            pairs.append(make_records_pair(name, np.vstack([self.query, rows]), self.votes[kinds], moved, sums))
        return tuple(pairs)

    def _list_tallies(self) -> dict[int, str]:
        """Return the numbers of opposing voters to test, with a name for each."""
        return {self.plan.n_neighbors: "one record more, against all others"}


class ClassReader(VoteReader):
    """Votes on classes, by neighbours or teachers, hard or soft."""

    labelled = True

    def __init__(self, voter: Any) -> None:
        self.is_pate = isinstance(voter, PateClassifier)
        self.laplace = self.is_pate and voter.mechanism == "lnmax"
        self.whole = getattr(voter, "votes", "classes") != "soft"
        # The default teacher returns the class of a record at its position.
        self.has_exact_law = not self.is_pate or voter.estimator is None
        maximum = LaplaceNoisyMax if self.laplace else GaussianNoisyMax
        against, target = np.eye(2)[1], np.eye(2)[0]
        votes = [1, 0] if self.whole else [against, target]
        charge = maximum if self.is_pate else VoteHistogram
        super().__init__(voter, votes, [against, target], charge, classes=[0, 1], abstain_label=-1)

    def decide(self, values: Floats) -> NDArray[Any]:
        return np.asarray(values.argmax(axis=1)[:, None])

    def _compute_chances(self, sums: Floats) -> Floats:
        leads = np.array([sums[0] - sums[1], sums[1] - sums[0]]) / self.plan.vote_noise
        if not self.laplace:
            return np.asarray(ndtr(leads / math.sqrt(2)))
        loses = np.exp(-np.abs(leads)) * (2 + np.abs(leads)) / 4  # the difference of two Laplace variables
        return np.asarray(np.where(leads > 0, 1 - loses, loses))

    def _make_pairs(self) -> tuple[Pair, ...]:
        if not self.is_pate:
            return super()._make_pairs()
        rows, most = np.eye(DIMENSION)[:2], float(self.voter.n_teachers)
        before, after = np.array([most, 0.0]), np.array([most - 1, 1.0])
        # Teachers without records vote for class 0.
        return (make_records_pair("a record alone with its teacher", rows, np.array([1, 0]), after, before),)

    def _list_tallies(self) -> dict[int, str]:
        k, names = self.plan.n_neighbors, super()._list_tallies()
        if self.plan.sampling_rate == 1:
            names[k // 2 + 1] = "a record that flips the plurality"
            if self.plan.threshold is not None:
                names[int(min(max(round(self.plan.threshold), 1), k))] = "a record at the screening's threshold"
        return names


class LabelReader(VoteReader):
    """Votes on many labels at once, each record clipped."""

    labelled = multilabel = True

    def __init__(self, voter: Any) -> None:
        # Enough labels for the clip to matter: one record votes for the first half, another for the second.
        clip, half = voter.clip, max(1, math.floor(voter.clip or 1)) if voter.votes == "binary" else 1
        size = 1.0 if voter.votes == "binary" else clip
        votes = np.repeat([[0.0, size], [size, 0.0]], half, axis=1)
        if voter.votes == "signed":
            votes = np.array([[-clip, 0.0], [clip, 0.0]])
        weight = min(1.0, clip / np.abs(votes[0]).sum())
        # The factor of the released weights is a multiple of 2^-20.
        scales = {"binary": math.sqrt(max(clip, 1.0)), "nonnegative": float(clip)}
        self.weight_scale = math.floor(scales.get(voter.votes, 0.0) * 2**20) / 2**20
        weights = votes * weight
        if self.weight_scale:
            weights = np.column_stack([weights, np.full(2, weight * self.weight_scale)])
        charge = partial(ClippedVotes, clip=clip, votes=voter.votes)
        super().__init__(voter, votes, weights, charge, classes=list(range(2 * half)), abstain_label=-1)

    def decide(self, values: Floats) -> NDArray[Any]:
        return np.asarray(self._compute_surplus(values) > 0)

    def _compute_chances(self, sums: Floats) -> Floats:
        noise = self.plan.vote_noise * (math.hypot(1.0, 1 / (2 * self.weight_scale)) if self.weight_scale else 1.0)
        return np.asarray(ndtr(self._compute_surplus(sums) / noise))

    def _compute_surplus(self, values: Floats) -> Floats:
        """Return the votes of each label minus the required number."""
        return values[..., :-1] - values[..., -1:] / (2 * self.weight_scale) if self.weight_scale else values


class MeanReader(VoteReader):
    """The mean of the voters' numbers, read as their sum, with all numbers at the ends of the range."""

    def __init__(self, voter: Any) -> None:
        self.low, self.half_range = float(voter.low), (float(voter.high) - float(voter.low)) / 2
        # A median takes a vote in each of its steps.
        unit = math.sqrt(voter.depth) if voter.method == "median" else 2 * self.half_range
        weights = [[-self.half_range], [self.half_range]]
        super().__init__(voter, [voter.low, voter.high], weights, lambda noise: GaussianDpEvent(noise / unit))
        sums = np.array([records.sums for pair in self.pairs for records in (pair.first, pair.second)])
        # Noise must practically never leave the range, because clipping changes the law.
        ends = self.plan.n_neighbors * self.half_range
        inside = voter.method == "median" or np.abs(sums).max() + _FAR * self.plan.vote_noise < ends
        self.has_exact_law = self.plan.sampling_rate == 1 and inside

    def read(self, answers: Any) -> AnswerRows:
        answered, middle = ~np.isnan(answers), self.low + self.half_range
        sums = (np.nan_to_num(answers, nan=middle) - middle) * self.plan.n_neighbors
        return AnswerRows(answered, np.where(answered, sums, 0.0)[:, None], np.empty((len(answered), 0)))

    def _list_tallies(self) -> dict[int, str]:
        return {self.plan.n_neighbors // 2 + 1: "a number at one end of the range, or at the other"}


class MedianReader(MeanReader):
    """The median by bisection, read as its steps. All voters are at the ends of the range, so each step is a coin."""

    def read(self, answers: Any) -> AnswerRows:
        answered, depth = ~np.isnan(answers), int(self.voter.depth)  # a step is 1 for up, 0 for down
        part = (np.nan_to_num(answers, nan=self.low) - self.low) / (2 * self.half_range)
        cells = np.clip(np.floor(part * 2**depth), 0, 2**depth - 1).astype(np.int64)
        steps = (cells[:, None] >> np.arange(depth)[::-1]) & 1
        values = np.where(answered[:, None], steps, 0).astype(np.float64)
        return AnswerRows(answered, values, np.empty((len(answered), 0)))

    def compute_losses(self, values: Floats, pair: Pair) -> Floats:
        first, second = (self._compute_up(records) for records in (pair.first, pair.second))
        up, down = math.log(first / second), math.log((1 - first) / (1 - second))
        return np.asarray(np.where(values > 0, up, down).sum(axis=-1))

    def compute_uniforms(self, values: Floats, records: VotingRecords) -> list[Floats]:
        del values, records
        return []

    def list_coins(self, values: Floats, records: VotingRecords) -> list[Coin]:
        return [(step > 0, self._compute_up(records)) for step in values.T]

    def _compute_up(self, records: VotingRecords) -> float:
        """Return the probability of a step up: half the noisy surplus of high voters is positive."""
        return float(ndtr(float(records.sums[0]) / self.half_range / 2 / self.plan.vote_noise))


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


def count_queries(plan: VotePlan) -> int:
    """Return the number of queries that a plan accepts."""
    return next(iter(plan.caps.values()))
