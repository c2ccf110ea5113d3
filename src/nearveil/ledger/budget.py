"""Budgets as pure machines (terms that never change, totals that only grow), and events as canonical text.

Why each kind is sound: ``docs/theory/ledger.md``, Theorems 1 to 3; attacked by ``tests/ledger/test_budget.py``.
"""

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeAlias

import dp_accounting as dp
from dp_accounting import DpEvent, UnsupportedEventError

from nearveil.privacy import Guarantee
from nearveil.privacy import events as own
from nearveil.privacy.accounting import Accountant, PldAccountant, RdpAccountant, RenyiFilter
from nearveil.privacy.checks import check_budget, check_count, check_delta, check_finite
from nearveil.privacy.events import PureDp, SampledScreening, split_event
from nearveil.privacy.guarantee import Protects, Relation, count_events, needs_add_remove

Events: TypeAlias = DpEvent | Iterable[DpEvent | tuple[DpEvent, int]]
"""One event, or several, each perhaps with how often it happens."""

Charge: TypeAlias = tuple[tuple[str, int], ...]
"""The canonical text of each single mechanism and how often it happens, sorted by the text."""

_MOST = 2**63 - 1
_SHARE, _LEAST_SHARE = 1e-5, 1e-20  # of an account's delta, that samplers may cost with one mechanism; at least


