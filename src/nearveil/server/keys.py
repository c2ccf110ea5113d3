"""Idempotency keys: a client may send one request again under its key, and no other."""

import hashlib
import sqlite3
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from nearveil.server.errors import ServiceError
from nearveil.server.tokens import TokenStoreError, create_file, open_store, parse_store_url
from nearveil.server.workers import OutageLog
from nearveil.storage import describe_url, find_file, is_of_database, name_error

_RETENTION = 86_400.0  # seconds

_metadata = sa.MetaData()
_keys = sa.Table(
    "nearveil_idempotency_key",
    _metadata,
    sa.Column("key", sa.LargeBinary(32), primary_key=True),
    sa.Column("request_hash", sa.LargeBinary(32), nullable=False),
    sa.Column("time", sa.BigInteger, nullable=False, index=True),
)
_INSERT_OR_READ = sa.text(
    "INSERT INTO nearveil_idempotency_key (key, request_hash, time) VALUES (:key, :request_hash, :time) "
    "ON CONFLICT (key) DO UPDATE SET time = nearveil_idempotency_key.time RETURNING request_hash"
)


class IdempotencyStore:
    """A table of used keys, shared by all processes of a server, and by all hosts if it is in PostgreSQL."""

    def __init__(self, tokens: str, timeout: float) -> None:
        url = parse_store_url(tokens)
        if file := find_file(url):
            path = Path(f"{file}.keys")
            create_file(path)
            url = parse_store_url(path)
        try:
            self._database = open_store(url, timeout, _metadata, prepare_sqlite=_prepare_fast)
        except Exception as error:
            if not is_of_database(error):
                raise
            raise TokenStoreError(
                f"tokens {describe_url(url)}: cannot create the table of idempotency keys ({name_error(error)}): check "
                "that the disk has free space and that this user may write to it"
            ) from None
        self._pruned_at = time.monotonic()
        self._outages = OutageLog("table of idempotency keys")

    def store(self, key: str, token: str, path: str, body: bytearray | bytes) -> bytes:
        """Store a new key and return the body; ServiceError if that fails, or it was used for another request."""
        # Only digests are stored. That of the request includes the key, which is random: nobody can guess a message
        # from the table.
        data = bytes(body)
        request_hash = hashlib.sha256(f"{key} {token} {path} ".encode() + data).digest()
        row = {"key": hashlib.sha256(key.encode()).digest(), "request_hash": request_hash}
        now = int(time.time())
        try:
            with self._database.begin_write() as connection:
                first = connection.execute(_INSERT_OR_READ, {**row, "time": now}).scalar_one()
                if time.monotonic() - self._pruned_at > _RETENTION / 24:
                    self._pruned_at = time.monotonic()
                    connection.execute(sa.delete(_keys).where(_keys.c.time < now - _RETENTION))
        except Exception as error:
            if not is_of_database(error):
                raise
            self._outages.record(error)
            raise ServiceError("unavailable", "Keys cannot be stored now. Try again later.") from None
        self._outages.record(None)
        if bytes(first) != request_hash:
            raise ServiceError("replayed", "This key was already used for another request. Use a new key.")
        return data

    def close(self) -> None:
        """Close all connections."""
        self._database.close()


def _prepare_fast(connection: sqlite3.Connection | Any) -> None:
    """Write without waiting for the disk: a power failure may lose keys, the end of a process does not."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")
