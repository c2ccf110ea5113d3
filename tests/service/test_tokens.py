"""Tokens: made, kept as hashes, checked, revoked by whomever."""

import hashlib
import hmac
import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from nearveil.server import TokenStore
from nearveil.server.tokens import Token, TokenError, TokenStoreError

from ..gallery.index_places import index_server, index_url
from ..small_disk import fill, mounted

__all__ = ["index_server", "index_url"]  # fixtures


@pytest.fixture(params=["file", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return str(tmp_path / "new" / "tokens.db")
    return str(request.getfixturevalue("index_url"))


def test_a_token_is_made_checked_and_revoked(where: str) -> None:
    with TokenStore(where) as store:
        token, secret = store.create("ann", scopes=["originals", "query"], galleries=["birds", "cars"], days=2)
        other, another = store.create("bob")
        assert secret.startswith(f"nv_{token.id}_")
        assert (len(secret), len(token.id)) == (63, 16)
        assert store.verify(secret) == token
        assert store.verify(another) == other
        assert (token.scopes, token.galleries, token.expires) == (
            ("query", "originals"),
            ("birds", "cars"),
            token.created + 2 * 86_400,
        )
        assert token.scopes == ("query", "originals")
        names = ("birds", "bird", "birds-private", "Birds", "all-birds", "*", "birds,cars", "")
        assert [token.may_use(name) for name in names] == [True] + [False] * 7
        assert other.may_use("anything")
        revoked = store.revoke(token.id)
        assert revoked.revoked is not None
        assert store.verify(secret) is None
        assert store.verify(another) == other
        again = store.revoke(token.id)
        assert again.revoked == revoked.revoked  # when it was first
    with TokenStore(where) as store:
        assert {one.label for one in store.list()} == {"ann", "bob"}
        assert store.verify(another) == other
        assert store.verify(secret) is None


def test_what_another_process_did_counts_at_once(where: str) -> None:
    with TokenStore(where) as server, TokenStore(where) as operator:
        token, secret = operator.create("ann")
        assert server.verify(secret) == token
        operator.revoke(token.id)
        assert server.verify(secret) is None


def test_only_hashes_are_kept(tmp_path: Path) -> None:
    place = tmp_path / "new" / "tokens.db"
    with TokenStore(place) as store:
        token, secret = store.create("ann")
        assert secret not in repr(token)
        assert secret not in repr(store)
        assert token.digest == hashlib.sha256(secret[20:].encode()).digest()
        assert "digest" not in repr(token)
        for path in place.parent.iterdir():
            assert secret[20:].encode() not in path.read_bytes()
            assert path.stat().st_mode & 0o777 == 0o600
    assert place.parent.stat().st_mode & 0o777 == 0o700


def test_a_wrong_token_is_compared_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def watched(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    with TokenStore(tmp_path / "t.db") as store:
        token, secret = store.create("ann")
        monkeypatch.setattr(hmac, "compare_digest", watched)
        wrong = [
            "",
            "x",
            f"nv_{'0' * 16}_{secret[20:]}",
            f"nv_{token.id}_{'A' * 43}",
            secret + "\n",
            f" {secret}",
            "nv_é",
        ]
        assert [store.verify(text) for text in wrong] == [None] * len(wrong)
        assert len(compared) == len(wrong)
        assert {len(one) for pair in compared for one in pair} == {32}
        assert store.verify(secret) == token


def test_a_token_expires(tmp_path: Path) -> None:
    now = [1_000_000.0]
    with TokenStore(tmp_path / "t.db", clock=lambda: now[0]) as store:
        token, secret = store.create("ann", days=0.5)
        now[0] += 43_199
        assert store.verify(secret) == token
        now[0] += 1
        assert store.verify(secret) is None


def test_what_is_refused(tmp_path: Path) -> None:
    with TokenStore(tmp_path / "t.db") as store:
        for more, said in (
            ({"label": ""}, "label"),
            ({"label": "x" * 201}, "label"),
            ({"label": "a\nb"}, "label"),
            ({"scopes": []}, "scopes"),
            ({"scopes": ["admin"]}, "scopes"),
            ({"scopes": "query"}, "scopes"),
            ({"galleries": []}, "galleries"),
            ({"galleries": ["A B"]}, "galleries"),
            ({"galleries": "birds"}, "galleries"),
            ({"days": 0}, "days"),
            ({"days": float("nan")}, "days"),
            ({"days": 1e9}, "days"),
            ({"days": True}, "days"),
        ):
            with pytest.raises(TokenError, match=said):
                store.create(**{"label": "ann", **more})  # type: ignore[arg-type]
        for number in ("x", "0" * 15, "0" * 16, "'; DROP TABLE"):
            with pytest.raises(TokenError, match="id"):
                store.revoke(number)
        assert store.list() == []
    for place in ("", "mysql://host/x", "sqlite://"):
        with pytest.raises(TokenError, match="tokens"):
            TokenStore(place)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.db").touch(mode=0o644)
    os.chmod(tmp_path / "t.db", 0o644)  # noqa: PTH101
    with pytest.raises(TokenError, match="chmod 600"):
        TokenStore(tmp_path / "t.db")


def test_a_store_that_is_gone_lets_nobody_in(tmp_path: Path) -> None:
    with TokenStore(tmp_path / "t.db") as store:
        _, secret = store.create("ann")
        (tmp_path / "t.db").rename(tmp_path / "elsewhere")
        with pytest.raises(TokenStoreError, match="does not answer"):
            store.verify(secret)
        (tmp_path / "elsewhere").rename(tmp_path / "t.db")
        assert isinstance(store.verify(secret), Token)
    (tmp_path / "other.db").write_bytes(b"not a database" * 100)
    os.chmod(tmp_path / "other.db", 0o600)  # noqa: PTH101
    with pytest.raises(TokenStoreError, match="does not answer"):
        TokenStore(tmp_path / "other.db")


def test_a_server_that_is_gone_lets_nobody_in(index_url: str) -> None:
    with TokenStore(index_url) as store:
        _, secret = store.create("ann")
        with psycopg.connect(index_url, autocommit=True) as connection:
            connection.execute("ALTER TABLE nearveil_token RENAME TO away")
            with pytest.raises(TokenStoreError, match=r"does not answer \(UndefinedTable\)") as error:
                store.verify(secret)
            assert "postgres@" in str(error.value) or "postgresql" in str(error.value)
            connection.execute("ALTER TABLE away RENAME TO nearveil_token")
        assert isinstance(store.verify(secret), Token)


def test_a_locked_file_is_waited_for_by_nobody_who_may_not(tmp_path: Path) -> None:
    with TokenStore(tmp_path / "t.db", timeout=60) as store:
        _, secret = store.create("ann")
        with sqlite3.connect(tmp_path / "t.db", isolation_level=None) as writer:
            writer.execute("BEGIN IMMEDIATE")
            began = time.monotonic()
            assert store.verify(secret) is not None  # those who read do not wait for those who write
            assert time.monotonic() - began < 50
            writer.execute("ROLLBACK")


def test_a_store_that_is_put_back_under_a_running_server(tmp_path: Path) -> None:
    place = tmp_path / "tokens.db"
    with TokenStore(place) as server:
        with TokenStore(place) as operator:
            token, secret = operator.create("ann")
        assert server.verify(secret) is not None
        with closing(sqlite3.connect(place)) as source, closing(sqlite3.connect(tmp_path / "copy")) as copy:
            source.backup(copy)
        (tmp_path / "copy").chmod(0o600)
        for log in tmp_path.glob("tokens.db-*"):
            log.unlink()
        (tmp_path / "copy").rename(place)
        assert server.verify(secret) is not None
        with TokenStore(place) as operator:
            operator.revoke(token.id)
            _, other = operator.create("bob")
        assert server.verify(secret) is None
        assert server.verify(other) is not None


def test_a_clock_that_is_set_back_revives_no_token(tmp_path: Path) -> None:
    now = [1_000_000.0]
    with TokenStore(tmp_path / "tokens.db", clock=lambda: now[0]) as store:
        _, secret = store.create("ann", days=1)
        assert store.verify(secret) is not None
        now[0] += 2 * 86_400
        assert store.verify(secret) is None
        now[0] -= 2 * 86_400
        assert store.verify(secret) is None  # this process knows how late it was
    with TokenStore(tmp_path / "tokens.db", clock=lambda: now[0]) as store:
        assert store.verify(secret) is None  # and so does the next


def test_a_clock_that_is_set_back_while_another_writes_revives_no_token(tmp_path: Path) -> None:
    now = [1_000_000.0]
    with TokenStore(tmp_path / "tokens.db", clock=lambda: now[0]) as store:
        _, secret = store.create("ann", days=1)
        with closing(sqlite3.connect(tmp_path / "tokens.db", isolation_level=None)) as writer:
            writer.execute("BEGIN IMMEDIATE")  # the store cannot revoke it
            assert store.verify(secret) is not None
            now[0] += 2 * 86_400
            assert store.verify(secret) is None
            now[0] -= 2 * 86_400
            assert store.verify(secret) is None


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    for disk in mounted(tmp_path / "disk", "2m"):
        with TokenStore(disk / "keys" / "tokens.db") as store:
            token, secret = store.create("ann")
            ballast = fill(disk, 0)
            # After what the log of the database has room for.
            with pytest.raises(TokenError, match=r"the disk is full\. Nothing was changed; free some space"):
                list(map(store.create, ["bob"] * 10_000))
            assert store.verify(secret) == token
            ballast.unlink()
            store.revoke(token.id)
            assert store.verify(secret) is None


def test_a_token_that_expires_while_another_writes_is_waited_for_by_nobody(tmp_path: Path) -> None:
    now = [1_000_000.0]
    with TokenStore(tmp_path / "tokens.db", clock=lambda: now[0], timeout=60) as store:
        _, secret = store.create("ann", days=1)
        _, other = store.create("bob")
        now[0] += 2 * 86_400
        with closing(sqlite3.connect(tmp_path / "tokens.db", isolation_level=None)) as writer:
            writer.execute("BEGIN IMMEDIATE")
            began = time.monotonic()
            assert store.verify(secret) is None
            assert time.monotonic() - began < 50  # not the minute that a writer waits, nor twice that
            assert store.verify(other) is not None
            writer.execute("ROLLBACK")
        assert store.verify(secret) is None
        assert {one.label for one in store.list() if one.revoked is not None} == {"ann"}


def test_subjects_have_one_secret_for_each_store(where: str) -> None:
    """All processes and hosts derive the same ids; the store of another server, others."""
    identity = pytest.importorskip("nearveil.server.identity", reason="PyJWT is not installed (the extra `oidc`)")
    TokenStore(where).close()
    with ThreadPoolExecutor(4) as pool:
        keys = list(pool.map(lambda _: identity.load_account_key(where, 5.0), range(4)))
    assert len(set(keys)) == 1
    assert len(keys[0]) == 32
    with TokenStore(where) as store:
        assert store.list() == []
