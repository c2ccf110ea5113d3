"""The chain of entries, and the witness: what shows that nobody changed the past."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nearveil.ledger._events import canonical_json
from nearveil.ledger.errors import CorruptLedgerError, LedgerError, LedgerUnavailableError, RolledBackError

GENESIS = "0" * 64
"""What the first entry of an account has before it."""


def digest(*texts: str) -> str:
    """Return the SHA-256 of texts, in hexadecimal; where one ends and the next begins counts."""
    return hashlib.sha256(canonical_json(texts).encode()).hexdigest()


def slot_of(account: str, key: str | None, kind: str) -> str | None:
    """Return what is unique to the debit, and to the message, of a key; None for entries without a key."""
    return None if key is None else digest(account, key, kind)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One entry as it is kept. Nothing in it is private."""

    account: str
    sequence: int  # 1, 2, 3, ... in every account
    kind: str
    time: str  # UTC, for people; nothing is decided by it
    key: str | None
    client: str | None  # whose quota the entry is about, or which cap
    nonce: str  # random; tells whose attempt wrote it
    payload: str  # JSON: terms, charge and price, price alone, or message
    state: str  # digest of the account's terms and totals after the entry
    client_state: str | None  # likewise for the quota or the cap, where the entry is about one
    slot: str | None  # what `slot_of` gives; no two entries have the same

    def hash(self, previous: str) -> str:
        """Return the entry's hash, given the one before it."""
        return hashlib.sha256(canonical_json({**asdict(self), "previous": previous}).encode()).hexdigest()

    @property
    def content(self) -> dict[str, Any]:
        """The payload, read."""
        return dict(json.loads(self.payload))


@dataclass(frozen=True)
class Receipt:
    """What to keep elsewhere, to be shown to :meth:`Ledger.verify` one day.

    Attributes
    ----------
    account : str
    sequence : int
    hash : str
    """

    account: str
    sequence: int
    hash: str

    def __str__(self) -> str:
        return f"{self.sequence}:{self.hash}:{self.account}"

    @classmethod
    def parse(cls, text: str) -> "Receipt":
        """Return the receipt that was written as `text`.

        Examples
        --------
        >>> Receipt.parse(str(Receipt("images", 3, "0" * 64))).sequence
        3
        """
        sequence, _, rest = text.strip().partition(":")
        value, _, account = rest.partition(":")
        if not (sequence.isdecimal() and len(value) == len(GENESIS) and account):
            raise ValueError("receipt must be SEQUENCE:HASH:ACCOUNT, as it was printed")
        return cls(account, int(sequence), value)


_SIZE = 256
_PATIENCE = 30.0  # seconds
_WHAT_TO_DO = (
    "Put the newest copy of the database back. If there is none, treat the account as spent; an empty file in place of "
    "the witness makes it forget, and what was spent since is then spent twice"
)


class Witness:
    """The witness file of one ledger."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: dict[str, int] = {}  # records never move, so where one was found it stays

    def exists(self) -> bool:
        """Return whether the file is there; an empty one is, too."""
        return self.path.exists()

    def create(self) -> None:
        """Make an empty witness where there is none."""
        try:
            self.path.touch(mode=0o600, exist_ok=True)
        except OSError as error:
            raise LedgerError(f"witness cannot be created at {self.path}: {error.strerror}") from error

    def known(self) -> dict[str, tuple[int, str]]:
        """Return sequence and hash by the digest of each account's name."""
        with self._open(fcntl.LOCK_SH) as handle:
            return {name: (sequence, value) for _, name, sequence, value in _records(handle, self.path)}

    def check(self, account: str, sequence: int, head: str, hash_at: Callable[[int], str | None]) -> None:
        """Raise unless an account, at `sequence` with the hash `head`, continues what was witnessed.

        `sequence`: 0 where the database has no such account.
        `hash_at`: From an earlier sequence to its hash.
        """
        with self._open(fcntl.LOCK_SH) as handle:
            found = self._find(handle, digest(account))
        if found is None:
            return
        seen = found[1:]
        if seen[0] > sequence:
            raise RolledBackError(
                f"account {account!r} is at entry {sequence}, but its witness has seen entry {seen[0]}: an old copy of "
                f"the database was put back, or this is a replica that lags. {_WHAT_TO_DO}"
            )
        if seen[1] != (head if seen[0] == sequence else hash_at(seen[0])):
            raise RolledBackError(
                f"account {account!r} has another entry {seen[0]} than its witness has seen: its history was replaced. "
                f"{_WHAT_TO_DO}"
            )

    def raise_to(self, receipt: Receipt) -> None:
        """Remember how far an account has come, unless more is known already."""
        with self._open(fcntl.LOCK_EX) as handle:
            name = digest(receipt.account)
            offset, sequence, _ = self._find(handle, name) or (_end(handle), 0, "")
            if sequence < receipt.sequence:
                _write(handle, offset, name, receipt)

    def _find(self, handle: int, name: str) -> tuple[int, int, str] | None:
        """Return where the record of a name is, and its sequence and hash."""
        if name in self._offsets:
            for offset, known, sequence, value in _records(handle, self.path, self._offsets[name], _SIZE):
                if known == name:
                    return offset, sequence, value
        for offset, known, sequence, value in _records(handle, self.path):
            if known == name:
                self._offsets[name] = offset
                return offset, sequence, value
        return None

    @contextmanager
    def _open(self, lock: int) -> Iterator[int]:
        try:
            handle = os.open(
                self.path, os.O_RDWR | os.O_CLOEXEC if lock == fcntl.LOCK_EX else os.O_RDONLY | os.O_CLOEXEC
            )
        except OSError as error:
            raise RolledBackError(
                f"witness {self.path} cannot be read ({error.strerror}): without it, an old copy of the database would "
                "not be noticed. Put it back; an empty file in its place accepts the database as it is"
            ) from error
        try:
            _lock(handle, lock, self.path)
            yield handle
        except OSError as error:
            raise LedgerError(f"witness {self.path} cannot be read or written: {error.strerror}") from error
        finally:
            os.close(handle)


def _lock(handle: int, lock: int, path: Path) -> None:
    """Wait for the lock, but not for ever: its holder may have been stopped."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return fcntl.flock(handle, lock | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LedgerUnavailableError(f"witness {path} was locked all the time; release nothing") from None
            time.sleep(0.001)


def _end(handle: int) -> int:
    """Return where the next record goes: over a piece of one that a full disk cut short."""
    size = os.fstat(handle).st_size
    return size - size % _SIZE


def _write(handle: int, offset: int, name: str, receipt: Receipt) -> None:
    body = f"{receipt.sequence:020d} {receipt.hash} {name}"
    check = hashlib.sha256(body.encode()).hexdigest()[:32]
    record = f"{body} {check}".ljust(_SIZE - 1) + "\n"
    if os.pwrite(handle, record.encode(), offset) != _SIZE:
        raise LedgerError("witness could not be written whole: is the disk full? Release nothing")


def _records(handle: int, path: Path, start: int = 0, size: int | None = None) -> Iterator[tuple[int, str, int, str]]:
    content = os.pread(handle, _end(handle) if size is None else size, start).decode("ascii", "replace")
    for offset in range(0, len(content), _SIZE):
        parts = content[offset : offset + _SIZE].split()
        if len(parts) != 4 or hashlib.sha256(" ".join(parts[:3]).encode()).hexdigest()[:32] != parts[3]:
            raise CorruptLedgerError(
                f"witness {path} is damaged. Verify the ledger against receipts kept elsewhere, then put an empty file "
                "in its place"
            )
        yield start + offset, parts[2], int(parts[0]), parts[1]
