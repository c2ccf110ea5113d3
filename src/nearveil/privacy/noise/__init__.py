"""Gaussian and Laplace noise without floating-point leaks, its price included.

A value is rounded to a public grid, a power of two; integer noise is added in integers; what leaves is an
integer multiple of the grid. The noise is the continuous distribution, rounded on the grid in a way that
moves with the grid, so the release is post-processing of the continuous mechanism and costs what that
costs. Three things are added, none of them ignored: rounding two neighbours moves them apart
(`effective_sensitivity`), rounding the noise takes a little of its variance (Gaussian only,
`effective_scale`), and tables of finite precision cost `extra_delta`. Proofs: docs/theory/noise.md.

What the release depends on besides the noise is the caller's: values computed in floating point must keep
the sensitivity that is stated, and that a value is in range must be public, since an error shows.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from dp_accounting import GaussianDpEvent, LaplaceDpEvent
from numpy.typing import ArrayLike, NDArray

from nearveil.privacy.checks import check_integer, check_positive, check_range
from nearveil.privacy.noise.calibration import (
    DELTAS,
    EPSILONS,
    analytic_gaussian_scale,
    gaussian_delta,
    round_down,
    round_up,
)
from nearveil.privacy.noise.samplers import Source, gaussian_integers, laplace_integers, secure_source, unsafe_seeded

__all__ = [
    "GaussianNoise",
    "LaplaceNoise",
    "Source",
    "add_noise",
    "analytic_gaussian_scale",
    "calibrate_gaussian",
    "calibrate_laplace",
    "secure_source",
    "unsafe_seeded",
]

LARGEST_EPSILON = EPSILONS[1]  # up to which what finite tables add to delta is proved
_GRID_COST = 2.0**-16  # a default grid raises the sensitivity by at most this share of it
_DELTA_PER_VALUE = 2.0**-100  # (1 + e^64) 2^-195, rounded up generously
_ROUNDING_VARIANCE = 7  # in grid steps squared: what the rounding kernel takes of Gaussian noise
_RATIOS = (4.0, 2.0**50)  # of scale to grid
_GRID_EXPONENTS = (-900, 900)
_RANGE = 2.0**61  # of values, in grid steps; noise of ratio 2^50 adds less than 2^60, so int64 holds the sum
_EXACT_INTEGERS = 2**53
_SIZES = (1, 2**40)


@dataclass(frozen=True, kw_only=True)
class _GridNoise:
    """What Gaussian and Laplace noise on a grid have in common."""

    sensitivity: float
    scale: float
    size: int
    grid: float

    def __post_init__(self) -> None:
        # Plain floats: in a narrow type the costs of rounding would be rounded away.
        for name in ("sensitivity", "grid", "scale"):
            object.__setattr__(self, name, check_positive(getattr(self, name), name))
        check_integer(self.size, "size", *_SIZES)
        mantissa, exponent = math.frexp(self.grid)
        if mantissa != 0.5 or not _GRID_EXPONENTS[0] <= exponent <= _GRID_EXPONENTS[1]:
            raise ValueError(f"grid must be a power of two from 2^-901 to 2^899; got {self.grid!r}")
        if not _RATIOS[0] <= self.scale / self.grid <= _RATIOS[1]:
            raise ValueError(
                f"grid must be from 2^-50 to 1/4 of the scale, {self.scale!r}; got {self.grid!r}: "
                "pass a grid, or no grid for one of negligible cost"
            )

    @property
    def extra_delta(self) -> float:
        """What finite tables add to the delta of any analysis of `event` at an epsilon of at most 64."""
        return self.size * _DELTA_PER_VALUE


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(_GridNoise):
    """Discrete Gaussian noise on a grid, as a specification.

    Attributes
    ----------
    sensitivity : float
        How far two neighbours may lie apart in the L2 norm, before rounding.
    scale : float
        The discrete Gaussian's parameter, in the values' unit; its standard deviation.
    size : int
        How many values are released together.
    grid : float
        A power of two, at most a quarter of the scale. `gaussian_grid` gives one of negligible cost.

    Examples
    --------
    >>> noise = calibrate_gaussian(1.0, 1e-5, sensitivity=2.0, size=64)
    >>> f"{noise.scale:.4f} {noise.effective_sensitivity:.6f} {noise.extra_delta:.0e}"
    '7.4614 2.000031 5e-29'
    >>> noise.event
    GaussianDpEvent(noise_multiplier=3.7306...)
    """

    @property
    def effective_sensitivity(self) -> float:
        """L2 sensitivity of the rounded values: more by ``grid sqrt(size)`` (Theorem 1; test_rounding...)."""
        return round_up(self.sensitivity + self.grid * math.sqrt(self.size))

    @property
    def effective_scale(self) -> float:
        """The continuous Gaussian of which this is a rounding: ``sqrt(scale^2 - 7 grid^2)`` (Theorem 3)."""
        return round_down(self.scale * math.sqrt(1 - _ROUNDING_VARIANCE * (self.grid / self.scale) ** 2))

    @property
    def noise_multiplier(self) -> float:
        """Effective scale over effective sensitivity, rounded down."""
        return round_down(self.effective_scale / self.effective_sensitivity)

    @property
    def event(self) -> GaussianDpEvent:
        """What happened, for an accountant; `extra_delta` comes on top."""
        return GaussianDpEvent(self.noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class LaplaceNoise(_GridNoise):
    """Laplace noise rounded to a grid, as a specification.

    Attributes
    ----------
    sensitivity : float
        How far two neighbours may lie apart in the L1 norm, before rounding.
    scale : float
        Of the continuous Laplace distribution, in the values' unit; its standard deviation is sqrt(2) times that.
    size, grid
        As for :class:`GaussianNoise`; `laplace_grid` gives a grid of negligible cost.

    Examples
    --------
    >>> noise = calibrate_laplace(0.5, sensitivity=2.0, size=64)
    >>> f"{noise.scale:.4f} {noise.effective_sensitivity:.6f} {noise.epsilon:.6f}"
    '4.0001 2.000031 0.500000'
    >>> noise.event
    LaplaceDpEvent(noise_multiplier=2.0...)
    """

    @property
    def effective_sensitivity(self) -> float:
        """L1 sensitivity of the rounded values: more by ``grid size`` (Theorem 1; test_rounding...)."""
        return round_up(self.sensitivity + self.grid * self.size)

    @property
    def noise_multiplier(self) -> float:
        """Scale over effective sensitivity, rounded down."""
        return round_down(self.scale / self.effective_sensitivity)

    @property
    def epsilon(self) -> float:
        """The pure epsilon of a release, up to `extra_delta`: the inverse of the noise multiplier."""
        return round_up(1 / self.noise_multiplier)

    @property
    def event(self) -> LaplaceDpEvent:
        """What happened, for an accountant (Theorem 5: one value is the worst case); `extra_delta` comes on top."""
        return LaplaceDpEvent(self.noise_multiplier)


def gaussian_grid(sensitivity: float, size: int) -> float:
    """Return the coarsest power of two that raises an L2 sensitivity by at most 2^-16 of itself."""
    size = check_integer(size, "size", *_SIZES)
    return _power_below(check_positive(sensitivity, "sensitivity") * _GRID_COST / math.sqrt(size))


def laplace_grid(sensitivity: float, size: int) -> float:
    """Return the coarsest power of two that raises an L1 sensitivity by at most 2^-16 of itself."""
    size = check_integer(size, "size", *_SIZES)
    return _power_below(check_positive(sensitivity, "sensitivity") * _GRID_COST / size)


def calibrate_gaussian(
    epsilon: float, delta: float, *, sensitivity: float, size: int, grid: float | None = None
) -> GaussianNoise:
    """Return the least Gaussian noise that is (epsilon, delta)-DP, every cost of the grid included.

    By Theorems 1 and 3 and Balle and Wang (2018); attacked by
    `test_exact_divergence_of_gaussian_noise_keeps_the_promise`.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 64.
    delta : float
        From 1e-18 to 0.999, and above 2^-100 for each value.
    sensitivity : float
        L2.
    size : int
        How many values are released together.
    grid : float, optional
        A power of two; `gaussian_grid` by default.

    Examples
    --------
    >>> f"{calibrate_gaussian(1.0, 1e-5, sensitivity=1.0, size=1).scale:.4f}"
    '3.7307'
    """
    epsilon, delta = check_range(epsilon, "epsilon", *EPSILONS), check_range(delta, "delta", *DELTAS)
    step = gaussian_grid(sensitivity, size) if grid is None else grid
    draft = GaussianNoise(sensitivity=sensitivity, scale=_draft_scale(step), size=size, grid=step)
    if not delta > 2 * draft.extra_delta:
        raise ValueError(f"delta must be above {2 * draft.extra_delta:.1e} for {size} values; got {delta!r}")
    needed = analytic_gaussian_scale(draft.effective_sensitivity, epsilon, round_down(delta - draft.extra_delta))
    noise, margin = replace(draft, scale=math.hypot(needed, math.sqrt(_ROUNDING_VARIANCE) * draft.grid)), 2.0**-46
    # What is certified is what is returned: its multiplier was rounded down on the way.
    while gaussian_delta(noise.noise_multiplier, epsilon) + noise.extra_delta > delta:
        noise, margin = replace(noise, scale=noise.scale * (1 + margin)), 2 * margin
    return noise


def calibrate_laplace(epsilon: float, *, sensitivity: float, size: int, grid: float | None = None) -> LaplaceNoise:
    """Return the least Laplace noise that is (epsilon, extra_delta)-DP, every cost of the grid included.

    The parameters are those of :func:`calibrate_gaussian`; the sensitivity is L1. By Theorems 1 and 4; attacked by
    `test_exact_likelihood_ratios_of_laplace_noise_keep_the_promise`.

    Examples
    --------
    >>> f"{calibrate_laplace(0.1, sensitivity=1.0, size=1).scale:.3f}"
    '10.000'
    """
    epsilon = check_range(epsilon, "epsilon", *EPSILONS)
    step = laplace_grid(sensitivity, size) if grid is None else grid
    draft = LaplaceNoise(sensitivity=sensitivity, scale=_draft_scale(step), size=size, grid=step)
    # A little more, so that the noise multiplier, rounded down, still reaches 1 / epsilon.
    return replace(draft, scale=draft.effective_sensitivity / epsilon * (1 + 2.0**-46))


_SAMPLERS = {GaussianNoise: gaussian_integers, LaplaceNoise: laplace_integers}


def add_noise(
    values: ArrayLike, noise: GaussianNoise | LaplaceNoise, *, source: Source | None = None
) -> NDArray[np.float64]:
    """Round the values to the grid, add noise in integers, and return multiples of the grid.

    Parameters
    ----------
    values : array-like of float
        As many as ``noise.size``, finite, within 2^61 grid steps of zero. Their shape is kept.
    noise : GaussianNoise or LaplaceNoise
    source : Source, optional
        The operating system's cryptographic generator by default. The guarantee holds only if ``source.sound``.

    Examples
    --------
    >>> noise = calibrate_laplace(1.0, sensitivity=1.0, size=3, grid=2.0**-10)
    >>> released = add_noise([0.5, 0.25, -1.0], noise)
    >>> bool((released * 2**10 == np.rint(released * 2**10)).all())
    True
    """
    steps = _on_grid(values, noise)
    draw = _SAMPLERS[type(noise)]
    ratio = Fraction(noise.scale) / Fraction(noise.grid)
    drawn = draw(ratio, noise.size, secure_source() if source is None else source)
    return (steps + drawn.reshape(steps.shape)).astype(np.float64) * noise.grid


def _on_grid(values: ArrayLike, noise: GaussianNoise | LaplaceNoise) -> NDArray[np.int64]:
    if np.ma.isMaskedArray(values):
        raise ValueError("values must not be masked: masked entries would be released")
    given = np.asarray(values)
    # A cast that rounds would move the values by more than the grid accounts for.
    too_wide = given.dtype.kind in "iu" and bool(np.any((given > _EXACT_INTEGERS) | (given < -_EXACT_INTEGERS)))
    if too_wide or given.dtype.kind not in "fiu" or not np.can_cast(given.dtype, np.float64):
        raise ValueError("values must be real numbers that 64-bit floating point holds exactly")
    array = given.astype(np.float64)
    if array.size != noise.size:
        raise ValueError(f"values must be as many as the noise's size, {noise.size}; got {array.size}")
    if not np.all(np.isfinite(array)):
        raise ValueError("values must be finite: remove NaN and infinity before")
    if np.any(np.abs(array) > _RANGE * noise.grid):
        raise ValueError(f"values must be within 2^61 grid steps, {_RANGE * noise.grid:g}: clip them or pass a grid")
    return np.rint(array / noise.grid).astype(np.int64)  # exact: the grid is a power of two


def _power_below(value: float) -> float:
    return math.ldexp(0.5, math.frexp(value)[1])


def _draft_scale(grid: float) -> float:
    """Return a scale that any positive grid allows: costs that depend on the grid alone are read from a draft."""
    return 4 * grid
