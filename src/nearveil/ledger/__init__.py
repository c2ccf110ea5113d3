"""Budgets that last: accounts, debits, history. "May I?", before anything is released."""

from nearveil.ledger._ledger import Ledger
from nearveil.ledger._spending import Debit, new_key
from nearveil.ledger._store import Receipt
from nearveil.ledger._verify import Problem, Verification
from nearveil.ledger.account import Account
from nearveil.ledger.errors import (
    AccountError,
    BudgetExceededError,
    CorruptLedgerError,
    KeyConflictError,
    KeySpentError,
    LedgerError,
    LedgerFullError,
    LedgerUnavailableError,
    NewerLedgerError,
    OverBudgetError,
    RolledBackError,
)
from nearveil.ledger.history import Balance, Entry, Preview

__all__ = [
    "Account",
    "AccountError",
    "Balance",
    "BudgetExceededError",
    "CorruptLedgerError",
    "Debit",
    "Entry",
    "KeyConflictError",
    "KeySpentError",
    "Ledger",
    "LedgerError",
    "LedgerFullError",
    "LedgerUnavailableError",
    "NewerLedgerError",
    "OverBudgetError",
    "Preview",
    "Problem",
    "Receipt",
    "RolledBackError",
    "Verification",
    "new_key",
]
