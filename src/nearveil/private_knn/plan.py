"""Noise for votes, and plans: caps, noise and cost, fixed before the first query."""

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import nbinom

from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.checks import check_count, check_delta, check_finite, check_positive, check_rate
from nearveil.privacy.events import ClippedVotes, LaplaceNoisyMax, NoisyScreening, split_event
from nearveil.privacy.guarantee import count_events, find_epsilon
from nearveil.privacy.noise import (
    GaussianNoise,
    LaplaceNoise,
    Source,
    Table,
    add_noise,
    analytic_gaussian_scale,
    look_up,
    make_alias_table,
)
from nearveil.progress import show_spinner

_BITS = 320  # of weights while a table is made
_REACH = 4095  # a longer gap continues with another draw, as draws are independent
_LEAST_RATE = 2.0**-20
_FAILURE = 1e-12  # probability that a list of neighbours is too short
_DELTA_PER_GAP = 2.0**-100  # tables are within 2^-240 of the truth, and epsilon is at most 64


@dataclass(frozen=True)
class PoissonSample:
    """Keep every record with probability `rate`, independently: the sampler and its accounting event in one."""

    rate: float  # from 2^-20 to 1. At 1 all records are kept, nothing is drawn, and privacy is not amplified

    def __post_init__(self) -> None:
        """Validate the rate."""
        if check_rate(self.rate) < _LEAST_RATE:
            raise ValueError(f"sampling_rate must be at least {_LEAST_RATE:.1e}")

    def event(self, mechanism: DpEvent) -> DpEvent:
        """Return the event of a mechanism on one fresh sample."""
        return mechanism if self.rate == 1 else PoissonSampledDpEvent(self.rate, mechanism)

    def extra_delta(self, n_neighbors: int) -> float:
        """Return the delta that the finite table adds to one sample."""
        return 0.0 if self.rate == 1 else (n_neighbors + 1) * _DELTA_PER_GAP

    def ranks(self, n_queries: int, n_neighbors: int, source: Source) -> NDArray[np.int64]:
        """Draw, for each query afresh, the first `n_neighbors` ranks that its sample keeps; 0 is the nearest's."""
        if self.rate == 1:
            return np.broadcast_to(np.arange(n_neighbors), (n_queries, n_neighbors))
        table, count = _make_gap_table(self.rate), n_queries * n_neighbors
        gaps = look_up(table, source.words(count), source)
        longer = np.flatnonzero(gaps == _REACH)
        while len(longer):
            more = look_up(table, source.words(len(longer)), source)
            gaps[longer] += more
            longer = longer[more == _REACH]
        return np.cumsum(gaps.reshape(n_queries, n_neighbors) + 1, axis=1) - 1

    def list_length(self, n_neighbors: int) -> int:
        """Return the number of neighbours to list; with probability `_FAILURE` a sample needs more, and extends it."""
        return n_neighbors if self.rate == 1 else n_neighbors + int(nbinom.isf(_FAILURE, n_neighbors, self.rate))


@lru_cache(maxsize=16)
def _make_gap_table(rate: float) -> Table:
    """Return the table of the numbers of omitted records before the next kept one; the last cell means "more"."""
    keep = int(Fraction(rate) * (1 << _BITS))  # whole: a rate from 2^-20 has no bit below 2^-72
    leave, weight = (1 << _BITS) - keep, keep
    weights, rest = [], 1 << _BITS
    for _ in range(_REACH):
        weights.append(weight)
        weight = weight * leave >> _BITS
        rest = rest * leave >> _BITS
    return make_alias_table([*weights, rest])


Kind = Literal["binary", "nonnegative", "signed"]
Part = Literal["screened", "answered", "counted"]


@dataclass(frozen=True)
class GaussianSums:
    """The event of a release of sums of a known L2 sensitivity, by its noise."""

    sensitivity: float

    def __call__(self, noise: float) -> DpEvent:
        return GaussianDpEvent(noise / self.sensitivity)


@dataclass(frozen=True)
class ClippedSums:
    """The event of a release of votes on many labels, each voter's clipped to an L1 norm, by its noise."""

    clip: float
    votes: Kind

    def __call__(self, noise: float) -> DpEvent:
        return ClippedVotes(noise, self.clip, self.votes)


@dataclass(frozen=True)
class Ballot:
    """The release of one vote; equal ballots share a calibration, to `neighbors` voters per unit of noise."""

    event: Callable[[float], DpEvent]
    size: int  # number of released values
    unit: float = 1.0  # sums are whole multiples of it; a power of two
    whole: bool = True  # whether votes are 0 or 1
    can_screen: bool = True  # whether there is a largest vote to screen
    neighbors: float = 8.0


