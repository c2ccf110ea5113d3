"""Three accountants with one interface: what a list of mechanisms costs."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch, singledispatchmethod
from typing import ClassVar, Literal, Self

import dp_accounting as dp
import numpy as np
from dp_accounting import DpEvent, UnsupportedEventError
from dp_accounting import rdp as dp_rdp
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.common import DifferentialPrivacyParameters
from numpy.typing import NDArray

from nearveil.privacy._accounting_checks import (
    MAX_EPSILON,
    check_count,
    check_delta,
    check_epsilon,
    check_order,
    check_positive,
)
from nearveil.privacy._accounting_leaves import SampledScreening, leaves
from nearveil.privacy._accounting_screening import binary_rdp, screening_curve, screening_rdp
from nearveil.privacy.events import PureDp

Spent = tuple[tuple[DpEvent, int], ...]

_LIBRARY_ORDERS = dp_rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS  # they leap from 63 to 128 and on to 1024
DEFAULT_ORDERS: tuple[float, ...] = tuple(
    sorted({*map(float, _LIBRARY_ORDERS), *map(float, range(64, 128, 4)), *map(float, range(144, 512, 32))})
)
_FFT_NOISE, _FFT_ROUNDING = 1e-13, 1e-6  # what the rounding of the convolutions may hide, added to every delta
LIBRARY_ROUNDING = 2.0**-47  # of one divergence that dp-accounting computes
_LARGEST_LOSS = 50.0  # of one mechanism, in a privacy loss distribution
_LITTLE_NOISE = 0.2  # times the sensitivity


@singledispatch
def pure_epsilon(leaf: DpEvent) -> float | None:  # noqa: ARG001
    """Return the epsilon of a mechanism that has one at delta 0, else None."""
    return None


@pure_epsilon.register
def _(leaf: PureDp) -> float | None:
    return float(leaf.epsilon)


@pure_epsilon.register
def _(leaf: dp.LaplaceDpEvent) -> float | None:
    return float(1 / leaf.noise_multiplier)


def pure_total(spent: Spent) -> float:
    """Return the sum of all pure epsilons; infinity if a mechanism has none."""
    epsilons = [(pure_epsilon(leaf), times) for leaf, times in spent]
    return sum((math.inf if epsilon is None else epsilon * times for epsilon, times in epsilons), 0.0)


@singledispatch
def _too_large(leaf: DpEvent, times: int) -> bool:  # noqa: ARG001
    """Return whether the loss of a mechanism, run so often, has no place in a distribution: it counts as infinite."""
    return False


@_too_large.register
def _(leaf: dp.NonPrivateDpEvent, times: int) -> bool:  # noqa: ARG001
    return True


@_too_large.register
def _(leaf: PureDp, times: int) -> bool:  # noqa: ARG001
    return bool(leaf.epsilon > _LARGEST_LOSS)


@_too_large.register
def _(leaf: dp.GaussianDpEvent, times: int) -> bool:
    return bool(times / leaf.noise_multiplier**2 > 2 * MAX_EPSILON)  # the mean of the loss is half of that


@_too_large.register
def _(leaf: dp.PoissonSampledDpEvent, times: int) -> bool:
    # With so little noise a record that is sampled stands out, and the loss is at least that of the times it is.
    inner = leaf.event
    little = isinstance(inner, dp.GaussianDpEvent) and inner.noise_multiplier < _LITTLE_NOISE
    return little and _too_large(inner, math.ceil(times * leaf.sampling_probability / 4))


@dataclass
class Accountant(ABC):
    """What all accountants have in common.

    As in dp-accounting, `compose` changes the accountant and returns it. (Were it to return a new one, a caller who
    ignores the result would count nothing; this way round, the worst mistake counts twice.)

    Parameters
    ----------
    spent : tuple of (DpEvent, int)
        The single mechanisms composed so far and how often each ran.
    """

    spent: Spent = ()
    _cache: ClassVar[str] = ""

    def supports(self, event: DpEvent) -> bool:
        """Return whether the event can be priced: a dry run.

        Parameters
        ----------
        event : DpEvent

        Returns
        -------
        bool
        """
        try:
            for leaf, _ in leaves(event):
                self._dry_run(leaf)
        except UnsupportedEventError:
            return False
        return True

    def compose(self, event: DpEvent, count: int = 1) -> Self:
        """Count an event, after a dry run.

        Parameters
        ----------
        event : DpEvent
        count : int, default=1
            How often it happened.

        Returns
        -------
        Accountant
            This one.
        """
        if not self.supports(event):
            raise UnsupportedEventError(f"{type(self).__name__} cannot price {event}")
        # Equal mechanisms are counted together, in whatever order they came. (Events may hold lists: no hashing.)
        kinds, counts = [leaf for leaf, _ in self.spent], [times for _, times in self.spent]
        for leaf, times in leaves(event, check_count(count, "count")):
            if leaf in kinds:
                counts[kinds.index(leaf)] += times
            else:
                kinds.append(leaf)
                counts.append(times)
        self.spent = tuple((leaf, times) for leaf, times in zip(kinds, counts, strict=True) if times > 0)
        vars(self).pop(self._cache, None)
        return self

    def copy(self) -> Self:
        """Return another accountant that has seen the same, for a question that starts with "what if".

        Returns
        -------
        Accountant
        """
        return replace(self)

    @abstractmethod
    def epsilon(self, delta: float) -> float:
        """Return an epsilon at which everything composed is (epsilon, delta)-differentially private.

        Parameters
        ----------
        delta : float
            In (0, 1).

        Returns
        -------
        float
            Infinity where there is none.
        """

    @abstractmethod
    def delta(self, epsilon: float) -> float:
        """Return a delta at which everything composed is (epsilon, delta)-differentially private.

        Parameters
        ----------
        epsilon : float

        Returns
        -------
        float
        """

    @abstractmethod
    def _dry_run(self, leaf: DpEvent) -> None:
        """Price one mechanism, or raise UnsupportedEventError."""


@dataclass
class RdpAccountant(Accountant):
    """Renyi differential privacy: divergences of each order add up (``docs/theory/accounting.md``, Theorem 1).

    Parameters
    ----------
    spent : tuple of (DpEvent, int)
    orders : tuple of float
    conversion : {"tight", "classic"}, default="tight"
        "classic" is the one that papers print, ``rdp + log(1/delta) / (order - 1)``, for comparison.

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
    conversion: Literal["tight", "classic"] = "tight"
    _cache: ClassVar[str] = "rdp"

    def __post_init__(self) -> None:
        """Refuse orders and conversions that are none."""
        if not self.orders:
            raise ValueError("orders must hold at least one order")
        self.orders = tuple(check_order(order, "orders") for order in self.orders)
        if self.conversion not in ("tight", "classic"):
            raise ValueError('conversion must be "tight" or "classic"')

    @cached_property
    def rdp(self) -> NDArray[np.float64]:
        """Total Renyi divergence at each of the orders, of shape (n_orders,)."""
        return np.asarray(sum((times * self._curve(leaf) for leaf, times in self.spent), np.zeros(len(self.orders))))

    def epsilon(self, delta: float) -> float:
        check_delta(delta)
        if not self.spent:
            return 0.0
        if self.conversion == "classic":
            return float(np.min(self.rdp - math.log(delta) / (np.array(self.orders) - 1)))
        return float(dp_rdp.rdp_privacy_accountant.compute_epsilon(self.orders, self.rdp, delta)[0])

    def delta(self, epsilon: float) -> float:
        check_epsilon(epsilon)
        if not self.spent:
            return 0.0
        if self.conversion == "classic":
            exponents = (np.array(self.orders) - 1) * (self.rdp - epsilon)
            return float(np.min(np.exp(np.minimum(exponents, 0))))
        return float(min(dp_rdp.rdp_privacy_accountant.compute_delta(self.orders, self.rdp, epsilon)[0], 1.0))

    def _dry_run(self, leaf: DpEvent) -> None:
        self._curve(leaf)

    @singledispatchmethod
    def _curve(self, leaf: DpEvent) -> NDArray[np.float64]:
        return self._library_curve(leaf, dp.NeighboringRelation.ADD_OR_REMOVE_ONE)

    @_curve.register
    def _(self, leaf: dp.RandomizedResponseDpEvent) -> NDArray[np.float64]:
        return self._library_curve(leaf, dp.NeighboringRelation.REPLACE_ONE)

    @_curve.register
    def _(self, leaf: PureDp) -> NDArray[np.float64]:
        yes, no = -np.logaddexp(0, -leaf.epsilon), -np.logaddexp(0, leaf.epsilon)
        log_p = np.array([[yes], [no]])
        return np.array([min(float(binary_rdp(a, log_p, log_p[::-1])[0]), leaf.epsilon) for a in self.orders])

    @_curve.register
    def _(self, leaf: SampledScreening) -> NDArray[np.float64]:
        return np.array([screening_rdp(a, leaf.screening, sampling_rate=leaf.sampling_rate).value for a in self.orders])

    def _library_curve(self, leaf: DpEvent, relation: dp.NeighboringRelation) -> NDArray[np.float64]:
        curve = dp_rdp.RdpAccountant(self.orders, relation).compose(leaf).rdp
        # Where rounding has made a divergence negative the library would read it as perfect privacy. Where the truth is
        # below its rounding, some 1e-15, it may say anything, also 0: so that much is added, against the spender.
        return np.asarray(np.where(curve < 0, np.inf, curve + LIBRARY_ROUNDING))


