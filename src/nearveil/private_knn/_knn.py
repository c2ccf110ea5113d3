"""Private-kNN: the nearest private records vote on a public query."""

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, MISSING, dataclass, field
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils._param_validation import Interval, StrOptions

from nearveil.privacy.parameters import PROBABILITY, allow_integers, allow_reals, parameter
from nearveil.private_knn.estimator import A, Answers, Tally, VotingClassifier, VotingEstimator
from nearveil.private_knn.neighbors import NO_VOTER, NeighborSearch, SearchEngine, Voters, draw_voters
from nearveil.private_knn.plan import Ballot, GaussianSums
from nearveil.private_knn.records import (
    MULTILABEL,
    Labels,
    Votes,
    Weights,
    check_records,
    make_hard_votes,
    make_label_votes,
    make_soft_votes,
)
from nearveil.private_knn.scaling import ColumnBounds


@dataclass(eq=False, repr=False, kw_only=True)
class NeighborEstimator(VotingEstimator[A]):
    """An estimator whose voters are the nearest records."""

    n_neighbors: int | None = parameter(None, allow_integers(1), None)
    sampling_rate: float = parameter(1.0, Interval(Real, 0, 1, closed="right"))
    feature_norm: float | None = parameter(None, allow_reals(0), None)
    bounds: ArrayLike | None = parameter(None, "array-like", None)
    engine: SearchEngine = parameter("auto", StrOptions(set(get_args(SearchEngine))))
    _votes: Labels | Weights = field(init=False)  # of each record
    _search: NeighborSearch = field(init=False)

    def _learn(self, rows: Any) -> None:
        """Prepare the search. Within bounds, distances are compared: no row is longer than the corner of the box."""
        norm = self.feature_norm
        if self.bounds is not None:
            self._bounds = ColumnBounds.make(self.bounds, rows.shape[1])
            rows, norm = self._bounds.scale(rows), math.sqrt(rows.shape[1]) if norm is None else norm
        self._search = NeighborSearch(rows, feature_norm=norm, engine=self.engine)

    def _draw_voters(self, queries: NDArray[np.float64], draws: int = 1) -> Iterator[list[Voters]]:
        plan = self.plan_
        return draw_voters(self._search, queries, plan.votes.sample, plan.n_neighbors, self._source, draws=draws)

    def _count_agreeing(self) -> tuple[float, str]:
        votes = self._votes
        which = "of one class" if isinstance(votes, Labels) else "in all"
        description = f"at most {votes.most_agreeing:,} records {which} can (this figure is for you alone)"
        return min(self.plan_.n_neighbors, votes.most_agreeing * self.plan_.sampling_rate), description


