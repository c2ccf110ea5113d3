"""Where tests put an index: a directory, or a schema of its own on a PostgreSQL that runs for the tests."""

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psycopg
import pytest
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from nearveil.gallery.index import Index
from nearveil.gallery.items import Item

from ..ledger.postgres import NoPostgresError, Postgres, share_postgres

DIMENSION = 12
WEBP = b"RIFF\x04\0\0\0WEBP"  # enough of a thumbnail for an index


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So few rows gain nothing from threads, which spin where the machine is busy."""
    with threadpool_limits(1, user_api="openmp"):
        yield


@pytest.fixture(scope="session")
def index_server() -> Postgres:
    """One server for all tests, whichever file they are in."""
    try:
        return share_postgres()
    except NoPostgresError as reason:
        pytest.skip(str(reason))


@pytest.fixture
def index_url(index_server: Postgres) -> str:
    """A new schema on it."""
    name = f"i{uuid.uuid4().hex}"
    with psycopg.connect(index_server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
    return f"{index_server.url()}&options=-csearch_path%3D{name}"


@pytest.fixture(params=["directory", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new index goes; every test that takes it runs on both stores."""
    if request.param == "directory":
        return str(tmp_path / "a gallery")
    return str(request.getfixturevalue("index_url"))


def unit_rows(n: int, dimension: int = DIMENSION, seed: int = 0) -> NDArray[np.float32]:
    """Return rows of norm one around a few centres."""
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(7).standard_normal((10, dimension))
    rows = centres[generator.integers(0, 10, n)] + 0.6 * generator.standard_normal((n, dimension))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def plain_items(rows: NDArray[np.float32], prefix: str = "item") -> list[Item]:
    """Return items with names and thumbnails of their own."""
    return [Item(row, f"{prefix} {number}", WEBP + f"thumb {number}".encode()) for number, row in enumerate(rows)]


def filled(where: str | Path, rows: NDArray[np.float32]) -> Index:
    """Return a new index of rows."""
    index = Index.create(where, dimension=rows.shape[1], extractor="tests")
    index.add(plain_items(rows))
    return index


def true_nearest(
    ids: NDArray[np.uint32], rows: NDArray[np.float32], queries: NDArray[np.float32], k: int
) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Search by a plain product in 64 bits; of equal scores the lowest id."""
    scores = queries.astype(np.float64) @ rows.astype(np.float64).T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return ids[order], np.take_along_axis(scores, order, axis=1)


def names(index: Index, ids: Sequence[int] | NDArray[np.uint32]) -> list[str]:
    return [item.name for item in index.items(ids)]
