"""The private half of a protected gallery: records that are read by whoever publishes, and never leave."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nearveil.gallery import Index

_AT_ONCE = 1024
_SAME = 1e-5  # two features of one image differ by less, in each number


@dataclass(frozen=True, eq=False)
class Records:
    """Private features and labels, as they are at one moment."""

    features: NDArray[np.float32] = field(repr=False)
    labels: NDArray[np.str_] = field(repr=False)
    stray: bool = field(repr=False)  # whether there are records of no class. They are left out

    def __repr__(self) -> str:
        return "Records(private)"


def read_records(index: Index, classes: Sequence[str]) -> Records:
    """Read all records. The label of one is the first folder of its name.

    Whether a record is left out depends on that record alone, so two galleries that differ in one record still do.
    """
    now = index.snapshot()
    labels: dict[int, str] = {}
    for some in _chunks(len(now)):
        # One may have been deleted since the snapshot: then it is left out.
        items = index.items(now.ids[some], lenient=True, originals=False)
        labels |= {item.id: item.name.partition("/")[0] if "/" in item.name else "" for item in items}
    known = set(classes)
    counted = np.array([labels.get(number) in known for number in now.ids.tolist()], dtype=np.bool_)
    ids = now.ids[counted].tolist()
    stray = any(label not in known for label in labels.values())
    return Records(now.features[counted], np.array([labels[number] for number in ids], np.str_), stray)


def share_images(records: Records, public: Index) -> bool:
    """Return whether an image is in both indexes, as far as features tell."""
    rows = records.features
    if not len(public):
        return False
    for some in _chunks(len(rows)):
        nearest = public.features(public.search(rows[some], 1)[0][:, 0])
        if (np.abs(nearest - rows[some]).max(axis=1) < _SAME).any():
            return True
    return False


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, start + _AT_ONCE) for start in range(0, count, _AT_ONCE))
