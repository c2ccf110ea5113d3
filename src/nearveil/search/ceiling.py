"""Upper bounds on the quality of private answers, for any mechanism, and the quality without a message.

Proofs: ``docs/theory/ceiling.md``. Attacks: ``tests/search/test_ceiling.py``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.lazy import LateModule
from nearveil.mechanisms.messages import candidate_count, check_fraction
from nearveil.privacy.checks import check_integer, check_range

if TYPE_CHECKING:
    from scipy import optimize
else:
    optimize = LateModule("scipy.optimize", "budget")

__all__ = ["answer_ceiling", "class_ceiling", "neighbor_ceiling", "popular_floor", "reference_line", "utility_ceiling"]

Floats = NDArray[np.float64]

_HUGE = 700.0  # e^epsilon is still finite; above, every ceiling is one to the last bit


def class_ceiling(epsilon: float, n_classes: int, k: int, delta: float = 0.0) -> float:
    """Return the largest probability that one of k answered classes is the true one (Theorem C).

    Holds for `n_classes` equally likely classes and every (epsilon, delta)-LDP message; subset selection attains it at
    delta 0. Epsilon can be infinite.

    Examples
    --------
    >>> round(class_ceiling(0.01, 98, 8), 3)
    0.082
    """
    _check_guarantee(epsilon, delta)
    for name, value in (("n_classes", n_classes), ("k", k)):
        check_integer(value, name, 1)
    if k > n_classes:
        raise ValueError("k must be at most n_classes")
    # An answer has utility one or zero, so the pair x = x' needs no delta: C - 1 of C pairs remain.
    return utility_ceiling(epsilon, delta * (n_classes - 1) / n_classes, k / n_classes)


def utility_ceiling(epsilon: float, delta: float, floor: float) -> float:
    """Return the largest expected utility of a private answer, for any prior and utility in [0, 1] (Theorem C').

    `floor` is the expected utility of the best answer that is the same for everyone.

    Examples
    --------
    >>> round(utility_ceiling(2.0, 0.0, 0.2), 3)
    0.649
    """
    _check_guarantee(epsilon, delta)
    if not 0 <= floor <= 1:
        raise ValueError("floor must be a utility from 0 to 1")
    # Divide numerator and denominator by e^epsilon, which may be infinite.
    shrink = math.exp(-epsilon)
    denominator = floor + (1 - floor) * shrink
    if denominator == 0:
        return 0.0 if delta == 0 else 1.0
    return min(1.0, (floor + delta * shrink) / denominator)


def reference_line(epsilon: float, candidates: float) -> float:
    """Return Theorem D's ceiling for equally popular items, ``f e^eps / (f e^eps + 1 - f)``; hubs may exceed it."""
    return utility_ceiling(epsilon, 0.0, check_fraction(candidates))


def popular_floor(candidates: float, popularity: ArrayLike) -> float:
    """Return the recall of the floor(f N) most popular items, an answer that needs no message.

    `popularity`, shape (N,), is how often each item is a true neighbour: counts or shares.

    Examples
    --------
    >>> popular_floor(0.5, [5, 1, 3, 1])
    0.8
    """
    shares = check_popularity(popularity)
    return min(1.0, float(np.sort(shares)[::-1][: candidate_count(candidates, len(shares))].sum()))


def neighbor_ceiling(epsilon: float, candidates: float, popularity: ArrayLike, delta: float = 0.0) -> float:
    """Return the largest NN-recall of a private message with an answer of floor(f N) candidates (Theorem D).

    Exact for pure epsilon: D is a linear programme, and its dual has one variable. A delta above 0 adds (N - 1) delta
    (Theorem D'), or Theorem C' for the popular floor applies if that is lower. `popularity` as of
    :func:`popular_floor`.

    Examples
    --------
    >>> round(neighbor_ceiling(1.0, 0.2, np.ones(100)), 6) == round(reference_line(1.0, 0.2), 6)
    True
    >>> round(neighbor_ceiling(1.0, 0.2, np.arange(100)), 4)
    0.4867
    """
    _check_guarantee(epsilon, delta)
    pure = best_channel(epsilon, candidates, popularity).ceiling
    raised = pure + (np.size(popularity) - 1) * delta
    return min(raised, utility_ceiling(epsilon, delta, popular_floor(candidates, popularity))) if delta else pure


@dataclass(frozen=True)
class BestChannel:
    """The optimum of Theorem D: no message exceeds `ceiling`, the value of the dual programme."""

    # The ceiling is the mean, weighted by popularity, of the chance of each item to be returned for a query near to it.

    ceiling: float
    chances: Floats


def best_channel(epsilon: float, candidates: float, popularity: ArrayLike) -> BestChannel:
    """Solve Theorem D's linear programme and its dual."""
    _check_guarantee(epsilon, 0.0)
    shares = check_popularity(popularity)
    count = candidate_count(candidates, len(shares))
    if epsilon > _HUGE or count == len(shares):
        return BestChannel(1.0, np.ones(len(shares)))
    falling = np.sort(shares)[::-1]
    sums = np.concatenate([[0.0], np.cumsum(falling)])

    def bound(price: float) -> float:
        above = int(np.searchsorted(-falling, -price))
        return float(sums[above] + (count - above) * price)

    ratio = math.exp(epsilon)
    last = float(falling[count - 1])
    # At `last` the left end of the bracket is higher, at `ratio * last` the right end.
    price = last if last == 0 or ratio == 1 else _find_price(bound, last, ratio)
    ceiling = max(bound(price), bound(price / ratio))  # weak duality: valid at any price
    return BestChannel(min(1.0, ceiling), _find_chances(shares, count, price, ratio))


def _find_price(bound: Callable[[float], float], last: float, ratio: float) -> float:
    """Return the price that makes both ends of the dual equal."""

    def difference(price: float) -> float:
        return bound(price) - bound(price / ratio)

    if difference(last) >= 0:
        return last
    if difference(ratio * last) <= 0:
        return ratio * last
    return float(optimize.brentq(difference, last, ratio * last, xtol=last * 1e-15, rtol=1e-15))


def _find_chances(shares: Floats, count: int, price: float, ratio: float) -> Floats:
    """Return a primal optimum: 1 for popular items, one probability for the middle, 0 for the rest."""
    sure = shares > price
    middle = (shares > price / ratio) & ~sure
    rest = count - int(sure.sum())
    if ratio == 1 or not rest < middle.sum():
        # No message, or no ties: the most popular items, by position among equals.
        first: Floats = np.zeros(len(shares))
        first[np.argsort(-shares, kind="stable")[:count]] = 1.0
        return first
    size = float(middle.sum())
    mass = size / (size + (ratio - 1) * rest)  # Theorem D's m, which uses up the budget
    chances: Floats = np.where(sure, 1.0, np.where(middle, (1 - mass) * ratio / (ratio - 1), 0.0))
    return chances


def answer_ceiling(epsilon: float, recalls: ArrayLike, *, gap: float = 1e-4) -> float:
    """Return the largest expected recall of a private message, given a list of all possible answers (Theorem E).

    `recalls`, shape (n_answers, n_queries), are from 0 to 1, and queries are equally likely. For small cases: cutting
    planes raise the dual programme from below. No message exceeds the result, and one comes within `gap` of it.

    Examples
    --------
    >>> round(answer_ceiling(1.0, np.eye(4)), 4) == round(class_ceiling(1.0, 4, 1), 4)
    True
    """
    _check_guarantee(epsilon, 0.0)
    values = np.asarray(recalls, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape or not ((values >= 0) & (values <= 1)).all():
        raise ValueError("recalls must be a table of numbers from 0 to 1")
    n, favour = values.shape[1], math.expm1(min(epsilon, _HUGE))
    levels: Floats = values.max(axis=0)
    cuts: list[Floats] = []
    rights: list[float] = []
    best = float(levels.mean())
    while True:
        above = values - levels
        utility = values.mean(axis=1) + favour * np.maximum(above, 0).mean(axis=1)
        best = min(best, max(float(levels.mean()), float(utility.max())))
        for answer in np.argsort(-utility)[:n]:  # the n answers that violate the condition most
            better = above[answer] > 0
            cuts.append(-(1 + favour * better) / n)
            rights.append(-float(values[answer].mean() + favour * values[answer, better].sum() / n))
        solution = optimize.linprog(np.full(n, 1 / n), A_ub=np.array(cuts), b_ub=rights, bounds=(0, 1))
        if best - solution.fun <= gap:
            return best
        levels = solution.x


def check_popularity(popularity: ArrayLike) -> Floats:
    """Check popularity and return shares that sum to one."""
    values = np.asarray(popularity, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError("popularity must hold one number for each item of the gallery")
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("popularity must be finite and not negative")
    total = values.sum()
    if not (0 < total < math.inf):
        raise ValueError("popularity must have a positive, finite sum")
    shares: Floats = values / total
    return shares


def _check_guarantee(epsilon: float, delta: float) -> None:
    check_range(epsilon, "epsilon", 0, math.inf)
    check_range(delta, "delta", 0, 1)
