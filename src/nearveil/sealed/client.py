"""The client's half of sealed search: make encrypted questions, and decrypt their answers."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from dp_accounting import NoOpDpEvent
from numpy.typing import ArrayLike, NDArray

from nearveil.metrics import scale_to_unit
from nearveil.privacy.checks import check_count
from nearveil.privacy.guarantee import Assumption, Basis, Guarantee
from nearveil.privacy.noise import Source, secure_source
from nearveil.sealed.accuracy import BYTE_BITS, SPAN
from nearveil.sealed.layout import Layout, SealedError, check_rows, choose_cells, unpad_record
from nearveil.sealed.lwe import ANSWER_BITS, Longs, add_messages, centre, encrypt_zeros
from nearveil.sealed.pads import Pad, PadStock, multiply_hint
from nearveil.sealed.parameters import FETCH, SCORES, LweParameters
from nearveil.sealed.sizes import HINT_BYTES
from nearveil.sealed.wire import Hint, get_parameters, read_answer, write_question

_EMPTY, _CHOSEN = -(1 << 40), -(1 << 41)  # below every score
_FIXED = ("seed", "n_colours", "n_slots", "records")  # fields of a layout that only a new build changes


@dataclass(frozen=True)
class SealedMatch:
    """An item near a query."""

    position: int
    score: float  #: the cosine with the question in the space of codes, up to quantisation and noise
    record: bytes | None = None  #: if one was fetched


@dataclass(frozen=True, eq=False)
class SealedQuestion:
    """A question: the bytes to send, and the secrets that decrypt its answer. Send it once."""

    data: bytes
    pad: Pad = field(repr=False)
    positions: tuple[int, ...] = field(repr=False)
    version: int = field(repr=False)


class SealedClient:
    """Asks a :class:`SealedIndex` encrypted questions, which reveal nothing about the query.

    Every question has the same length and asks all colours. The messages never depend on decrypted values: the question
    for records is encrypted too, and always asks for the same number of records. A server that returns a wrong answer
    causes wrong matches, which the client cannot detect, and learns nothing.

    Nearly all work can be done in advance (:meth:`prepare`). Prepared work is used once, by one thread of one process:
    forks, copies and pickles of a client start without it.

    Parameters
    ----------
    layout : bytes
        The frame of the index's public layout.
    hints : sequence of bytes
        The frames of its hints.
    source : Source, optional
        The operating system's cryptographic generator by default. Questions from a seed are not secret.

    Examples
    --------
    >>> import numpy as np
    >>> from nearveil.sealed import SealedIndex
    >>> rows = np.random.default_rng(0).normal(size=(100, 8))
    >>> index = SealedIndex.build(rows)
    >>> client = SealedClient(index.layout.to_bytes(), index.get_hints())
    >>> question = client.ask(rows[3])
    >>> matches = client.read_scores(question, index.answer(question.data), 1)
    >>> index.get_item(matches[0].position)
    3
    """

    _encrypt_zeros = staticmethod(encrypt_zeros)  # the audit replaces it by weaker encryptions

    def __init__(self, layout: bytes, hints: Sequence[bytes], *, source: Source | None = None) -> None:
        self._source = secure_source() if source is None else source
        self.layout = Layout.from_bytes(layout)
        self._hints = {
            part: np.zeros((n_rows, get_parameters(part).dimension), f"<u{2 if HINT_BYTES[part] == 2 else 4}")
            for part, n_rows in self._count_hint_rows().items()
        }
        self._load_hints(hints, whole=True)
        self._stocks = {part: PadStock() for part in self._hints}

    def _count_hint_rows(self) -> dict[str, int]:
        counts = {"scores": self.layout.n_colours * self.layout.n_slots}
        if self.layout.records is not None:
            counts["records"] = self.layout.records.n_rows
        return counts

    def can_update(self, layout: bytes) -> bool:
        """Return whether a newer layout is of the same index, so that the changed rows of hints are enough."""
        fresh = Layout.from_bytes(layout)
        return all(getattr(fresh, name) == getattr(self.layout, name) for name in _FIXED)

    def update(self, layout: bytes, hints: Sequence[bytes]) -> "SealedClient":
        """Return a client for a newer layout of the same index, from the changed rows of its hints.

        This client can still read the answers to its own questions.
        """
        if not self.can_update(layout):
            raise SealedError("the index was rebuilt: make a client from its whole layout and hints")
        fresh = copy(self)
        fresh.layout = Layout.from_bytes(layout)
        fresh._hints = {part: hint.copy() for part, hint in self._hints.items()}
        fresh._stocks = {part: PadStock() for part in self._hints}  # pads are made for one hint
        fresh._load_hints(hints, whole=False)
        return fresh

    def _load_hints(self, hints: Sequence[bytes], *, whole: bool) -> None:
        counts = self._count_hint_rows()
        if len(hints) != len(counts):
            raise SealedError(f"hints must be {len(counts)} frames: of scores, and of records if the index has any")
        for (part, n_rows), data in zip(counts.items(), hints, strict=True):
            hint = Hint.from_bytes(data, part, n_rows)
            if hint.version != self.layout.version or (whole and len(hint.rows) != n_rows):
                raise SealedError("hints must be whole, and of the same version as the layout")
            self._hints[part][hint.rows] = hint.values

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of a question and of the fetch that follows it. It is computational, so epsilon is 0."""
        assumptions = [describe_assumption(SCORES)] + ([describe_assumption(FETCH)] if self.layout.records else [])
        return Guarantee(
            epsilon=0.0,
            delta=0.0,
            protects="query",
            unit="record",
            relation="replace",
            basis=Basis("sealed search", "docs/theory/sealed.md"),
            events=(NoOpDpEvent(),),
            assumptions=tuple(assumptions),
        ).with_source(self._source)

    def prepare(self, n_questions: int = 1) -> None:
        """Prepare pads until the stocks have `n_questions` of scores, and as many of records.

        Any thread may call it at any time. Call it in idle time, and never because of an image: an observer of the
        network sees when a question is late. A question without a prepared pad makes its own.
        """
        check_count(n_questions, "n_questions", 0)
        for part, stock in self._stocks.items():
            stock.fill(n_questions, partial(self._make_pad, part))

    def _make_pad(self, part: str) -> Pad:
        """Return a pad for one question, with new secrets and errors."""
        layout, hint, records = self.layout, self._hints[part], self.layout.records
        n_colours = layout.n_colours
        if part == "scores":
            zeros, secrets = self._encrypt_zeros(SCORES, layout.seed, (n_colours, layout.n_samples), self._source)
            pairs = zip(hint.reshape(n_colours, layout.n_slots, -1), secrets, strict=True)
            return Pad(zeros, np.concatenate([multiply_hint(rows, secret[None]) for rows, secret in pairs]), secrets)
        assert records is not None
        zeros, secrets = self._encrypt_zeros(FETCH, layout.seed, (records.n_fetched, records.n_columns), self._source)
        return Pad(zeros, multiply_hint(hint, secrets), secrets)

    def reserve(self) -> "SealedClient":
        """Return a client with one pad of each part, taken from the stocks of this client or made now.

        Use it for one question if other threads ask questions too: a question that finds the stock empty is late.
        """
        client = copy(self)
        client._stocks = {part: PadStock() for part in self._stocks}
        for part, stock in client._stocks.items():
            stock.fill(1, partial(self._take_pad, part))
        return client

    def _take_pad(self, part: str) -> Pad:
        return self._stocks[part].take() or self._make_pad(part)

    def ask(self, row: ArrayLike, near: ArrayLike | None = None) -> SealedQuestion:
        """Return a question for the scores of items with a row, shape (n_features,), in the cells nearest to `near`.

        By default those nearest to the row itself, scaled to norm one.
        """
        layout = self.layout
        messages, cells = make_messages(layout, row, near)
        pad = self._take_pad("scores")
        first = (np.arange(layout.n_colours) * layout.cells_per_colour + cells) * layout.n_slots
        data = write_question("scores", layout.version, add_messages(SCORES, pad.zeros, messages))
        return SealedQuestion(data, pad, tuple(first.tolist()), layout.version)

    def read_scores(self, question: SealedQuestion, answer: bytes, n_matches: int = 8) -> list[SealedMatch]:
        """Decrypt the scores of an answer; return the best matches, best first; fewer if the cells hold fewer items."""
        layout = self.layout
        self._check_current(question)
        shape = (layout.n_colours, layout.n_slots)
        values = read_answer(answer, "scores", question.version, shape[0] * shape[1])
        raw = centre(values.reshape(shape).astype(np.int64) - question.pad.masks, ANSWER_BITS)
        first = np.array(question.positions)
        filled = np.arange(layout.n_slots) < layout.counts[first // layout.n_slots][:, None]
        best = choose_best(raw, filled, n_matches)
        positions = (first[:, None] + np.arange(layout.n_slots)).ravel()[best]
        unit = 2.0 ** (SCORES.modulus_bits - ANSWER_BITS) / (get_message_scale(layout) * layout.reach)
        slots = zip(positions.tolist(), (raw.ravel()[best] * unit).tolist(), filled.ravel()[best], strict=True)
        return [SealedMatch(position, score) for position, score, is_filled in slots if is_filled]

    def ask_records(self, positions: Sequence[int]) -> SealedQuestion:
        """Return a question for records. It always asks for as many as the layout says; fewer positions are padded."""
        records = self.layout.records
        if records is None:
            raise SealedError("this index has no records: identify matches by their positions")
        n_positions = self.layout.counts.size * self.layout.n_slots
        numbers = [int(position) for position in positions]
        if len(numbers) > records.n_fetched or not all(0 <= number < n_positions for number in numbers):
            raise SealedError(f"positions must be at most {records.n_fetched}, each of a slot of the index")
        padded = numbers + [0] * (records.n_fetched - len(numbers))
        columns = np.array(padded) // records.per_column
        unit = 1 << (FETCH.modulus_bits - BYTE_BITS)
        messages = (np.arange(records.n_columns) == columns[:, None]) * np.int64(unit)
        pad = self._take_pad("records")
        data = write_question("records", self.layout.version, add_messages(FETCH, pad.zeros, messages))
        return SealedQuestion(data, pad, tuple(numbers), self.layout.version)

    def read_records(self, question: SealedQuestion, answer: bytes) -> list[bytes]:
        """Decrypt the records at the positions of a question."""
        layout = self.layout.records
        assert layout is not None
        self._check_current(question)
        values = read_answer(answer, "records", question.version, layout.n_fetched * layout.n_rows)
        columns = values.reshape(layout.n_fetched, -1)
        bits = BYTE_BITS * HINT_BYTES["records"]
        drop, records = bits - BYTE_BITS, []
        padded = *question.positions, *([0] * (layout.n_fetched - len(question.positions)))  # the same work for all
        for position, masks, column in zip(padded, question.pad.masks, columns, strict=True):
            start = position % layout.per_column * layout.width
            rows = slice(start, start + layout.width)
            noisy = (column[rows].astype(np.int64) << (bits - ANSWER_BITS)) - masks[rows]
            entries = ((noisy + (1 << (drop - 1))) >> drop) & 255
            records.append(unpad_record(entries.astype(np.uint8).view(np.int8)))
        return records[: len(question.positions)]

    def search(self, row: ArrayLike, send: Callable[[bytes], bytes], n_matches: int = 8) -> list[SealedMatch]:
        """Ask for scores, then for the records of the best matches; `send` sends a question and returns its answer.

        An index without records gets the first question alone. Number and lengths of the messages are public.
        """
        question, layout = self.ask(row), self.layout.records
        matches = self.read_scores(question, send(question.data), n_matches if layout is None else layout.n_fetched)
        if layout is None:
            return matches
        fetch = self.ask_records([match.position for match in matches])
        records = self.read_records(fetch, send(fetch.data))
        pairs = zip(matches, records, strict=True)
        return [SealedMatch(match.position, match.score, record) for match, record in pairs][:n_matches]

    def _check_current(self, question: SealedQuestion) -> None:
        if question.version != self.layout.version:
            raise SealedError("question was made for an older layout: make a new one")


def choose_best(numbers: Longs, is_filled: NDArray[np.bool_], count: int) -> Longs:
    """Return the positions of the largest filled numbers, largest first; then of others, if there are too few."""
    # The work depends on shapes alone. Sorting is faster if many numbers are equal: a server that leaves the slots of
    # some cells empty would learn from the time which cells were probed.
    keys = np.where(is_filled, numbers, _EMPTY).ravel()
    best = np.empty(min(count, keys.size), np.int64)
    for rank in range(len(best)):
        best[rank] = position = np.argmax(keys)
        keys[position] = _CHOSEN
    return best


def describe_assumption(parameters: LweParameters) -> Assumption:
    """Return the assumption of a set of parameters, for a guarantee."""
    return Assumption(f"{parameters} is hard", parameters.core_svp_bits)


def make_messages(layout: Layout, row: ArrayLike, near: ArrayLike | None = None) -> tuple[Longs, Longs]:
    """Return the plaintext for a row, and the cell of each colour: the row in the columns of its cell, else zeros."""
    # Every finite row has a message for every layout: a refusal would reveal that a server's constants and projection
    # map the row to zero or to infinity. In 64 bits only exact zeros do so.
    with np.errstate(all="ignore"):
        rows = np.asarray(row)[None]
        check_rows(rows, layout.projection.shape[0], normalize=False)
        projection = layout.projection.astype(np.float64)
        vector = scale_to_unit(rows.astype(np.float64))[0] @ projection
        length = float(np.linalg.norm(vector))
        if length == 0:
            vector[0] = length = 1.0
        point = vector if near is None else np.asarray(near, np.float64) @ projection
        cells = choose_cells(point, layout.centroids, layout.n_colours)
        steps = np.rint(vector / length * get_message_scale(layout)).astype(np.int64)
    chosen = np.arange(layout.cells_per_colour) == cells[:, None]
    return (chosen[:, :, None] * steps).reshape(layout.n_colours, -1), cells


def get_message_scale(layout: Layout) -> float:
    """Return the factor of a query of unit length before encryption (M)."""
    return 2.0**SCORES.modulus_bits / (SPAN * layout.reach)
