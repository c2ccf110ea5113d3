"""PrivUnit: the distribution of a message, the cost of floating-point arithmetic, and the release.

A message is ``g = a x + (h - <h, x> x) + z``, x being the private unit vector. The height a is a discrete
Gaussian of scale one on multiples of 1/128, tilted: heights in the cap ``a >= t`` are e^epsilon times as
likely. h is a plain discrete Gaussian on the same lattice in every coordinate. z is a narrow Gaussian: it
fills the gaps between the points of the lattice, which depend on x, and hides rounding (``docs/theory/privunit.md``).
"""

import math
from dataclasses import dataclass, field
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from nearveil.cluster import cut_rows
from nearveil.mechanisms.base import VectorRelease
from nearveil.mechanisms.messages import Floats, Message, make_guarantee
from nearveil.mechanisms.projection import ProjectedRelease
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_range
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source, Table, gaussian_integers, look_up, make_alias_table, round_down

EPSILONS = (1e-3, 64.0)  # above, the delta of finite tables is not proved
LARGEST_DIMENSION = 1 << 20  # the largest for which the sampler's sums are exact
STEPS = 128  # of the lattice of a and h, per unit
BLUR_STEPS = 3  # the scale of z in steps of that lattice
FINE_BITS = 29  # bits between that lattice and the grid of z, 2^-36
CELL_BITS = 33  # bits between the grid of z and the message's cells, which are 1/8 wide
CELL = 2.0**-3
LARGEST_CELL = 127  # a message's coordinates are cut off at +-127 cells, 15.9
REACH = 22 * STEPS  # of a, in steps; the mass beyond is below 2^-255, even if tilted by e^64

_BLUR = BLUR_STEPS / STEPS
_NOISE = _BLUR**2 + CELL**2 / 12  # variance that z and the cells add to each direction
_DISTANCE = 0.51  # between the computed and the true vector, in grid steps for each sqrt(dimension)
_TAIL = 17.0  # standard deviations; z exceeds them with probability 2^-207
_DELTA_PER_COORDINATE = 2.0**-100


@dataclass(frozen=True)
class PrivUnitChannel:
    """The distribution of a message."""

    epsilon: float  # of the guarantee
    dimension: int
    tilt: float  # epsilon less `bound_arithmetic_cost`
    threshold: int  # where the cap begins, in steps of 1/128

    @property
    def cap_start(self) -> float:
        """Start t of the continuous cap that the lattice's cap represents: half a step before its first height."""
        return (self.threshold - 0.5) / STEPS

    @property
    def cap_share(self) -> float:
        """Mass q of the cap under an untilted Gaussian."""
        return float(_measure_caps()[0][self.threshold])

    @property
    def p(self) -> float:
        """Probability of the cap."""
        return self.cap_share / (self.cap_share + math.exp(-self.tilt) * (1 - self.cap_share))

    @property
    def signal(self) -> float:
        """Mean along x in units of the noise along any other direction."""
        return float(_compute_heights(self.tilt)[self.threshold]) / math.sqrt(1 + _NOISE)

    @property
    def extra_delta(self) -> float:
        """Delta of finite tables (Theorem 5; `test_what_the_arithmetic_and_the_tables_cost`)."""
        return self.dimension * _DELTA_PER_COORDINATE

    def draw(self, rows: Floats, source: Source) -> "Integers":
        """Draw vectors in steps of 2^-36, with low bits that are uniform for all rows."""
        heights = look_up(make_lattice_table(self.tilt, self.threshold), source.words(len(rows)), source) - REACH
        plain = look_up(make_lattice_table(0.0, 0), source.words(rows.size), source).reshape(rows.shape) - REACH
        blur = gaussian_integers(Fraction(BLUR_STEPS << FINE_BITS), rows.size, source).reshape(rows.shape)
        return place_along_axes(heights, plain, compute_directions(rows)) + blur

    def log_density(self, projections: Floats, squares: Floats) -> Floats:
        """Return the log-density of a message by its projection <g, x> and its square |g|^2."""
        # Counts cells as noise of their variance and ignores the cut at +-15.9. Over all x, its range has width `tilt`.
        variance = 1 + _NOISE
        gaussian = -0.5 * (squares / variance + self.dimension * math.log(2 * math.pi * variance))
        # Before the tilt, a given <g, x> is Gaussian with this mean and deviation.
        mean, deviation = projections / variance, math.sqrt(_NOISE / variance)
        inside, low = ndtr((mean - self.cap_start) / deviation), math.exp(-self.tilt)
        total = math.log(self.cap_share + low * (1 - self.cap_share))
        return np.asarray(gaussian + (np.log(inside + low * (1 - inside)) - total))


