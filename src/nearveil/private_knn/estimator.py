"""The base of all voting estimators: fit (check, plan, open the caps) and answer (pay, count, screen, pay, release)."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_consistent_length
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, validate_data

from nearveil.cluster import is_dask_array
from nearveil.privacy import Guarantee
from nearveil.privacy.parameters import allow_integers, allow_reals, parameter
from nearveil.private_knn.individual import VoteForecast
from nearveil.private_knn.plan import Ballot, NoiseWarning, PlanRequest, VotePlan, find_needed_votes, make_plan
from nearveil.private_knn.records import check_groups, check_public_rows
from nearveil.private_knn.scaling import ColumnBounds, warn_of_scaled_rows
from nearveil.private_knn.spending import (
    PayingEstimator,
    Spending,
    find_account,
    name_group_unit,
    name_inferred_unit,
    open_spending,
)
from nearveil.progress import Tick

A = TypeVar("A")
Tally = tuple[NDArray[np.int64], NDArray[np.float64] | None]
"""Votes on a batch of queries: sums of one sample, and the max-votes of another if there is a screening. Private."""


class AnsweredScore(NamedTuple):
    """The quality of answers, and the share of queries that were answered.

    Examples
    --------
    >>> result = AnsweredScore(score=0.9, answered=0.5)
    >>> f"{result.score:.0%} of the answers are right; {result.answered:.0%} of the queries were answered"
    '90% of the answers are right; 50% of the queries were answered'
    """

    #: Accuracy of a classifier, R^2 of a regressor, on the answered queries only; NaN if none was answered.
    score: float
    answered: float  #: share of the queries that were answered


@dataclass(eq=False, repr=False, kw_only=True)
class VotingEstimator(PayingEstimator, ABC, Generic[A]):
    """Answer queries by votes of private records, up to caps fixed beforehand in `plan_`."""

    # `fit` works on a copy that holds records, plan and account; it replaces `_poll` as a whole and never changes.
    # `answer` reads `_poll` once, so rows, labels, noise and caps are of one fit, whatever other threads do.

    _metric: ClassVar[Callable[..., float]]  # of the true and the predicted labels or values
    _gain: float = field(init=False, default=1.0)  # change of a released sum by one voter

    max_answered: int = parameter(1000, allow_integers(1))
    vote_noise: float | None = parameter(None, allow_reals(0), None)
    plan_: VotePlan = field(init=False)
    _guarantee: Guarantee = field(init=False)
    _spending: Spending = field(init=False)
    _groups: NDArray[np.int64] | None = field(init=False, default=None)  # of each record
    _bounds: ColumnBounds | None = field(init=False, default=None)  # queries are scaled by them, as the records were
    _poll: Self = field(init=False)

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        *,
        groups: ArrayLike | None = None,
        public: ArrayLike | None = None,
        public_groups: ArrayLike | None = None,
    ) -> Self:
        """Store the private records, and fix the plan of noise and caps.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Private. The guarantee is about these rows: each must be made from its own record alone, to the last bit. Of
            images by a network: ``extractor.extract(images, row_exact=True)``.
        y : array-like of shape (n,) or (n, n_classes)
            Private. Classes, weights of classes, or numbers, which are clipped to their bounds.
        groups : array-like of shape (n,), optional
            Private. The person, or other owner, of each record: the guarantee is about all records of one.
        public : array-like of shape (n_public, d), optional
            Public rows like the private ones, none of them private; better 1,000 than 300. For individual accounting.
        public_groups : array-like of shape (n_public,), optional
            The group of each public row, needed for individual accounting of `groups`, which may differ in size.
        """
        self._warn_of_parameter_search()
        poll = self._copy_parameters()
        rows, ballot = poll._read_records(X, y)
        poll._read_groups(groups, len(rows))
        if public is not None and not is_dask_array(X):
            check_public_rows(public, X)  # as given: `rows` may be a copy
        poll.plan_ = plan = poll._choose_plan(ballot, rows, public, public_groups)
        poll._guarantee = poll._make_guarantee(plan)
        if not is_dask_array(rows):
            warn_of_scaled_rows(rows)
        poll._learn(rows)
        account = find_account(poll.ledger, poll.account, plan, poll._guarantee)
        poll._spending = open_spending(account, plan, poll._guarantee, poll._name_log())
        if not plan.individual:  # else by the forecast, which is public
            _warn_of_noise(poll)
        return self._set_fitted(poll, _poll=poll)

    @abstractmethod
    def _read_records(self, X: ArrayLike, y: ArrayLike) -> tuple[Any, Ballot]:
        """Check private records, and store their votes; return their rows and the ballot of a query."""

    @abstractmethod
    def _learn(self, rows: Any) -> None:
        """Prepare the search among the rows, or train teachers on them."""

    @abstractmethod
    def _count_votes(self, queries: NDArray[np.float64]) -> Iterator[Tally]:
        """Find the voters of each query and count their votes, a batch at a time."""

    @abstractmethod
    def _count_agreeing(self) -> tuple[float, str]:
        """Return the largest number of voters that can agree, and a description. Private if voters are records."""

    @abstractmethod
    def _make_answers(self, released: NDArray[np.float64], answered: NDArray[np.bool_]) -> A:
        """Return the answers to all queries from the noisy sums of those that were answered."""

    def _read_groups(self, groups: ArrayLike | None, n_records: int) -> None:
        """Store the group of each record: from here on, groups are protected."""
        if groups is not None:
            self._groups = check_groups(groups, n_records)
            self.unit = name_group_unit(self.unit)  # of the copy that is fitted

    def _choose_plan(
        self,
        ballot: Ballot,
        rows: Any,  # noqa: ARG002
        public: ArrayLike | None = None,
        public_groups: ArrayLike | None = None,
    ) -> VotePlan:
        """Return the plan of noise and caps."""
        if public is not None or public_groups is not None:
            raise ValueError(f"public must be None: {type(self).__name__} has no individual accounting")
        return make_plan(self._make_request(ballot))

    def _make_guarantee(self, plan: VotePlan) -> Guarantee:
        return plan.guarantee(self.delta, unit=self._protected_unit, source=self._source)

    def _name_log(self) -> str:
        """Return the name of the public log that estimators with equal public parameters share in an account."""
        return ""

    def _make_request(self, ballot: Ballot) -> PlanRequest:
        names = {option.name for option in fields(PlanRequest)} & set(self.get_params(deep=False))
        return PlanRequest(ballot, **{name: getattr(self, name) for name in names})

    @property
    def _protected_unit(self) -> str:
        return self.unit

    def _check_queries(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return queries that have the columns of the records, scaled as these are."""
        queries: NDArray[np.float64] = validate_data(self, X, dtype=np.float64, reset=False)
        return queries if self._bounds is None else self._bounds.scale(queries)

    def _release(self, sums: NDArray[np.int64]) -> NDArray[np.float64]:
        """Add noise to the votes on queries that were paid for."""
        return self.plan_.votes.release(sums, self._source)

    def answer(self, X: ArrayLike, *, progress: Tick | None = None) -> A:
        """Answer public queries, or decline; return the labels with the noisy votes, or the values of a regressor.

        Queries are answered in their order until a cap is reached; the rest is declined. `progress` is called with the
        number of queries that were counted since the last call.

        Raises
        ------
        ExhaustedError
            If a cap was reached before this call.
        """
        check_is_fitted(self)
        poll = self._poll  # read once: another thread may fit meanwhile
        return poll._answer(poll._check_queries(X), progress)

    def _answer(self, queries: NDArray[np.float64], progress: Tick | None) -> A:
        """Answer within the caps on all queries.

        The order is the guarantee: pay, search, vote, screen, pay for the votes, add noise, answer. A payment is
        durable before anything is computed from the records (``docs/theory/private-knn.md``).
        """
        plan, spending = self.plan_, self._spending
        spending.assert_open()
        spending.assert_affordable(len(queries))
        if plan.screening is None:
            paid = spending.take("answered", len(queries))
            chosen = np.arange(paid)
            batches = [self._release(sums) for sums, _ in _report(self._count_votes(queries[:paid]), progress)]
            released = np.concatenate(batches) if batches else np.zeros((0, plan.size))
        else:
            paid = spending.take("screened", len(queries))
            tallies = list(_report(self._count_votes(queries[:paid]), progress))
            largest = np.concatenate([np.zeros(0), *(maxima for _, maxima in tallies if maxima is not None)])
            passed = np.flatnonzero(plan.screening.toss(largest, self._source))
            # Which queries passed is public from here on, and so is the number of votes to pay for.
            chosen = passed[: spending.take("answered", len(passed))]
            sums = np.concatenate([np.zeros((0, plan.size), np.int64), *(sums for sums, _ in tallies)])
            released = self._release(sums[chosen])
        answered = np.zeros(len(queries), dtype=np.bool_)
        answered[chosen] = True
        return self._make_answers(released, answered)

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Score the answered queries only; :meth:`score_answered` also returns their share."""
        return self.score_answered(X, y, sample_weight).score

    def score_answered(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> AnsweredScore:
        """Score the answered queries, and return their share of all queries. Every query is paid for, as by `predict`.

        `y` holds the true labels or values of the public queries. They are not protected.
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
        return self._poll._guarantee


