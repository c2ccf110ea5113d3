"""Gaussian and Laplace noise without floating-point leaks, with all costs accounted for.

A value is rounded to a public grid, a power of two; integer noise is added in integers; the release is an
integer multiple of the grid. The noise is the continuous distribution, rounded on the grid in a way that
moves with the grid, so the release is post-processing of the continuous mechanism and costs what that
costs. Three things are added, none of them ignored: rounding two neighbours moves them apart
(`effective_sensitivity`), rounding the noise takes a little of its variance (Gaussian only,
`effective_scale`), and tables of finite precision cost `extra_delta`. Proofs: docs/theory/noise.md.

The caller is responsible for the rest: values computed in floating point must keep the stated sensitivity, and it
must be public that values are in range, because an error reveals it.
"""

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.lazy import LateModule
from nearveil.privacy.checks import check_integer, check_positive, check_range

if TYPE_CHECKING:
    import dp_accounting as dp
    from scipy import special
else:
    dp, special = LateModule("dp_accounting", "budget"), LateModule("scipy.special", "budget")

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


EPSILONS = (1e-6, 64.0)  # below, rounding would dominate; above, the guarantee is worthless
DELTAS = (1e-18, 0.999)
_ULP = 2.0**-52


def round_up(value: float) -> float:
    """Return a little more (four units in the last place), so that rounding never favours the spender."""
    return value * (1 + 4 * _ULP)


def round_down(value: float) -> float:
    """Return a little less (four units in the last place)."""
    return value * (1 - 4 * _ULP)


def compute_gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """Return an upper bound on the delta of continuous Gaussian noise at `epsilon`, tight to rounding."""
    # With noise of c times the sensitivity, ``delta = Phi(a) - e^epsilon Phi(b)``, a and b being ``+-1/(2c) - epsilon
    # c`` (Balle and Wang 2018, Theorem 8). Rounding is bounded and added, on the ground that `log_ndtr` errs by at most
    # 8 units in the last place. Attacked by `test_gaussian_delta_is_an_upper_bound` in 60 digits.
    multiplier = check_positive(noise_multiplier, "noise_multiplier")
    return float(compute_gaussian_deltas(multiplier, np.array([check_range(epsilon, "epsilon", *EPSILONS)]))[0])


def compute_gaussian_deltas(noise_multiplier: float, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the same bound at many epsilons, none of them negative."""
    half, drift = 0.5 / noise_multiplier, epsilons * noise_multiplier
    a, b = half - drift, -half - drift
    log_a, log_b = special.log_ndtr(a), special.log_ndtr(b)
    # a and b are off by three roundings of |b|; the slope of log Phi at x is at most |x| + 1.
    error_a = _ULP * (8 * np.abs(log_a) + 3 * np.abs(b) * (np.abs(a) + 1))
    error_b = _ULP * (8 * np.abs(log_b) + 3 * np.abs(b) * (np.abs(b) + 1))
    gap = log_a - log_b - epsilons  # positive: 1 - e^-gap is the share of Phi(a) that stays
    gap = np.maximum(gap, 0.0) + error_a + error_b + _ULP * epsilons
    return np.asarray(round_up(-np.expm1(-gap) * np.exp(log_a + error_a)))


def analytic_gaussian_scale(sensitivity: float, epsilon: float, delta: float) -> float:
    """Return the least standard deviation of continuous Gaussian noise that is (epsilon, delta)-DP.

    dp-accounting finds the root; the result is raised until `compute_gaussian_delta` certifies it, by less than
    1e-6 of its value. Attacked by `test_the_analytic_scale_is_sufficient_and_necessary`. The sensitivity is L2; epsilon
    is from 1e-6 to 64, delta from 1e-18 to 0.999.

    Examples
    --------
    >>> f"{analytic_gaussian_scale(1.0, 1.0, 1e-5):.6f}"
    '3.730632'
    """
    sensitivity = check_positive(sensitivity, "sensitivity")
    epsilon, delta = check_range(epsilon, "epsilon", *EPSILONS), check_range(delta, "delta", *DELTAS)
    root, margin = float(dp.get_sigma_gaussian(epsilon, delta)), 2.0**-40
    while compute_gaussian_delta(root * (1 + margin), epsilon) > delta:
        margin *= 2
    return round_up(root * (1 + margin) * sensitivity)


def compute_classical_scale(sensitivity: float, epsilon: float, delta: float) -> float:
    """Return ``sqrt(2 ln(1.25 / delta)) sensitivity / epsilon``, the classical calibration, to reproduce results."""
    # A theorem for epsilon < 1 alone (Dwork and Roth 2014, Theorem A.1): at epsilon 12 and delta 1e-5 it lacks 7%.
    sensitivity = check_positive(sensitivity, "sensitivity")
    epsilon, delta = check_range(epsilon, "epsilon", *EPSILONS), check_range(delta, "delta", *DELTAS)
    return math.sqrt(2 * math.log(1.25 / delta)) * sensitivity / epsilon


class Source(Protocol):
    """A stream of uniform, independent 64-bit words.

    A guarantee made with a source that is not `sound` is void.

    Examples
    --------
    >>> source: Source = secure_source()
    >>> source.words(2).dtype, source.sound
    (dtype('uint64'), True)
    """

    @property
    def sound(self) -> bool:
        """Whether nobody can foresee the words."""
        ...

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next `count` words, shape (count,)."""
        ...


class _Secure:
    sound = True

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)

    def __repr__(self) -> str:
        return "secure_source()"


