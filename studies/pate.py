"""PATE: teachers trained on disjoint parts of the private records vote on a public query."""

import warnings
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, clone
from sklearn.linear_model import RidgeClassifier
from sklearn.utils._param_validation import HasMethods, StrOptions
from sklearn.utils.validation import validate_data

from nearveil.privacy.events import GaussianNoisyMax, LaplaceNoisyMax
from nearveil.privacy.noise import Source
from nearveil.privacy.parameters import allow_integers, parameter
from nearveil.private_knn.estimator import Tally, VotingClassifier
from nearveil.private_knn.plan import Ballot, PlanRequest
from nearveil.private_knn.records import make_hard_votes, run_shielded


@dataclass(frozen=True)
class Teachers:
    """Trained teachers, or the constant class of an empty part. Private: they answer without noise."""

    members: tuple[BaseEstimator | int, ...] = field(repr=False)
    n_classes: int

    def count_votes(self, queries: NDArray[Any]) -> NDArray[np.int64]:
        """Count the teachers that name each class, for each query."""
        counts, rows = np.zeros((len(queries), self.n_classes), dtype=np.int64), np.arange(len(queries))
        for member in self.members if len(queries) else ():
            counts[rows, member if isinstance(member, int) else self._predict_member(member, queries)] += 1
        return counts

    def _predict_member(self, member: BaseEstimator, queries: NDArray[Any]) -> NDArray[np.int64]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of a teacher are private
            named = np.asarray(member.predict(queries))
        if named.shape != (len(queries),) or not np.isin(named, np.arange(self.n_classes)).all():
            raise ValueError(
                "estimator must be a classifier: its predict must return one of the labels it was fitted to"
            )
        return named.astype(np.int64)


def assign_records(n_records: int, n_teachers: int, source: Source) -> list[NDArray[np.int64]]:
    """Send every record to a teacher by its own coin; return the rows of each teacher, disjoint, some maybe empty."""
    # By position would be wrong: one record less would move all that follow it to other teachers. Coins need not be
    # fair.
    teacher = source.words(n_records) % np.uint64(n_teachers)
    parts = [np.flatnonzero(teacher == np.uint64(number)) for number in range(n_teachers)]
    if np.bincount(np.concatenate(parts), minlength=n_records).tolist() != [1] * n_records:
        raise RuntimeError("every record must have one teacher: the coins do not fit the records")
    return parts


def train_teachers(
    estimator: BaseEstimator,
    X: NDArray[Any],
    y: NDArray[np.int64],
    *,
    n_teachers: int,
    n_classes: int,
    source: Source,
    groups: NDArray[np.int64] | None = None,
) -> Teachers:
    """Train a clone of the estimator on each of `n_teachers` disjoint parts; an empty one names class 0."""
    # A ``random_state`` of None is drawn beforehand: NumPy's shared generator would tie one teacher to others' records.
    n_units = len(X) if groups is None else int(groups.max(initial=-1)) + 1
    parts = assign_records(n_units, n_teachers, source)
    if groups is not None:  # a group's records go to one teacher
        parts = [np.flatnonzero(np.isin(groups, part)) for part in parts]
    seeds = source.words(n_teachers) % np.uint64(2**31 - 1)
    members = [_train_teacher(estimator, X[part], y[part], int(seed)) for part, seed in zip(parts, seeds, strict=True)]
    return Teachers(tuple(members), n_classes)