def calibrate(epsilon: float, dimension: int) -> PrivUnitChannel:
    """Return the channel with the largest signal, (epsilon, extra_delta)-DP by Theorem 5 of docs/theory/privunit.md.

    Attacked by `test_exact_likelihood_ratios_reach_epsilon_and_never_pass_it`.
    """
    value = check_range(epsilon, "epsilon", *EPSILONS)
    if not 1 <= dimension <= LARGEST_DIMENSION:
        raise ValueError(f"X must have 1 to {LARGEST_DIMENSION} columns after the projection")
    tilt = round_down(value - bound_arithmetic_cost(dimension))
    return PrivUnitChannel(value, dimension, tilt, int(np.argmax(_compute_heights(tilt))))


def bound_arithmetic_cost(dimension: int) -> float:
    """Bound the epsilon that rounding costs (Theorem 4; attacked by `test_what_the_arithmetic_and_the_tables_cost`)."""
    shift = _DISTANCE * math.sqrt(dimension) / (BLUR_STEPS << FINE_BITS)
    return 2 * (_TAIL * shift + shift**2 / 2)


@lru_cache(maxsize=1)
def _measure_caps() -> tuple[Floats, Floats]:
    """Return the share and the first moment of every cap, by its threshold from 0 to `REACH`."""
    heights = np.arange(REACH + 1) / STEPS
    weights = np.exp(-(heights**2) / 2) / (STEPS * math.sqrt(2 * math.pi))
    # Sum from the far end: a small tail must not be the difference of large sums.
    return np.cumsum(weights[::-1])[::-1], np.cumsum((weights * heights)[::-1])[::-1]


def _compute_heights(tilt: float) -> Floats:
    """Return the mean of a for every threshold: the signal before noise."""
    shares, moments = _measure_caps()
    return np.asarray(moments / (1 / math.expm1(tilt) + shares))


Integers = NDArray[np.int64]

_DIRECTION_BITS = 26  # of a coordinate of x: sums of squares of such integers are exact in doubles
_WEIGHT_BITS = 384
_ODDS_BITS = 128
_DECIMAL = Context(prec=120)  # the standard guarantees a correctly rounded exp(); 120 digits are 398 bits
_CHUNK = 1 << 17  # coordinates at a time


