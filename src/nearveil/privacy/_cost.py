"""What events cost: one cached answer for whoever states a guarantee and for the guarantee that checks it."""

import math
from collections.abc import Iterable
from functools import lru_cache

import attr
import dp_accounting as dp
from dp_accounting import DpEvent, UnsupportedEventError

from nearveil.privacy._accounting_accountants import PldAccountant, RdpAccountant, Spent, pure_total
from nearveil.privacy._accounting_budget import RenyiFilter
from nearveil.privacy._accounting_leaves import leaves

ROUNDING = 2.0**-40
"""By how much of itself an epsilon may lie below what its events cost: the rounding of doubles."""


def freeze_event(event: DpEvent) -> DpEvent:
    """Return an event that is checked again and that nobody can change: lists inside it become tuples."""
    fields = attr.fields(type(event)) if attr.has(type(event)) else ()
    parts = {field.name: getattr(event, field.name) for field in fields}
    frozen = {name: _freeze(value) for name, value in parts.items() if isinstance(value, DpEvent | list | tuple)}
    return attr.evolve(event, **frozen) if fields else event


def _freeze(value: object) -> object:
    return freeze_event(value) if isinstance(value, DpEvent) else tuple(map(_freeze, value))  # type: ignore[call-overload]


def count_events(events: Iterable[DpEvent]) -> Spent:
    """Return the single mechanisms of events, and how often each runs; equal ones are counted together."""
    counts: dict[DpEvent, int] = {}
    for event in events:
        for leaf, times in leaves(event):
            counts[leaf] = counts.get(leaf, 0) + times
    return tuple((leaf, times) for leaf, times in counts.items() if times)


@lru_cache(maxsize=1024)
def find_epsilon(spent: Spent, delta: float) -> float:
    """Return the least epsilon that an accountant finds, for parameters that are fixed beforehand.

    `spent`: From :func:`count_events`.
    `delta`: From 0 to 1; at 0 the epsilons of pure mechanisms are added up.
    Returns: Infinity where nothing is known.
    """
    if delta <= 0:
        return pure_total(spent)
    for accountant in (PldAccountant(spent), RdpAccountant(spent)):
        try:
            return accountant.epsilon(delta)
        except UnsupportedEventError:
            continue
    return math.inf


def costs_at_most(spent: Spent, epsilon: float, delta: float) -> bool:
    """Return whether an accountant confirms that events, their parameters fixed beforehand, cost (epsilon, delta)."""
    allowed = epsilon * (1 + ROUNDING)
    return pure_total(spent) <= allowed or find_epsilon(spent, delta) <= allowed


@lru_cache(maxsize=1024)
def passes_filter(spent: Spent, epsilon: float, delta: float, orders: tuple[float, ...]) -> bool:
    """Return whether a filter lets all events pass: a Renyi filter, or without orders one that adds pure epsilons."""
    if not orders:
        return pure_total(spent) <= epsilon * (1 + ROUNDING)
    gate = RenyiFilter(epsilon, delta, orders)
    return gate.may_spend(dp.ComposedDpEvent([dp.SelfComposedDpEvent(leaf, times) for leaf, times in spent]))
