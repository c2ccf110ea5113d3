"""Idempotency keys in a SQLite file that processes share, and in PostgreSQL that hosts share."""

import multiprocessing
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from nearveil.server import keys
from nearveil.server.errors import ReplayedError, UnavailableError
from nearveil.server.keys import IdempotencyRecord, IdempotencyStore

from ..gallery.index_places import index_server, index_url

__all__ = ["index_server", "index_url"]  # fixtures
PROCESSES = multiprocessing.get_context("spawn")
FIRST = "a", "ann", "birds", b"1"
CHANGED = [("a", "bob", "birds", b"1"), ("a", "ann", "cars", b"1"), ("a", "ann", "birds", b"2")]


@pytest.fixture(params=["sqlite", "postgresql"])
def tokens(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the location of tokens of each kind."""
    return str(tmp_path / "tokens.db") if request.param == "sqlite" else str(request.getfixturevalue("index_url"))


def is_refused(store: IdempotencyStore, *request: str | bytes) -> bool:
    try:
        store.check(IdempotencyRecord.of(*request))  # type: ignore[arg-type]
    except ReplayedError:
        return True
    return False


def test_a_key_is_for_one_request_in_every_store(tokens: str) -> None:
    with closing(IdempotencyStore(tokens, 5.0)) as first, closing(IdempotencyStore(tokens, 5.0)) as second:
        for store in (first, second):
            assert not is_refused(store, *FIRST)
            assert all(is_refused(store, *request) for request in CHANGED)
    with closing(IdempotencyStore(tokens, 5.0)) as reopened:
        assert all(is_refused(reopened, *request) for request in CHANGED)


def test_of_two_requests_that_come_together_one_is_refused(tokens: str) -> None:
    with closing(IdempotencyStore(tokens, 20.0)) as store, ThreadPoolExecutor(8) as pool:
        requests = [(f"key {number % 20}", "ann", "birds", b"%d" % (number % 40)) for number in range(200)]
        refused = list(pool.map(lambda request: is_refused(store, *request), requests))
        for key in range(20):
            bodies = {
                body for (name, *_, body), no in zip(requests, refused, strict=True) if name == f"key {key}" and not no
            }
            assert len(bodies) == 1


def use_keys(tokens: str, count: int, data: bytes, results: "multiprocessing.Queue[list[int]]") -> None:
    """Use keys as one process of a server; return those that were refused."""
    with closing(IdempotencyStore(tokens, 30.0)) as store:
        results.put([number for number in range(count) if is_refused(store, str(number), "ann", "birds", data)])


def test_of_two_processes_that_use_a_key_one_is_refused(tmp_path: Path) -> None:
    results, count = PROCESSES.Queue(), 500
    tokens = str(tmp_path / "tokens.db")
    processes = [PROCESSES.Process(target=use_keys, args=(tokens, count, data, results)) for data in (b"1", b"2")]
    for process in processes:
        process.start()
    refused = results.get(timeout=60) + results.get(timeout=60)
    assert sorted(refused) == list(range(count))
    for process in processes:
        process.join()


def test_a_table_that_does_not_answer_lets_nobody_pass(tokens: str, tmp_path: Path) -> None:
    with closing(IdempotencyStore(tokens, 0.2)) as store:
        if tokens.endswith(".db"):
            with closing(sqlite3.connect(tmp_path / "tokens.db.keys", isolation_level=None)) as writer:
                writer.execute("BEGIN IMMEDIATE")
                with pytest.raises(UnavailableError):
                    is_refused(store, *FIRST)
                writer.execute("ROLLBACK")
            assert not is_refused(store, *FIRST)
        with store._database.begin_write() as connection:
            connection.execute(sa.text("DROP TABLE nearveil_idempotency_key"))
        with pytest.raises(UnavailableError):
            is_refused(store, *FIRST)


def test_old_keys_are_deleted(tokens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_RETENTION", -100.0)
    with closing(IdempotencyStore(tokens, 5.0)) as store:
        assert not is_refused(store, *FIRST)
        assert not is_refused(store, *CHANGED[0])


def test_a_message_cannot_be_guessed_from_the_table() -> None:
    records = [IdempotencyRecord.of(key, "ann", "birds", b"1") for key in ("a", "b")]
    assert records[0].request_hash != records[1].request_hash
