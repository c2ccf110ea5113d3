"""The base of all voting estimators: votes of records, and answering queries (pay, screen, pay, vote)."""

import json
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils._param_validation import Interval
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from nearveil.cluster import is_dask_array
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_positive
from nearveil.privacy.events import VoteHistogram
from nearveil.privacy.noise import Source
from nearveil.private_knn.neighbors import Voters
from nearveil.private_knn.plan import (
    UNIT,
    Ballot,
    ClippedSums,
    Kind,
    NoiseWarning,
    PlanRequest,
    VotePlan,
    find_needed_votes,
    make_plan,
)
from nearveil.private_knn.scaling import ColumnBounds
from nearveil.private_knn.spending import PayingEstimator, Spending, find_account, name_inferred_unit, open_spending

T = TypeVar("T")

# Messages of scikit-learn that quote no data. Others are cut at a known prefix, or replaced.
_SAFE = re.compile(
    r"Input [Xy] contains |Found array with (0|\d+) (sample|feature)|Found array with dim|Found input variables with "
    r"inconsistent|X has \d+ features|Sparse data was passed|The feature names should match|y should be a 1d array|"
    r"Input contains NaN|Unknown label type: |bad input shape|This \w+ estimator requires y to be passed|"
    r"float\(\) argument must be "
)
_TRIMMED = ("Complex data not supported", "Expected 2D array, got 1D array instead", "Expected 2D array, got scalar")


