"""From an exact epsilon to the nominal one that has it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom

from nearveil.mechanisms.base import Floats
from nearveil.mechanisms.bits._code import BitLaw, BitString, Encoding
from nearveil.privacy.accounting.binary import Moves, compose_binary
from nearveil.privacy.checks import check_delta

LEAST, MOST = 1e-9, 40.0  # of the nominal epsilon of a bit: below, thresholds are too coarse; above, nothing is hidden


def largest_nominal(
    price: Callable[[float], float], epsilon: float, turn: float, length: int, name: str = "the mechanism"
) -> float:
    """Return the largest nominal epsilon found whose exact price is at most `epsilon`.

    `price`: The exact epsilon of a nominal one; rising from `turn` on.
    `length`: Bits.
    `name`: What an error calls the mechanism.

    Examples
    --------
    >>> f"{largest_nominal(lambda nominal: nominal / 2, 1.0, 0.0, 10):.6f}"
    '2.000000'
    """
    least, most = LEAST * length, MOST * length
    starts = [start for start in (max(turn, least), least) if price(start) <= epsilon]
    if not starts:
        floor = min(price(max(turn, least)), price(least))
        raise ValueError(
            f"epsilon must be at least {floor:.6g} for {name} with this alpha and {length} bits: "
            "no nominal_epsilon reaches less. Take alpha nearer to 1, fewer bits or fewer n_components"
        )
    low = starts[0]
    high = min(2 * max(low, epsilon), most)
    while price(high) <= epsilon and high < most:
        low, high = high, min(2 * high, most)
    if price(high) <= epsilon:
        return high
    found = float(brentq(lambda nominal: price(nominal) - epsilon, low, high, rtol=1e-15, xtol=1e-300))
    step = 2.0**-50
    while found > low and price(found) > epsilon:  # rounding, or a bound that is minimised to a few digits
        found, step = max(found * (1 - step), low), 2 * step
    return found


def checked_number(value: float, name: str) -> float:
    """Return a positive, finite number, or say what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f"{name} must be a number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite")
    return float(value)


_MOST_EXACT = 1024  # bits of one law whose mixtures of directions are all tried
_GRID = 1 << 14
_DOUBT = 1e-13  # what rounding may hide of a delta


@dataclass(frozen=True)
class Price:
    """Exact local epsilons.

    Attributes
    ----------
    per_value, per_vector : float
        At delta 0, of one value's bits and of the whole message.
    per_value_at_delta, per_vector_at_delta : float
        At the delta of the budgets.
    """

    per_value: float
    per_vector: float
    per_value_at_delta: float
    per_vector_at_delta: float


@dataclass(frozen=True)
class Budgets:
    """A mechanism's budget, by whoever states it.

    Attributes
    ----------
    claimed : float
        The epsilon of the mechanism's own paper, for the whole vector.
    published_correction : float
        That of "Corrected privacy budget bounds in LATENT and OME", for the whole vector. It divides by an expected
        distance, so it is not a bound on a likelihood ratio: ``published_label`` says so.
    exact : Price
        Over all pairs of bit strings.
    exact_code_words : Price
        Over the pairs of code words that rows of norm one can have; an upper bound.
    delta : float
    n_bits, n_values : int
    """

    published_label: ClassVar[str] = "not an LDP bound"

    claimed: float
    published_correction: float
    exact: Price
    exact_code_words: Price
    delta: float
    n_bits: int
    n_values: int

    @property
    def claim_holds(self) -> bool:
        """Whether the claim is at least the exact epsilon over all strings."""
        return self.claimed >= self.exact.per_vector

    def __str__(self) -> str:
        verdict = "holds" if self.claim_holds else "false"
        rows = [
            ("claimed", f"{self.claimed:.6g} ({verdict})"),
            ("published correction", f"{self.published_correction:.6g} ({self.published_label})"),
            ("exact, all strings", self._line(self.exact)),
            ("exact, code words", self._line(self.exact_code_words)),
        ]
        title = f"epsilon of a vector (of a value), {self.n_values} values, {self.n_bits} bits"
        return "\n".join([title, *(f"{name:<22}{text}" for name, text in rows)])

    def _line(self, price: Price) -> str:
        pure = f"{price.per_vector:.6g} ({price.per_value:.4g})"
        return f"{pure}, at delta {self.delta:g} {price.per_vector_at_delta:.6g} ({price.per_value_at_delta:.4g})"


def exact_prices(string: BitString, encoding: Encoding, delta: float) -> tuple[Price, Price]:
    """Return the exact epsilons over all strings, and over the code words that can occur."""
    check_delta(delta)
    n_values = string.length // encoding.word_bits
    words = [_turned(string.laws, start, encoding.word_bits) for start in range(len(string.laws))]
    strings = Price(
        max(pure_epsilon(word) for word in words),
        pure_epsilon(string),
        max(epsilon_at(word.laws, word.counts(), delta) for word in words),
        epsilon_at(string.laws, string.counts(), delta),
    )
    value, vector = (
        max(code_word_epsilon(word, encoding, 1) for word in words),
        code_word_epsilon(string, encoding, n_values),
    )
    value_at = max(epsilon_at(word.laws, _differing(word, encoding, 1), delta) for word in words)
    vector_at = epsilon_at(string.laws, _differing(string, encoding, n_values), delta)
    code_words = Price(value, vector, min(value, value_at), min(vector, vector_at))
    return strings, code_words