def canonical_json(value: object) -> str:
    """Return the one JSON text of a value: sorted, without spaces, floats to the last bit, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _read_float(value: Any) -> float:
    return check_finite(value, "events: a parameter")


def _read_whole(value: Any) -> int:
    return check_count(value, "events: a count")


def _read_event(value: Any) -> DpEvent | dict[str, Any]:
    return _decode(value) if isinstance(value, dict) else _encode(value)


def _read_events(value: Any) -> list[Any]:
    return [_read_event(one) for one in value]


# What each field is. The same function reads a field and writes it: floats and counts are themselves in JSON, an
# event becomes a dictionary and a dictionary an event.
_FIELDS: dict[type[DpEvent], dict[str, Callable[[Any], Any]]] = {
    dp.NoOpDpEvent: {},
    dp.NonPrivateDpEvent: {},
    dp.GaussianDpEvent: {"noise_multiplier": _read_float},
    dp.LaplaceDpEvent: {"noise_multiplier": _read_float},
    dp.RandomizedResponseDpEvent: {"noise_parameter": _read_float, "num_buckets": _read_whole},
    dp.ZCDpEvent: {"rho": _read_float, "xi": _read_float},
    dp.dp_event.RepeatAndSelectDpEvent: {"event": _read_event, "mean": _read_float, "shape": _read_float},
    dp.PoissonSampledDpEvent: {"sampling_probability": _read_float, "event": _read_event},
    dp.SelfComposedDpEvent: {"event": _read_event, "count": _read_whole},
    dp.ComposedDpEvent: {"events": _read_events},
    own.PureDp: {"epsilon": _read_float},
    own.NoisyScreening: {"noise": _read_float, "threshold": _read_float, "n_neighbors": _read_whole},
    own.VoteHistogram: {"noise": _read_float},
    own.ClippedVotes: {"noise": _read_float, "clip": _read_float, "votes": str},
    own.GaussianNoisyMax: {"noise": _read_float},
    own.LaplaceNoisyMax: {"noise": _read_float},
    SampledScreening: {"sampling_rate": _read_float, "screening": _read_event},
}
_TYPES: Mapping[str, type[DpEvent]] = {kind.__name__: kind for kind in _FIELDS}


def _encode(event: DpEvent) -> dict[str, Any]:
    fields = _FIELDS.get(type(event))
    if fields is None:
        raise ValueError(f"events: the ledger has no text for {type(event).__name__}; use one that accountants price")
    return {"type": type(event).__name__} | {name: write(getattr(event, name)) for name, write in fields.items()}


def _decode(value: Mapping[str, Any]) -> DpEvent:
    kind = _TYPES.get(value.get("type", ""))
    if kind is None or set(value) != {"type", *_FIELDS[kind]}:
        raise ValueError("events: this text is of no event that is known here")
    return kind(**{name: read(value[name]) for name, read in _FIELDS[kind].items()})


def format_event(event: DpEvent) -> str:
    """Return the canonical text of an event."""
    return canonical_json(_encode(event))


def parse_event(text: str) -> DpEvent:
    """Return the event of a canonical text."""
    return _decode(json.loads(text))


def make_charge(events: Events, relation: Relation) -> Charge:
    """Return the mechanisms of `events`, equal ones counted together; raise if they are priced for another relation."""
    counts: Counter[str] = Counter()
    for event, times in _pairs(events):
        if relation == "replace" and needs_add_remove(event):
            raise ValueError(
                "events: sampling, votes and screenings are priced for one record more or less; "
                'this account is "replace"'
            )
        for leaf, repeats in split_event(event, times):
            if repeats:
                counts[format_event(leaf)] += repeats
    if not counts:
        raise ValueError("events must hold at least one mechanism that happens at least once")
    return _check_counts(counts)


def repeat_charge(charge: Charge, times: int) -> Charge:
    """Return a charge that happens several times."""
    return _check_counts({text: count * times for text, count in charge})


def join_charges(charges: Iterable[Charge]) -> Charge:
    """Return several charges as one."""
    counts: Counter[str] = Counter()
    for charge in charges:
        counts.update(dict(charge))
    return _check_counts(counts)


def _check_counts(counts: Mapping[str, int]) -> Charge:
    if any(count > _MOST for count in counts.values()):
        raise ValueError("events: a count is larger than any ledger holds")
    return tuple(sorted(counts.items()))


def charge_guarantee(guarantee: Guarantee, protects: Protects, unit: str, relation: Relation, delta: float) -> Charge:
    """Return what a guarantee costs an account, of which the other four are, after checking that they agree."""
    if not isinstance(guarantee, Guarantee):
        raise TypeError(
            "guarantee must be a Guarantee: the ledger pays for nothing else. Mechanisms have one (release.guarantee); "
            "nearveil.privacy.compose_events makes one of events of your own"
        )
    if not guarantee.sound:
        raise ValueError("guarantee is not sound, so no budget covers it")
    if guarantee.is_vacuous:
        raise ValueError(
            "guarantee: it guarantees nothing (epsilon is infinite, or delta 1), so nobody checked its events"
        )
    if guarantee.protects != protects:
        raise ValueError(f"guarantee protects a {guarantee.protects}, this account a {protects}")
    # Every message is charged, whatever it asks for: an account of queries covers any unit. Of a database it does not:
    # a person with ten rows is in each answer ten times.
    if protects == "database" and guarantee.unit != unit:
        raise ValueError(f"guarantee is about the unit {guarantee.unit!r}, this account about {unit!r}")
    if guarantee.relation != relation:
        raise ValueError(f'guarantee is for "{guarantee.relation}", this account for "{relation}"')
    return _charge_events(guarantee, relation, delta)


@lru_cache(maxsize=256)
def _charge_events(guarantee: Guarantee, relation: Relation, delta: float) -> Charge:
    """Return the charge of a guarantee that an account covers: computed once, for all messages that it is made for."""
    whole = guarantee if guarantee.whole is None else guarantee.whole
    check_samplers(whole.events, whole.extra_delta, delta)
    return make_charge(guarantee.events, relation)


def check_samplers(events: Iterable[DpEvent], extra_delta: float, delta: float) -> None:
    """Refuse events whose samplers (`extra_delta`) add more to an account's delta than docs/theory/ledger.md allows."""
    mechanisms = sum(times for _, times in count_events(events))
    if extra_delta > mechanisms * max(_SHARE * delta, _LEAST_SHARE):
        raise ValueError(
            f"guarantee: extra_delta is above {_SHARE:g} of this account's delta for each mechanism, and no event "
            "tells of it; open an account with a larger delta, or for screenings with a smaller epsilon"
        )


def _pairs(events: Events) -> list[tuple[DpEvent, int]]:
    if not isinstance(events, DpEvent | Iterable):
        raise ValueError("events must be a DpEvent, or a list of DpEvent or of (DpEvent, count)")
    parts = [events] if isinstance(events, DpEvent) else list(events)
    pairs = [part if isinstance(part, tuple) and len(part) == 2 else (part, 1) for part in parts]
    if not all(isinstance(event, DpEvent) for event, _ in pairs):
        raise ValueError("events must be a DpEvent, or a list of DpEvent or of (DpEvent, count)")
    return [(event, check_count(times, "events: a count", least=1)) for event, times in pairs]


def read_charge(charge: Charge) -> tuple[tuple[DpEvent, int], ...]:
    """Return a charge as events with counts."""
    return tuple((parse_event(text), times) for text, times in charge)


UNITS = 10**18
"""How many units an epsilon, or a divergence, of 1 has."""