@dataclass
class PldAccountant(Accountant):
    """Privacy loss distributions, convolved, rounded against the spender (``docs/theory/accounting.md``, Theorem 2).

    Screenings have no single worst pair. Their exact adaptive composition enters as one distribution, which is safe in
    any order with the rest (Theorem 5).

    Parameters
    ----------
    spent : tuple of (DpEvent, int)
    interval : float, default=5e-5
        Discretisation of the privacy loss.

    Examples
    --------
    >>> from nearveil.privacy.events import PureDp
    >>> f"{PldAccountant().compose(PureDp(0.5), 500).epsilon(1e-5):.2f}"
    '105.81'
    """

    interval: float = 5e-5
    _cache: ClassVar[str] = "privacy_loss"

    def __post_init__(self) -> None:
        """Refuse an interval that is none."""
        if check_positive(self.interval, "interval") > 1:
            raise ValueError("interval must be at most 1")

    @cached_property
    def privacy_loss(self) -> pld.PrivacyLossDistribution:
        """The privacy loss distribution of everything composed."""
        total = pld.identity(value_discretization_interval=self.interval)
        for leaf, times in self.spent:
            total = total.compose(self._loss(leaf, times))
        return total

    def epsilon(self, delta: float) -> float:
        check_delta(delta)
        if not self.spent:
            return 0.0
        certain = (delta - _FFT_NOISE) / (1 + _FFT_ROUNDING)
        if certain <= 0 or any(_too_large(leaf, times) for leaf, times in self.spent):
            return pure_total(self.spent)
        return min(float(self.privacy_loss.get_epsilon_for_delta(certain)), pure_total(self.spent))

    def delta(self, epsilon: float) -> float:
        if check_epsilon(epsilon) >= pure_total(self.spent):
            return 0.0
        if any(_too_large(leaf, times) for leaf, times in self.spent):
            return 1.0
        return float(min(self.privacy_loss.get_delta_for_epsilon(epsilon) * (1 + _FFT_ROUNDING) + _FFT_NOISE, 1.0))

    def _dry_run(self, leaf: DpEvent) -> None:
        if not _too_large(leaf, 1):
            PldAccountant(interval=0.1)._loss(leaf, 1)  # coarse, to be quick

    @singledispatchmethod
    def _loss(self, leaf: DpEvent, times: int) -> pld.PrivacyLossDistribution:  # noqa: ARG002
        raise UnsupportedEventError(f"no privacy loss distribution is known for {leaf}")

    @_loss.register
    def _(self, leaf: dp.GaussianDpEvent, times: int) -> pld.PrivacyLossDistribution:
        # Gaussian mechanisms compose to one with less noise, exactly.
        return pld.from_gaussian_mechanism(
            leaf.noise_multiplier / math.sqrt(times), value_discretization_interval=self.interval
        )

    @_loss.register
    def _(self, leaf: dp.LaplaceDpEvent, times: int) -> pld.PrivacyLossDistribution:
        one = pld.from_laplace_mechanism(leaf.noise_multiplier, value_discretization_interval=self.interval)
        return one.self_compose(times)

    @_loss.register
    def _(self, leaf: dp.RandomizedResponseDpEvent, times: int) -> pld.PrivacyLossDistribution:
        one = pld.from_randomized_response(
            leaf.noise_parameter, leaf.num_buckets, value_discretization_interval=self.interval
        )
        return one.self_compose(times)  # dp-accounting's own accountant forgets the count here

    @_loss.register
    def _(self, leaf: PureDp, times: int) -> pld.PrivacyLossDistribution:
        one = DifferentialPrivacyParameters(leaf.epsilon, 0.0)
        return pld.from_privacy_parameters(one, value_discretization_interval=self.interval).self_compose(times)

    @_loss.register
    def _(self, leaf: SampledScreening, times: int) -> pld.PrivacyLossDistribution:
        return screening_curve(times, leaf.screening, sampling_rate=leaf.sampling_rate).privacy_loss(self.interval)

    @_loss.register
    def _(self, leaf: dp.PoissonSampledDpEvent, times: int) -> pld.PrivacyLossDistribution:
        return self._sampled_loss(leaf.event, leaf.sampling_probability).self_compose(times)

    @singledispatchmethod
    def _sampled_loss(self, event: DpEvent, rate: float) -> pld.PrivacyLossDistribution:  # noqa: ARG002
        raise UnsupportedEventError(f"no privacy loss distribution is known for a Poisson sample of {event}")

    @_sampled_loss.register
    def _(self, event: dp.GaussianDpEvent, rate: float) -> pld.PrivacyLossDistribution:
        return pld.from_gaussian_mechanism(
            event.noise_multiplier, value_discretization_interval=self.interval, sampling_prob=rate
        )

    @_sampled_loss.register
    def _(self, event: dp.LaplaceDpEvent, rate: float) -> pld.PrivacyLossDistribution:
        return pld.from_laplace_mechanism(
            event.noise_multiplier, value_discretization_interval=self.interval, sampling_prob=rate
        )


