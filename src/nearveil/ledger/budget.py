"""Budgets as pure state machines (fixed terms, totals that only grow), and events as canonical text.

Proofs of each kind: ``docs/theory/ledger.md``, Theorems 1 to 3; tested by ``tests/ledger/test_budget.py``.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, get_origin

from nearveil.lazy import LateModule
from nearveil.privacy.checks import check_choice, check_count, check_delta, check_finite, check_positive
from nearveil.privacy.guarantee import Guarantee, Protects, Relation, count_events, find_epsilon, needs_add_remove

if TYPE_CHECKING:
    import attr
    import dp_accounting as dp
    from dp_accounting import DpEvent

    from nearveil.privacy import accounting
    from nearveil.privacy import events as privacy_events
else:  # the state of an account is read without an accountant
    attr, dp = LateModule("attr", "budget"), LateModule("dp_accounting", "budget")
    accounting = LateModule("nearveil.privacy.accounting", "budget")
    privacy_events = LateModule("nearveil.privacy.events", "budget")

Events: TypeAlias = "DpEvent | Iterable[DpEvent | tuple[DpEvent, int]]"
"""One event, or several, each with an optional count."""

Charge: TypeAlias = tuple[tuple[str, int], ...]
"""The canonical text of each single mechanism and its count, sorted by the text."""

Releases: TypeAlias = Literal["any", "gaussian"]
"""The releases that an account pays for; Gaussian noise without sampling alone costs less."""

_MOST = 2**63 - 1
_SHARE, _LEAST_SHARE = 1e-5, 1e-20  # largest delta of a mechanism's samplers: a share of the account's, or this


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
canonical_json: Callable[[object], str] = _ENCODER.encode
"""Return the one JSON text of a value: sorted, without spaces, floats to the last bit, no NaN."""


@cache
def _list_events() -> dict[str, type[DpEvent]]:
    """Return events by the name that ledgers store. The names of their fields are stored, too."""
    parts = (
        (dp.dp_event, "NoOpDpEvent NonPrivateDpEvent GaussianDpEvent LaplaceDpEvent RandomizedResponseDpEvent"),
        (dp.dp_event, "ZCDpEvent RepeatAndSelectDpEvent PoissonSampledDpEvent SelfComposedDpEvent ComposedDpEvent"),
        (privacy_events, "PureDp NamedSets NoisyScreening VoteHistogram ClippedVotes GaussianNoisyMax"),
        (privacy_events, "LaplaceNoisyMax SampledScreening"),
    )
    return {name: getattr(module, name) for module, names in parts for name in names.split()}


def _convert(field: attr.Attribute[Any], value: Any) -> Any:
    """Convert a field to or from JSON: numbers and texts stay, an event becomes a dictionary, and the other way."""
    if field.type is float:
        return check_finite(value, "events: a parameter")
    if field.type is int:
        return check_count(value, "events: a count")
    if get_origin(field.type) is Literal:
        return str(value)
    return list(map(_convert_event, value)) if get_origin(field.type) is list else _convert_event(value)


def _convert_event(value: Any) -> DpEvent | dict[str, Any]:
    return _decode(value) if isinstance(value, dict) else _encode(value)


def _encode(event: DpEvent) -> dict[str, Any]:
    name = type(event).__name__
    if _list_events().get(name) is not type(event):
        raise ValueError(f"events: the ledger has no text for {type(event).__name__}; use one that accountants price")
    values = {field.name: _convert(field, getattr(event, field.name)) for field in attr.fields(type(event))}
    return {"type": name, **values}


def _decode(value: Mapping[str, Any]) -> DpEvent:
    kind = _list_events().get(value.get("type", ""))
    fields = attr.fields(kind) if kind is not None else ()
    if kind is None or set(value) != {"type", *(field.name for field in fields)}:
        raise ValueError("events: unknown event")
    return kind(**{field.name: _convert(field, value[field.name]) for field in fields})


def format_event(event: DpEvent) -> str:
    """Return the canonical text of an event."""
    return canonical_json(_encode(event))


def parse_event(text: str) -> DpEvent:
    """Return the event of a canonical text."""
    return _decode(json.loads(text))


def make_charge(events: Events, relation: Relation) -> Charge:
    """Return the mechanisms of `events` with counts; raise if they are priced for another relation."""
    counts: Counter[str] = Counter()
    for event, times in _pairs(events):
        if relation == "replace" and needs_add_remove(event):
            raise ValueError('events: sampling, votes and screenings need an account for "add-remove", not "replace"')
        for leaf, repeats in privacy_events.split_event(event, times):
            if repeats:
                counts[format_event(leaf)] += repeats
    if not counts:
        raise ValueError("events must contain at least one mechanism that happens at least once")
    return _check_counts(counts)


def repeat_charge(charge: Charge, times: int) -> Charge:
    """Return a charge that happens several times."""
    check_count(times, "times", least=1)
    return _check_counts({text: count * times for text, count in charge})


def join_charges(charges: Iterable[Charge]) -> Charge:
    """Return several charges as one."""
    counts: Counter[str] = Counter()
    for charge in charges:
        counts.update(dict(charge))
    return _check_counts(counts)


def drop_sets(charge: Charge) -> Charge:
    """Return a charge without the numbers of sets of messages: a retry may know another map than the first attempt."""
    counts: Counter[str] = Counter()
    for event, times in read_charge(charge):
        named = isinstance(event, privacy_events.NamedSets)
        counts[format_event(privacy_events.PureDp(event.epsilon) if named else event)] += times
    return _check_counts(counts)


def _check_counts(counts: Mapping[str, int]) -> Charge:
    if any(count > _MOST for count in counts.values()):
        raise ValueError("events: a count is larger than any ledger holds")
    return tuple(sorted(counts.items()))


@lru_cache(maxsize=256)
def charge_guarantee(guarantee: Guarantee, protects: Protects, unit: str, relation: Relation, delta: float) -> Charge:
    """Return the charge of a guarantee, cached, for an account with the other four terms, which must agree."""
    if not guarantee.sound:
        raise ValueError("guarantee is not sound, so no budget covers it")
    if guarantee.is_vacuous:
        raise ValueError(
            "guarantee: it guarantees nothing (infinite epsilon, or delta 1): no accountant prices its events"
        )
    if guarantee.protects != protects:
        raise ValueError(f"guarantee protects a {guarantee.protects}, this account a {protects}")
    # Every message is charged, so an account of queries covers any unit. An account of a database does not: a person
    # with ten rows is in each answer ten times.
    if protects == "database" and guarantee.unit != unit:
        raise ValueError(f"guarantee is about the unit {guarantee.unit!r}, this account about {unit!r}")
    if guarantee.relation != relation:
        raise ValueError(f'guarantee is for "{guarantee.relation}", this account for "{relation}"')
    whole = guarantee if guarantee.whole is None else guarantee.whole
    check_samplers(whole.events, whole.extra_delta, delta)
    return make_charge(guarantee.events, relation)


def check_samplers(events: Iterable[DpEvent], extra_delta: float, delta: float) -> None:
    """Refuse events with samplers that add more (`extra_delta`) to delta than docs/theory/ledger.md allows."""
    mechanisms = sum(times for _, times in count_events(events))
    if extra_delta > mechanisms * max(_SHARE * delta, _LEAST_SHARE):
        raise ValueError(
            f"guarantee: extra_delta is above {_SHARE:g} of this account's delta for each mechanism, and no event "
            "includes it; open an account with a larger delta, or for screenings with a smaller epsilon"
        )


def _pairs(events: Events) -> list[tuple[DpEvent, int]]:
    parts = events if isinstance(events, Iterable) else [events]
    pairs = [part if isinstance(part, tuple) and len(part) == 2 else (part, 1) for part in parts]
    if not all(isinstance(event, dp.DpEvent) for event, _ in pairs):
        raise ValueError("events must be a DpEvent, or a list of DpEvent or of (DpEvent, count)")
    return [(event, check_count(times, "events: a count", least=1)) for event, times in pairs]


def read_charge(charge: Charge) -> tuple[tuple[DpEvent, int], ...]:
    """Return a charge as events with counts."""
    return tuple((parse_event(text), times) for text, times in charge)


UNITS = 10**18
"""The number of units in an epsilon, or a divergence, of 1."""

Amounts = tuple[int | None, ...]
"""One amount for each quantity that a budget counts; None is infinity."""


def to_exact_decimal(number: float) -> Fraction:
    """Return the shortest decimal number of a float: 0.1 is one tenth, and ten of them are 1."""
    return Fraction(repr(float(number)))


def round_units_up(number: Fraction | float) -> int | None:
    """Return an amount in units, rounded up; None for infinity."""
    if not isinstance(number, Fraction) and not math.isfinite(number):
        return None
    return math.ceil(Fraction(number) * UNITS)


def round_units_down(number: Fraction | float) -> int:
    """Return an amount in units, rounded down."""
    return math.floor(Fraction(number) * UNITS)


def round_float_up(number: Fraction) -> float:
    """Return the least float with a decimal text not below this number."""
    nearest = float(number)
    return nearest if to_exact_decimal(nearest) >= number else math.nextafter(nearest, math.inf)


def round_float_down(number: Fraction) -> float:
    """Return the largest float with a decimal text not above this number."""
    return -round_float_up(-number)


def round_amounts(epsilon: float, spent: Fraction | None) -> tuple[float, float]:
    """Return a spent amount rounded up, and the rest of `epsilon` rounded down; None is infinity."""
    if spent is None:
        return math.inf, 0.0
    return round_float_up(spent), max(0.0, round_float_down(to_exact_decimal(epsilon) - spent))


def format_up(number: float, rounding: str = ROUND_CEILING) -> str:
    """Format a spent amount, rounded up."""
    if math.isinf(number):
        return "infinity"
    return f"{float(Context(prec=4, rounding=rounding).plus(Decimal(repr(float(number))))):.12g}"


def format_down(number: float) -> str:
    """Format a remaining amount, rounded down."""
    return format_up(number, ROUND_FLOOR)


class UnpricedError(ValueError):
    """An event that this budget cannot price."""


@dataclass(frozen=True)
class Budget(ABC):
    """A budget: an epsilon and a delta, and a limit for each quantity that is counted."""

    epsilon: float
    delta: float
    limits: tuple[int, ...]  # the largest total of each quantity
    kind: ClassVar[str]
    releases: ClassVar[Releases] = "any"

    @property
    def zero(self) -> Amounts:
        """The totals before any spend."""
        return (0,) * len(self.limits)

    @abstractmethod
    def price(self, charge: Charge) -> Amounts:
        """Return the price of a charge: the increase of each total, rounded up."""

    @abstractmethod
    def allows(self, totals: Amounts) -> bool:
        """Return whether totals are within the budget."""

    @abstractmethod
    def spent(self, totals: Amounts) -> Fraction | None:
        """Return totals as an epsilon: at most `epsilon` if they are allowed, None for infinity."""

    @abstractmethod
    def holds(self, part: Self) -> bool:
        """Return whether another budget of this kind is a part of this one."""

    def shortage(self, totals: Amounts, price: Amounts) -> str:  # noqa: ARG002
        """Return the reason, with figures, why a price cannot be paid; empty if the epsilons say it all."""
        return ""

    def terms(self) -> str:
        """Return the canonical text of everything but the totals."""
        return canonical_json({"kind": self.kind, **vars(self)})

    def contains(self, part: Budget) -> bool:
        """Return whether another budget is of this kind and a part of this one."""
        return type(part) is type(self) and self.holds(part)


def add_amounts(totals: Amounts, price: Amounts) -> Amounts:
    """Return the totals after a price."""
    return tuple(None if a is None or b is None else a + b for a, b in zip(totals, price, strict=True))


@dataclass(frozen=True)
class PureBudget(Budget):
    """The sum of pure epsilons; delta is 0. Parameters may be chosen adaptively."""

    kind: ClassVar[str] = "pure"

    @classmethod
    def open(cls, epsilon: float) -> Self:
        """Return a budget of pure epsilons."""
        return cls(check_positive(epsilon, "epsilon"), 0.0, (round_units_down(to_exact_decimal(epsilon)),))

    def price(self, charge: Charge) -> Amounts:
        return (sum(times * _price_pure(text) for text, times in charge),)

    def allows(self, totals: Amounts) -> bool:
        return totals[0] is not None and totals[0] <= self.limits[0]

    def spent(self, totals: Amounts) -> Fraction | None:
        return None if totals[0] is None else Fraction(totals[0], UNITS)

    def terms(self) -> str:
        return canonical_json({"kind": self.kind, "epsilon": self.epsilon, "limits": self.limits})

    def holds(self, part: Self) -> bool:
        return part.limits[0] <= self.limits[0]


@lru_cache(maxsize=4096)
def _price_pure(text: str) -> int:
    exact = accounting.find_pure_epsilon(parse_event(text), to_exact_decimal)
    if exact is None:
        kind = type(parse_event(text)).__name__
        raise UnpricedError(f"events: {kind} is not pure: open an account with a delta, or with a plan")
    return round_units_up(exact) or 0


@dataclass(frozen=True)
class FilterBudget(Budget):
    """A Renyi filter: the sum of divergences of each order. Parameters may be chosen adaptively."""

    orders: tuple[float, ...]
    kind: ClassVar[str] = "filter"

    @classmethod
    def open(cls, epsilon: float, delta: float) -> Self:
        """Return the budget of a Renyi filter."""
        gate = accounting.RenyiFilter(check_positive(epsilon, "epsilon"), check_delta(delta))
        return cls(gate.epsilon, gate.delta, tuple(map(round_units_down, gate.budgets)), gate.orders)

    def price(self, charge: Charge) -> Amounts:
        totals: Amounts = self.zero
        for text, times in charge:
            price = tuple(None if a is None else a * times for a in _price_once(text, self.orders))
            totals = add_amounts(totals, price)
        return totals

    def allows(self, totals: Amounts) -> bool:
        return any(total is not None and total <= limit for total, limit in zip(totals, self.limits, strict=True))

    def spent(self, totals: Amounts) -> Fraction | None:
        # The used share of the order that has most left: a progress figure, not a guarantee.
        shares = [
            Fraction(total, limit)
            for total, limit in zip(totals, self.limits, strict=True)
            if total is not None and limit > 0
        ]
        return min(shares) * to_exact_decimal(self.epsilon) if shares else None

    def holds(self, part: Self) -> bool:
        return part.epsilon <= self.epsilon and part.delta <= self.delta


@dataclass(frozen=True)
class GaussianBudget(FilterBudget):
    """A Gaussian filter: the sum of 1 / multiplier^2 of unsampled noise, without orders. Chosen adaptively, too."""

    kind: ClassVar[str] = "gaussian"
    releases: ClassVar[Releases] = "gaussian"

    @classmethod
    def open(cls, epsilon: float, delta: float) -> Self:
        """Return the budget of a Gaussian filter."""
        gate = accounting.GaussianFilter(epsilon, delta)
        return cls(float(epsilon), float(delta), (round_units_down(gate.limit),), gate.orders)


@lru_cache(maxsize=4096)
def _price_once(text: str, orders: tuple[float, ...]) -> Amounts:
    event = parse_event(text)
    try:
        if not orders:
            return (round_units_up(accounting.sum_inverse_squares(((event, 1),))),)
        return tuple(map(round_units_up, map(float, accounting.RdpAccountant(orders=orders).compose(event).rdp)))
    except dp.UnsupportedEventError as unknown:
        reason = f"no Renyi divergence is known for {type(event).__name__}" if orders else str(unknown)
        raise UnpricedError(f"events: {reason}") from unknown


@dataclass(frozen=True)
class PlanBudget(Budget):
    """Mechanisms and counts fixed at opening, composed by privacy loss distributions; paid in any order."""

    plan: tuple[str, ...]
    kind: ClassVar[str] = "plan"

    @classmethod
    def open(cls, epsilon: float, delta: float, plan: Charge) -> Self:
        """Return the budget of a plan; the caller checks its cost."""
        epsilon, delta = check_positive(epsilon, "epsilon"), 0.0 if delta == 0 else check_delta(delta)
        return cls(epsilon, delta, tuple(times for _, times in plan), tuple(text for text, _ in plan))

    def price(self, charge: Charge) -> Amounts:
        counts: Counter[str] = Counter()
        for text, times in charge:
            counts[find_planned(text, self.plan)] += times
        return tuple(counts[text] for text in self.plan)

    def allows(self, totals: Amounts) -> bool:
        return all(total is not None and total <= limit for total, limit in zip(totals, self.limits, strict=True))

    def spent(self, totals: Amounts) -> Fraction | None:
        epsilon = find_pld_epsilon(self._charge(totals), self.delta)
        return None if math.isinf(epsilon) else to_exact_decimal(epsilon)

    def shortage(self, totals: Amounts, price: Amounts) -> str:
        parts = [
            f"{parse_event(text)}: planned {limit}, taken {total}, this takes {count}, left {limit - total}"
            for text, limit, total, count in zip(self.plan, self.limits, totals, price, strict=True)
            if total is not None and count is not None and count and total + count > limit
        ]
        return "; ".join(parts)

    def count_left(self, totals: Amounts, charge: Charge) -> int:
        """Return how often the rest of the plan pays for a charge."""
        try:
            rest = zip(self.limits, totals, self.price(charge), strict=True)
        except UnpricedError:
            return 0
        return min((limit - (total or 0)) // count for limit, total, count in rest if count)

    def left(self, totals: Amounts) -> Charge:
        """Return the rest of the plan."""
        rest = tuple(limit - (total or 0) for limit, total in zip(self.limits, totals, strict=True))
        return self._charge(rest)

    def holds(self, part: Self) -> bool:
        planned = dict(zip(self.plan, self.limits, strict=True))
        return all(times <= planned.get(text, 0) for text, times in zip(part.plan, part.limits, strict=True))

    def _charge(self, totals: Sequence[int | None]) -> Charge:
        return tuple((text, count) for text, count in zip(self.plan, totals, strict=True) if count)


@lru_cache(maxsize=4096)
def find_planned(text: str, plan: tuple[str, ...]) -> str:
    """Return the mechanism of a plan that pays for an event, or raise UnpricedError.

    A message that names one of k sets is paid by the same one, or by one of equal epsilon that costs no less: with
    fewer sets, or any pure mechanism (``docs/theory/ledger.md``, Theorem 1).
    """
    event, payers = parse_event(text), []
    for other in plan if isinstance(event, privacy_events.NamedSets) and text not in plan else ():
        payer = parse_event(other)
        n_sets = 2 if type(payer) is privacy_events.PureDp else 0
        if isinstance(payer, privacy_events.NamedSets) and payer.size == event.size == 1:
            n_sets = payer.n_sets
        if 2 <= n_sets <= event.n_sets and payer.epsilon == event.epsilon:
            payers.append((n_sets, other))
    if not payers and text not in plan:
        raise UnpricedError(f"events: not in the plan: {event}")
    return max(payers)[1] if payers else text


@lru_cache(maxsize=256)
def find_pld_epsilon(charge: Charge, delta: float) -> float:
    """Return the epsilon of a fixed set of mechanisms at `delta`: by PLD, or the sum if delta is 0."""
    if delta == 0:
        exact = [(accounting.find_pure_epsilon(event, to_exact_decimal), times) for event, times in read_charge(charge)]
        total = sum((epsilon * times for epsilon, times in exact if epsilon), Fraction(0))
        return math.inf if any(epsilon is None for epsilon, _ in exact) else round_float_up(total)
    try:
        return accounting.PldAccountant(read_charge(charge)).epsilon(delta)
    except dp.UnsupportedEventError as unknown:
        raise UnpricedError(f"events: no privacy loss distribution is known for one of them ({unknown})") from unknown


def find_alone_epsilon(charge: Charge, delta: float) -> float:
    """Return the epsilon of a charge by itself at `delta`: by PLD, else by RDP, else infinity."""
    with suppress(UnpricedError):
        return find_pld_epsilon(charge, delta)
    return find_epsilon(read_charge(charge), delta)


@lru_cache(maxsize=1024)
def parse_budget(terms: str) -> Budget:
    """Parse a text of :meth:`Budget.terms`."""
    fields = json.loads(terms)
    limits = tuple(map(int, fields["limits"]))
    if fields["kind"] == "pure":
        return PureBudget(fields["epsilon"], 0.0, limits)
    common = fields["epsilon"], fields["delta"], limits
    if fields["kind"] in ("filter", "gaussian"):
        kind = FilterBudget if fields["kind"] == "filter" else GaussianBudget
        return kind(*common, tuple(fields["orders"]))
    return PlanBudget(*common, tuple(fields["plan"]))


def open_budget(
    epsilon: float, delta: float, plan: Events | None, relation: Relation, releases: Releases = "any"
) -> Budget:
    """Return the budget of an account: a plan, a filter, or pure epsilons."""
    check_choice(releases, "releases", Releases)
    if releases == "gaussian":
        if plan is not None:
            raise ValueError('releases must be "any" with a plan: a plan limits its releases already')
        return GaussianBudget.open(epsilon, delta)
    if plan is not None:
        return PlanBudget.open(epsilon, delta, make_charge(plan, relation))
    return PureBudget.open(epsilon) if delta == 0 else FilterBudget.open(epsilon, delta)


def count_affordable(budget: Budget, event: DpEvent) -> int:
    """Return how many equal releases a budget without a plan pays for, if it pays for these alone."""
    prices = budget.price(make_charge(event, "add-remove"))
    return max([limit // price for limit, price in zip(budget.limits, prices, strict=True) if price] + [0])


def find_plan_cost(budget: Budget) -> float | None:
    """Return the cost of a plan at its delta, by PLD; None without a plan."""
    if not isinstance(budget, PlanBudget):
        return None
    try:
        return find_pld_epsilon(tuple(zip(budget.plan, budget.limits, strict=True)), budget.delta)
    except UnpricedError as refused:
        raise ValueError(f"plan cannot be composed: {refused}") from refused
