"""Where tokens are kept: a file for its owner alone, or PostgreSQL."""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from nearveil.errors import NearveilError
from nearveil.ledger._folder import data_folder

_CREATION_LOCK = 0x6E76_746F_6B65_6E  # "nvtoken": of those who create tables, among all that lock in one server
_RESERVE = 256 << 10  # bytes: a write-ahead log of a few pages, and its index


class TokenError(NearveilError, ValueError):
    """The store of tokens could not do what was asked."""


class TokenStoreError(TokenError):
    """The store of tokens does not answer."""


def default_place() -> Path:
    """Return where tokens are kept where nothing else is said."""
    return data_folder() / "tokens.db"


def store_url(where: str | Path) -> URL:
    text = str(where)
    if "://" not in text:
        if not text.strip():
            raise TokenError("tokens must be a file, or a URL such as postgresql://user@host/database")
        return URL.create("sqlite", database=str(Path(text).expanduser().absolute()))
    try:
        url = make_url(text)
    except (sa.exc.ArgumentError, ValueError):
        url = URL.create("none")
    if url.get_backend_name() != "postgresql":
        raise TokenError("tokens must be a file, or a URL such as postgresql://user@host/database")
    return url.set(drivername="postgresql+psycopg")


def make_file(path: Path) -> None:
    """Make the file for its owner alone, before SQLite would make it for all."""
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        if path.stat().st_mode & 0o077:
            raise TokenError(f"tokens {path}: others may read it: chmod 600 it")
    except OSError as error:
        raise TokenStoreError(f"tokens {path}: the file cannot be made: {error.strerror}") from None


def make_reserve(path: Path) -> None:
    """Keep some room on the disk, so that a token can be revoked when the disk is full."""
    reserve = _reserve_of(path)
    with suppress(OSError):
        if not has_reserve(path):
            place = os.open(reserve, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            with os.fdopen(place, "wb") as file:
                file.write(bytes(_RESERVE))


def has_reserve(path: Path) -> bool:
    """Return whether the room is there."""
    with suppress(OSError):
        return _reserve_of(path).stat().st_size == _RESERVE
    return False


def free_reserve(path: Path) -> bool:
    """Give the room free; return whether there was any."""
    with suppress(OSError):
        _reserve_of(path).unlink()
        return True
    return False


def _reserve_of(path: Path) -> Path:
    return path.with_name(path.name + ".reserve")


def store_engine(url: URL, timeout: float, *, durable: bool = True) -> sa.Engine:
    """Return the engine of a store; without `durable`, what was written last may be lost when the machine stops."""
    if url.get_backend_name() == "sqlite":
        engine = sa.create_engine(url, hide_parameters=True, connect_args={"timeout": timeout})
        sa.event.listen(engine, "connect", partial(_prepare, durable=durable))
        return engine
    waiting = {"connect_timeout": max(2, round(timeout)), "options": f"-c statement_timeout={round(1000 * timeout)}"}
    if "options" in url.query:
        waiting["options"] = f"{url.query['options']} {waiting['options']}"
    try:
        return sa.create_engine(url, hide_parameters=True, pool_pre_ping=True, connect_args=waiting)
    except ModuleNotFoundError:
        raise TokenError("tokens: PostgreSQL needs psycopg: pip install nearveil[postgres]") from None


def create_tables(connection: sa.Connection, metadata: sa.MetaData) -> None:
    """Create the tables of a store that it lacks; several processes may do so at once."""
    if connection.dialect.name == "postgresql":  # there, even "if not exists" fails when two come together
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATION_LOCK)))
    for table in metadata.sorted_tables:
        connection.execute(sa.schema.CreateTable(table, if_not_exists=True))
        for index in table.indexes:
            connection.execute(sa.schema.CreateIndex(index, if_not_exists=True))


def _prepare(connection: Any, _: object, *, durable: bool) -> None:
    connection.execute("PRAGMA journal_mode = WAL")  # those who read do not wait for those who write
    connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")  # what was revoked stays revoked


def shown(url: URL) -> str:
    """Return where a store is, without a password."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.set(query={}).render_as_string(hide_password=True)
