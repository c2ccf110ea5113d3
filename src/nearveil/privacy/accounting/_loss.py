r"""Privacy loss: curves of single mechanisms, and the curve of many together, all from above.

A *curve* takes ``log a`` and returns ``H(a) - max(1 - a, 0)``, where H is the hockey-stick divergence of a pair that
dominates the mechanism in one direction. Curves are never below the truth: each adds what its own rounding may hide.

Many mechanisms are convolved by FFT. Its rounding is absolute, a small delta is not; so the distributions are tilted by
``exp(tilt * loss)`` first, which commutes with convolution, so that the relevant losses have large mass. A proved
bound on the remaining rounding is added. Proofs: ``docs/theory/accounting.md``, Theorem 2 and Lemma 8.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.optimize import brentq
from scipy.special import logsumexp

from nearveil.privacy.accounting.binary import list_multiples
from nearveil.privacy.checks import MAX_EPSILON, ROUNDING
from nearveil.privacy.noise import compute_gaussian_deltas

Floats = NDArray[np.float64]
Curve = Callable[[Floats], Floats]
Parts = Sequence[tuple[Curve, int]]

_U = 2.0**-53  # half a unit in the last place
_UP = 1 + ROUNDING
_IN = 1 - ROUNDING  # a curve falls on both sides of 0, so an argument that is nearer to 0 errs upwards
_FFT_ERROR = 40 * _U  # for each doubling of the length (Lemma 8)
_GRID_SHARE = 2e-6  # of epsilon, that the rounding of losses to a grid should add
_LOOSE = 1e-4  # if it may add more, another accountant may be tighter
_LONGEST = 2**20  # points of a grid; where more would be needed it is coarser, from above
_MOST = 2**30  # mechanisms; beyond, the sum of their roundings makes the bound useless
_WIDEST = 64.0  # spacing; beyond, the bound is useless
_TAIL = 36.0  # minus the logarithm of the mass outside a window
_WEAK = -80.0  # logarithm of a negligible frequency
_NEAR = np.geomspace(1e-6, 0.5, 96)
_SHARES = np.union1d(_NEAR, 1 - _NEAR)  # of the range of a loss, dense at both ends


def make_gaussian_curve(noise_multiplier: float) -> Curve:
    """Return the curve of Gaussian noise; it is the same in both directions."""
    # With so little noise, and with less, every loss up to the largest is as good as certain to be passed.
    multiplier = min(max(noise_multiplier * _IN, 1e-6), 1e15)

    def curve(logs: Floats) -> Floats:
        return _mirror(logs, compute_gaussian_deltas(multiplier, np.abs(logs)))

    return curve


def make_laplace_curve(noise_multiplier: float) -> Curve:
    """Return the curve of Laplace noise; it is the same in both directions."""
    largest = _UP / noise_multiplier

    def curve(logs: Floats) -> Floats:
        return _mirror(logs, -np.expm1(np.minimum((np.abs(logs) - largest) / 2, 0)))

    return curve


def make_response_curve(epsilon: float, truth: float) -> Curve:
    """Return the curve of randomised response that answers truthfully with this probability."""
    largest = epsilon * _UP

    def curve(logs: Floats) -> Floats:
        return _mirror(logs, -truth * _UP * np.expm1(np.minimum(np.abs(logs) - largest, 0)))

    return curve


def open_curve(logs: Floats) -> Floats:
    """Return the curve of a release that hides nothing."""
    return np.exp(np.minimum(logs, 0))


def make_sampled_curve(curve: Curve, rate: float) -> Curve:
    """Return the curve of a mechanism on a Poisson sample, the record above the line ("remove")."""

    def sampled(logs: Floats) -> Floats:
        # H'(a) = rate * H(1 + (a - 1) / rate); below a = 1 - rate nothing is left.
        shift = np.maximum(np.expm1(logs) / rate * _IN, -1)
        with np.errstate(divide="ignore"):
            inner = np.log1p(shift) * _IN
        inside = curve(np.clip(inner, -2 * MAX_EPSILON, 2 * MAX_EPSILON))
        return np.asarray(np.where(shift > -1, rate * inside * _UP, 0))

    return sampled


def reverse_curve(curve: Curve) -> Curve:
    """Return the curve of Q against P."""

    def reverse(logs: Floats) -> Floats:
        return np.asarray(np.exp(logs) * curve(-logs) * _UP)

    return reverse


def _mirror(logs: Floats, values: Floats) -> Floats:
    """Return ``values``, those of both directions at ``abs(logs)``, for either sign."""
    return np.asarray(np.minimum(values * _UP, 1) * np.exp(np.minimum(logs, 0)) * _UP)


class Bound(NamedTuple):
    """An upper bound, and whether it is known to be near the truth."""

    value: float
    tight: bool


def find_loss_epsilon(parts: Parts, delta: float) -> Bound:
    """Return an epsilon, or infinity, at which all runs together are private in one direction."""
    parts, count = _count(parts)
    if _sum_curves(parts, MAX_EPSILON) > delta:
        return Bound(math.inf, tight=True)
    if _sum_curves(parts, 0.0) <= delta:
        return Bound(0.0, tight=True)
    if count > _MOST:
        return Bound(math.inf, tight=False)
    if count == 1:
        return Bound(_find_reach(parts[0][0], delta, 1e-13), tight=True)
    # Similar deltas share a grid, so that epsilon never rises with delta.
    level = 2.0 ** math.floor(math.log2(delta))
    tilt, guess = _Sketch.of(parts, level).for_delta(level)
    composed = _convolve(parts, tilt, guess, level)
    epsilon = math.inf if composed is None else composed.epsilon(delta)
    return Bound(epsilon, composed is not None and composed.tight and composed.losses[0] < epsilon < math.inf)


def find_loss_delta(parts: Parts, epsilon: float) -> Bound:
    """Return a delta of at most 1 at which all runs together are private in one direction."""
    parts, count = _count(parts)
    simple = min(_sum_curves(parts, 0.0), 1.0)
    if count <= 1:
        return Bound(min(_sum_curves(parts, epsilon), 1.0), tight=True)
    if _sum_curves(parts, MAX_EPSILON) >= 1:
        return Bound(simple, tight=True)
    if count > _MOST:
        return Bound(simple, tight=False)
    tilt, guess = _Sketch.of(parts, 1e-250).for_epsilon(epsilon)
    composed = _convolve(parts, tilt, max(epsilon, 1 / tilt), guess)
    delta = 1.0 if composed is None else composed.delta(epsilon)
    return Bound(min(delta, simple), composed is not None and composed.tight and delta < 1)


def _count(parts: Parts) -> tuple[Parts, int]:
    """Return the parts that have any loss, and their total number of runs."""
    lossy = [(curve, times) for curve, times in parts if _evaluate_at(curve, 0.0) > 0]
    return lossy, sum(times for _, times in lossy)


def _sum_curves(parts: Parts, log: float) -> float:
    """Return the sum of all curves; at 0 it bounds that of the composition, as total variation does."""
    return math.fsum(times * _evaluate_at(curve, log) for curve, times in parts) * _UP


def _evaluate_at(curve: Curve, log: float) -> float:
    return float(curve(np.array([log]))[0])


def _find_reach(curve: Curve, level: float, precision: float) -> float:
    """Return a loss, the least up to `precision` and at most the largest, at which the curve is down to `level`."""
    low, high = 0.0, MAX_EPSILON
    while high - low > precision * high > 1e-300:
        points = np.linspace(low, high, 65)[1:-1] if low else np.geomspace(high * 1e-6, high, 65)[:-1]
        below = curve(points) <= level
        at = int(np.argmax(below)) if np.any(below) else len(points)
        low, high = (points[at - 1] if at else low), (points[at] if at < len(points) else high)
    return float(high)


def _find_range(curve: Curve, level: float) -> tuple[float, float]:
    """Return the lower and upper reach of one mechanism's loss; the mass beyond is negligible."""
    return _find_reach(reverse_curve(curve), max(level, 1e-20), 1e-9), _find_reach(curve, max(level, 1e-305), 1e-9)


