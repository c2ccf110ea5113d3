"""The private half of a protected gallery: records that vote, and never leave."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nearveil.ledger import Account
from nearveil.retrieval import Index
from nearveil.service._protected_sets import PublicSets
from nearveil.votes import PrivateKNeighborsClassifier

_LOG = logging.getLogger(__name__)
_AT_ONCE = 1024
_SAME = 1e-5  # two features of one image differ by less, in each number


@dataclass(frozen=True, eq=False)
class Records:
    """Private features and labels at one revision.

    Attributes
    ----------
    revision : int
    features : ndarray of shape (n, d), float32
    labels : ndarray of shape (n,)
    stray : bool
        Whether there are records of no class. They are left out.
    """

    revision: int
    features: NDArray[np.float32] = field(repr=False)
    labels: NDArray[np.str_] = field(repr=False)
    stray: bool = field(repr=False)

    def __repr__(self) -> str:
        return "Records(private)"


def read_records(index: Index, classes: Sequence[str]) -> Records:
    """Read all records. The label of one is the first folder of its name.

    Whether a record is left out depends on that record alone, so two galleries that differ in one record still do.

    Parameters
    ----------
    index : Index
    classes : sequence of str

    Returns
    -------
    Records
    """
    now = index.snapshot()
    labels: dict[int, str] = {}
    for some in _chunks(len(now)):
        # One may have been deleted since the snapshot: then it does not vote.
        items = index.items(now.ids[some], lenient=True, originals=False)
        labels |= {item.id: item.name.partition("/")[0] if "/" in item.name else "" for item in items}
    known = set(classes)
    votes = np.array([labels.get(number) in known for number in now.ids.tolist()], dtype=np.bool_)
    ids = now.ids[votes].tolist()
    stray = any(label not in known for label in labels.values())
    return Records(now.revision, now.features[votes], np.array([labels[number] for number in ids], np.str_), stray)


def share_images(private: Index, public: Index) -> bool:
    """Return whether an image is in both indexes, as far as features tell.

    Parameters
    ----------
    private, public : Index

    Returns
    -------
    bool
    """
    rows = private.snapshot().features
    if not len(public):
        return False
    for some in _chunks(len(rows)):
        nearest = public.features(public.search(rows[some], 1)[0][:, 0])
        if (np.abs(nearest - rows[some]).max(axis=1) < _SAME).any():
            return True
    return False


@dataclass(eq=False)
class PrivateVoters:
    """The records of a private index as voters, on the terms of an account; fitted anew when the index changes.

    Parameters
    ----------
    index : Index
    classes : tuple of str
    account : Account
        Pays for every answer.
    noise : float
        Of the account's plan.
    answers : int
        That the account's plan has.
    """

    index: Index
    classes: tuple[str, ...]
    account: Account
    noise: float
    answers: int
    _fitted: tuple[tuple[int, str], PrivateKNeighborsClassifier] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return "PrivateVoters(private)"

    def on(self, sets: PublicSets) -> PrivateKNeighborsClassifier:
        """Return the voters, all of whom are in the index now, in the features of a map. One caller at a time.

        Parameters
        ----------
        sets : PublicSets

        Returns
        -------
        PrivateKNeighborsClassifier
        """
        if self._fitted is None or self._fitted[0] != (self.index.revision, sets.public_id):
            records = read_records(self.index, self.classes)
            if records.stray:
                _LOG.warning("a private index holds records of no class; they do not vote")
            self._fitted = (records.revision, sets.public_id), self._fit(records, sets)
        return self._fitted[1]

    def _fit(self, records: Records, sets: PublicSets) -> PrivateKNeighborsClassifier:
        voter = PrivateKNeighborsClassifier(
            delta=self.account.delta,
            max_answered=self.answers,
            max_screened=0,
            vote_noise=self.noise,
            classes=self.classes,
            unit=self.account.unit,
            account=self.account,
        )
        if not len(records.labels):
            # An empty gallery must not show. One public record stands in, which any first record replaces: one in, one
            # out, as each vote is charged (docs/theory/two-sided.md, Lemma 2).
            voter.fit(np.eye(1, self.index.dimension), list(self.classes[:1]))
        else:
            voter.fit(sets.centred(records.features), records.labels)
        return voter


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, start + _AT_ONCE) for start in range(0, count, _AT_ONCE))
