"""A linear discriminant of private records that is published once, with noise."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.model_selection import StratifiedKFold
from sklearn.utils import check_array
from sklearn.utils._param_validation import StrOptions
from sklearn.utils.validation import check_is_fitted, validate_data

from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source
from nearveil.privacy.parameters import PROBABILITY, allow_integers, allow_reals, parameter
from nearveil.private_knn import discriminant_model as linear
from nearveil.private_knn import spending
from nearveil.private_knn.neighbors import LONGEST, IntegerRows
from nearveil.private_knn.plan import (
    Ballot,
    GaussianSums,
    NoiseWarning,
    PlanRequest,
    VotePlan,
    check_epsilon_given,
    make_plan,
)
from nearveil.private_knn.published import MOST_CLASSES, check_publishable
from nearveil.private_knn.records import check_groups, check_public_rows, make_hard_votes, run_shielded
from nearveil.private_knn.scaling import ColumnBounds, Rows, warn_of_scaled_rows

_MOST_UNPROJECTED = 4096  # features of a row
_MOST_VALUES = MOST_CLASSES * (_MOST_UNPROJECTED + 1)  # of one release; the delta of finite tables is charged for them
_LEAST_COMPONENTS = 8
_COMPONENTS = 10  # directions for a class that has one public row for one unit of noise; they grow like the root
_FOLDS = 10
_DRAWS = 20  # of noise, in a forecast
_CENTRE_NORM = 0.5  # of the longest row within bounds: longer ones are scaled down to it for the mean


def plan_publications(epsilon: float, delta: float = 1e-5, publications: int = 1) -> VotePlan:
    """Return the plan of publishing a discriminant `publications` times: open an account with its ``events``.

    `epsilon` and `delta` are those of all publications together. The plan depends on these three figures alone.

    Examples
    --------
    >>> one, four = plan_publications(2.0), plan_publications(2.0, publications=4)
    >>> f"{one.epsilon(1e-5):.2f} {four.epsilon(1e-5):.2f} {four.vote_noise / one.vote_noise:.1f}"
    '2.00 2.00 2.0'
    """
    ballot = Ballot(GaussianSums(linear.SENSITIVITY), _MOST_VALUES, can_screen=False)
    request = PlanRequest(ballot, epsilon=epsilon, delta=delta, max_answered=publications, n_neighbors=1)
    return make_plan(replace(request, vote_noise=_round_up(make_plan(request).vote_noise)))


def _round_up(noise: float) -> float:
    """Return the next number of six digits: a new accountant's last digit must not change an account's noise."""
    digits = math.floor(math.log10(noise)) - 5
    return float(f"{math.ceil(noise / 10.0**digits)}e{digits}")


@dataclass(frozen=True)
class Forecast:
    """Expected accuracy. Computed from private records without noise: never publish it."""

    #: Expected share of right answers, each class counting the same: cross-validated, over 20 draws of noise.
    accuracy: float
    accuracy_range: tuple[float, float]  #: the first and the last decile of the draws; you publish one draw
    class_accuracy: dict[Any, float]  #: the same of each class that has records
    #: Accuracy without noise, and with as many directions as there would then be. It does not depend on epsilon.
    without_noise: float
    floor: float  #: accuracy of the best constant answer: one over the number of classes
    records_per_class: dict[Any, int]
    #: Standard deviation of the noise on a class's count, in records; that on its sum is a quarter, in lengths.
    noise_per_class: float

    @property
    def is_noise(self) -> bool:
        """Whether the accuracy is not clearly above the floor, compared with the deviation of models of noise alone."""
        return self.accuracy <= self.floor + math.sqrt(self.floor * (1 - self.floor) / _DRAWS)

    @property
    def small_classes(self) -> tuple[Any, ...]:
        """Classes with counts below five times the noise, too few to rely on."""
        least = linear.CLEAR * self.noise_per_class
        return tuple(label for label, count in self.records_per_class.items() if count < least)


@dataclass(eq=False, repr=False)
class PrivateDiscriminant(ClassifierMixin, linear.LinearPredictions, spending.PayingEstimator):  # type: ignore[misc]
    """Classify by a linear discriminant of private records, with noise that is added once.

    The sum of the rows of each class, and how many they are, are released with Gaussian noise; mean, projection and
    covariance come from public rows without labels. All else is computed from these, so the model is public:
    predicting costs nothing, however often, and :meth:`export` returns what may be published.

    Parameters
    ----------
    epsilon : float
        Of all publications together. It must be given.
    delta : float, default=1e-5
        Choose it well below one over the number of records.
    n_components : int or "auto", default="auto"
        Principal directions of the public rows.
    shrinkage : float or "auto", default="auto"
        Share of the covariance's trace that is added to its diagonal.
    bounds : tuple (low, high) or "public", optional
        Public bounds of the columns, as of :class:`PrivateKNeighborsClassifier`. "public" takes three standard
        deviations on either side of the public means. Without public rows, a fifth of the budget goes to the mean.
    publications : int, default=1
        Number of fits that together cost epsilon and delta. Only an account counts them.
    classes, unit, ledger, source
        As of :class:`PrivateKNeighborsClassifier`.
    account : Account or str, optional
        Pays for every fit before anything is computed from the noise.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    statistics_ : NoisyStatistics
        The noisy sums and counts: all that was released about the records.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> model = PrivateDiscriminant(2.0, classes=range(10)).fit(X[:1000], y[:1000], public=X[1000:1500])
    >>> bool(model.score(X[1500:], y[1500:]) > 0.7)
    True
    >>> print(model.guarantee)
    Seeing the answers makes any conclusion about whether any one record is in the database at most 7.4 times as
    likely as it would be otherwise, plus 1.0e-5.
    """

    epsilon: float | None = parameter(None, allow_reals(0), None)
    delta: float = parameter(1e-5, PROBABILITY)
    _: KW_ONLY
    n_components: int | Literal["auto"] = parameter("auto", allow_integers(1, _MOST_UNPROJECTED), StrOptions({"auto"}))
    shrinkage: float | Literal["auto"] = parameter("auto", allow_reals(0), StrOptions({"auto"}))
    bounds: ArrayLike | Literal["public"] | None = parameter(None, "array-like", StrOptions({"public"}), None)
    classes: Sequence[Any] | NDArray[Any] | None = parameter(None, "array-like", range, None)
    publications: int = parameter(1, allow_integers(1, linear.MOST_PUBLICATIONS))
    classes_: NDArray[Any] = field(init=False)
    statistics_: linear.NoisyStatistics = field(init=False)
    _model: linear.PublicDiscriminant = field(init=False)
    _rows: Rows = field(init=False)  # the records, of the copy that a fit works on alone
    _class_numbers: NDArray[np.int64] = field(init=False)  # the number of each record's class
    _public: Rows | None = field(init=False)
    _column_bounds: ColumnBounds | None = field(init=False)
    _groups: NDArray[np.int64] | None = field(init=False, default=None)  # of each record

    def fit(
        self, X: ArrayLike, y: ArrayLike, public: ArrayLike | None = None, *, groups: ArrayLike | None = None
    ) -> Self:
        """Pay, sum the records with noise, and compute the model.

        The order is the guarantee: plan, learn the projection from public rows, pay, sum, add noise, compute the model.
        Nothing that is computed from the sums exists before the payment is durable
        (``docs/theory/private-discriminant.md``).

        Parameters
        ----------
        X, y : array-like of shape (n, d) and (n,)
            Private. The guarantee is about these rows: each must be made from its own record alone, to the last bit. Of
            images by a network: ``extractor.extract(images, row_exact=True)``.
        public : array-like of shape (n_public, d), optional
            Public rows without labels; the more like the private ones, the better. None may be a private row. Without
            them, rows are scaled to norm one as they are, and all directions count the same.
        groups : array-like of shape (n,), optional
            Private. The person, or other owner, of each record. All records of one together count as one.

        Raises
        ------
        ExhaustedError
            If the account has paid for all publications before.
        """
        estimator, plan = self._prepare(X, y, public, groups)
        projection = estimator._learn_projection(plan.vote_noise)
        unit = spending.name_inferred_unit(estimator.unit) if estimator.classes is None else estimator.unit
        guarantee = replace(plan.guarantee(estimator.delta, unit=unit, source=estimator._source), basis=linear.BASIS)
        self._warn_of_parameter_search()
        warn_of_scaled_rows(estimator._rows)
        estimator._charge_account(plan, guarantee)
        release = partial(_release_share, plan, estimator._source)
        records = estimator._project(projection, release)
        sums = release(records.sums(), projection.sums_share)
        statistics = _read_statistics(sums, _split_noise(plan.vote_noise, projection.sums_share))
        model = records.model(statistics, guarantee)
        _warn_of_noise(model)
        return self._set_fitted(estimator, statistics_=statistics, _model=model)

    def forecast(
        self, X: ArrayLike, y: ArrayLike, public: ArrayLike | None = None, *, groups: ArrayLike | None = None
    ) -> Forecast:
        """Estimate the accuracy before anything is paid. For the owner of the records alone: never publish it.

        Takes what :meth:`fit` takes. Cross-validates the private records with simulated noise, unprotected.
        """
        estimator, plan = self._prepare(X, y, public, groups)
        records = estimator._project_simulated(plan.vote_noise)
        noise = _split_noise(plan.vote_noise, records.projection.sums_share)
        shares = records.cross_validate(noise, _DRAWS)
        draws = shares.mean(axis=1)
        low, high = np.quantile(draws, (0.1, 0.9)).tolist()
        counts = np.bincount(records.class_numbers, minlength=len(records.classes)).tolist()
        labels = records.classes.tolist()
        present = [label for label, count in zip(labels, counts, strict=True) if count]
        return Forecast(
            accuracy=float(draws.mean()),
            accuracy_range=(low, high),
            class_accuracy=dict(zip(present, shares.mean(axis=0).tolist(), strict=True)),
            without_noise=float(estimator._project_simulated(0.0).cross_validate(0.0, 1).mean()),
            floor=1 / len(labels),
            records_per_class=dict(zip(labels, counts, strict=True)),
            noise_per_class=noise / linear.COUNT_UNIT,
        )

    def export(self) -> linear.PublicDiscriminant:
        """Return the public part: the model and its guarantee, and nothing else."""
        check_is_fitted(self, "_model")
        return self._model

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of all publications together."""
        return self.export().guarantee

    def _score(self, X: ArrayLike) -> tuple[Rows, NDArray[Any]]:
        check_is_fitted(self, "_model")
        return self._model._score(validate_data(self, X, dtype=np.float64, reset=False))

    def _prepare(
        self, X: ArrayLike, y: ArrayLike, public: ArrayLike | None, groups: ArrayLike | None
    ) -> tuple[Self, VotePlan]:
        """Return a copy of the parameters that holds the checked records, and the plan of noise."""
        copy = self._copy_parameters()
        plan = plan_publications(check_epsilon_given(copy.epsilon), copy.delta, copy.publications)
        copy._read_records(X, y, public)
        if groups is not None:
            copy._groups = check_groups(groups, len(copy._rows))
            copy.unit = spending.name_group_unit(copy.unit)
        return copy, plan

    def _read_records(self, X: ArrayLike, y: ArrayLike, public: ArrayLike | None) -> None:
        """Check private records, public rows and bounds, and store them."""
        rows: Rows
        rows, _ = run_shielded(validate_data, self, X, y, dtype=np.float64, multi_output=True)
        self.classes_, labels, _ = make_hard_votes(y, self.classes)
        check_publishable(self.classes_, rows.shape[1], self.unit)
        self._rows, self._class_numbers, self._public, self._column_bounds = rows, labels.class_numbers[:-1], None, None
        if public is not None:
            self._public = check_array(public, dtype=np.float64, input_name="public")
            if self._public.shape[1] != rows.shape[1]:
                raise ValueError("public must have as many features as X")
            check_public_rows(public, X)
        elif rows.shape[1] > _MOST_UNPROJECTED:
            raise ValueError(f"public must be given for rows of more than {_MOST_UNPROJECTED:,} features")
        if isinstance(self.bounds, str):
            if self._public is None:
                raise ValueError('public must be given where bounds="public"')
            self._column_bounds = ColumnBounds.measure(self._public)
        elif self.bounds is not None:
            self._column_bounds = ColumnBounds.make(self.bounds, rows.shape[1])
            if public is None and len(self.classes_) >= MOST_CLASSES:  # the mean is one more release of as many values
                raise ValueError(f"classes must be fewer than {MOST_CLASSES:,} if bounds are given without public")

    def _learn_projection(self, noise: float) -> linear.ClassProjection:
        """Learn the projection from public rows and bounds: more directions for more rows of a class and less noise."""
        public, n_components = self._public, linear.MOST_COMPONENTS
        if public is None:
            return replace(linear.ClassProjection.none(self.n_features_in_), bounds=self._column_bounds)
        if self.n_components != "auto":
            n_components = self.n_components
        elif noise:
            rows_per_noise = len(public) / len(self.classes_) * LONGEST / noise
            count = max(round(_COMPONENTS * math.sqrt(rows_per_noise)), _LEAST_COMPONENTS)
            n_components = min(count, linear.MOST_COMPONENTS)
        return linear.ClassProjection.learn(public, n_components, self._column_bounds)

    def _project(self, projection: linear.ClassProjection, release: "_Release") -> "_ProjectedRecords":
        """Map the records, centred by their noisy mean if there are no public rows."""
        if projection.is_centred_by_noise:
            projection = replace(projection, offset=self._release_centre(release))
        public_rows = np.zeros((0, projection.n_directions))
        if self._public is not None:
            public_rows = projection.transform(self._public)
        shrinkage = linear.SHRINKAGE if self.shrinkage == "auto" else float(self.shrinkage)
        rows, class_numbers, counts = merge_groups(projection.round(self._rows), self._class_numbers, self._groups)
        return _ProjectedRecords(self.classes_, class_numbers, projection, rows, counts, public_rows, shrinkage)

    def _project_simulated(self, noise: float) -> "_ProjectedRecords":
        """Map the records with noise from a local simulation, for a forecast."""
        rng = np.random.default_rng(_DRAWS)

        def simulate(sums: NDArray[np.int64], share: float) -> Rows:
            return sums + _split_noise(noise, share) * rng.standard_normal(sums.shape)

        return self._project(self._learn_projection(noise), simulate)

    def _release_centre(self, release: "_Release") -> Rows:
        """Return the noisy mean of the rows within their bounds: the sums and the count of a single class."""
        assert self._column_bounds is not None
        length = _CENTRE_NORM * math.sqrt(self.n_features_in_)
        rows = IntegerRows(self.n_features_in_, length).round(self._column_bounds.scale(self._rows))
        merged, whole, counts = merge_groups(rows, np.zeros_like(self._class_numbers), self._groups)
        (released,) = release(sum_classes(merged, whole, 1, counts), linear.CENTRE_SHARE)
        count = max(released[-1] / linear.COUNT_UNIT, 1.0)
        return np.asarray(np.clip(released[:-1] / LONGEST * length / count, -1, 1))

    def _charge_account(self, plan: VotePlan, guarantee: Guarantee) -> None:
        account = spending.find_account(self.ledger, self.account, plan, guarantee)
        if account is not None and plan.max_answered > 1 and not account.has_plan(plan.events):
            raise ValueError(
                "account must have been opened for these publications, so that it counts them: give a ledger and "
                "the name of a new one, or publications=1"
            )
        if not spending.open_spending(account, plan, guarantee).take("answered", 1):
            raise spending.ExhaustedError(
                f"publications are used up: the account has paid for all {plan.max_answered} that it was opened for"
            )


