"""A linear discriminant of private records, published once: whoever has it classifies at home."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, _fit_context
from sklearn.model_selection import StratifiedKFold
from sklearn.utils import check_array
from sklearn.utils._param_validation import HasMethods, Interval, StrOptions
from sklearn.utils.validation import check_is_fitted, validate_data

from nearveil.ledger import Account, Ledger
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source, secure_source
from nearveil.votes._ballots import hard_votes
from nearveil.votes._class_projection import MOST_COMPONENTS, Projection, Rows
from nearveil.votes._discriminant_model import COUNT_UNIT, SHRINKAGE, NoisyStatistics, fit_discriminant
from nearveil.votes._integers import LONGEST
from nearveil.votes._plan import Ballot, GaussianSums, VotePlan, Wish, make_plan
from nearveil.votes._private import shielded
from nearveil.votes._public_discriminant import (
    MOST_CLASSES,
    MOST_PUBLICATIONS,
    PublicDiscriminant,
    check_publishable,
    discriminant_guarantee,
)
from nearveil.votes._spending import (
    AccountSpending,
    ExhaustedError,
    MemorySpending,
    TakesLedger,
    find_account,
    inferred_unit,
)

SENSITIVITY = math.hypot(LONGEST, COUNT_UNIT) * (1 + 2.0**-50)
"""How far one record more or less moves all sums and counts together, in the L2 norm."""
_MOST_UNPROJECTED = 4096  # features of a row
_MOST_VALUES = MOST_CLASSES * (_MOST_UNPROJECTED + 1)  # released at once: what finite tables cost is charged for these
_LEAST_COMPONENTS = 8
_COMPONENTS = 10  # directions for a class that has one public row for one unit of noise; they grow like the root
_FOLDS = 5
_TRIALS = 4  # draws of noise in each fold of a forecast


def plan_publications(epsilon: float, delta: float = 1e-5, publications: int = 1) -> VotePlan:
    """Return what publishing a discriminant so many times costs: an account is opened with its ``events``.

    The plan depends on these three figures alone, not on classes, features or records.

    Parameters
    ----------
    epsilon : float
        Of all publications together.
    delta : float, default=1e-5
    publications : int, default=1

    Returns
    -------
    VotePlan

    Examples
    --------
    >>> one, four = plan_publications(2.0), plan_publications(2.0, publications=4)
    >>> f"{one.epsilon(1e-5):.2f} {four.epsilon(1e-5):.2f} {four.vote_noise / one.vote_noise:.1f}"
    '2.00 2.00 2.0'
    """
    wish = Wish(epsilon=epsilon, delta=delta, max_answered=publications, max_screened=0, n_neighbors=1)
    ballot = Ballot(GaussianSums(SENSITIVITY), _MOST_VALUES, screened=False)
    return make_plan(replace(wish, vote_noise=_round_up(make_plan(wish, ballot).vote_noise)), ballot)


def _round_up(noise: float) -> float:
    """Return the next number of six digits.

    An account knows one noise. Another version of an accountant may find another last digit; it must not lose what is
    left to publish.

    Examples
    --------
    >>> _round_up(123456.01), _round_up(123457.0), _round_up(1.2345601)
    (123457.0, 123457.0, 1.23457)
    """
    digits = math.floor(math.log10(noise)) - 5
    return float(f"{math.ceil(noise / 10.0**digits)}e{digits}")


@dataclass(frozen=True)
class Forecast:
    """What accuracy to expect. Computed from private records without noise of its own: never publish it.

    Attributes
    ----------
    accuracy : float
        Expected share of right answers, each class counting the same: cross-validated, with simulated noise.
    without_noise : float
        The same without noise.
    floor : float
        The same of the best constant answer: one over the number of classes.
    records_per_class : dict
        How many records each class has.
    noise_per_class : float
        Standard deviation of the noise on a class's count, in records; each number of its sum has a quarter of it.
    """

    accuracy: float
    without_noise: float
    floor: float
    records_per_class: dict[Any, int]
    noise_per_class: float

    @property
    def is_noise(self) -> bool:
        """Whether the accuracy is not clearly above the floor.

        It is a mean over some draws. A model of noise alone is right about a class always or never, so that its mean
        strays from the floor by a standard deviation that is known.
        """
        return self.accuracy <= self.floor + math.sqrt(self.floor * (1 - self.floor) / (_FOLDS * _TRIALS))


class PrivateDiscriminant(ClassifierMixin, TakesLedger, BaseEstimator):  # type: ignore[misc]
    """Classify by a linear discriminant of private records, with noise that is added once.

    The sum of the rows of each class, and how many they are, are released with Gaussian noise; mean, projection and
    covariance come from public rows without labels. All else is computed from these, so the model is public:
    predicting costs nothing, however often, and :meth:`export` returns what may be published.

    Parameters
    ----------
    epsilon : float, default=1.0
        Of all publications together.
    delta : float, default=1e-5
        Choose it well below one over the number of records.
    n_components : int or "auto", default="auto"
        Principal directions of the public rows.
    shrinkage : float or "auto", default="auto"
        Share of the covariance's trace that is added to its diagonal.
    classes : array-like, optional
        The public list of classes. Where it is not given, the classes are read from the labels, and the promise is
        about a record of a class that occurs anyway.
    unit : str, default="record"
        What one row is, and so what is protected; it must be the account's unit.
    publications : int, default=1
        How many fits together cost epsilon and delta. An account counts them; without one, nobody does.
    ledger : Ledger or str, optional
        Where spending is kept, with the name of an account; the account is opened where there is none.
    account : Account or str, optional
        Pays for every fit before anything is computed from the noise.
    source : Source, optional
        Of the noise: the operating system's cryptographic generator by default.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    statistics_ : NoisyStatistics
        The noisy sums and counts: all that was released about the records.
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (d,)
        Where the features had names.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> model = PrivateDiscriminant(2.0, classes=range(10)).fit(X[:1000], y[:1000], public=X[1000:1500])
    >>> bool(model.score(X[1500:], y[1500:]) > 0.7)
    True
    >>> print(model.guarantee)
    Whoever sees the answers comes to any conclusion about whether any one record is in the database with at most 7.4
    times the probability that it would have otherwise, plus 1.0e-5.
    """

    classes_: NDArray[Any]
    statistics_: NoisyStatistics
    _model: PublicDiscriminant

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "epsilon": [Interval(Real, 0, None, closed="neither")],
        "delta": [Interval(Real, 0, 1, closed="neither")],
        "n_components": [Interval(Integral, 1, _MOST_UNPROJECTED, closed="both"), StrOptions({"auto"})],
        "shrinkage": [Interval(Real, 0, None, closed="neither"), StrOptions({"auto"})],
        "classes": ["array-like", range, None],
        "unit": [str],
        "publications": [Interval(Integral, 1, MOST_PUBLICATIONS, closed="both")],
        "ledger": [Ledger, str, None],
        "account": [Account, str, None],
        "source": [HasMethods(["words"]), None],
    }

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        *,
        n_components: int | Literal["auto"] = "auto",
        shrinkage: float | Literal["auto"] = "auto",
        classes: Sequence[Any] | NDArray[Any] | None = None,
        unit: str = "record",
        publications: int = 1,
        ledger: Ledger | str | None = None,
        account: Account | str | None = None,
        source: Source | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.n_components = n_components
        self.shrinkage = shrinkage
        self.classes = classes
        self.unit = unit
        self.publications = publications
        self.ledger = ledger
        self.account = account
        self.source = source

    @_fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit(self, X: ArrayLike, y: ArrayLike, public: ArrayLike | None = None) -> Self:
        """Pay, sum the records with noise, and compute the model.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Private. The promise is about these rows: each must be made from its own record alone, to the last bit. Of
            images by a network: ``extractor.extract(images, row_exact=True)``.
        y : array-like of shape (n,)
            Private.
        public : array-like of shape (n_public, d), optional
            Public rows without labels; the more like the private ones, the better. Without them, rows are scaled to
            norm one as they are, and all directions count the same.

        Returns
        -------
        PrivateDiscriminant

        Raises
        ------
        ExhaustedError
            If the account has paid for all publications before.
        """
        plan = plan_publications(self.epsilon, self.delta, self.publications)
        problem = self._problem(X, y, public, plan)
        guarantee = self._guarantee(plan)
        self._pay(plan, guarantee)
        statistics = _read_statistics(plan.votes.release(problem.sums(), self._source), plan.vote_noise)
        model = problem.model(statistics, guarantee)
        self.__dict__.pop("feature_names_in_", None)
        self.__dict__.update(vars(problem.columns), classes_=problem.classes, statistics_=statistics, _model=model)
        return self

    def forecast(self, X: ArrayLike, y: ArrayLike, public: ArrayLike | None = None) -> Forecast:
        """Say what accuracy to expect, before anything is paid. For the owner of the records alone: never publish it.

        Cross-validation with noise from a local simulation, nothing of which is released. What comes back is computed
        from the private records and protected by nothing.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,)
        public : array-like of shape (n_public, d), optional
            All as for :meth:`fit`.

        Returns
        -------
        Forecast
        """
        self._validate_params()
        plan = plan_publications(self.epsilon, self.delta, self.publications)
        problem = self._problem(X, y, public, plan)
        noisy, exact = problem.cross_validate(self._guarantee(plan), plan)
        counts = np.bincount(problem.codes, minlength=len(problem.classes)).tolist()
        return Forecast(
            accuracy=noisy,
            without_noise=exact,
            floor=1 / len(problem.classes),
            records_per_class=dict(zip(problem.classes.tolist(), counts, strict=True)),
            noise_per_class=plan.vote_noise / COUNT_UNIT,
        )

    def export(self) -> PublicDiscriminant:
        """Return what may be published: the model and its guarantee, and nothing else.

        Returns
        -------
        PublicDiscriminant
        """
        check_is_fitted(self, "_model")
        return self._model

    @property
    def guarantee(self) -> Guarantee:
        """The promise of all publications together."""
        return self.export().guarantee

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Classify rows. Costs nothing.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        ndarray of shape (n,)
        """
        return self.export().predict(self._queries(X))

    def predict_proba(self, X: ArrayLike) -> Rows:
        """Return the probability of each class, where all classes are equally common. Costs nothing.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        ndarray of shape (n, n_classes)
        """
        return self.export().predict_proba(self._queries(X))

    def decision_function(self, X: ArrayLike) -> Rows:
        """Score rows. Costs nothing.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        ndarray of shape (n, n_classes), or (n,) for two classes
        """
        return self.export().decision_function(self._queries(X))

    def _queries(self, X: ArrayLike) -> Rows:
        check_is_fitted(self, "_model")
        queries: Rows = validate_data(self, X, dtype=np.float64, reset=False)
        return queries

    def _problem(self, X: ArrayLike, y: ArrayLike, public: ArrayLike | None, plan: VotePlan) -> "_Problem":
        """Check the input and learn the projection from public rows."""
        columns = type(self).__new__(type(self))
        rows: Rows
        rows, _ = shielded(validate_data, columns, X, y, dtype=np.float64)
        classes, labels, _ = hard_votes(y, self.classes)
        check_publishable(classes, rows.shape[1])
        codes = labels.codes[:-1]
        if public is None:
            if rows.shape[1] > _MOST_UNPROJECTED:
                raise ValueError(f"public must be given for rows of more than {_MOST_UNPROJECTED:,} features")
            projection, images = Projection.none(rows.shape[1]), np.zeros((0, rows.shape[1]))
        else:
            known = check_array(public, dtype=np.float64, input_name="public")
            if known.shape[1] != rows.shape[1]:
                raise ValueError("public must have as many features as X")
            projection = Projection.learn(known, self._components(len(known), len(classes), plan))
            images = projection.transform(known)
        shrinkage = SHRINKAGE if self.shrinkage == "auto" else float(self.shrinkage)
        return _Problem(columns, classes, codes, projection, projection.round(rows), images, shrinkage)

    def _components(self, n_public: int, n_classes: int, plan: VotePlan) -> int:
        """Return how many directions are used: more where there are more rows of a class, and less noise."""
        if self.n_components != "auto":
            return self.n_components
        rows_per_noise = n_public / n_classes * LONGEST / plan.vote_noise
        return min(max(round(_COMPONENTS * math.sqrt(rows_per_noise)), _LEAST_COMPONENTS), MOST_COMPONENTS)

    def _guarantee(self, plan: VotePlan) -> Guarantee:
        stated = plan.guarantee(
            self.delta, unit=inferred_unit(self.unit) if self.classes is None else self.unit, source=secure_source()
        )
        (event, count), *_ = plan.events
        return discriminant_guarantee(
            event.noise_multiplier,
            count,
            epsilon=stated.epsilon,
            delta=stated.delta,
            unit=stated.unit,
            extra_delta=stated.extra_delta,
        ).with_source(self._source)

    def _pay(self, plan: VotePlan, guarantee: Guarantee) -> None:
        account = find_account(self.ledger, self.account, plan, guarantee)
        if account is not None and plan.max_answered > 1 and not account.has_plan(plan.events):
            raise ValueError(
                "account must have been opened for these publications, as nobody else counts them: give a ledger and "
                "the name of a new one, or publications=1"
            )
        spending = MemorySpending(plan) if account is None else AccountSpending.open(account, plan, guarantee)
        if not spending.take("answered", 1):
            raise ExhaustedError(
                f"publications are used up: the account has paid for all {plan.max_answered} that it was opened for"
            )

    @property
    def _source(self) -> Source:
        return secure_source() if self.source is None else self.source

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True
        return tags


