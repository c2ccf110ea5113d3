"""Ways to find the private records that vote on a query: ours, the published loop, and the least there is to do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PRIVATE, FEATURES, RATE, K, K_ALL = 60_000, 324, 0.15, 300, 2000
QUERIES = 4096
RIVAL = "published loop, float32"
Floats = NDArray[np.float32]
Work = Callable[[Floats], Any]


@dataclass(frozen=True)
class Contender:
    """A way to find the voters, and at most how many queries it is asked at once."""

    name: str
    prepare: Callable[[Floats], Work]
    queries: int = QUERIES
    grows: bool = False


def use_published(dtype: str) -> Callable[[Floats], Work]:
    """Take each query alone: sample, subtract, norm, sort."""

    def prepare(rows: Floats) -> Work:
        private, rng = rows.astype(dtype), np.random.default_rng(0)

        def work(queries: Floats) -> list[NDArray[np.int64]]:
            voters = []
            for x in queries.astype(dtype):
                sample = rng.choice(len(private), int(RATE * len(private)), replace=False)
                distances = np.linalg.norm(private[sample] - x, axis=1)
                voters.append(sample[np.argsort(distances)[:K]])
            return voters

        return work

    return prepare


def use_product(rows: Floats) -> Work:
    """Multiply, and look at nothing; as many queries at a time as the search takes."""
    buffer = np.empty((1024, len(rows)), dtype=np.float32)

    def work(queries: Floats) -> None:
        for start in range(0, len(queries), 1024):
            part = queries[start : start + 1024]
            np.matmul(part, rows.T, out=buffer[: len(part)])

    return work


def use_sampled(engine: Any) -> Callable[[Floats], Work]:
    """List the nearest and toss coins, rate 0.15, k 300."""

    def prepare(rows: Floats) -> Work:
        from nearveil.privacy.noise import secure_source
        from nearveil.private_knn.neighbors import NeighborSearch
        from nearveil.private_knn.plan import PoissonSample

        search, coins, source = NeighborSearch(rows, engine=engine), PoissonSample(RATE), secure_source()
        length = coins.list_length(K)
        # A rank beyond the list would raise.
        return lambda queries: [
            np.take_along_axis(ids, coins.ranks(len(ids), K, source), axis=1)
            for _, ids in search.batches(queries, length)
        ]

    return prepare


def use_listed(engine: Any, length: int = K_ALL) -> Callable[[Floats], Work]:
    """List the nearest: rate 1."""

    def prepare(rows: Floats) -> Work:
        from nearveil.private_knn.neighbors import NeighborSearch

        search = NeighborSearch(rows, engine=engine)
        return lambda queries: [ids for _, ids in search.batches(queries, length)]

    return prepare


CPU = (
    Contender(RIVAL, use_published("float32"), 64, grows=True),
    Contender("published loop, float64", use_published("float64"), 64),
    Contender("floor: one product, NumPy", use_product, grows=True),
    Contender("rate 0.15, k 300 (ours, numpy)", use_sampled("numpy"), grows=True),
    Contender("rate 1, k 2000 (ours, numpy)", use_listed("numpy"), grows=True),
)


def load_rows() -> tuple[Floats, str]:
    """Return rows, private ones first, and what they are: MNIST, or random ones of the same shape."""
    from studies.data import DataMissingError, find

    try:
        with np.load(find("mnist/mnist.npz")) as arrays:
            images = np.concatenate([arrays["x_train"], arrays["x_test"]])
    except DataMissingError:
        rows = np.random.default_rng(0).random((PRIVATE + 10_000, FEATURES), dtype=np.float32)
        return rows, "random rows (MNIST is not here)"
    from joblib import Parallel, delayed

    from nearveil.features.extractor import hog

    parts = np.array_split(images, max(1, len(images) // 512))
    return np.concatenate(Parallel(n_jobs=-1)(delayed(hog)(part) for part in parts)), "MNIST, HOG"


def split(rows: Any, n: int, count: int) -> tuple[Floats, Floats]:
    """Return n private rows, and queries from behind all private ones."""
    private = min(PRIVATE, len(rows) - 1)
    queries = np.resize(rows[private:], (count, rows.shape[1]))
    return np.array(rows[: min(n, private)], dtype=np.float32), np.ascontiguousarray(queries, dtype=np.float32)
