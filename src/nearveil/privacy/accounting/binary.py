r"""Exact adaptive composition of mechanisms with two outcomes, and of noisy screenings.

A round answers yes or no. An adversary who has seen all answers so far picks one pair of Bernoulli
distributions from a fixed set, P without the record and Q with it. Write the hockey-stick divergence of
the whole as a function of ``a = exp(epsilon)``; then Bellman's equation

    V_0(a) = max(1 - a, 0),    V_{i+1}(a) = max over pairs of  sum_o P(o) V_i(a Q(o) / P(o))

gives it exactly; this module computes it from above, by three facts that ``docs/theory/accounting.md`` proves:

* V is convex in a, so a chord between two points of a grid is above it;
* a pair is a *move*: an outcome of probability `rising` becomes likelier by `gain`. The sum is convex in
  (rising, gain) and grows with `gain`, so any set of moves with a hull that covers the true ones is safe;
* the other direction, Q against P, is ``1 - a + a V(1/a)``: one recursion gives both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, logsumexp, ndtr

from nearveil.privacy import checks
from nearveil.privacy.events import NoisyScreening

Point = Sequence[float] | NDArray[np.float64]

_CELLS_PER_MOVE = 16  # grid cells in the step of the strongest move; more where the rounds are few
_FURTHEST = 4096  # a move by more cells is cut off, from above
_WIDEST = 200_000  # cells on each side of a = 1; beyond, the curve is extended from above
_FEW_ROUNDS = 256  # up to here all moves are used as they are
_TAIL = 1e-15  # where a curve has fallen below this it is held constant, from above
_SAG = 1e-4  # how much higher the thinned moves may be than the true ones where it matters


@dataclass(frozen=True)
class Moves:
    """The moves of one round: an outcome becomes likelier by `gain` under Q, the other less likely."""

    rising: NDArray[np.float64]  # probability under P of the outcome that becomes likelier
    falling: NDArray[np.float64]  # probability under P of the other, ``1 - rising`` with all its digits
    gain: NDArray[np.float64]  # probability that moves from the second to the first under Q

    def __post_init__(self) -> None:
        """Validate the moves."""
        if not (self.rising.ndim == 1 and self.rising.shape == self.falling.shape == self.gain.shape):
            raise ValueError("rising, falling and gain must be vectors of one length")
        if not np.allclose(self.rising + self.falling, 1, rtol=0, atol=1e-9):
            raise ValueError("rising and falling must be probabilities that sum to 1")
        if not (np.all(self.gain >= 0) and np.all(self.gain <= self.falling * (1 + 1e-9) + 1e-300)):
            raise ValueError("gain must be between 0 and falling")

    @classmethod
    def between(cls, p: NDArray[np.float64], q: NDArray[np.float64]) -> "Moves":
        """Return the moves of Bernoulli pairs, the probability of a yes without and with the record."""
        return cls(np.where(q > p, p, 1 - p), np.where(q > p, 1 - p, p), np.abs(q - p))


@dataclass(frozen=True)
class PrivacyCurve:
    """An upper bound on delta as a function of epsilon, for both directions."""

    # `excess` holds ``V(a) - max(1 - a, 0)`` at ``a = exp(spacing * (first + i))``; V is linear between points.

    spacing: float
    first: int
    excess: NDArray[np.float64]

    def delta(self, epsilon: float) -> float:
        """Return the larger delta of the two directions."""
        point = np.array([checks.check_epsilon(epsilon)])
        return float(max(self.forward(point)[0], self.reversed().forward(point)[0]))

    def epsilon(self, delta: float, direction: Literal["add", "remove"] | None = None) -> float:
        """Return the least epsilon for `delta`, infinity if none: "add" (P against Q), "remove", or both."""
        checks.check_delta(delta)
        curves = {"add": self, "remove": self.reversed()}
        if direction is not None and direction not in curves:
            raise ValueError('direction must be "add", "remove" or None')
        return max(curve._find_forward_epsilon(delta) for name, curve in curves.items() if direction in (None, name))

    def reversed(self) -> "PrivacyCurve":
        """Return the curve of Q against P."""
        last = self.first + len(self.excess) - 1
        return PrivacyCurve(self.spacing, -last, (np.exp(-self._logs) * self.excess)[::-1])

    def forward(self, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return V at ``exp(epsilons)``, which may be negative, P against Q."""
        return np.asarray(_compute_hinge(epsilons) + self.excess_at(epsilons))

    def excess_at(self, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``V - max(1 - a, 0)``: a curve to compose with others."""
        logs, last = self._logs, len(self.excess) - 1
        epsilons = epsilons * (1 - checks.ROUNDING)  # the excess is largest at a = 1
        at = np.clip(np.searchsorted(logs, epsilons, side="right") - 1, 0, last - 1)
        share = np.expm1(epsilons - logs[at]) / math.expm1(self.spacing)
        inside = (1 - share) * self.excess[at] + share * self.excess[at + 1]
        # Beyond the grid V is at most its last value, and below it at most the chord to V(0) = 1.
        below = self.excess[0] * np.exp(np.minimum(epsilons - logs[0], 0))
        values = np.where(epsilons >= logs[-1], self.excess[-1], np.where(epsilons < logs[0], below, inside))
        return np.asarray(values * (1 + checks.ROUNDING))

    @property
    def _logs(self) -> NDArray[np.float64]:
        return list_multiples(self.spacing, self.first, self.first + len(self.excess) - 1)

    def _find_forward_epsilon(self, delta: float) -> float:
        values = self.excess[-self.first :]  # the grid from a = 1 upwards, where the excess is V itself
        if values[-1] > delta:
            return math.inf
        at = int(np.argmax(values <= delta))
        if at == 0:
            return 0.0
        share = (values[at - 1] - delta) / (values[at - 1] - values[at])
        return float(self.spacing * (at - 1) + math.log1p(share * math.expm1(self.spacing)))

    def assert_convex(self, rounds: int) -> None:
        """Raise if the curve is not convex in a, beyond the rounding of all rounds."""
        logs = self._logs
        values, widths = self.forward(logs), np.diff(np.exp(logs))
        slopes = np.diff(values) / widths
        rounding = (64 + 4 * rounds) * values[:-2] + 64 * np.exp(np.minimum(logs[:-2], 0))
        noise = np.finfo(float).eps * rounding * (1 / widths[1:] + 1 / widths[:-1])
        if np.any(np.diff(slopes) < -noise):
            raise ArithmeticError("the composed curve is not convex: report the parameters, do not use the value")


def compose_binary(moves: Moves, count: int) -> PrivacyCurve:
    """Bound `count` rounds with adaptive moves (docs/theory/accounting.md, Theorem 4; test_screening.py)."""
    checks.check_count(count, "count")
    useful = _find_hull(moves, _TAIL / max(4 * count, 1))
    if count == 0 or len(useful.gain) == 0:
        return PrivacyCurve(1.0, -1, np.zeros(3))
    spacing = _choose_spacing(useful, count)
    if count > _FEW_ROUNDS:
        useful = _thin(useful)
    kernels = [
        _Kernel.of(rising, falling, gain, spacing)
        for rising, falling, gain in zip(useful.rising, useful.falling, useful.gain, strict=True)
    ]
    reach = max(kernel.reach for kernel in kernels) + 1
    low, excess = reach, np.zeros(2 * reach + 1)
    for done in range(1, count + 1):
        # A round spreads by `reach`. Beyond the window V is at most its last value, or the chord to V(0) = 1.
        below = excess[0] * np.exp(-spacing * np.arange(2 * reach, 0, -1))
        padded = np.concatenate([below, excess, np.full(2 * reach, excess[-1])])
        low, excess = low + reach, _round(kernels, padded, reach, low + reach, spacing)
        # The constant tail must not creep outwards: every round may add its share to it.
        low, excess = _trim(excess, low, spacing, _TAIL * done / count)
    # Every operation rounds by half a unit; all terms are positive, so the errors stay relative.
    curve = PrivacyCurve(spacing, -low, excess * (1 + 16 * count * np.finfo(float).eps))
    curve.assert_convex(count)
    return curve


@dataclass(frozen=True)
class _Kernel:
    """One move on the grid: V(a) becomes ``at_zero + sum of weight * V(a * exp(spacing * shift))``."""

    shifts: tuple[int, ...]
    weights: tuple[float, ...]
    reach: int
    source: NDArray[np.float64]  # contribution of the kink of max(1 - a, 0) to the excess, from -reach to reach
    never: float  # probability of an outcome that is almost impossible under Q: infinite loss, beyond the reach
    lost: float  # the same the other way round, P and Q exchanged

    @classmethod
    def of(cls, rising: float, falling: float, gain: float, spacing: float) -> "_Kernel":
        taps: dict[int, float] = {}
        furthest = min(_FURTHEST, int(checks.MAX_EPSILON / spacing))
        at_zero, lost = 0.0, 0.0
        growth = gain / rising if rising > 0 else math.inf
        for mass, ratio in ((rising, growth), (falling, -min(gain / falling, 1.0))):
            log_ratio = math.log1p(ratio) if ratio > -1 else -math.inf
            cell = log_ratio / spacing
            if cell >= furthest:  # V falls with a, so V(a * ratio) is at most V at the furthest shift
                taps[furthest] = taps.get(furthest, 0.0) + mass
                lost += rising + gain - mass * math.exp(spacing * furthest)
            elif cell < -furthest:  # the chord to V(0) = 1
                share = math.exp(log_ratio + spacing * furthest)
                taps[-furthest] = taps.get(-furthest, 0.0) + mass * share
                at_zero += mass * (1 - share)
            else:
                left = math.floor(cell)
                share = math.expm1(log_ratio - spacing * left) / math.expm1(spacing)
                for shift, weight in ((left, mass * (1 - share)), (left + 1, mass * share)):
                    taps[shift] = taps.get(shift, 0.0) + weight
        taps = {shift: weight for shift, weight in taps.items() if weight > 0} or {0: 0.0}
        shifts, weights = tuple(taps), tuple(taps.values())
        reach = max(abs(shift) for shift in shifts)
        logs, source = list_multiples(spacing, -reach, reach), np.full(2 * reach + 1, at_zero)
        for shift, weight in taps.items():
            source += weight * _compute_hinge(logs + spacing * shift)
        return cls(shifts, weights, reach, np.maximum(source - _compute_hinge(logs), 0), at_zero, max(lost, 0.0))


def _round(
    kernels: list[_Kernel], padded: NDArray[np.float64], reach: int, low: int, spacing: float
) -> NDArray[np.float64]:
    """Return the excess after one more round; `padded` has `reach` more points on each side than the result."""
    size = len(padded) - 2 * reach
    best, value, term = np.zeros(size), np.empty(size), np.empty(size)
    for kernel in kernels:
        value.fill(0.0)
        for shift, weight in zip(kernel.shifts, kernel.weights, strict=True):
            np.multiply(padded[reach + shift : reach + shift + size], weight, out=term)
            value += term
        value[low - kernel.reach : low + kernel.reach + 1] += kernel.source
        if kernel.never > 0:
            value[low + kernel.reach + 1 :] += kernel.never
        if kernel.lost > 0:
            value[: low - kernel.reach] += kernel.lost * np.exp(spacing * np.arange(-low, -kernel.reach))
        np.maximum(best, value, out=best)
    return best


def _trim(excess: NDArray[np.float64], low: int, spacing: float, tail: float) -> tuple[int, NDArray[np.float64]]:
    """Return the window cut where the curve of either direction has fallen to `tail`, and its new lower end."""
    widest = min(_WIDEST, int(checks.MAX_EPSILON / spacing))
    above = excess[low + 1 : low + widest] <= tail
    high = low + 2 + int(np.argmax(above)) if np.any(above) else low + widest
    # The other direction is the same from a = 1 downwards.
    other = excess[max(low - widest, 0) : low][::-1]
    below = other * np.exp(spacing * np.arange(1, len(other) + 1)) <= tail
    keep = 1 + int(np.argmax(below)) if np.any(below) else len(other)
    return keep, excess[low - keep : high]


def list_multiples(spacing: float, first: int, last: int) -> NDArray[np.float64]:
    """Return the multiples of `spacing` from the first to the last."""
    return np.arange(first, last + 1, dtype=np.float64) * spacing


def _compute_hinge(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(-np.expm1(np.minimum(logs, 0)))


def _choose_spacing(moves: Moves, count: int) -> float:
    """Return a spacing that the strongest move steps over in whole cells, so that it is hardly interpolated."""
    hottest = int(np.argmax(_measure_strength(moves)))
    up = math.log1p(moves.gain[hottest] / max(moves.rising[hottest], 1e-6))
    typical = math.sqrt(up * moves.gain[hottest] / moves.falling[hottest])  # one outcome may step far, the other near
    cells = max(_CELLS_PER_MOVE, round(_CELLS_PER_MOVE * (8192 / count) ** (1 / 3)))
    return float(min(max(up / math.ceil(cells * up / typical), 1e-7), 0.25))


def _measure_strength(moves: Moves) -> NDArray[np.float64]:
    """Return the variance of the likelihood ratio, which decides in the long run; large ratios count as 1."""
    up = np.minimum(moves.gain / np.maximum(moves.rising, 1e-300), 1)
    down = np.minimum(moves.gain / np.maximum(moves.falling, 1e-300), 1)
    return np.asarray(moves.gain * (up + down))


def _find_hull(moves: Moves, negligible: float) -> Moves:
    """Return the vertices of the upper hull of all moves, raised by the rounding of the gains."""
    # Moves of an outcome that has less than the `negligible` probability are covered by taking that probability whole.
    points = np.stack([moves.rising, moves.falling, moves.gain * (1 + 1e-12)], axis=1)
    rare, sure = moves.rising + moves.gain <= negligible, moves.falling <= negligible
    covers = [(0.0, 1.0, negligible)] * bool(np.any(rare)) + [(1.0, negligible, negligible)] * bool(np.any(sure))
    hull: list[tuple[float, float, float]] = []
    for point in sorted([*map(tuple, points[~rare & ~sure]), *covers], key=lambda m: (m[0], -m[1], m[2])):
        while hull and _measure_gap(hull[-1], point) <= 0:
            hull.pop()
        while len(hull) > 1 and _turns_up(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    rising, falling, gain = np.array([point for point in hull if point[2] > 0]).reshape(-1, 3).T
    return Moves(rising, falling, np.minimum(gain, falling))


def _measure_gap(a: Point, b: Point) -> float:
    """Return the difference of the rising probabilities of b and a, from the side with more digits."""
    return float(a[1] - b[1] if a[0] > 0.5 else b[0] - a[0])


def _turns_up(a: Point, b: Point, c: Point) -> bool:
    return bool(_measure_gap(a, b) * (c[2] - a[2]) >= (b[2] - a[2]) * _measure_gap(a, c))


def _thin(moves: Moves) -> Moves:
    """Keep every few moves, raised by a part of the gap to the strongest until their hull covers all."""
    gain, points = moves.gain, np.stack([moves.rising, moves.falling], axis=1)
    allowed = _SAG + (1 - _measure_strength(moves) / np.max(_measure_strength(moves))) / 16
    chosen, lifts = [0], [1.0]
    while chosen[-1] < len(gain) - 1:
        start = chosen[-1]
        end, needed = start + 1, 1.0
        for candidate in range(start + 2, len(gain)):
            gaps = np.array([_measure_gap(points[start], point) for point in points[start + 1 : candidate + 1]])
            chord = gain[start] + gaps[:-1] / gaps[-1] * (gain[candidate] - gain[start])
            lift = float(np.max(gain[start + 1 : candidate] / chord))
            ends, higher = [start, candidate], np.array([max(lifts[-1], lift), lift])
            too_high = np.any(higher * gain[ends] > moves.falling[ends])
            if too_high or lift > 1 + np.min(allowed[start : candidate + 1]):
                break
            end, needed = candidate, lift
        lifts[-1] = max(lifts[-1], needed)
        chosen.append(end)
        lifts.append(needed)
    return Moves(moves.rising[chosen], moves.falling[chosen], gain[chosen] * np.array(lifts))


# One noisy screening, and many together. With t the max-vote of the sample and Phi the normal distribution function, a
# screening passes with probability ``Phi((t - threshold) / noise)``. One record, kept by the Poisson sample with
# probability `sampling_rate`, turns t into t - 1, t or t + 1. A sample may hold fewer than `n_neighbors` records, so t
# runs from 0. The direction "remove" compares the database with the record to the one without it, "add" the other way.


def compute_binary_rdp(order: float, log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Renyi divergence of P from Q, given logarithms of their two probabilities, without cancellation."""
    checks.check_order(order)
    ratio = log_p - log_q
    # sum_o Q(o) (P/Q - 1) = 0, so a multiple of it can be subtracted: the remaining terms are positive.
    near = np.clip(ratio, -1 / order, 1 / order)
    small = np.sum(np.exp(log_q) * (np.expm1(order * near) - order * np.expm1(near)), axis=0)
    large = logsumexp(log_q + order * ratio, axis=0)
    divergence = np.where(np.all(near == ratio, axis=0), np.log1p(small), large)
    return np.asarray(np.maximum(divergence, 0) / (order - 1))


def compute_screening_rdp(order: float, screening: NoisyScreening, sampling_rate: float = 1.0) -> float:
    """Return the Renyi divergence of one screening, the largest over both directions and all max-votes."""
    # Exact: Renyi's divergence is quasi-convex, so the mixture over all samples costs no more than its worst sample
    # (docs/theory/accounting.md, Theorem 3; test_screening.py has it to 12 digits).
    base, moved, _ = log_pairs(screening, sampling_rate)
    values = np.concatenate([compute_binary_rdp(order, base, moved), compute_binary_rdp(order, moved, base)])
    return float(np.max(values))


@lru_cache(maxsize=64)
def screening_curve(n: int, screening: NoisyScreening, *, sampling_rate: float = 1.0) -> PrivacyCurve:
    """Return delta over epsilon for `n` adaptively chosen screenings, each with a fresh Poisson sample.

    An upper bound (``docs/theory/accounting.md``, Theorem 4), attacked by ``test_screening.py``: exact values of all
    strategies for small n, of fixed ones for large n. Its `excess_at` composes with other mechanisms, in any order.

    Examples
    --------
    >>> screening = NoisyScreening(noise=75, threshold=180, n_neighbors=300)
    >>> f"{screening_curve(10, screening, sampling_rate=0.15).epsilon(1e-5):.5f}"
    '0.01346'
    """
    return compose_binary(_make_moves(screening, checks.check_rate(sampling_rate)), checks.check_count(n, "n"))


def log_pairs(
    screening: NoisyScreening, sampling_rate: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Return log-probabilities of (pass, fail) without the record and with it, each (2, n_pairs), and the votes."""
    rate, votes = checks.check_rate(sampling_rate), np.arange(screening.n_neighbors + 1)
    score = (votes - screening.threshold) / screening.noise
    logs = np.stack([log_ndtr(score), log_ndtr(-score)])
    low, high = np.arange(len(votes) - 1), np.arange(1, len(votes))
    start, end = np.concatenate([low, high]), np.concatenate([high, low])
    base, step = logs[:, start], logs[:, end] - logs[:, start]
    # Two forms of log(1 - rate + rate * exp(step)): the first keeps all digits, the second cannot overflow.
    with np.errstate(divide="ignore", over="ignore"):
        near = np.log1p(rate * np.expm1(np.minimum(step, 1.0)))
        far = np.logaddexp(np.log1p(-rate), np.log(rate) + step)
    moved = base + (step if rate == 1 else np.where(step < 1, near, far))
    return base, moved, np.stack([votes[start], votes[end]], axis=1)


def _make_moves(screening: NoisyScreening, sampling_rate: float) -> Moves:
    score = (np.arange(screening.n_neighbors + 1) - screening.threshold) / screening.noise
    passes, fails = ndtr(score), ndtr(-score)
    # The difference of two probabilities, taken on the side where both are small and have all their digits.
    gap = sampling_rate * np.where(score[1:] < 0, np.diff(passes), -np.diff(fails))
    return Moves(
        rising=np.concatenate([passes[:-1], fails[1:]]),
        falling=np.concatenate([fails[:-1], passes[1:]]),
        gain=np.concatenate([gap, gap]),
    )