@dataclass(frozen=True, eq=False)
class _Problem:
    """What a fit works on. Never leaves the estimator: it holds the records.

    Attributes
    ----------
    columns : PrivateDiscriminant
        Empty but for the number, and perhaps the names, of the columns.
    classes : ndarray of shape (n_classes,)
    codes : ndarray of shape (n,)
        The number of each record's class.
    projection : Projection
    rows : ndarray of shape (n, n_directions), int16
        Private.
    images : ndarray of shape (n_public, n_directions)
        Public.
    shrinkage : float
    """

    columns: PrivateDiscriminant
    classes: NDArray[Any]
    codes: NDArray[np.int64]
    projection: Projection
    rows: NDArray[np.int16]
    images: Rows
    shrinkage: float

    def __repr__(self) -> str:
        return "_Problem(private)"

    def sums(self, chosen: slice | NDArray[np.int64] = slice(None)) -> NDArray[np.int64]:
        """Return whole-number sums and counts of each class, shape (n_classes, n_directions + 1)."""
        return class_sums(self.rows[chosen], self.codes[chosen], len(self.classes))

    def model(self, statistics: NoisyStatistics, guarantee: Guarantee) -> PublicDiscriminant:
        """Return the model of released numbers."""
        scores = fit_discriminant(statistics, self.images, self.shrinkage)
        return PublicDiscriminant(
            self.classes,
            guarantee,
            self.projection,
            scores.weights.astype(np.float32),
            scores.biases.astype(np.float32),
        )

    def cross_validate(self, guarantee: Guarantee, plan: VotePlan) -> tuple[float, float]:
        """Return the mean share of each class that is right, with simulated noise and without."""
        rng = np.random.default_rng(0)
        n_folds = int(min(_FOLDS, np.bincount(self.codes)[np.unique(self.codes)].max()))
        if n_folds < 2:
            return 1 / len(self.classes), 1 / len(self.classes)
        folds = StratifiedKFold(n_folds, shuffle=True, random_state=0)
        right = np.zeros((2, len(self.codes)))
        for train, test in _quietly_split(folds, self.codes):
            sums = self.sums(train).astype(np.float64)
            share = len(train) / len(self.codes)  # noise is as large against these records as against all
            scales = [share * plan.vote_noise] * _TRIALS + [0.0]
            for scale in scales:
                drawn = _read_statistics(sums + scale * rng.standard_normal(sums.shape), scale)
                found = self.model(drawn, guarantee)
                images = self.rows[test] / float(LONGEST)
                guessed = np.argmax(images @ found.weights.T + found.biases, axis=1)
                right[int(scale == 0), test] += (guessed == self.codes[test]) / (1 if scale == 0 else _TRIALS)
        shares = [[row[self.codes == code].mean() for code in np.unique(self.codes)] for row in right]
        noisy, exact = (float(np.mean(one)) for one in shares)
        return noisy, exact


