"""The von Mises-Fisher mechanism: the sampler of heights, the cost of arithmetic, and the release.

The density is ``exp(kappa <g, x>)`` on the sphere of D dimensions. With ``<g, x> = tanh s`` the height s has the
log-density ``kappa tanh s - (D - 1) log cosh s``, with a bounded curvature. Straight lines between knots replace it;
each piece is a truncated exponential distribution, which inverts in closed form.
``docs/theory/baselines.md`` has the proofs.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize import brentq

from nearveil.mechanisms._gaussian import LINK
from nearveil.mechanisms._privunit import CELL, Integers, draw_cells
from nearveil.mechanisms.base import VectorRelease
from nearveil.mechanisms.messages import Floats, Message, make_guarantee
from nearveil.mechanisms.projection import ProjectedRelease
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_range
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source, Table, gaussian_integers, look_up, make_alias_table, round_down

EPSILONS = (1e-2, 64.0)
LEAST_DIMENSION = 16  # shorter rows are padded: the direction across x needs enough numbers
LARGEST_DIMENSION = 1 << 14
PIECES = 1 << 13
GAUSS_BITS = 46  # Gaussians for the direction across x are multiples of 2^-46
FINE_BITS = 36  # of the grid of the blur, in a message's units
BLUR = 2.0**-4  # the scale of the blur in those units; a coordinate of a direction is about one

_TAIL = 17.0
_RARE = 200 * math.log(2)  # extra_delta covers events of a probability below 2^-200
_WEIGHT_BITS = 420
_ULP = 2.0**-52
_LEAST_RISE = 1e-9
_WEIGHTS = 1e-8  # rounding of the logarithms of the pieces' weights, and slopes too small to divide by


@dataclass(frozen=True)
class FisherChannel:
    """The distribution of a message; the sphere has at least 16 dimensions."""

    epsilon: float  # of the guarantee
    dimension: int
    kappa: float  # the concentration
    reach: float  # heights s end at +-reach

    @property
    def cost(self) -> float:
        """Epsilon spent on floating-point arithmetic, for any two rows."""
        return self.epsilon - 2 * self.kappa

    @property
    def extra_delta(self) -> float:
        """Delta of finite tables and truncated tails."""
        return self.dimension * 2.0**-100

    def draw(self, rows: Floats, source: Source) -> Integers:
        """Draw a direction around each row, times sqrt(D), with a blur that hides rounding."""
        n, d = rows.shape
        axes = np.zeros((n, self.dimension))
        axes[:, :d] = rows
        along = heights(self, n, source)[:, None]
        plain = gaussian_integers(Fraction(1 << GAUSS_BITS), axes.size, source).reshape(axes.shape) * 2.0**-GAUSS_BITS
        across = plain - np.einsum("ij,ij->i", plain, axes)[:, None] * axes
        across /= np.sqrt(np.einsum("ij,ij->i", across, across))[:, None]
        vectors = (np.tanh(along) * axes + across / np.cosh(along)) * np.sqrt(self.dimension)
        blur = gaussian_integers(Fraction(int(BLUR * 2**FINE_BITS)), axes.size, source).reshape(axes.shape)
        return np.asarray((np.rint(vectors * 2.0**FINE_BITS).astype(np.int64) + blur)[:, :d])


@lru_cache(maxsize=16)
def make_pieces(channel: FisherChannel) -> tuple[Table, Floats]:
    """Return an alias table of the pieces between knots, and the rise of the log-density over each piece."""
    at = np.linspace(-channel.reach, channel.reach, PIECES + 1)
    knots = log_height(at, channel.kappa, channel.dimension)
    rises = np.diff(knots)
    rises = np.where(np.abs(rises) < _LEAST_RISE, _LEAST_RISE, rises)
    masses = np.exp(knots[:-1] - knots.max()) * np.expm1(rises) / rises
    parts = (math.frexp(mass) for mass in masses.tolist())
    weights = [int(math.ldexp(m, 53)) << max(0, e - 53 + _WEIGHT_BITS) for m, e in parts]
    return make_alias_table(weights), rises


def log_height(heights: Floats, kappa: float, dimension: int) -> Floats:
    """Return the log-density of the height s, up to a constant: ``kappa tanh s - (D - 1) log cosh s``."""
    return np.asarray(kappa * np.tanh(heights) - (dimension - 1) * (np.logaddexp(heights, -heights) - math.log(2)))


def calibrate(epsilon: float, dimension: int) -> FisherChannel:
    """Return the channel with the largest concentration: 2 kappa plus the cost of arithmetic is epsilon.

    (epsilon, extra_delta)-DP by Theorem 4 of docs/theory/baselines.md; attacked by
    `test_the_heights_are_those_of_the_density` and `test_what_the_fisher_channel_costs`.
    """
    value = check_range(epsilon, "epsilon", *EPSILONS)
    if not 1 <= dimension <= LARGEST_DIMENSION:
        raise ValueError(f"X must have 1 to {LARGEST_DIMENSION} columns after the projection")
    size = max(LEAST_DIMENSION, dimension)
    reach = _find_reach(value / 2, size)
    cost = 2 * _bound_bending(value / 2, size, reach) + 2 * bound_arithmetic_cost(size, reach) + _WEIGHTS
    return FisherChannel(value, size, round_down((value - cost) / 2), reach)


def bound_arithmetic_cost(dimension: int, reach: float) -> float:
    """Bound the cost of doubles on either side of a comparison (Theorem 4 of docs/theory/privunit.md)."""
    shift = bound_displacement(dimension, reach) / BLUR
    return _TAIL * shift + shift**2 / 2


def bound_displacement(dimension: int, reach: float) -> float:
    """Bound the error of the computed vector, times sqrt(D) (Lemma B of docs/theory/baselines.md)."""
    root = math.sqrt(dimension)
    across = root * (45 * 2.0**-GAUSS_BITS + 18 * (3 * dimension + 24) * _ULP)
    # The Gaussian vector across x is shorter with a probability below 2^-200.
    shortest = math.sqrt((dimension - 1) * math.exp(-2 * _RARE / (dimension - 1) - 1))
    along = 2 * reach / PIECES * 2.0**-46 + reach * 2.0**-50
    return root * (2 * across / shortest + along + (2 * dimension + 64) * _ULP + 0.51 * 2.0**-FINE_BITS)


def _bound_bending(kappa: float, dimension: int, reach: float) -> float:
    """Bound the error of straight lines between knots: an eighth of step^2 times the curvature."""
    return (2 * reach / PIECES) ** 2 / 8 * (dimension - 1 + 0.77 * kappa)


def _find_reach(kappa: float, dimension: int) -> float:
    """Return the largest height; the mass beyond is below 2^-200 (Lemma A of docs/theory/baselines.md)."""

    def log_tail(reach: float) -> float:
        outside = -(dimension - 1) * math.log(math.cosh(reach)) - math.log((dimension - 1) * math.tanh(reach))
        return 2 * kappa + outside + math.log(2 * math.sqrt(dimension) / 1.2) + _RARE

    return float(brentq(log_tail, 1e-6, 100.0)) * (1 + 1e-6)


@dataclass(eq=False, repr=False)
class VonMisesFisher(ProjectedRelease, VectorRelease):
    """Send a random direction around the row, of density ``exp(kappa <g, x>)`` (Weggenmann and Kerschbaum 2021).

    The likelihoods of two rows at a Euclidean distance r differ by a factor of at most ``exp(kappa r)``: metric
    privacy, with `metric_epsilon` = kappa for each unit of distance (Theorem 4 of ``docs/theory/baselines.md``). On
    the sphere r is at most 2, which gives the pure local guarantee of epsilon = 2 kappa. At equal epsilon PrivUnit
    hides all pairs of rows equally well and has a far larger signal; this mechanism hides near rows better. The
    message is the direction times sqrt(D), in cells of 1/8, one byte per coordinate.

    Parameters
    ----------
    epsilon : float
        From 0.01 to 64, for the whole sphere.
    projection, n_components, projection_seed
        A public map to fewer dimensions, as for :class:`~nearveil.mechanisms.PrivUnit`. The metric
        guarantee uses distances after this map.

    Attributes
    ----------
    channel_ : FisherChannel
    projection_ : Projection

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((200, 32))
    >>> release = VonMisesFisher(8.0).fit(rows[:100])
    >>> f"{release.guarantee.epsilon}, {release.metric_epsilon:.3f} for each unit of distance"
    '8.0, 4.000 for each unit of distance'
    """

    name = "von-mises-fisher"
    _kind, _unit = "int8", CELL

    epsilon: float
    channel_: FisherChannel = field(init=False)

    def _make_guarantee(self) -> Guarantee:
        """Theorem 4."""
        epsilon, extra = self.channel_.epsilon, self.channel_.extra_delta
        theorem, details = "von Mises-Fisher: metric privacy, at the largest distance", {"events": (PureDp(epsilon),)}
        return make_guarantee(epsilon, extra, theorem, LINK, extra_delta=extra, **details)

    def _release(self, features: Floats, source: Source) -> list[Message]:
        channel: Any = self.channel_
        return self._messages(source, vector=draw_cells(channel, self._prepare(features), source))

    @property
    def metric_epsilon(self) -> float:
        """Epsilon for each unit of Euclidean distance between two rows of norm one, without `metric_slack`."""
        self._check_fitted()
        return self.channel_.kappa

    @property
    def metric_slack(self) -> float:
        """Epsilon that arithmetic adds at every distance, however small."""
        self._check_fitted()
        return self.channel_.cost

    def _log_density(self, messages: list[Message], features: Floats) -> Floats:
        """Ignore the blur and the cells: that only makes an attack weaker."""
        rows = self._prepare(features)
        vectors = self._read_vectors(messages, rows.shape[1])
        return np.asarray(self.channel_.kappa / np.sqrt(self.channel_.dimension) * vectors @ rows.T)

    def _calibrate(self, features: Floats) -> None:
        del features
        self.channel_ = calibrate(self.epsilon, self.projection_.n_components)


def heights(channel: FisherChannel, count: int, source: Source) -> Floats:
    """Draw heights s, ``<g, x> = tanh s``: a piece from the table, then a position in it by inversion."""
    table, rises = make_pieces(channel)
    chosen = look_up(table, source.words(count), source)
    uniform = ((source.words(count) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    rise = rises[chosen]
    positions = np.log1p(uniform * np.expm1(rise)) / rise
    return np.asarray(2 * channel.reach / PIECES * (chosen + positions) - channel.reach)
