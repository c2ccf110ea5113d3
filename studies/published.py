"""PrivateMail as published in 2021, and as programmed by the authors in 2022: versions of `as_published`. Not sound.

Importing this module adds them to :data:`nearveil.privatemail.published.ENGINES`; the library does that when they are
named.
"""

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from nearveil.metrics import Floats
from nearveil.privacy.checks import check_choice, check_count, check_positive
from nearveil.privacy.noise import LaplaceNoise, choose_laplace_grid
from nearveil.privatemail.engines import Labels
from nearveil.privatemail.graph import LabelGraph, label_graph
from nearveil.privatemail.graph.labels import Encoding
from nearveil.privatemail.published import ENGINES, PublishedEngine
from nearveil.privatemail.sensitivity import Degrees, bound_degrees, published_2022
from studies.all_rows import check_query

Variant = Literal["printed", "derived"]


class CentredDistances:
    """The program's label "Laplacian": of double-centred distances between integer labels."""

    # Its kernel is ``K = -1/2 J |y_i - y_j| J`` with ``J = I - 11'/n``. Its rows sum to zero, so the "Laplacian" is -K
    # and sorts the embedding by label instead of repelling within classes.

    def __init__(self, labels: NDArray[np.int64]) -> None:
        self._classes, self._codes = np.unique(labels, return_inverse=True)
        self._distances = np.abs(self._classes[:, None] - self._classes[None, :]).astype(np.float64)

    def laplacian_matmul(self, Z: Floats) -> Floats:
        """Multiply the "Laplacian" with `Z` of shape (n, k)."""
        sums = np.zeros((len(self._classes), Z.shape[1]))
        np.add.at(sums, self._codes, Z - Z.mean(axis=0))
        product = (self._distances @ sums)[self._codes]
        centred: Floats = (product - product.mean(axis=0)) / 2
        return centred


def find_code_scale(sensitivity: float, epsilon: float, delta: float) -> float:
    """Return the program's standard deviation, which is the paper's variance."""
    return 2 * math.log(1.25 / delta) * (sensitivity / epsilon) ** 2


def compose_strongly(epsilon: float, steps: int, delta: float) -> float:
    """Return the 2021 paper's total epsilon of `steps`; delta' is all of delta, because Laplace noise has none."""
    return epsilon * math.sqrt(2 * steps * math.log(1 / delta)) + steps * epsilon * math.tanh(epsilon / 2)


def step_epsilon(total: float, steps: int, delta: float) -> float:
    """Return the epsilon of one iteration for which `compose_strongly` states `total`."""
    return float(brentq(lambda epsilon: compose_strongly(epsilon, steps, delta) - total, 0, total + 1, xtol=1e-15))


@dataclass(frozen=True, eq=False)
class Engine2021(PublishedEngine):
    """The mechanism of the 2021 paper: Laplace noise in several steps, and one-hot labels (Corollary 1.1)."""

    version = "2021"
    repeats = True
    reason = (
        "its sensitivity bound holds with a probability that is vacuous, feeds an L2 bound to Laplace noise, is "
        "reused for later iterations that it does not cover, and the target's own label is used after the noise"
    )

    def make_label_graph(self, labels: Labels) -> LabelGraph:
        """Return the graph of one-hot labels."""
        return label_graph(labels, self.sigma, "one-hot")

    def noise(self, start: Floats) -> LaplaceNoise:
        """Return the noise of one private step."""
        (n, k), size = start.shape, start.size
        beta = Decimal(10) ** -math.ceil(4 * k * n / math.log(10))  # the largest power of ten that it allows
        change = published_2021(n, k, self.start_scale, beta=beta, **self.setting)
        scale = change / step_epsilon(self.epsilon, self.n_private_steps, self.delta)
        return LaplaceNoise(sensitivity=change, scale=scale, size=size, grid=choose_laplace_grid(change, size))