class _UnsafeSeeded:
    sound = False

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator = np.random.PCG64(seed)

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.asarray(self._generator.random_raw(count), dtype=np.uint64)

    def __repr__(self) -> str:
        return f"unsafe_seeded({self._seed})"


def secure_source() -> Source:
    """Return the operating system's cryptographic generator; the default everywhere.

    It has no state, so a forked process repeats nothing.

    Examples
    --------
    >>> secure_source().words(3).shape, secure_source().sound
    ((3,), True)
    """
    return _Secure()


def unsafe_seeded(seed: int) -> Source:
    """Return reproducible words, for tests and studies only.

    Anyone who knows or guesses the seed can subtract the noise. ``sound`` is false, and guarantees of such releases
    are marked unsound. Independent of NumPy's global state.

    Examples
    --------
    >>> bool((unsafe_seeded(7).words(5) == unsafe_seeded(7).words(5)).all()), unsafe_seeded(7).sound
    (True, False)
    """
    return _UnsafeSeeded(check_integer(seed, "seed"))


TOTAL_BITS = 255  # a table's probabilities are multiples of 2^-255
_FIRST_BITS = 63  # index and first bits of the coin, from one word; its top bit is the sign
_TIE_WORDS = (TOTAL_BITS - _FIRST_BITS) // 64
_WORKING_BITS = 320  # of weights while a table is made; the 65 bits more than kept absorb all rounding
_DECIMAL = Context(prec=120)  # exp() is correctly rounded by the standard; 120 digits are 398 bits

_REACH = 17  # a layer of scale c ends at 17 c: the mass beyond is below 2^-207
_FINE = 3  # a fine layer's scale in steps of the next coarser layer
_TOP = 8  # the least scale of the coarsest layer, in its own steps
_GAP = 9  # bits between Gaussian layers: tables of 2^15 cells, which a core's cache holds
_EXPONENT_REACH = 140  # exponential variables end at 140 times their mean: the mass beyond is e^-140 < 2^-201
_DIGITS = 10  # the most digits of a group

_CHUNK = 1 << 15  # values at a time: a chunk and a table fit into a core's cache together


@dataclass(frozen=True)
class Table:
    """An alias table: cell i gives i below its threshold and ``alias[i]`` from it on."""

    bits: int  # there are 2^bits cells
    first: NDArray[np.uint64]  # the threshold's first 63 - bits bits
    rest: tuple[int, ...]  # the threshold's remaining 192 bits
    alias: NDArray[np.int64]


