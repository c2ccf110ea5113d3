"""From what happened to what accountants price: compositions unfolded, own events put in terms of known ones."""

import math
from functools import singledispatch

import attr
import dp_accounting as dp
from dp_accounting import DpEvent

from nearveil.privacy._checks import ROUNDING, check_count, check_positive
from nearveil.privacy.events import (
    ClippedVotes,
    GaussianNoisyMax,
    LaplaceNoisyMax,
    NoisyScreening,
    PureDp,
    VoteHistogram,
)

Leaves = list[tuple[DpEvent, int]]


@attr.s(frozen=True, slots=True, auto_attribs=True)
class SampledScreening(DpEvent):  # type: ignore[misc]
    """A noisy screening of a Poisson sample; a rate of 1 is no sampling."""

    sampling_rate: float
    screening: NoisyScreening


@singledispatch
def leaves(event: DpEvent, count: int = 1) -> Leaves:
    """Return the single mechanisms of an event, each with how often it ran.

    Examples
    --------
    >>> from dp_accounting import ComposedDpEvent, NoOpDpEvent, SelfComposedDpEvent
    >>> leaves(SelfComposedDpEvent(ComposedDpEvent([PureDp(1.0), NoOpDpEvent(), PureDp(2.0)]), 3), 2)
    [(PureDp(epsilon=1.0), 6), (PureDp(epsilon=2.0), 6)]
    """
    if not isinstance(event, DpEvent):
        raise TypeError(f"event must be a DpEvent, not {type(event).__name__}")
    return [(event, count)]


@leaves.register
def _(event: dp.NoOpDpEvent, count: int = 1) -> Leaves:  # noqa: ARG001
    return []


@leaves.register
def _(event: dp.ComposedDpEvent, count: int = 1) -> Leaves:
    return [leaf for part in event.events for leaf in leaves(part, count)]


@leaves.register
def _(event: dp.SelfComposedDpEvent, count: int = 1) -> Leaves:
    return leaves(event.event, check_count(event.count, "count") * count)


@leaves.register
def _(event: dp.GaussianDpEvent, count: int = 1) -> Leaves:
    check_positive(event.noise_multiplier, "noise_multiplier")
    return [(event, count)]


@leaves.register
def _(event: dp.LaplaceDpEvent, count: int = 1) -> Leaves:
    check_positive(event.noise_multiplier, "noise_multiplier")
    return [(event, count)]


@leaves.register(VoteHistogram)
@leaves.register(ClippedVotes)
@leaves.register(GaussianNoisyMax)
def _(event: VoteHistogram | ClippedVotes | GaussianNoisyMax, count: int = 1) -> Leaves:
    return [(event.gaussian, count)]


@leaves.register
def _(event: LaplaceNoisyMax, count: int = 1) -> Leaves:
    return [(dp.LaplaceDpEvent(event.noise), 2 * count)]  # two counts change by 1 each


@leaves.register
def _(event: NoisyScreening, count: int = 1) -> Leaves:
    return [(SampledScreening(1.0, event), count)]


@leaves.register
def _(event: dp.PoissonSampledDpEvent, count: int = 1) -> Leaves:
    rate = event.sampling_probability
    if not 0 <= rate <= 1:
        raise ValueError("sampling_probability must lie in [0, 1]")
    parts = [part for part in leaves(event.event) if part[1] > 0]
    if rate == 0 or not parts:
        return []
    if rate == 1:
        return [(leaf, times * count) for leaf, times in parts]
    if len(parts) == 1 and parts[0][1] == 1:
        return [(_amplified(parts[0][0], rate), count)]
    # One sample for several mechanisms: the joint mechanism is amplified, never its parts one by one.
    squares = sum(times * _inverse_square(leaf) for leaf, times in parts)
    inner = event.event if math.isinf(squares) else dp.GaussianDpEvent(1 / (math.sqrt(squares) * (1 + ROUNDING)))
    return [(dp.PoissonSampledDpEvent(rate, inner), count)]


@singledispatch
def _amplified(event: DpEvent, rate: float) -> DpEvent:
    """Return one mechanism on a Poisson sample."""
    return dp.PoissonSampledDpEvent(rate, event)


@_amplified.register
def _(event: dp.NonPrivateDpEvent, rate: float) -> DpEvent:  # noqa: ARG001
    return event


@_amplified.register
def _(event: SampledScreening, rate: float) -> DpEvent:
    return SampledScreening(rate * event.sampling_rate, event.screening)


@_amplified.register
def _(event: PureDp, rate: float) -> DpEvent:
    if event.epsilon < 1:
        amplified = math.log1p(rate * math.expm1(event.epsilon))
    else:
        amplified = event.epsilon + math.log(rate + (1 - rate) * math.exp(-event.epsilon))
    return PureDp(min(amplified * (1 + ROUNDING), event.epsilon))


@singledispatch
def _inverse_square(event: DpEvent) -> float:  # noqa: ARG001
    """Return 1 / multiplier^2 of the Gaussian mechanism that an event is or comes from; infinity where it is none."""
    return math.inf


@_inverse_square.register
def _(event: dp.GaussianDpEvent) -> float:
    return float(event.noise_multiplier) ** -2


@_inverse_square.register
def _(event: SampledScreening) -> float:
    return event.screening.noise**-2 if event.sampling_rate == 1 else math.inf