@dataclass(frozen=True, eq=False)
class ProgramEngine(PublishedEngine):
    """The authors' program of 2022."""

    version = "2022-code"
    reason = (
        "the program adds noise with a variance for its deviation and uses the target's true label in every iteration "
        "after it: the result is the label"
    )

    @property
    def bandwidth(self) -> float:
        """The s of ``exp(-d^2 / (2 s^2))``; the program has ``exp(-d^2 / sigma^2)``."""
        return self.sigma / math.sqrt(2)

    def make_label_graph(self, labels: Labels) -> Any:
        """Return the label "Laplacian" of the program."""
        return CentredDistances(labels)

    def calibrate(self, start: Floats) -> tuple[float, float]:
        """Return the sensitivity of the program, and its standard deviation."""
        change = published_2022(start, **self.setting, as_programmed=True)
        return change, find_code_scale(change, self.epsilon, self.delta)

    def rescale(self, Z: Floats) -> Floats:
        """Scale the embedding to Frobenius norm sqrt(rows), after each step without noise."""
        return np.asarray(Z * (math.sqrt(len(Z)) / np.linalg.norm(Z)))


ENGINES.update({engine.version: engine for engine in (Engine2021, ProgramEngine)})


def published_2021(
    n_rows: int,
    n_columns: int,
    start_scale: float,
    *,
    bandwidth: float,
    label_weight: float,
    n_classes: int,
    beta: float | Decimal,
    label_encoding: Encoding = "one-hot",
    variant: Variant = "printed",
) -> float:
    """Return the bound of Corollary 1.1 of the 2021 paper. Not sound.

    It assumes a start of independent normal entries and claims to hold "with probability 1 - sum beta" over all pairs
    of neighbours, of which there are uncountably many. Its condition on beta depends on the data; this function
    requires it for all data, ``beta <= exp(-4 k n)``.

    `n_rows` and `n_columns` are the paper's n and k, `start_scale` its sigma_q. Labels are 0 to ``n_classes - 1``, not
    used if they are one-hot. No float `beta` is small enough if ``4 k n`` exceeds 744: use ``decimal.Decimal``.
    `variant` has the constants of Appendix E ("printed"), or of the derivation in Appendix A.1 ("derived").

    Examples
    --------
    >>> from decimal import Decimal
    >>> setting = {"bandwidth": 6.0, "label_weight": 0.6, "n_classes": 98, "beta": Decimal("1e-3500")}
    >>> round(published_2021(1000, 2, 1.0, variant="derived", **setting))
    166
    """
    n = check_count(n_rows, "n_rows", least=2)
    columns = check_count(n_columns, "n_columns", least=1)
    start_scale = check_positive(start_scale, "start_scale")
    bandwidth, label_weight, _ = check_query(bandwidth, label_weight, None)
    n_classes = check_count(n_classes, "n_classes", least=1)
    check_choice(label_encoding, "label_encoding", Encoding)
    check_choice(variant, "variant", Variant)
    entries = _bound_entries(n, bandwidth, label_weight, n_classes, label_encoding, variant)
    return bound_random_start(entries, n, columns, start_scale, _check_beta(beta, n, columns))


Entries = tuple[float, float, float, float]  # least and most off-diagonal z_ij, and the same on the diagonal


