"""Budgets: a filter for mechanisms chosen along the way, and the parameter that a budget allows."""

import math
from collections.abc import Callable

import numpy as np
from dp_accounting import DpEvent
from scipy.optimize import brentq

from nearveil.errors import NearveilError
from nearveil.privacy._checks import check_delta, check_epsilon, check_finite, check_positive
from nearveil.privacy.accounting._accountants import Accountant, PldAccountant, RdpAccountant, Spent

FILTER_ORDERS: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class BudgetExceededError(NearveilError, ValueError):
    """The budget would be passed; nothing was spent."""


class RenyiFilter:
    """A budget for mechanisms chosen after seeing earlier answers: noise, kind and number may depend on them.

    Each order has a budget, and each mechanism pays its divergence at every order. One may go on while the total of at
    least one order is within its budget; delta is shared equally among the orders, because which one that is may
    depend on the answers (``docs/theory/accounting.md``, Theorem 6; Feldman and Zrnic 2021, Lecuyer 2021).

    Parameters
    ----------
    epsilon : float
        The promise, however the budget is spent.
    delta : float
        Likewise.
    orders : tuple of float

    Examples
    --------
    >>> from dp_accounting import GaussianDpEvent
    >>> gate = RenyiFilter(1.0, 1e-5)
    >>> gate.spend(GaussianDpEvent(8.0))
    >>> gate.may_spend(GaussianDpEvent(8.0)), gate.may_spend(GaussianDpEvent(3.0))
    (True, False)
    """

    def __init__(self, epsilon: float, delta: float, orders: tuple[float, ...] = FILTER_ORDERS) -> None:
        if check_epsilon(epsilon) == 0:
            raise ValueError("epsilon must be positive: a budget of 0 buys nothing")
        self._promise = (epsilon, delta)
        self._accountant = RdpAccountant(orders=orders)
        alpha = np.array(self._accountant.orders)
        share = check_delta(delta) / len(alpha)
        # The tight conversion, solved for the divergence: what order alpha may spend for (epsilon, share).
        self._budget = epsilon - np.log1p(-1 / alpha) + np.log(share * alpha) / (alpha - 1)
        if np.all(self._budget < 0):
            raise ValueError("orders leave no budget at this epsilon and delta: offer larger ones")

    @property
    def epsilon(self) -> float:
        """The epsilon that holds, however the budget is spent."""
        return self._promise[0]

    @property
    def delta(self) -> float:
        """The delta that holds, however the budget is spent."""
        return self._promise[1]

    @property
    def spent(self) -> Spent:
        """The single mechanisms paid for so far, and how often each ran."""
        return self._accountant.spent

    @property
    def orders(self) -> tuple[float, ...]:
        """The orders of Renyi divergence that it watches."""
        return self._accountant.orders

    @property
    def budgets(self) -> tuple[float, ...]:
        """What each order may spend; one may go on while the total of at least one is within. Negative: never."""
        return tuple(map(float, self._budget))

    def may_spend(self, event: DpEvent, count: int = 1) -> bool:
        """Return whether the budget covers the event too.

        Parameters
        ----------
        event : DpEvent
        count : int, default=1

        Returns
        -------
        bool
        """
        return bool(np.any(self._accountant.copy().compose(event, count).rdp <= self._budget))

    def spend(self, event: DpEvent, count: int = 1) -> None:
        """Pay for the event, *before* it happens.

        Parameters
        ----------
        event : DpEvent
        count : int, default=1

        Raises
        ------
        BudgetExceededError
            If the budget does not cover it; nothing is spent then.
        """
        if not self.may_spend(event, count):
            raise BudgetExceededError("the budget does not cover this event: release nothing")
        self._accountant.compose(event, count)


def calibrate(
    target_epsilon: float,
    make_event: Callable[[float], DpEvent],
    *,
    delta: float,
    bracket: tuple[float, float],
    accountant: Accountant | None = None,
    tolerance: float = 1e-6,
    integer: bool = False,
) -> float:
    """Return the parameter at which an event costs at most `target_epsilon`, rounded against the spender.

    Parameters
    ----------
    target_epsilon : float
    make_event : callable
        From the parameter (noise, a sampling rate, a count) to the event; its cost must rise or fall throughout.
    delta : float
    bracket : (float, float)
        One end must meet the target and the other not.
    accountant : Accountant, optional
        May have seen other events already; :class:`PldAccountant` by default.
    tolerance : float, default=1e-6
        How far from the best parameter the answer may be, relative to the bracket's larger end.
    integer : bool, default=False
        Search whole numbers only.

    Returns
    -------
    float

    Examples
    --------
    >>> from dp_accounting import GaussianDpEvent
    >>> f"{calibrate(1.0, GaussianDpEvent, delta=1e-5, bracket=(1.0, 10.0)):.4f}"
    '3.7306'
    """
    target = check_epsilon(target_epsilon, "target_epsilon")
    if target == 0:
        raise ValueError("target_epsilon must be positive")
    check_delta(delta)
    low, high = sorted(check_finite(end, "bracket") for end in bracket)
    step = 1.0 if integer else check_positive(tolerance, "tolerance") * max(abs(low), abs(high))
    start = PldAccountant() if accountant is None else accountant

    def gap(parameter: float) -> float:
        cost = start.copy().compose(make_event(round(parameter) if integer else parameter)).epsilon(delta)
        return min(max(math.log(max(cost, 1e-300) / target), -50.0), 50.0)

    low_meets, high_meets = gap(low) <= 0, gap(high) <= 0
    if low_meets == high_meets:
        raise ValueError("bracket must hold one end that meets target_epsilon and one that does not")
    safe_side = -1.0 if low_meets else 1.0
    guess = float(brentq(gap, low, high, xtol=step / 2))
    guess = float(round(guess)) if integer else guess
    # The root is only near: walk to where the cost is within the target, and for whole numbers as near as can be.
    while gap(guess) > 0:
        guess = min(max(guess + safe_side * step, low), high)
    while integer and low < guess < high and gap(guess - safe_side) <= 0:
        guess -= safe_side
    return guess
