"""What events cost: one cached answer for whoever states a guarantee and for the guarantee that checks it."""

import math
from collections.abc import Iterable
from functools import lru_cache

import attr
import dp_accounting as dp
from dp_accounting import DpEvent, UnsupportedEventError

from nearveil.privacy._accounting_accountants import Accountant, PldAccountant, RdpAccountant, Spent, pure_total
from nearveil.privacy._accounting_budget import RenyiFilter
from nearveil.privacy._accounting_leaves import SampledScreening, leaves
from nearveil.privacy._noise_calibration import EPSILONS, gaussian_delta

ROUNDING = 2.0**-40
"""By how much of itself an epsilon or a delta may lie below what its events cost: the rounding of doubles."""

_FINEST, _COARSEST = 5e-5, 0.1  # intervals of privacy loss distributions
_POINTS = 4e4  # of a distribution, about


def freeze_event(event: DpEvent) -> DpEvent:
    """Return an event that nobody can change: lists inside it become tuples."""
    fields = attr.fields(type(event)) if attr.has(type(event)) else ()
    parts = {field.name: getattr(event, field.name) for field in fields}
    frozen = {name: _freeze(value) for name, value in parts.items() if isinstance(value, DpEvent | list | tuple)}
    return attr.evolve(event, **frozen) if frozen else event


def _freeze(value: object) -> object:
    return freeze_event(value) if isinstance(value, DpEvent) else tuple(map(_freeze, value))  # type: ignore[call-overload]


def count_events(events: Iterable[DpEvent]) -> Spent:
    """Return the single mechanisms of events, and how often each runs; equal ones are counted together."""
    counts: dict[DpEvent, int] = {}
    for event in events:
        for leaf, times in leaves(event):
            counts[leaf] = counts.get(leaf, 0) + times
    return tuple((leaf, times) for leaf, times in counts.items() if times)


def find_epsilon(spent: Spent, delta: float) -> float:
    """Return the least epsilon that an accountant finds, for parameters that are fixed beforehand.

    Parameters
    ----------
    spent : tuple of (DpEvent, int)
        From :func:`count_events`.
    delta : float
        From 0 to 1; at 0 the epsilons of pure mechanisms are added up.

    Returns
    -------
    float
        Infinity where nothing is known.
    """
    if delta <= 0:
        return pure_total(spent)
    accountant = find_accountant(spent)
    return math.inf if accountant is None else accountant.epsilon(delta)


def find_accountant(spent: Spent) -> Accountant | None:
    """Return an accountant of the events: by PLD, else by RDP, else none. It is kept: nobody composes anything on top.

    The grid of the PLD grows with the cost of noise and screenings: coarser is safe, and quick.
    """
    return _accountant(spent, _interval(spent))


def _interval(spent: Spent) -> float:
    square = sum(times * _square(leaf) for leaf, times in spent)
    wide = (square / 2 + 4 * math.sqrt(square)) / _POINTS if math.isfinite(square) else _FINEST
    return min(max(_FINEST, wide), _COARSEST)


@lru_cache(maxsize=32)
def _accountant(spent: Spent, interval: float) -> Accountant | None:
    for accountant in (PldAccountant(interval=interval), RdpAccountant()):
        try:
            for leaf, times in spent:
                accountant.compose(leaf, times)
        except UnsupportedEventError:
            continue
        return accountant
    return None


@lru_cache(maxsize=1024)
def costs_at_most(spent: Spent, epsilon: float, delta: float) -> bool:
    """Return whether an accountant confirms that events, their parameters fixed beforehand, cost (epsilon, delta).

    Pure mechanisms by addition where that is enough, Gaussian ones in closed form, which is exact; else as
    :func:`find_epsilon`, and on the finest grid where the coarse one does not confirm it.
    """
    if pure_total(spent) <= epsilon * (1 + ROUNDING):
        return True
    if delta <= 0:
        return False
    if all(isinstance(leaf, dp.GaussianDpEvent) for leaf, _ in spent) and EPSILONS[0] <= epsilon <= EPSILONS[1]:
        # Gaussian mechanisms compose to one with less noise, exactly.
        multiplier = sum(times * _square(leaf) for leaf, times in spent) ** -0.5
        return gaussian_delta(multiplier, epsilon) <= delta * (1 + ROUNDING)
    accountants = (_accountant(spent, interval) for interval in sorted({_interval(spent), _FINEST}, reverse=True))
    return any(one is not None and one.epsilon(delta) <= epsilon * (1 + ROUNDING) for one in accountants)


@lru_cache(maxsize=1024)
def passes_filter(spent: Spent, epsilon: float, delta: float, orders: tuple[float, ...]) -> bool:
    """Return whether a filter lets all events pass: a Renyi filter, or without orders one that adds pure epsilons."""
    if not orders:
        return pure_total(spent) <= epsilon * (1 + ROUNDING)
    gate = RenyiFilter(epsilon, delta, orders)
    return gate.may_spend(dp.ComposedDpEvent([dp.SelfComposedDpEvent(leaf, times) for leaf, times in spent]))


def _square(leaf: DpEvent) -> float:
    """Return about the variance of the privacy loss of noise or a screening; infinity for others."""
    if isinstance(leaf, dp.PoissonSampledDpEvent):
        return _square(leaf.event) * float(leaf.sampling_probability) ** 2
    if isinstance(leaf, SampledScreening):
        return (leaf.sampling_rate / leaf.screening.noise) ** 2
    noisy = isinstance(leaf, dp.GaussianDpEvent | dp.LaplaceDpEvent)
    return float(leaf.noise_multiplier) ** -2 if noisy else math.inf
