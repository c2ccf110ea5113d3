"""How large a sealed gallery is: its shape and its bytes. Planners use it, and need no cryptography for it."""

import math
from dataclasses import dataclass

from nearveil.privacy.checks import check_count
from nearveil.sealed.parameters import FETCH, SCORES, LweParameters

HINT_BYTES = {"scores": 2, "records": 3}  # of an entry of a hint
ANSWER_BYTES = 2  # of a number
TILE = 8  # dimensions and slots are multiples of it: what processors multiply at a time
N_FETCHED = 32
_ROOM = 1.035  # slots for each item: what balance and later items need
_PROBED = 13_900  # slots that a question looks into: their number makes the hint
_CELLS = 218  # cells times numbers of a code, for the square root of the items: their product makes the question
_COLOURS = 3072  # colours times numbers of a code, at most
_DIMENSIONS = ((2_500_000, 256), (8_000_000, 128))  # up to so many items, so many numbers a code
_LEAST = 64  # numbers of a code where cells are as many as they may be


def choose_dimension(n_items: int) -> int:
    """Return the numbers of a code for a gallery: more tell near items apart, and leave fewer colours.

    Examples
    --------
    >>> choose_dimension(1_000_000), choose_dimension(100_000_000)
    (256, 64)
    """
    return next((width for most, width in _DIMENSIONS if n_items <= most), _LEAST)


def choose_shape(
    n_items: int, dimension: int, n_cells: int | None = None, n_colours: int | None = None
) -> tuple[int, int]:
    """Return numbers of cells and colours for a gallery; those that are given are kept, cells as a multiple of colours.

    Examples
    --------
    >>> choose_shape(1_000_000, 64), choose_shape(1_000_000, 256), choose_shape(1_000, 64, n_colours=4)
    ((3431, 47), (852, 12), (108, 4))
    """
    wide = max(dimension, _LEAST)
    cells = max(1, round(_CELLS * math.sqrt(n_items) / wide)) if n_cells is None else check_count(n_cells, "n_cells", 1)
    if n_colours is None:
        n_colours = max(1, min(round(_PROBED * cells / n_items), _COLOURS // wide))
        # Numbers that are encrypted under one secret may not be more than the estimates hold for.
        n_colours = max(n_colours, -(-cells // (SCORES.most_samples // wide)))
    n_colours = min(check_count(n_colours, "n_colours", 1), cells)
    return -(-cells // n_colours) * n_colours, n_colours


def count_slots(n_items: int, n_cells: int) -> int:
    """Return the slots of every cell: the same number, a few more than items fill on average."""
    return -(-math.ceil(_ROOM * n_items / n_cells + 1) // TILE) * TILE


def shape_records(n_positions: int, width: int) -> tuple[int, int]:
    """Return records of a column, and columns: as many columns as rows, about."""
    per_column = max(1, round(math.sqrt(n_positions / width)))
    return per_column, -(-n_positions // per_column)


def count_question_bytes(parameters: LweParameters, count: int) -> int:
    """Return the bytes that so many numbers of a question take; a few of them fill whole bytes."""
    few = 8 // math.gcd(parameters.question_bits, 8)
    return -(-count // few) * few * parameters.question_bits // 8


@dataclass(frozen=True)
class SealedSizes:
    """Bytes of sealed search for a gallery: what a client keeps, what a question sends and gets, what a pass reads."""

    hint: int
    question: int
    answer: int
    passed: int


def estimate_sizes(n_items: int, record_bytes: int, n_features: int = 1280) -> SealedSizes:
    """Return what sealed search takes for a gallery of so many items, with records of so many bytes.

    Examples
    --------
    >>> sizes = estimate_sizes(1_000_000, 140)
    >>> round(sizes.hint / 1e6), round(sizes.question / 1e6, 1), round(sizes.passed / 1e6)
    (76, 1.8, 411)
    """
    dimension = -(-min(choose_dimension(n_items), n_features) // TILE) * TILE
    n_cells, n_colours = choose_shape(n_items, dimension)
    slots, width = count_slots(n_items, n_cells), record_bytes + 1
    per_column, n_columns = shape_records(n_cells * slots, width)
    rows = n_colours * slots, per_column * width
    hint = HINT_BYTES["scores"] * rows[0] * SCORES.dimension + HINT_BYTES["records"] * rows[1] * FETCH.dimension
    question = count_question_bytes(SCORES, n_cells * dimension) + count_question_bytes(FETCH, N_FETCHED * n_columns)
    answer = ANSWER_BYTES * (rows[0] + N_FETCHED * rows[1])
    return SealedSizes(hint, question, answer, n_cells * slots * (dimension + width))