def run_shielded(check: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Run a check on private input; if it fails, raise an error without values.

    Examples
    --------
    >>> run_shielded(float, "a private word")
    Traceback (most recent call last):
    ...
    ValueError: X and y must hold real numbers of the right shape; private values are not shown
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The number of unique classes")  # depends on the labels
        try:
            return check(*arguments, **options)
        except (TypeError, ValueError) as error:
            kind, words = (TypeError if isinstance(error, TypeError) else ValueError), _clean(str(error))
    raise kind(words)  # outside of the handler: the context of the first error is private


def check_records(columns: Any, X: Any, y: Any, **options: Any) -> tuple[Any, Any]:
    """Let scikit-learn check private records. Workers check the rows of a Dask array."""
    if not is_dask_array(X):
        X, y = run_shielded(validate_data, columns, X, y, dtype=np.float64, **options)
        return X, y
    _, y = run_shielded(validate_data, columns, np.zeros((X.shape[0], 1)), y, dtype=np.float64, **options)
    columns.n_features_in_ = int(X.shape[1])
    return X, y


def _clean(words: str) -> str:
    if _SAFE.match(words.partition("\n")[0]):
        return words
    for prefix in _TRIMMED:
        if words.startswith(prefix):
            return f"{prefix}: X must have a row for each record"
    return "X and y must hold real numbers of the right shape; private values are not shown"


Votes = Literal["classes", "soft", "binary", "nonnegative", "signed"]
MULTILABEL = get_args(Kind)
_BATCH = 2**22  # votes gathered at a time
_LEAST_CLIP = 0.001  # below which rounding to units would distort the weights


@dataclass(frozen=True)
class Labels:
    """One class for each record."""

    codes: NDArray[np.int64] = field(repr=False)  # numbers of the classes; the last, of `NO_VOTER`, is `n_classes`
    n_classes: int

    @property
    def most_agreeing(self) -> int:
        """The number of records of the largest class."""
        return int(np.bincount(self.codes[:-1], minlength=1).max())

    def count(self, voters: Voters) -> NDArray[np.int64]:
        """Count the votes of each query for each class, shape (n_queries, n_classes)."""
        bins = self.n_classes + 1
        keys = self.codes[voters] + bins * np.arange(len(voters))[:, None]
        counts = np.bincount(keys.ravel(), minlength=bins * len(voters))
        return counts.reshape(len(voters), bins)[:, : self.n_classes].astype(np.int64)


@dataclass(frozen=True)
class Weights:
    """A vote of several parts for each record, in units."""

    units: NDArray[np.int64] = field(repr=False)  # the last row, of `NO_VOTER`, is zero
    weight_scale: float | None = None  # factor of the last column, the records' weights; None without that column

    @property
    def most_agreeing(self) -> int:
        """The number of records."""
        return len(self.units) - 1

    def count(self, voters: Voters) -> NDArray[np.int64]:
        """Sum the votes on each query, shape (n_queries, size)."""
        size = self.units.shape[1]
        sums = np.zeros((len(voters), size), dtype=np.int64)
        step = max(1, _BATCH // max(1, voters.shape[1] * size))
        for start in range(0, len(voters), step):
            sums[start : start + step] = self.units[voters[start : start + step]].sum(axis=1)
        return sums


def make_hard_votes(y: ArrayLike, classes: ArrayLike | None) -> tuple[NDArray[Any], Labels, Ballot]:
    """Return the classes, the votes of all records, and the ballot of a query.

    `y` must be the original: an array made of it hides that labels are of several types.
    """
    y = run_shielded(column_or_1d, _check_types(y), warn=True)
    run_shielded(check_classification_targets, y)
    labels = np.unique(y) if classes is None else check_classes(classes)
    try:
        codes = np.searchsorted(labels, y)
        inside = labels[np.minimum(codes, len(labels) - 1)] == y
    except TypeError:
        inside = np.array([False])
    if not np.all(inside):
        raise ValueError("y holds a label that is not in classes: the list must be complete, and public")
    return labels, Labels(np.append(codes, len(labels)), len(labels)), Ballot(VoteHistogram, len(labels))


def make_soft_votes(y: ArrayLike, classes: ArrayLike | None) -> tuple[NDArray[Any], Weights, Ballot]:
    """Return the same for rows of weights that sum to at most 1."""
    rows = _check_rows(y)
    if np.any(rows < 0) or np.any(rows.sum(axis=1) > 1 + 1e-6):
        raise ValueError("y must hold weights of at least 0 that sum to at most 1 in each row")
    names = _check_columns(rows, classes)
    # Scale back sums above 1 by rounding errors; rounding towards zero never increases a sum.
    rows = rows / np.maximum(rows.sum(axis=1, keepdims=True), 1.0)
    return names, _make_weights(rows), Ballot(VoteHistogram, len(names), unit=UNIT, whole=False)


def make_label_votes(
    y: ArrayLike, classes: ArrayLike | None, clip: float | None, kind: Kind
) -> tuple[NDArray[Any], Weights, Ballot]:
    """Return the same for votes on many labels, each record's scaled down to L1 norm `clip`."""
    rows = _check_rows(y)
    if clip is None:
        raise ValueError("clip must be given: how many labels one record may vote for (the supplement's tau)")
    if not _LEAST_CLIP <= check_positive(clip, "clip") <= 1 / UNIT:
        raise ValueError("clip must be from 0.001 to a million")
    if kind == "binary" and not np.all((rows == 0) | (rows == 1)):
        raise ValueError('y must hold only 0 and 1 for votes="binary"')
    if kind == "nonnegative" and np.any(rows < 0):
        raise ValueError('y must not be negative for votes="nonnegative"')
    names = _check_columns(rows, classes)
    if kind == "signed":
        norms = np.abs(rows).sum(axis=1, keepdims=True)
        votes = _make_weights(rows * (clip / np.maximum(norms, clip)))
    else:
        votes = _weigh_labels(rows, float(clip), kind)
    event = ClippedSums(float(clip), kind)
    return names, votes, Ballot(event, votes.units.shape[1], unit=UNIT, whole=False, can_screen=False)


def _weigh_labels(rows: NDArray[np.float64], clip: float, kind: Kind) -> Weights:
    """Multiply each row by its weight, at most 1, and append the weight times a public scale.

    The scale is the largest at which the weights cost nothing: with them, one record in and one out still change the
    sums by the sensitivity of the votes alone (``docs/theory/private-knn.md``, Theorem 11; attacked by
    ``tests/private_knn/test_labels.py``).
    The weight is rounded first, and the votes are multiplied by the rounded weight.
    """
    sizes = rows.sum(axis=1, keepdims=True)
    if kind == "binary":
        largest, lengths = math.sqrt(max(clip, 1.0)), np.maximum(sizes, 1.0) / clip
    else:
        largest, lengths = clip, np.maximum(sizes / clip, (rows**2).sum(axis=1, keepdims=True) / clip**2)
    steps = math.floor(largest / UNIT)
    weights = np.floor(steps / np.maximum(lengths, 1.0))
    units = np.hstack([_make_weights(rows * (weights / steps)).units, np.append(weights, [[0]], axis=0)])
    return Weights(units.astype(np.int64), weight_scale=steps * UNIT)


def check_classes(classes: ArrayLike) -> NDArray[Any]:
    """Return the public list of classes, sorted."""
    labels = np.asarray(_check_types(classes, "classes"))
    names = np.unique(labels)
    if labels.ndim != 1 or len(names) == 0 or len(names) != len(labels):
        raise ValueError("classes must be a list of different labels")
    return np.asarray(names)


def check_public_rows(public: ArrayLike, X: ArrayLike) -> None:
    """Refuse public rows that share memory with the private ones. A comparison of values would depend on records."""
    if public is X or np.shares_memory(np.asarray(public), np.asarray(X)):
        raise ValueError(
            "public must not be X, or a part of it: the model of public rows is published without noise. "
            "Give public rows"
        )


def _check_types(y: Any, name: str = "y") -> Any:
    """Refuse labels of several types: NumPy converts them to one, so one record's label would change the others.

    An array of objects is returned as a list, so that NumPy finds the type of its labels.
    """
    if hasattr(y, "dtype") and y.dtype != object:
        return y
    listed = np.asarray(y).tolist() if hasattr(y, "dtype") else y
    labels = np.array(listed, dtype=object).ravel().tolist()
    kinds = {np.asarray(label).dtype.kind for label in {type(label): label for label in labels}.values()}
    if len(kinds) > 1 or not kinds >= {np.asarray(listed).dtype.kind}:
        raise ValueError(f"{name} must hold labels of one type, such as text alone or whole numbers alone")
    return listed


def _check_rows(y: ArrayLike) -> NDArray[np.float64]:
    rows: NDArray[np.float64] = run_shielded(check_array, y, dtype=np.float64, input_name="y")
    if np.max(np.abs(rows), initial=0.0) > 1 / UNIT:
        raise ValueError("y must be within a million of 0: larger votes are clipped anyway")
    return rows


def _check_columns(rows: NDArray[np.float64], classes: ArrayLike | None) -> NDArray[Any]:
    names = np.arange(rows.shape[1]) if classes is None else np.asarray(classes)
    if names.ndim != 1 or len(names) != rows.shape[1] or len(np.unique(names)) != len(names):
        raise ValueError("classes must name the columns of y, each once")
    return names


def _make_weights(rows: NDArray[np.float64]) -> Weights:
    units = np.trunc(rows / UNIT).astype(np.int64)
    return Weights(np.vstack([units, np.zeros((1, rows.shape[1]), dtype=np.int64)]))


Progress = Callable[[int], None]
"""Called with the number of queries that were finished since the last call."""


Tally = tuple[NDArray[np.int64], NDArray[np.float64] | None]
"""Votes on a batch of queries: sums of one sample, and the max-votes of another if there is a screening. Private."""
A = TypeVar("A")


@dataclass(frozen=True, eq=False, kw_only=True)
class Poll(ABC, Generic[A]):
    """The result of a fit: the records, the plan of noise and caps, and the account that pays. Immutable.

    A new fit replaces it as a whole, and `answer` reads it once, so rows, labels, noise and caps are of one fit.
    """

    columns: "VotingEstimator[A]"  # empty but for the number, and perhaps the names, of the columns of queries
    plan: VotePlan
    guarantee: Guarantee
    source: Source
    spending: Spending
    bounds: ColumnBounds | None = None  # queries are scaled by them, as the records were
    gain: ClassVar[float] = 1.0  # change of a released sum by one voter

    @abstractmethod
    def count_votes(self, queries: NDArray[np.float64]) -> Iterator[Tally]:
        """Find the voters of each query and count their votes, a batch at a time."""

    @abstractmethod
    def count_agreeing(self) -> tuple[float, str]:
        """Return the largest number of voters that can agree, and a description. Private if voters are records."""

    @abstractmethod
    def make_answers(self, released: NDArray[np.float64], answered: NDArray[np.bool_]) -> A:
        """Return the answers to all queries from the noisy sums of those that were answered."""

    def release(self, sums: NDArray[np.int64]) -> NDArray[np.float64]:
        """Add noise to the votes on queries that were paid for."""
        return self.plan.votes.release(sums, self.source)

    @property
    def public_attributes(self) -> dict[str, Any]:
        """The fitted attributes of the estimator, besides its columns."""
        return {"plan_": self.plan}

    def check_queries(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return queries that have the columns of the records, scaled as these are."""
        queries: NDArray[np.float64] = validate_data(self.columns, X, dtype=np.float64, reset=False)
        return queries if self.bounds is None else self.bounds.scale(queries)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(private)"


def _warn_of_noise(poll: Poll[Any]) -> None:
    """Warn the owner of the records, before anything is paid, that answers can only be noise."""
    plan, (agreeing, voters) = poll.plan, poll.count_agreeing()
    needed = find_needed_votes(plan, poll.gain)
    if agreeing < needed:
        warnings.warn(
            f"only noise is to be expected: {plan.n_neighbors:,} voters take part, an answer needs {needed:,} of them "
            f"that agree (noise {plan.vote_noise:.3g}), and {voters}. Give a larger epsilon, a smaller max_answered, "
            "or more records or teachers",
            NoiseWarning,
            stacklevel=3,
        )


class AnsweredScore(NamedTuple):
    """The quality of answers, and the share of queries that were answered.

    Attributes
    ----------
    score : float
        Accuracy of a classifier, R^2 of a regressor, on the answered queries only. NaN if none was answered.
    answered : float
        Share of the queries that were answered.

    Examples
    --------
    >>> result = AnsweredScore(score=0.9, answered=0.5)
    >>> f"{result.score:.0%} of the answers are right; {result.answered:.0%} of the queries were answered"
    '90% of the answers are right; 50% of the queries were answered'
    """

    score: float
    answered: float


@dataclass(eq=False, repr=False, kw_only=True)
class VotingEstimator(PayingEstimator, ABC, Generic[A]):
    """Answer queries by votes of private records, up to caps fixed beforehand in `plan_`.

    Subclasses define the votes (`Ballot`) and how they are counted (`Poll`).
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **PayingEstimator._parameter_constraints,
        "max_answered": [Interval(Integral, 1, None, closed="left")],
        "vote_noise": [Interval(Real, 0, None, closed="neither"), None],
    }

    max_answered: int = 1000
    vote_noise: float | None = None
    plan_: VotePlan = field(init=False)
    _poll: Poll[A] = field(init=False)
    _metric: ClassVar[Callable[..., float]]  # of the true and the predicted labels or values

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Store the private records, and fix the plan of noise and caps.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Private. The guarantee is about these rows: each must be made from its own record alone, to the last bit. Of
            images by a network: ``extractor.extract(images, row_exact=True)``.
        y : array-like of shape (n,) or (n, n_classes)
            Private. Classes, weights of classes, or numbers, which are clipped to their bounds.

        Returns
        -------
        VotingEstimator
        """
        self._warn_of_search()
        poll = self._copy_parameters()._make_poll(X, y)
        self._poll = poll
        _warn_of_noise(poll)
        return self._set_fitted(poll.columns, **poll.public_attributes)

    @abstractmethod
    def _make_poll(self, X: ArrayLike, y: ArrayLike) -> Poll[A]:
        """Return a poll of these records. Called on a private copy of the parameters."""

    def _make_plan(self, ballot: Ballot, *, inferred: bool = False, **fixed: Any) -> tuple[VotePlan, Guarantee]:
        """Return the plan and its guarantee. `fixed` replaces parameters; `inferred` classes come from the labels."""
        names = {option.name for option in fields(PlanRequest)} & set(self.get_params(deep=False))
        request = PlanRequest(ballot, **{**{name: getattr(self, name) for name in names}, **fixed})
        plan, unit = make_plan(request), name_inferred_unit(self.unit) if inferred else self.unit
        return plan, plan.guarantee(request.delta, unit=unit, source=self._source)

    def _open_account(self, columns: Self, plan: VotePlan, guarantee: Guarantee) -> dict[str, Any]:
        """Open the account and the caps, the last step that may fail; return the fields common to all polls."""
        spending = open_spending(find_account(self.ledger, self.account, plan, guarantee), plan, guarantee)
        return {"columns": columns, "plan": plan, "guarantee": guarantee, "source": self._source, "spending": spending}

    def answer(self, X: ArrayLike, *, progress: Progress | None = None) -> A:
        """Answer public queries, or decline; return the labels with the noisy votes.

        The order is the guarantee: pay, search, vote, screen, pay for the votes, add noise, answer. A payment is
        durable before anything is computed from the records (``docs/theory/private-knn.md``).

        Parameters
        ----------
        X : array-like of shape (n_queries, d)
            Public. Answered in their order until a cap is reached; the rest is declined.
        progress : callable, optional
            Called with the number of queries that were counted since the last call.

        Returns
        -------
        Answers, or ndarray of shape (n_queries,) from a regressor

        Raises
        ------
        ExhaustedError
            If a cap was reached before this call.
        """
        check_is_fitted(self)
        poll = self._poll  # read once: another thread may fit meanwhile
        plan, spending = poll.plan, poll.spending
        queries = poll.check_queries(X)
        spending.assert_open()
        spending.assert_affordable(len(queries))
        if plan.screening is None:
            paid = spending.take("answered", len(queries))
            chosen = np.arange(paid)
            batches = [poll.release(sums) for sums, _ in _report(poll.count_votes(queries[:paid]), progress)]
            released = np.concatenate(batches) if batches else np.zeros((0, plan.size))
        else:
            paid = spending.take("screened", len(queries))
            tallies = list(_report(poll.count_votes(queries[:paid]), progress))
            largest = np.concatenate([np.zeros(0), *(maxima for _, maxima in tallies if maxima is not None)])
            passed = np.flatnonzero(plan.screening.toss(largest, poll.source))
            # Which queries passed is public from here on, and so is the number of votes to pay for.
            chosen = passed[: spending.take("answered", len(passed))]
            sums = np.concatenate([np.zeros((0, plan.size), np.int64), *(sums for sums, _ in tallies)])
            released = poll.release(sums[chosen])
        answered = np.zeros(len(queries), dtype=np.bool_)
        answered[chosen] = True
        return poll.make_answers(released, answered)

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Score the answered queries only; :meth:`score_answered` also returns their share."""
        return self.score_answered(X, y, sample_weight).score

    def score_answered(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> AnsweredScore:
        """Score the answered queries, and return their share of all queries. Every query is paid for, as by `predict`.

        Parameters
        ----------
        X : array-like of shape (n_queries, d)
            Public queries.
        y : array-like of shape (n_queries,)
            Their true labels or values. They are not protected.
        sample_weight : array-like of shape (n_queries,), optional

        Returns
        -------
        AnsweredScore
        """
        truth = np.asarray(y)
        weights = None if sample_weight is None else np.asarray(sample_weight)
        check_consistent_length(X, truth, weights)  # before anything is paid
        predictions, answered = self._predict_answered(X)
        if not answered.any():
            return AnsweredScore(math.nan, 0.0)
        chosen = None if weights is None else weights[answered]
        # Through lists: scikit-learn does not find the type of labels in an array of objects.
        pairs = (np.array(values[answered].tolist()) for values in (truth, predictions))
        return AnsweredScore(float(self._metric(*pairs, sample_weight=chosen)), float(np.mean(answered)))

    @abstractmethod
    def _predict_answered(self, X: ArrayLike) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return a prediction for each query, and which of them were answered."""

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of everything answered so far and of everything that the caps still allow.

        It follows from the caps, not from the queries so far: the number that passes depends on the records. All
        copies of an estimator with an account share the caps in its ledger, so they keep this one guarantee together.
        """
        check_is_fitted(self)
        return self._poll.guarantee


def _report(tallies: Iterator[Tally], progress: Progress | None) -> Iterator[Tally]:
    for tally in tallies:
        yield tally
        if progress is not None:
            progress(len(tally[0]))


@dataclass(frozen=True)
class Answers:
    """Answers to queries, all public.

    Attributes
    ----------
    labels : ndarray of shape (n_queries,) or (n_queries, n_classes)
        Classes, or zeros and ones for many labels; the abstain label where a query was declined.
    answered : ndarray of bool, shape (n_queries,)
    votes : ndarray of shape (n_queries, n_classes)
        The noisy counts that decided; NaN where a query was declined.
    weight : ndarray of shape (n_queries,), optional
        The noisy sum of the voters' weights, for votes "binary" and "nonnegative": a label is given where its votes
        are more than half of it.

    Examples
    --------
    >>> Answers(np.array([1, -1]), np.array([True, False]), np.array([[0.2, 9.1], [np.nan, np.nan]])).labels
    array([ 1, -1])
    """

    labels: NDArray[Any]
    answered: NDArray[np.bool_]
    votes: NDArray[np.float64]
    weight: NDArray[np.float64] | None = None


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ClassPoll(Poll["Answers"]):
    """A poll about classes."""

    classes: NDArray[Any]
    abstain_label: int | str

    @property
    def public_attributes(self) -> dict[str, Any]:
        return {**super().public_attributes, "classes_": self.classes}

    def make_answers(self, released: NDArray[np.float64], answered: NDArray[np.bool_]) -> Answers:
        votes = np.full((len(answered), self.plan.size), np.nan)
        votes[answered] = released
        return Answers(self.labels(votes, answered), answered, votes)

    def labels(self, votes: NDArray[np.float64], answered: NDArray[np.bool_]) -> NDArray[Any]:
        """Return the class that won each vote, or the abstain label."""
        if self.classes.dtype.kind == "b" and answered.all():
            return np.asarray(self.classes[np.argmax(votes, axis=1)])
        labels = np.full(len(votes), self.abstain_label, dtype=object)
        labels[answered] = self.classes[np.argmax(votes[answered], axis=1)]
        common = np.result_type(self.classes, np.asarray(self.abstain_label))
        keeps_kind = common.kind == self.classes.dtype.kind or common.kind not in "fi"
        return labels.astype(common) if keeps_kind else labels


@dataclass(eq=False, repr=False, kw_only=True)
class VotingClassifier(ClassifierMixin, VotingEstimator[Answers]):  # type: ignore[misc]
    """Answer queries with the class that wins a vote."""

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **VotingEstimator._parameter_constraints,
        "screening_noise": [Interval(Real, 0, None, closed="neither"), None],
        "threshold": [Real, None],
        "max_screened": [Interval(Integral, 0, None, closed="left"), None],
        "classes": ["array-like", range, None],
        "abstain_label": [Integral, str, None],
    }

    screening_noise: float | None = None
    threshold: float | None = None
    max_screened: int | None = None
    classes: Sequence[Any] | NDArray[Any] | None = None
    abstain_label: int | str | None = None
    classes_: NDArray[Any] = field(init=False)
    _poll: ClassPoll = field(init=False)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Answer public queries as :meth:`answer` does, and return the labels alone.

        Parameters
        ----------
        X : array-like of shape (n_queries, d)

        Returns
        -------
        ndarray of shape (n_queries,) or (n_queries, n_classes)
            See :class:`Answers`.
        """
        return self.answer(X).labels

    score = VotingEstimator.score  # the mixin's counts declined queries as wrong
    _metric = staticmethod(accuracy_score)

    def _predict_answered(self, X: ArrayLike) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        answers = self.answer(X)
        return answers.labels, answers.answered

    @available_if(lambda self: getattr(self, "votes", "classes") in ("classes", "soft"))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Answer public queries as `predict` does, for the same price, with each class's share of the noisy votes.

        Negative counts count as none. :meth:`answer` gives these votes and the labels at the price of one.

        Parameters
        ----------
        X : array-like of shape (n_queries, d)

        Returns
        -------
        ndarray of shape (n_queries, n_classes)
            Rows sum to 1; NaN where a query was declined.
        """
        votes = np.maximum(self.answer(X).votes, 0.0)
        sums = votes.sum(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            shares: NDArray[np.float64] = np.where(sums == 0, 1 / votes.shape[1], votes / sums)
        return shares

    def answer_once(self, x: ArrayLike, key: str, *, client: str | None = None) -> Answers:
        """Answer one public query under a key: the same key returns the same votes again, at no cost.

        The query is paid for before its votes are counted, and its noisy votes are in the ledger before they are
        returned. So they are the same after a crash, in another process, and after the records change.

        Parameters
        ----------
        x : array-like of shape (d,)
            Public. A key that was answered before returns its old answer, for any `x`.
        key : str
            Public: it is stored in the clear.
        client : str, optional
            The client that pays from its quota as well. A key belongs to the client that used it first.

        Returns
        -------
        Answers
            Of one query.

        Raises
        ------
        OverBudgetError
            If the account or the quota cannot pay; nothing was spent. ExhaustedError if `max_answered` is reached.
        KeySpentError
            If the key was paid for and no votes were stored: the other process crashed, or is still counting.
        KeyConflictError
            If the key was used for something else, or by another client.

        Examples
        --------
        >>> import tempfile
        >>> from nearveil.private_knn import PrivateKNeighborsClassifier
        >>> X, y = np.repeat([[1.0, 0.0], [0.0, 1.0]], 200, axis=0), np.repeat(["a", "b"], 200)
        >>> voter = PrivateKNeighborsClassifier(4.0, max_answered=5, max_screened=0, classes=["a", "b"], account="x")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     voter = voter.set_params(ledger=folder + "/budget.db").fit(X, y)
        ...     first, again = voter.answer_once(X[0], "first"), voter.answer_once(X[0], "first")
        >>> np.array_equal(first.votes, again.votes)
        True
        """
        check_is_fitted(self)
        poll = self._poll
        if poll.plan.screening is not None:
            raise ValueError("max_screened must be 0: one key pays for one vote, and a screening is another release")
        if np.ndim(x) != 1:
            raise ValueError("x must be one row")
        query = poll.check_queries(np.asarray(x)[None])
        with poll.spending.take_once(key, client) as debit:
            if debit.message is None:
                ((sums, _),) = poll.count_votes(query)
                debit.store(encode_votes(poll.classes, poll.release(sums)))
            released = decode_votes(debit.message or b"", poll.classes, poll.plan.size)
        return poll.make_answers(released, np.ones(1, dtype=np.bool_))

    def _find_abstain_label(self, classes: NDArray[Any]) -> int | str:
        """Return the label for declined queries: of the type of the classes, and not a class."""
        labels = classes.tolist()
        label = _choose_abstain_label(labels) if self.abstain_label is None else self.abstain_label
        if isinstance(label, str) != isinstance(labels[0], str):
            kind = "a whole number" if isinstance(label, str) else "a text"
            raise ValueError(f"abstain_label must be {kind}, as the classes are: labels of one kind can be compared")
        if label in labels:
            raise ValueError("abstain_label must not be a class: choose a label that no record has")
        return label


def _choose_abstain_label(classes: list[Any]) -> int | str:
    """Return a label of the classes' kind that is none of them.

    Examples
    --------
    >>> _choose_abstain_label([0, 1]), _choose_abstain_label([-1, 1]), _choose_abstain_label(["", "declined"])
    (-1, -2, 'declined_')
    """
    if not isinstance(classes[0], str):
        return -1 if -1 not in classes else math.floor(min(classes)) - 1
    label = "" if "" not in classes else "declined"
    while label in classes:
        label += "_"
    return label


def encode_votes(classes: NDArray[Any], votes: NDArray[np.float64]) -> bytes:
    """Encode the noisy sums of one query, with the classes, as JSON with exact floats."""
    fields = {"classes": [str(name) for name in classes.tolist()], "votes": votes[0].tolist()}
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_votes(message: bytes, classes: NDArray[Any], size: int) -> NDArray[np.float64]:
    """Parse a message of :func:`encode_votes`, shape (1, size)."""
    try:
        fields = json.loads(message)
        votes = np.array([fields["votes"]], dtype=np.float64)
        fits = fields["classes"] == [str(name) for name in classes.tolist()] and votes.ndim == 2
    except (ValueError, TypeError, KeyError):
        fits = False
    if fits and votes.shape == (1, len(classes)) and size > len(classes):
        raise ValueError("key was answered by an older nearveil, without the sum of the weights: use a new key")
    if not fits or votes.shape != (1, size):
        raise ValueError("key was answered for other classes: classes must stay as they were")
    return votes