@dataclass(eq=False, repr=False)
class PrivateKNeighborsClassifier(NeighborEstimator[Answers], VotingClassifier):
    """Classify public queries by the votes of their nearest private records.

    Private-kNN (Zhu, Yu, Chandraker and Wang 2020), with the exact cost of its parameters. The guarantee is about the
    private records: all answers together reveal almost nothing about whether one record, features and label, is
    among them. Queries and answers are public.

    Give ``epsilon``, ``delta`` and ``max_answered``, and the rest is calibrated. Or give the noise yourself, and the
    guarantee states its cost.

    A fitted estimator holds the private records; so does its pickle. Treat both as private data.

    Parameters
    ----------
    epsilon : float, optional
        Of all answers together. It must be given, unless `vote_noise` is; given with noise it is a limit.
    delta : float, default=1e-5
        Choose it well below one over the number of records.
    max_answered : int, default=1000
        Maximum number of answered queries; later ones are declined.
    n_neighbors : int, optional
        Number of records that vote, chosen without looking at the private records. By default 8 for each unit of vote
        noise.
    sampling_rate : float, default=1.0
        Chance of a record to take part in a vote. Less than 1 saves nothing: at equal cost, a rate of 0.15 with 300
        voters is as noisy as a rate of 1 with 2,000, and adds the sampling's own variance.
    screening_noise : float, optional
        Standard deviation of the noise on the largest count; twice the vote noise by default.
    threshold : float, optional
        A query is answered if the noisy largest count reaches it; 0.6 of the voters by default.
    vote_noise : float, optional
        Standard deviation of the noise on every count.
    max_screened : int, optional
        Maximum number of screened queries; 1.5 times `max_answered` by default. 0 for no screening: every query is
        answered, up to `max_answered`.
    votes : {"classes", "soft", "binary", "nonnegative", "signed"}, default="classes"
        "classes": y has one label a record. "soft": y has a row of weights a record, of at least 0, that sum to at
        most 1. The others vote on many labels at once, without screening: rows of 0 and 1, of weights, or of weights
        of either sign.
    clip : float, optional
        For many labels: a record's votes are scaled down to this L1 norm (the supplement's tau). Choose about as many
        labels as records have: a record with more counts less. A label is given if the noisy sum of its votes is
        more than half of the noisy sum of the voters' weights; with signed votes, more than 0.
    classes : array-like, optional
        The public list of classes. By default the classes are read from the labels, and the guarantee is about a
        record of a class that occurs anyway.
    feature_norm : float, optional
        Public. None scales every row to norm 1, so that angles are compared. A number compares distances; rows that
        are longer than it are scaled down to it.
    bounds : tuple (low, high), optional
        Public bounds of the columns, each a number or a number for each column, from public knowledge alone. Rows and
        queries are scaled by them to [-1, 1], values beyond are clipped, and distances are compared.
    abstain_label : int or str, optional
        The label of declined queries, of the type of the classes and not one of them. By default -1, or "" if the
        classes are names; if that is a class, the number below all classes, or "declined".
    unit : str, default="record"
        The meaning of one row, which is protected; it must be the account's unit. Give "person with all images" only
        if each person has one row.
    ledger : Ledger or str, optional
        The ledger that records spending. Estimators show their parameters, so a URL with a password is refused: leave
        it to PGPASSWORD or ~/.pgpass, or give a Ledger.
    account : Account or str, optional
        Pays for every query before it is answered, and counts the caps: all copies, pickles and processes share them.
        A name is opened in the ledger if it is missing. Without an account, caps are counted in the memory of one
        process: fitting again resets them, and a pickle refuses to answer.
    engine : {"auto", "numpy", "cuda"}, default="auto"
        Search on the CPU or on a CUDA device. The answer does not depend on it.
    source : Source, optional
        Of the coins: the operating system's cryptographic generator by default.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    plan_ : VotePlan
        The caps on queries, and the noise.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> voter = PrivateKNeighborsClassifier(epsilon=2.0, max_answered=20, max_screened=0, classes=range(10))
    >>> answers = voter.fit(X[:1500], y[:1500]).predict(X[1500:1520])
    >>> answers.shape
    (20,)
    >>> print(voter.guarantee)
    Seeing the answers makes any conclusion about whether any one record is in the database at most 7.4 times as
    likely as it would be otherwise, plus 1.0e-5.
    """

    epsilon: float | None = parameter(None, allow_reals(0), None)
    delta: float = parameter(1e-5, PROBABILITY)
    max_answered: int = parameter(1000, allow_integers(1))
    _: KW_ONLY
    votes: Votes = parameter("classes", StrOptions({"classes", "soft", *MULTILABEL}))
    clip: float | None = parameter(None, allow_reals(0), None)

    def _read_records(self, X: ArrayLike, y: ArrayLike) -> tuple[Any, Ballot]:
        X, _ = check_records(self, X, y, multi_output=True)
        if self.votes == "classes":
            self.classes_, self._votes, ballot = make_hard_votes(y, self.classes)
        elif self.votes == "soft":
            self.classes_, self._votes, ballot = make_soft_votes(y, self.classes)
        else:
            self.classes_, self._votes, ballot = make_label_votes(y, self.classes, self.clip, self.votes)
        self._abstain_label = self._find_abstain_label(np.arange(2) if self.votes in MULTILABEL else self.classes_)
        return X, ballot

    def _count_votes(self, queries: NDArray[np.float64]) -> Iterator[Tally]:
        draws = 1 if self.plan_.screening is None else 2
        for samples in self._draw_voters(queries, draws):
            largest = self._votes.count(samples[1]).max(axis=1) * self.plan_.votes.ballot.unit if draws == 2 else None
            yield self._votes.count(samples[0]), largest

    def _make_answers(self, released: NDArray[np.float64], answered: NDArray[np.bool_]) -> Answers:
        if self.votes not in MULTILABEL:
            return super()._make_answers(released, answered)
        votes, weight, thresholds = np.full((len(answered), len(self.classes_)), np.nan), None, np.zeros(len(answered))
        votes[answered] = released[:, : len(self.classes_)]
        if isinstance(self._votes, Weights) and self._votes.weight_scale is not None:
            weight = np.full(len(answered), np.nan)
            weight[answered] = released[:, -1] / self._votes.weight_scale
            thresholds = weight / 2
        labels = np.where(answered[:, None], votes > thresholds[:, None], self._abstain_label)
        return Answers(labels.astype(int), answered, votes, weight)