Amounts = tuple[int | None, ...]
"""One amount for each thing that a budget counts; None is infinity."""


def to_exact_decimal(number: float) -> Fraction:
    """Return the decimal number that a float is written as: 0.1 is one tenth, and ten of them are 1."""
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
    """Return the least float that is written as a number not below this one."""
    nearest = float(number)
    return nearest if to_exact_decimal(nearest) >= number else math.nextafter(nearest, math.inf)


def round_float_down(number: Fraction) -> float:
    """Return the largest float that is written as a number not above this one."""
    return -round_float_up(-number)


def format_up(number: float, digits: int = 4, rounding: str = ROUND_CEILING) -> str:
    """Write what was spent, rounded up."""
    if math.isinf(number):
        return "infinity"
    return f"{float(Context(prec=digits, rounding=rounding).plus(Decimal(repr(float(number))))):.12g}"


def format_down(number: float) -> str:
    """Write what is left, rounded down."""
    return format_up(number, rounding=ROUND_FLOOR)


class UnpricedError(ValueError):
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
    def holds(self, part: Self) -> bool:
        """Return whether another budget of the kind is a part of this one."""

    def shortage(self, totals: Amounts, price: Amounts) -> str:  # noqa: ARG002
        """Say in figures why a price cannot be paid, or nothing where epsilons say it all."""
        return ""

    def terms(self) -> str:
        """Return the canonical text of everything but the totals."""
        return canonical_json({"kind": self.kind, **vars(self)})

    def contains(self, part: "Budget") -> bool:
        """Return whether another budget is of this kind and a part of this one."""
        return isinstance(part, type(self)) and self.holds(part)


def add_amounts(totals: Amounts, price: Amounts) -> Amounts:
    """Return totals after a price was paid."""
    return tuple(None if a is None or b is None else a + b for a, b in zip(totals, price, strict=True))


@dataclass(frozen=True)
class PureBudget(Budget):
    """Epsilons of pure mechanisms, added up; delta is 0. Parameters may be chosen along the way."""

    kind: ClassVar[str] = "pure"

    @classmethod
    def open(cls, epsilon: float) -> Self:
        """Return a budget of pure epsilons."""
        return cls(check_budget(epsilon), 0.0, (round_units_down(to_exact_decimal(epsilon)),))

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
    exact = find_exact_epsilon(parse_event(text))
    if exact is None:
        raise UnpricedError(
            f"events: {type(parse_event(text)).__name__} is not pure, and this account has delta 0; "
            "open one with a delta, or with a plan"
        )
    return round_units_up(exact) or 0


def find_exact_epsilon(leaf: DpEvent) -> Fraction | None:
    """Return the epsilon of a pure mechanism as the decimals say it, else None."""
    if isinstance(leaf, PureDp):
        return to_exact_decimal(leaf.epsilon)
    if isinstance(leaf, dp.LaplaceDpEvent):
        return 1 / to_exact_decimal(leaf.noise_multiplier)
    return None


@dataclass(frozen=True)
class FilterBudget(Budget):
    """A Renyi filter: divergences of each order added up, parameters chosen along the way."""

    orders: tuple[float, ...]
    kind: ClassVar[str] = "filter"

    @classmethod
    def open(cls, epsilon: float, delta: float) -> Self:
        """Return the budget of a Renyi filter."""
        gate = RenyiFilter(check_budget(epsilon), check_delta(delta))
        return cls(gate.epsilon, gate.delta, tuple(map(round_units_down, gate.budgets)), gate.orders)

    def price(self, charge: Charge) -> Amounts:
        totals: Amounts = self.nothing
        for text, times in charge:
            price = tuple(None if a is None else a * times for a in _price_renyi(text, self.orders))
            totals = add_amounts(totals, price)
        return totals

    def allows(self, totals: Amounts) -> bool:
        return any(total is not None and total <= limit for total, limit in zip(totals, self.limits, strict=True))

    def spent(self, totals: Amounts) -> Fraction | None:
        # The share of its budget that the order with most left has used. It is no guarantee, only the way to the end.
        shares = [
            Fraction(total, limit)
            for total, limit in zip(totals, self.limits, strict=True)
            if total is not None and limit > 0
        ]
        return min(shares) * to_exact_decimal(self.epsilon) if shares else None

    def holds(self, part: Self) -> bool:
        return part.epsilon <= self.epsilon and part.delta <= self.delta


