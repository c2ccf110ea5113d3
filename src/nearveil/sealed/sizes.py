"""The shape of a sealed index and its sizes in bytes. Planners use it without the cryptography package."""

import math
from dataclasses import dataclass

from nearveil.privacy.checks import check_count
from nearveil.sealed.accuracy import bound_fetch_failure
from nearveil.sealed.parameters import (
    ANSWER_BITS,
    ENTRY_BITS,
    LWE,
    PUBLIC_BITS,
    RING,
    SCORE_BITS,
    SECRET_BITS,
    TOKEN_BITS,
)

TILE = 8  # dimensions and slots are multiples of it: processors multiply this many numbers at a time
LARGEST_FAILURE = 2.0**-40  # probability that an entry of a record is read wrongly
CANDIDATES = 5 / 2  # best matches that are considered for each bucket
_SLOTS_PER_ITEM = 1.035  # the spare slots balance the cells and take later items
_PROBED = 38_500, 24  # items that a question probes, at least, and over the root of the items: rows of a token
_ALL = 1.5  # times these: galleries of which all slots are probed
# For galleries up to a size: dimensions of a code; cells times dimensions over the root of the items, which determines
# the size of a question; the side of the grid of records; and the price of a row of the grid, in bytes of questions:
# for its answer, its token and the server's memory.
_SHAPES = ((2_500_000, 256, 218, 20, 14.0), (8_000_000, 128, 180, 24, 12.0), (math.inf, 64, 146, 24, 12.0))
_LEAST = 64  # dimensions of a code that cells are chosen for
_WHOLE = 512  # features of which codes keep all, in galleries of which all slots are probed
MOST_COLUMNS = 1 << 16  # of a matrix: sums of products stay below 2^31
_SMALL_ROWS, _LEAST_SIDE = 1 << 15, 12  # of a grid for wide records in galleries of which all slots are probed
_STORED = 64  # columns of a block in memory are a multiple of it: processors multiply this many at a time
_SHARED = (1 << 16, 2), (1 << 18, 4)  # numbers of a question, and secrets that share matrices: encryption is faster


