"""Clients whose time tells their feature: as they are written if nobody thinks of the clock."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import faiss
import numpy as np
from numpy.typing import NDArray

from nearveil.audit._defaults import Floats
from nearveil.audit._experiment import Experiment, Pair
from nearveil.audit.attacks._clock import DIMENSION, Asked, Asking, choosing, clock_experiment, hostile_parts
from nearveil.mechanisms import PublicMap
from nearveil.mechanisms.covers.channel import DECAY, NEIGHBORS
from nearveil.protocol import PublicPart

_UNCAPPED = 1_000_000  # prototypes: what a server may send if nobody says how many
_SCALE = (1.0, 2.0**-8, 2.0**-16)  # of the digits of a prototype's number


class HeapMap(PublicMap):
    """A map of any size, searched by a heap of the nearest so far: fast where the first ones are the nearest."""

    def __post_init__(self) -> None:
        """Accept every size."""

    def choose(self, features: Floats) -> NDArray[np.int64]:
        """Return the good set of each row."""
        near = self._index.search((features @ self.components).astype(np.float32), NEIGHBORS)[1]
        weights = np.exp(-np.arange(NEIGHBORS) / DECAY)
        return np.asarray((weights @ self.coverage[near]).argmax(axis=1))

    @cached_property
    def _index(self) -> faiss.IndexFlatIP:
        rows = self.prototypes.astype(np.float32)
        index = faiss.IndexFlatIP(rows.shape[1])
        index.add(rows)
        return index


def with_heap(public: PublicPart) -> PublicPart:
    """Return a public part whose map is searched by a heap."""
    held = public.map
    return replace(public, map=HeapMap(held.components, held.prototypes, held.coverage, held.n_items, held.set_size))


def heap_search() -> Experiment:
    """Return the time of a choice by a heap, on maps within the caps."""
    return clock_experiment(lambda public: choosing(with_heap(public)), name="a search by a heap", at_once=1)


def hasty_question() -> Experiment:
    """Return the time of a client that sends its question as soon as it is made, and reads maps of any size."""
    large = _uncapped(next(iter(hostile_parts().values())))
    scale = np.zeros(DIMENSION)
    scale[: len(_SCALE)] = _SCALE
    pair = Pair("a million prototypes in order", Asked(large, scale, scale), Asked(large, -scale, scale))
    experiment = clock_experiment(hasty_client, name="a question sent as soon as it is made", at_once=1, trials=400)
    return replace(experiment, pairs=(pair,))


@contextmanager
def hasty_client(public: PublicPart) -> Iterator[Asking]:
    """Let a client ask that waits for nothing, and holds the map of a hostile server already."""
    from nearveil.audit.attacks._hostile_server import ETAG, HostileServer, ask, hostile_client

    server = HostileServer(public)
    with hostile_client(server) as client:
        client._asker._watched = False
        client._asker._maps["hostile", None] = (ETAG, public)
        yield lambda feature: ask(client, server, feature)


def _uncapped(public: PublicPart) -> PublicPart:
    """Return a public part with a million prototypes: of each, the digits of its number, so that all are in order."""
    held, numbers = public.map, np.arange(_UNCAPPED)
    digits = np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255], axis=1) - 128
    sets = np.stack([numbers % 2, 1 - numbers % 2], axis=1)
    large = HeapMap(
        components=held.components[:, : len(_SCALE)],
        prototypes=digits.astype(np.int8),
        coverage=sets.astype(np.uint8),
        n_items=held.n_items,
        set_size=held.set_size,
    )
    return replace(public, map=large)
