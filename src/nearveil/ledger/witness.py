"""The witness: a file outside the database that detects when an old copy of the database is restored.

Each account has one record of fixed size with the sequence number and the hash of its latest entry.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from nearveil.ledger.errors import CorruptLedgerError, LedgerError, LedgerUnavailableError, RolledBackError
from nearveil.ledger.store import Receipt, digest

_RECORD_BYTES = 256
_LOCK_TIMEOUT = 30.0  # seconds
_REMEDY = (
    "Restore the newest copy of the database. If there is none, treat the account as spent. An empty file in place of "
    "the witness accepts the database as it is, but then the missing spends can be spent twice"
)


class Witness:
    """The witness file of one ledger."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[str, tuple[str, int]] = {}  # digest of each account, and offset: records never move

    def exists(self) -> bool:
        """Return whether the file exists; it may be empty."""
        return self.path.exists()

    def create(self) -> None:
        """Create an empty witness unless it exists."""
        try:
            self.path.touch(mode=0o600, exist_ok=True)
        except OSError as error:
            raise LedgerError(
                f"ledger and witness cannot be created in {self.path.parent}: {error.strerror}; use another path"
            ) from error

    def read(self) -> dict[str, tuple[int, str]]:
        """Return sequence and hash of each account, by the digest of its name."""
        with self._open(fcntl.LOCK_SH) as file:
            return {name: (sequence, hash_) for _, name, sequence, hash_ in _read_records(file, self.path)}

    def check(self, account: str, sequence: int, head: str, find_hash: Callable[[int], str | None]) -> None:
        """Raise unless an account at `sequence` (0 if missing) with the hash `head` continues the witnessed history."""
        with self._open(fcntl.LOCK_SH) as file:
            _, _, seen, seen_hash = self._find(file, account)
        if not seen_hash:
            return
        if seen > sequence:
            raise RolledBackError(
                f"account {account!r} is at entry {sequence}, but its witness has seen entry {seen}: an old copy of "
                f"the database was restored, or this is a replica that lags. {_REMEDY}"
            )
        if seen_hash != (head if seen == sequence else find_hash(seen)):
            raise RolledBackError(
                f"account {account!r} has another entry {seen} than its witness has seen: its history was replaced. "
                f"{_REMEDY}"
            )

    def advance(self, receipt: Receipt) -> None:
        """Record the latest entry of an account, unless a later one is recorded."""
        with self._open(fcntl.LOCK_EX) as file:
            name, offset, sequence, _ = self._find(file, receipt.account)
            if sequence < receipt.sequence:
                body = f"{receipt.sequence:020d} {receipt.hash} {name}"
                record = f"{body} {hashlib.sha256(body.encode()).hexdigest()[:32]}".ljust(_RECORD_BYTES - 1) + "\n"
                if os.pwrite(file, record.encode(), offset) != _RECORD_BYTES:
                    raise LedgerError("witness was written only in part: is the disk full? Release nothing")

    def _find(self, file: int, account: str) -> tuple[str, int, int, str]:
        """Return the digest of an account, and offset, sequence and hash of its record, of the next if it has none."""
        name, start = self._records.get(account) or (digest(account), 0)
        end = 0
        records = chain(_read_records(file, self.path, start), _read_records(file, self.path))
        for offset, stored_name, sequence, hash_ in records:
            if stored_name == name:
                self._records[account] = name, offset
                return name, offset, sequence, hash_
            end = offset + _RECORD_BYTES
        return name, end, 0, ""

    @contextmanager
    def _open(self, lock: int) -> Iterator[int]:
        """Open the file with a lock. Wait for it with a timeout: its holder may be suspended."""
        flags = os.O_RDWR if lock == fcntl.LOCK_EX else os.O_RDONLY
        deadline = time.monotonic() + _LOCK_TIMEOUT
        try:
            file = os.open(self.path, flags | os.O_CLOEXEC)
        except OSError as error:
            raise RolledBackError(
                f"witness {self.path} cannot be read ({error.strerror}): without it, an old copy of the database would "
                "not be detected. Restore it; an empty file in its place accepts the database as it is"
            ) from error
        try:
            while True:
                try:
                    fcntl.flock(file, lock | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise LedgerUnavailableError(f"timeout: {self.path} is locked; release nothing") from None
                    time.sleep(0.001)
            yield file
        except OSError as error:
            raise LedgerError(f"witness {self.path} cannot be read or written: {error.strerror}") from error
        finally:
            os.close(file)


def _read_records(file: int, path: Path, offset: int = 0) -> Iterator[tuple[int, str, int, str]]:
    """Yield offset, account digest, sequence and hash of each record, up to a partial one that a full disk left."""
    while len(record := os.pread(file, _RECORD_BYTES, offset)) == _RECORD_BYTES:
        fields = record.decode("ascii", "replace").split()
        if len(fields) != 4 or hashlib.sha256(" ".join(fields[:3]).encode()).hexdigest()[:32] != fields[3]:
            raise CorruptLedgerError(
                f"witness {path} is corrupted. Verify the ledger against receipts stored elsewhere, then replace the "
                "witness with an empty file"
            )
        yield offset, fields[2], int(fields[0]), fields[1]
        offset += _RECORD_BYTES
