"""What LATENT and OME claim to cost, what their correction says, and their exact local epsilons, also at a delta."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import localcontext

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom

from nearveil.mechanisms import OME, Latent
from nearveil.mechanisms._bitwise import (
    PRECISE,
    BitLaw,
    BitString,
    Encoding,
    as_decimal,
    bound_code_word_epsilon,
    compute_pure_epsilon,
)
from nearveil.mechanisms.messages import Floats
from nearveil.privacy.accounting.binary import Moves, compose_binary
from nearveil.privacy.checks import check_delta

_MOST_EXACT = 1024  # maximum number of bits of one law for which all mixtures are tried
_GRID = 1 << 14
_DELTA_DOUBT = 1e-13  # largest rounding error of a delta


@dataclass(frozen=True)
class Price:
    """Local epsilons of one value and of the whole message, at delta 0 and at the delta of the budgets."""

    per_value: float
    per_vector: float
    per_value_at_delta: float
    per_vector_at_delta: float


@dataclass(frozen=True)
class Budgets:
    """The epsilon of a whole vector, by each source."""

    # `claimed`: the paper's. `published_correction`: of "Corrected privacy budget bounds in LATENT and OME", which
    # divides by an expected distance and so bounds no likelihood ratio. `exact`: over all pairs of bit strings.
    # `code_word_bound`: over the pairs of code words that rows of norm one can have; never above `exact`.

    claimed: float
    published_correction: float
    exact: Price
    code_word_bound: Price
    delta: float
    n_bits: int
    n_values: int

    @property
    def claim_holds(self) -> bool:
        """Whether the claim is at least the exact epsilon over all strings."""
        return self.claimed >= self.exact.per_vector

    def __str__(self) -> str:
        lines = [
            f"epsilon of a vector (of a value), {self.n_values} values, {self.n_bits} bits",
            f"{'claimed':<22}{self.claimed:.6g} ({'holds' if self.claim_holds else 'false'})",
            f"{'published correction':<22}{self.published_correction:.6g} (not an LDP bound)",
        ]
        for name, price in (("exact, all strings", self.exact), ("code words, at most", self.code_word_bound)):
            at_delta = f"{price.per_vector_at_delta:.6g} ({price.per_value_at_delta:.4g})"
            pure = f"{price.per_vector:.6g} ({price.per_value:.4g})"
            lines.append(f"{name:<22}{pure}, at delta {self.delta:g} {at_delta}")
        return "\n".join(lines)


def compute_budgets(release: Latent | OME, delta: float = 1e-5) -> Budgets:
    """Return the claimed, the published corrected and the exact epsilon, at delta 0 and at `delta`."""
    exact, code_words = compute_prices(release.string_, release.encoding_, delta)
    return Budgets(
        claimed=release.nominal_epsilon_,
        published_correction=compute_published_correction(release),
        exact=exact,
        code_word_bound=code_words,
        delta=delta,
        n_bits=release.string_.length,
        n_values=release.projection_.n_components,
    )


def compute_published_correction(release: Latent | OME) -> float:
    """Return the epsilon of the published correction, Theorem 8 (LATENT) or 9 (OME) of its paper."""
    nominal, length = release.nominal_epsilon_, release.string_.length
    with localcontext(PRECISE):
        inverses = [1 / (p * (1 - q) + q * (1 - p)) for p, q in release._chances(nominal, length)]
        difference = length * (inverses[0] - inverses[-1]) * as_decimal(release.alpha or 1.0).ln()
        return float(difference + as_decimal(nominal) * sum(inverses) / len(inverses))


def compute_prices(string: BitString, encoding: Encoding, delta: float) -> tuple[Price, Price]:
    """Return the exact epsilons over all strings, and upper bounds over the code words of unit rows."""
    check_delta(delta)

    def price(string: BitString) -> tuple[float, float, float, float]:
        n_values = string.length // encoding.word_bits
        return (
            compute_pure_epsilon(string),
            compute_epsilon_at(string.laws, string.counts(), delta),
            bound_code_word_epsilon(string, encoding, n_values),
            compute_epsilon_at(string.laws, _count_differing(string, encoding, n_values), delta),
        )

    starts = range(len(string.laws))  # the law of the first bit of a value
    words = [BitString(string.laws[start:] + string.laws[:start], encoding.word_bits) for start in starts]
    value, vector = tuple(map(max, zip(*map(price, words), strict=True))), price(string)
    strings = Price(value[0], vector[0], value[1], vector[1])
    return strings, Price(value[2], vector[2], min(value[2:]), min(vector[2:]))


def compute_epsilon_at(laws: tuple[BitLaw, ...], counts: tuple[int, ...], delta: float) -> float:
    """Return an epsilon at a delta for strings that differ in `counts` bits of each law."""
    # Exact for one law; for two, at most one cell of a grid of 16,384 too large (Theorem 4 of
    # docs/theory/latent-ome.md). Attacked by `test_at_delta_against_all_pairs_of_strings`.
    groups = [(law, n) for law, n in zip(laws, counts, strict=True) if n > 0 and law.epsilon > 0]
    pure = sum(law.epsilon * n for law, n in groups)
    if not groups or pure == 0:
        return 0.0
    if max(n for _, n in groups) > _MOST_EXACT:
        p, q = (np.array([getattr(law, side) for law, _ in groups]) for side in ("p", "q"))
        moves = Moves.between(np.concatenate([p, q]), np.concatenate([q, p]))
        return min(compose_binary(moves, sum(n for _, n in groups)).epsilon(delta), pure)
    curve = _join_curves([Mixtures.count(law, n) for law, n in groups])
    if curve(pure) >= delta:
        return pure
    if curve(0.0) <= delta:
        return 0.0
    root = float(brentq(lambda epsilon: curve(epsilon) - delta, 0.0, pure, xtol=1e-13, rtol=1e-14))
    return min(root * (1 + 1e-12), pure)


@dataclass(frozen=True, eq=False)
class Mixtures:
    """Losses of n differing bits of one law, k of them 1 in the first string and n - k in the second."""

    # Probabilities of every mixture and loss under the first string; their last column is zero.

    lowest: Floats  # smallest loss of every mixture k; the next ones follow in steps of `gap`
    gap: float
    masses: Floats
    tails: Floats  # probabilities of the loss and all larger ones
    discounted: Floats  # the same, with each larger loss discounted by its excess

    @classmethod
    def count(cls, law: BitLaw, n: int) -> "Mixtures":
        p, q = (law.p, law.q) if law.p >= law.q else (1 - law.p, 1 - law.q)
        k = np.arange(n + 1)
        masses = np.zeros((n + 1, n + 2))
        for count in k:
            first = binom.pmf(np.arange(count + 1), count, p)
            second = binom.pmf(np.arange(n - count + 1), n - count, q)[::-1]
            masses[count, :-1] = np.convolve(first, second)
        gap = law.one + law.zero
        discounted = np.zeros_like(masses)
        for column in range(n, -1, -1):
            discounted[:, column] = masses[:, column] + math.exp(-gap) * discounted[:, column + 1]
        tails = np.cumsum(masses[:, ::-1], axis=1)[:, ::-1]
        return cls((n - 2 * k) * law.zero - (n - k) * gap, gap, masses, tails, discounted)

    def losses(self) -> Floats:
        """Return the losses of every mixture, shape (n + 1, n + 1)."""
        return np.asarray(self.lowest[:, None] + self.gap * np.arange(len(self.lowest)))

    def delta(self, epsilons: Floats) -> Floats:
        """Return the largest delta of all mixtures at each epsilon, shape (m,); an epsilon may be negative."""
        at = np.floor((epsilons[:, None] - self.lowest) / self.gap).astype(np.int64) + 1
        at = np.clip(at, 0, len(self.lowest))
        rows = np.arange(len(self.lowest))
        above = np.minimum(epsilons[:, None] - self.lowest - self.gap * at, 0.0)
        deltas = self.tails[rows, at] - np.exp(above) * self.discounted[rows, at]
        return np.asarray(np.maximum(deltas.max(axis=1), 0.0))


def _join_curves(groups: list[Mixtures]) -> Callable[[float], float]:
    """Return delta as a function of epsilon, for one or two groups of bits."""
    if len(groups) == 1:
        return lambda epsilon: float(groups[0].delta(np.array([epsilon]))[0]) + _DELTA_DOUBT
    first, second = groups
    losses, masses = first.losses(), first.masses[:, :-1]
    reach = float(np.abs(second.losses()).max())
    grid = np.linspace(-reach, reach, _GRID)
    deltas_on_grid = second.delta(grid)

    def curve(epsilon: float) -> float:
        rest = epsilon - losses
        # Delta falls with epsilon, so the grid's point to the left is an upper bound. Below all losses: 1 - e^rest.
        left = deltas_on_grid[np.maximum(np.searchsorted(grid, rest, side="right") - 1, 0)]
        deltas = np.where(rest < -reach, -np.expm1(np.minimum(rest, 0.0)), left)
        return float((masses * deltas).sum(axis=1).max()) + _DELTA_DOUBT

    return curve


def _count_differing(string: BitString, encoding: Encoding, n_values: int) -> tuple[int, ...]:
    """Bound the number of bits of each law in which two code words of unit rows can differ."""
    bounds = []
    for number, count in enumerate(string.counts()):
        marks = (np.arange(string.length) % len(string.laws) == number).astype(np.float64)
        bounds.append(min(count, math.floor(encoding.worst(marks, marks, n_values) + 1e-6)))
    return tuple(bounds)