def pure_epsilon(string: BitString) -> float:
    """Return the exact epsilon over all strings: that of every bit, summed (Theorem 2 of docs/theory/latent-ome.md)."""
    return sum(law.epsilon * count for law, count in zip(string.laws, string.counts(), strict=True))


def code_word_epsilon(string: BitString, encoding: Encoding, n_values: int) -> float:
    """Return an upper bound on epsilon over the code words of unit rows (Theorem 5); never above that of strings."""
    one, zero = (np.resize([getattr(law, side) for law in string.laws], string.length) for side in ("one", "zero"))
    return min(encoding.worst(one, zero, n_values), pure_epsilon(string))


def epsilon_at(laws: tuple[BitLaw, ...], counts: tuple[int, ...], delta: float) -> float:
    """Return an epsilon at a delta for strings that differ in `counts` bits of each law.

    Exact for one law; for two, from above by at most one cell of a grid of 16,384 (Theorem 4 of
    docs/theory/latent-ome.md). Attacked by `test_at_delta_against_all_pairs_of_strings`.

    `laws`: One or two.
    """
    groups = [(law, n) for law, n in zip(laws, counts, strict=True) if n > 0 and law.epsilon > 0]
    pure = sum(law.epsilon * n for law, n in groups)
    if not groups or pure == 0:
        return 0.0
    if max(n for _, n in groups) > _MOST_EXACT:
        p, q = (np.array([getattr(law, side) for law, _ in groups]) for side in ("p", "q"))
        moves = Moves.between(np.concatenate([p, q]), np.concatenate([q, p]))
        return min(compose_binary(moves, sum(n for _, n in groups)).epsilon(delta), pure)
    curve = _joint([Mixtures.of(law, n) for law, n in groups])
    if curve(pure) >= delta:
        return pure
    if curve(0.0) <= delta:
        return 0.0
    found = float(brentq(lambda epsilon: curve(epsilon) - delta, 0.0, pure, xtol=1e-13, rtol=1e-14))
    return min(found * (1 + 1e-12), pure)


@dataclass(frozen=True, eq=False)
class Mixtures:
    """Losses of n bits of one law that differ, k of them 1 in the first string and n - k in the second.

    `masses, tails, discounted`: Of every mixture and loss under the first string: the probability, that of it and
    all greater ones, and the same with each greater loss discounted by what it is greater. The last column is zero.
    """

    lowest: Floats  # the least loss of every mixture k; the others follow in steps of `gap`
    gap: float
    masses: Floats
    tails: Floats
    discounted: Floats

    @classmethod
    def of(cls, law: BitLaw, n: int) -> "Mixtures":
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
        """Return the largest delta of all mixtures at each epsilon, which may be negative; shape (m,)."""
        at = np.floor((epsilons[:, None] - self.lowest) / self.gap).astype(np.int64) + 1
        at = np.clip(at, 0, len(self.lowest))
        rows = np.arange(len(self.lowest))
        above = np.minimum(epsilons[:, None] - self.lowest - self.gap * at, 0.0)
        deltas = self.tails[rows, at] - np.exp(above) * self.discounted[rows, at]
        return np.asarray(np.maximum(deltas.max(axis=1), 0.0))


def _joint(groups: list[Mixtures]) -> Callable[[float], float]:
    """Return delta as a function of epsilon, for one or two groups of bits."""
    if len(groups) == 1:
        return lambda epsilon: float(groups[0].delta(np.array([epsilon]))[0]) + _DOUBT
    first, second = groups
    losses, masses = first.losses(), first.masses[:, :-1]
    reach = float(np.abs(second.losses()).max())
    grid = np.linspace(-reach, reach, _GRID)
    known = second.delta(grid)

    def curve(epsilon: float) -> float:
        rest = epsilon - losses
        # Delta falls with epsilon: the grid's point to the left is from above. Below all losses it is 1 - e^rest.
        left = known[np.maximum(np.searchsorted(grid, rest, side="right") - 1, 0)]
        deltas = np.where(rest < -reach, -np.expm1(np.minimum(rest, 0.0)), left)
        return float((masses * deltas).sum(axis=1).max()) + _DOUBT

    return curve


def _turned(laws: tuple[BitLaw, ...], start: int, length: int) -> BitString:
    """Return the string of a value whose first bit follows law `start`."""
    return BitString(laws[start:] + laws[:start], length)


def _differing(string: BitString, encoding: Encoding, n_values: int) -> tuple[int, ...]:
    """Return in how many bits of each law two code words of unit rows can differ; an upper bound."""
    found = []
    for number, count in enumerate(string.counts()):
        marks = (np.arange(string.length) % len(string.laws) == number).astype(np.float64)
        found.append(min(count, math.floor(encoding.worst(marks, marks, n_values) + 1e-6)))
    return tuple(found)
