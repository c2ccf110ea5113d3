"""Balances and previews."""

import math
from dataclasses import dataclass
from fractions import Fraction

from dp_accounting import DpEvent

from nearveil.ledger.budget import (
    Charge,
    PlanBudget,
    UnpricedError,
    add_amounts,
    find_alone_epsilon,
    format_down,
    format_up,
    read_charge,
    round_float_down,
    round_float_up,
    to_exact_decimal,
)
from nearveil.ledger.entries import BudgetRow
from nearveil.ledger.errors import OverBudgetError


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The budget of an account or of a client's quota, spent and left; :meth:`Account.balance` returns one.

    Examples
    --------
    >>> figures = {"kind": "pure", "epsilon": 1.0, "delta": 0.0, "spent": 0.25, "left": 0.75, "remaining": ()}
    >>> print(Balance(account="camera", client=None, **figures))
    account camera: budget epsilon 1 at delta 0, spent 0.25, left 0.75
    """

    account: str
    client: str | None
    kind: str  #: "plan", "filter" or "pure"
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
            f"spent {format_up(self.spent)}, left {format_down(self.left)}"
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
            f"Allowed: this costs {format_up(self.cost)} of epsilon {self.before.epsilon:g}; "
            f"then {format_up(self.total)} is spent and {format_down(self.left)} left "
            f"(alone it would be epsilon {format_up(self.alone)} at delta {self.before.delta:g})."
        )


def make_balance(row: BudgetRow) -> Balance:
    """Return the figures of an account, a quota or a cap."""
    budget = row.budget
    spent = budget.spent(row.totals)
    return Balance(
        account=row.account,
        client=row.client,
        kind=budget.kind,
        epsilon=budget.epsilon,
        delta=budget.delta,
        spent=_round_up(spent),
        left=_compute_left(budget.epsilon, spent),
        remaining=read_charge(budget.left(row.totals)) if isinstance(budget, PlanBudget) else (),
    )


def make_preview(row: BudgetRow, charge: Charge) -> Preview:
    """Return the cost of a charge for an account, a quota or a cap."""
    before, budget = make_balance(row), row.budget
    alone = find_alone_epsilon(charge, budget.delta)
    try:
        price = budget.price(charge)
    except UnpricedError as unpriced:
        reason = _make_reason(before, math.inf, str(unpriced))
        figures = {"cost": math.inf, "total": math.inf, "left": 0.0}
        return Preview(before=before, alone=alone, allowed=False, reason=reason, **figures)
    totals = add_amounts(row.totals, price)
    allowed = budget.allows(totals)
    spent, total = budget.spent(row.totals), budget.spent(totals)
    cost = math.inf if total is None or spent is None else round_float_up(max(total - spent, Fraction(0)))
    return Preview(
        before=before,
        alone=alone,
        cost=cost,
        total=_round_up(total),
        left=_compute_left(budget.epsilon, total),
        allowed=allowed,
        reason="" if allowed else _make_reason(before, cost, budget.shortage(row.totals, price)),
    )


def make_refusal(preview: Preview) -> OverBudgetError:
    """Return the error of a refused spend."""
    return OverBudgetError(
        preview.reason,
        epsilon=preview.before.epsilon,
        spent=preview.before.spent,
        cost=preview.cost,
        left=preview.before.left,
    )


def _round_up(spent: Fraction | None) -> float:
    return math.inf if spent is None else round_float_up(spent)


def _compute_left(epsilon: float, spent: Fraction | None) -> float:
    return 0.0 if spent is None else max(0.0, round_float_down(to_exact_decimal(epsilon) - spent))


def _make_reason(before: Balance, cost: float, details: str) -> str:
    summary = f"{before}; this costs {format_up(cost)}; nothing was spent"
    return f"{summary} ({details})" if details else summary
