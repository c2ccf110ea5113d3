"""The base class of all errors of this library."""


class NearveilError(Exception):
    """An error with a message that names the problem and its remedy.

    Most are also a :class:`ValueError`. Catch this class to catch them all.

    Examples
    --------
    >>> from nearveil.ledger import AccountError
    >>> issubclass(AccountError, NearveilError), issubclass(AccountError, ValueError)
    (True, True)
    """


class BudgetExceededError(NearveilError, ValueError):
    """The budget would be exceeded; nothing was spent."""
