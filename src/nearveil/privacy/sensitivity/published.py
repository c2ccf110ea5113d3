"""The papers' sensitivity bounds, as printed: for comparison and for audits, never for a release.

Neither is a sound bound; ``docs/theory/sensitivity.md`` says where each derivation breaks, and
``tests/privacy/test_sensitivity.py`` holds a counterexample to each.
"""

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import numpy as np

from nearveil.graph.labels import Encoding

Variant = Literal["printed", "derived"]


@dataclass(frozen=True)
class Degrees:
    """The papers' bounds on the diagonals of the Laplacians, padded (n rows and a zero row) and not.

    `low, high`: ``n exp(-2/s^2) + exp(-1/(2 s^2)) - 1`` and ``n + exp(-1/(2 s^2)) - 1``: L_X with a row of zeros.
    """

    n: int
    low: float
    high: float
    low_added: float  # ``(n + 1) exp(-2/s^2) - 1``: L_X of n + 1 rows, which is at most n


def bound_degrees(n: int, bandwidth: float) -> Degrees:
    """Return the bounds, or raise where the papers' lower ones are not positive."""
    zero = math.expm1(-1 / (2 * bandwidth**2))
    a = math.exp(-2 / bandwidth**2)
    bounds = Degrees(n, n * a + zero, n + zero, (n + 1) * a - 1)
    if min(bounds.low, bounds.low_added) <= 0:
        raise ValueError(
            f"the published bound needs n exp(-2 / bandwidth^2) > 1, which {n} rows at bandwidth {bandwidth:g} "
            "do not meet: use a larger bandwidth or more rows"
        )
    return bounds


def bound_step(
    start: Any, bandwidth: float, label_weight: float, n_classes: int, *, as_programmed: bool = False
) -> float:
    """Return Theorem 2 of the 2022 paper, ``M sqrt(n + 1) / 2 |Q|_F``, with M of Lemma 1, ``n M_ij + M_ii``.

    The authors' program has c where the paper has c^2, in one of its places.
    """
    n, s2, c, alpha = len(start), bandwidth**2, n_classes - 1, label_weight
    at = bound_degrees(n, bandwidth)
    label = math.exp(-(c if as_programmed else c**2) / (2 * s2))
    diagonal = alpha**2 * ((n / at.low) ** 2 + (n / at.low_added) ** 2 - 2 * ((n + 1) * label - 1) ** 2 / (n * at.high))
    mixed = math.exp(-(c**2 + 4) / (2 * s2))
    off_diagonal = (
        (alpha**2 + 1) / at.low**2
        - 2 * alpha * mixed / at.high**2
        + (alpha**2 + 1) / at.low_added**2
        - 2 * alpha * mixed / n**2
        - 2 * (alpha**2 * math.exp(-(c**2) / s2) + math.exp(-4 / s2)) / (n * at.high)
        + 4 * alpha / (at.low * at.low_added)
    )
    return (n * off_diagonal + diagonal) * math.sqrt(n + 1) / 2 * float(np.linalg.norm(start))


@dataclass(frozen=True)
class Entries:
    """Bounds on the summands z_ij of the 2021 paper, squared entries of the difference of two steps."""

    off_least: float
    off_most: float
    diagonal_least: float
    diagonal_most: float

    def phi(self, n: int) -> tuple[float, float]:
        """Return phi_min and phi_max, ``n z_ij + z_ii``."""
        return n * self.off_least + self.diagonal_least, n * self.off_most + self.diagonal_most


