"""PATE's teachers: disjoint parts of the private records, one estimator trained on each, one vote for each.

A record touches one teacher's vote and no other (``docs/theory/private-knn.md``, Theorem 10; attacked by
``tests/votes/test_pate.py``, which removes every record in turn).
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, clone

from nearveil.privacy.noise import Source

_SEEDS = np.uint64(2**31 - 1)


@dataclass(frozen=True)
class Teachers:
    """Trained teachers, or the class that one always names.

    Private data: whoever holds them can ask a teacher without noise.
    """

    members: tuple[BaseEstimator | int, ...] = field(repr=False)
    n_classes: int

    def votes(self, queries: NDArray[Any]) -> NDArray[np.int64]:
        """Count, for each query, how many teachers name each class.

        Returns: Each row sums to the number of teachers.
        """
        counts, rows = np.zeros((len(queries), self.n_classes), dtype=np.int64), np.arange(len(queries))
        for member in self.members if len(queries) else ():
            counts[rows, member if isinstance(member, int) else self._named(member, queries)] += 1
        return counts

    def _named(self, member: BaseEstimator, queries: NDArray[Any]) -> NDArray[np.int64]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a teacher warns of is private
            named = np.asarray(member.predict(queries))
        if named.shape != (len(queries),) or not np.isin(named, np.arange(self.n_classes)).all():
            raise ValueError(
                "estimator must be a classifier: its predict must return one of the labels it was fitted to"
            )
        return named.astype(np.int64)


def assign(n_records: int, n_teachers: int, source: Source) -> list[NDArray[np.int64]]:
    """Send every record to a teacher by a coin of its own.

    By position would be wrong: with row i at teacher ``i % n_teachers``, one record less would move all that follow it
    to other teachers, and every vote might change. A coin knows nothing of the other records. Coins need not be fair.

    Returns: The rows of each teacher, disjoint, some perhaps empty.

    Examples
    --------
    >>> from nearveil.privacy.noise import unsafe_seeded
    >>> parts = assign(1000, 4, unsafe_seeded(0))
    >>> sum(map(len, parts)), min(map(len, parts)) > 200
    (1000, True)
    """
    teacher = source.words(n_records) % np.uint64(n_teachers)
    parts = [np.flatnonzero(teacher == np.uint64(one)) for one in range(n_teachers)]
    assert np.bincount(np.concatenate(parts), minlength=n_records).tolist() == [1] * n_records, "parts overlap"
    return parts


def train(
    estimator: BaseEstimator,
    X: NDArray[Any],
    y: NDArray[np.int64],
    *,
    n_teachers: int,
    n_classes: int,
    source: Source,
) -> Teachers:
    """Train a clone of the estimator on each of `n_teachers` disjoint parts.

    A part that holds one class always names it; an empty one names class 0, which is public.

    `estimator`: Where a ``random_state`` of it is None, every teacher gets one of its own, drawn beforehand: with
    NumPy's shared generator, what one teacher draws would depend on the records of another.
    `y`: Numbers of classes.
    """
    parts = assign(len(X), n_teachers, source)
    seeds = source.words(n_teachers) % _SEEDS
    members = [_trained(estimator, X[part], y[part], int(seed)) for part, seed in zip(parts, seeds, strict=True)]
    return Teachers(tuple(members), n_classes)


def _trained(estimator: BaseEstimator, X: NDArray[Any], y: NDArray[np.int64], seed: int) -> BaseEstimator | int:
    present = np.unique(y)
    if len(present) < 2:
        return int(present[0]) if len(present) else 0
    teacher = clone(estimator)
    unset = [name for name, value in teacher.get_params().items() if name.endswith("random_state") and value is None]
    teacher.set_params(**dict.fromkeys(unset, seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a teacher warns of is private
        try:
            return teacher.fit(X, y)
        except Exception as error:
            kind = type(error).__name__
    # Outside of the handler: the message, and the error's context, may hold private values.
    raise ValueError(
        f"estimator could not be trained on a part of the records ({kind}); use fewer teachers, or one that can"
    )