def _train_teacher(estimator: BaseEstimator, X: NDArray[Any], y: NDArray[np.int64], seed: int) -> BaseEstimator | int:
    present = np.unique(y)
    if len(present) < 2:
        return int(present[0]) if len(present) else 0
    teacher = clone(estimator)
    unset = [name for name, value in teacher.get_params().items() if name.endswith("random_state") and value is None]
    teacher.set_params(**dict.fromkeys(unset, seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of a teacher are private
        try:
            return teacher.fit(X, y)
        except Exception as error:
            kind = type(error).__name__
    # Outside of the handler: the message, and the error's context, may hold private values.
    raise ValueError(
        f"estimator could not be trained on a part of the records ({kind}); use fewer teachers, or one that can"
    )


Mechanism = Literal["lnmax", "gnmax", "confident-gnmax"]
_BATCH = 1024  # queries


@dataclass(eq=False, repr=False)
class PateClassifier(VotingClassifier):
    """Classify public queries by the votes of teachers that were trained on disjoint parts of the private records.

    PATE (Papernot et al. 2017 and 2018), the rival of :class:`PrivateKNeighborsClassifier`, with the same interface.
    A record is with one teacher and can move one vote (``docs/theory/private-knn.md``, Theorem 10; attacked by
    ``tests/private_knn/test_pate.py``).
    The guarantee does not depend on the data. The papers' smaller epsilon, which does,
    is computed from the votes and private itself; it is no guarantee, and not used.

    A fitted estimator holds the teachers; so does its pickle. Treat both as private data.

    Parameters
    ----------
    n_teachers : int, default=250
        More teachers outvote more noise, but learn from fewer records each. It must not be chosen by looking at the
        private records.
    estimator : classifier, optional
        Cloned for each teacher; :class:`~sklearn.linear_model.RidgeClassifier` by default. It must not read anything
        but its part of the records: no shared cache, no warm start from elsewhere.
    mechanism : {"confident-gnmax", "gnmax", "lnmax"}, default="confident-gnmax"
        "lnmax" adds Laplace noise to the votes, "gnmax" Gaussian noise; "confident-gnmax" screens every query first and
        declines if the teachers disagree.
    screening_noise, threshold, max_screened
        Of "confident-gnmax": the noise on the largest count, the threshold for it, by default 0.6 of the teachers, and
        the maximum number of screened queries.
    vote_noise : float, optional
        On every count: the standard deviation of Gaussian noise, or the scale of Laplace noise (1 / gamma).
    epsilon, delta, max_answered, classes, abstain_label, unit, ledger, account, source
        As of :class:`PrivateKNeighborsClassifier`.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    plan_ : VotePlan
        The caps on queries, and the noise. Its neighbours are the teachers.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> voter = PateClassifier(40, mechanism="gnmax", epsilon=2.0, max_answered=20, classes=range(10))
    >>> voter.fit(X[:1500], y[:1500]).predict(X[1500:1520]).shape
    (20,)
    >>> f"{voter.plan_.vote_noise:.1f} on counts of {voter.n_teachers} votes"
    '12.6 on counts of 40 votes'
    """

    n_teachers: int = parameter(250, allow_integers(1))
    estimator: BaseEstimator | None = parameter(None, HasMethods(["fit", "predict"]), None)
    _: KW_ONLY
    max_screened: int | None = parameter(None, allow_integers(1), None)
    mechanism: Mechanism = parameter("confident-gnmax", StrOptions({"lnmax", "gnmax", "confident-gnmax"}))
    _class_numbers: NDArray[np.int64] = field(init=False)  # the class of each record, until the teachers are trained
    _teachers: Teachers = field(init=False)

    def _read_records(self, X: ArrayLike, y: ArrayLike) -> tuple[Any, Ballot]:
        self._check_screening()
        rows, _ = run_shielded(validate_data, self, X, y, dtype=np.float64, multi_output=True)  # y: make_hard_votes
        self.classes_, labels, _ = make_hard_votes(y, self.classes)
        self._abstain_label = self._find_abstain_label(self.classes_)
        self._class_numbers = labels.class_numbers[:-1]
        event = LaplaceNoisyMax if self.mechanism == "lnmax" else GaussianNoisyMax
        return rows, Ballot(event, len(self.classes_), can_screen=self.mechanism == "confident-gnmax")

    def _make_request(self, ballot: Ballot) -> PlanRequest:
        return replace(super()._make_request(ballot), n_neighbors=self.n_teachers)

    def _learn(self, rows: NDArray[np.float64]) -> None:
        self._teachers = train_teachers(
            RidgeClassifier() if self.estimator is None else self.estimator,
            rows,
            self._class_numbers,
            n_teachers=self.n_teachers,
            n_classes=len(self.classes_),
            source=self._source,
            groups=self._groups,
        )
        del self._class_numbers

    def _count_agreeing(self) -> tuple[float, str]:
        return self.n_teachers, f"there are {self.n_teachers:,} teachers"

    def _count_votes(self, queries: NDArray[np.float64]) -> Iterator[Tally]:
        for start in range(0, len(queries), _BATCH):
            counts = self._teachers.count_votes(queries[start : start + _BATCH])
            yield counts, None if self.plan_.screening is None else counts.max(axis=1).astype(np.float64)

    def _check_screening(self) -> None:
        """Refuse screening options that the mechanism does not use, and missing ones that it needs."""
        if self.mechanism != "confident-gnmax":
            for name in ("screening_noise", "threshold", "max_screened"):
                if getattr(self, name) is not None:
                    raise ValueError(f'{name} must not be given for mechanism="{self.mechanism}": nothing is screened')
        elif self.vote_noise is not None and None in (self.screening_noise, self.threshold):
            raise ValueError("screening_noise and threshold must be given: vote_noise is, so nothing is calibrated")