def bound_entries(
    n: int, bandwidth: float, label_weight: float, n_classes: int, encoding: Encoding, variant: Variant
) -> Entries:
    """Return the constants of Appendix E ("printed") or of Appendix A.1, eqs. 32 to 40 ("derived")."""
    at = bound_degrees(n, bandwidth)
    s2, alpha = bandwidth**2, label_weight
    printed = variant == "printed"
    low_one = n * math.exp(-1 / s2) + math.expm1(-1 / (2 * s2))  # n e^(-1/s^2) + e^(-1/(2 s^2)) - 1
    added_one = (n + 1) * math.exp(-1 / s2) - 1

    # One-hot labels: eqs. 32, 33 and 38. Appendix E has n e^(-1/s^2) where eqs. 33 and 38 have n e^(-2/s^2).
    slip = low_one if printed else at.low
    one_hot_most = alpha**2 * (
        (at.high / at.low) ** 2 + (n / at.low_added) ** 2 - 2 * low_one * added_one / (n * at.high)
    )
    one_hot_least = alpha**2 * ((low_one / at.high) ** 2 + (added_one / n) ** 2 - 2 * n * at.high / (slip * added_one))
    if encoding == "one-hot":
        off = _off_diagonal(at, alpha, math.exp(-2 / s2), math.exp(-3 / s2), math.exp(-3 / s2), s2, slip)
        return Entries(*off, one_hot_least, one_hot_most)

    # Integer labels: eqs. 35, 36, 39 and 40. Appendix E prints eqs. 35 and 36, which are about the
    # diagonal, for the entries off it, and repeats the diagonal of one-hot labels.
    c2 = (n_classes - 1) ** 2
    label = (n + 1) * math.exp(-c2 / (2 * s2)) - 1
    diagonal_most = alpha**2 * ((n / at.low) ** 2 + (n / at.low_added) ** 2 - 2 * label**2 / (n * at.high))
    diagonal_least = alpha**2 * ((label / at.high) ** 2 + (label / n) ** 2 - 2 * n**2 / (at.low * added_one))
    if printed:
        return Entries(diagonal_least, diagonal_most, one_hot_least, one_hot_most)
    mixed = math.exp(-(c2 + 4) / (2 * s2))
    off = _off_diagonal(at, alpha, math.exp(-c2 / s2), mixed, math.exp(-(c2 + 4) / s2), s2, at.low)
    return Entries(*off, diagonal_least, diagonal_most)


def _off_diagonal(
    at: Degrees, alpha: float, label: float, mixed_most: float, mixed_least: float, s2: float, slip: float
) -> tuple[float, float]:
    """Return the least and most of eqs. 38 (one-hot) and 39, 40 (integer); denominators are not squared there."""
    n = at.n
    squares = alpha**2 * label + math.exp(-4 / s2)
    least = (
        squares / at.high
        - 2 * alpha / slip
        + squares / n
        - 2 * alpha / at.low_added
        - 2 * (alpha**2 + 1) / (at.low * at.low_added)
        + 4 * alpha * mixed_least / (n * at.high)
    )
    most = (
        (alpha**2 + 1) / at.low
        - 2 * alpha * mixed_most / at.high
        + (alpha**2 + 1) / at.low_added
        - 2 * alpha * mixed_most / n
        - 2 * squares / (n * at.high)
        + 4 * alpha / (at.low * at.low_added)
    )
    return least, most


def check_beta(beta: float | Decimal, n: int, columns: int) -> float:
    """Return ln(beta), or raise where the paper's condition on beta does not hold whatever the data."""
    exact = Decimal(beta)
    if not exact.is_finite() or not 0 < exact < 1:
        raise ValueError("beta must be a number between 0 and 1, both excluded")
    logarithm = float(exact.ln())
    needed = -4.0 * columns * n
    # The literal e^(-4kn) may be off by a rounding; one part in 10^9 of the exponent is no violation.
    if logarithm > needed * (1 - 1e-9):
        hint = (
            f"; no float is that small, use decimal.Decimal, such as Decimal('1e{math.floor(needed / math.log(10))}')"
            if needed < math.log(5e-324)
            else ""
        )
        raise ValueError(
            f"beta must be at most exp(-4 k n) = exp({needed:g}) for the condition of Theorem 1 to hold whatever the "
            f"data (its (sum |z|^2)^2 / sum |z|^4 is at most n){hint}"
        )
    return logarithm


def bound_random_start(entries: Entries, n: int, columns: int, start_scale: float, logarithm: float) -> float:
    """Return the bound of Corollary 1.1 of the 2021 paper."""
    phi_least, phi_most = entries.phi(n)
    if phi_least == 0:
        raise ValueError("phi_min is 0: Corollary 1.1 divides by it. Change bandwidth, label_weight or the rows")
    inside = -logarithm * phi_most**4 / phi_least**2 - 2 * math.sqrt(-columns * n * logarithm * phi_least**4)
    if inside < 0:
        raise ValueError(
            "Corollary 1.1 takes the root of a negative number here, because |phi_min| is above phi_max: "
            "it gives no bound at this bandwidth and label_weight; a smaller beta may help"
        )
    return start_scale / 2 * math.sqrt(inside)
