"""Entries of a ledger and the state that they add up to. Nothing in them is private."""

import base64
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final

from dp_accounting import DpEvent

from nearveil.ledger.budget import (
    Amounts,
    Budget,
    Charge,
    UnpricedError,
    add_amounts,
    canonical_json,
    parse_budget,
    read_charge,
)
from nearveil.ledger.errors import CorruptLedgerError

# Kinds of entries, as ledgers store them.
OPENED: Final = "opened"
QUOTA: Final = "quota"
CAP: Final = "cap"
DEBIT: Final = "debit"
TAKE: Final = "take"  # counts the debit before it in a cap
MESSAGE: Final = "message"

GENESIS = "0" * 64
"""The hash before the first entry of an account."""


def digest(*texts: str) -> str:
    """Return the SHA-256 of a sequence of texts, in hexadecimal."""
    return hashlib.sha256(json.dumps(texts, separators=(",", ":")).encode()).hexdigest()


def make_slot(account: str, key: str | None, kind: str) -> str | None:
    """Return the unique index value of the debit, or the message, of a key; None for entries without a key."""
    return None if key is None else digest(account, key, kind)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of an account's history; :meth:`Account.history` returns them.

    The hash covers this entry and, through the previous hash, all entries before it.
    """

    account: str
    sequence: int  #: 1, 2, 3, ... in every account; times are only informative
    kind: str  #: "opened", "quota", "cap", "debit", "take" (the previous debit counts in a cap, too) or "message"
    time: str  #: UTC, from the clock of the writer
    key: str | None
    client: str | None  #: the client of a quota, or the name of a cap
    payload: str  #: JSON: terms, charge and price, price alone, or message
    state: str  #: digest of the account's terms and totals after the entry
    client_state: str | None  #: the same for the quota or the cap, if the entry changes one
    nonce: str  #: random; identifies the call that wrote the entry
    slot: str | None  #: unique; see `make_slot`
    hash: str = ""

    def compute_hash(self, previous: str) -> str:
        """Return the hash of the entry after the hash `previous`."""
        fields = asdict(self)
        del fields["hash"]
        return hashlib.sha256(canonical_json({**fields, "previous": previous}).encode()).hexdigest()

    @property
    def content(self) -> dict[str, Any]:
        """The parsed payload."""
        content = json.loads(self.payload)
        if not isinstance(content, dict):
            raise TypeError("payload must be a JSON object")
        return content

    @property
    def charge(self) -> Charge:
        """The charge of a debit; empty for other kinds of entries."""
        return tuple((str(text), int(times)) for text, times in self.content.get("charge", ()))

    @cached_property
    def events(self) -> tuple[tuple[DpEvent, int], ...]:
        """The single mechanisms that a debit paid for, with counts."""
        try:
            return read_charge(self.charge)
        except (AttributeError, TypeError, ValueError):
            raise self._corrupt() from None

    @cached_property
    def message(self) -> bytes | None:
        """The stored message, None for other kinds of entries."""
        try:
            message = self.content.get("message")
            return None if message is None else base64.b64decode(message, validate=True)
        except (AttributeError, TypeError, ValueError):
            raise self._corrupt() from None

    def _corrupt(self) -> CorruptLedgerError:
        return CorruptLedgerError(
            f"Entry {self.sequence} of account {self.account!r} is corrupted; verify() lists the problems."
        )


@dataclass(frozen=True)
class Receipt:
    """The latest entry of an account. Store it outside the ledger and pass it to :meth:`Ledger.verify` later.

    Examples
    --------
    >>> print(Receipt("images", 3, "0" * 64))
    3:0000000000000000000000000000000000000000000000000000000000000000:images
    """

    account: str
    sequence: int
    hash: str

    def __str__(self) -> str:
        return f"{self.sequence}:{self.hash}:{self.account}"

    @classmethod
    def parse(cls, text: str) -> "Receipt":
        """Parse a printed receipt.

        Examples
        --------
        >>> Receipt.parse(str(Receipt("images", 3, "0" * 64))).sequence
        3
        """
        sequence, _, rest = text.strip().partition(":")
        hash_, _, account = rest.partition(":")
        if not (sequence.isdecimal() and len(hash_) == len(GENESIS) and account):
            raise ValueError("receipt must be SEQUENCE:HASH:ACCOUNT, as it was printed")
        return cls(account, int(sequence), hash_)


@dataclass(frozen=True)
class BudgetRow:
    """The stored state of an account, or of a quota or a cap of it: terms that never change, and totals."""

    account: str
    client: str | None  # the client of a quota, or the name of a cap; None for the account itself
    terms: str
    totals: Amounts
    sequence: int = 0  # of the latest entry that changed it
    opening: str = ""  # of an account, JSON: owner, protects, unit, relation
    head: str = GENESIS  # of an account: the hash of its latest entry

    @property
    def budget(self) -> Budget:
        """The budget of the terms."""
        return parse_budget(self.terms)

    @property
    def digest(self) -> str:
        """The digest that entries record."""
        state = digest(self.terms, canonical_json(self.totals))
        return digest(self.opening, state) if self.client is None else state

    @property
    def receipt(self) -> Receipt:
        """The receipt of the latest entry of an account."""
        return Receipt(self.account, self.sequence, self.head)

    def debit(self, charge: Charge) -> "tuple[BudgetRow, Amounts]":
        """Return the state after a charge, and its price; raise UnaffordableError if the budget does not cover it."""
        budget = self.budget
        try:
            price = budget.price(charge)
        except UnpricedError:
            raise UnaffordableError(self) from None
        totals = add_amounts(self.totals, price)
        if not budget.allows(totals):
            raise UnaffordableError(self)
        return replace(self, totals=totals), price


class UnaffordableError(Exception):
    """The budget of `row` does not cover a charge: rolls the transaction back."""

    def __init__(self, row: BudgetRow) -> None:
        super().__init__()
        self.row = row
