"""The client's half of sealed search: questions that tell nothing, and what answers to them say."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from dp_accounting import NoOpDpEvent
from numpy.typing import ArrayLike, NDArray

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
_KEPT = ("seed", "n_colours", "n_slots", "records")  # of a layout, as long as an index is not built anew


@dataclass(frozen=True)
class SealedMatch:
    """An item that was found: where it lies, how near it is, and its record where one was fetched.

    `score`: The cosine, up to quantisation and noise, between the question and the item in the space of codes.
    """

    position: int
    score: float
    record: bytes | None = None


@dataclass(frozen=True, eq=False)
class SealedQuestion:
    """A question: the bytes to send, and what reads its answer. Ask it once."""

    data: bytes
    pad: Pad = field(repr=False)
    positions: tuple[int, ...] = field(repr=False)
    version: int = field(repr=False)


class SealedClient:
    """Asks a :class:`SealedIndex` without telling it anything.

    Every question has the same length and asks all colours. What is sent never depends on what was decrypted: the
    question for records is encrypted too, and asks for the same number whatever was found. A server that answers
    wrongly gets wrong matches believed, and learns nothing.

    Nearly all work of a question can be done before it is known (:meth:`prepare`). What is prepared is used once, by
    one thread of one process: forks, copies and pickles of a client begin without.

    Parameters
    ----------
    layout : bytes
        The index's public layout, as it sent it.
    hints : sequence of bytes
        Its hints.
    source : Source, optional
        The operating system's cryptographic generator by default. What a seed foretells is not sealed.

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

    _encrypt_zeros = staticmethod(encrypt_zeros)  # an audit puts weaker ones here

    def __init__(self, layout: bytes, hints: Sequence[bytes], *, source: Source | None = None) -> None:
        self._source = secure_source() if source is None else source
        self.layout = Layout.from_bytes(layout)
        self._hints = {
            part: np.zeros((n_rows, get_parameters(part).dimension), f"<u{2 if HINT_BYTES[part] == 2 else 4}")
            for part, n_rows in self._count_hint_rows().items()
        }
        self._take(hints, whole=True)
        self._stocks = {part: PadStock() for part in self._hints}

    def _count_hint_rows(self) -> dict[str, int]:
        counts = {"scores": self.layout.n_colours * self.layout.n_slots}
        if self.layout.records is not None:
            counts["records"] = self.layout.records.n_rows
        return counts

    def can_update(self, layout: bytes) -> bool:
        """Return whether a newer layout is of the same index, so that the rows of hints that changed are enough."""
        fresh = Layout.from_bytes(layout)
        return all(getattr(fresh, name) == getattr(self.layout, name) for name in _KEPT)

    def update(self, layout: bytes, hints: Sequence[bytes]) -> "SealedClient":
        """Return a client of a newer layout of the same index, given the rows of its hints that changed since this one.

        This one goes on to read answers to its own questions.
        """
        if not self.can_update(layout):
            raise SealedError("the index was built anew: make a client of all of its layout and hints")
        fresh = copy(self)
        fresh.layout = Layout.from_bytes(layout)
        fresh._hints = {part: held.copy() for part, held in self._hints.items()}
        fresh._stocks = {part: PadStock() for part in self._hints}  # what is prepared belongs to a hint
        fresh._take(hints, whole=False)
        return fresh

    def _take(self, hints: Sequence[bytes], *, whole: bool) -> None:
        counts = self._count_hint_rows()
        if len(hints) != len(counts):
            raise SealedError(f"hints must be {len(counts)} frames: of scores, and of records where there are any")
        for (part, n_rows), data in zip(counts.items(), hints, strict=True):
            found = Hint.from_bytes(data, part, n_rows)
            if found.version != self.layout.version or (whole and len(found.rows) != n_rows):
                raise SealedError("hints must be whole, and of the same version as the layout")
            self._hints[part][found.rows] = found.values

    @property
    def guarantee(self) -> Guarantee:
        """What is guaranteed about a question and the fetch that follows it: computational, so epsilon is 0."""
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
        """Do the work of the next questions that does not depend on them, until so many are ready, records included.

        Any thread may do it at any time. Do it in idle time, and never because of an image: who watches sees when
        questions are late. A question that finds nothing ready does the same work itself.
        """
        check_count(n_questions, "n_questions", 0)
        for part, stock in self._stocks.items():
            stock.fill(n_questions, partial(self._make_pad, part))

    def _make_pad(self, part: str) -> Pad:
        """Return a pad for a question, with secrets and errors of its own."""
        layout, hint, kept = self.layout, self._hints[part], self.layout.records
        n_colours = layout.n_colours
        if part == "scores":
            zeros, secrets = self._encrypt_zeros(SCORES, layout.seed, (n_colours, layout.n_samples), self._source)
            pairs = zip(hint.reshape(n_colours, layout.n_slots, -1), secrets, strict=True)
            return Pad(zeros, np.concatenate([multiply_hint(own, one[None]) for own, one in pairs]), secrets)
        assert kept is not None
        zeros, secrets = self._encrypt_zeros(FETCH, layout.seed, (kept.n_fetched, kept.n_columns), self._source)
        return Pad(zeros, multiply_hint(hint, secrets), secrets)

    def reserve(self) -> "SealedClient":
        """Return a client with one prepared question of its own, from this one's stock, or made now.

        Use it for one question, where other threads ask too: a question that finds its stock empty is late.
        """
        own = copy(self)
        own._stocks = {part: PadStock() for part in self._stocks}
        for part, stock in own._stocks.items():
            stock.fill(1, partial(self._take_pad, part))
        return own

    def _take_pad(self, part: str) -> Pad:
        return self._stocks[part].take() or self._make_pad(part)

    def ask(self, row: ArrayLike) -> SealedQuestion:
        """Return a question for the scores of the items near a row, shape (n_features,)."""
        layout = self.layout
        messages, cells = make_messages(layout, row)
        pad = self._take_pad("scores")
        first = (np.arange(layout.n_colours) * layout.cells_per_colour + cells) * layout.n_slots
        data = write_question("scores", layout.version, add_messages(SCORES, pad.zeros, messages))
        return SealedQuestion(data, pad, tuple(first.tolist()), layout.version)

    def read_scores(self, question: SealedQuestion, answer: bytes, n_matches: int = 8) -> list[SealedMatch]:
        """Return the best matches that an answer tells of, best first; fewer where the cells hold fewer items."""
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
        found = zip(positions.tolist(), (raw.ravel()[best] * unit).tolist(), filled.ravel()[best], strict=True)
        return [SealedMatch(position, score) for position, score, is_item in found if is_item]

    def ask_records(self, positions: Sequence[int]) -> SealedQuestion:
        """Return a question for records; as many as the layout says are asked for, whatever is given."""
        kept = self.layout.records
        if kept is None:
            raise SealedError("this index has no records: matches are known by their positions")
        n_positions = self.layout.counts.size * self.layout.n_slots
        wanted = [int(position) for position in positions]
        if len(wanted) > kept.n_fetched or not all(0 <= position < n_positions for position in wanted):
            raise SealedError(f"positions must be at most {kept.n_fetched}, each of a slot of the index")
        padded = wanted + [0] * (kept.n_fetched - len(wanted))
        columns = np.array(padded) // kept.per_column
        unit = 1 << (FETCH.modulus_bits - BYTE_BITS)
        messages = (np.arange(kept.n_columns) == columns[:, None]) * np.int64(unit)
        pad = self._take_pad("records")
        data = write_question("records", self.layout.version, add_messages(FETCH, pad.zeros, messages))
        return SealedQuestion(data, pad, tuple(wanted), self.layout.version)

    def read_records(self, question: SealedQuestion, answer: bytes) -> list[bytes]:
        """Return the records of the positions that were asked for."""
        kept = self.layout.records
        assert kept is not None
        self._check_current(question)
        values = read_answer(answer, "records", question.version, kept.n_fetched * kept.n_rows)
        columns = values.reshape(kept.n_fetched, -1)
        bits = BYTE_BITS * HINT_BYTES["records"]
        drop, found = bits - BYTE_BITS, []
        padded = *question.positions, *([0] * (kept.n_fetched - len(question.positions)))  # the same work for all
        for position, masks, column in zip(padded, question.pad.masks, columns, strict=True):
            place = position % kept.per_column * kept.width
            rows = slice(place, place + kept.width)
            noisy = (column[rows].astype(np.int64) << (bits - ANSWER_BITS)) - masks[rows]
            entries = ((noisy + (1 << (drop - 1))) >> drop) & 255
            found.append(unpad_record(entries.astype(np.uint8).view(np.int8)))
        return found[: len(question.positions)]

    def search(self, row: ArrayLike, send: Callable[[bytes], bytes], n_matches: int = 8) -> list[SealedMatch]:
        """Ask for scores, then for the records of the best, through `send`, which takes a question to the index.

        Where there are no records, the second is left out: one or two messages, of lengths that everybody knows.
        """
        question = self.ask(row)
        kept = self.layout.records
        found = self.read_scores(question, send(question.data), n_matches if kept is None else kept.n_fetched)
        if kept is None:
            return found
        fetch = self.ask_records([match.position for match in found])
        records = self.read_records(fetch, send(fetch.data))
        return [SealedMatch(match.position, match.score, record) for match, record in zip(found, records, strict=True)][
            :n_matches
        ]

    def _check_current(self, question: SealedQuestion) -> None:
        if question.version != self.layout.version:
            raise SealedError("question must be of the layout that the client has now: ask again")