@lru_cache(maxsize=4096)
def _price_renyi(text: str, orders: tuple[float, ...]) -> Amounts:
    try:
        return tuple(map(round_units_up, map(float, RdpAccountant(orders=orders).compose(parse_event(text)).rdp)))
    except UnsupportedEventError as unknown:
        raise UnpricedError(f"events: no Renyi divergence is known for {type(parse_event(text)).__name__}") from unknown


@dataclass(frozen=True)
class PlanBudget(Budget):
    """Mechanisms and counts fixed at opening, composed by privacy loss distributions; taken in any order."""

    plan: tuple[str, ...]
    kind: ClassVar[str] = "plan"

    @classmethod
    def open(cls, epsilon: float, delta: float, plan: Charge) -> Self:
        """Return the budget of a plan; its cost is for the caller to check."""
        delta = 0.0 if delta == 0 else check_delta(delta)
        return cls(check_budget(epsilon), delta, tuple(times for _, times in plan), tuple(text for text, _ in plan))

    def price(self, charge: Charge) -> Amounts:
        asked = dict(charge)
        strangers = [text for text in asked if text not in self.plan]
        if strangers:
            raise UnpricedError(f"events: not in the plan, of which 0 may be taken: {parse_event(strangers[0])}")
        return tuple(asked.get(text, 0) for text in self.plan)

    def allows(self, totals: Amounts) -> bool:
        return all(total is not None and total <= limit for total, limit in zip(totals, self.limits, strict=True))

    def spent(self, totals: Amounts) -> Fraction | None:
        epsilon = find_pld_epsilon(self._charge(totals), self.delta)
        return None if math.isinf(epsilon) else to_exact_decimal(epsilon)

    def shortage(self, totals: Amounts, price: Amounts) -> str:
        parts = [
            f"{parse_event(text)}: planned {limit}, taken {taken}, this takes {asked}, left {limit - taken}"
            for text, limit, taken, asked in zip(self.plan, self.limits, totals, price, strict=True)
            if taken is not None and asked is not None and asked and taken + asked > limit
        ]
        return "; ".join(parts)

    def left(self, totals: Amounts) -> Charge:
        """Return what may still be taken."""
        gone = tuple(limit - (taken or 0) for limit, taken in zip(self.limits, totals, strict=True))
        return self._charge(gone)

    def holds(self, part: Self) -> bool:
        planned = dict(zip(self.plan, self.limits, strict=True))
        return all(times <= planned.get(text, 0) for text, times in zip(part.plan, part.limits, strict=True))

    def _charge(self, totals: Sequence[int | None]) -> Charge:
        return tuple((text, taken) for text, taken in zip(self.plan, totals, strict=True) if taken)


@lru_cache(maxsize=256)
def find_pld_epsilon(charge: Charge, delta: float) -> float:
    """Return the epsilon of mechanisms fixed beforehand at `delta`: by PLD, or added up where delta is 0."""
    if delta == 0:
        exact = [(find_exact_epsilon(event), times) for event, times in read_charge(charge)]
        total = sum((epsilon * times for epsilon, times in exact if epsilon), Fraction(0))
        return math.inf if any(epsilon is None for epsilon, _ in exact) else round_float_up(total)
    try:
        return _compose(PldAccountant(), charge).epsilon(delta)
    except UnsupportedEventError as unknown:
        raise UnpricedError(f"events: no privacy loss distribution is known for one of them ({unknown})") from unknown


def find_alone_epsilon(charge: Charge, delta: float) -> float:
    """Return what a charge costs by itself at `delta`: by PLD, else by RDP, else infinity: nobody knows."""
    with suppress(UnpricedError):
        return find_pld_epsilon(charge, delta)
    with suppress(UnsupportedEventError):
        return _compose(RdpAccountant(), charge).epsilon(delta)
    return math.inf


def _compose(accountant: Accountant, charge: Charge) -> Accountant:
    for event, times in read_charge(charge):
        accountant.compose(event, times)
    return accountant


@lru_cache(maxsize=1024)
def parse_budget(terms: str) -> Budget:
    """Return the budget that a text of :meth:`Budget.terms` tells of."""
    fields = json.loads(terms)
    limits = tuple(map(int, fields["limits"]))
    if fields["kind"] == "pure":
        return PureBudget(fields["epsilon"], 0.0, limits)
    common = fields["epsilon"], fields["delta"], limits
    if fields["kind"] == "filter":
        return FilterBudget(*common, tuple(fields["orders"]))
    return PlanBudget(*common, tuple(fields["plan"]))