_STEPS = 2**20  # values are rounded to this part of their range, or finer
_MEAN_NEIGHBORS = 32.0  # voters for each unit of noise over the range: the mean's noise is a 32nd of the range
_FARTHEST = 1e100  # of bounds, and one over the least range
_MEDIAN_NEIGHBORS = 8.0  # the bisection's noise is an eighth of the voters


@dataclass(frozen=True)
class ValueStatistic:
    """The statistic of the voters' values that is released: their mean or median within bounds."""

    low: float
    high: float
    method: str
    depth: int

    def __post_init__(self) -> None:
        """Check the bounds."""
        if not (max(abs(self.low), abs(self.high)) <= _FARTHEST and self.width >= 1 / _FARTHEST):  # also if one is NaN
            raise ValueError(f"low must be below high, both within {_FARTHEST:g} of 0")

    @property
    def width(self) -> float:
        """Largest difference of two values."""
        return self.high - self.low

    @property
    def middle(self) -> float:
        """Origin of the rounded values."""
        return (self.low + self.high) / 2

    @property
    def unit(self) -> float:
        """Values are rounded to multiples of it."""
        return math.ldexp(1.0, math.floor(math.log2(self.width / _STEPS)))

    @property
    def ballot(self) -> Ballot:
        """The release of one query."""
        if self.method == "mean":
            neighbors = _MEAN_NEIGHBORS / self.width
            return Ballot(GaussianSums(self.width), 1, self.unit, can_screen=False, neighbors=neighbors)
        event = GaussianSums(math.sqrt(self.depth))
        return Ballot(event, self.depth, unit=0.5, can_screen=False, neighbors=_MEDIAN_NEIGHBORS)

    def votes(self, y: NDArray[np.float64]) -> Weights:
        """Return the values as integers: units from the middle, or cells of the bisection."""
        y = np.clip(y, self.low, self.high)
        if self.method == "mean":
            most = math.floor(self.width / 2 / self.unit)
            whole, absent = np.clip(np.rint((y - self.middle) / self.unit), -most, most), 0
        else:
            cells = 2**self.depth
            whole, absent = np.clip(np.floor((y - self.low) / self.width * cells), 0, cells - 1), NO_VOTER
        return Weights(np.append(whole, absent).astype(np.int64)[:, None])


