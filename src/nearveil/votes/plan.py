"""What may be asked, with how much noise, and what that costs: fixed before the first query."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from dp_accounting import DpEvent, GaussianDpEvent, SelfComposedDpEvent

from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.checks import check_count, check_delta, check_finite, check_positive
from nearveil.privacy.events import ClippedVotes, split_event
from nearveil.privacy.guarantee import count_events, find_epsilon
from nearveil.privacy.noise import Source, analytic_gaussian_scale
from nearveil.votes.mechanisms import NoisySums, PoissonSample, Screening

DEFAULT_EPSILON = 1.0
_THRESHOLD = 0.6  # of the voters, as published
_SCREENING = 2.0  # screening noise for each unit of vote noise: a quarter of the voters, as published
_SCREENED = 1.5  # screenings for each answer
_LARGEST_EPSILON = 64.0  # up to which what samplers add to delta is proved
_LARGEST_SCREENED = 12.0  # the same with screenings, whose coins are off by 2^-51
_LEAST_DELTA = 1e-12
_MOST_NEIGHBORS = 10**6  # that are chosen by themselves
_MOST_SCREENED = 20_000  # whose exact composition is computed, step by step; more are charged as Gaussian mechanisms
_GUESSES = 24
_CLOSE = 1e-3  # how near to its budget a calibrated plan comes


Kind = Literal["binary", "nonnegative", "signed"]
Part = Literal["screened", "answered"]


@dataclass(frozen=True)
class GaussianSums:
    """Sums of a known L2 sensitivity."""

    sensitivity: float

    def __call__(self, noise: float) -> DpEvent:
        """Return the event of a release with this noise."""
        return GaussianDpEvent(noise / self.sensitivity)


@dataclass(frozen=True)
class ClippedSums:
    """Votes on many labels, each voter's clipped to an L1 norm."""

    clip: float
    votes: Kind

    def __call__(self, noise: float) -> DpEvent:
        """Return the event of a release with this noise."""
        return ClippedVotes(noise, self.clip, self.votes)


@dataclass(frozen=True)
class Ballot:
    """What is released when a query is voted on.

    `event`: From the noise to the event; equal ballots have equal ones, so that they share a calibration.
    `neighbors`: Voters for each unit of vote noise, where their number is calibrated: a vote of two thirds against
    one third is then won by 1.9 standard deviations.
    """

    event: Callable[[float], DpEvent]
    size: int  # how many values are released
    unit: float = 1.0  # sums are whole multiples of it
    whole: bool = True  # whether votes are 0 or 1
    screened: bool = True  # whether there is a largest vote that a screening could ask about
    neighbors: float = 8.0


