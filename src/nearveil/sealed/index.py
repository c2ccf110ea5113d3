"""The server's half of sealed search: codes in cells, records in a grid, their tokens, and answers."""

import hashlib
import json
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import joblib
import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.cluster import connect
from nearveil.privacy.checks import check_count
from nearveil.sealed import records as grid
from nearveil.sealed import sizes
from nearveil.sealed.cells import find_margins, make_cells
from nearveil.sealed.kernels import Kernel, make_kernel
from nearveil.sealed.layout import MOST_SIDE, Layout, SealedError, Singles, check_rows
from nearveil.sealed.lwe import SEED_BYTES, Bytes, Longs, Words, make_hint, round_down_to, unpack_question
from nearveil.sealed.parameters import ANSWER_BITS, WORD_BITS
from nearveil.sealed.ring import TokenRequest, read_request, request_bytes
from nearveil.sealed.sizes import RecordLayout, Stage
from nearveil.sealed.tokens import BATCH as TOKEN_BATCH
from nearveil.sealed.tokens import TokenTables
from nearveil.sealed.wire import read_parts, read_question, write_answer, write_parts
from nearveil.storage import replace_file
from nearveil.wire.frames import Kind, WireError, peek_header

_UNCLIPPED = 0.9997  # of all coordinates; larger ones are clipped
_CLIPPED = 0.25  # of the length of a new row that clipping may remove
_BATCH = 32  # questions of one pass
_SAMPLE = 1 << 16  # rows to learn directions from, and rows that are projected at a time
_DIGITS = 127
_ALIGNMENT = 64  # bytes, of arrays in a file
_PASS_BYTES = 1 << 26  # of products of questions for records at a time
_SEED = 20260902  # of the rotation, which is public


@dataclass(frozen=True)
class _Tokens:
    """The hints of a stage, their tables, and the rows of each secret that changed since."""

    hints: list[Words]
    tables: TokenTables
    changed: list[set[int]]

    def copy(self) -> Self:
        """Return a copy that notes changes of its own."""
        return replace(self, changed=[*map(set, self.changed)])


class _Groups(Sequence[tuple[int, list[Bytes]]]):
    """The groups of a stage that share each public matrix; they are copied when they are needed."""

    def __init__(self, index: "SealedIndex", name: str, stage: Stage) -> None:
        self._index, self._name, self._stage = index, name, stage

    def __len__(self) -> int:
        return len(range(0, self._stage.n_groups, self._stage.n_secrets))

    def __getitem__(self, matrix: Any) -> Any:
        if matrix >= len(self):
            raise IndexError
        groups = range(self._stage.n_groups)[matrix * self._stage.n_secrets : (matrix + 1) * self._stage.n_secrets]
        return matrix, [self._index._get_group(self._name, group) for group in groups]


