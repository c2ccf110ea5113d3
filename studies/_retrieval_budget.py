"""How many queries a budget pays for, by the arithmetic of the ledger."""

from collections.abc import Callable
from typing import Any

import numpy as np

from nearveil.ledger.budget import PureBudget, charge_guarantee, find_pld_epsilon
from nearveil.mechanisms import AnalyticGaussian, Cells, Release
from nearveil.privacy import Guarantee

BUDGET = 16.0
DELTA = 1e-5
PRICED: dict[str, Callable[[float], Release]] = {"a pure message": Cells, "analytic Gaussian": AnalyticGaussian}
_FINE = 0.02  # of the count, where finding the last query would take minutes


def count_payable(kind: str, epsilon: float) -> dict[str, Any]:
    """Return how many messages of one kind a budget pays for, with delta 0 and at `DELTA`."""
    guarantee = PRICED[kind](epsilon).fit(np.eye(3)).guarantee
    return {"pure": _count_added(guarantee) if guarantee.delta == 0 else 0, "plan": _count_planned(guarantee)}


def _count_added(guarantee: Guarantee) -> int:
    budget = PureBudget.open(BUDGET)
    (price,) = budget.price(charge_guarantee(guarantee, "query", guarantee.unit, "replace", 0.0))
    assert price is not None
    return budget.limits[0] // price


def _count_planned(guarantee: Guarantee) -> int:
    charge = charge_guarantee(guarantee, "query", guarantee.unit, "replace", DELTA)

    def within(count: int) -> bool:
        # The ledger's own price of a plan, less what samplers of finite precision cost.
        delta = DELTA - count * guarantee.extra_delta
        return delta > 0 and find_pld_epsilon(tuple((text, count * times) for text, times in charge), delta) <= BUDGET

    # One message has its own guarantee, which an accountant's rounding would only blur.
    good = 1 if guarantee.epsilon <= BUDGET and guarantee.delta <= DELTA else 0
    bad = max(2, int(BUDGET / guarantee.epsilon))
    while within(bad):
        good, bad = bad, 4 * bad
    while bad - good > max(1, _FINE * good):
        middle = max(good + 1, int(np.sqrt(good * bad)))
        good, bad = (middle, bad) if within(middle) else (good, middle)
    return good