def choose_best(numbers: Longs, is_filled: NDArray[np.bool_], count: int) -> Longs:
    """Return the places of the largest filled numbers, largest first; then of others, where there are too few.

    The work depends on shapes alone. Sorting is faster where many numbers are equal: a server that leaves the slots of
    some cells empty would see by the time which cells were looked into.
    """
    keys = np.where(is_filled, numbers, _EMPTY).ravel()
    best = np.empty(min(count, keys.size), np.int64)
    for at in range(len(best)):
        best[at] = place = np.argmax(keys)
        keys[place] = _CHOSEN
    return best


def describe_assumption(parameters: LweParameters) -> Assumption:
    """Return what a set of parameters assumes, for a guarantee."""
    return Assumption(f"{parameters} is hard", parameters.core_svp_bits)


def make_messages(layout: Layout, row: ArrayLike) -> tuple[Longs, Longs]:
    """Return what is encrypted for a row: for every colour the row in the place of a cell, and which cell that is.

    Every row has a message, whatever the layout: a refusal would tell that a projection sends the row to zero, or
    beyond all numbers. In 64 bits only exact zeros do so.
    """
    with np.errstate(all="ignore"):
        unit = check_rows(np.asarray(row)[None], layout.projection.shape[0])[0]
        vector = unit.astype(np.float64) @ layout.projection.astype(np.float64)
        length = float(np.linalg.norm(vector))
        if length == 0:
            vector[0] = length = 1.0
        cells = choose_cells(vector, layout.centroids, layout.n_colours)
        steps = np.rint(vector / length * get_message_scale(layout)).astype(np.int64)
    chosen = np.arange(layout.cells_per_colour) == cells[:, None]
    return (chosen[:, :, None] * steps).reshape(layout.n_colours, -1), cells


def get_message_scale(layout: Layout) -> float:
    """Return by how much a query of unit length is multiplied before it is encrypted (M)."""
    return 2.0**SCORES.modulus_bits / (SPAN * layout.reach)
