"""What can go wrong with a ledger, and what to do then. None of these errors ever holds a private value."""

from nearveil.errors import NearveilError
from nearveil.privacy.accounting import BudgetExceededError


class LedgerError(NearveilError):
    """The ledger could not do what was asked; release nothing."""


class AccountError(LedgerError, ValueError):
    """There is no such account or client, or there is one of that name already."""


class OverBudgetError(LedgerError, BudgetExceededError):
    """The budget would be exceeded; nothing was spent.

    Attributes
    ----------
    epsilon : float
        The budget.
    spent : float
        What is gone of it already, rounded up.
    cost : float
        What this would have added, rounded up; infinity where it has no finite cost.
    left : float
        What is left, rounded down.
    """

    def __init__(self, message: str, *, epsilon: float, spent: float, cost: float, left: float) -> None:
        super().__init__(message)
        self.epsilon, self.spent, self.cost, self.left = epsilon, spent, cost, left

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling: processes send errors to one another."""
        figures = {"epsilon": self.epsilon, "spent": self.spent, "cost": self.cost, "left": self.left}
        return _restore_over_budget, (str(self), figures)


def _restore_over_budget(message: str, figures: dict[str, float]) -> OverBudgetError:
    return OverBudgetError(message, **figures)


class KeySpentError(LedgerError):
    """The key was spent and no message is stored: release nothing, and never run the mechanism again for this key."""


class KeyConflictError(LedgerError, ValueError):
    """The key was used before, for something else."""


class LedgerUnavailableError(LedgerError):
    """The database did not answer in time. A debit may stand or not; nothing may be released."""


class LedgerFullError(LedgerError):
    """The disk is full; nothing was spent and nothing may be released."""


class CorruptLedgerError(LedgerError):
    """The file is damaged or no ledger, or an entry does not fit its hash."""


class RolledBackError(LedgerError):
    """The database is older than its witness, or another one: spends that happened are missing."""