def _bound_entries(
    n: int, bandwidth: float, label_weight: float, n_classes: int, encoding: Encoding, variant: Variant
) -> Entries:
    """Bound the summands z_ij of the 2021 paper, squared entries of the difference of two steps."""
    # By the constants of Appendix E ("printed") or of Appendix A.1, eqs. 32 to 40 ("derived").
    at = bound_degrees(n, bandwidth)
    s2, alpha = bandwidth**2, label_weight
    printed = variant == "printed"
    low_one = n * math.exp(-1 / s2) + math.expm1(-1 / (2 * s2))  # n e^(-1/s^2) + e^(-1/(2 s^2)) - 1
    added_one = (n + 1) * math.exp(-1 / s2) - 1

    # One-hot labels: eqs. 32, 33 and 38. Appendix E has n e^(-1/s^2) instead of n e^(-2/s^2) in eqs. 33, 38.
    slip = low_one if printed else at.low
    one_hot_most = alpha**2 * (
        (at.high / at.low) ** 2 + (n / at.low_added) ** 2 - 2 * low_one * added_one / (n * at.high)
    )
    one_hot_least = alpha**2 * ((low_one / at.high) ** 2 + (added_one / n) ** 2 - 2 * n * at.high / (slip * added_one))
    if encoding == "one-hot":
        off = _bound_off_diagonal(n, at, alpha, math.exp(-2 / s2), math.exp(-3 / s2), math.exp(-3 / s2), s2, slip)
        return (*off, one_hot_least, one_hot_most)

    # Integer labels: eqs. 35, 36, 39 and 40. Appendix E prints the diagonal eqs. 35 and 36 for the off-diagonal
    # entries, and repeats the diagonal of one-hot labels.
    c2 = (n_classes - 1) ** 2
    label = (n + 1) * math.exp(-c2 / (2 * s2)) - 1
    diagonal_most = alpha**2 * ((n / at.low) ** 2 + (n / at.low_added) ** 2 - 2 * label**2 / (n * at.high))
    diagonal_least = alpha**2 * ((label / at.high) ** 2 + (label / n) ** 2 - 2 * n**2 / (at.low * added_one))
    if printed:
        return diagonal_least, diagonal_most, one_hot_least, one_hot_most
    mixed = math.exp(-(c2 + 4) / (2 * s2))
    off = _bound_off_diagonal(n, at, alpha, math.exp(-c2 / s2), mixed, math.exp(-(c2 + 4) / s2), s2, at.low)
    return (*off, diagonal_least, diagonal_most)


def _bound_off_diagonal(
    n: int, at: Degrees, alpha: float, label: float, mixed_most: float, mixed_least: float, s2: float, slip: float
) -> tuple[float, float]:
    """Return the least and most of eqs. 38 (one-hot) and 39, 40 (integer); denominators are not squared there."""
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


def _check_beta(beta: float | Decimal, n: int, columns: int) -> float:
    """Return ln(beta), or raise if the paper's condition on beta does not hold for all data."""
    exact = Decimal(beta)
    if not exact.is_finite() or not 0 < exact < 1:
        raise ValueError("beta must be a number between 0 and 1, both excluded")
    logarithm, most = float(exact.ln()), -4.0 * columns * n
    if logarithm > most * (1 - 1e-9):  # allows for the rounding of e^(-4kn)
        raise ValueError(
            f"beta must be at most exp(-4 k n) = exp({most:g}) for the condition of Theorem 1 to hold for all data "
            "(its (sum |z|^2)^2 / sum |z|^4 is at most n); where no float is that small, use decimal.Decimal, such as "
            f"Decimal('1e{math.floor(most / math.log(10))}')"
        )
    return logarithm


def bound_random_start(entries: Entries, n: int, columns: int, start_scale: float, logarithm: float) -> float:
    """Return the bound of Corollary 1.1 of the 2021 paper."""
    off_least, off_most, diagonal_least, diagonal_most = entries
    phi_least, phi_most = n * off_least + diagonal_least, n * off_most + diagonal_most
    if phi_least == 0:
        raise ValueError("phi_min is 0: Corollary 1.1 divides by it. Change bandwidth, label_weight or the rows")
    inside = -logarithm * phi_most**4 / phi_least**2 - 2 * math.sqrt(-columns * n * logarithm * phi_least**4)
    if inside < 0:
        raise ValueError(
            "Corollary 1.1 takes the root of a negative number here, because |phi_min| is above phi_max: "
            "it gives no bound at this bandwidth and label_weight; a smaller beta may help"
        )
    return start_scale / 2 * math.sqrt(inside)
