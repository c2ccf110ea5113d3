"""The server's half of sealed search: codes in cells, records in columns, their hints, and answers."""

import hashlib
import json
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.cluster import connect, cut_table
from nearveil.privacy.checks import check_count
from nearveil.sealed.accuracy import bound_fetch_failure
from nearveil.sealed.cells import find_margins, make_cells
from nearveil.sealed.kernels import Kernel, KernelName, make_kernel
from nearveil.sealed.layout import (
    MOST_FETCHED,
    Layout,
    RecordLayout,
    SealedError,
    Singles,
    check_rows,
    pad_records,
    unpad_record,
)
from nearveil.sealed.lwe import (
    ANSWER_BITS,
    SEED_BYTES,
    WORD_BITS,
    Bytes,
    Words,
    expand_matrix,
    make_hint,
    round_down_to,
    unpack_question,
)
from nearveil.sealed.parameters import FETCH, SCORES, LweParameters
from nearveil.sealed.sizes import (
    HINT_BYTES,
    N_FETCHED,
    TILE,
    choose_dimension,
    choose_shape,
    count_question_bytes,
    count_slots,
    shape_records,
)
from nearveil.sealed.wire import Hint, get_parameters, read_question, write_answer
from nearveil.storage import replace_file
from nearveil.wire.frames import WireError

_UNCLIPPED = 0.9997  # of all coordinates; larger ones are clipped
_HINT_ROWS = 4096  # of a partition
_BATCH = 32  # questions of one pass
_SAMPLE = 1 << 16  # rows to learn directions from, and rows that are projected at a time
_DIGITS = 127
_MAX_CHANGES = 64  # recorded changes; an older client fetches whole hints
_SAVED = ("database", "hint", "items", "records", "record_hint")
_ALIGNMENT = 64  # bytes, of arrays in a file
_LARGEST_FAILURE = 2.0**-30  # probability that a byte of a record is read wrongly
_SEED = 20260902  # of the rotation, which is public


@dataclass(frozen=True)
class _Change:
    """The rows of the hints that changed after a version."""

    version: int
    rows: dict[str, list[int]]


@dataclass
class _OpenQuestion:
    """A question that waits for its answer."""

    question: bytes
    answer: bytes | None = None
    error: Exception | None = None


