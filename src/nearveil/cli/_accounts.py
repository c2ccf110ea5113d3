"""Accounts that pay for queries."""

import math
import shlex
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nearveil.cli._options import LedgerOptions, option

if TYPE_CHECKING:
    from nearveil.ledger import Account, Debit, Ledger
    from nearveil.ledger.history import Balance
    from nearveil.privacy import Guarantee

DEFAULT_ACCOUNT, DEFAULT_EPSILON = "queries", 100.0


@dataclass(frozen=True)
class PaymentOptions(LedgerOptions):
    """The account that pays for queries."""

    account: str | None = option(
        f"Account that pays; {DEFAULT_ACCOUNT!r} by default, opened with epsilon {DEFAULT_EPSILON:g} at first."
    )


class LazyAccount(ExitStack):
    """Opens the ledger and the account at the first payment, so that a query refused earlier leaves no trace."""

    def __init__(self, options: PaymentOptions) -> None:
        super().__init__()
        self._options = options
        self.new_ledger = ""  # where the default account was opened by this payment
        self.has_paid = False

    def spend(self, guarantee: "Guarantee", key: str, /) -> "Debit":
        """Debit the account."""
        from nearveil.gallery.sync import describe_location
        from nearveil.ledger import OverBudgetError

        ledger = self.enter_context(self._options.open(create=self._options.account is None))
        self.account, is_new = find_or_open_account(ledger, self._options.account)
        self.new_ledger = describe_location(self._options.location) if is_new else ""
        try:
            debit = self.account.spend(guarantee, key)
        except OverBudgetError as error:
            if math.isinf(error.cost) and not self.account.delta:
                remedy = "This message has a delta: open an account with one (`nearveil budget create --delta 1e-6`)"
            else:
                remedy = "Lower --epsilon, or open another account (`nearveil budget create`)"
            raise ValueError(f"{error}. Nothing was sent. {remedy} and name it with --account.") from None
        self.has_paid = True
        return debit

    def balance(self) -> "Balance | None":
        """Return the balance of the account; None before the first payment."""
        return self.account.balance() if self.has_paid else None


def find_or_open_account(ledger: "Ledger", name: str | None) -> tuple["Account", bool]:
    """Return the account with this name, or the default account, and whether it was opened now."""
    from nearveil.ledger import AccountError

    if name is not None:
        return ledger.account(name), False
    if any(account.name == DEFAULT_ACCOUNT for account in ledger.accounts()):
        return ledger.account(DEFAULT_ACCOUNT), False
    terms: Any = {"owner": "me", "protects": "query", "unit": "image", "relation": "replace", "delta": 0.0}
    try:
        return ledger.open_account(DEFAULT_ACCOUNT, epsilon=DEFAULT_EPSILON, **terms), True
    except AccountError:  # another process has opened it in the meantime
        return ledger.account(DEFAULT_ACCOUNT), False


def describe_new_account(balance: "Balance", location: str) -> str:
    """Return a sentence about an account that was opened in the ledger at `location`."""
    option = "" if location == LedgerOptions().location else f" --ledger {shlex.quote(location)}"
    return (
        f"Opened the account {balance.account!r} in {location}: epsilon {balance.epsilon:g} at delta {balance.delta:g} "
        f"for all queries together. See `nearveil budget show{option}`."
    )