@dataclass(frozen=True, kw_only=True)
class VotePlan:
    """Everything that may happen to a database, however the queries are chosen, and what it costs."""

    n_neighbors: int  # how many of the sample vote
    screening: Screening | None
    max_screened: int  # at most so many queries are screened
    votes: NoisySums
    max_answered: int  # at most so many are voted on
    size: int  # how many values a vote releases

    @property
    def sampling_rate(self) -> float:
        """Chance of a record to be in a sample."""
        return self.votes.sample.rate

    @property
    def screening_noise(self) -> float | None:
        """Standard deviation of the noise on the max-vote; None without screening."""
        return None if self.screening is None else self.screening.noise

    @property
    def threshold(self) -> float | None:
        """What the noisy max-vote must reach; None without screening."""
        return None if self.screening is None else self.screening.threshold

    @property
    def vote_noise(self) -> float:
        """Noise on each sum of votes."""
        return self.votes.noise

    @cached_property
    def parts(self) -> dict[Part, DpEvent]:
        """What one query is charged as: when it is screened, and when it is answered."""
        screened: dict[Part, DpEvent] = {} if self.screening is None else {"screened": self.screening.event}
        return {**screened, "answered": self.votes.event}

    @property
    def caps(self) -> dict[Part, int]:
        """How many queries may be screened and answered."""
        caps: dict[Part, int] = {"screened": self.max_screened, "answered": self.max_answered}
        return {part: caps[part] for part in self.parts}

    @property
    def events(self) -> tuple[tuple[DpEvent, int], ...]:
        """Everything that may happen, and how often."""
        return tuple((event, self.caps[part]) for part, event in self.parts.items())

    @property
    def _repeated(self) -> tuple[DpEvent, ...]:
        return tuple(SelfComposedDpEvent(event, count) for event, count in self.events)

    def extra_delta(self, epsilon: float) -> float:
        """Return what samplers of finite precision add to the delta of a guarantee of `epsilon`."""
        votes = self.max_answered * self.votes.extra_delta(self.size)
        return votes if self.screening is None else votes + self.max_screened * self.screening.extra_delta(epsilon)

    def epsilon(self, delta: float) -> float:
        """Return what all of it costs: screenings by Bellman's equation, votes by PLD, convolved.

        Holds for any order, any number of calls and queries chosen along the way, because the caps are fixed
        (``docs/theory/accounting.md``, Theorem 5; attacked by ``tests/votes/test_plan.py``).

        Returns: Infinity where nothing is guaranteed.

        Examples
        --------
        >>> from nearveil.privacy.events import VoteHistogram
        >>> sample = PoissonSample(0.15)
        >>> mnist = VotePlan(
        ...     n_neighbors=300, screening=Screening(sample, 75.0, 180.0, 300), max_screened=1000,
        ...     votes=NoisySums(sample, VoteHistogram(25.0), 25.0, 300), max_answered=735, size=10,
        ... )
        >>> f"{mnist.epsilon(1e-5):.4f}"
        '0.8711'
        """
        check_delta(delta)
        spent, guess = count_events(self._repeated), 3.0
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
        """Return the guarantee of everything that may happen.

        `unit`: What one record is.
        `source`: Where the coins come from.
        """
        epsilon = self.epsilon(delta)
        name = "PLD of all votes" if self.screening is None else "Bellman's equation for screenings, PLD for votes"
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            protects="database",
            unit=unit,
            relation="add-remove",
            basis=Basis(f"{name}, up to caps fixed beforehand", "docs/theory/private-knn.md"),
            events=self._repeated,
            extra_delta=min(self.extra_delta(epsilon), delta),
        ).with_source(source)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a user asked for; None is calibrated."""

    epsilon: float | None
    delta: float
    max_answered: int
    n_neighbors: int | None = None
    sampling_rate: float = 1.0
    screening_noise: float | None = None
    threshold: float | None = None
    max_screened: int | None = None  # 0 for no screening
    vote_noise: float | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing, and wishes that contradict each other."""
        if check_delta(self.delta) < _LEAST_DELTA:
            raise ValueError(f"delta must be at least {_LEAST_DELTA:g}: the coins of some screenings cost as much")
        check_count(self.max_answered, "max_answered", least=1)
        PoissonSample(self.sampling_rate)
        for name in ("epsilon", "screening_noise", "vote_noise"):
            if getattr(self, name) is not None:
                check_positive(getattr(self, name), name)
        if self.epsilon is not None and self.epsilon > _LARGEST_EPSILON:
            raise ValueError(f"epsilon must be at most {_LARGEST_EPSILON:g}: beyond that nothing is guaranteed")
        if self.n_neighbors is not None:
            check_count(self.n_neighbors, "n_neighbors", least=1)
        if self.threshold is not None:
            check_finite(self.threshold, "threshold")
        if self.max_screened is not None:
            check_count(self.max_screened, "max_screened")

    @property
    def _about_screening(self) -> dict[str, float | None]:
        return {"screening_noise": self.screening_noise, "threshold": self.threshold}

    @property
    def screened(self) -> int:
        """How many queries may be screened, where any are."""
        return math.ceil(_SCREENED * self.max_answered) if self.max_screened is None else self.max_screened

    @property
    def screens(self) -> bool:
        """Whether queries are screened: unless `max_screened` is 0, or noise was given for the votes alone."""
        given = [name for name, value in self._about_screening.items() if value is not None]
        if self.max_screened == 0:
            if given:
                raise ValueError(f"{given[0]} must not be given where max_screened is 0: nothing is screened")
            return False
        if self.vote_noise is None:
            return True
        if not given and self.max_screened is None:
            return False
        missing = [name for name, value in self._about_screening.items() if value is None]
        if missing:
            raise ValueError(f"{missing[0]} must be given: vote_noise is, so nothing is calibrated")
        return True


