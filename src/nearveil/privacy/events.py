"""Frozen events that dp-accounting lacks.

An event describes a release and its noise; an accountant prices it (:mod:`nearveil.privacy.accounting`). Use these
events inside dp-accounting's ``ComposedDpEvent``, ``SelfComposedDpEvent`` and ``PoissonSampledDpEvent``.

Events about neighbours' votes are priced for one record added or removed. Their sensitivities hold only if neighbours
have a total order that depends on the query and the record alone: exact search, ties broken by record id. Pass the
*unscaled* noise; the event knows the sensitivity.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

from nearveil.lazy import require_extra
from nearveil.privacy import checks

with require_extra("budget"):
    import attr
    import dp_accounting as dp
    from dp_accounting import DpEvent, GaussianDpEvent

__all__ = [
    "ClippedVotes",
    "GaussianNoisyMax",
    "LaplaceNoisyMax",
    "NamedSets",
    "NoisyScreening",
    "PureDp",
    "VoteHistogram",
]

Votes = Literal["binary", "nonnegative", "signed"]
Leaves = list[tuple[DpEvent, int]]


def _validate(check: Callable[..., object], *options: object) -> Any:
    """Return a field that is checked when the event is created."""
    return attr.field(validator=lambda _, field, value: check(value, field.name, *options))


@attr.frozen
class PureDp(DpEvent):  # type: ignore[misc]
    """Any release that is epsilon-differentially private, with delta 0: randomised response, a cell, PrivUnit.

    It is priced as the worst such mechanism, randomised response on one bit.

    Examples
    --------
    >>> PureDp(0.5)
    PureDp(epsilon=0.5)
    """

    epsilon: float = _validate(checks.check_nonnegative)

    @property
    def exposure(self) -> float:
        """Probability of the privacy loss +epsilon; that of -epsilon is e^-epsilon times this, the rest is no loss."""
        return 1 / (1 + math.exp(-self.epsilon))


@attr.frozen
class NamedSets(PureDp):
    """A message that names `size` of `n_sets` sets: randomised response, or subset selection if `size` is above 1.

    Its privacy loss is +-epsilon only if it names exactly one of the two good sets that an observer compares, else 0
    (``docs/theory/accounting.md``, Theorem 10). `n_sets` is the number that the sampler draws from: public, and fixed
    before the debit. With 2 sets it costs as much as :class:`PureDp`.

    Examples
    --------
    >>> f"{NamedSets(1.0, 20).exposure:.3f} instead of {PureDp(1.0).exposure:.3f}"
    '0.125 instead of 0.731'
    """

    n_sets: int = _validate(checks.check_integer, 2, 2**20)
    size: int = attr.field(
        default=1, validator=lambda event, field, value: checks.check_integer(value, field.name, 1, event.n_sets - 1)
    )

    @property
    def exposure(self) -> float:
        """Probability of the loss +epsilon: the message names the good set, and not the other."""
        others = self.n_sets - self.size
        return self.size * others / ((self.n_sets - 1) * (self.size + others * math.exp(-self.epsilon)))


@attr.frozen
class Budgeted(DpEvent):  # type: ignore[misc]
    """Any releases that a budget admits, chosen adaptively: no accountant prices it; only a guarantee states it."""

    epsilon: float
    delta: float


@attr.frozen
class NoisyCounts(DpEvent):  # type: ignore[misc]
    """Counts with Gaussian noise: the same as a Gaussian mechanism of sensitivity 1."""

    noise: float = _validate(checks.check_positive)

    @property
    def sensitivity(self) -> float:
        """The L2 sensitivity of the counts."""
        return math.sqrt(2)

    @property
    def gaussian(self) -> GaussianDpEvent:
        """The same as a Gaussian mechanism of sensitivity 1."""
        return GaussianDpEvent(self.noise / self.sensitivity)


@attr.frozen
class NoisyScreening(DpEvent):  # type: ignore[misc]
    """Decide whether the votes agree: max-vote + N(0, noise^2) >= threshold.

    One record more or less changes the max-vote, a whole number from 0 to `n_neighbors`, by at most 1.

    Examples
    --------
    >>> NoisyScreening(noise=85.0, threshold=210.0, n_neighbors=300).gaussian
    GaussianDpEvent(noise_multiplier=85.0)
    """

    noise: float = _validate(checks.check_positive)
    threshold: float = _validate(checks.check_finite)
    n_neighbors: int = _validate(checks.check_count, 1)

    @property
    def gaussian(self) -> GaussianDpEvent:
        """The Gaussian mechanism that this event compares with the threshold."""
        return GaussianDpEvent(self.noise)


@attr.frozen
class VoteHistogram(NoisyCounts):
    """Release the neighbours' votes for each class, or the class that wins, plus N(0, noise^2) on every count.

    One neighbour enters and one leaves: L2 sensitivity sqrt(2).

    Examples
    --------
    >>> f"{VoteHistogram(noise=25.0).gaussian.noise_multiplier:.3f}"
    '17.678'
    """


@attr.frozen
class ClippedVotes(NoisyCounts):
    """Release a sum of votes on many labels, each neighbour's votes scaled down to L1 norm `clip` (tau).

    Squared L2 sensitivity, one neighbour entering and one leaving (``docs/theory/accounting.md``, Lemma 7;
    attacked by ``test_accounting.py``): ``2 clip`` for votes of 0 and 1 (if clip is at least 1, else
    ``2 clip^2``), ``2 clip^2`` for other votes that are not negative, ``4 clip^2`` for votes of either sign. The same
    with the sum of the neighbours' weights (``docs/theory/private-knn.md``, Theorem 11). `noise` is that on each label.

    Examples
    --------
    >>> ClippedVotes(noise=10.0, clip=2.0, votes="binary").sensitivity
    2.0
    """

    clip: float = _validate(checks.check_positive)  #: largest L1 norm of one neighbour's votes
    votes: Votes = attr.field(  #: before clipping: "binary", "nonnegative" or "signed"
        default="signed", validator=lambda _, field, value: checks.check_choice(value, field.name, Votes)
    )

    @property
    def sensitivity(self) -> float:
        """The L2 sensitivity of the sum."""
        square = self.clip**2
        squares = {"binary": 2 * min(self.clip, square), "nonnegative": 2 * square, "signed": 4 * square}
        return math.sqrt(squares[self.votes])


@attr.frozen
class GaussianNoisyMax(NoisyCounts):
    """PATE's GNMax: the class with the most teachers' votes after N(0, noise^2) on every count.

    One record sits with one teacher and can move its vote: L2 sensitivity sqrt(2).

    Examples
    --------
    >>> f"{GaussianNoisyMax(noise=40.0).gaussian.noise_multiplier:.3f}"
    '28.284'
    """


@attr.frozen
class LaplaceNoisyMax(DpEvent):  # type: ignore[misc]
    """PATE's LNMax: the class with the most teachers' votes after Laplace noise on every count.

    One vote moves: two counts change by 1 each. `noise` is the scale, the inverse of the paper's gamma.

    Examples
    --------
    >>> LaplaceNoisyMax(noise=20.0)
    LaplaceNoisyMax(noise=20.0)
    """

    noise: float = _validate(checks.check_positive)


@attr.frozen
class SampledScreening(DpEvent):  # type: ignore[misc]
    """A noisy screening of a Poisson sample; a rate of 1 is no sampling."""

    sampling_rate: float
    screening: NoisyScreening


def split_event(event: DpEvent, count: int = 1) -> Leaves:
    """Split an event into the mechanisms that accountants price, each with its number of runs."""
    leaves: Leaves = [(event, count)]
    match event:
        case dp.NoOpDpEvent():
            leaves = []
        case dp.ComposedDpEvent():
            leaves = [leaf for part in event.events for leaf in split_event(part, count)]
        case dp.SelfComposedDpEvent():
            leaves = split_event(event.event, checks.check_count(event.count, "count") * count)
        case dp.PoissonSampledDpEvent():
            leaves = _split_sample(event, count)
        case NoisyCounts():
            leaves = [(event.gaussian, count)]
        case LaplaceNoisyMax():
            leaves = [(dp.LaplaceDpEvent(event.noise), 2 * count)]  # two counts change by 1 each
        case NoisyScreening():
            leaves = [(SampledScreening(1.0, event), count)]
        case dp.GaussianDpEvent() | dp.LaplaceDpEvent():
            checks.check_positive(event.noise_multiplier, "noise_multiplier")
        case _ if not isinstance(event, DpEvent):
            raise TypeError(f"event must be a DpEvent, not {type(event).__name__}")
    return leaves


def _split_sample(event: dp.PoissonSampledDpEvent, count: int) -> Leaves:
    rate = event.sampling_probability
    if not 0 <= rate <= 1:
        raise ValueError("sampling_probability must be in [0, 1]")
    parts = [part for part in split_event(event.event) if part[1] > 0]
    if rate == 0 or not parts:
        return []
    if rate == 1:
        return [(leaf, times * count) for leaf, times in parts]
    if len(parts) == 1 and parts[0][1] == 1:
        return [(_amplify(parts[0][0], rate), count)]
    # One sample for several mechanisms: the joint mechanism is amplified, never its parts one by one.
    multipliers = [(find_noise_multiplier(leaf), times) for leaf, times in parts]
    squares = sum(times * multiplier**-2 if multiplier else math.inf for multiplier, times in multipliers)
    inner = event.event if math.isinf(squares) else dp.GaussianDpEvent(1 / (math.sqrt(squares) * (1 + checks.ROUNDING)))
    return [(dp.PoissonSampledDpEvent(rate, inner), count)]


def _amplify(event: DpEvent, rate: float) -> DpEvent:
    """Return one mechanism on a Poisson sample."""
    if isinstance(event, dp.NonPrivateDpEvent):
        return event
    if isinstance(event, SampledScreening):
        return SampledScreening(rate * event.sampling_rate, event.screening)
    if not isinstance(event, PureDp):
        return dp.PoissonSampledDpEvent(rate, event)
    if event.epsilon < 1:
        amplified = math.log1p(rate * math.expm1(event.epsilon))
    else:
        amplified = event.epsilon + math.log(rate + (1 - rate) * math.exp(-event.epsilon))
    return PureDp(min(amplified * (1 + checks.ROUNDING), event.epsilon))


def find_noise_multiplier(event: DpEvent) -> float | None:
    """Return the multiplier of a Gaussian mechanism, or of the one that a screening compares; None for other events."""
    if isinstance(event, dp.GaussianDpEvent):
        return float(event.noise_multiplier)
    if isinstance(event, SampledScreening) and event.sampling_rate == 1:
        return float(event.screening.noise)
    return None