UNIT = 2.0**-20
"""Votes that are not whole are rounded towards zero to multiples of it, so that sums of votes are exact."""

_TOSS = 2.0**-51  # bound on the total variation between a drawn bit and the bit that the accountant composes
_DELTA_PER_VALUE = 2.0**-100  # as nearveil.privacy.noise states for its tables
_FINEST = 2.0**-16  # the noise's grid, as a share of its scale
_ROUNDING_VARIANCE = 7  # in grid steps squared: lost to rounding Gaussian noise (docs/theory/noise.md, Theorem 3)


@dataclass(frozen=True)
class Screening:
    """Decide whether the votes of a fresh sample agree: max-vote + N(0, noise^2) >= threshold."""

    # Draws a bit with the probability that the accountant composes, to the last bit of a double: no low bits of noise
    # could leak more (docs/theory/private-knn.md; attacked by tests/private_knn/test_mechanisms.py). If votes are not
    # `whole`, 0 or 1, the event is that of the Gaussian mechanism.

    sample: PoissonSample
    noise: float  # standard deviation
    threshold: float
    n_neighbors: int  # the largest max-vote
    whole: bool = True

    @cached_property
    def event(self) -> DpEvent:
        """The event of one screening, for accountants."""
        screening = NoisyScreening(self.noise, self.threshold, self.n_neighbors)
        return self.sample.event(screening if self.whole else screening.gaussian)

    def extra_delta(self, epsilon: float) -> float:
        """Return the delta that finite precision adds to one screening at `epsilon`."""
        return (1 + math.exp(min(max(epsilon, 3.0), 64.0))) * _TOSS + self.sample.extra_delta(self.n_neighbors)

    def toss(self, max_votes: NDArray[np.float64], source: Source) -> NDArray[np.bool_]:
        """Return which screenings pass, shape (n,)."""
        score = (max_votes - self.threshold) / self.noise
        # The rarer outcome's probability has all its digits; 2^64 times it is a whole number of words, rounded down.
        rare = np.ldexp(ndtr(-np.abs(score)), 64).astype(np.uint64)
        return np.asarray((source.words(len(score)) < rare) == (score < 0))


@dataclass(frozen=True)
class NoisySums:
    """Release sums over the voters of a fresh sample with noise on each."""

    sample: PoissonSample
    ballot: Ballot
    noise: float  # standard deviation of Gaussian noise, or the scale of Laplace noise
    n_neighbors: int

    @cached_property
    def mechanism(self) -> DpEvent:
        """The event of one release, without the sampling."""
        return self.ballot.event(self.noise)

    @cached_property
    def event(self) -> DpEvent:
        """The event of one release, for accountants."""
        return self.sample.event(self.mechanism)

    @property
    def extra_delta(self) -> float:
        """The delta that finite tables add to one release."""
        return self.ballot.size * _DELTA_PER_VALUE + self.sample.extra_delta(self.n_neighbors)

    def check(self) -> None:
        """Raise if noise of this scale cannot be sampled."""
        try:
            self._noise(1)
        except (ValueError, OverflowError):
            raise ValueError("vote_noise cannot be sampled: it must be between 1e-250 and 1e12") from None

    def release(self, sums: NDArray[np.int64], source: Source) -> NDArray[np.float64]:
        """Add noise to sums, which are in units, all at once."""
        if sums.size == 0:
            return np.zeros(sums.shape)
        return add_noise(sums * self.ballot.unit, self._noise(sums.size), source=source)

    def _noise(self, size: int) -> GaussianNoise | LaplaceNoise:
        # Sums are on the grid, so rounding does not move them; its cost in Gaussian noise is compensated.
        unit = self.ballot.unit
        grid = min(unit, math.ldexp(1.0, math.floor(math.log2(check_positive(self.noise, "noise") * _FINEST))))
        if isinstance(self.mechanism, LaplaceNoisyMax):
            return LaplaceNoise(sensitivity=unit, scale=self.noise, size=size, grid=grid)
        scale = math.hypot(self.noise, math.sqrt(_ROUNDING_VARIANCE) * grid) * (1 + 2.0**-45)
        noise = GaussianNoise(sensitivity=unit, scale=scale, size=size, grid=grid)
        if noise.effective_scale < self.noise:
            raise ArithmeticError("vote_noise: the noise would be smaller than its guarantee states; release nothing")
        return noise


