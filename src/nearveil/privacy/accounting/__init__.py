"""Accountants with one interface: the joint cost of events.

* :class:`RdpAccountant`: adds Renyi divergences and converts them to (epsilon, delta);
* :class:`PldAccountant`: privacy loss distributions are convolved, screenings by Bellman's equation; the tightest;
* :class:`AdditionAccountant`: basic composition, for comparison;
* :class:`RenyiFilter`: a budget for mechanisms that are chosen after seeing earlier answers;
* :class:`GaussianFilter`: the same for unsampled Gaussian noise alone; it allows more;
* :func:`calibrate`: the least noise, or the largest count, for a budget.

The first three take mechanisms with parameters *fixed in advance*; queries may depend on earlier answers. If noise or
number depend on earlier answers too, only a filter's guarantee holds. Filters by privacy loss distributions are invalid
in general (arXiv 2602.15815, 2602.06756), so PLD prices fixed plans only. An event is priced for the relation of its
sensitivity; Poisson sampling and votes mean "add or remove one record". Proofs: ``docs/theory/accounting.md``.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from nearveil.errors import BudgetExceededError
from nearveil.lazy import require_extra
from nearveil.privacy import checks
from nearveil.privacy.events import PureDp, SampledScreening, find_noise_multiplier, split_event
from nearveil.privacy.noise import analytic_gaussian_scale

with require_extra("budget"):
    import dp_accounting as dp
    from dp_accounting import DpEvent, UnsupportedEventError
    from dp_accounting import rdp as dp_rdp

    from nearveil.privacy.accounting import _loss
    from nearveil.privacy.accounting.binary import compute_screening_rdp, screening_curve

__all__ = [
    "Accountant",
    "AdditionAccountant",
    "BudgetExceededError",
    "GaussianFilter",
    "PldAccountant",
    "RdpAccountant",
    "RenyiFilter",
    "calibrate",
    "screening_curve",
]

Spent = tuple[tuple[DpEvent, int], ...]
Conversion = Literal["tight", "classic"]

_LIBRARY_ORDERS = dp_rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS  # sparse from 63 to 128 and on to 1024
DEFAULT_ORDERS: tuple[float, ...] = tuple(
    sorted({*map(float, _LIBRARY_ORDERS), *map(float, range(64, 128, 4)), *map(float, range(144, 512, 32))})
)
FILTER_ORDERS: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
LIBRARY_ROUNDING = 2.0**-47  # of one divergence that dp-accounting computes


def find_pure_epsilon(leaf: DpEvent, read: Callable[[float], Fraction] = Fraction) -> Fraction | None:
    """Return the epsilon of a mechanism that has one at delta 0, else None; `read` makes parameters exact."""
    if isinstance(leaf, PureDp):
        return read(leaf.epsilon)
    return 1 / read(leaf.noise_multiplier) if isinstance(leaf, dp.LaplaceDpEvent) else None


def sum_pure_epsilons(spent: Spent) -> float:
    """Return the sum of all pure epsilons, rounded up; infinity if a mechanism has none."""
    total = Fraction(0)
    for leaf, times in spent:
        epsilon = find_pure_epsilon(leaf)
        if epsilon is None:
            return math.inf
        total += epsilon * times
    if total > sys.float_info.max:
        return math.inf
    nearest = float(total)
    return nearest if Fraction(nearest) >= total else math.nextafter(nearest, math.inf)


def sum_inverse_squares(spent: Spent) -> Fraction:
    """Return the exact sum of 1 / multiplier^2 of unsampled Gaussian noise; raise UnsupportedEventError for others."""
    total = Fraction(0)
    for leaf, times in spent:
        multiplier = find_noise_multiplier(leaf)
        if multiplier is None:
            raise UnsupportedEventError(f"{type(leaf).__name__} is not Gaussian noise without sampling")
        total += times / Fraction(multiplier) ** 2
    return total


@dataclass
class Accountant(ABC):
    """Base of all accountants.

    As in dp-accounting, `compose` changes the accountant and returns it, so that a caller who ignores the result still
    counts the event. `spent` holds the mechanisms composed so far, each with its number of runs.

    Examples
    --------
    >>> from nearveil.privacy.events import PureDp
    >>> accountants = [kind().compose(PureDp(0.5), 100) for kind in (RdpAccountant, PldAccountant, AdditionAccountant)]
    >>> [f"{accountant.epsilon(1e-5):.1f}" for accountant in accountants]
    ['32.8', '31.2', '50.0']
    """

    spent: Spent = ()

    def supports(self, event: DpEvent) -> bool:
        """Return whether the event can be priced: a dry run."""
        try:
            for leaf, _ in split_event(event):
                self._price(leaf)
        except UnsupportedEventError:
            return False
        return True

    def compose(self, event: DpEvent, count: int = 1) -> Self:
        """Count an event that happened `count` times, after a dry run; return this accountant."""
        if not self.supports(event):
            raise UnsupportedEventError(f"{type(self).__name__} cannot price {event}")
        # Count equal mechanisms together. Events may hold lists, so they cannot be hashed.
        kinds, counts = [leaf for leaf, _ in self.spent], [times for _, times in self.spent]
        for leaf, times in split_event(event, checks.check_count(count, "count")):
            if leaf in kinds:
                counts[kinds.index(leaf)] += times
            else:
                kinds.append(leaf)
                counts.append(times)
        self.spent = tuple((leaf, times) for leaf, times in zip(kinds, counts, strict=True) if times > 0)
        vars(self).pop("rdp", None)  # a cached property
        return self

    def copy(self) -> Self:
        """Return an independent accountant with the same events."""
        return replace(self)

    @abstractmethod
    def epsilon(self, delta: float) -> float:
        """Return an epsilon at which everything composed is (epsilon, delta)-DP, for a delta in (0, 1), or infinity."""

    @abstractmethod
    def delta(self, epsilon: float) -> float:
        """Return a delta at which everything composed is (epsilon, delta)-DP."""

    @abstractmethod
    def _price(self, leaf: DpEvent) -> object:
        """Price one mechanism, or raise UnsupportedEventError."""


@dataclass
class RdpAccountant(Accountant):
    """Renyi differential privacy: divergences of each order add up (``docs/theory/accounting.md``, Theorem 1).

    The `conversion` "classic" is the one that papers print, ``rdp + log(1/delta) / (order - 1)``, for comparison.

    Examples
    --------
    >>> from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    >>> from nearveil.privacy.events import VoteHistogram
    >>> published = RdpAccountant(conversion="classic")
    >>> mnist = published.compose(PoissonSampledDpEvent(0.15, GaussianDpEvent(75.0)), 1000)
    >>> mnist = mnist.compose(PoissonSampledDpEvent(0.15, VoteHistogram(25.0)), 735)
    >>> f"{mnist.epsilon(1e-5):.6f}"
    '1.178565'
    """

    orders: tuple[float, ...] = DEFAULT_ORDERS
    conversion: Conversion = "tight"

    def __post_init__(self) -> None:
        if not self.orders:
            raise ValueError("orders must contain at least one order")
        self.orders = tuple(checks.check_order(order, "orders") for order in self.orders)
        checks.check_choice(self.conversion, "conversion", Conversion)

    @cached_property
    def rdp(self) -> NDArray[np.float64]:
        """Total Renyi divergence at each of the orders, of shape (n_orders,)."""
        return np.asarray(sum((times * self._price(leaf) for leaf, times in self.spent), np.zeros(len(self.orders))))

    def epsilon(self, delta: float) -> float:
        checks.check_delta(delta)
        if not self.spent:
            return 0.0
        if self.conversion == "classic":
            return float(np.min(self.rdp - math.log(delta) / (np.array(self.orders) - 1)))
        return float(dp_rdp.rdp_privacy_accountant.compute_epsilon(self.orders, self.rdp, delta)[0])

    def delta(self, epsilon: float) -> float:
        checks.check_epsilon(epsilon)
        if not self.spent:
            return 0.0
        if self.conversion == "classic":
            exponents = (np.array(self.orders) - 1) * (self.rdp - epsilon)
            return float(np.min(np.exp(np.minimum(exponents, 0))))
        return float(min(dp_rdp.rdp_privacy_accountant.compute_delta(self.orders, self.rdp, epsilon)[0], 1.0))

    def _price(self, leaf: DpEvent) -> NDArray[np.float64]:
        relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
        match leaf:
            case PureDp():
                return compute_response_rdp(np.array(self.orders), leaf.epsilon, leaf.exposure)
            case SampledScreening():
                costs = [compute_screening_rdp(order, leaf.screening, leaf.sampling_rate) for order in self.orders]
                return np.array(costs)
            case dp.RandomizedResponseDpEvent():
                relation = dp.NeighboringRelation.REPLACE_ONE
        curve = dp_rdp.RdpAccountant(self.orders, relation).compose(leaf).rdp
        # The library reads a divergence that rounding made negative as perfect privacy. A value below its rounding,
        # about 1e-15, may come out as 0, so that much is added.
        return np.asarray(np.where(curve < 0, np.inf, curve + LIBRARY_ROUNDING))


def compute_response_rdp(orders: NDArray[np.float64], epsilon: float, exposure: float) -> NDArray[np.float64]:
    """Return the divergences of a release with loss +-epsilon or 0, from above (Theorem 10)."""
    steps = (orders - 1) * epsilon
    # log(1 + exposure (e^steps - 1) (1 - e^(-order epsilon))); beyond 700, where e^steps overflows, a hair above it.
    moments = np.log1p(exposure * np.expm1(np.minimum(steps, 700.0)) * -np.expm1(-orders * epsilon))
    divergences = (moments + np.maximum(steps - 700.0, 0.0)) / (orders - 1) * (1 + checks.ROUNDING)
    return np.asarray(np.minimum(divergences, epsilon))


class LossCurves(NamedTuple):
    """The curves for removing and for adding a record (one object if they are equal), and the number of runs."""

    remove: _loss.Curve
    add: _loss.Curve
    times: int


def make_loss_curves(leaf: DpEvent, times: int) -> LossCurves:
    """Return the curves of a mechanism that runs `times` times, or raise UnsupportedEventError."""
    curve: _loss.Curve = _loss.open_curve
    match leaf:
        case dp.NonPrivateDpEvent():
            pass
        case dp.GaussianDpEvent():
            curve = _loss.make_gaussian_curve(leaf.noise_multiplier)
        case dp.LaplaceDpEvent():
            curve = _loss.make_laplace_curve(leaf.noise_multiplier)
        case PureDp():
            curve = _loss.make_response_curve(leaf.epsilon, leaf.exposure)
        case dp.RandomizedResponseDpEvent():
            uniform, truthful = leaf.noise_parameter / leaf.num_buckets, 1 - leaf.noise_parameter
            if uniform > 0:
                curve = _loss.make_response_curve(math.log1p(truthful / uniform), truthful + uniform)
        case SampledScreening():
            screened = screening_curve(times, leaf.screening, sampling_rate=leaf.sampling_rate)
            return LossCurves(screened.reversed().excess_at, screened.excess_at, 1)
        case dp.PoissonSampledDpEvent(event=dp.GaussianDpEvent() | dp.LaplaceDpEvent()):
            remove = _loss.make_sampled_curve(make_loss_curves(leaf.event, 1).remove, leaf.sampling_probability)
            return LossCurves(remove, _loss.reverse_curve(remove), times)
        case _:
            raise UnsupportedEventError(f"no privacy loss is known for {leaf}")
    return LossCurves(curve, curve, times)


@dataclass
class PldAccountant(Accountant):
    """Privacy losses, convolved, with every rounding against the spender (``docs/theory/accounting.md``, Theorem 2).

    The tightest, and the default. If its grid is too coarse, :class:`RdpAccountant` gives a second bound; if all
    mechanisms are pure, their sum gives a third. The result is the least of these.

    Screenings have no worst pair: their exact adaptive composition enters as one mechanism, in any order (Theorem 5).

    Examples
    --------
    >>> from nearveil.privacy.events import PureDp
    >>> f"{PldAccountant().compose(PureDp(0.5), 500).epsilon(1e-5):.2f}"
    '105.81'
    """

    def epsilon(self, delta: float) -> float:
        checks.check_delta(delta)
        worst = max(_loss.find_loss_epsilon(parts, delta) for parts in self._directions())
        best = min(worst.value, sum_pure_epsilons(self.spent))
        return best if worst.tight else min(best, self._ask_rdp("epsilon", delta))

    def delta(self, epsilon: float) -> float:
        if checks.check_epsilon(epsilon) >= sum_pure_epsilons(self.spent):
            return 0.0
        worst = max(_loss.find_loss_delta(parts, epsilon) for parts in self._directions())
        return worst.value if worst.tight else min(worst.value, self._ask_rdp("delta", epsilon))

    def _directions(self) -> list[list[tuple[_loss.Curve, int]]]:
        """Return the curves to compose: for removing a record, and for adding one if that differs."""
        gaussians = [(leaf, times) for leaf, times in self.spent if isinstance(leaf, dp.GaussianDpEvent)]
        curves = [
            make_loss_curves(leaf, times) for leaf, times in self.spent if not isinstance(leaf, dp.GaussianDpEvent)
        ]
        if gaussians:  # they compose to one with less noise, exactly
            inverse = math.hypot(*(math.sqrt(times) / leaf.noise_multiplier for leaf, times in gaussians))
            curves.append(make_loss_curves(dp.GaussianDpEvent(1 / inverse), 1))
        remove, add = [(pair.remove, pair.times) for pair in curves], [(pair.add, pair.times) for pair in curves]
        return [remove] if remove == add else [remove, add]

    def _ask_rdp(self, method: Literal["epsilon", "delta"], argument: float) -> float:
        try:
            return float(getattr(RdpAccountant(self.spent), method)(argument))
        except UnsupportedEventError:
            return math.inf

    def _price(self, leaf: DpEvent) -> LossCurves:
        return make_loss_curves(leaf, 0)


@dataclass
class AdditionAccountant(Accountant):
    """Basic composition: epsilons and deltas add up. For comparison.

    Pure mechanisms cost their epsilon; the others share delta equally and cost their epsilon at that share.

    Examples
    --------
    >>> from nearveil.privacy.events import PureDp
    >>> AdditionAccountant().compose(PureDp(0.5), 500).epsilon(1e-5)
    250.0
    """

    def epsilon(self, delta: float) -> float:
        checks.check_delta(delta)
        pure = tuple(part for part in self.spent if find_pure_epsilon(part[0]) is not None)
        mixed = [part for part in self.spent if find_pure_epsilon(part[0]) is None]
        runs = sum(times for _, times in mixed)
        shares = (times * PldAccountant(((leaf, 1),)).epsilon(delta / runs) for leaf, times in mixed)
        return float(sum(shares, sum_pure_epsilons(pure)))

    def delta(self, epsilon: float) -> float:
        checks.check_epsilon(epsilon)
        low, high = -700.0, -1e-12  # of log(delta)
        if self.epsilon(math.exp(high)) > epsilon:
            return 1.0
        if self.epsilon(math.exp(low)) <= epsilon:
            return math.exp(low) if self.spent else 0.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (low, middle) if self.epsilon(math.exp(middle)) <= epsilon else (middle, high)
        return math.exp(high)

    def _price(self, leaf: DpEvent) -> object:
        return find_pure_epsilon(leaf) or make_loss_curves(leaf, 0)


@dataclass(frozen=True, eq=False)
class _Filter(ABC):
    """A budget for mechanisms that are chosen adaptively."""

    epsilon: float  #: holds, as delta does, however the budget is spent
    delta: float
    _total: Accountant = field(init=False, repr=False)  # of everything admitted

    @property
    def spent(self) -> Spent:
        """The mechanisms paid for so far, each with its number of runs."""
        return self._total.spent

    def may_spend(self, event: DpEvent, count: int = 1) -> bool:
        """Return whether the budget covers the event too."""
        return self._covers(self._total.copy().compose(event, count))

    def spend(self, event: DpEvent, count: int = 1) -> None:
        """Pay for the event, *before* it happens, or raise BudgetExceededError and spend nothing."""
        if not self.may_spend(event, count):
            raise BudgetExceededError("the budget does not cover this event: release nothing")
        self._total.compose(event, count)

    @abstractmethod
    def _covers(self, total: Accountant) -> bool:
        """Return whether the budget covers everything in an accountant."""


@dataclass(frozen=True, eq=False)
class RenyiFilter(_Filter):
    """A budget for mechanisms chosen after seeing earlier answers: noise, kind and number may depend on them.

    Each order has a budget, and each mechanism pays its divergence at every order. The filter admits a mechanism while
    the total of at least one order is within its budget. The orders share delta equally, because the binding one may
    depend on the answers (``docs/theory/accounting.md``, Theorem 6; Feldman and Zrnic 2021, Lecuyer 2021).

    Examples
    --------
    >>> from dp_accounting import GaussianDpEvent
    >>> gate = RenyiFilter(1.0, 1e-5)
    >>> gate.spend(GaussianDpEvent(8.0))
    >>> gate.may_spend(GaussianDpEvent(8.0)), gate.may_spend(GaussianDpEvent(3.0))
    (True, False)
    """

    orders: tuple[float, ...] = FILTER_ORDERS
    budgets: tuple[float, ...] = field(init=False)  #: of each order; a negative one admits nothing

    def __post_init__(self) -> None:
        checks.check_positive(self.epsilon, "epsilon")
        accountant = RdpAccountant(orders=self.orders)
        alpha = np.array(accountant.orders)
        share = checks.check_delta(self.delta) / len(alpha)
        # The tight conversion, solved for the divergence: the budget of order alpha for (epsilon, share).
        budgets = self.epsilon - np.log1p(-1 / alpha) + np.log(share * alpha) / (alpha - 1)
        if np.all(budgets < 0):
            raise ValueError("orders are too small for this epsilon and delta: give larger ones, such as FILTER_ORDERS")
        vars(self).update(orders=accountant.orders, budgets=tuple(budgets.tolist()), _total=accountant)

    def _covers(self, total: Accountant) -> bool:
        return bool(np.any(RdpAccountant(total.spent, self.orders).rdp <= self.budgets))


@dataclass(frozen=True, eq=False)
class GaussianFilter(_Filter):
    """A budget for Gaussian noise without sampling, chosen after seeing earlier answers.

    It admits noise while the sum of 1 / multiplier^2 is at most `limit`, that of the one Gaussian release that is
    (epsilon, delta)-private: as many releases as a fixed plan (``docs/theory/accounting.md``, Theorem 11). Other events
    raise UnsupportedEventError: they need a :class:`RenyiFilter` from the start.

    Examples
    --------
    >>> from dp_accounting import GaussianDpEvent
    >>> gates = GaussianFilter(1.0, 1e-6), RenyiFilter(1.0, 1e-6)
    >>> [max(n for n in range(600) if gate.may_spend(GaussianDpEvent(100.0), n)) for gate in gates]
    [560, 394]
    """

    limit: Fraction = field(init=False)  #: of the sum of 1 / multiplier^2
    orders: ClassVar[tuple[float, ...]] = ()

    def __post_init__(self) -> None:
        scale = analytic_gaussian_scale(1.0, self.epsilon, checks.check_delta(self.delta))  # certified, rounded up
        vars(self).update(limit=1 / Fraction(scale) ** 2, _total=PldAccountant())

    def _covers(self, total: Accountant) -> bool:
        return sum_inverse_squares(total.spent) <= self.limit


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
        One of this module, perhaps with other events already; :class:`PldAccountant` by default. Those of dp-accounting
        are refused: its PLDAccountant (0.6.0) ignores the count of a ``RandomizedResponseDpEvent``.
    tolerance : float, default=1e-6
        Largest distance from the best parameter, relative to the bracket's larger end.
    integer : bool, default=False
        Search whole numbers only.

    Examples
    --------
    >>> from dp_accounting import GaussianDpEvent
    >>> f"{calibrate(1.0, GaussianDpEvent, delta=1e-5, bracket=(1.0, 10.0)):.4f}"
    '3.7306'
    """
    target = checks.check_epsilon(target_epsilon, "target_epsilon")
    if target == 0:
        raise ValueError("target_epsilon must be positive")
    checks.check_delta(delta)
    low, high = sorted(checks.check_finite(end, "bracket") for end in bracket)
    step = 1.0 if integer else checks.check_positive(tolerance, "tolerance") * max(abs(low), abs(high))
    start = PldAccountant() if accountant is None else accountant
    if not isinstance(start, Accountant):
        raise TypeError("accountant must be one of nearveil.privacy.accounting; dp-accounting's may lose counts")

    def meets_target(parameter: float) -> bool:
        return start.copy().compose(make_event(int(parameter) if integer else parameter)).epsilon(delta) <= target

    if integer:
        low, high = round(low), round(high)
    low_meets, high_meets = meets_target(low), meets_target(high)
    if low_meets == high_meets:
        raise ValueError("bracket must hold one end that meets target_epsilon and one that does not")
    meets, fails = (low, high) if low_meets else (high, low)
    while abs(meets - fails) > step:
        middle = round((meets + fails) / 2) if integer else (meets + fails) / 2
        meets, fails = (middle, fails) if meets_target(middle) else (meets, middle)
    return float(meets)
