"""The three kinds of budget, as small pure machines: terms that never change, and totals that only grow.

Why each is sound: ``docs/theory/ledger.md``, Theorems 1 to 3; attacked by ``tests/ledger/test_budget.py``.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Self

import dp_accounting as dp
from dp_accounting import DpEvent, UnsupportedEventError

from nearveil.ledger._events import Charge, canonical_json, charge_events, text_event
from nearveil.privacy._checks import check_delta, check_epsilon
from nearveil.privacy.accounting import PldAccountant, RdpAccountant, RenyiFilter
from nearveil.privacy.events import PureDp

UNITS = 10**18
"""How many units an epsilon, or a divergence, of 1 has."""

Amounts = tuple[int | None, ...]
"""One amount for each thing that a budget counts; None is infinity."""


def written(number: float) -> Fraction:
    """Return the decimal number that a float is written as: 0.1 is one tenth, and ten of them are 1."""
    return Fraction(repr(float(number)))


def units_up(number: Fraction | float) -> int | None:
    """Return an amount in units, rounded up; None for infinity."""
    if not isinstance(number, Fraction) and not math.isfinite(number):
        return None
    return math.ceil(Fraction(number) * UNITS)


def units_down(number: Fraction | float) -> int:
    """Return an amount in units, rounded down."""
    return math.floor(Fraction(number) * UNITS)


def float_up(number: Fraction) -> float:
    """Return the least float that is written as a number not below this one."""
    nearest = float(number)
    return nearest if written(nearest) >= number else math.nextafter(nearest, math.inf)


def float_down(number: Fraction) -> float:
    """Return the largest float that is written as a number not above this one."""
    return -float_up(-number)


def shown_up(number: float, digits: int = 4) -> str:
    """Write what was spent, rounded up.

    Examples
    --------
    >>> shown_up(0.30000000000000004), shown_up(1.25), shown_up(float("inf"))
    ('0.3001', '1.25', 'infinity')
    """
    return _shown(number, Context(prec=digits, rounding=ROUND_CEILING))


def shown_down(number: float, digits: int = 4) -> str:
    """Write what is left, rounded down.

    Examples
    --------
    >>> shown_down(0.69999), shown_down(0.0)
    ('0.6999', '0')
    """
    return _shown(number, Context(prec=digits, rounding=ROUND_FLOOR))


def _shown(number: float, context: Context) -> str:
    if math.isinf(number):
        return "infinity"
    return f"{float(context.plus(Decimal(repr(float(number))))):.12g}"


class RefusedError(ValueError):
    """A charge that a budget does not take, whatever was spent: it has no price there."""


@dataclass(frozen=True)
class Budget(ABC):
    """What may be spent: an epsilon and a delta, and a limit for everything that is counted."""

    epsilon: float
    delta: float
    limits: tuple[int, ...]  # the largest total of each thing counted
    kind: ClassVar[str]

    @property
    def nothing(self) -> Amounts:
        """The totals of an account that nothing was spent from."""
        return (0,) * len(self.limits)

    @abstractmethod
    def price(self, charge: Charge) -> Amounts:
        """Return what a charge adds to each total, rounded up."""

    @abstractmethod
    def allows(self, totals: Amounts) -> bool:
        """Return whether totals are within the budget."""

    @abstractmethod
    def spent(self, totals: Amounts) -> Fraction | None:
        """Return totals as an epsilon: 0 for nothing, at most `epsilon` where they are allowed, None for infinity."""

    @abstractmethod
    def shortage(self, totals: Amounts, price: Amounts) -> str:
        """Say in figures why a price cannot be paid, or nothing where epsilons say it all."""

    @abstractmethod
    def terms(self) -> str:
        """Return the canonical text of everything but the totals."""

    @abstractmethod
    def holds(self, part: Self) -> bool:
        """Return whether another budget of the kind is a part of this one."""

    def contains(self, part: "Budget") -> bool:
        """Return whether another budget is of this kind and a part of this one."""
        return isinstance(part, type(self)) and self.holds(part)


def add(totals: Amounts, price: Amounts) -> Amounts:
    """Return totals after a price was paid."""
    return tuple(None if a is None or b is None else a + b for a, b in zip(totals, price, strict=True))


@dataclass(frozen=True)
class PureBudget(Budget):
    """Epsilons of pure mechanisms, added up; delta is 0. Parameters may be chosen along the way."""

    kind: ClassVar[str] = "pure"

    @classmethod
    def open(cls, epsilon: float) -> Self:
        """Return a budget of pure epsilons."""
        return cls(_positive(epsilon), 0.0, (units_down(written(epsilon)),))

    def price(self, charge: Charge) -> Amounts:
        total = 0
        for text, times in charge:
            exact = exact_epsilon(text_event(text))
            if exact is None:
                raise RefusedError(
                    f"events: {type(text_event(text)).__name__} is not pure, and this account has delta 0; "
                    "open one with a delta, or with a plan"
                )
            total += times * (units_up(exact) or 0)
        return (total,)

    def allows(self, totals: Amounts) -> bool:
        return totals[0] is not None and totals[0] <= self.limits[0]

    def spent(self, totals: Amounts) -> Fraction | None:
        return None if totals[0] is None else Fraction(totals[0], UNITS)

    def shortage(self, totals: Amounts, price: Amounts) -> str:  # noqa: ARG002
        return ""

    def terms(self) -> str:
        return canonical_json({"kind": self.kind, "epsilon": self.epsilon, "limits": self.limits})

    def holds(self, part: Self) -> bool:
        return part.limits[0] <= self.limits[0]


def exact_epsilon(leaf: DpEvent) -> Fraction | None:
    """Return the epsilon of a pure mechanism as the decimals say it, else None."""
    if isinstance(leaf, PureDp):
        return written(leaf.epsilon)
    if isinstance(leaf, dp.LaplaceDpEvent):
        return 1 / written(leaf.noise_multiplier)
    return None


@dataclass(frozen=True)
class FilterBudget(Budget):
    """A Renyi filter: divergences of each order added up, parameters chosen along the way."""

    orders: tuple[float, ...]
    kind: ClassVar[str] = "filter"

    @classmethod
    def open(cls, epsilon: float, delta: float) -> Self:
        """Return the budget of a Renyi filter."""
        gate = RenyiFilter(_positive(epsilon), check_delta(delta))
        return cls(gate.epsilon, gate.delta, tuple(map(units_down, gate.budgets)), gate.orders)

    def price(self, charge: Charge) -> Amounts:
        prices = [tuple(None if a is None else a * times for a in _renyi(text, self.orders)) for text, times in charge]
        totals: Amounts = self.nothing
        for one in prices:
            totals = add(totals, one)
        return totals

    def allows(self, totals: Amounts) -> bool:
        return any(total is not None and total <= limit for total, limit in zip(totals, self.limits, strict=True))

    def spent(self, totals: Amounts) -> Fraction | None:
        # The share of its budget that the order with most left has used. It is no promise, only the way to the end.
        shares = [
            Fraction(total, limit)
            for total, limit in zip(totals, self.limits, strict=True)
            if total is not None and limit > 0
        ]
        return min(shares) * written(self.epsilon) if shares else None

    def shortage(self, totals: Amounts, price: Amounts) -> str:  # noqa: ARG002
        return ""

    def terms(self) -> str:
        fields = {"epsilon": self.epsilon, "delta": self.delta, "orders": self.orders, "limits": self.limits}
        return canonical_json({"kind": self.kind, **fields})

    def holds(self, part: Self) -> bool:
        return part.epsilon <= self.epsilon and part.delta <= self.delta


@lru_cache(maxsize=4096)
def _renyi(text: str, orders: tuple[float, ...]) -> Amounts:
    try:
        return tuple(map(units_up, map(float, RdpAccountant(orders=orders).compose(text_event(text)).rdp)))
    except UnsupportedEventError as unknown:
        raise RefusedError(f"events: no Renyi divergence is known for {type(text_event(text)).__name__}") from unknown


@dataclass(frozen=True)
class PlanBudget(Budget):
    """Mechanisms and counts fixed at opening, composed by privacy loss distributions; taken in any order."""

    plan: tuple[str, ...]
    kind: ClassVar[str] = "plan"

    @classmethod
    def open(cls, epsilon: float, delta: float, plan: Charge) -> Self:
        """Return the budget of a plan; its cost is for the caller to check."""
        delta = 0.0 if delta == 0 else check_delta(delta)
        return cls(_positive(epsilon), delta, tuple(times for _, times in plan), tuple(text for text, _ in plan))

    def price(self, charge: Charge) -> Amounts:
        asked = dict(charge)
        strangers = [text for text in asked if text not in self.plan]
        if strangers:
            raise RefusedError(f"events: not in the plan, of which 0 may be taken: {text_event(strangers[0])}")
        return tuple(asked.get(text, 0) for text in self.plan)

    def allows(self, totals: Amounts) -> bool:
        return all(total is not None and total <= limit for total, limit in zip(totals, self.limits, strict=True))

    def spent(self, totals: Amounts) -> Fraction | None:
        epsilon = pld_epsilon(self._charge(totals), self.delta)
        return None if math.isinf(epsilon) else written(epsilon)

    def shortage(self, totals: Amounts, price: Amounts) -> str:
        parts = [
            f"{text_event(text)}: planned {limit}, taken {taken}, this takes {asked}, left {limit - taken}"
            for text, limit, taken, asked in zip(self.plan, self.limits, totals, price, strict=True)
            if taken is not None and asked is not None and asked and taken + asked > limit
        ]
        return "; ".join(parts)

    def left(self, totals: Amounts) -> Charge:
        """Return what may still be taken."""
        gone = tuple(limit - (taken or 0) for limit, taken in zip(self.limits, totals, strict=True))
        return self._charge(gone)

    def terms(self) -> str:
        fields = {"epsilon": self.epsilon, "delta": self.delta, "plan": self.plan, "limits": self.limits}
        return canonical_json({"kind": self.kind, **fields})

    def holds(self, part: Self) -> bool:
        planned = dict(zip(self.plan, self.limits, strict=True))
        return all(times <= planned.get(text, 0) for text, times in zip(part.plan, part.limits, strict=True))

    def _charge(self, totals: Sequence[int | None]) -> Charge:
        return tuple((text, taken) for text, taken in zip(self.plan, totals, strict=True) if taken)


@lru_cache(maxsize=256)
def pld_epsilon(charge: Charge, delta: float) -> float:
    """Return the epsilon of mechanisms fixed beforehand at `delta`: by PLD, or added up where delta is 0."""
    if delta == 0:
        exact = [(exact_epsilon(event), times) for event, times in charge_events(charge)]
        return (
            math.inf if any(e is None for e, _ in exact) else float_up(sum((e * n for e, n in exact if e), Fraction(0)))
        )
    try:
        accountant = PldAccountant()
        for event, times in charge_events(charge):
            accountant.compose(event, times)
        return accountant.epsilon(delta)
    except UnsupportedEventError as unknown:
        raise RefusedError(f"events: no privacy loss distribution is known for one of them ({unknown})") from unknown


def alone_epsilon(charge: Charge, delta: float) -> float:
    """Return what a charge costs by itself at `delta`: by PLD, else by RDP, else infinity: nobody knows."""
    try:
        return pld_epsilon(charge, delta)
    except RefusedError:
        accountant = RdpAccountant()
    try:
        for event, times in charge_events(charge):
            accountant.compose(event, times)
        return accountant.epsilon(delta)
    except UnsupportedEventError:
        return math.inf


@lru_cache(maxsize=1024)
def budget_of(terms: str) -> Budget:
    """Return the budget that a text of :meth:`Budget.terms` tells of."""
    fields = json.loads(terms)
    limits = tuple(map(int, fields["limits"]))
    if fields["kind"] == "pure":
        return PureBudget(fields["epsilon"], 0.0, limits)
    if fields["kind"] == "filter":
        return FilterBudget(fields["epsilon"], fields["delta"], limits, tuple(fields["orders"]))
    return PlanBudget(fields["epsilon"], fields["delta"], limits, tuple(fields["plan"]))


def _positive(epsilon: float) -> float:
    if check_epsilon(epsilon) == 0:
        raise ValueError("epsilon must be positive: a budget of 0 buys nothing")
    return float(epsilon)
