"""Durable privacy budgets: accounts, debits, history. Spend before anything is released."""

from nearveil.lazy import require_extra

with require_extra("budget"):
    from nearveil.ledger._ledger import Ledger
    from nearveil.ledger._verify import Verification
    from nearveil.ledger.account import Account, Debit, new_key
    from nearveil.ledger.errors import (
        AccountError,
        BudgetWarning,
        KeyConflictError,
        KeySpentError,
        LedgerError,
        LedgerUnavailableError,
        OverBudgetError,
    )
    from nearveil.ledger.store import Receipt

__all__ = [
    "Account",
    "AccountError",
    "BudgetWarning",
    "Debit",
    "KeyConflictError",
    "KeySpentError",
    "Ledger",
    "LedgerError",
    "LedgerUnavailableError",
    "OverBudgetError",
    "Receipt",
    "Verification",
    "new_key",
]