_THRESHOLD = 0.6  # of the voters, as published
_SCREENING = 2.0  # screening noise for each unit of vote noise: a quarter of the voters, as published
_SCREENED = 1.5  # screenings for each answer
_COUNT_NOISE = 10.0  # on the number of records: a hundredth of the budget
_LARGEST_EPSILON = 64.0  # the proved bounds on the delta of samplers end here
_LARGEST_SCREENED = 12.0  # the same with screenings, whose probabilities are off by 2^-51
_LEAST_DELTA = 1e-12
_MOST_NEIGHBORS = 10**6  # of a default
_MOST_SCREENED = 20_000  # composed exactly, step by step; more are charged as Gaussian mechanisms
_GUESSES = 24
_LOG = logging.getLogger(__name__)
_CLOSE = 1e-3  # largest unused share of the budget of a calibrated plan


@dataclass(frozen=True, kw_only=True)
class VotePlan:
    """Caps and noise of all queries to a database, for any choice of queries, and their cost."""

    n_neighbors: int  # voters, from the sample
    screening: Screening | None
    max_screened: int  # cap on screened queries
    votes: NoisySums
    max_answered: int  # cap on answered queries
    individual: bool = False  # whether a record's own votes are limited, not the votes of all
    count_noise: float | None = None  # standard deviation of the noise on the number of records; None: not released

    @property
    def sampling_rate(self) -> float:
        """Chance of a record to be in a sample."""
        return self.votes.sample.rate

    @property
    def size(self) -> int:
        """Number of values that a vote releases."""
        return self.votes.ballot.size

    @property
    def screening_noise(self) -> float | None:
        """Standard deviation of the noise on the max-vote; None without screening."""
        return None if self.screening is None else self.screening.noise

    @property
    def threshold(self) -> float | None:
        """The least noisy max-vote that passes; None without screening."""
        return None if self.screening is None else self.screening.threshold

    @property
    def vote_noise(self) -> float:
        """Noise on each sum of votes."""
        return self.votes.noise

    @cached_property
    def parts(self) -> dict[Part, DpEvent]:
        """The charge of one query, when it is screened and when it is answered, and of the number of records."""
        screened: dict[Part, DpEvent] = {} if self.screening is None else {"screened": self.screening.event}
        counted: dict[Part, DpEvent] = (
            {} if self.count_noise is None else {"counted": GaussianDpEvent(self.count_noise)}
        )
        return {**screened, "answered": self.votes.event, **counted}

    @property
    def caps(self) -> dict[Part, int]:
        """The largest numbers of screened and of answered queries, and of releases of the number of records."""
        caps: dict[Part, int] = {"screened": self.max_screened, "answered": self.max_answered, "counted": 1}
        return {part: caps[part] for part in self.parts}

    @property
    def events(self) -> tuple[tuple[DpEvent, int], ...]:
        """All events that the caps allow, with their counts."""
        return tuple((event, self.caps[part]) for part, event in self.parts.items())

    def extra_delta(self, epsilon: float) -> float:
        """Return the delta that samplers of finite precision add at `epsilon`."""
        votes = self.max_answered * self.votes.extra_delta + _DELTA_PER_VALUE * (self.count_noise is not None)
        return votes if self.screening is None else votes + self.max_screened * self.screening.extra_delta(epsilon)

    def epsilon(self, delta: float) -> float:
        """Return the cost of all events: screenings by Bellman's equation, votes by PLD; infinity without a guarantee.

        Holds for any order, any number of calls and queries chosen adaptively, because the caps are fixed
        (``docs/theory/accounting.md``, Theorem 5; attacked by ``tests/private_knn/test_plan.py``).

        Examples
        --------
        >>> from nearveil.privacy.events import VoteHistogram
        >>> sample = PoissonSample(0.15)
        >>> mnist = VotePlan(
        ...     n_neighbors=300, screening=Screening(sample, 75.0, 180.0, 300), max_screened=1000,
        ...     votes=NoisySums(sample, Ballot(VoteHistogram, 10), 25.0, 300), max_answered=735,
        ... )
        >>> f"{mnist.epsilon(1e-5):.4f}"
        '0.8711'
        """
        check_delta(delta)
        spent, guess = count_events(SelfComposedDpEvent(*counted) for counted in self.events), 3.0
        for _ in range(8):
            extra = self.extra_delta(guess)
            cost = find_epsilon(spent, delta - extra) if extra < delta else math.inf
            if cost <= guess:
                return cost
            if cost > _LARGEST_EPSILON:
                return math.inf
            guess = 1.01 * cost
        return math.inf

    def guarantee(self, delta: float, *, unit: str, source: Source) -> Guarantee:
        """Return the guarantee of all events that the caps allow, for records that are each one `unit`."""
        epsilon = self.epsilon(delta)
        name = "PLD of all votes" if self.screening is None else "Bellman's equation for screenings, PLD for votes"
        name = "PLD of the votes of one record" if self.individual else name
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            protects="database",
            unit=unit,
            relation="add-remove",
            basis=Basis(f"{name}, up to caps fixed beforehand", "docs/theory/private-knn.md"),
            events=tuple(SelfComposedDpEvent(event, count) for event, count in self.events),
            extra_delta=min(self.extra_delta(epsilon), delta),
        ).with_source(source)