class SealedIndex:
    """Answers sealed questions: the scores of the items near a query, and records of items.

    Items are stored in cells, cells have colours, and a question probes one cell of every colour. A server learns from
    a question only that it was asked. Create an index with :meth:`build` or :meth:`load`. Several threads may call
    :meth:`answer`; :meth:`add` and :meth:`remove` must not run at the same time as any other method.

    Examples
    --------
    >>> import numpy as np
    >>> from nearveil.sealed import SealedClient
    >>> rows = np.random.default_rng(0).normal(size=(200, 16))
    >>> index = SealedIndex.build(rows, records=[f"item {i}".encode() for i in range(200)])
    >>> client = SealedClient(index.layout.to_bytes(), index.get_hints())
    >>> [match.record for match in client.search(rows[7], index.answer, 1)]
    [b'item 7']
    """

    def __init__(
        self,
        layout: Layout,
        database: Bytes,
        hint: Words,
        *,
        scale: float,
        normalize: bool,
        items: NDArray[np.int64],
        records: Bytes | None = None,
        record_hint: Words | None = None,
        changes: Sequence["_Change"] = (),
        kernel: KernelName = "auto",
        device: str = "cpu",
    ) -> None:
        """Use :meth:`build` or :meth:`load`."""
        self.layout = layout
        self._database, self._hint = database, hint
        self._scale, self._normalize, self._items = scale, normalize, items
        self._records, self._record_hint = records, record_hint
        self._waiting: deque[_OpenQuestion] = deque()
        self._pass_lock = threading.Lock()
        self._changes = list(changes)
        self._changed_rows: dict[str, set[int]] = {"scores": set(), "records": set()}  # of hints, in this change
        self._kernel_choice = kernel, device
        self._kernels: dict[str, Kernel] = {"scores": make_kernel(database, kernel, device)}
        if self._records is not None:
            self._kernels["records"] = make_kernel(self._records[None], kernel, device)

    @classmethod
    def build(
        cls,
        rows: ArrayLike,
        *,
        records: Sequence[bytes] | None = None,
        items: ArrayLike | None = None,
        dimension: int | None = None,
        n_cells: int | None = None,
        n_colours: int | None = None,
        n_fetched: int = N_FETCHED,
        kernel: KernelName = "auto",
        device: str = "cpu",
        n_jobs: int = 1,
        seed: bytes | None = None,
        normalize: bool = True,
        axis: ArrayLike | None = None,
        by_direction: bool = False,
        cluster: Any = None,
    ) -> Self:
        """Build an index of rows.

        Parameters
        ----------
        rows : array-like of shape (n_items, n_features)
            Compared by the cosine of their angle with the query; see `normalize`.
        records : sequence of bytes, optional
            For each item, bytes that a client can fetch: a name, a code, a thumbnail. All are padded to the longest.
        items : array-like of int, optional
            Your own numbers of the items, at least 0; 0, 1, 2 and so on by default.
        dimension : int, optional
            Of a code: the leading principal directions, rotated. At most 4096. By default 256, and fewer in galleries
            of more than 2.5 million items; never more than the dimension of the rows.
        n_cells, n_colours : int, optional
            By default chosen by the number of items. More cells make questions longer, more colours make hints larger;
            both increase the recall.
        n_fetched : int, default=32
            Number of records in every question for records.
        kernel : {"auto", "numpy", "numba", "torch"}, default="auto"
            Computes the pass. "auto" is Numba if it is installed, else NumPy.
        device : str, default="cpu"
            The device of torch.
        n_jobs : int, default=1
            Workers that make hints.
        seed : bytes, optional
            Of the public matrix; random by default. Processes that build an index from the same rows and seed, on the
            same kind of processor, give the same answers.
        normalize : bool, default=True
            Whether rows are divided by their norms; none may be zero then. If not, scores are inner products with the
            query of norm one, and the longest row bounds the error (``docs/theory/metrics.md``).
        axis : array-like of shape (n_features,), optional
            A direction in which queries are longer than items vary, such as a column of norms: codes keep it, however
            little items vary there, and cells leave it out.
        by_direction : bool, default=False
            Whether a cell has items of about one direction, for products with items of different norms; else, items
            that are near to one another.
        cluster : str or dask.distributed.Client, optional
            The workers that make hints; see :func:`nearveil.cluster.connect`. Hints are the same to the last bit.
        """
        vectors = np.atleast_1d(np.asarray(rows))
        dimension = choose_dimension(len(vectors)) if dimension is None else check_count(dimension, "dimension", 1)
        sample = check_rows(vectors[_spread(len(vectors))], normalize=normalize)
        projection = _find_projection(sample, dimension, axis)
        codes, scale, reach = _quantise(vectors, projection, normalize=normalize)
        n_cells, n_colours = choose_shape(len(codes), codes.shape[1], n_cells, n_colours)
        n_slots = count_slots(len(codes), n_cells)
        places = codes
        if by_direction:
            places = _equalise(codes)
        elif axis is not None:
            places = _drop_axis(codes, np.asarray(axis, np.float32) @ projection)
        cells = make_cells(places, n_cells, n_colours, n_slots)
        counts = np.bincount(cells.cells, minlength=n_cells)
        order = np.argsort(cells.cells, kind="stable")
        slots = np.empty(len(codes), np.int64)
        slots[order] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
        per_colour, width = n_cells // n_colours, projection.shape[1]
        blocks = np.zeros((n_colours, n_slots, per_colour, width), np.int8)
        blocks[cells.cells // per_colour, slots, cells.cells % per_colour] = codes
        database = blocks.reshape(n_colours, n_slots, per_colour * width)
        positions = np.full((n_cells, n_slots), -1, np.int64)  # of the row in each slot
        positions[cells.cells, slots] = np.arange(len(codes))
        numbers = np.append(_check_numbers(items, len(codes), 0), -1)
        seed = os.urandom(SEED_BYTES) if seed is None else hashlib.sha256(seed).digest()
        state: dict[str, Any] = {"scale": scale, "items": numbers[positions], "kernel": kernel, "device": device}
        state["normalize"] = normalize
        record_layout = None
        if records is not None:
            record_layout, matrix = _lay_out_records(records, positions, n_fetched)
            state |= {"records": matrix, "record_hint": _make_hint(FETCH, seed, matrix, n_jobs, cluster)}
        layout = Layout(
            version=_name_version(seed, database, state.get("records")),
            seed=seed,
            n_colours=n_colours,
            n_slots=n_slots,
            reach=reach,
            projection=projection,
            centroids=cells.centroids / np.float32(scale),
            counts=counts.astype(np.uint16),
            records=record_layout,
        )
        hint = _make_hint(SCORES, seed, database.reshape(-1, database.shape[2]), n_jobs, cluster)
        return cls(layout, database, hint.reshape(n_colours, n_slots, -1), **state)

    def __len__(self) -> int:
        return int(self.layout.counts.sum())

    @property
    def nbytes(self) -> int:
        """Bytes that a pass for scores reads."""
        return self._database.nbytes

    def get_item(self, position: int) -> int:
        """Return the number of the item at a position; -1 for none."""
        return int(self._items.ravel()[position])

    def get_items(self) -> NDArray[np.int64]:
        """Return the numbers of all items, increasing."""
        return np.sort(self._items[self._items >= 0])

    def get_hints(self, since: int = 0) -> list[bytes]:
        """Return the hints as frames: the rows that changed since a version, or all if it is unknown or too old."""
        frames = [self._make_hint_frame("scores", self._hint.reshape(-1, SCORES.dimension), since)]
        if self._record_hint is not None:
            frames.append(self._make_hint_frame("records", self._record_hint, since))
        return frames

    def _make_hint_frame(self, part: str, hint: Words, since: int) -> bytes:
        versions = [change.version for change in self._changes] + [self.layout.version]
        later = self._changes[versions.index(since) :] if since in versions else None
        rows = range(len(hint)) if later is None else sorted({row for change in later for row in change.rows[part]})
        listed = np.array(rows, np.uint32)
        values = round_down_to(hint[listed], get_parameters(part).modulus_bits, 8 * HINT_BYTES[part])
        return Hint(part, self.layout.version, listed, values).to_bytes()

    def answer(self, question: bytes) -> bytes:
        """Answer one question, in one pass with the questions of other threads that wait."""
        self.check_question(question)
        waiting = _OpenQuestion(question)
        self._waiting.append(waiting)
        with self._pass_lock:
            while waiting.answer is None and waiting.error is None:
                self._answer_batch([self._waiting.popleft() for _ in range(min(len(self._waiting), _BATCH))])
        if waiting.error is not None:
            raise waiting.error
        assert waiting.answer is not None
        return waiting.answer

    def _answer_batch(self, batch: "list[_OpenQuestion]") -> None:
        try:
            for waiting, answer in zip(batch, self.answer_many([entry.question for entry in batch]), strict=True):
                waiting.answer = answer
        except Exception as error:  # otherwise their threads would wait forever
            for waiting in batch:
                waiting.error = error

    def answer_many(self, questions: Sequence[bytes]) -> list[bytes]:
        """Answer several questions, those for scores in one pass over the codes.

        One question that does not fit the layout makes the whole call fail: check each with :meth:`check_question`
        before.
        """
        checked = [self.check_question(question) for question in questions]
        answers: dict[int, bytes] = {}
        for part in {part for part, _ in checked}:
            numbers = [number for number, (name, _) in enumerate(checked) if name == part]
            vectors = np.concatenate([checked[number][1] for number in numbers])
            answers |= dict(zip(numbers, self._answer_part(part, vectors, len(numbers)), strict=True))
        return [answers[number] for number in range(len(questions))]

    def check_question(self, question: bytes) -> tuple[str, Words]:
        """Return the part and the checked numbers of a question, shape (passes, colours, columns)."""
        part, version, packed = read_question(question)
        if part not in self._kernels:
            raise SealedError("this index has no records: ask for scores only")
        if version != self.layout.version:
            raise SealedError("the index has changed since the question was made: update the client and try again")
        shape = (1, *self._database.shape[::2]) if part == "scores" else self._get_record_shape()
        count, parameters = math.prod(shape), get_parameters(part)
        if len(packed) != count_question_bytes(parameters, count):
            words = "a client of another release packs them differently: update it"
            raise SealedError(f"the question must have {count} numbers, as the layout says; {words}")
        return part, unpack_question(packed, parameters.question_bits, count).reshape(shape)

    def _get_record_shape(self) -> tuple[int, int, int]:
        assert self.layout.records is not None
        return self.layout.records.n_fetched, 1, self.layout.records.n_columns

    def _answer_part(self, part: str, vectors: Words, count: int) -> list[bytes]:
        products = round_down_to(self._kernels[part].multiply(vectors), WORD_BITS, ANSWER_BITS)
        return [write_answer(part, self.layout.version, values) for values in np.split(products, count)]

    def add(self, rows: ArrayLike, records: Sequence[bytes] | None = None, items: ArrayLike | None = None) -> list[int]:
        """Store new items in free slots of cells near them; return their positions.

        By default their numbers follow the largest number so far. Only the changed rows of the hints are recomputed.
        """
        vectors = check_rows(rows, self.layout.projection.shape[0], normalize=self._normalize)
        self._check_record_count(records, len(vectors))
        codes = _clip(np.rint(vectors @ self.layout.projection * self._scale), self.layout.reach)
        if int(self.layout.counts.astype(np.int64).sum()) + len(codes) > self._items.size:
            raise SealedError("the index has too few free slots for these rows: build it again")
        numbers, positions = _check_numbers(items, len(codes), int(self._items.max()) + 1), []
        if np.isin(numbers, self._items).any():
            raise SealedError("items must not be numbers of items in this index")
        near, depths = find_margins(
            np.asarray(codes / np.float32(self._scale), np.float32), self.layout.centroids, self.layout.n_colours
        )
        ranked = np.take_along_axis(near, np.argsort(-depths, axis=1), axis=1)
        for row, (code, number) in enumerate(zip(codes, numbers.tolist(), strict=True)):
            cell = self._choose_free_cell(ranked[row])
            slot = int(self.layout.counts[cell])
            self._write(cell, slot, code, number, None if records is None else records[row])
            self.layout.counts[cell] += 1
            positions.append(cell * self.layout.n_slots + slot)
        self._finish_change()
        return positions

    def remove(self, items: ArrayLike) -> None:
        """Remove items; the last item of a cell moves to the free slot."""
        numbers = np.unique(np.atleast_1d(np.asarray(items)))
        positions = np.flatnonzero(np.isin(self._items, numbers))
        if len(positions) != len(numbers) or (numbers < 0).any():
            raise SealedError("items must be numbers of items of this index")
        empty = np.zeros(self.layout.dimension, np.int8)
        for position in positions[::-1].tolist():  # from the end: an item that moves is never one to remove
            cell, slot = divmod(position, self.layout.n_slots)
            last = int(self.layout.counts[cell]) - 1
            record = None if self._records is None else self._read_record(cell * self.layout.n_slots + last)
            self._write(cell, slot, self._get_code(cell, last), int(self._items[cell, last]), record)
            self._write(cell, last, empty, -1, None if self._records is None else b"")
            self.layout.counts[cell] -= 1
        self._finish_change()

    def _choose_free_cell(self, ranked: NDArray[np.int32]) -> int:
        """Return the first of some cells with a free slot, or the emptiest cell of all."""
        free = ranked[self.layout.counts[ranked] < self.layout.n_slots]
        return int(free[0] if len(free) else np.argmin(self.layout.counts))

    def _get_code(self, cell: int, slot: int) -> NDArray[np.int8]:
        colour, block = divmod(cell, self.layout.cells_per_colour)
        start = block * self.layout.dimension
        return self._database[colour, slot, start : start + self.layout.dimension].copy()

    def _write(self, cell: int, slot: int, code: NDArray[Any], item: int, record: bytes | None) -> None:
        """Write code and record of one slot, and update the hints."""
        colour, block = divmod(cell, self.layout.cells_per_colour)
        start, stop = block * self.layout.dimension, (block + 1) * self.layout.dimension
        change = code.astype(np.int64) - self._database[colour, slot, start:stop]
        matrix = expand_matrix(SCORES, self.layout.seed, start, stop).astype(np.int64)
        self._hint[colour, slot] = (self._hint[colour, slot] + change @ matrix) % (1 << SCORES.modulus_bits)
        self._database[colour, slot, start:stop] = code
        self._items[cell, slot] = item
        self._changed_rows["scores"].add(colour * self.layout.n_slots + slot)
        if record is not None:
            self._write_record(cell * self.layout.n_slots + slot, record)

    def _write_record(self, position: int, record: bytes) -> None:
        layout = self.layout.records
        assert layout is not None
        assert self._records is not None
        assert self._record_hint is not None
        column, block = divmod(position, layout.per_column)
        rows = slice(block * layout.width, (block + 1) * layout.width)
        padded = pad_records([record], layout.width)[0]
        change = padded.astype(np.int64) - self._records[rows, column]
        matrix = expand_matrix(FETCH, self.layout.seed, column, column + 1).astype(np.int64)
        hint = self._record_hint[rows].astype(np.int64) + change[:, None] * matrix
        self._record_hint[rows] = hint % (1 << FETCH.modulus_bits)
        self._records[rows, column] = padded
        self._changed_rows["records"].update(range(rows.start, rows.stop))

    def _read_record(self, position: int) -> bytes:
        layout = self.layout.records
        assert layout is not None
        assert self._records is not None
        column, block = divmod(position, layout.per_column)
        return unpad_record(self._records[block * layout.width : (block + 1) * layout.width, column])

    def _check_record_count(self, records: Sequence[bytes] | None, count: int) -> None:
        if (records is None) != (self._records is None) or (records is not None and len(records) != count):
            raise SealedError("pass records for every row if the index has records, and none otherwise")
        if records is not None and self.layout.records is not None:
            pad_records(records, self.layout.records.width)  # refuses long records before anything changes

    def _finish_change(self) -> None:
        """Give the changed index a new version, record the changed rows, and refresh the kernels."""
        rows = {part: sorted(changed) for part, changed in self._changed_rows.items()}
        self._changes = [*self._changes, _Change(self.layout.version, rows)][-_MAX_CHANGES:]
        parts = [self._database.reshape(-1, self._database.shape[2])[rows["scores"]].tobytes()]
        if self._records is not None:
            _check_failure(self._records[rows["records"]])
            parts.append(self._records[rows["records"]].tobytes())
        digest = hashlib.sha256(b"".join([str((self.layout.version, rows)).encode(), *parts])).digest()
        self.layout = replace(self.layout, version=_read_version(digest))
        self._changed_rows = {part: set() for part in self._changed_rows}
        for kernel in self._kernels.values():
            kernel.refresh()

    def copy(self) -> Self:
        """Return an index that can be changed while this one answers."""
        kernel, device = self._kernel_choice
        return type(self)(
            replace(self.layout, counts=self.layout.counts.copy()),
            self._database.copy(),
            self._hint.copy(),
            scale=self._scale,
            normalize=self._normalize,
            items=self._items.copy(),
            records=None if self._records is None else self._records.copy(),
            record_hint=None if self._record_hint is None else self._record_hint.copy(),
            changes=self._changes,
            kernel=kernel,
            device=device,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index with its hints to one file, atomically."""
        about = {
            "scale": self._scale,
            "normalize": self._normalize,
            "layout": self.layout.to_bytes().hex(),
            "changes": [[change.version, change.rows] for change in self._changes],
        }
        arrays = [np.frombuffer(json.dumps(about).encode(), np.uint8)]
        arrays += [array for name in _SAVED if (array := getattr(self, f"_{name}")) is not None]
        with replace_file(Path(path)) as file:
            for array in arrays:
                np.lib.format.write_array(file, array, allow_pickle=False)
                file.write(bytes(-file.tell() % _ALIGNMENT))
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").digest()
            file.write(digest)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, writable: bool = False, kernel: KernelName = "auto", device: str = "cpu"
    ) -> Self:
        """Map a file of :meth:`save` into memory; processes that map the same file share the memory.

        `writable`: Whether the index can be changed, in memory only; :meth:`save` writes the change.
        """
        try:
            about, arrays = _map_arrays(Path(path), "c" if writable else "r")
            layout = Layout.from_bytes(bytes.fromhex(about["layout"]))
            changes = [_Change(int(version), rows) for version, rows in about["changes"]]
            database, hint, items, *records = arrays
            state: dict[str, Any] = dict(zip(_SAVED[3:], records, strict=bool(records)))
            scale, normalize = float(about["scale"]), bool(about.get("normalize", True))  # missing in files of 0.2
        except (OSError, ValueError, KeyError, EOFError, TypeError, WireError) as error:
            raise SealedError(f"The sealed index at {path} is missing or corrupted; build it again.") from error
        state |= {
            "scale": scale,
            "normalize": normalize,
            "items": items,
            "changes": changes,
            "kernel": kernel,
            "device": device,
        }
        return cls(layout, database, hint, **state)


def _make_hint(parameters: LweParameters, seed: bytes, matrix: Bytes, n_jobs: int, cluster: Any) -> Words:
    """Return the hint of a matrix: a function of each of its rows, modulo a power of two."""
    with connect(cluster) as workers:
        parts = workers.place(cut_table(matrix, _HINT_ROWS))
        hints = workers.map(_hint_part, parts, parameters, seed, n_jobs, stage="making hints")
        return np.concatenate(list(hints))


def _hint_part(rows: Bytes, parameters: LweParameters, seed: bytes, n_jobs: int) -> Words:
    return make_hint(parameters, seed, rows, n_jobs)


def _map_arrays(path: Path, mode: Literal["r", "c"]) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Return the header and the arrays of a file; ValueError if its digest is wrong."""
    arrays: list[NDArray[Any]] = []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - hashlib.sha256().digest_size
        if size <= 0:
            raise ValueError("the file is too short")
        whole = np.memmap(file, np.uint8, "r", 0, (size,))
        file.seek(size)
        if hashlib.sha256(whole.data).digest() != file.read():
            raise ValueError("the file is corrupted")
        file.seek(0)
        while file.tell() < size:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("the file is of another kind")
            shape, _, kind = np.lib.format.read_array_header_1_0(file)
            begin = file.tell()
            arrays.append(np.memmap(file, kind, mode, begin, shape))
            file.seek(-(-(begin + arrays[-1].nbytes) // _ALIGNMENT) * _ALIGNMENT)
    return json.loads(arrays[0].tobytes()), arrays[1:]


def _check_numbers(items: ArrayLike | None, count: int, first: int) -> NDArray[np.int64]:
    """Return the checked numbers of new items."""
    if items is None:
        return np.arange(first, first + count)
    numbers = np.asarray(items)
    if numbers.shape != (count,) or numbers.dtype.kind not in "iu" or len(np.unique(numbers)) != count:
        raise SealedError("items must be whole numbers, one for each row, all different")
    if count and int(numbers.min()) < 0:
        raise SealedError("items must be at least 0")
    return numbers.astype(np.int64)


def _check_failure(rows: Bytes) -> None:
    """Refuse records so long that noise could change a byte."""
    longest = max((float(np.linalg.norm(row.astype(np.float32))) for row in rows), default=0.0)
    if bound_fetch_failure(longest) > _LARGEST_FAILURE:
        raise SealedError("records are too many or too long: make them shorter")


def _read_version(digest: bytes) -> int:
    return int.from_bytes(digest[:6], "little") + 1


def _name_version(seed: bytes, database: Bytes, records: Bytes | None) -> int:
    """Return a version from the content: an index with other content refuses questions for this one."""
    digest = hashlib.sha256(seed)
    for array in (database, records):
        digest.update(b"" if array is None else array.data)
    return _read_version(digest.digest())


def _find_projection(vectors: Singles, dimension: int, axis: ArrayLike | None) -> Singles:
    """Return an axis and the leading directions of vectors, rotated at random: one scale fits all coordinates."""
    n_features = vectors.shape[1]
    rank = min(dimension, n_features)
    moments = (vectors.T @ vectors).astype(np.float64)
    if axis is not None and np.any(axis):
        unit = np.asarray(axis, np.float64) / np.linalg.norm(np.asarray(axis, np.float64))
        beside = np.eye(n_features) - np.outer(unit, unit)
        moments = beside @ moments @ beside + 2 * np.trace(moments) * np.outer(unit, unit)  # the axis leads
    _, directions = np.linalg.eigh(moments)
    width = -(-rank // TILE) * TILE
    rotation, _ = np.linalg.qr(np.random.default_rng(_SEED).normal(size=(width, width)))
    return np.asarray(directions[:, ::-1][:, :rank] @ rotation[:rank], dtype=np.float32)


def _spread(count: int) -> NDArray[np.int64]:
    """Return the positions of the rows to learn directions from, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, _SAMPLE)).astype(np.int64))


def _quantise(rows: NDArray[Any], projection: Singles, *, normalize: bool) -> tuple[Bytes, float, int]:
    """Return codes of 8 bits, their scale, and a bound on their length; project a block of rows at a time."""
    sample = np.abs(check_rows(rows[_spread(len(rows))], normalize=normalize) @ projection)
    scale = _DIGITS / max(float(np.quantile(sample, _UNCLIPPED)), 1e-30)
    codes, longest = np.empty((len(rows), projection.shape[1]), np.int8), 0.0
    for start in range(0, len(rows), _SAMPLE):
        block = slice(start, start + _SAMPLE)
        steps = check_rows(rows[block], normalize=normalize) @ projection * scale
        steps = np.clip(np.rint(steps), -_DIGITS, _DIGITS)
        longest = max(longest, float(np.linalg.norm(steps, axis=1).max()))
        codes[block] = steps
    return codes, scale, math.ceil(longest * 1.02) + 1


def _drop_axis(codes: Bytes, axis: Singles) -> Bytes:
    """Return codes without their part along an axis, rounded: centroids are then orthogonal to the axis."""
    unit, flat = axis / max(float(np.linalg.norm(axis)), 1e-30), np.empty_like(codes)
    for start in range(0, len(codes), _SAMPLE):
        block = codes[start : start + _SAMPLE].astype(np.float32)
        flat[start : start + _SAMPLE] = np.clip(np.rint(block - np.outer(block @ unit, unit)), -_DIGITS, _DIGITS)
    return flat


def _equalise(codes: Bytes) -> Bytes:
    """Return codes scaled to their median length, rounded."""
    lengths = np.concatenate([np.linalg.norm(codes[i : i + _SAMPLE].astype(np.float32), axis=1)
                              for i in range(0, len(codes), _SAMPLE)])  # fmt: skip
    factors, equal = np.median(lengths) / np.maximum(lengths, 1), np.empty_like(codes)
    for start in range(0, len(codes), _SAMPLE):
        block = slice(start, start + _SAMPLE)
        equal[block] = np.clip(np.rint(codes[block] * factors[block, None]), -_DIGITS, _DIGITS)
    return equal


def _clip(steps: Singles, reach: int) -> Bytes:
    """Return codes of 8 bits; shorten those longer than `reach`."""
    clipped = np.clip(steps, -_DIGITS, _DIGITS)
    lengths = np.linalg.norm(clipped, axis=1, keepdims=True)
    return np.asarray(np.trunc(clipped * np.minimum(1, reach / np.maximum(lengths, 1))), dtype=np.int8)


def _lay_out_records(records: Sequence[bytes], items: NDArray[np.int64], n_fetched: int) -> tuple[RecordLayout, Bytes]:
    """Return layout and matrix of records, one for every slot."""
    if len(records) != int(items.max()) + 1:
        raise SealedError("pass one record for each row")
    if not 1 <= check_count(n_fetched, "n_fetched", 1) <= MOST_FETCHED:
        raise SealedError(f"n_fetched must be from 1 to {MOST_FETCHED}")
    width = max(map(len, records)) + 1
    per_column, n_columns = shape_records(items.size, width)
    table = np.zeros((n_columns * per_column, width), np.int8)
    filled = items.ravel() >= 0
    table[: items.size][filled] = pad_records(records, width)[items.ravel()[filled]]
    matrix = np.ascontiguousarray(table.reshape(n_columns, per_column * width).T)
    _check_failure(matrix)
    return RecordLayout(width, per_column, n_columns, n_fetched), matrix
