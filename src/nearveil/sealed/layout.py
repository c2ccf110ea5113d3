"""The public layout of a sealed index, and the encoding of rows and records that both sides share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.errors import NearveilError
from nearveil.sealed.lwe import SEED_BYTES, Bytes
from nearveil.sealed.parameters import FETCH, SCORES, LweParameters
from nearveil.sealed.sizes import ANSWER_BYTES, HINT_BYTES, count_question_bytes
from nearveil.wire.frames import Kind, Reader, WireError, frame, open_frame, write_fields

Singles = NDArray[np.float32]

MOST_FETCHED = 256
_MOST = 1 << 31  # of any count
_MOST_DIMENSIONS = 1 << 12
_MOST_FEATURES = 1 << 16


class SealedError(NearveilError, ValueError):
    """A sealed index or question is invalid; the message names the field and the remedy."""


@dataclass(frozen=True)
class RecordLayout:
    """Shape of the matrix of records: `per_column` of `width` bytes in a column. A question fetches `n_fetched`."""

    width: int
    per_column: int
    n_columns: int
    n_fetched: int

    @property
    def n_rows(self) -> int:
        """Bytes of a column."""
        return self.width * self.per_column


@dataclass(frozen=True, eq=False)
class Layout:
    """The public parameters of a sealed index, without its hints."""

    version: int  # changes with the content
    seed: bytes
    n_colours: int
    n_slots: int
    reach: int  # bounds the Euclidean norm of a code, in quantisation steps
    projection: Singles  # maps a row to a code, shape (n_features, dimension)
    centroids: Singles  # shape (n_cells, dimension)
    counts: NDArray[np.uint16]
    records: RecordLayout | None = None

    @property
    def dimension(self) -> int:
        """Numbers of a code."""
        return int(self.projection.shape[1])

    @property
    def cells_per_colour(self) -> int:
        """Cells that share a colour."""
        return len(self.centroids) // self.n_colours

    @property
    def n_samples(self) -> int:
        """Numbers that are encrypted under one secret: columns of a colour's matrix."""
        return self.cells_per_colour * self.dimension

    @property
    def question_bytes(self) -> int:
        """Bytes of a question for scores, without its header."""
        return count_question_bytes(SCORES, self.n_colours * self.n_samples)

    def to_bytes(self) -> bytes:
        """Return the layout as a frame."""
        records = self.records or RecordLayout(0, 0, 0, 0)
        body = write_fields(
            self.version,
            *self.projection.shape,
            len(self.centroids),
            self.n_colours,
            self.n_slots,
            self.reach,
            *(records.width, records.per_column, records.n_columns, records.n_fetched),
            self.seed,
            self.projection.astype("<f4").tobytes(),
            self.centroids.astype("<f4").tobytes(),
            self.counts.astype("<u2").tobytes(),
        )
        return frame(Kind.SEALED_PUBLIC, body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read an untrusted layout."""
        reader = Reader(open_frame(data, Kind.SEALED_PUBLIC))
        version, n_features, dimension, n_cells, n_colours, n_slots = (reader.read_int() for _ in range(6))
        reach, *record_numbers = (reader.read_int() for _ in range(5))
        if not (1 <= dimension <= _MOST_DIMENSIONS and 1 <= n_features <= _MOST_FEATURES):
            raise WireError("the sealed layout must be of 1 to 4096 dimensions and 1 to 65536 features")
        if not (1 <= n_colours <= n_cells < _MOST and n_cells % n_colours == 0 and 1 <= n_slots < 1 << 16):
            raise WireError("the sealed layout must have equally many cells of each colour, and 1 to 65535 slots each")
        if not 1 <= reach < 1 << 16 or n_cells // n_colours * dimension > SCORES.most_samples:
            raise WireError("the sealed layout has numbers that are out of range")
        _check_part(SCORES, "scores", n_cells * dimension, n_colours * n_slots, 1)
        seed = reader.read_bytes()
        projection = _read_floats(reader, n_features, dimension)
        centroids = _read_floats(reader, n_cells, dimension)
        counts = _read_array(reader, "<u2", n_cells).astype(np.uint16)
        reader.check_end()
        if len(seed) != SEED_BYTES or int(counts.max()) > n_slots:
            raise WireError("the sealed layout has a seed or counts that do not fit")
        records = RecordLayout(*record_numbers) if any(record_numbers) else None
        if records is not None:
            _check_records(records, n_cells * n_slots)
            n_sent = records.n_fetched * records.n_columns
            _check_part(FETCH, "records", n_sent, records.n_rows, records.n_fetched)
        return cls(version, seed, n_colours, n_slots, reach, projection, centroids, counts, records)


def _check_part(parameters: LweParameters, part: str, n_sent: int, n_rows: int, n_answers: int) -> None:
    """Refuse a layout if a question, an answer or a hint would exceed its limit, before any allocation."""
    if (
        count_question_bytes(parameters, n_sent) > Kind.SEALED_QUESTION.limit
        or ANSWER_BYTES * n_rows * n_answers > Kind.SEALED_ANSWER.limit
        or HINT_BYTES[part] * n_rows * parameters.dimension > Kind.SEALED_HINT.limit
    ):
        raise WireError(f"the sealed layout has {part} too large for a question, an answer or a hint")


def _check_records(records: RecordLayout, n_positions: int) -> None:
    if not (
        1 <= records.n_rows < 1 << 20
        and 1 <= records.n_columns <= FETCH.most_samples
        and 1 <= records.n_fetched <= MOST_FETCHED
        and n_positions <= records.per_column * records.n_columns < _MOST
    ):
        raise WireError("the sealed layout has records that do not fit its cells")


def _read_array(reader: Reader, kind: str, count: int) -> NDArray[np.generic]:
    data = reader.read_bytes()
    if len(data) != count * np.dtype(kind).itemsize:
        raise WireError("the sealed layout has an array of the wrong size")
    return np.frombuffer(data, kind)


def _read_floats(reader: Reader, n_rows: int, n_columns: int) -> Singles:
    floats = _read_array(reader, "<f4", n_rows * n_columns).astype(np.float32).reshape(n_rows, n_columns)
    if not np.isfinite(floats).all():  # no arithmetic, which would warn of a signalling NaN
        raise WireError("the sealed layout has numbers that are not finite")
    return floats


def check_rows(rows: ArrayLike, n_features: int | None = None, *, normalize: bool = True) -> Singles:
    """Return finite rows, scaled to unit length if `normalize`; SealedError if they are invalid."""
    array = np.asarray(rows)
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "fiu":
        raise SealedError("rows must be numbers of shape (n_items, n_features), at least one of each")
    if n_features is not None and array.shape[1] != n_features:
        raise SealedError(f"rows must have {n_features} features, like those of the index; these have {array.shape[1]}")
    values = array.astype(np.float32)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    if not normalize and np.isfinite(lengths).all():
        return values
    if not (np.isfinite(lengths).all() and (lengths > 0).all()):
        raise SealedError("rows must be finite, and none of them zero")
    return np.asarray(values / lengths, dtype=np.float32)


def choose_cells(query: NDArray[np.float64], centroids: Singles, n_colours: int) -> NDArray[np.int64]:
    """Return the number, from 0 to n_cells / n_colours - 1, of the cell nearest to a query in each colour."""
    wide = centroids.astype(np.float64)  # squares of any number of 32 bits are finite
    scores = (wide @ query - np.einsum("ij,ij->i", wide, wide) / 2).reshape(n_colours, -1)
    return np.asarray(scores.argmax(axis=1), dtype=np.int64)


def pad_records(records: Sequence[bytes], width: int) -> Bytes:
    """Return records as rows, shape (n, width): bytes, an end mark, and zeros, which add no noise."""
    out = np.zeros((len(records), width), np.uint8)
    for row, record in zip(out, records, strict=True):
        if not isinstance(record, bytes) or len(record) >= width:
            raise SealedError(f"records must be bytes, each of fewer than {width} bytes")
        row[: len(record) + 1] = np.frombuffer(record + b"\1", np.uint8)
    return out.view(np.int8)


def unpad_record(stored: NDArray[np.int8]) -> bytes:
    """Return the record that :func:`pad_records` wrote; other input gives arbitrary bytes."""
    # All bytes are compared, in NumPy: stripping zeros takes longer for short records, and stops other threads.
    length = int(((stored != 0) * np.arange(1, len(stored) + 1)).max())
    return stored[: max(length - 1, 0)].tobytes()
