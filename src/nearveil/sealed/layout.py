"""The public layout of a sealed index, and the checks of rows and the choice of cells that both sides share."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.errors import NearveilError
from nearveil.sealed.lwe import SEED_BYTES
from nearveil.sealed.parameters import LWE, SCORE_BITS
from nearveil.sealed.sizes import MOST_COLUMNS, RecordLayout, Stage
from nearveil.wire.frames import Kind, Reader, WireError, frame, open_frame, write_fields

Singles = NDArray[np.float32]

MOST_SIDE = 128
MOST_SECRETS = 10  # a request then has at most 16 ring elements, as estimated
_MOST = 1 << 31  # of any count
_MOST_DIMENSIONS = 1 << 12
_MOST_FEATURES = 1 << 16
_MOST_RECORD_SHAPE = 1 << 20


class SealedError(NearveilError, ValueError):
    """A sealed index or question is invalid; the message names the field and the remedy."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The public parameters of a sealed index."""

    version: int  # changes with the content
    seed: bytes
    n_colours: int
    n_slots: int
    n_secrets: int  # of a question for scores
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
        """Columns of a colour's matrix."""
        return self.cells_per_colour * self.dimension

    @property
    def stages(self) -> dict[str, "Stage"]:
        """The shapes of questions."""
        scores = Stage(self.n_colours, self.n_slots, self.n_samples, self.n_secrets, SCORE_BITS)
        return _list_stages(scores, self.records)

    def to_bytes(self) -> bytes:
        """Return the layout as a frame."""
        records = self.records or RecordLayout(0, 0, 0, 0, 0)
        body = write_fields(
            self.version,
            *self.projection.shape,
            len(self.centroids),
            self.n_colours,
            self.n_slots,
            self.n_secrets,
            self.reach,
            *astuple(records),
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
        version, n_features, dimension, n_cells, n_colours, n_slots, n_secrets = (reader.read_int() for _ in range(7))
        reach, *record_numbers = (reader.read_int() for _ in range(6))
        if not (1 <= dimension <= _MOST_DIMENSIONS and 1 <= n_features <= _MOST_FEATURES):
            raise WireError("the sealed layout must be of 1 to 4096 dimensions and 1 to 65536 features")
        if not (1 <= n_colours <= n_cells < _MOST and n_cells % n_colours == 0 and 1 <= n_slots < 1 << 16):
            raise WireError("the sealed layout must have equally many cells of each colour, and 1 to 65535 slots each")
        if not 1 <= reach < 1 << 16:
            raise WireError("the sealed layout has numbers that are out of range")
        records = RecordLayout(*record_numbers) if any(record_numbers) else None
        if records is not None:
            _check_records(records, record_numbers, n_cells * n_slots)
        scores = Stage(n_colours, n_slots, n_cells // n_colours * dimension, n_secrets, SCORE_BITS)
        for name, stage in _list_stages(scores, records).items():
            _check_stage(name, stage)
        seed = reader.read_bytes()
        projection = _read_floats(reader, n_features, dimension)
        centroids = _read_floats(reader, n_cells, dimension)
        counts = _read_array(reader, "<u2", n_cells).astype(np.uint16)
        reader.check_end()
        if len(seed) != SEED_BYTES or int(counts.max()) > n_slots:
            raise WireError("the sealed layout has a seed or counts that do not fit")
        return cls(version, seed, n_colours, n_slots, n_secrets, reach, projection, centroids, counts, records)


def _list_stages(scores: Stage, records: RecordLayout | None) -> dict[str, Stage]:
    return {"scores": scores} if records is None else {"scores": scores, "records": records.stage}


def _check_records(records: RecordLayout, numbers: Sequence[int], n_positions: int) -> None:
    if not (
        all(1 <= number < _MOST_RECORD_SHAPE for number in numbers)
        and records.side <= MOST_SIDE
        and n_positions <= records.n_blocks * records.block_size < _MOST
    ):
        raise WireError("the sealed layout has records that do not fit its cells")


def _check_stage(name: str, stage: Stage) -> None:
    """Refuse a layout if its questions would be too large or insecure, before any allocation."""
    if (
        not 1 <= stage.n_secrets <= MOST_SECRETS
        or stage.n_columns > MOST_COLUMNS
        or stage.n_samples > LWE.most_samples
        or stage.question_bytes > Kind.SEALED_QUESTION.limit
        or stage.answer_bytes > Kind.SEALED_ANSWER.limit
    ):
        raise WireError(f"the sealed layout has {name} too large for a question or an answer")


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