def count_balance(cells: NDArray[np.int64], points: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the voters below a point minus those above, in half votes; one voter moves it by at most one vote."""
    present = cells != NO_VOTER
    below = np.sum((cells < points[:, None]) & present, axis=1)
    return np.asarray(2 * below - np.sum(present, axis=1))


@dataclass(eq=False, repr=False)
class PrivateKNeighborsRegressor(RegressorMixin, NeighborEstimator[NDArray[np.float64]]):  # type: ignore[misc]
    """Predict numbers for public queries from their nearest private records.

    "mean" releases the sum of the voters' values, clipped to [low, high], with noise. "median" finds the middle value
    by bisection: each step asks how many voters are below a point, with noise, so a few records far away move it
    little. Both are the supplement's suggestions; the sensitivities are proved in ``docs/theory/private-knn.md`` and
    attacked by ``tests/private_knn/test_regressor.py``. A fitted estimator and its pickle hold the private records.

    Parameters
    ----------
    low, high : float
        Public bounds of the values. Do not read them from the private records.
    method : {"mean", "median"}, default="mean"
    n_neighbors : int, optional
        How many records vote. By default so many that the noise is a 32nd of the range (mean) or an eighth of the
        voters (median).
    vote_noise : float, optional
        Standard deviation of the noise: on the sum of the values, or on each count of the bisection.
    depth : int, default=8
        Steps of the bisection; the median is known up to a part 2^-depth of the range.
    epsilon, delta, max_answered, sampling_rate, feature_norm, bounds, unit, ledger, account, engine, source
        As of :class:`PrivateKNeighborsClassifier`.

    Attributes
    ----------
    plan_ : VotePlan

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(size=(20_000, 2))
    >>> voter = PrivateKNeighborsRegressor(0, 2, epsilon=2.0, max_answered=10, feature_norm=2.0, n_neighbors=2000)
    >>> values = voter.fit(X, X.sum(axis=1)).predict([[0.3, 0.4], [0.5, 0.9]])
    >>> bool(np.all(np.abs(values - [0.7, 1.4]) < 0.1))
    True
    """

    low: float = parameter(MISSING, Real)
    high: float = parameter(MISSING, Real)
    _: KW_ONLY
    method: Literal["mean", "median"] = parameter("mean", StrOptions({"mean", "median"}))
    depth: int = parameter(8, allow_integers(1, 30))
    _votes: Weights = field(init=False)
    _statistic: ValueStatistic = field(init=False)

    def _read_records(self, X: ArrayLike, y: ArrayLike) -> tuple[Any, Ballot]:
        X, y = check_records(self, X, y, y_numeric=True)
        self._statistic = statistic = ValueStatistic(float(self.low), float(self.high), self.method, int(self.depth))
        self._votes = statistic.votes(np.asarray(y, dtype=np.float64))
        self._gain = statistic.width / 2 if self.method == "mean" else 0.5
        return X, statistic.ballot

    def _count_votes(self, queries: NDArray[np.float64]) -> Iterator[Tally]:
        for (voters,) in self._draw_voters(queries):
            yield self._votes.count(voters) if self.method == "mean" else self._votes.units[voters, 0], None

    def _release(self, sums: NDArray[np.int64]) -> NDArray[np.float64]:
        if self.method == "mean":
            return super()._release(sums)
        low = np.zeros(len(sums), dtype=np.int64)
        for step in reversed(range(self._statistic.depth)):
            point = low + (1 << step)
            low = np.where(super()._release(count_balance(sums, point)) < 0, point, low)
        return low[:, None].astype(np.float64)

    def _make_answers(self, released: NDArray[np.float64], answered: NDArray[np.bool_]) -> NDArray[np.float64]:
        statistic, values = self._statistic, np.full(len(answered), np.nan)
        if self.method == "mean":
            estimates = statistic.middle + released[:, 0] / self.plan_.n_neighbors
        else:
            estimates = statistic.low + statistic.width * (released[:, 0] + 0.5) / 2**statistic.depth
        values[answered] = np.clip(estimates, statistic.low, statistic.high)
        return values

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:
        """Answer public queries as :meth:`answer` does: within [low, high]; NaN where a query was declined.

        A sample of fewer records than may vote draws the mean to the middle of the range.
        """
        return self.answer(X)

    score = VotingEstimator.score  # the mixin's cannot score declined queries
    _metric = staticmethod(r2_score)

    def _predict_answered(self, X: ArrayLike) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        values = self.answer(X)
        return values, ~np.isnan(values)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags
