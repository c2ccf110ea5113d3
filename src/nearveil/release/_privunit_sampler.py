"""PrivUnit's sampler: integers and their tables, and one step in floating point whose error is bounded.

Nothing is rejected and nothing branches: whether the height lies in the cap is a property of one look-up
in one table, and each row takes the same operations and the same number of random words (but for ties in
a table, of probability 2^-48 a draw).
"""

from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nearveil.privacy.noise import Source
from nearveil.privacy.noise._samplers import Table, alias_table, gaussian_integers, look_up
from nearveil.release._privunit_channel import (
    BLUR_STEPS,
    CELL_BITS,
    FINE_BITS,
    LARGEST_CELL,
    REACH,
    STEPS,
    Channel,
    Floats,
)

Integers = NDArray[np.int64]

_DIRECTION_BITS = 26  # of a coordinate of x: squares of such integers sum up exactly in doubles
_WEIGHT_BITS = 384
_ODDS_BITS = 128
_DECIMAL = Context(prec=120)  # exp() is correctly rounded by the standard; 120 digits are 398 bits
_CHUNK = 1 << 17  # coordinates at a time


def draw(channel: Channel, rows: Floats, source: Source) -> NDArray[np.int8]:
    """Draw the cells of a message for each row.

    `rows`: Finite. Their norms play no part; a row of zeros counts as the first axis.
    Returns: In cells of 1/8.
    """
    if rows.shape[1] != channel.dimension:
        raise ValueError(f"rows must have {channel.dimension} columns, as the channel has")
    step = max(1, _CHUNK // channel.dimension)
    chunks = [in_cells(fine_vectors(channel, rows[i : i + step], source)) for i in range(0, len(rows), step)]
    return np.concatenate(chunks)


def fine_vectors(channel: Channel, rows: Floats, source: Source) -> Integers:
    """Draw the vectors that messages are made of, on the grid of 2^-36.

    Returns: In grid steps. Low bits are uniform, whatever the rows are.
    """
    heights = look_up(lattice_table(channel.tilt, channel.threshold), source.words(len(rows)), source) - REACH
    plain = look_up(lattice_table(0.0, 0), source.words(rows.size), source).reshape(rows.shape) - REACH
    blur = gaussian_integers(Fraction(BLUR_STEPS << FINE_BITS), rows.size, source).reshape(rows.shape)
    return turned(heights, plain, directions(rows)) + blur


def in_cells(found: Integers) -> NDArray[np.int8]:
    """Round vectors on the grid to the nearest cell, in integers, and cut off at the last."""
    cells = (found + (1 << (CELL_BITS - 1))) >> CELL_BITS
    return np.asarray(np.clip(cells, -LARGEST_CELL, LARGEST_CELL), dtype=np.int8)


def directions(rows: Floats) -> Floats:
    """Return each row's direction as a vector of integers of length about 2^26.

    The x of the proofs is this vector divided by its own length: of norm one, whatever came in.

    Returns: Integers, none of the rows zero.
    """
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scaled = np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0)
    scaled[:, 0] = np.where(largest[:, 0] > 0, scaled[:, 0], 1.0)
    norms = np.sqrt(np.einsum("ij,ij->i", scaled, scaled))[:, None]
    return np.asarray(np.rint(scaled / norms * 2.0**_DIRECTION_BITS))


def turned(heights: Integers, plain: Integers, axes: Floats) -> Integers:
    """Return ``a x + (h - <h, x> x)`` on the fine grid, x being an axis divided by its length.

    Within ``0.51 sqrt(d)`` grid steps of the true vector (Theorem 3 of docs/theory/privunit.md; attacked by
    `test_computed_vectors_lie_within_the_bound`).

    `heights`: a, in lattice steps.
    `plain`: h, in lattice steps.
    `axes`: From `directions`.
    """
    # Both sums are exact: they add up integers below 2^53, in whatever order.
    squares = np.einsum("ij,ij->i", axes, axes)
    products = np.einsum("ij,ij->i", axes, plain.astype(np.float64))
    along = heights / np.sqrt(squares) - products / squares
    moved = np.rint((along * 2.0**FINE_BITS)[:, None] * axes).astype(np.int64)
    return np.asarray((plain << FINE_BITS) + moved)


@lru_cache(maxsize=16)
def lattice_table(tilt: float, threshold: int) -> Table:
    """Return the table of k + `REACH`: k is Gaussian of scale `STEPS`, and likelier by a tilt from `threshold` on.

    `tilt`: The logarithm of how much likelier. What the table has is a fraction over 2^128, rounded down.
    Returns: Within 2^-240 of that distribution (Lemma 2 of docs/theory/privunit.md; attacked by
    `test_tables_are_what_the_proof_says`).
    """
    half, even = _half_weights(), 1 << _ODDS_BITS
    odds = int(_DECIMAL.multiply(_DECIMAL.exp(Decimal(tilt)), Decimal(even)))
    return alias_table([half[abs(k)] * (odds if k >= threshold else even) for k in range(-REACH, REACH + 1)])


@lru_cache(maxsize=1)
def _half_weights() -> tuple[int, ...]:
    """Return exp(-a^2 / 2) for a of 0 to `REACH` steps, in units of 2^-384, at most two units off."""
    unit, scale = Decimal(1 << _WEIGHT_BITS), Decimal(2 * STEPS**2)
    return tuple(
        int(_DECIMAL.multiply(_DECIMAL.exp(_DECIMAL.divide(Decimal(-k * k), scale)), unit)) for k in range(REACH + 1)
    )