@dataclass(frozen=True)
class Stage:
    """Shape of the questions of a stage: groups (colours or buckets) of rows, and the columns of each group."""

    n_groups: int
    n_rows: int
    n_columns: int
    n_secrets: int
    question_bits: int

    @property
    def n_samples(self) -> int:
        """Numbers that are encrypted under one secret."""
        return -(-self.n_groups // self.n_secrets) * self.n_columns

    @property
    def question_bytes(self) -> int:
        """Bytes of a packed question."""
        count = self.n_groups * self.n_columns
        return 2 * count + -(-count * (self.question_bits - 16) // 8)

    @property
    def answer_bytes(self) -> int:
        """Bytes of the numbers of an answer."""
        return ANSWER_BITS // 8 * self.n_groups * self.n_rows

    @property
    def secret_rows(self) -> tuple[int, ...]:
        """Rows of the groups of each secret."""
        return tuple(len(range(k, self.n_groups, self.n_secrets)) * self.n_rows for k in range(self.n_secrets))


@dataclass(frozen=True)
class RecordLayout:
    """Shape of the grid of records: `side` times `side` blocks of columns, each of `per_column` records."""

    width: int  # bytes of a record, with its end mark
    side: int
    per_column: int
    n_columns: int  # of a block
    n_secrets: int

    @property
    def n_blocks(self) -> int:
        """Blocks of the grid."""
        return self.side**2

    @property
    def n_buckets(self) -> int:
        """Rows and columns of the grid: a question asks each for one column."""
        return 2 * self.side

    @property
    def n_candidates(self) -> int:
        """Best matches that are considered for a question."""
        return math.ceil(CANDIDATES * self.n_buckets)

    @property
    def n_entries(self) -> int:
        """Entries of a record."""
        return -(-8 * self.width // ENTRY_BITS)

    @property
    def n_rows(self) -> int:
        """Entries of a column."""
        return self.per_column * self.n_entries

    @property
    def block_size(self) -> int:
        """Records of a block."""
        return self.per_column * self.n_columns

    @property
    def stored_columns(self) -> int:
        """Columns of a block in memory."""
        return -(-self.n_columns // _STORED) * _STORED

    @property
    def stage(self) -> Stage:
        """The shape of a question."""
        n_columns = self.side * self.n_columns
        norm = bound_row_norm(n_columns)
        bits = next((b for b in range(17, 24) if bound_fetch_failure(norm, b) <= LARGEST_FAILURE), 24)
        return Stage(self.n_buckets, self.n_rows, n_columns, self.n_secrets, bits)


def bound_row_norm(n_columns: int) -> float:
    """Return a bound on the norm of a row of whitened entries, which holds but for seven deviations."""
    levels = range(-(1 << (ENTRY_BITS - 1)), 1 << (ENTRY_BITS - 1))
    mean = sum(level**2 for level in levels) / len(levels)
    deviation = math.sqrt(sum((level**2 - mean) ** 2 for level in levels) / len(levels))
    most = levels[0] ** 2 * n_columns
    return math.sqrt(min(most, mean * n_columns + 7 * deviation * math.sqrt(n_columns)))


def choose_dimension(n_items: int, n_features: int) -> int:
    """Return the dimensions of a code for a gallery: more distinguish near items better, and allow fewer cells."""
    if n_items <= _ALL * _PROBED[0] and n_features <= _WHOLE:
        return n_features
    return min(_find_shape(n_items)[0], n_features)


def choose_side(n_items: int, width: int) -> int:
    """Return the side of the grid of records: more of them are fetched if more items have nearly the same score."""
    # Wide records of small galleries would need more memory than all else of a server.
    most = _SMALL_ROWS // (2 * -(-8 * width // ENTRY_BITS)) if n_items <= _ALL * _PROBED[0] else MOST_COLUMNS
    return min(_find_shape(n_items)[2], max(_LEAST_SIDE, most))


def _find_shape(n_items: int) -> tuple[int, int, int, float]:
    return next(shape for most, *shape in _SHAPES if n_items <= most)  # type: ignore[return-value]


def choose_shape(
    n_items: int, dimension: int, n_cells: int | None = None, n_colours: int | None = None
) -> tuple[int, int]:
    """Return the numbers of cells, a multiple of the colours, and of colours; arguments that are not None are used."""
    least, growth = _PROBED
    probed, wide = max(least, growth * math.sqrt(n_items)), max(dimension, _LEAST)
    if n_cells is not None:
        cells = check_count(n_cells, "n_cells", 1)
    elif n_items <= _ALL * probed and n_colours is None:
        cells = 1  # all items are probed
    else:
        cells = max(1, round(_find_shape(n_items)[1] * math.sqrt(n_items) / wide))
    if n_colours is None:
        n_colours = max(1, round(probed * cells / n_items), -(-cells // (MOST_COLUMNS // wide)))
    n_colours = min(check_count(n_colours, "n_colours", 1), cells)
    return -(-cells // n_colours) * n_colours, n_colours


def count_slots(n_items: int, n_cells: int) -> int:
    """Return the slots of every cell, a few more than items fill on average."""
    return -(-math.ceil(_SLOTS_PER_ITEM * n_items / n_cells + 1) // TILE) * TILE


def count_secrets(n_groups: int, n_columns: int) -> int:
    """Return the secrets of a stage: one if its questions are short, else some that share matrices."""
    shared = max((secrets for numbers, secrets in _SHARED if n_groups * n_columns >= numbers), default=1)
    return max(min(shared, n_groups), -(-n_groups // max(1, LWE.most_samples // n_columns)))


def shape_records(n_positions: int, width: int, side: int) -> RecordLayout:
    """Return the grid of records for as many positions: columns and rows so that questions are cheapest."""
    block = -(-n_positions // side**2)
    entries = -(-8 * width // ENTRY_BITS)
    cheapest = int(math.sqrt(2.5 * side * block / (_find_shape(n_positions)[3] * entries)))
    per_column = min(block, max(1, cheapest, -(-block // (MOST_COLUMNS // side))))
    n_columns = -(-block // per_column)
    return RecordLayout(width, side, per_column, n_columns, count_secrets(2 * side, side * n_columns))


def count_blocks(stage: Stage) -> int:
    """Return the blocks of a token: ring elements that carry the masks of a stage."""
    return sum(-(-rows // RING.degree) for rows in stage.secret_rows)


@dataclass(frozen=True)
class SealedSizes:
    """Bytes of sealed search for a gallery: of a client, a question, its answer, a token, and a pass."""

    kept: int  #: projection, centroids and counts of cells, and public parts of tokens
    question: int
    answer: int
    token_request: int
    token: int
    passed: int


def estimate_sizes(n_items: int, record_bytes: int, n_features: int = 1280) -> SealedSizes:
    """Return the sizes of sealed search for a gallery of `n_items`, with records of `record_bytes`."""
    dimension = -(-choose_dimension(n_items, n_features) // TILE) * TILE
    n_cells, n_colours = choose_shape(n_items, dimension)
    slots, columns = count_slots(n_items, n_cells), n_cells // n_colours * dimension
    records = shape_records(n_cells * slots, record_bytes + 1, choose_side(n_items, record_bytes + 1))
    stages = Stage(n_colours, slots, columns, count_secrets(n_colours, columns), SCORE_BITS), records.stage
    blocks = sum(map(count_blocks, stages))
    keys = 2 * len(RING.primes) * RING.modulus.bit_length()
    return SealedSizes(
        kept=4 * dimension * (n_features + n_cells) + 2 * n_cells + blocks * RING.degree * PUBLIC_BITS // 8,
        question=sum(stage.question_bytes for stage in stages),
        answer=sum(stage.answer_bytes for stage in stages),
        token_request=sum(keys + SECRET_BITS * stage.n_secrets for stage in stages) * RING.degree // 8,
        token=blocks * RING.degree * TOKEN_BITS // 8,
        passed=n_cells * slots * dimension + records.n_blocks * records.n_rows * records.stored_columns,
    )
