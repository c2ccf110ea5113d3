"""How large a sealed gallery is: its shape and its bytes. Planners use it, and need no cryptography for it."""

import math
from dataclasses import dataclass

from nearveil.privacy.checks import check_count
from nearveil.sealed.parameters import FETCH, SCORES

HINT_BYTES = {"scores": 2, "records": 3}  # of an entry of a hint
QUESTION_BYTES, ANSWER_BYTES = 3, 2  # of a number
TILE = 8  # dimensions and slots are multiples of it: what processors multiply at a time
DIMENSIONS = 64
N_FETCHED = 16
_ROOM = 1.06  # slots for each item: what balance and later items need
_PROBED = 14_000  # slots that a question looks into: their number makes the hint


def choose_shape(n_items: int, n_cells: int | None = None, n_colours: int | None = None) -> tuple[int, int]:
    """Return numbers of cells and colours for a gallery; those that are given are kept, cells as a multiple of colours.

    Examples
    --------
    >>> choose_shape(1_000_000), choose_shape(1_000, n_colours=4)
    ((3034, 41), (96, 4))
    """
    cells = max(1, round(3 * math.sqrt(n_items))) if n_cells is None else check_count(n_cells, "n_cells", 1)
    if n_colours is None:
        n_colours = max(1, min(cells, round(_PROBED * cells / n_items), 41))
    n_colours = min(check_count(n_colours, "n_colours", 1), cells)
    return -(-cells // n_colours) * n_colours, n_colours


def count_slots(n_items: int, n_cells: int) -> int:
    """Return the slots of every cell: the same number, a few more than items fill on average."""
    return -(-math.ceil(_ROOM * n_items / n_cells + 1) // TILE) * TILE


def shape_records(n_positions: int, width: int) -> tuple[int, int]:
    """Return records of a column, and columns: twice as many columns as rows, about."""
    per_column = max(1, round(math.sqrt(n_positions / (2 * width))))
    return per_column, -(-n_positions // per_column)


@dataclass(frozen=True)
class SealedSizes:
    """Bytes of sealed search for a gallery: what a client keeps, what a question sends and gets, what a pass reads."""

    hint: int
    question: int
    answer: int
    passed: int


def estimate_sizes(n_items: int, record_bytes: int) -> SealedSizes:
    """Return what sealed search takes for a gallery of so many items, with records of so many bytes.

    Examples
    --------
    >>> sizes = estimate_sizes(1_000_000, 140)
    >>> round(sizes.hint / 1e6), round(sizes.question / 1e6, 1), round(sizes.passed / 1e6)
    (63, 1.4, 219)
    """
    n_cells, n_colours = choose_shape(n_items)
    slots, width = count_slots(n_items, n_cells), record_bytes + 1
    per_column, n_columns = shape_records(n_cells * slots, width)
    rows = n_colours * slots, per_column * width
    hint = HINT_BYTES["scores"] * rows[0] * SCORES.dimension + HINT_BYTES["records"] * rows[1] * FETCH.dimension
    question = QUESTION_BYTES * (n_cells * DIMENSIONS + N_FETCHED * n_columns)
    answer = ANSWER_BYTES * (rows[0] + N_FETCHED * rows[1])
    return SealedSizes(hint, question, answer, n_cells * slots * (DIMENSIONS + width))