def _warn_of_noise(poll: VotingEstimator[Any]) -> None:
    """Warn the owner of the records, before anything is paid, that answers can only be noise."""
    plan, (agreeing, voters) = poll.plan_, poll._count_agreeing()
    needed = find_needed_votes(plan, poll._gain)
    if agreeing < needed:
        warnings.warn(
            f"only noise is to be expected: {plan.n_neighbors:,} voters take part, an answer needs {needed:,} of them "
            f"that agree (noise {plan.vote_noise:.3g}), and {voters}. Give a larger epsilon, a smaller max_answered, "
            "or more records or teachers",
            NoiseWarning,
            stacklevel=3,
        )


def _report(tallies: Iterator[Tally], progress: Tick | None) -> Iterator[Tally]:
    for tally in tallies:
        yield tally
        if progress is not None:
            progress(len(tally[0]))


@dataclass(frozen=True)
class Answers:
    """Answers to queries, all public."""

    #: Classes, shape (n_queries,), or zeros and ones for many labels; the abstain label where a query was declined.
    labels: NDArray[Any]
    answered: NDArray[np.bool_]  #: shape (n_queries,)
    votes: NDArray[np.float64]  #: the noisy counts of each class that decided; NaN where a query was declined
    #: The noisy sum of the voters' weights, for "binary" and "nonnegative": a label needs more than half of it.
    weight: NDArray[np.float64] | None = None
    forecast: VoteForecast | None = None  #: of individual accounting: the terms of the queries that were new


