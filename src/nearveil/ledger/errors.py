"""Errors of a ledger. None of them ever holds a private value."""

from nearveil.errors import NearveilError
from nearveil.privacy.accounting import BudgetExceededError


class LedgerError(NearveilError):
    """The ledger refused or failed; release nothing."""


class AccountError(LedgerError, ValueError):
    """The account or client does not exist, or exists already."""


class OverBudgetError(LedgerError, BudgetExceededError):
    """The budget would be exceeded; nothing was spent.

    Attributes
    ----------
    epsilon : float
        The budget.
    spent : float
        The spent part, rounded up.
    cost : float
        The cost of this spend, rounded up; infinity if it has no finite cost.
    left : float
        The remaining part, rounded down.
    """

    def __init__(self, message: str, *, epsilon: float, spent: float, cost: float, left: float) -> None:
        super().__init__(message)
        self.epsilon, self.spent, self.cost, self.left = epsilon, spent, cost, left

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling: processes send errors to one another."""
        figures = {"epsilon": self.epsilon, "spent": self.spent, "cost": self.cost, "left": self.left}
        return _restore_over_budget, (str(self), figures)


def _restore_over_budget(message: str, figures: dict[str, float]) -> OverBudgetError:
    return OverBudgetError(message, **figures)


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
