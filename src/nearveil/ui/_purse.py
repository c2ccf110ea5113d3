"""Who pays for the questions of the page."""

from nearveil.ledger import Account, Debit
from nearveil.privacy import Guarantee


class Purse:
    """Pays from one account, and remembers the debit that it made last.

    Parameters
    ----------
    account : Account, optional
        May be given later, before anything is paid: so that what is refused before leaves no ledger behind.

    Attributes
    ----------
    account : Account
    debit : Debit or None
        Of the last question; its message is all that the other side was sent. None before it paid.
    """

    account: Account

    def __init__(self, account: Account | None = None) -> None:
        if account is not None:
            self.account = account
        self.debit: Debit | None = None

    def begin(self) -> None:
        """Forget the debit of the question before."""
        self.debit = None

    def spend(self, promise: Guarantee, key: str, /) -> Debit:
        """Debit the account."""
        self.debit = self.account.spend(promise, key)
        return self.debit