@dataclass(frozen=True)
class _Sketch:
    """Approximate moments of the total loss. They choose the grid; no bound depends on them."""

    tilts: Floats
    moments: Floats  # ``log E exp(tilt * loss)``

    @classmethod
    def of(cls, parts: Parts, delta: float) -> "_Sketch":
        samples = []
        for curve, times in parts:
            low, high = _find_range(curve, delta * 1e-9 / times)
            points = np.concatenate([-low * _SHARES[::-1], high * _SHARES])
            samples.append((points, curve(points) * np.gradient(points), times))
        variance = sum(2 * times * float(np.sum(weights)) for _, weights, times in samples)
        tilts = np.geomspace(1e-2, 1e3, 96) / math.sqrt(variance)
        moments = np.zeros_like(tilts)
        for points, weights, times in samples:
            # E exp(tilt * loss) = 1 + tilt (tilt + 1) * the integral of exp(tilt * log a) times the curve
            with np.errstate(divide="ignore"):
                integral = logsumexp(np.multiply.outer(tilts, points) + np.log(weights), axis=1)
            moments += times * np.logaddexp(0, integral + np.log(tilts * (tilts + 1)))
        return cls(tilts, moments)

    def for_delta(self, delta: float) -> tuple[float, float]:
        """Return the best tilt for a delta, and its approximate epsilon."""
        epsilons = (self._chernoff - math.log(delta)) / self.tilts
        best = int(np.argmin(epsilons))
        return float(self.tilts[best]), max(float(epsilons[best]), 1 / float(self.tilts[best]))

    def for_epsilon(self, epsilon: float) -> tuple[float, float]:
        """Return the best tilt for an epsilon, and its approximate delta."""
        log_deltas = self._chernoff - self.tilts * epsilon
        best = int(np.argmin(log_deltas))
        return float(self.tilts[best]), math.exp(min(max(float(log_deltas[best]), -600.0), 0.0))

    @property
    def _chernoff(self) -> Floats:
        """The logarithm of delta at epsilon 0 by Theorem 1, at order 1 + tilt."""
        return np.asarray(self.moments + self.tilts * np.log(self.tilts) - (self.tilts + 1) * np.log1p(self.tilts))


