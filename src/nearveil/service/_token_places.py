"""Where tokens are kept: a file for its owner alone, or PostgreSQL."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy.engine import URL

from nearveil.errors import NearveilError
from nearveil.storage import Database, data_folder, make_private_file, parse_url, prepare_durable

_RESERVE = 256 << 10  # bytes: a write-ahead log of a few pages, and its index


class TokenError(NearveilError, ValueError):
    """The store of tokens could not do what was asked."""


class TokenStoreError(TokenError):
    """The store of tokens does not answer."""


def default_place() -> Path:
    """Return where tokens are kept where nothing else is said."""
    return data_folder() / "tokens.db"


def store_url(where: str | Path) -> URL:
    """Return the address of a store."""
    try:
        return parse_url(where, "tokens")
    except ValueError as error:
        raise TokenError(str(error)) from None


def make_file(path: Path) -> None:
    """Make the file for its owner alone, before SQLite would make it for all."""
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        make_private_file(path)
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


def open_store(url: URL, timeout: float, *, durable: bool = True) -> Database:
    """Return the database of a store; without `durable`, what was written last may be lost when the machine stops."""

    def prepare(connection: Any) -> None:
        if url.get_backend_name() == "sqlite":
            prepare_durable(connection, durable=durable)
        else:
            connection.execute(f"SET statement_timeout = {round(1000 * timeout)}")
            connection.commit()

    try:
        return Database(url, timeout, prepare=prepare)
    except ModuleNotFoundError:
        raise TokenError("tokens: PostgreSQL needs psycopg: pip install nearveil[postgres]") from None
