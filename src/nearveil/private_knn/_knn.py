"""Private-kNN: the nearest private records vote on a public query."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import KW_ONLY, MISSING, dataclass, field, replace
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted

from nearveil.cluster import is_dask_array
from nearveil.ledger import new_key
from nearveil.ledger.store import digest
from nearveil.privacy.parameters import PROBABILITY, allow_integers, allow_reals, parameter
from nearveil.private_knn import records
from nearveil.private_knn.estimator import A, Answers, Tally, VotingClassifier, VotingEstimator
from nearveil.private_knn.individual import (
    CLEAR_RATIO,
    LEAST_PUBLIC,
    QueryLog,
    RadiusRule,
    Terms,
    VoteForecast,
    encode_answers,
    encode_n_records,
)
from nearveil.private_knn.neighbors import NO_VOTER, GroupSearch, NeighborSearch, SearchEngine, Voters, draw_voters
from nearveil.private_knn.plan import Ballot, GaussianSums, NoiseWarning, VotePlan, make_plan
from nearveil.private_knn.scaling import ColumnBounds
from nearveil.private_knn.spending import ExhaustedError, can_pay
from nearveil.progress import Tick

Accounting = Literal["auto", "individual", "worst-case"]

_CAPS_ONLY = ("n_neighbors", "screening_noise", "threshold")  # parameters without meaning for individual accounting
_MARGIN = 2.0  # units of noise between the first two classes of an answer
_DEVIATIONS = 2.0  # of the noise between the released number of records and its lower bound


@dataclass(eq=False, repr=False, kw_only=True)
class NeighborEstimator(VotingEstimator[A]):
    """An estimator whose voters are the nearest records."""

    n_neighbors: int | None = parameter(None, allow_integers(1), None)
    sampling_rate: float = parameter(1.0, Interval(Real, 0, 1, closed="right"))
    feature_norm: float | None = parameter(None, allow_reals(0), None)
    bounds: ArrayLike | None = parameter(None, "array-like", None)
    engine: SearchEngine = parameter("auto", StrOptions(set(get_args(SearchEngine))))
    _votes: records.Labels | records.Weights = field(init=False)  # of each record
    _search: NeighborSearch | GroupSearch = field(init=False)

    def _learn(self, rows: Any) -> None:
        """Prepare the search. Within bounds, distances are compared: no row is longer than the corner of the box."""
        if self._bounds is not None:
            rows = self._bounds.scale(rows)
        search = NeighborSearch(rows, feature_norm=self._find_norm(rows.shape[1]), engine=self.engine)
        self._search = search if self._groups is None else GroupSearch(search, self._groups)

    def _find_norm(self, n_features: int) -> float | None:
        within_bounds = self._bounds is not None and self.feature_norm is None
        return math.sqrt(n_features) if within_bounds else self.feature_norm

    def _read_bounds(self, rows: Any) -> None:
        if self.bounds is not None:
            self._bounds = ColumnBounds.make(self.bounds, rows.shape[1])

    def _draw_voters(self, queries: NDArray[np.float64], draws: int = 1) -> Iterator[list[Voters]]:
        plan = self.plan_
        return draw_voters(self._search, queries, plan.votes.sample, plan.n_neighbors, self._source, draws=draws)

    def _count_agreeing(self) -> tuple[float, str]:
        votes = self._votes
        which = "of one class" if isinstance(votes, records.Labels) else "in all"
        description = f"at most {votes.most_agreeing:,} records {which} can (this figure is for you alone)"
        return min(self.plan_.n_neighbors, votes.most_agreeing * self.plan_.sampling_rate), description


@dataclass(eq=False, repr=False)
class PrivateKNeighborsClassifier(NeighborEstimator[Answers], VotingClassifier):
    """Classify public queries by the votes of their nearest private records.

    Private-kNN (Zhu, Yu, Chandraker and Wang 2020), with the exact cost of its parameters. The guarantee is about the
    private records: all answers together reveal almost nothing about whether one record, features and label, is
    among them. Queries and answers are public.

    Give ``epsilon``, ``delta`` and ``max_answered`` to calibrate the rest, or the noise; the guarantee states its cost.

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
        Number of records that vote, chosen without looking at the records. By default 8 for each unit of vote noise.
    accounting : {"auto", "individual", "worst-case"}, default="auto"
        "individual" limits the votes of each record: a record votes where it is within a public radius of the query,
        until its votes are used up, with noise for these alone. It needs `public` rows in `fit`, and all queries at
        once: a call of `predict` with a part of `max_answered` queries gets that part of the budget. "worst-case"
        charges every answer to every record. "auto": individual with 300 public rows and no worst-case parameter.
    least_records : int, optional
        Public lower bound on the number of records (or groups), for individual accounting. By default the number is
        released with noise, for a hundredth of the budget.
    crowding : float, optional
        For a stream of queries, with individual accounting: votes are planned for calm queries, spread like the public
        rows, times this factor, for all calls together. Queries near which most public rows have used up their votes
        are declined, publicly. By default each call is a batch of its own.
    margin : float, optional
        Decline if the noisy votes of the two first classes differ by less than so many units of noise, with individual
        accounting. Costs nothing. By default 2, and 0 if `max_screened` is 0.
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
        Maximum number of screened queries; 1.5 times `max_answered` by default. 0: every query is answered.
    votes : {"classes", "soft", "binary", "nonnegative", "signed"}, default="classes"
        "classes": y has one label a record. "soft": y has a row of weights a record, of at least 0, that sum to at
        most 1. The others vote on many labels, without screening: rows of 0 and 1, of weights, or of signed weights.
    clip : float, optional
        For many labels: a record's votes are scaled down to this L1 norm (the supplement's tau). Choose about as many
        labels as records have: a record with more counts less. A label is given if the noisy sum of its votes is
        more than half of the noisy sum of the voters' weights; with signed votes, more than 0.
    classes : array-like, optional
        The public list of classes. By default those of the labels; the guarantee then assumes that they occur anyway.
    feature_norm : float, optional
        Public. None scales rows to norm 1, to compare angles. A number compares distances, and limits the norm to it.
    bounds : tuple (low, high), optional
        Public bounds of the columns, each a number or a number for each column, from public knowledge alone. Rows and
        queries are scaled by them to [-1, 1], values beyond are clipped, and distances are compared.
    abstain_label : int or str, optional
        The label of declined queries, of the type of the classes and not one of them. By default -1, or "" if the
        classes are names; if that is a class, the number below all classes, or "declined".
    unit : str, default="record"
        The protected meaning of one row, and the account's unit. Give "person" only if each person has one row.
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
    votes: records.Votes = parameter("classes", StrOptions({"classes", "soft", *records.MULTILABEL}))
    clip: float | None = parameter(None, allow_reals(0), None)
    accounting: Accounting = parameter("auto", StrOptions(set(get_args(Accounting))))
    least_records: int | None = parameter(None, allow_integers(1), None)
    crowding: float | None = parameter(None, Interval(Real, 1, None, closed="left"), None)
    margin: float | None = parameter(None, Interval(Real, 0, None, closed="left"), None)
    _rule: RadiusRule = field(init=False)
    _worst_case: str = field(init=False)

    def _read_records(self, X: ArrayLike, y: ArrayLike) -> tuple[Any, Ballot]:
        X, _ = records.check_records(self, X, y, multi_output=True)
        self._read_bounds(X)
        if self.votes == "classes":
            self.classes_, self._votes, ballot = records.make_hard_votes(y, self.classes)
        elif self.votes == "soft":
            self.classes_, self._votes, ballot = records.make_soft_votes(y, self.classes)
        else:
            self.classes_, self._votes, ballot = records.make_label_votes(y, self.classes, self.clip, self.votes)
        classes = np.arange(2) if self.votes in records.MULTILABEL else self.classes_
        self._abstain_label = self._find_abstain_label(classes)
        return X, ballot

    def _choose_plan(
        self, ballot: Ballot, rows: Any, public: ArrayLike | None = None, public_groups: ArrayLike | None = None
    ) -> VotePlan:
        if not self._use_individual(rows, public, public_groups):
            return super()._choose_plan(ballot, rows)
        self._rule = self._read_public(public, public_groups)
        request = replace(
            self._make_request(replace(ballot, event=GaussianSums(1.0), can_screen=False)),
            n_neighbors=1,
            individual=True,
            count_records=self.least_records is None,
        )
        plan = make_plan(request)
        if self.accounting == "auto" and not can_pay(self.ledger, self.account, self._make_guarantee(plan)):
            self._worst_case = "the account was opened for it"  # an account keeps its accounting
            return super()._choose_plan(ballot, rows)
        return plan

    def _use_individual(self, rows: Any, public: ArrayLike | None, public_groups: ArrayLike | None) -> bool:
        """Return whether a record's own votes are limited; raise if they must be and cannot, or warn."""
        problems = ['accounting is "worst-case"'] * (self.accounting == "worst-case")
        problems += ["vote_noise is given"] * (self.accounting == "auto" and self.vote_noise is not None)
        problems += [f"{name} must be left out" for name in _CAPS_ONLY if getattr(self, name) is not None]
        problems += ['votes must be "classes" or "soft"'] * (self.votes in records.MULTILABEL)
        problems += ["sampling_rate must be 1"] * (self.sampling_rate != 1)
        problems += ["max_screened must be 0 or None"] * bool(self.max_screened)
        problems += ["X must be in memory"] * is_dask_array(rows)
        problems += ["public must be given in fit"] * (public is None)
        is_ready = not problems  # except for the public rows
        if self._groups is not None and public_groups is None:
            problems += ["public_groups must be given with groups"]
        elif self.accounting == "auto" and public is not None and (n_public := np.shape(public)[0]) < LEAST_PUBLIC:
            problems += [f'{n_public} public rows: "auto" needs {LEAST_PUBLIC}, accounting="individual" takes any']
        if not problems:
            return True
        if self.accounting == "individual":
            raise ValueError(f'{problems[0]} for accounting="individual"')
        self._worst_case = problems[0]
        if is_ready:
            warnings.warn(f"{problems[0]}; the worst case is charged", NoiseWarning, stacklevel=4)
        return False

    def _answer(self, queries: NDArray[np.float64], progress: Tick | None) -> Answers:
        """Answer within each record's own cap on votes; a query that was answered before gets its stored votes.

        The order is the guarantee: fix radius, cap and noise from public values; log the queries and pay, durably;
        count the votes by the log; add noise; store and answer (``docs/theory/private-knn.md``, Theorem 12).
        """
        if not self.plan_.individual:
            return super()._answer(queries, progress)
        rounded, is_logged = self._search.round(queries), False
        while not is_logged:  # another call may be faster, and then the log is longer
            log = self._read_log()
            terms, price = self._fix_terms(rounded, log)
            if len(terms.radii):
                _warn_of_forecast(terms.forecast)
            is_logged = not len(terms.radii) or self._spending.append_log(
                len(log.entries), terms.to_bytes(), "answered", price
            )
        if len(terms.radii):
            sums = self._count_within(log.asked if self.crowding else [], terms, progress)
            votes = replace(self.plan_.votes, noise=terms.noise).release(sums, self._source)
            log = self._store_answers(len(log.entries), votes)
        return self._make_stored_answers(rounded, log, terms)

    def forecast(self, X: ArrayLike) -> VoteForecast:
        """Return what a call of `predict` on these queries would rely on. Public, and free.

        Without `least_records`, the first call releases the number of records, with noise, which is in the guarantee.
        """
        check_is_fitted(self)
        poll = self._poll
        if not poll.plan_.individual:
            raise ValueError(f"only individual accounting has a forecast, and this is worst-case: {poll._worst_case}")
        return poll._fix_terms(poll._search.round(poll._check_queries(X)), poll._read_log())[0].forecast

    def _read_public(self, public: Any, public_groups: ArrayLike | None) -> RadiusRule:
        rows = self._check_queries(public)
        groups = None if self._groups is None else records.check_groups(public_groups, len(rows))
        return RadiusRule(rows, len(self.classes_), self._find_norm(rows.shape[1]), groups)

    def _read_log(self) -> QueryLog:
        """Return the public log. Its first entry is the number of records with noise, unless a bound is given."""
        spending, plan = self._spending, self.plan_
        while True:
            log = QueryLog.read(spending.read_log())
            if plan.count_noise is None or log.n_records is not None:
                return log
            if not spending.left()["counted"]:
                raise ExhaustedError("the number of records was released for another fit: give least_records")
            counting = replace(plan.votes, ballot=Ballot(GaussianSums(1.0), 1), noise=plan.count_noise)
            counted = counting.release(np.array([[self._search.n_rows]]), self._source).item()
            # Paid for in the transaction that stores it.
            bound = max(counted - _DEVIATIONS * plan.count_noise, 1.0)
            spending.append_log(len(log.entries), encode_n_records(bound), "counted")

    def _fix_terms(self, rounded: NDArray[np.int16], log: QueryLog) -> tuple[Terms, int]:
        """Return the terms of the queries that have no stored answer, as far as the cap goes, and their price."""
        plan, new = self.plan_, log.find_new(rounded)
        left = self._spending.left()["answered"]
        if self.crowding:  # a stream pays everything with its first query
            left = plan.max_answered - log.n_asked if log.asked else left // plan.max_answered * plan.max_answered
        if len(new) and left <= 0:
            raise ExhaustedError(
                "max_answered is reached: only queries that were answered before are answered again. Fit again with a "
                "new budget; its cost is added to this one"
            )
        queries, n_records = rounded[new[:left]], self.least_records or log.n_records or 1.0
        if not self.crowding:
            return self._rule.plan_batch(queries, plan.vote_noise, n_records), len(queries)
        if log.asked:
            return self._rule.drop_worn(self._rule.continue_stream(queries, log.asked[0]), log.asked), 0
        terms = self._rule.plan_stream(queries, plan.vote_noise, n_records, plan.max_answered, self.crowding)
        return self._rule.drop_worn(terms, []), plan.max_answered

    def _count_within(self, earlier: list[Terms], terms: Terms, progress: Tick | None) -> NDArray[np.int64]:
        """Count the votes of records within the radii that passed fewer than `max_votes` times before. Private."""
        # Work does not depend on which records are used up: these are counted as no voter.
        passes = np.zeros(self._search.n_rows, dtype=np.int64)
        for entry in earlier:
            for rows in self._search.within(entry.queries, entry.radii):
                passes[self._search.find_units(rows)] += 1
        sums = np.zeros((len(terms.radii), self.plan_.size), dtype=np.int64)
        for number, rows in enumerate(self._search.within(terms.queries, terms.radii)):
            units = self._search.find_units(rows)
            passes[units] += 1
            sums[number] = self._votes.count(np.where(passes[units] <= terms.max_votes, rows, NO_VOTER)[None])[0]
            if progress is not None:
                progress(1)
        return sums

    def _store_answers(self, position: int, votes: NDArray[np.float64]) -> QueryLog:
        """Append the released votes on the queries of an entry to the log, and return it."""
        entries = self._spending.read_log()
        for entry in encode_answers(position, votes):
            while not self._spending.append_log(len(entries), entry):
                entries = self._spending.read_log()
            entries.append(entry)
        return QueryLog.read(entries)

    def _make_stored_answers(self, rounded: NDArray[np.int16], log: QueryLog, terms: Terms) -> Answers:
        """Answer from the log, or abstain where the noisy votes of two classes are close: post-processing."""
        votes, noise = np.full((len(rounded), self.plan_.size), np.nan), np.full(len(rounded), np.inf)
        for number, query in enumerate(rounded):
            if query.tobytes() in log.answers:
                votes[number], noise[number] = log.answers[query.tobytes()]
        least = (0.0 if self.max_screened == 0 else _MARGIN) if self.margin is None else self.margin
        order = np.sort(votes, axis=1)
        with np.errstate(invalid="ignore"):
            answered = np.isfinite(noise) & ~(order[:, -1] - order[:, -2:].min(axis=1) < least * noise)
        forecast = terms.forecast if len(terms.radii) else None
        return replace(self._make_answers(votes[answered], answered), forecast=forecast)

    def _name_log(self) -> str:
        """Return a digest of all that the log depends on, also of the public rows, which show the features.

        A stream gets a new name. A record that has changed since an earlier fit has passed other queries by the log.
        """
        if not self.plan_.individual:
            return ""
        if self.crowding:
            return new_key()
        bounds = [] if self._bounds is None else [self._bounds.low.tolist(), self._bounds.high.tolist()]
        space = [self.n_features_in_, self.feature_norm, *bounds, list(map(str, self.classes_.tolist())), self.votes]
        return digest(*map(str, [*space, self._rule.fingerprint, self.plan_.vote_noise, self.plan_.max_answered]))[:32]

    def _count_votes(self, queries: NDArray[np.float64]) -> Iterator[Tally]:
        draws = 1 if self.plan_.screening is None else 2
        for samples in self._draw_voters(queries, draws):
            largest = self._votes.count(samples[1]).max(axis=1) * self.plan_.votes.ballot.unit if draws == 2 else None
            yield self._votes.count(samples[0]), largest

    def _make_answers(self, released: NDArray[np.float64], answered: NDArray[np.bool_]) -> Answers:
        if self.votes not in records.MULTILABEL:
            return super()._make_answers(released, answered)
        votes, weight, thresholds = np.full((len(answered), len(self.classes_)), np.nan), None, np.zeros(len(answered))
        votes[answered] = released[:, : len(self.classes_)]
        if isinstance(self._votes, records.Weights) and self._votes.weight_scale is not None:
            weight = np.full(len(answered), np.nan)
            weight[answered] = released[:, -1] / self._votes.weight_scale
            thresholds = weight / 2
        labels = np.where(answered[:, None], votes > thresholds[:, None], self._abstain_label)
        return Answers(labels.astype(int), answered, votes, weight)


