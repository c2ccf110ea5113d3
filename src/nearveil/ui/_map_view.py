"""A public map as a picture: its points, what answers have shown, the query, and what the server was told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.manifold import SupervisedManifold
from nearveil.protocol.client import PublicPart, project_rows
from nearveil.search.outlook import Singles, unit_prototypes
from nearveil.service import Nearest
from nearveil.ui._errors import Trouble

MOST_POINTS = 600
_LEAST_POINTS = 3
_STEPS = 3  # from the principal plane: it stays recognisable, and neighbours gather
_BANDWIDTH = 0.4
_LABEL_WEIGHT = 0.1
_NONE = -1  # the set of what no set covers
_HALF = 128  # of a coverage of 255: what a set covers mostly is in it


@dataclass(frozen=True, eq=False)
class Candidate:
    """One image that an answer held."""

    name: str
    image: bytes = field(repr=False)  # its thumbnail; may be empty
    row: Singles = field(repr=False)  # where it lies among the map's prototypes, as precise as its code
    sets: frozenset[int] = frozenset()  # in whose answers it was seen


def place_codes(public: PublicPart, codes: NDArray[np.uint8]) -> Singles:
    """Return where candidates lie among the map's prototypes: their codes, compared with the map's directions."""
    directions = np.ascontiguousarray(public.map.components.astype(np.float32).T)
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.asarray(public.table.scores(directions, codes), dtype=np.float32).T)


class Picture:
    """The prototypes of a map in two dimensions, by the supervised manifold; sets that cover them are the labels."""

    def __init__(self, public: PublicPart) -> None:
        self._public = public
        rows = unit_prototypes(public.map).astype(np.float64)
        standing = np.flatnonzero(np.abs(rows).max(axis=1) > 0)
        some = standing[np.linspace(0, len(standing) - 1, min(MOST_POINTS, len(standing))).astype(int)]
        if len(some) < _LEAST_POINTS:
            raise Trouble(422, "picture", "This map has too few points to be drawn.")
        self._coverage = coverage = public.map.coverage[some]
        labels = np.where(coverage.max(axis=1) > 0, coverage.argmax(axis=1), _NONE)
        several = len(np.unique(labels[labels != _NONE])) > 1
        manifold = SupervisedManifold(
            bandwidth=_BANDWIDTH,
            label_weight=_LABEL_WEIGHT,
            label_encoding="one-hot",
            n_iter=_STEPS,
            init=_find_plane(rows[some]),
        )
        try:
            self._manifold = manifold.fit(rows[some], labels if several else None)
        except ValueError:
            raise Trouble(
                422, "picture", "The points of this map lie in one place, so there is nothing to draw."
            ) from None
        # As new rows are place_codes, so that an image lies where its own prototype does.
        found = np.asarray(manifold.transform(rows[some]))
        self._low, self._span = found.min(axis=0), np.maximum(np.ptp(found, axis=0), 1e-12)
        self.points = self._scale(found)

    def place(self, rows: Singles) -> NDArray[np.float64]:
        """Return where project_rows rows lie in the picture, from 0 to 1 in both directions."""
        wide = rows.astype(np.float64)
        wide[np.abs(wide).max(axis=1) == 0, 0] = 1.0  # a row of zeros has no direction: any will do
        return self._scale(np.asarray(self._manifold.transform(wide)))

    def inside(self, sets: Sequence[int]) -> NDArray[np.bool_]:
        """Return which points some sets cover."""
        return np.asarray((self._coverage[:, list(sets)] >= _HALF).any(axis=1))

    def draw(
        self, seen: Mapping[int, Candidate], feature: Singles | None, sets: Sequence[int], image: Any
    ) -> dict[str, Any]:
        """Return all that the page draws, as plain values: `image` makes of a thumbnail what the page shows.

        Where the last query's `feature` lies is for the page alone.
        """
        shown = list(seen.items())
        where = self.place(np.stack([one.row for _, one in shown])) if shown else ()
        inside = self.inside(sets)
        middle = self.points[inside].mean(axis=0) if inside.any() else None
        you = None if feature is None else _round_pair(self.place(project_rows(self._public, feature[None]))[0])
        return {
            "points": [[*_round_pair(place), int(within)] for place, within in zip(self.points, inside, strict=True)],
            "items": self._public.map.n_items,
            "seen": [
                {
                    "id": number,
                    "name": one.name,
                    "image": image(one.image),
                    "place": _round_pair(place),
                    "named": not one.sets.isdisjoint(sets),
                }
                for (number, one), place in zip(shown, where, strict=True)
            ],
            "you": you,
            "reported": None if middle is None else _round_pair(middle),
            "sets": list(sets),
            "n_sets": self._public.map.n_sets,
        }

    def _scale(self, places: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.clip((places - self._low) / self._span, 0.0, 1.0))


def _find_plane(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rows in their principal plane, each direction with a spread of one."""
    centred = rows - rows.mean(axis=0)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:2]
    found = np.zeros((len(rows), 2))
    found[:, : len(directions)] = centred @ directions.T
    return np.asarray(found / np.maximum(found.std(axis=0), 1e-12))


def _round_pair(place: NDArray[np.float64]) -> list[float]:
    return [round(float(one), 4) for one in place]


_MOST = 2000  # candidates that are kept


@dataclass(frozen=True)
class Last:
    """The last question, and all that the answers on its map have shown."""

    feature: Singles | None = field(default=None, repr=False)  # private
    sets: tuple[int, ...] = ()  # that its message named
    seen: dict[int, Candidate] = field(default_factory=dict, repr=False)  # by id, the latest last
    map_id: str = ""  # of the map that all this is about

    def update(self, nearest: Nearest, public: PublicPart, row: Singles, *, images: bool) -> "Last":
        """Return what is known after one more answer; of another map than before, nothing else has a place."""
        answer, name = nearest.found.answer, public.map.map_id
        seen = dict(self.seen) if self.map_id == name else {}
        where = place_codes(public, answer.codes[:_MOST])
        for place, number in enumerate(answer.ids[:_MOST].tolist()):
            before = seen.pop(number, None)
            sets = frozenset(nearest.sets) | (before.sets if before else frozenset())
            image = answer.images[place] if images else b""
            seen[number] = Candidate(nearest.names.get(number, ""), image, where[place], sets)
        kept = dict(list(seen.items())[-_MOST:])
        return Last(np.asarray(row, np.float32), nearest.sets, kept, name)