@dataclass(frozen=True)
class _Losses:
    """A distribution of the privacy loss on multiples of `spacing` that dominates a mechanism's."""

    spacing: float
    first: int  # the first multiple
    mass: Floats
    infinite: float  # mass of the infinite loss
    times: int  # runs of the mechanism

    @classmethod
    def of(cls, curve: Curve, times: int, spacing: float, reach: tuple[float, float]) -> "_Losses":
        """Interpolate H linearly: it is convex in a, so its chords are above it, and are the H of a distribution."""
        first, last = -math.ceil(reach[0] / spacing) - 1, math.ceil(reach[1] / spacing) + 1
        excess = curve(list_multiples(spacing, first, last) * _IN)
        steps = np.diff(excess)
        right = np.append(steps, 0.0) / math.expm1(spacing)
        left = np.append(excess[:1], steps / -math.expm1(-spacing))  # the first chord goes to H(0) = 1
        kink = np.zeros(len(excess))
        kink[-first] = 1  # of max(1 - a, 0)
        mass = right - left + kink + 16 * _U * (np.abs(right) + np.abs(left) + kink)
        return cls(spacing, first, np.maximum(mass, 0), float(excess[-1]), times)

    @property
    def last(self) -> int:
        """The last multiple."""
        return self.first + len(self.mass) - 1

    @cached_property
    def surplus(self) -> float:
        """Bound the excess of the total mass over 1."""
        return max(float(np.sum(self.mass)) + self.infinite - 1, 0.0) + 128 * _U

    @cached_property
    def losses(self) -> Floats:
        return list_multiples(self.spacing, self.first, self.last)

    @cached_property
    def log_mass(self) -> Floats:
        with np.errstate(divide="ignore"):
            return np.log(self.mass)

    @cached_property
    def depth(self) -> float:
        """The largest logarithm of a mass, in absolute value."""
        return float(np.max(np.abs(self.log_mass[self.mass > 0])))

    def rounding(self, tilt: float) -> float:
        """Bound the error of the logarithm of a tilted mass, or of their sum."""
        return 16 * _U * (abs(tilt) * max(-self.first, self.last) * self.spacing + self.depth + 16)

    def moment(self, tilt: float) -> float:
        """Return ``log E exp(tilt * loss)``, from above."""
        exponents = tilt * self.losses + self.log_mass
        largest = float(np.max(exponents))
        return largest + math.log(np.sum(np.exp(exponents - largest))) + self.rounding(tilt)

    def tilted(self, tilt: float) -> tuple[float, Floats]:
        """Return the moment, and the distribution tilted; its sum is at most 1."""
        moment = self.moment(tilt) + self.rounding(tilt)
        return moment, np.exp(tilt * self.losses + self.log_mass - moment)