@dataclass
class AdditionAccountant(Accountant):
    """Basic composition: epsilons and deltas add up. For comparison.

    Mechanisms that have a pure epsilon pay it; the others share delta in equal parts and each pays its own epsilon.

    Examples
    --------
    >>> from nearveil.privacy.events import PureDp
    >>> AdditionAccountant().compose(PureDp(0.5), 500).epsilon(1e-5)
    250.0
    """

    _cache: ClassVar[str] = "_sharing"

    @cached_property
    def _sharing(self) -> list[tuple[PldAccountant, int]]:
        return [(PldAccountant(spent=((leaf, 1),)), times) for leaf, times in self.spent if pure_epsilon(leaf) is None]

    def epsilon(self, delta: float) -> float:
        check_delta(delta)
        parts = sum(times for _, times in self._sharing)
        shares = (times * single.epsilon(delta / parts) for single, times in self._sharing)
        return float(sum(shares, pure_total(tuple(part for part in self.spent if pure_epsilon(part[0]) is not None))))

    def delta(self, epsilon: float) -> float:
        check_epsilon(epsilon)
        low, high = -700.0, -1e-12  # of log(delta)
        if self.epsilon(math.exp(high)) > epsilon:
            return 1.0
        if self.epsilon(math.exp(low)) <= epsilon:
            return math.exp(low) if self.spent else 0.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (low, middle) if self.epsilon(math.exp(middle)) <= epsilon else (middle, high)
        return math.exp(high)

    def _dry_run(self, leaf: DpEvent) -> None:
        if pure_epsilon(leaf) is None:
            PldAccountant()._dry_run(leaf)