@dataclass(frozen=True)
class PlanRequest:
    """Parameters of a plan for a ballot, as the user chose them; None is calibrated."""

    ballot: Ballot
    _: KW_ONLY
    epsilon: float | None
    delta: float
    max_answered: int
    n_neighbors: int | None = None
    sampling_rate: float = 1.0
    screening_noise: float | None = None
    threshold: float | None = None
    max_screened: int | None = None  # 0 for no screening
    vote_noise: float | None = None
    individual: bool = False
    count_records: bool = False  # with a hundredth of the squared noise multiplier

    def __post_init__(self) -> None:
        """Validate parameters."""
        if check_delta(self.delta) < _LEAST_DELTA:
            raise ValueError(f"delta must be at least {_LEAST_DELTA:g}: the finite precision of screenings costs more")
        PoissonSample(self.sampling_rate)
        for name in ("epsilon", "screening_noise", "vote_noise"):
            if getattr(self, name) is not None:
                check_positive(getattr(self, name), name)
        if self.epsilon is not None and self.epsilon > _LARGEST_EPSILON:
            raise ValueError(f"epsilon must be at most {_LARGEST_EPSILON:g}: larger values guarantee nothing")
        for name, least in (("max_answered", 1), ("n_neighbors", 1), ("max_screened", 0)):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name, least=least)
        if self.threshold is not None:
            check_finite(self.threshold, "threshold")

    @property
    def screening_cap(self) -> int:
        """Maximum number of screenings, if there are any."""
        return math.ceil(_SCREENED * self.max_answered) if self.max_screened is None else self.max_screened

    @cached_property
    def uses_screening(self) -> bool:
        """Whether queries are screened: unless `max_screened` is 0, or noise was given for the votes alone."""
        options = ("screening_noise", "threshold")
        chosen = [name for name in options if getattr(self, name) is not None]
        if not self.ballot.can_screen:
            if self.max_screened or chosen:
                raise ValueError("max_screened must be 0 or None here: these votes have no largest one to screen")
            return False
        if self.max_screened == 0 and chosen:
            raise ValueError(f"{chosen[0]} must not be given if max_screened is 0: nothing is screened")
        if self.max_screened == 0 or (self.vote_noise is not None and self.max_screened is None and not chosen):
            return False
        for name in options:
            if self.vote_noise is not None and name not in chosen:
                raise ValueError(f"{name} must be given: vote_noise is, so nothing is calibrated")
        return True

    def plan_at(self, noise: float) -> VotePlan:
        """Return the plan with this vote noise."""
        sample, screening = PoissonSample(self.sampling_rate), None
        voters = self.n_neighbors or min(math.ceil(self.ballot.neighbors * noise), _MOST_NEIGHBORS)
        if self.uses_screening:
            screening = Screening(
                sample,
                _SCREENING * noise if self.screening_noise is None else self.screening_noise,
                _THRESHOLD * voters if self.threshold is None else self.threshold,
                voters,
                self.ballot.whole and self.screening_cap <= _MOST_SCREENED and voters <= _MOST_NEIGHBORS,
            )
        return VotePlan(
            n_neighbors=voters,
            screening=screening,
            max_screened=self.screening_cap if screening else 0,
            votes=NoisySums(sample, self.ballot, noise, voters),
            max_answered=self.max_answered,
            individual=self.individual,
            count_noise=_COUNT_NOISE * noise / math.sqrt(self.max_answered) if self.count_records else None,
        )


_CLEAR_VOTES = 2.0  # voters that agree, for each unit of vote noise: fewer are noise


class NoiseWarning(UserWarning):
    """Answers are expected to be mostly noise. A message that says "for you alone" depends on the private records."""