@dataclass(frozen=True)
class _Convolution:
    """All losses in a window, tilted: `mass` is the true one times ``exp(tilt * loss - moment)``, up to `error`."""

    losses: Floats
    mass: Floats
    tilt: float
    moment: float
    error: float  # largest L2 norm of the error of `mass`
    above: float  # largest tilted mass above the window
    infinite: float  # mass of the infinite loss
    tight: bool  # whether the grid is as fine as it should be

    def delta(self, epsilon: float) -> float:
        """Return the divergence at ``exp(epsilon)``, from above."""
        largest = max(abs(float(self.losses[0])), abs(float(self.losses[-1])))
        epsilon -= 8 * _U * largest  # the losses are rounded
        if epsilon < self.losses[0]:
            return 1.0
        start = int(np.searchsorted(self.losses, epsilon, side="right"))
        weights = self._weight(self.losses[start:] - epsilon)
        beyond = self._weight(np.array([max(self.losses[-1] - epsilon, math.log1p(1 / self.tilt))]))[0]  # the largest
        inside = np.sum(weights * self.mass[start:]) + np.linalg.norm(weights) * self.error
        rounding = 16 * _U * (abs(self.moment) + self.tilt * largest + 16)
        scale = np.exp(min(self.moment - self.tilt * epsilon + rounding, 700.0))
        return float(min(scale * (inside + beyond * self.above) + self.infinite, 1.0))

    def epsilon(self, delta: float) -> float:
        """Return an epsilon at which the divergence is at most `delta`; infinity if the window has none."""
        low, high = max(float(self.losses[0]), 0.0), float(self.losses[-1])
        if high <= low or self.delta(high) > delta:
            return math.inf
        if self.delta(low) <= delta:
            return low

        def surplus(epsilon: float) -> float:
            return math.log(max(self.delta(epsilon) / delta, 1e-9))

        root, step = brentq(surplus, low, high, xtol=1e-300, rtol=1e-14), 1e-15
        while self.delta(root) > delta:
            root, step = min(root * (1 + step), high), 2 * step
        return float(root)

    def _weight(self, above: Floats) -> Floats:
        return np.asarray(-np.expm1(-above) * np.exp(-self.tilt * above))


