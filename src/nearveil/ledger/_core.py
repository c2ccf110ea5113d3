"""What a ledger and its accounts share: the database, the witness, the clock; and checks of names and keys."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import sqlalchemy as sa

from nearveil.ledger._chain import Receipt
from nearveil.ledger._database import LedgerDatabase
from nearveil.ledger._witness import Witness
from nearveil.ledger.errors import LedgerError

T = TypeVar("T")
Clock = Callable[[], datetime]

_LONGEST = 200


def utc_now() -> datetime:
    """Return the time of the system's clock."""
    return datetime.now(UTC)


def new_key() -> str:
    """Return a fresh key: 128 random bits, in hexadecimal.

    Examples
    --------
    >>> len(new_key()), new_key() == new_key()
    (32, False)
    """
    return secrets.token_hex(16)


def check_text(value: object, name: str) -> str:
    """Return `value`, or say that it must be a text of 1 to 200 printable characters."""
    if not (isinstance(value, str) and 0 < len(value) <= _LONGEST and value.isprintable() and value.strip()):
        raise ValueError(f"{name} must be a text of 1 to {_LONGEST} printable characters")
    return value


@dataclass(frozen=True)
class Core:
    """One open ledger."""

    database: LedgerDatabase
    witness: Witness | None
    clock: Clock
    read_only: bool

    def now(self) -> str:
        """Return the time as it is written, in UTC. It informs people; nothing is decided by it."""
        return self.clock().astimezone(UTC).isoformat(timespec="microseconds")

    def write(self, work: Callable[[sa.Connection], tuple[T, Receipt | None]]) -> T:
        """Run `work` in one durable transaction, then tell the witness how far the account has come."""
        if self.read_only:
            raise LedgerError("this ledger was opened with read_only=True: open it without, to spend")
        result, receipt = self.database.write(work)
        if self.witness is not None and receipt is not None:
            self.witness.raise_to(receipt)
        return result

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on one consistent view."""
        return self.database.read(work)