def make_plan(wish: Wish, ballot: Ballot) -> VotePlan:
    """Return the plan of a wish, at most ``wish.epsilon``, and at least 0.999 of it where it was calibrated."""
    if not ballot.screened and (wish.max_screened or any(v is not None for v in wish._about_screening.values())):
        raise ValueError("max_screened must be 0 or None here: these votes have no largest one to screen")
    screens = ballot.screened and wish.screens
    if wish.vote_noise is not None:
        plan = _plan_at(wish, ballot, screens, wish.vote_noise)
        plan.votes.check()  # noise that cannot be sampled is refused before anything is paid
        if wish.epsilon is not None and (cost := plan.epsilon(wish.delta)) > wish.epsilon:
            raise ValueError(
                f"vote_noise is too small: the plan costs epsilon {cost:.4g} at delta {wish.delta:g}, more than the "
                f"{wish.epsilon:g} that is allowed; leave it out to have it calibrated"
            )
        return plan
    target = DEFAULT_EPSILON if wish.epsilon is None else wish.epsilon
    if screens and target > _LARGEST_SCREENED:
        raise ValueError(
            f"epsilon must be at most {_LARGEST_SCREENED:g} where queries are screened: a larger one protects nothing, "
            "and coins tossed in double precision do not bear it; max_screened=0 screens nothing"
        )
    plan = _plan_at(wish, ballot, screens, _calibrate(wish, ballot, target))
    plan.votes.check()
    return plan


@lru_cache(maxsize=64)
def _calibrate(wish: Wish, ballot: Ballot, target: float) -> float:
    """Return the least vote noise, up to a thousandth, at which the plan costs `target`."""
    screens = ballot.screened and wish.screens

    def cost(noise: float) -> float:
        return _plan_at(wish, ballot, screens, noise).epsilon(wish.delta)

    noise, slope = _first_guess(wish, ballot, screens, target), -1.0
    fixed = _plan_at(wish, ballot, screens, noise).screening if wish.screening_noise is not None else None
    screenings = [] if fixed is None else [SelfComposedDpEvent(fixed.event, wish.screened)]
    if find_epsilon(count_events(screenings), wish.delta) > target:
        raise ValueError("screening_noise is too small: screenings alone cost more than epsilon")
    known: list[tuple[float, float]] = []  # logarithms of noise and of cost over target
    for _ in range(_GUESSES):
        price = cost(noise)
        if (1 - _CLOSE) * target <= price <= target:
            return noise
        known.append((math.log(noise), math.log(min(max(price, 1e-9 * target), _LARGEST_EPSILON) / target)))
        if len(known) > 1 and known[-1][0] != known[-2][0]:
            slope = (known[-1][1] - known[-2][1]) / (known[-1][0] - known[-2][0])
        # Cost falls about like 1 / noise. Aim at the middle of what is near enough, and never leap.
        leap = (known[-1][1] + _CLOSE / 2) / -min(slope, -0.2)
        noise *= math.exp(min(max(leap, -1.5), 1.5))
    safe = [logarithm for logarithm, surplus in known if surplus <= 0]
    if not safe:
        raise ValueError("epsilon cannot be reached: raise it, or lower max_answered")
    return math.exp(min(safe)) * (1 + 2.0**-40)


def _first_guess(wish: Wish, ballot: Ballot, screens: bool, target: float) -> float:
    """Return the noise that a Gaussian mechanism without sampling would need, times the sampling rate."""
    plan = _plan_at(wish, ballot, screens, 1.0)
    leaf, times = split_event(plan.votes.mechanism)[0]
    squares = plan.max_answered * times / leaf.noise_multiplier**2
    if plan.screening is not None and wish.screening_noise is None:
        squares += plan.max_screened / plan.screening.noise**2
    multiplier = analytic_gaussian_scale(1.0, min(target, 60.0), max(wish.delta, 1e-15))
    return float(multiplier * math.sqrt(squares) * wish.sampling_rate)


def _plan_at(wish: Wish, ballot: Ballot, screens: bool, noise: float) -> VotePlan:
    """Return the plan with this vote noise."""
    sample = PoissonSample(wish.sampling_rate)
    voters = wish.n_neighbors or min(math.ceil(ballot.neighbors * noise), _MOST_NEIGHBORS)
    screening, screened = None, 0
    if screens:
        screening = Screening(
            sample,
            _SCREENING * noise if wish.screening_noise is None else wish.screening_noise,
            _THRESHOLD * voters if wish.threshold is None else wish.threshold,
            voters,
            ballot.whole and wish.screened <= _MOST_SCREENED and voters <= _MOST_NEIGHBORS,
        )
        screened = wish.screened
    return VotePlan(
        n_neighbors=voters,
        screening=screening,
        max_screened=screened,
        votes=NoisySums(sample, ballot.event(noise), noise, voters, ballot.unit),
        max_answered=wish.max_answered,
        size=ballot.size,
    )