def find_needed_votes(plan: VotePlan, gain: float = 1.0) -> int:
    """Return how many voters, who each move a sum by `gain`, must agree so that an answer is more than noise."""
    passes = plan.n_neighbors / 2 if plan.threshold is None else plan.threshold
    return math.ceil(max(passes, _CLEAR_VOTES * plan.vote_noise / gain))


def check_epsilon_given(epsilon: float | None, alternative: str = "") -> float:
    """Return epsilon, or raise if it is None: only the owner of the records can choose it."""
    if epsilon is None:
        raise ValueError(
            f"epsilon must be given{alternative}: it limits how much all answers together may reveal about one record. "
            "1 is strong, 8 is weak"
        )
    return epsilon


def make_plan(request: PlanRequest) -> VotePlan:
    """Return a plan that costs at most ``request.epsilon``, and at least 0.999 of it if it is calibrated."""
    if request.vote_noise is not None:
        plan = request.plan_at(request.vote_noise)
        plan.votes.check()  # noise that cannot be sampled is refused before anything is paid
        if request.epsilon is not None and (cost := plan.epsilon(request.delta)) > request.epsilon:
            raise ValueError(
                f"vote_noise is too small: the plan costs epsilon {cost:.4g} at delta {request.delta:g}, more than the "
                f"{request.epsilon:g} that is allowed; leave it out to have it calibrated"
            )
        return plan
    target = check_epsilon_given(request.epsilon, " (or the noise itself, vote_noise)")
    if request.uses_screening and target > _LARGEST_SCREENED:
        raise ValueError(
            f"epsilon must be at most {_LARGEST_SCREENED:g} if queries are screened: a larger one protects nothing, "
            "and screening in double precision is not exact enough for it; max_screened=0 turns screening off"
        )
    plan = request.plan_at(_calibrate(request, target))
    plan.votes.check()
    return plan


@lru_cache(maxsize=64)
def _calibrate(request: PlanRequest, target: float) -> float:
    """Return the least vote noise, up to a thousandth, at which the plan costs `target`, by the cost of some trials."""
    with ExitStack() as stack:
        if request.uses_screening:
            counts = f"{request.screening_cap:,} screenings and {request.max_answered:,} votes"
            text = f"Calibrating the noise of {counts}, once"
            _LOG.info(text)
            stack.enter_context(show_spinner(text))
        noise, slope = _guess_noise(request, target), -1.0
        _check_screening_noise(request, noise, target)
        trials: list[tuple[float, float]] = []  # logarithms of noise and of cost over target
        for _ in range(_GUESSES):
            price = request.plan_at(noise).epsilon(request.delta)
            if (1 - _CLOSE) * target <= price <= target:
                return noise
            trials.append((math.log(noise), math.log(min(max(price, 1e-9 * target), _LARGEST_EPSILON) / target)))
            if len(trials) > 1 and trials[-1][0] != trials[-2][0]:
                slope = (trials[-1][1] - trials[-2][1]) / (trials[-1][0] - trials[-2][0])
            # Cost falls about like 1 / noise. Aim at the middle of the accepted range, and limit the step.
            leap = (trials[-1][1] + _CLOSE / 2) / -min(slope, -0.2)
            noise *= math.exp(min(max(leap, -1.5), 1.5))
    safe = [logarithm for logarithm, surplus in trials if surplus <= 0]
    if not safe:
        raise ValueError("epsilon cannot be reached: raise it, or lower max_answered")
    return math.exp(min(safe)) * (1 + 2.0**-40)


def _check_screening_noise(request: PlanRequest, noise: float, target: float) -> None:
    """Refuse a chosen screening noise if screenings alone cost more than the target."""
    screening = request.plan_at(noise).screening
    if request.screening_noise is None or screening is None:
        return
    events = count_events([SelfComposedDpEvent(screening.event, request.screening_cap)])
    if find_epsilon(events, request.delta) > target:
        raise ValueError("screening_noise is too small: screenings alone cost more than epsilon")


def _guess_noise(request: PlanRequest, target: float) -> float:
    """Return the noise that a Gaussian mechanism without sampling would need, times the sampling rate."""
    plan = request.plan_at(1.0)
    leaf, times = split_event(plan.votes.mechanism)[0]
    squares = plan.max_answered * times / leaf.noise_multiplier**2
    if plan.screening is not None and request.screening_noise is None:
        squares += plan.max_screened / plan.screening.noise**2
    multiplier = analytic_gaussian_scale(1.0, min(target, 60.0), max(request.delta, 1e-15))
    return float(multiplier * math.sqrt(squares) * request.sampling_rate)
