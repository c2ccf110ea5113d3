"""Balances and previews."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from nearveil.ledger import budget as budgets
from nearveil.ledger.budget import Charge, PlanBudget, UnpricedError
from nearveil.ledger.errors import OverBudgetError
from nearveil.ledger.store import BudgetRow

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The budget of an account or of a client's quota, spent and left; :meth:`Account.balance` returns one."""

    account: str
    client: str | None
    kind: str  #: "plan", "filter", "gaussian" or "pure"
    epsilon: float  #: the budget, which holds for every order of spends
    delta: float
    #: Rounded up. Of a plan: the epsilon of the mechanisms paid so far, by PLD. Of a filter: the used share of the
    #: budget, times epsilon; not a guarantee by itself. Of pure epsilons: their sum.
    spent: float
    left: float  #: ``epsilon - spent``, rounded down
    remaining: tuple[tuple[DpEvent, int], ...]  #: the rest of a plan; empty for the other kinds

    def __str__(self) -> str:
        share = "" if self.client is None else f"client {self.client} in "
        return (
            f"{share}account {self.account}: budget epsilon {self.epsilon:.4g} at delta {self.delta:g}, "
            f"spent {budgets.format_up(self.spent)}, left {budgets.format_down(self.left)}"
        )


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The cost of a spend that was not made."""

    before: Balance
    alone: float  #: the epsilon of the events by themselves at the budget's delta
    cost: float  #: the increase of the spent budget; infinity if they have no finite cost here
    total: float  #: the spent budget after the spend
    left: float  #: the remaining budget after the spend
    allowed: bool
    reason: str  #: the reason of a refusal, with figures; empty if it is allowed

    @property
    def spent(self) -> float:
        """The budget spent before."""
        return self.before.spent

    def __str__(self) -> str:
        if not self.allowed:
            return f"Refused: {self.reason}"
        return (
            f"Allowed: this costs {budgets.format_up(self.cost)} of epsilon {self.before.epsilon:g}; "
            f"then {budgets.format_up(self.total)} is spent and {budgets.format_down(self.left)} left "
            f"(alone it would be epsilon {budgets.format_up(self.alone)} at delta {self.before.delta:g})."
        )


def make_balance(row: BudgetRow) -> Balance:
    """Return the figures of an account, a quota or a cap."""
    budget = row.budget
    spent, left = budgets.round_amounts(budget.epsilon, budget.spent(row.totals))
    return Balance(
        account=row.account,
        client=row.client,
        kind=budget.kind,
        epsilon=budget.epsilon,
        delta=budget.delta,
        spent=spent,
        left=left,
        remaining=budgets.read_charge(budget.left(row.totals)) if isinstance(budget, PlanBudget) else (),
    )


def make_preview(row: BudgetRow, charge: Charge) -> Preview:
    """Return the cost of a charge for an account, a quota or a cap."""
    before, budget = make_balance(row), row.budget
    cost, after, allowed = math.inf, None, False
    try:
        price = budget.price(charge)
    except UnpricedError as unpriced:
        details = str(unpriced)
    else:
        totals = budgets.add_amounts(row.totals, price)
        allowed, details = budget.allows(totals), budget.shortage(row.totals, price)
        spent, after = budget.spent(row.totals), budget.spent(totals)
        if spent is not None and after is not None:
            cost = budgets.round_float_up(max(after - spent, Fraction(0)))
    total, left = budgets.round_amounts(budget.epsilon, after)
    reason = f"{before}; this costs {budgets.format_up(cost)}; nothing was spent" + (f" ({details})" if details else "")
    return Preview(
        before=before,
        alone=budgets.find_alone_epsilon(charge, budget.delta),
        cost=cost,
        total=total,
        left=left,
        allowed=allowed,
        reason="" if allowed else reason,
    )


def make_refusal(preview: Preview) -> OverBudgetError:
    """Return the error of a refused spend."""
    before = preview.before
    figures = {"epsilon": before.epsilon, "spent": before.spent, "left": before.left}
    return OverBudgetError(preview.reason, cost=preview.cost, **figures)