class _Batcher:
    """Answers the questions of threads that wait meanwhile in one pass."""

    def __init__(self, answer: Callable[[list[Any]], list[bytes]], size: int) -> None:
        self._answer, self._size = answer, size
        self._queue: deque[tuple[Any, Future[bytes]]] = deque()
        self._lock = threading.Lock()

    def answer(self, question: Any) -> bytes:
        """Answer one question."""
        future: Future[bytes] = Future()
        self._queue.append((question, future))
        with self._lock:
            while not future.done():
                self._answer_batch([self._queue.popleft() for _ in range(min(len(self._queue), self._size))])
        return future.result()

    def _answer_batch(self, batch: list[tuple[Any, "Future[bytes]"]]) -> None:
        try:
            answers = self._answer([question for question, _ in batch])
        except Exception as error:  # otherwise their threads would wait forever
            for _, future in batch:
                future.set_exception(error)
        else:
            for (_, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)


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
    >>> client = SealedClient(index.layout.to_bytes(), index.get_public_tokens())
    >>> [match.record for match in client.search(rows[7], index.answer, 1)]
    [b'item 7']
    """

    def __init__(
        self,
        layout: Layout,
        database: Bytes,
        *,
        scale: float,
        normalize: bool,
        items: NDArray[np.int64],
        records: Bytes | None = None,
        tokens: "dict[str, _Tokens] | None" = None,
        device: str = "cpu",
    ) -> None:
        """Use :meth:`build` or :meth:`load`."""
        self.layout = layout
        self._database, self._records = database, records
        self._scale, self._normalize, self._items = scale, normalize, items
        self._tokens = tokens or {}
        self._token_lock = threading.Lock()
        self._change = hashlib.sha256(b"%d" % layout.version)  # of the changes that make the next version
        self._questions = _Batcher(self.answer_many, _BATCH)
        self._token_requests = _Batcher(self._answer_tokens, TOKEN_BATCH)
        self._device = device
        self._kernels = self._make_kernels()

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
        side: int | None = None,
        n_secrets: int | None = None,
        device: str = "cpu",
        seed: bytes | None = None,
        normalize: bool = True,
        axis: ArrayLike | None = None,
        by_direction: bool = False,
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
        dimension, n_cells, n_colours, side, n_secrets : int, optional
            Of a code (its leading principal directions, rotated; at most 4096), of the cells, of the grid of records,
            of which a question fetches at most twice as many, and of a question: more secrets make it faster to
            prepare, and its request larger. By default chosen by the number of items (``nearveil.sealed.sizes``).
            More cells make questions longer, more colours answers and tokens larger; both increase the recall.
        device : str, default="cpu"
            Or a GPU of torch, such as "cuda": passes and tokens are computed there, from a copy of all codes.
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
        """
        vectors = np.atleast_1d(np.asarray(rows))
        sample = check_rows(vectors[_spread(len(vectors))], normalize=normalize)
        if dimension is None:
            dimension = sizes.choose_dimension(len(vectors), sample.shape[1])
        check_count(dimension, "dimension", 1)
        projection = _find_projection(sample, dimension, axis)
        codes, scale, reach = _quantise(vectors, projection, normalize=normalize)
        n_cells, n_colours = sizes.choose_shape(len(codes), codes.shape[1], n_cells, n_colours)
        n_slots = sizes.count_slots(len(codes), n_cells)
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
        state: dict[str, Any] = {"scale": scale, "items": numbers[positions], "device": device, "normalize": normalize}
        layout = Layout(
            version=0,
            seed=seed,
            n_colours=n_colours,
            n_slots=n_slots,
            n_secrets=n_secrets or sizes.count_secrets(n_colours, per_colour * width),
            reach=reach,
            projection=projection,
            centroids=cells.centroids / np.float32(scale),
            counts=counts.astype(np.uint16),
            records=None if records is None else _shape_records(records, positions, side, n_secrets),
        )
        if records is not None:
            state["records"] = grid.lay_out_records(layout, positions, records)
        layout = replace(layout, version=_name_version(seed, database, state.get("records")))
        return cls(layout, database, **state)

    def __len__(self) -> int:
        return int(self.layout.counts.sum())

    @property
    def nbytes(self) -> int:
        """Bytes that a pass for scores reads."""
        return self._database.nbytes

    @property
    def token_nbytes(self) -> int:
        """Bytes that a request for tokens reads."""
        return sum(tokens.tables.nbytes for tokens in self._tokens.values())

    def get_item(self, position: int) -> int:
        """Return the number of the item at a position; -1 for none."""
        return int(self._items.ravel()[position])

    def get_items(self) -> NDArray[np.int64]:
        """Return the numbers of all items, increasing."""
        return np.sort(self._items[self._items >= 0])

    def prepare_tokens(self, n_jobs: int = 1, cluster: Any = None) -> None:
        """Make the tables of tokens, or rebuild those that changed. It takes a second, or minutes for large galleries.

        `cluster`: The workers that make hints; see :func:`nearveil.cluster.connect`. The result is the same to the bit.
        """
        with self._token_lock:
            for name in self.layout.stages:
                tokens = self._tokens.get(name)
                if tokens is None:
                    self._tokens[name] = self._build_tokens(name, n_jobs, cluster)
                elif any(tokens.changed):
                    self._tokens[name] = self._rebuild_tokens(name, tokens)

    def _build_tokens(self, name: str, n_jobs: int, cluster: Any) -> "_Tokens":
        stage, seed = self.layout.stages[name], self.layout.seed
        with connect(cluster) as workers:
            parts = workers.place(_Groups(self, name, stage))
            hints = [*workers.map(_make_hint, parts, name, seed, n_jobs, stage="making hints")]
        groups = [group for part in hints for group in part]
        secrets = [np.concatenate(groups[k :: stage.n_secrets]) for k in range(stage.n_secrets)]
        tables = TokenTables.build(name, seed, secrets, n_jobs, self._device)
        return _Tokens(secrets, tables, [set() for _ in secrets])

    def _rebuild_tokens(self, name: str, tokens: "_Tokens") -> "_Tokens":
        stage, seed, hints = self.layout.stages[name], self.layout.seed, list(tokens.hints)
        for k, changed in enumerate(tokens.changed):
            if changed:
                hints[k] = hints[k].copy()
            for matrix in {row // stage.n_rows for row in changed}:
                rows = np.array([row for row in changed if row // stage.n_rows == matrix])
                group = self._get_group(name, matrix * stage.n_secrets + k)
                hints[k][rows] = make_hint(name, seed, matrix, [group[rows % stage.n_rows]])[0]
        return _Tokens(hints, tokens.tables.rebuild(hints, tokens.changed), [set() for _ in hints])

    def _make_kernels(self) -> dict[str, Kernel]:
        matrices = {"scores": self._database, "records": self._records}
        return {name: make_kernel(matrix, self._device) for name, matrix in matrices.items() if matrix is not None}

    def _get_group(self, name: str, group: int) -> Bytes:
        """Return the matrix of a colour or of a bucket, shape (rows, columns)."""
        if name == "scores":
            return np.asarray(self._database[group])
        assert self.layout.records is not None
        assert self._records is not None
        return grid.get_bucket(self.layout.records, self._records, group)

    def _note_change(self, name: str, group: int, rows: Iterable[int]) -> None:
        """Note rows of a group that changed, so that their hints and tokens are made again."""
        if (tokens := self._tokens.get(name)) is not None:
            stage = self.layout.stages[name]
            start = group // stage.n_secrets * stage.n_rows
            tokens.changed[group % stage.n_secrets].update(start + row for row in rows)

    def get_public_tokens(self) -> bytes:
        """Return the public parts of tokens, which a client fetches once, as a frame."""
        self.prepare_tokens()
        parts = [tokens.tables.public for tokens in self._tokens.values()]
        return write_parts(Kind.SEALED_TOKENS, self.layout.version, parts)

    def _check_token_request(self, request: bytes) -> list[TokenRequest]:
        """Return the checked numbers of a request, for each stage."""
        lengths = [request_bytes(stage.n_secrets) for stage in self.layout.stages.values()]
        parts = read_parts(request, Kind.SEALED_TOKEN_REQUEST, self.layout.version, lengths)
        stages = self.layout.stages.values()
        return [read_request(part, stage.n_secrets) for part, stage in zip(parts, stages, strict=True)]

    def _answer_tokens(self, requests: Sequence[list[TokenRequest]]) -> list[bytes]:
        self.prepare_tokens()
        pairs = zip(self._tokens.values(), zip(*requests, strict=True), strict=True)
        answers = [tokens.tables.answer(of_stage) for tokens, of_stage in pairs]
        return [write_parts(Kind.SEALED_TOKEN, self.layout.version, part) for part in zip(*answers, strict=True)]

    def answer(self, question: bytes) -> bytes:
        """Answer one question, in one pass with the questions of other threads that wait, or a request for tokens."""
        if peek_header(question)[0] == Kind.SEALED_TOKEN_REQUEST:
            return self._token_requests.answer(self._check_token_request(question))
        self.check_question(question)
        return self._questions.answer(question)

    def answer_many(self, questions: Sequence[bytes]) -> list[bytes]:
        """Answer several questions, those for scores in one pass over the codes.

        One question that does not fit the layout makes the whole call fail: check each with :meth:`check_question`
        before.
        """
        checked = [self.check_question(question) for question in questions]
        answers: dict[int, bytes] = {}
        for part in {part for part, _ in checked}:
            numbers = [number for number, (name, _) in enumerate(checked) if name == part]
            vectors = np.stack([checked[number][1] for number in numbers])
            multiply = self._kernels["scores"].multiply if part == "scores" else self._multiply_records
            values = round_down_to(multiply(vectors), WORD_BITS, ANSWER_BITS)
            answers |= {n: write_answer(part, self.layout.version, row) for n, row in zip(numbers, values, strict=True)}
        return [answers[number] for number in range(len(questions))]

    def check_question(self, question: bytes) -> tuple[str, Words]:
        """Return the part and the checked numbers of a question, shape (groups, columns)."""
        part, version, packed = read_question(question)
        stage = self.layout.stages.get(part)
        if stage is None:
            raise SealedError("this index has no records: query scores only")
        if version != self.layout.version:
            raise SealedError("the index has changed since the question was made: update the client and try again")
        if len(packed) != stage.question_bytes:
            words = "a client of another release packs them differently: update it"
            raise SealedError(f"the question must have the length that the layout says; {words}")
        shape = stage.n_groups, stage.n_columns
        return part, unpack_question(packed, stage.question_bits, math.prod(shape)).reshape(shape)

    def _multiply_records(self, vectors: Words) -> Words:
        """Return products of buckets with questions: of every block with the words of its row and of its column."""
        layout, kernel = self.layout.records, self._kernels["records"]
        assert layout is not None
        side, columns = layout.side, layout.n_columns
        questions = vectors.reshape(-1, 2, side, side, columns)  # whether row or column, which, and along it
        answers = np.empty((len(vectors), layout.n_buckets, layout.n_rows), np.uint32)
        step = max(1, _PASS_BYTES // (24 * layout.n_blocks * layout.n_rows))
        for start in range(0, len(questions), step):
            part = questions[start : start + step]
            words = np.zeros((len(part), 2, side, side, layout.stored_columns), np.uint32)
            words[:, 0, :, :, :columns] = part[:, 0]
            words[:, 1, :, :, :columns] = part[:, 1].swapaxes(1, 2)
            products = kernel.multiply(words.reshape(2 * len(part), side**2, -1))
            split = products.reshape(len(part), 2, side, side, layout.n_rows)
            answers[start : start + step, :side] = split[:, 0].sum(axis=2, dtype=np.uint32)
            answers[start : start + step, side:] = split[:, 1].sum(axis=1, dtype=np.uint32)
        return answers & np.uint32((1 << WORD_BITS) - 1)

    def add(self, rows: ArrayLike, records: Sequence[bytes] | None = None, items: ArrayLike | None = None) -> list[int]:
        """Store new items in free slots of cells near them; return their positions.

        By default their numbers follow the largest number so far. Only the changed blocks of tokens are made again.
        """
        vectors = check_rows(rows, self.layout.projection.shape[0], normalize=self._normalize)
        self._check_record_count(records, len(vectors))
        steps = np.rint(vectors @ self.layout.projection * self._scale)
        codes = np.clip(steps, -_DIGITS, _DIGITS).astype(np.int8)
        lengths, clipped = np.linalg.norm(steps, axis=1), np.linalg.norm(steps - codes, axis=1)
        if ((lengths > self.layout.reach) | (clipped > _CLIPPED * lengths)).any():
            raise SealedError("a row is longer than the codes of this index can hold: build it again")
        if int(self.layout.counts.astype(np.int64).sum()) + len(codes) > self._items.size:
            raise SealedError("the index has too few free slots for these rows: build it again")
        numbers, positions = _check_numbers(items, len(codes), int(self._items.max()) + 1), []
        if np.isin(numbers, self._items).any():
            raise SealedError("items must not be numbers of items in this index")
        stored = np.asarray(codes / np.float32(self._scale), np.float32)
        near, depths = find_margins(stored, self.layout.centroids, self.layout.n_colours)
        ranked, n_slots = np.take_along_axis(near, np.argsort(-depths, axis=1), axis=1), self.layout.n_slots
        for row, (code, number) in enumerate(zip(codes, numbers.tolist(), strict=True)):
            free = ranked[row][self.layout.counts[ranked[row]] < n_slots]
            cell = int(free[0] if len(free) else np.argmin(self.layout.counts))  # or the emptiest of all
            slot = int(self.layout.counts[cell])
            self._write(cell, slot, code, number, None if records is None else records[row])
            self.layout.counts[cell] += 1
            positions.append(cell * n_slots + slot)
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

    def _get_code(self, cell: int, slot: int) -> NDArray[np.int8]:
        colour, block = divmod(cell, self.layout.cells_per_colour)
        start = block * self.layout.dimension
        return self._database[colour, slot, start : start + self.layout.dimension].copy()

    def _write(self, cell: int, slot: int, code: NDArray[Any], item: int, record: bytes | None) -> None:
        """Write code and record of one slot."""
        colour, block = divmod(cell, self.layout.cells_per_colour)
        start, stop = block * self.layout.dimension, (block + 1) * self.layout.dimension
        self._database[colour, slot, start:stop] = code
        self._items[cell, slot] = item
        self._change.update(repr((cell, slot, record)).encode() + self._database[colour, slot, start:stop].tobytes())
        self._note_change("scores", colour, [slot])
        if record is not None:
            self._write_record(cell * self.layout.n_slots + slot, record)

    def _write_record(self, position: int, record: bytes) -> None:
        stored, rows, column, block = self._find_record(position)
        layout = self.layout.records
        assert layout is not None
        padded = grid.pad_records([record], layout.width)
        stored[block, rows, column] = grid.encode_records(layout, self.layout.seed, np.array([position]), padded)[0]
        for bucket in grid.find_buckets(layout, np.array([block]))[0].tolist():
            self._note_change("records", bucket, range(rows.start, rows.stop))

    def _read_record(self, position: int) -> bytes:
        stored, rows, column, block = self._find_record(position)
        assert self.layout.records is not None
        entries = stored[None, block, rows, column].astype(np.int64)
        decoded = grid.decode_records(self.layout.records, self.layout.seed, np.array([position]), entries)
        return grid.unpad_record(decoded[0])

    def _find_record(self, position: int) -> tuple[Bytes, slice, int, int]:
        """Return the matrix of records, and rows, column and block of one."""
        layout = self.layout.records
        assert layout is not None
        assert self._records is not None
        places = grid.place_records(layout, self.layout.seed, np.array([position]))
        block, column, number = (int(part[0]) for part in places)
        return self._records, slice(number * layout.n_entries, (number + 1) * layout.n_entries), column, block

    def _check_record_count(self, records: Sequence[bytes] | None, count: int) -> None:
        if (records is None) != (self._records is None) or (records is not None and len(records) != count):
            raise SealedError("pass records for every row if the index has records, and none otherwise")
        if records is not None and self.layout.records is not None:
            grid.pad_records(records, self.layout.records.width)  # refuses long records before anything changes

    def _finish_change(self) -> None:
        """Give the changed index a new version and new kernels."""
        self.layout = replace(self.layout, version=_read_version(self._change.digest()))
        self._change = hashlib.sha256(b"%d" % self.layout.version)
        self._kernels = self._make_kernels()

    def copy(self) -> Self:
        """Return an index that can be changed while this one answers. It shares the tables of tokens."""
        return type(self)(
            replace(self.layout, counts=self.layout.counts.copy()),
            self._database.copy(),
            scale=self._scale,
            normalize=self._normalize,
            items=self._items.copy(),
            records=None if self._records is None else self._records.copy(),
            tokens={name: tokens.copy() for name, tokens in self._tokens.items()},
            device=self._device,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index with its tokens to one file, atomically."""
        if self._tokens:
            self.prepare_tokens()
        about = {
            "scale": self._scale,
            "normalize": self._normalize,
            "layout": self.layout.to_bytes().hex(),
            "tables": {name: len(tokens.tables.arrays) for name, tokens in self._tokens.items()},
        }
        arrays: list[NDArray[Any]] = [np.frombuffer(json.dumps(about).encode(), np.uint8), self._database, self._items]
        arrays += [] if self._records is None else [self._records]
        for tokens in self._tokens.values():
            arrays += [*tokens.hints, *tokens.tables.arrays]
        with replace_file(Path(path)) as file:
            for array in arrays:
                np.lib.format.write_array(file, array, allow_pickle=False)
                file.write(bytes(-file.tell() % _ALIGNMENT))
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").digest()
            file.write(digest)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, writable: bool = False, device: str = "cpu") -> Self:
        """Map a file of :meth:`save` into memory; processes that map the same file share the memory.

        `writable`: Whether the index can be changed, in memory only; :meth:`save` writes the change.
        """
        try:
            about, arrays = _map_arrays(Path(path), "c" if writable else "r")
            layout = Layout.from_bytes(bytes.fromhex(about["layout"]))
            database, items, *rest = arrays
            state: dict[str, Any] = {"records": rest.pop(0)} if layout.records is not None else {}
            tokens = {}
            for name, count in about["tables"].items():
                stage = layout.stages[name]
                hints, tables = ([rest.pop(0) for _ in range(number)] for number in (stage.n_secrets, count))
                made = TokenTables(name, layout.seed, stage.secret_rows, tables, joblib.cpu_count(), device)
                tokens[name] = _Tokens(hints, made, [set() for _ in hints])
            state |= {"scale": float(about["scale"]), "normalize": bool(about["normalize"])}
        except (OSError, ValueError, KeyError, EOFError, TypeError, WireError) as error:
            raise SealedError(f"The sealed index at {path} is missing or corrupted; build it again.") from error
        return cls(layout, database, items=items, tokens=tokens, device=device, **state)


def _make_hint(part: tuple[int, list[Bytes]], stage: str, seed: bytes, n_jobs: int) -> list[Words]:
    return make_hint(stage, seed, *part, n_jobs)


def _shape_records(records: Sequence[bytes], positions: Longs, side: int | None, n_secrets: int | None) -> RecordLayout:
    """Return the grid of records, one for every slot."""
    if len(records) != int(positions.max()) + 1:
        raise SealedError("pass one record for each row")
    width = max(map(len, records)) + 1
    side = sizes.choose_side(len(records), width) if side is None else check_count(side, "side", 1)
    if side > MOST_SIDE:
        raise SealedError(f"side must be from 1 to {MOST_SIDE}")
    layout = sizes.shape_records(positions.size, width, side)
    return layout if n_secrets is None else replace(layout, n_secrets=n_secrets)


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
    width = -(-rank // sizes.TILE) * sizes.TILE
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


def _map_codes(codes: Bytes, function: Callable[[Singles], Singles]) -> Bytes:
    """Return changed codes, rounded; a block of rows at a time is in 32 bits."""
    result = np.empty_like(codes)
    for start in range(0, len(codes), _SAMPLE):
        block = function(codes[start : start + _SAMPLE].astype(np.float32))
        result[start : start + _SAMPLE] = np.clip(np.rint(block), -_DIGITS, _DIGITS)
    return result


def _drop_axis(codes: Bytes, axis: Singles) -> Bytes:
    """Return codes without their part along an axis, rounded: centroids are then orthogonal to the axis."""
    unit = axis / max(float(np.linalg.norm(axis)), 1e-30)
    return _map_codes(codes, lambda block: block - np.outer(block @ unit, unit))


def _equalise(codes: Bytes) -> Bytes:
    """Return codes scaled to their median length, rounded."""
    median = np.median(np.sqrt(np.einsum("ij,ij->i", codes, codes, dtype=np.float32)))
    norm = np.linalg.norm
    return _map_codes(codes, lambda block: block * (median / np.maximum(norm(block, axis=1, keepdims=True), 1)))