def _warn_of_forecast(forecast: VoteForecast) -> None:
    """Warn of answers that are mostly noise, before anything is paid. The warning is public."""
    if not forecast.is_clear:
        warnings.warn(
            f"only {forecast.ratio:.2g} votes are expected for each unit of noise: below {CLEAR_RATIO:g} a "
            "PrivateDiscriminant is more accurate at the same epsilon. Ask fewer queries, or give a larger epsilon or "
            "more records",
            NoiseWarning,
            stacklevel=4,
        )


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

    def votes(self, y: NDArray[np.float64]) -> records.Weights:
        """Return the values as integers: units from the middle, or cells of the bisection."""
        y = np.clip(y, self.low, self.high)
        if self.method == "mean":
            most = math.floor(self.width / 2 / self.unit)
            whole, absent = np.clip(np.rint((y - self.middle) / self.unit), -most, most), 0
        else:
            cells = 2**self.depth
            whole, absent = np.clip(np.floor((y - self.low) / self.width * cells), 0, cells - 1), NO_VOTER
        return records.Weights(np.append(whole, absent).astype(np.int64)[:, None])


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
        How many records vote. By default the noise is a 32nd of the range (mean) or an eighth of the voters (median).
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
    _votes: records.Weights = field(init=False)
    _statistic: ValueStatistic = field(init=False)

    def _read_records(self, X: ArrayLike, y: ArrayLike) -> tuple[Any, Ballot]:
        X, y = records.check_records(self, X, y, y_numeric=True)
        self._read_bounds(X)
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