def _convolve(parts: Parts, tilt: float, epsilon: float, delta: float) -> _Convolution | None:
    """Return the convolution of all parts, tilted, on a grid for about this epsilon and delta; None without one."""
    reaches = [_find_range(curve, delta * 1e-7 / times) for curve, times in parts]
    # Rounding one loss to the grid adds about (tilt + 1) spacing^2 / 12 to epsilon.
    rounded = sum(times for _, times in parts) * (tilt + 1) / (12 * epsilon)
    spacing = max(math.sqrt(_GRID_SHARE / rounded), 2 * max(map(sum, reaches)) / _LONGEST)
    # The largest loss of what runs most often becomes a multiple: randomised response is then not rounded at all.
    largest = max(zip(parts, reaches, strict=True), key=lambda part: part[0][1])[1][1]
    while spacing < _WIDEST:
        spacing = max(spacing, largest / max(largest // spacing, 1))
        losses = [
            _Losses.of(curve, times, spacing, reach) for (curve, times), reach in zip(parts, reaches, strict=True)
        ]
        window = _find_window(losses, tilt)
        if window.size <= _LONGEST:
            return _convolve_tilted(losses, tilt, window, tight=spacing**2 * rounded < _LOOSE)
        spacing *= 1.1 * window.size / _LONGEST
    return None


class _Window(NamedTuple):
    """The first and last relevant multiple of the spacing, and a bound on the tilted mass above."""

    first: int
    last: int
    above: float

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def _find_window(losses: Sequence[_Losses], tilt: float) -> _Window:
    """Return a window outside of which there is hardly any tilted mass, by Chernoff's bound."""

    def moment(more: float) -> float:
        return sum(part.times * part.moment(tilt + more) for part in losses)

    spacing, variance = losses[0].spacing, 0.0
    for part in losses:
        tilted = part.tilted(tilt)[1]
        mean = np.sum(tilted * part.losses)
        variance += part.times * float(np.sum(tilted * (part.losses - mean) ** 2))
    spread = max(math.sqrt(variance), spacing)
    base = moment(0.0) - 2 * sum(part.times * part.rounding(tilt) for part in losses)
    low, high = -math.inf, math.inf
    for more in (2 / spread, 4 / spread, 8 / spread):
        low = max(low, (base - moment(-more) - _TAIL) / more)
        high = min(high, (moment(more) - base + _TAIL) / more)
    bottom = sum(part.times * part.first for part in losses)
    top = sum(part.times * part.last for part in losses)
    first, last = max(math.floor(low / spacing), bottom), math.ceil(high / spacing) + 1
    return _Window(first, top, 0.0) if last >= top else _Window(first, last, 2 * math.exp(-_TAIL))


def _convolve_tilted(losses: Sequence[_Losses], tilt: float, window: _Window, *, tight: bool) -> _Convolution:
    """Return the tilted distribution of the sum in a window. Mass outside wraps around into it, which is safe."""
    size = 2 ** math.ceil(math.log2(max(window.size, *(len(part.mass) for part in losses), 16)))
    moment, norms, offset = 0.0, 0.0, 0
    product = np.ones(size // 2 + 1, dtype=np.complex128)
    for part in losses:
        log_sum, tilted = part.tilted(tilt)
        moment += part.times * (log_sum + part.rounding(tilt))
        norms += part.times * float(np.linalg.norm(tilted))
        offset += part.times * part.first
        spectrum = fft.rfft(tilted, size)
        spectrum /= np.maximum(np.abs(spectrum), 1)  # that of a distribution is in the unit disc
        with np.errstate(divide="ignore"):
            strong = (product != 0) & (part.times * np.log(np.abs(spectrum)) > _WEAK)
        product[~strong] = 0
        product[strong] *= _raise_to_power(spectrum[strong], part.times)
    surplus = sum(part.times * part.surplus for part in losses)
    return _Convolution(
        losses=list_multiples(losses[0].spacing, window.first, window.last),
        mass=np.maximum(np.roll(fft.irfft(product, size), offset - window.first)[: window.size], 0),
        tilt=tilt,
        moment=moment,
        error=_FFT_ERROR * math.log2(size) * norms + math.exp(_WEAK + 1),
        above=window.above,
        infinite=sum(part.times * part.infinite for part in losses) * math.exp(min(surplus, 700.0)),
        tight=tight,
    )


def _raise_to_power(base: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """Return the power by squaring, with the rounding of `exponent` multiplications."""
    result = np.ones_like(base)
    while exponent:
        if exponent & 1:
            result = result * base
        base, exponent = base * base, exponent >> 1
    return result
