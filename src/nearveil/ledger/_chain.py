"""Entries and their hash chain: an entry's hash covers all of it and the hash before it."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from nearveil.ledger._events import canonical_json

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
