"""The shape of a sealed index and its sizes in bytes. Planners use it without the cryptography package."""

import math
from dataclasses import dataclass

from nearveil.privacy.checks import check_count
from nearveil.sealed.parameters import FETCH, SCORES, LweParameters

HINT_BYTES = {"scores": 2, "records": 3}  # of an entry of a hint
ANSWER_BYTES = 2  # of a number
TILE = 8  # dimensions and slots are multiples of it: processors multiply this many numbers at a time
N_FETCHED = 32
_SLOTS_PER_ITEM = 1.035  # the spare slots balance the cells and take later items
_PROBED = 13_900  # slots that a question probes; they determine the size of the hint
_CELLS = 218  # cells times dimensions of a code, over the root of the items; it determines the size of a question
_COLOURS = 3072  # largest product of colours and dimensions of a code
_DIMENSIONS = ((2_500_000, 256), (8_000_000, 128))  # (items at most, dimensions of a code)
_LEAST = 64  # dimensions of a code in larger galleries


def choose_dimension(n_items: int) -> int:
    """Return the dimensions of a code for a gallery: more distinguish near items better, and allow fewer colours."""
    return next((width for most, width in _DIMENSIONS if n_items <= most), _LEAST)


def choose_shape(
    n_items: int, dimension: int, n_cells: int | None = None, n_colours: int | None = None
) -> tuple[int, int]:
    """Return the numbers of cells, a multiple of the colours, and of colours; arguments that are not None are used."""
    wide = max(dimension, _LEAST)
    cells = max(1, round(_CELLS * math.sqrt(n_items) / wide)) if n_cells is None else check_count(n_cells, "n_cells", 1)
    if n_colours is None:
        n_colours = max(1, min(round(_PROBED * cells / n_items), _COLOURS // wide))
        # The security estimates limit how many numbers are encrypted under one secret.
        n_colours = max(n_colours, -(-cells // (SCORES.most_samples // wide)))
    n_colours = min(check_count(n_colours, "n_colours", 1), cells)
    return -(-cells // n_colours) * n_colours, n_colours


def count_slots(n_items: int, n_cells: int) -> int:
    """Return the slots of every cell, a few more than items fill on average."""
    return -(-math.ceil(_SLOTS_PER_ITEM * n_items / n_cells + 1) // TILE) * TILE


def shape_records(n_positions: int, width: int) -> tuple[int, int]:
    """Return the records in a column, and the number of columns: about as many columns as rows."""
    per_column = max(1, round(math.sqrt(n_positions / width)))
    return per_column, -(-n_positions // per_column)


def count_question_bytes(parameters: LweParameters, count: int) -> int:
    """Return the bytes of `count` packed numbers of a question, padded to a group that fills whole bytes."""
    group = 8 // math.gcd(parameters.question_bits, 8)
    return -(-count // group) * group * parameters.question_bits // 8


@dataclass(frozen=True)
class SealedSizes:
    """Bytes of sealed search for a gallery: of a client, a question, its answer, and a pass over the codes."""

    kept: int  #: hints, projection, centroids and counts of cells
    question: int
    answer: int
    passed: int


def estimate_sizes(n_items: int, record_bytes: int, n_features: int = 1280) -> SealedSizes:
    """Return the sizes of sealed search for a gallery of `n_items`, with records of `record_bytes`."""
    dimension = -(-min(choose_dimension(n_items), n_features) // TILE) * TILE
    n_cells, n_colours = choose_shape(n_items, dimension)
    slots, width = count_slots(n_items, n_cells), record_bytes + 1
    per_column, n_columns = shape_records(n_cells * slots, width)
    rows = n_colours * slots, per_column * width
    hint = HINT_BYTES["scores"] * rows[0] * SCORES.dimension + HINT_BYTES["records"] * rows[1] * FETCH.dimension
    question = count_question_bytes(SCORES, n_cells * dimension) + count_question_bytes(FETCH, N_FETCHED * n_columns)
    answer = ANSWER_BYTES * (rows[0] + N_FETCHED * rows[1])
    kept = hint + 4 * dimension * (n_features + n_cells) + 2 * n_cells
    return SealedSizes(kept, question, answer, n_cells * slots * (dimension + width))
