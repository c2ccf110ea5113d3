"""Check private records, and turn their labels into votes in whole units. No error shows a private value."""

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_array, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from nearveil.cluster import is_dask_array
from nearveil.privacy.checks import check_positive
from nearveil.privacy.events import VoteHistogram
from nearveil.private_knn.neighbors import Voters
from nearveil.private_knn.plan import UNIT, Ballot, ClippedSums, Kind

T = TypeVar("T")
Votes = Literal["classes", "soft", "binary", "nonnegative", "signed"]
MULTILABEL = get_args(Kind)
_BATCH = 2**22  # votes gathered at a time
_LEAST_CLIP = 0.001  # below which rounding to units would distort the weights

# Messages of scikit-learn that quote no data. Others are cut at a known prefix, or replaced.
_SAFE = re.compile(
    r"Input [Xy] contains |Found array with (0|\d+) (sample|feature)|Found array with dim|Found input variables with "
    r"inconsistent|X has \d+ features|Sparse data was passed|The feature names should match|y should be a 1d array|"
    r"Input contains NaN|Unknown label type: |bad input shape|This \w+ estimator requires y to be passed|"
    r"float\(\) argument must be "
)
_TRIMMED = ("Complex data not supported", "Expected 2D array, got 1D array instead", "Expected 2D array, got scalar")


def run_shielded(check: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Run a check on private input; if it fails, raise an error without values."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The number of unique classes")  # depends on the labels
        try:
            return check(*arguments, **options)
        except (TypeError, ValueError) as error:
            kind, words = (TypeError if isinstance(error, TypeError) else ValueError), _clean(str(error))
    raise kind(words)  # outside of the handler: the context of the first error is private


def check_records(estimator: Any, X: Any, y: Any, **options: Any) -> tuple[Any, Any]:
    """Let scikit-learn check private records. Workers check the rows of a Dask array."""
    rows = np.zeros((X.shape[0], 1)) if is_dask_array(X) else X
    rows, y = run_shielded(validate_data, estimator, rows, y, dtype=np.float64, **options)
    if not is_dask_array(X):
        return rows, y
    estimator.n_features_in_ = int(X.shape[1])
    return X, y


def _clean(words: str) -> str:
    if _SAFE.match(words.partition("\n")[0]):
        return words
    for prefix in _TRIMMED:
        if words.startswith(prefix):
            return f"{prefix}: X must have a row for each record"
    return "X and y must hold real numbers of the right shape; private values are not shown"


@dataclass(frozen=True)
class Labels:
    """One class for each record."""

    class_numbers: NDArray[np.int64] = field(repr=False)  # the last, of `NO_VOTER`, is `n_classes`
    n_classes: int

    @property
    def most_agreeing(self) -> int:
        """The number of records of the largest class."""
        return int(np.bincount(self.class_numbers[:-1], minlength=1).max())

    def count(self, voters: Voters) -> NDArray[np.int64]:
        """Count the votes of each query for each class, shape (n_queries, n_classes)."""
        bins = self.n_classes + 1
        keys = self.class_numbers[voters] + bins * np.arange(len(voters))[:, None]
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
    """Return the classes, all votes, and a query's ballot. An array made of `y` would hide labels of several types."""
    y = run_shielded(column_or_1d, _check_types(y), warn=True)
    run_shielded(check_classification_targets, y)
    labels = np.unique(y) if classes is None else check_classes(classes)
    try:
        class_numbers = np.searchsorted(labels, y)
        inside = labels[np.minimum(class_numbers, len(labels) - 1)] == y
    except TypeError:
        inside = np.array([False])
    if not np.all(inside):
        raise ValueError("y holds a label that is not in classes: the list must be complete, and public")
    return labels, Labels(np.append(class_numbers, len(labels)), len(labels)), Ballot(VoteHistogram, len(labels))


def make_soft_votes(y: ArrayLike, classes: ArrayLike | None) -> tuple[NDArray[Any], Weights, Ballot]:
    """As `make_hard_votes`, for rows of weights that sum to at most 1."""
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
    """As `make_hard_votes`, for votes on many labels, each record's scaled down to L1 norm `clip`."""
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
    """Multiply each row by its weight, rounded first and at most 1, and append the weight times a public scale."""
    # The scale is the largest at which the weights cost nothing: the sums' sensitivity stays that of the votes alone
    # (docs/theory/private-knn.md, Theorem 11; attacked by tests/private_knn/test_labels.py).
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


def check_groups(groups: ArrayLike | None, n_records: int) -> NDArray[np.int64]:
    """Return the number of each record's group."""
    names = run_shielded(column_or_1d, _check_types(groups, "groups"))
    if len(names) != n_records:
        raise ValueError("groups must have one name for each row of X")
    return np.asarray(np.unique(names, return_inverse=True)[1], dtype=np.int64)


def check_public_rows(public: ArrayLike, X: ArrayLike) -> None:
    """Refuse public rows that share memory with the private ones. A comparison of values would depend on records."""
    if public is X or np.shares_memory(np.asarray(public), np.asarray(X)):
        raise ValueError(
            "public must not be X, or a part of it: the model of public rows is published without noise. "
            "Give public rows"
        )


def _check_types(y: Any, name: str = "y") -> Any:
    """Refuse labels of several types: NumPy converts them to one, so one record's label would change the others."""
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
