"""Idempotency keys in a SQLite file that processes share, and in PostgreSQL that hosts share."""

import multiprocessing
import sqlite3
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from nearveil.server import keys
from nearveil.server.errors import ServiceError
from nearveil.server.keys import IdempotencyStore
from nearveil.server.tokens import TokenStoreError

from ..gallery.index_places import index_server, index_url
from ..small_disk import fill, mounted
from .serving import index_of, serving

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
        store.store(*request)  # type: ignore[arg-type]
    except ServiceError as error:
        if error.code != "replayed":
            raise
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
                with pytest.raises(ServiceError, match="Try again later"):
                    is_refused(store, *FIRST)
                writer.execute("ROLLBACK")
            assert not is_refused(store, *FIRST)
        with store._database.begin_write() as connection:
            connection.execute(sa.text("DROP TABLE nearveil_idempotency_key"))
        with pytest.raises(ServiceError, match="Try again later"):
            is_refused(store, *FIRST)


def test_old_keys_are_deleted(tokens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_RETENTION", -100.0)
    with closing(IdempotencyStore(tokens, 5.0)) as store:
        assert not is_refused(store, *FIRST)
        assert not is_refused(store, *CHANGED[0])


def test_a_message_cannot_be_guessed_from_the_table(tmp_path: Path) -> None:
    with closing(IdempotencyStore(str(tmp_path / "tokens.db"), 5.0)) as store:
        for key in ("a", "b"):
            assert store.store(key, "ann", "birds", b"1") == b"1"
        with store._database.begin_read() as connection:
            hashes = connection.execute(sa.text("SELECT request_hash FROM nearveil_idempotency_key")).scalars().all()
    assert len(set(hashes)) == 2


def test_on_a_full_disk_questions_get_503_and_no_key_is_lost_or_answered_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = index_of(tmp_path / "birds")
    for disk in mounted(tmp_path / "disk", "4m"):
        with serving(disk, index, rate=None) as server:
            assert server.ask(server.query(0), key="used-before").status_code == 200
            ballast, refused = fill(disk, 0), None
            for number in range(10_000):  # until the write-ahead log needs another page
                response = server.ask(server.query(1), key=f"key-of-request-{number}")
                if response.status_code != 200:
                    refused = f"key-of-request-{number}"
                    break
            assert (response.status_code, response.json()["code"]) == (503, "unavailable")
            assert response.json()["message"] == "Keys cannot be stored now. Try again later."
            assert response.headers["retry-after"] == "2"
            assert server.ask(server.query(2), key="used-before").status_code in (409, 503)  # never an answer
            assert server.get("/v1/galleries").status_code == 200
            ballast.unlink()
            assert server.ask(server.query(1), key=refused).status_code == 200  # a refused key was not used up
            for key in ("used-before", "key-of-request-0", refused):
                assert server.ask(server.query(2), key=key).status_code == 409
    down, up = (record.getMessage() for record in caplog.records if record.name == "nearveil.server.workers")
    assert down == "table of idempotency keys is down (SQLITE_FULL): retrying"
    assert up == "table of idempotency keys is up again"


def test_a_table_on_a_read_only_disk_is_reported_at_the_start(tmp_path: Path) -> None:
    for disk in mounted(tmp_path / "disk", "4m"):
        tokens = str(disk / "tokens.db")
        with closing(IdempotencyStore(tokens, 5.0)) as store:
            assert not is_refused(store, *FIRST)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)  # noqa: S603, S607
        with pytest.raises(TokenStoreError, match=r"tokens\.db\.keys: cannot create the table of idempotency keys"):
            IdempotencyStore(tokens, 5.0)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)  # noqa: S603, S607
        with closing(IdempotencyStore(tokens, 5.0)) as store:
            assert is_refused(store, *CHANGED[0])
