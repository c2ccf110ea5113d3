"""Who votes: the nearest records that a fresh sample keeps, for each query."""

from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils._param_validation import Interval, StrOptions

from nearveil.privacy.noise import Source
from nearveil.votes._coins import PoissonSample
from nearveil.votes._search import NeighborSearch

Voters = NDArray[np.int32]

NOBODY = -1
"""Stands where a sample holds fewer records than may vote."""

NEIGHBORS: dict[str, list[Any]] = {
    "n_neighbors": [Interval(Integral, 1, None, closed="left"), None],
    "sampling_rate": [Interval(Real, 0, 1, closed="right")],
    "feature_norm": [Interval(Real, 0, None, closed="neither"), None],
    "engine": [StrOptions({"auto", "numpy", "faiss", "torch", "cuda"})],
}
"""What the parameters of estimators that search may be."""


def draw_voters(
    search: NeighborSearch,
    queries: NDArray[np.float64],
    sample: PoissonSample,
    n_neighbors: int,
    source: Source,
    *,
    draws: int,
) -> Iterator[tuple[slice, list[Voters]]]:
    """Draw the voters of each query, a batch of queries at a time.

    The coins do not depend on the records, so "sample, then search" is the same as drawing the kept ranks of the
    full order (``docs/theory/private-knn.md``; attacked by ``tests/votes/test_coins.py``). Where a list is too short
    for its coins it is lengthened; the coins stay.

    `draws`: How many independent samples are drawn for each query.
    Yields which queries, and for each draw the row numbers of the voters, nearest first, then `NOBODY`.
    """
    most = min(n_neighbors, search.n_rows)  # no sample keeps more
    for rows, ids in search.batches(queries, sample.list_length(most)):
        coins = [sample.ranks(len(ids), most, source) for _ in range(draws if sample.rate < 1 else 1)]
        voters = [_look_up(search, queries[rows], ids, ranks) for ranks in coins]
        yield rows, voters if len(voters) == draws else voters * draws  # all records are kept: no coins, one look


def _look_up(search: NeighborSearch, queries: NDArray[np.float64], ids: Voters, ranks: NDArray[np.int64]) -> Voters:
    listed, n_rows = ids.shape[1], search.n_rows
    voters = np.full(ranks.shape, NOBODY, dtype=np.int32)
    there = ranks < listed
    voters[there] = np.take_along_axis(ids, np.where(there, ranks, 0), axis=1)[there] if listed else NOBODY
    wanted = np.minimum(ranks[:, -1] + 1, n_rows)
    short = np.flatnonzero(wanted > listed)
    if len(short):
        voters[short] = _look_up(
            search, queries[short], search.nearest(queries[short], int(wanted[short].max())), ranks[short]
        )
    return voters
