"""PrivUnit's channel: what the message's law is, how much of epsilon the arithmetic costs, where the cap begins.

A message is ``g = a x + (h - <h, x> x) + z``, x being the private unit vector. The height a is a discrete
Gaussian of scale one on multiples of 1/128, tilted: heights in the cap ``a >= t`` are e^epsilon times as
likely. h is a plain discrete Gaussian on the same lattice in every coordinate. z is a narrow Gaussian: it
fills the gaps between the lattice's points, which lie elsewhere for every x, and drowns the rounding of
floating point. ``docs/theory/privunit.md`` has the proofs.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from nearveil.privacy.noise._calibration import down, plain

Floats = NDArray[np.float64]

EPSILONS = (1e-3, 64.0)  # above, what finite tables add to delta is not proved
LARGEST_DIMENSION = 1 << 20  # up to which the sampler's sums are exact
STEPS = 128  # of the lattice of a and h, in one
BLUR_STEPS = 3  # the scale of z in steps of that lattice
FINE_BITS = 29  # bits between that lattice and the grid of z, 2^-36
CELL_BITS = 33  # bits between the grid of z and the message's cells, which are 1/8 wide
CELL = 2.0**-3
LARGEST_CELL = 127  # a message's coordinates are cut off at +-127 cells, 15.9
REACH = 22 * STEPS  # of a, in steps; beyond lies less than 2^-255 even where tilted by e^64

_BLUR = BLUR_STEPS / STEPS
_NOISE = _BLUR**2 + CELL**2 / 12  # variance that z and the cells add to each direction
_DISTANCE = 0.51  # between the computed and the true vector, in grid steps for each sqrt(dimension)
_TAIL = 17.0  # standard deviations that z is taken to stay within, but for 2^-207
_DELTA_PER_COORDINATE = 2.0**-100


@dataclass(frozen=True)
class Channel:
    """The law of a message.

    Examples
    --------
    >>> channel = calibrate(2.0, 1280)
    >>> f"cap from {channel.cap_start:.3f}, holding {channel.cap_share:.3f} before the tilt and {channel.p:.3f} after"
    'cap from 0.785, holding 0.216 before the tilt and 0.671 after'
    >>> f"{channel.signal:.3f}"
    '0.786'
    """

    epsilon: float  # of the promise
    dimension: int
    tilt: float  # the epsilon of the tilt: what `arithmetic_cost` leaves
    threshold: int  # where the cap begins, in steps of 1/128

    @property
    def cap_start(self) -> float:
        """The t of the continuous cap that the lattice's cap stands for: half a step before its first height."""
        return (self.threshold - 0.5) / STEPS

    @property
    def cap_share(self) -> float:
        """The q of the formulas: what the cap holds of an untilted Gaussian."""
        return float(_caps()[0][self.threshold])

    @property
    def p(self) -> float:
        """The probability of the cap."""
        return self.cap_share / (self.cap_share + math.exp(-self.tilt) * (1 - self.cap_share))

    @property
    def signal(self) -> float:
        """The mean along x in units of the noise along any other direction."""
        return float(_heights(self.tilt)[self.threshold]) / math.sqrt(1 + _NOISE)

    @property
    def extra_delta(self) -> float:
        """What finite tables add to delta (Theorem 5; `test_what_the_arithmetic_and_the_tables_cost`)."""
        return self.dimension * _DELTA_PER_COORDINATE

    def log_likelihood(self, projections: Floats) -> Floats:
        """Return the log-density of a message at a vector with projection <g, x>, relative to a plain Gaussian.

        The plain Gaussian has the variance ``1 + 3^2/128^2 + 1/768`` in every direction. That a message
        is rounded to cells is counted as noise of the same variance, and the cut at +-15.9 is left out.

        Returns: In a range of width `tilt`.
        """
        # Of a, given <g, x>: Gaussian again, with this mean and deviation, before the tilt.
        mean, deviation = projections / (1 + _NOISE), math.sqrt(_NOISE / (1 + _NOISE))
        inside = ndtr((mean - self.cap_start) / deviation)
        low = math.exp(-self.tilt)
        return np.asarray(np.log(inside + low * (1 - inside)) - math.log(self.cap_share + low * (1 - self.cap_share)))

    def log_density(self, projections: Floats, squares: Floats) -> Floats:
        """Return the log-density of a message, by its projection <g, x> and its square |g|^2."""
        variance = 1 + _NOISE
        gaussian = -0.5 * (squares / variance + self.dimension * math.log(2 * math.pi * variance))
        return np.asarray(gaussian + self.log_likelihood(projections))


def calibrate(epsilon: float, dimension: int) -> Channel:
    """Return the channel of the largest signal that keeps the promise.

    `epsilon`: From 1e-3 to 64.
    `dimension`: Of the vectors, after the projection.
    Returns: (epsilon, extra_delta)-DP by Theorem 5 of docs/theory/privunit.md; attacked by
    `test_exact_likelihood_ratios_reach_epsilon_and_never_pass_it`.
    """
    value = plain(epsilon)
    if isinstance(epsilon, bool) or not isinstance(value, float) or not EPSILONS[0] <= value <= EPSILONS[1]:
        raise ValueError(f"epsilon must be a number from {EPSILONS[0]:g} to {EPSILONS[1]:g}; got {epsilon!r}")
    if not 1 <= dimension <= LARGEST_DIMENSION:
        raise ValueError(f"X must have 1 to {LARGEST_DIMENSION} columns after the projection")
    tilt = down(value - arithmetic_cost(dimension))
    return Channel(value, dimension, tilt, int(np.argmax(_heights(tilt))))


def arithmetic_cost(dimension: int) -> float:
    """Return what rounding to the fine grid, in floating point, costs of epsilon (Theorem 4).

    The computed vector lies within v of the true one. Noise z of scale s hides that but for a factor of
    ``exp(17 v / s + v^2 / (2 s^2))``, on either side of a comparison. Attacked by
    `test_what_the_arithmetic_and_the_tables_cost`.

    Examples
    --------
    >>> f"{arithmetic_cost(1280):.1e}"
    '3.9e-07'
    """
    shift = _DISTANCE * math.sqrt(dimension) / (BLUR_STEPS << FINE_BITS)
    return 2 * (_TAIL * shift + shift**2 / 2)


@lru_cache(maxsize=1)
def _caps() -> tuple[Floats, Floats]:
    """Return the share and the first moment of every cap, by its threshold from 0 to `REACH`."""
    heights = np.arange(REACH + 1) / STEPS
    weights = np.exp(-(heights**2) / 2) / (STEPS * math.sqrt(2 * math.pi))
    # From the far end, so that a small tail is not the difference of large sums.
    return np.cumsum(weights[::-1])[::-1], np.cumsum((weights * heights)[::-1])[::-1]


def _heights(tilt: float) -> Floats:
    """Return the mean of a for every threshold: the signal before noise."""
    shares, moments = _caps()
    return np.asarray(moments / (1 / math.expm1(tilt) + shares))