def draw_cells(channel: PrivUnitChannel, rows: Floats, source: Source) -> NDArray[np.int8]:
    """Draw the cells of a message for each row."""
    blocks = cut_rows(len(rows), max(1, _CHUNK // channel.dimension))
    return np.concatenate([round_to_cells(channel.draw(rows[block], source)) for block in blocks])


def round_to_cells(vectors: Integers) -> NDArray[np.int8]:
    """Round vectors on the grid to the nearest cell, in integers, and clip to the last cell."""
    cells = (vectors + (1 << (CELL_BITS - 1))) >> CELL_BITS
    return np.asarray(np.clip(cells, -LARGEST_CELL, LARGEST_CELL), dtype=np.int8)


def compute_directions(rows: Floats) -> Floats:
    """Return integer directions of length about 2^26; divided by its length, each is the x of the proofs."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scaled = np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0)
    scaled[:, 0] = np.where(largest[:, 0] > 0, scaled[:, 0], 1.0)
    norms = np.sqrt(np.einsum("ij,ij->i", scaled, scaled))[:, None]
    return np.asarray(np.rint(scaled / norms * 2.0**_DIRECTION_BITS))


def place_along_axes(heights: Integers, plain: Integers, axes: Floats) -> Integers:
    """Return ``a x + (h - <h, x> x)`` on the fine grid, for lattice `heights` a, `plain` h, and a unit axis x."""
    # Within ``0.51 sqrt(d)`` grid steps of the true vector (Theorem 3 of docs/theory/privunit.md; attacked by
    # `test_computed_vectors_lie_within_the_bound`).
    # Both sums are exact in any order: all integers are below 2^53.
    squares = np.einsum("ij,ij->i", axes, axes)
    products = np.einsum("ij,ij->i", axes, plain.astype(np.float64))
    along = heights / np.sqrt(squares) - products / squares
    moved = np.rint((along * 2.0**FINE_BITS)[:, None] * axes).astype(np.int64)
    return np.asarray((plain << FINE_BITS) + moved)


@lru_cache(maxsize=16)
def make_lattice_table(tilt: float, threshold: int) -> Table:
    """Return the table of k + `REACH`: k is Gaussian of scale `STEPS`, with a tilt from `threshold` on."""
    # The odds e^tilt are a fraction over 2^128, rounded down. Within 2^-240 of that distribution (Lemma 2 of
    # docs/theory/privunit.md; attacked by `test_tables_are_what_the_proof_says`).
    half, even = _compute_half_weights(), 1 << _ODDS_BITS
    odds = int(_DECIMAL.multiply(_DECIMAL.exp(Decimal(tilt)), Decimal(even)))
    return make_alias_table([half[abs(k)] * (odds if k >= threshold else even) for k in range(-REACH, REACH + 1)])


@lru_cache(maxsize=1)
def _compute_half_weights() -> tuple[int, ...]:
    """Return exp(-a^2 / 2) for a of 0 to `REACH` steps, in units of 2^-384, to within two units."""
    unit, scale = Decimal(1 << _WEIGHT_BITS), Decimal(2 * STEPS**2)
    return tuple(
        int(_DECIMAL.multiply(_DECIMAL.exp(_DECIMAL.divide(Decimal(-k * k), scale)), unit)) for k in range(REACH + 1)
    )


_FORMAT = 1  # of the vector in a message


@dataclass(eq=False, repr=False)
class PrivUnit(ProjectedRelease, VectorRelease):
    """Send a Gaussian vector around the direction of a private row (Bhowmick et al. 2018, Asi et al. 2022).

    A Gaussian vector g is drawn from the cap ``<g, x> >= t`` with probability p, otherwise from the rest of space.
    If a fraction q of all Gaussian vectors is in the cap, ``p/(1-p) (1-q)/q = e^epsilon``; t maximises the signal.
    The signal, the mean of g along x in units of the noise across it, is 0.397 at epsilon 1, 0.786 at 2, 1.516 at 4
    and 2.743 at 8, in every dimension. The message is g rounded to 1/8, one byte per coordinate. The cost of
    floating-point arithmetic is subtracted from epsilon first (Theorem 5 of ``docs/theory/privunit.md``).

    Parameters
    ----------
    epsilon : float
        From 1e-3 to 64.
    projection : None, "pca", "random", "manifold", array-like or fitted transformer, default=None
        A public map to fewer dimensions; rows are then scaled to norm one again. None keeps all dimensions.
        `fit` learns "pca", "random" (orthonormal directions) and "manifold" (a
        :class:`~nearveil.privatemail.manifold.SupervisedManifold`) from public rows. A matrix has shape
        (d, n_components). A transformer must be fitted and map each row independently.
    n_components : int, optional
        For "pca", "random" and "manifold"; by default 64, or the maximum if that is smaller.
    projection_seed : int, default=0
        For "random" and "manifold". Public: the server needs the same seed.

    Attributes
    ----------
    channel_ : PrivUnitChannel
        The distribution of a message, with its ``signal``.
    projection_ : Projection

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((500, 32))
    >>> client = PrivUnit(4.0, projection="pca", n_components=8).fit(rows[:100])
    >>> message = client.release(rows[100])
    >>> server = PrivUnit(4.0, projection="pca", n_components=8).fit(rows[:100])
    >>> server.rank(message, rows[101:]).shape
    (399,)
    >>> density = client.log_density(message, rows)
    >>> bool(np.ptp(density) <= 4.0)
    True
    >>> print(client.guarantee)
    Seeing this message makes any conclusion about which record was queried at most 55 times as likely as it
    would be otherwise, plus 6.4e-30.
    """

    name = "privunit"
    _kind, _unit = "int8", CELL

    epsilon: float
    channel_: PrivUnitChannel = field(init=False)

    def _make_guarantee(self) -> Guarantee:
        epsilon, extra = self.channel_.epsilon, self.channel_.extra_delta
        details = {"events": (PureDp(epsilon),), "extra_delta": extra}
        return make_guarantee(epsilon, extra, "PrivUnit", "docs/theory/privunit.md", **details)

    def _release(self, features: Floats, source: Source) -> list[Message]:
        return self._messages(source, vector=draw_cells(self.channel_, self._prepare(features), source))

    def _log_density(self, messages: list[Message], features: Floats) -> Floats:
        """Use the centres of a message's cells, and count rounding to cells as noise."""
        vectors = self._read_vectors(messages, self.channel_.dimension)
        squares = np.einsum("ij,ij->i", vectors, vectors)
        return self.channel_.log_density(vectors @ self._prepare(features).T, squares[:, None])

    def _calibrate(self, features: Floats) -> None:
        del features
        self.channel_ = calibrate(self.epsilon, self.projection_.n_components)

    def _public_parts(self) -> tuple[object, ...]:
        return _FORMAT, self.channel_.epsilon, *super()._public_parts()