def class_sums(rows: NDArray[np.int16], codes: NDArray[np.int64], n_classes: int) -> NDArray[np.int64]:
    """Return, for each class, the sum of its rows and ``COUNT_UNIT`` times their number, exactly.

    Parameters
    ----------
    rows : ndarray of shape (n, d), int16
        None longer than ``LONGEST``.
    codes : ndarray of shape (n,)
    n_classes : int

    Returns
    -------
    ndarray of shape (n_classes, d + 1), int64

    Examples
    --------
    >>> class_sums(np.array([[3, 4], [1, 0]], dtype=np.int16), np.array([1, 1]), 2).tolist()
    [[0, 0, 0], [4, 4, 1182]]
    """
    sums = np.zeros((n_classes, rows.shape[1] + 1), dtype=np.int64)
    for code in range(n_classes):
        own = rows[codes == code]
        sums[code, :-1] = own.sum(axis=0, dtype=np.int64)
        sums[code, -1] = COUNT_UNIT * len(own)
    return sums


def _read_statistics(released: Rows, noise: float) -> NoisyStatistics:
    return NoisyStatistics(
        released[:, :-1] / LONGEST, released[:, -1] / COUNT_UNIT, noise / LONGEST, noise / COUNT_UNIT
    )


def _quietly_split(folds: StratifiedKFold, codes: NDArray[np.int64]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # tells of classes with few records
        yield from folds.split(codes, codes)
