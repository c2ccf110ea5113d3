"""Worst cases for releases of a row: opposite directions, borders, and the pair that a pilot finds farthest apart."""

from collections.abc import Callable
from typing import Any

import numpy as np

from nearveil.audit._defaults import Floats
from nearveil.audit._experiment import Pair
from nearveil.privacy.noise import Source

_PILOT = 24  # messages of each row of the pool
_RANDOM = 24  # rows of the pool that are random, and as many opposite ones
_BISECTIONS = 16  # nearer than that, single precision decides by how many rows are looked at together
_MANY = 256  # messages by which a border is found

Density = Callable[[Any, Floats], Floats]


def opposite(mean: Floats, direction: Floats) -> Pair:
    """Return the two rows that lie in a direction from the public mean, and opposite to it."""
    unit = direction / np.linalg.norm(direction)
    return Pair("opposite unit vectors", mean + unit, mean - unit)


def pool(release: Any) -> Floats:
    """Return rows among which the worst pair is looked for: axes, random directions, all with their opposites.

    `release`: Fitted. Where it has a public matrix, the direction that the matrix stretches most is among the rows.
    """
    mean = release.mean_
    generator = np.random.default_rng(2)
    directions = [np.eye(len(mean))[:64], generator.standard_normal((_RANDOM, len(mean)))]
    # Few large coordinates, and all of one size: codes of bits differ most between such.
    directions.append(np.sign(generator.standard_normal((_RANDOM, len(mean)))))
    if hasattr(release, "matrix_"):
        directions.append(np.linalg.svd(release.matrix_, full_matrices=False)[0].T[:2])
    units = np.concatenate(directions)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    return np.asarray(mean + np.concatenate([units, -units]))


def farthest(release: Any, rows: Floats, source: Source) -> Pair:
    """Return the two rows that messages tell apart best: those whose log-likelihood ratio varies most.

    It varies over messages of all rows of the pool, so that each pair is judged by thousands of them.

    `release`: With `log_density`.
    """
    messages = release.release(np.repeat(rows, _PILOT, axis=0), rng=source)
    spread = np.cov(release.log_density(messages, rows), rowvar=False)
    apart = np.diag(spread)[:, None] + np.diag(spread)[None, :] - 2 * spread
    i, j = np.unravel_index(np.argmax(apart), apart.shape)
    return Pair("the rows that a pilot found farthest apart", rows[i], rows[j])


def border(release: Any, rows: Floats, source: Source) -> Pair | None:
    """Return two rows next to each other on either side of a border between cells, or None where there are no cells.

    `release`: With `log_density`.
    """
    messages = release.release(np.repeat(rows[:8], _MANY // 8, axis=0), rng=source)
    table = release.log_density(messages, rows)
    other = next((i for i in range(1, len(rows)) if np.abs(table[:, i] - table[:, 0]).max() > 0), None)
    if other is None:
        return None
    first, second = rows[0], rows[other]
    for _ in range(_BISECTIONS):
        middle = (first + second) / 2
        same = np.abs(release.log_density(messages, np.stack([first, middle])) @ np.array([1.0, -1.0])).max() == 0
        first, second = (middle, second) if same else (first, middle)
    left, right = release.log_density(messages, np.stack([first, second])).T
    # A density that is smooth hardly differs between two rows that are so near.
    return Pair("two sides of a border", first, second) if np.abs(left - right).max() > 1e-3 else None
