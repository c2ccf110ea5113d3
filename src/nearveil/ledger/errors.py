"""Errors of a ledger. None of them ever holds a private value."""

import math

from nearveil.errors import BudgetExceededError, NearveilError


class LedgerError(NearveilError):
    """The ledger refused or failed; release nothing."""


class AccountError(LedgerError, ValueError):
    """The account or client does not exist, or exists already."""


class OverBudgetError(LedgerError, BudgetExceededError):
    """The budget, `epsilon`, would be exceeded; nothing was spent.

    `spent` and `cost` are rounded up, and `left` is rounded down. `cost` is infinity if the spend has no finite cost.
    """

    def __init__(
        self,
        message: str,
        *,
        epsilon: float = math.nan,  # the defaults are for unpickling, which sets the figures afterwards
        spent: float = math.nan,
        cost: float = math.nan,
        left: float = math.nan,
    ) -> None:
        super().__init__(message)
        self.epsilon, self.spent, self.cost, self.left = epsilon, spent, cost, left


class BudgetWarning(UserWarning):
    """The budget is so large that spending all of it on one record guarantees nothing about that record."""


class KeySpentError(LedgerError):
    """The key was spent and no message is stored: release nothing, and never run the mechanism again for this key."""


class KeyConflictError(LedgerError, ValueError):
    """The key was used before, for something else."""


class LedgerUnavailableError(LedgerError):
    """The database did not answer in time. The debit may be stored or not; release nothing."""


class LedgerFullError(LedgerError):
    """The disk is full; nothing was spent; release nothing."""


class CorruptLedgerError(LedgerError):
    """The file is corrupted or not a ledger, or an entry does not match its hash."""


class RolledBackError(LedgerError):
    """The database is older than its witness, or another one: spends are missing."""