@dataclass(eq=False, repr=False, kw_only=True)
class VotingClassifier(ClassifierMixin, VotingEstimator[Answers]):  # type: ignore[misc]
    """Answer queries with the class that wins a vote."""

    screening_noise: float | None = parameter(None, allow_reals(0), None)
    threshold: float | None = parameter(None, Real, None)
    max_screened: int | None = parameter(None, allow_integers(0), None)
    classes: Sequence[Any] | NDArray[Any] | None = parameter(None, "array-like", range, None)
    abstain_label: int | str | None = parameter(None, Integral, str, None)
    classes_: NDArray[Any] = field(init=False)
    _abstain_label: int | str = field(init=False)

    @property
    def _protected_unit(self) -> str:
        inferred = self.classes is None and getattr(self, "votes", "classes") == "classes"
        return name_inferred_unit(self.unit) if inferred else self.unit

    def _make_answers(self, released: NDArray[np.float64], answered: NDArray[np.bool_]) -> Answers:
        votes = np.full((len(answered), self.plan_.size), np.nan)
        votes[answered] = released
        return Answers(self._choose_labels(votes, answered), answered, votes)

    def _choose_labels(self, votes: NDArray[np.float64], answered: NDArray[np.bool_]) -> NDArray[Any]:
        """Return the class that won each vote, or the abstain label."""
        if self.classes_.dtype.kind == "b" and answered.all():
            return np.asarray(self.classes_[np.argmax(votes, axis=1)])
        labels = np.full(len(votes), self._abstain_label, dtype=object)
        labels[answered] = self.classes_[np.argmax(votes[answered], axis=1)]
        common = np.result_type(self.classes_, np.asarray(self._abstain_label))
        keeps_kind = common.kind == self.classes_.dtype.kind or common.kind not in "fi"
        return labels.astype(common) if keeps_kind else labels

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Answer public queries as :meth:`answer` does, and return the labels alone."""
        return self.answer(X).labels

    score = VotingEstimator.score  # the mixin's counts declined queries as wrong
    _metric = staticmethod(accuracy_score)

    def _predict_answered(self, X: ArrayLike) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        answers = self.answer(X)
        return answers.labels, answers.answered

    @available_if(lambda self: getattr(self, "votes", "classes") in ("classes", "soft"))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Answer public queries as `predict` does, for the same price, with each class's share of the noisy votes.

        Rows sum to 1; NaN where a query was declined. Negative counts are none. :meth:`answer` also gives the labels.
        """
        votes = np.maximum(self.answer(X).votes, 0.0)
        sums = votes.sum(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(sums == 0, 1 / votes.shape[1], votes / sums))

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
    """Return a label of the classes' kind that is none of them."""
    if not isinstance(classes[0], str):
        return -1 if -1 not in classes else math.floor(min(classes)) - 1
    label = "" if "" not in classes else "declined"
    while label in classes:
        label += "_"
    return label
