"""The base of all errors that this library raises on purpose."""


class NearveilError(Exception):
    """Something that was asked for cannot be done; the message names the field and what to do.

    Most are a :class:`ValueError`, too. Catch this one to catch them all.

    Examples
    --------
    >>> from nearveil.ledger import AccountError
    >>> issubclass(AccountError, NearveilError), issubclass(AccountError, ValueError)
    (True, True)
    """