def make_alias_table(weights: Sequence[int]) -> Table:
    """Return the table with probabilities of ``weights[k] / sum(weights)``; none is negative, and not all are zero."""
    # All but the first are rounded down; the first takes what that leaves, fewer units than there are weights.
    bits, total = max(1, (len(weights) - 1).bit_length()), sum(weights)
    shares = [(weight << TOTAL_BITS) // total for weight in weights]
    shares[0] += (1 << TOTAL_BITS) - sum(shares)
    shares += [0] * ((1 << bits) - len(shares))
    capacity = 1 << (TOTAL_BITS - bits)
    alias = list(range(1 << bits))
    small = [k for k, share in enumerate(shares) if share < capacity]
    large = [k for k, share in enumerate(shares) if share > capacity]
    while small and large:  # fill a cell that is too empty from one that is too full (Vose 1991), exactly
        empty, full = small.pop(), large[-1]
        alias[empty] = full
        shares[full] -= capacity - shares[empty]
        if shares[full] <= capacity:
            large.pop()
            if shares[full] < capacity:
                small.append(full)
    if small or large:
        raise ArithmeticError("the table has other odds than its weights: release nothing")
    low = TOTAL_BITS - _FIRST_BITS
    return Table(
        bits=bits,
        first=np.array([share >> low for share in shares], dtype=np.uint64),
        rest=tuple(share & ((1 << low) - 1) for share in shares),
        alias=np.array(alias, dtype=np.int64),
    )


def look_up(table: Table, words: NDArray[np.uint64], source: Source) -> NDArray[np.int64]:
    """Return a draw from the table for each word; the top bit is not used. Coins tie with chance 2^(bits - 63)."""
    coin_bits = _FIRST_BITS - table.bits
    cells = (words >> np.uint64(coin_bits)).view(np.int64) & ((1 << table.bits) - 1)
    coins = words & np.uint64((1 << coin_bits) - 1)
    thresholds = table.first.take(cells)
    drawn = np.where(coins < thresholds, cells, table.alias.take(cells))
    for i in np.flatnonzero(coins == thresholds):
        coin = int.from_bytes(source.words(_TIE_WORDS).tobytes(), "little")
        if coin < table.rest[cells[i]]:
            drawn[i] = cells[i]
    return drawn


@dataclass(frozen=True)
class Layer:
    """A table; its draws count in steps of 2^shift."""

    shift: int
    table: Table


def gaussian_integers(ratio: Fraction, count: int, source: Source) -> NDArray[np.int64]:
    """Draw ``exp(-k^2 / (2 ratio^2))`` within 2^-204, for a ratio of at least 4 (Theorem 3 of docs/theory/noise.md)."""
    layers, out = split_gaussian(ratio), np.zeros(count, dtype=np.int64)
    for start in range(0, count, _CHUNK):
        chunk = out[start : start + _CHUNK]
        for layer in layers:
            words = source.words(len(chunk))
            minus = words.view(np.int64) >> 63  # the top bit, as 0 or -1
            chunk += ((look_up(layer.table, words, source) ^ minus) - minus) << layer.shift
    return out


def draw_laplace_integers(ratio: Fraction, count: int, source: Source) -> NDArray[np.int64]:
    """Draw the continuous Laplace distribution of scale `ratio`, rounded to the nearest integer, within 2^-200."""
    # Let E be exponential with mean 2 ratio: D = floor(E) has independent binary digits, and ``floor((D + 1) / 2)`` is
    # E / 2 rounded to the nearest integer. A fair sign makes it Laplace (Theorem 4 of docs/theory/noise.md).
    layers, out = split_exponential(2 * ratio), np.zeros(count, dtype=np.int64)
    for start in range(0, count, _CHUNK):
        chunk = out[start : start + _CHUNK]
        for layer in layers:
            words = source.words(len(chunk))
            chunk += look_up(layer.table, words, source) << layer.shift
        minus = words.view(np.int64) >> 63  # a bit of the last words that no look-up has used
        chunk[:] = (((chunk + 1) >> 1) ^ minus) - minus
    return out


@lru_cache(maxsize=16)
def split_gaussian(ratio: Fraction) -> tuple[Layer, ...]:
    """Split a discrete Gaussian into layers, the coarsest first: variances add up to ratio^2, exactly."""
    # The coarsest has steps of 2^e and a scale of at least 8 of them; each finer one three steps of the next coarser.
    variance, shift = ratio**2, 0
    while _find_top_variance(variance, shift + 1) >= _TOP**2:
        shift += 1
    layers = [Layer(shift, _make_half_gaussian(_find_top_variance(variance, shift)))]
    for finer, coarser in _pair_layers(shift):
        layers.append(Layer(finer, _make_half_gaussian(Fraction(_FINE**2 << 2 * (coarser - finer)))))
    return tuple(layers)


def _pair_layers(shift: int) -> Iterable[tuple[int, int]]:
    """Yield the shifts of neighbouring layers, finer first, from the top at `shift` down to 0."""
    while shift > 0:
        finer = max(0, shift - _GAP)
        yield finer, shift
        shift = finer


def _find_top_variance(variance: Fraction, shift: int) -> Fraction:
    """Return what the finer layers leave of the variance, in the top's steps of 2^shift."""
    finer = sum(_FINE**2 << 2 * coarser for _, coarser in _pair_layers(shift))
    return (variance - finer) / (1 << 2 * shift)


@lru_cache(maxsize=64)
def _make_half_gaussian(variance: Fraction) -> Table:
    """Return the table of |k| for the discrete Gaussian of that variance parameter."""
    reach = _REACH * (math.isqrt(math.floor(variance)) + 1)
    # exp(-(k+1)^2 c) = exp(-k^2 c) * exp(-(2k+1) c), and the second factor falls by exp(-2 c) a step.
    ratio = _compute_exp(-1 / (2 * variance))
    square = ratio * ratio >> _WORKING_BITS
    weight, weights = 1 << _WORKING_BITS, [1 << _WORKING_BITS]
    for _ in range(reach):
        weight = weight * ratio >> _WORKING_BITS
        ratio = ratio * square >> _WORKING_BITS
        weights.append(2 * weight)  # one for each sign
    return make_alias_table(weights)


@lru_cache(maxsize=16)
def split_exponential(mean: Fraction) -> tuple[Layer, ...]:
    """Split the digits of floor(E), E exponential of that mean, into independent groups."""
    digits = max(1, math.ceil(_EXPONENT_REACH * mean).bit_length())
    groups = -(-digits // _DIGITS)
    cuts = [digits * group // groups for group in range(groups + 1)]
    layers = []
    for low, high in itertools.pairwise(cuts):
        ratio = _compute_exp(-(2**low) / mean)
        weights = [1 << _WORKING_BITS]
        for _ in range((1 << (high - low)) - 1):
            weights.append(weights[-1] * ratio >> _WORKING_BITS)
        layers.append(Layer(low, make_alias_table(weights)))
    return tuple(layers)


def _compute_exp(exponent: Fraction) -> int:
    """Return exp(exponent) in units of 2^-320, at most one unit off, for exponents of at most 0."""
    quotient = _DECIMAL.divide(Decimal(exponent.numerator), Decimal(exponent.denominator))
    return int(_DECIMAL.multiply(_DECIMAL.exp(quotient), Decimal(1 << _WORKING_BITS)))


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
    """Base of Gaussian and Laplace noise on a grid."""

    sensitivity: float  #: the largest distance between two neighbours, before rounding
    scale: float  #: of the noise, in the values' unit
    size: int  #: the number of values released together
    grid: float  #: a power of two, at most a quarter of the scale

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

    `sensitivity` is in L2, `scale` the standard deviation; `choose_gaussian_grid` gives a grid of negligible cost.

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
    def event(self) -> "dp.GaussianDpEvent":
        """The event for an accountant; add `extra_delta`."""
        return dp.GaussianDpEvent(self.noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class LaplaceNoise(_GridNoise):
    """Laplace noise rounded to a grid, as a specification.

    The `sensitivity` is in L1 and the `scale` is that of the continuous Laplace distribution, whose standard deviation
    is sqrt(2) times as large. `choose_laplace_grid` gives a grid of negligible cost.

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
    def event(self) -> "dp.LaplaceDpEvent":
        """The event for an accountant (Theorem 5: one value is the worst case); add `extra_delta`."""
        return dp.LaplaceDpEvent(self.noise_multiplier)


def choose_gaussian_grid(sensitivity: float, size: int) -> float:
    """Return the coarsest power of two that raises an L2 sensitivity by at most 2^-16 of itself."""
    size = check_integer(size, "size", *_SIZES)
    return _find_power_below(check_positive(sensitivity, "sensitivity") * _GRID_COST / math.sqrt(size))


def choose_laplace_grid(sensitivity: float, size: int) -> float:
    """Return the coarsest power of two that raises an L1 sensitivity by at most 2^-16 of itself."""
    size = check_integer(size, "size", *_SIZES)
    return _find_power_below(check_positive(sensitivity, "sensitivity") * _GRID_COST / size)


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
        The number of values released together.
    grid : float, optional
        A power of two; `choose_gaussian_grid` by default.

    Examples
    --------
    >>> f"{calibrate_gaussian(1.0, 1e-5, sensitivity=1.0, size=1).scale:.4f}"
    '3.7307'
    """
    epsilon, delta = check_range(epsilon, "epsilon", *EPSILONS), check_range(delta, "delta", *DELTAS)
    step = choose_gaussian_grid(sensitivity, size) if grid is None else grid
    draft = GaussianNoise(sensitivity=sensitivity, scale=_draft_scale(step), size=size, grid=step)
    if not delta > 2 * draft.extra_delta:
        raise ValueError(f"delta must be above {2 * draft.extra_delta:.1e} for {size} values; got {delta!r}")
    needed = analytic_gaussian_scale(draft.effective_sensitivity, epsilon, round_down(delta - draft.extra_delta))
    noise, margin = replace(draft, scale=math.hypot(needed, math.sqrt(_ROUNDING_VARIANCE) * draft.grid)), 2.0**-46
    # Certify the noise that is returned: its multiplier was rounded down.
    while compute_gaussian_delta(noise.noise_multiplier, epsilon) + noise.extra_delta > delta:
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
    step = choose_laplace_grid(sensitivity, size) if grid is None else grid
    draft = LaplaceNoise(sensitivity=sensitivity, scale=_draft_scale(step), size=size, grid=step)
    # A little more, so that the noise multiplier, rounded down, still reaches 1 / epsilon.
    return replace(draft, scale=draft.effective_sensitivity / epsilon * (1 + 2.0**-46))


_SAMPLERS = {GaussianNoise: gaussian_integers, LaplaceNoise: draw_laplace_integers}


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
    steps = _round_to_grid(values, noise)
    draw = _SAMPLERS[type(noise)]
    ratio = Fraction(noise.scale) / Fraction(noise.grid)
    drawn = draw(ratio, noise.size, secure_source() if source is None else source)
    return (steps + drawn.reshape(steps.shape)).astype(np.float64) * noise.grid


def _round_to_grid(values: ArrayLike, noise: GaussianNoise | LaplaceNoise) -> NDArray[np.int64]:
    if np.ma.isMaskedArray(values):
        raise ValueError("values must not be masked: masked entries would be released")
    exact = np.asarray(values)
    # A cast that rounds would move the values by more than the grid accounts for.
    too_wide = exact.dtype.kind in "iu" and bool(np.any((exact > _EXACT_INTEGERS) | (exact < -_EXACT_INTEGERS)))
    if too_wide or exact.dtype.kind not in "fiu" or not np.can_cast(exact.dtype, np.float64):
        raise ValueError("values must be real numbers that 64-bit floating point holds exactly")
    array = exact.astype(np.float64)
    if array.size != noise.size:
        raise ValueError(f"values must be as many as the noise's size, {noise.size}; got {array.size}")
    if not np.all(np.isfinite(array)):
        raise ValueError("values must be finite: remove NaN and infinity before")
    if np.any(np.abs(array) > _RANGE * noise.grid):
        raise ValueError(f"values must be within 2^61 grid steps, {_RANGE * noise.grid:g}: clip them or pass a grid")
    return np.rint(array / noise.grid).astype(np.int64)  # exact: the grid is a power of two


def _find_power_below(value: float) -> float:
    return math.ldexp(0.5, math.frexp(value)[1])


def _draft_scale(grid: float) -> float:
    """Return a scale that any positive grid allows: costs that depend on the grid alone are read from a draft."""
    return 4 * grid
