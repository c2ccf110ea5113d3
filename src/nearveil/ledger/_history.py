"""History, for people and for other programs."""

import base64
import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from dp_accounting import DpEvent

from nearveil.ledger._chain import Row
from nearveil.ledger._events import charge_events
from nearveil.ledger.errors import CorruptLedgerError

_COLUMNS = (
    "account",
    "sequence",
    "kind",
    "time",
    "key",
    "client",
    "payload",
    "state",
    "client_state",
    "nonce",
    "slot",
    "hash",
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of an account's history.

    Attributes
    ----------
    account : str
    sequence : int
        The order of things; times are only informative.
    kind : {"opened", "quota", "cap", "debit", "take", "message"}
        A "take" says that the debit before it counts in a cap, too.
    time : str
        UTC, as the clock said.
    key : str or None
    client : str or None
        Or the name of a cap.
    events : tuple of (DpEvent, int)
        What a debit paid for: single mechanisms, counted.
    message : bytes or None
    hash : str
        Covers the entry and all before it.
    """

    account: str
    sequence: int
    kind: str
    time: str
    key: str | None
    client: str | None
    events: tuple[tuple[DpEvent, int], ...]
    message: bytes | None
    hash: str


def entry_of(row: Row, kept_hash: str) -> Entry:
    """Return a row as a line of history."""
    try:
        content = row.content
        message, charge = content.get("message"), content.get("charge", ())
        return Entry(
            account=row.account,
            sequence=row.sequence,
            kind=row.kind,
            time=row.time,
            key=row.key,
            client=row.client,
            events=charge_events(tuple((text, times) for text, times in charge)),
            message=None if message is None else base64.b64decode(message),
            hash=kept_hash,
        )
    except (AttributeError, TypeError, ValueError):
        raise CorruptLedgerError(
            f"entry {row.sequence} of account {row.account!r} cannot be read: it was changed by "
            "hand; verify() says more"
        ) from None


def exported(rows: Sequence[tuple[Row, str]], format: Literal["json", "csv"]) -> str:  # noqa: A002
    """Return entries as text, with their hashes."""
    if format not in ("json", "csv"):
        raise ValueError('format must be "json" or "csv"')
    lines = [{**asdict(row), "hash": kept} for row, kept in rows]
    if format == "json":
        return json.dumps(lines, indent=1)
    out = io.StringIO()
    table = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(lines)
    return out.getvalue()