@dataclass(frozen=True, eq=False, repr=False)
class _ProjectedRecords:
    """Projected records. They never leave the estimator."""

    classes: NDArray[Any]
    class_numbers: NDArray[np.int64]  # the number of each record's class
    projection: linear.ClassProjection
    rows: NDArray[np.int16]  # private; of groups, their means
    counts: NDArray[np.int64] | None  # of each row, if it stands for a group's records
    public_rows: Rows
    shrinkage: float

    @cached_property
    def moments(self) -> linear.PublicMoments:
        """The moments of the public rows."""
        return linear.PublicMoments.measure(self.public_rows)

    def sums(self, chosen: slice | NDArray[np.int64] = slice(None)) -> NDArray[np.int64]:
        """Return whole-number sums and counts of each class, shape (n_classes, n_directions + 1)."""
        counts = None if self.counts is None else self.counts[chosen]
        return sum_classes(self.rows[chosen], self.class_numbers[chosen], len(self.classes), counts)

    def model(self, statistics: linear.NoisyStatistics, guarantee: Guarantee) -> linear.PublicDiscriminant:
        """Return the model of released numbers."""
        means = linear.estimate_means(statistics, self.moments)
        scores = linear.calibrate_scores(linear.fit_discriminant(means, self.shrinkage), means, self.public_rows)
        numbers = (scores.weights, scores.biases, statistics.counts)
        return linear.PublicDiscriminant(
            self.classes, guarantee, self.projection, *(values.astype(np.float32) for values in numbers)
        )

    def cross_validate(self, noise: float, draws: int) -> Rows:
        """Return the share of each class that is right, (draws, classes with records); one draw serves all folds."""
        counts = np.bincount(self.class_numbers)
        n_folds = int(min(_FOLDS, counts.max()))
        if n_folds < 2:
            return np.full((draws, np.count_nonzero(counts)), 1 / len(self.classes))
        right = np.zeros((draws, len(self.class_numbers)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # depends on classes with few records
            split = StratifiedKFold(n_folds, shuffle=True, random_state=0).split
            folds = list(split(self.class_numbers, self.class_numbers))
        for train, test in folds:
            sums, tested = self.sums(train).astype(np.float64), self.rows[test] / float(LONGEST)
            scale = noise * len(train) / len(self.class_numbers)  # as large against these records as against all
            for draw in range(draws):
                rng = np.random.default_rng(draw)
                drawn = _read_statistics(sums + scale * rng.standard_normal(sums.shape), scale)
                means = linear.estimate_means(drawn, self.moments)
                scores = linear.fit_discriminant(means, self.shrinkage).score(tested)
                right[draw, test] = scores.argmax(axis=1) == self.class_numbers[test]
        return np.stack([right[:, self.class_numbers == code].mean(axis=1) for code in np.flatnonzero(counts)], axis=1)


def merge_groups(
    rows: NDArray[np.int16], class_numbers: NDArray[np.int64], groups: NDArray[np.int64] | None
) -> tuple[NDArray[np.int16], NDArray[np.int64], NDArray[np.int64] | None]:
    """Return rows, their classes and, of groups, counts: of each group, the mean of its records in each class."""
    # A group adds the mean of its records' (row, COUNT_UNIT), each in its class, cut towards zero: no longer than one
    # record's (docs/theory/private-discriminant.md; attacked by tests/private_knn/test_individual.py).
    if groups is None:
        return rows, class_numbers, None
    sizes = np.bincount(groups)
    pairs, of_row = np.unique(np.column_stack([groups, class_numbers]), axis=0, return_inverse=True)
    sums = np.zeros((len(pairs), rows.shape[1] + 1), dtype=np.int64)
    np.add.at(sums, of_row.ravel(), np.column_stack([rows, np.full(len(rows), linear.COUNT_UNIT)]))
    size = sizes[pairs[:, :1]]
    means = np.sign(sums) * (np.abs(sums) // size)
    return means[:, :-1].astype(np.int16), pairs[:, 1], means[:, -1]


def sum_classes(
    rows: NDArray[np.int16], class_numbers: NDArray[np.int64], n_classes: int, counts: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return each class's exact sums of rows, none longer than ``LONGEST``, and of counts, each ``COUNT_UNIT``."""
    sums = np.zeros((n_classes, rows.shape[1] + 1), dtype=np.int64)
    for code in range(n_classes):
        members = rows[class_numbers == code]
        sums[code, :-1] = members.sum(axis=0, dtype=np.int64)
        sums[code, -1] = linear.COUNT_UNIT * len(members) if counts is None else counts[class_numbers == code].sum()
    return sums


def _warn_of_noise(model: linear.PublicDiscriminant) -> None:
    """Warn if most classes have too few records, by the released counts, which are public."""
    noisy, noise = len(model.noisy_classes), model.noise_per_class
    if 2 * noisy > len(model.classes):
        warnings.warn(
            f"much noise is to be expected: by the noisy counts, {noisy} of {len(model.classes)} classes have "
            f"fewer than {linear.CLEAR * noise:,.0f} records, {linear.CLEAR} times the noise of {noise:,.1f} on a "
            "count (a rule of thumb). Give a larger epsilon, more records, or fewer classes; forecast() says what "
            "accuracy to expect",
            NoiseWarning,
            stacklevel=3,
        )


_Release = Callable[[NDArray[np.int64], float], Rows]
"""Add noise to sums, for a share of the budget of a publication."""


def _split_noise(noise: float, share: float) -> float:
    """Return the noise of a release that takes a share of the budget: shares of 1 / noise^2 add up."""
    return noise if share == 1 else noise / math.sqrt(share) * (1 + 2.0**-40)


def _release_share(plan: VotePlan, source: Source, sums: NDArray[np.int64], share: float) -> Rows:
    """Release sums with the noise of a share of the plan (docs/theory/private-discriminant.md, Theorem 4)."""
    return replace(plan.votes, noise=_split_noise(plan.vote_noise, share)).release(sums, source)


def _read_statistics(released: Rows, noise: float) -> linear.NoisyStatistics:
    return linear.NoisyStatistics(
        released[:, :-1] / LONGEST, released[:, -1] / linear.COUNT_UNIT, noise / LONGEST, noise / linear.COUNT_UNIT
    )
