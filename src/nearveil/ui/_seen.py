"""What answers have shown so far: kept in memory, for the picture of the gallery."""

from dataclasses import dataclass, field

import numpy as np

from nearveil.retrieval._wire_public import PublicPart
from nearveil.service import Nearest
from nearveil.ui._outlook import Singles
from nearveil.ui._picture import Candidate, placed

_MOST = 2000  # candidates that are kept


@dataclass(frozen=True)
class Last:
    """The last question, and all that the answers on its map have shown."""

    feature: Singles | None = field(default=None, repr=False)  # private
    sets: tuple[int, ...] = ()  # that its message named
    seen: dict[int, Candidate] = field(default_factory=dict, repr=False)  # by id, the latest last
    map_id: str = ""  # of the map that all this is about

    def after(self, nearest: Nearest, public: PublicPart, row: Singles, *, images: bool) -> "Last":
        """Return what is known after one more answer.

        `public`: The map that it was asked with; on another one nothing that was seen before has a place.
        `images`: Whether the candidates came with thumbnails.
        """
        answer, name = nearest.found.answer, public.map.map_id
        seen = dict(self.seen) if self.map_id == name else {}
        where = placed(public, answer.codes[:_MOST])
        for place, number in enumerate(answer.ids[:_MOST].tolist()):
            before = seen.pop(number, None)
            sets = frozenset(nearest.sets) | (before.sets if before else frozenset())
            image = answer.images[place] if images else b""
            seen[number] = Candidate(nearest.names.get(number, ""), image, where[place], sets)
        kept = dict(list(seen.items())[-_MOST:])
        return Last(np.asarray(row, np.float32), nearest.sets, kept, name)
