"""Keys that were used before: in memory, and in a table that several processes share."""

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa

from nearveil.service.server import limits
from nearveil.service.server.errors import ReplayedError, UnavailableError
from nearveil.service.server.limits import Look, Replays, ReplayStore, Use

from ..gallery.index_places import index_server, index_url

__all__ = ["index_server", "index_url"]  # fixtures


@pytest.fixture(params=["file", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "tokens.db") if request.param == "file" else str(request.getfixturevalue("index_url"))


class Process:
    """What one process knows of keys."""

    def __init__(self, where: str | None = None, most: int = 1000) -> None:
        self.store = None if where is None else ReplayStore(where, 5.0)
        self.replays = Replays(is_shared=where is not None, most=most)
        self.look = Look(lambda: None, 30.0, store=self.store)

    async def check(self, key: str, token: str, place: str, data: bytes) -> None:
        await self.replays.check(key, token, place, data, self.look)

    def close(self) -> None:
        self.look.workers.close()
        if self.store is not None:
            self.store.close()


def test_keys_are_remembered_up_to_a_number() -> None:
    async def run() -> None:
        replays = Process(most=3)
        for key in "abc":
            await replays.check(key, "ann", "birds", b"1")
        await replays.check("a", "ann", "birds", b"1")  # used again, so remembered longer
        await replays.check("d", "ann", "birds", b"1")
        for same in (("a", "bob", "birds", b"1"), ("a", "ann", "cars", b"1"), ("a", "ann", "birds", b"2")):
            with pytest.raises(ReplayedError):
                await replays.check(*same)
        await replays.check("b", "ann", "birds", b"2")  # forgotten
        assert len(replays.replays._seen) == 3

    asyncio.run(run())


def test_two_processes_share_what_they_know(where: str) -> None:
    async def run() -> None:
        one, other = (Process(where, most=2) for _ in range(2))
        await one.check("a", "ann", "birds", b"1")
        await other.check("a", "ann", "birds", b"1")  # a retry
        third = Process(where)
        opened = one, other, third
        for same in (("a", "bob", "birds", b"1"), ("a", "ann", "cars", b"1"), ("a", "ann", "birds", b"2")):
            with pytest.raises(ReplayedError):
                await third.check(*same)
        many = [f"key {number % 20}" for number in range(200)]
        await asyncio.gather(*(store.check(key, "ann", "birds", b"1") for key in many for store in (one, other)))
        both = await asyncio.gather(
            *(store.check("new", "ann", "birds", data) for store, data in ((one, b"1"), (other, b"2"))),
            return_exceptions=True,
        )
        assert sorted(type(outcome).__name__ for outcome in both) == ["NoneType", "ReplayedError"]
        for process in opened:
            process.close()

    asyncio.run(run())


def test_a_table_that_does_not_answer_lets_nobody_pass(tmp_path: Path) -> None:
    async def run() -> None:
        process = Process(str(tmp_path / "tokens.db"))
        assert process.store is not None
        with process.store._database.begin_write() as connection:
            connection.execute(sa.text("DROP TABLE nearveil_replay"))
        outcomes = await asyncio.gather(
            *(process.check(key, "ann", "birds", b"1") for key in "abc"), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [UnavailableError] * 3
        process.close()

    asyncio.run(run())


def test_of_one_key_that_comes_twice_at_once_the_first_use_counts(where: str) -> None:
    store = ReplayStore(where, 5.0)
    first, second = (Use.of("a", "ann", "birds", data) for data in (b"1", b"2"))
    others = [Use.of(f"key {number}", "ann", "birds", b"1") for number in range(limits._SOME)]
    assert store.use([first, *others, second]) == [first.what, *(use.what for use in others), first.what]
    assert store.use([second]) == [first.what]
    store.close()


def test_old_keys_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_KEPT", -100.0)
    store, use = ReplayStore(str(tmp_path / "tokens.db"), 5.0), Use.of("a", "ann", "birds", b"1")
    assert store.use([use]) == [use.what]
    other = Use.of("a", "ann", "birds", b"2")
    assert store.use([other]) == [other.what]
    store.close()
