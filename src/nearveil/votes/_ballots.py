"""Private labels as votes: whole numbers, so that every sum is exact; errors about them tell no value."""

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
from nearveil.votes.mechanisms import UNIT
from nearveil.votes.neighbors import Voters
from nearveil.votes.plan import Ballot, ClippedSums, Kind

T = TypeVar("T")

# What scikit-learn says without quoting data. Of the others only the part before the first colon or line end, if known.
_SAFE = re.compile(
    r"Input [Xy] contains |Found array with (0|\d+) (sample|feature)|Found array with dim|Found input variables with "
    r"inconsistent|X has \d+ features|Sparse data was passed|The feature names should match|y should be a 1d array|"
    r"Input contains NaN|Unknown label type: |bad input shape|This \w+ estimator requires y to be passed|"
    r"float\(\) argument must be "
)
_TRIMMED = ("Complex data not supported", "Expected 2D array, got 1D array instead", "Expected 2D array, got scalar")


def run_shielded(check: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Run a check on private input; where it fails, say why without a value.

    Examples
    --------
    >>> run_shielded(float, "a private word")
    Traceback (most recent call last):
    ...
    ValueError: X and y must hold real numbers of the right shape: what was found is not shown, since it is private
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The number of unique classes")  # tells of the labels
        try:
            return check(*arguments, **options)
        except (TypeError, ValueError) as error:
            kind, words = (TypeError if isinstance(error, TypeError) else ValueError), _clean(str(error))
    raise kind(words)  # outside of the handler: the first error's context holds what must not be shown


def check_records(columns: Any, X: Any, y: Any, **options: Any) -> tuple[Any, Any]:
    """Let scikit-learn check private records; rows of a Dask array are checked where they lie, not here."""
    if not is_dask_array(X):
        X, y = run_shielded(validate_data, columns, X, y, dtype=np.float64, **options)
        return X, y
    _, y = run_shielded(validate_data, columns, np.zeros((X.shape[0], 1)), y, dtype=np.float64, **options)
    columns.n_features_in_ = int(X.shape[1])
    return X, y


def _clean(words: str) -> str:
    if _SAFE.match(words.partition("\n")[0]):
        return words
    for known in _TRIMMED:
        if words.startswith(known):
            return f"{known}: X must have a row for each record"
    return "X and y must hold real numbers of the right shape: what was found is not shown, since it is private"


Votes = Literal["classes", "soft", "binary", "nonnegative", "signed"]
MULTILABEL = get_args(Kind)
_AT_ONCE = 2**22  # votes that are gathered at a time


@dataclass(frozen=True)
class Labels:
    """One class for each record."""

    codes: NDArray[np.int64] = field(repr=False)  # numbers of the classes; the last, for nobody, is beyond them
    n_classes: int

    def count(self, voters: Voters) -> NDArray[np.int64]:
        """Count the votes of each query for each class, shape (n_queries, n_classes)."""
        bins = self.n_classes + 1
        keys = self.codes[voters] + bins * np.arange(len(voters))[:, None]
        counts = np.bincount(keys.ravel(), minlength=bins * len(voters))
        return counts.reshape(len(voters), bins)[:, : self.n_classes].astype(np.int64)


@dataclass(frozen=True)
class Weights:
    """A vote of several parts for each record, in units."""

    units: NDArray[np.int64] = field(repr=False)  # the last row, of nobody, is zero

    def count(self, voters: Voters) -> NDArray[np.int64]:
        """Sum the votes on each query, shape (n_queries, size)."""
        size = self.units.shape[1]
        sums = np.zeros((len(voters), size), dtype=np.int64)
        step = max(1, _AT_ONCE // max(1, voters.shape[1] * size))
        for start in range(0, len(voters), step):
            sums[start : start + step] = self.units[voters[start : start + step]].sum(axis=1)
        return sums


def make_hard_votes(y: ArrayLike, classes: ArrayLike | None) -> tuple[NDArray[Any], Labels, Ballot]:
    """Return the classes, the votes of all records and what is released of them.

    `y`: As it was given: an array made of it hides that labels are of several types.
    `classes`: The public list; read from the labels where there is none.
    """
    _check_types(y)
    y = run_shielded(column_or_1d, y, warn=True)
    run_shielded(check_classification_targets, y)
    known = np.unique(y) if classes is None else check_classes(classes)
    try:
        codes = np.searchsorted(known, y)
        inside = known[np.minimum(codes, len(known) - 1)] == y
    except TypeError:
        inside = np.array([False])
    if not np.all(inside):
        raise ValueError("y holds a label that is not in classes: the list must be complete, and public")
    return known, Labels(np.append(codes, len(known)), len(known)), Ballot(VoteHistogram, len(known))


def make_soft_votes(y: ArrayLike, classes: ArrayLike | None) -> tuple[NDArray[Any], Weights, Ballot]:
    """Return the same for rows of weights that sum to at most 1."""
    rows = _check_rows(y)
    if np.any(rows < 0) or np.any(rows.sum(axis=1) > 1 + 1e-6):
        raise ValueError("y must hold weights of at least 0 that sum to at most 1 in each row")
    known = _check_columns(rows, classes)
    # A sum that rounding lifted above 1 is scaled back; rounding towards zero never lengthens.
    rows = rows / np.maximum(rows.sum(axis=1, keepdims=True), 1.0)
    return known, _make_weights(rows), Ballot(VoteHistogram, len(known), unit=UNIT, whole=False)


def make_label_votes(
    y: ArrayLike, classes: ArrayLike | None, clip: float | None, kind: Kind
) -> tuple[NDArray[Any], Weights, Ballot]:
    """Return the same for votes on many labels, each record's scaled down to L1 norm `clip`."""
    rows = _check_rows(y)
    if clip is None:
        raise ValueError("clip must be given: how many labels one record may vote for (the supplement's tau)")
    if check_positive(clip, "clip") > 1 / UNIT:
        raise ValueError("clip must be at most a million")
    if kind == "binary" and not np.all((rows == 0) | (rows == 1)):
        raise ValueError('y must hold 0 and 1 alone for votes="binary"')
    if kind == "nonnegative" and np.any(rows < 0):
        raise ValueError('y must not be negative for votes="nonnegative"')
    known = _check_columns(rows, classes)
    norms = np.abs(rows).sum(axis=1, keepdims=True)
    rows = rows * (clip / np.maximum(norms, clip))
    event = ClippedSums(float(clip), kind)
    return known, _make_weights(rows), Ballot(event, len(known), unit=UNIT, whole=False, screened=False)


def check_classes(classes: ArrayLike) -> NDArray[Any]:
    """Return the public list of classes, sorted."""
    given = np.asarray(classes)
    known = np.unique(given)
    if given.ndim != 1 or len(known) == 0 or len(known) != len(given):
        raise ValueError("classes must be a list of different labels")
    return np.asarray(known)


def _check_types(y: Any) -> None:
    """Refuse a list of labels of several types: NumPy turns all into one, so one record's label changes the others'."""
    if hasattr(y, "dtype"):
        return
    labels = np.array(y, dtype=object).ravel().tolist()
    kinds = {np.asarray(one).dtype.kind for one in {type(label): label for label in labels}.values()}
    if len(kinds) > 1 or not kinds >= {np.asarray(y).dtype.kind}:
        raise ValueError("y must hold labels of one type, such as text alone or whole numbers alone")


def _check_rows(y: ArrayLike) -> NDArray[np.float64]:
    rows: NDArray[np.float64] = run_shielded(check_array, y, dtype=np.float64, input_name="y")
    if np.max(np.abs(rows), initial=0.0) > 1 / UNIT:
        raise ValueError("y must lie within a million of 0: larger votes are clipped anyway")
    return rows


def _check_columns(rows: NDArray[np.float64], classes: ArrayLike | None) -> NDArray[Any]:
    known = np.arange(rows.shape[1]) if classes is None else np.asarray(classes)
    if known.ndim != 1 or len(known) != rows.shape[1] or len(np.unique(known)) != len(known):
        raise ValueError("classes must name the columns of y, each once")
    return known


def _make_weights(rows: NDArray[np.float64]) -> Weights:
    units = np.trunc(rows / UNIT).astype(np.int64)
    return Weights(np.vstack([units, np.zeros((1, rows.shape[1]), dtype=np.int64)]))
