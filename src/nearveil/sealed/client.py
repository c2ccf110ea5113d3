"""The client's half of sealed search: make encrypted questions, and decrypt their answers."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.metrics import scale_to_unit
from nearveil.privacy.checks import check_count
from nearveil.privacy.guarantee import Assumption, Basis, Guarantee
from nearveil.privacy.noise import Source, secure_source
from nearveil.sealed.accuracy import SPAN
from nearveil.sealed.layout import Layout, SealedError, check_rows, choose_cells
from nearveil.sealed.lwe import Longs, add_messages, encrypt_zeros, remove_masks
from nearveil.sealed.pads import Pad, PadStock, get_process
from nearveil.sealed.parameters import ANSWER_BITS, ENTRY_BITS, LWE, RING
from nearveil.sealed.records import decode_records, find_buckets, match_buckets, place_records, unpad_record
from nearveil.sealed.ring import TokenKey, public_bytes, token_bytes
from nearveil.sealed.wire import read_answer, read_parts, write_parts, write_question
from nearveil.wire.frames import Kind

_EMPTY, _CHOSEN = -(1 << 40), -(1 << 41)  # below every score
_ENTRY = 1 << (LWE.modulus_bits - ENTRY_BITS)  # a step of an entry
_WRAP = RING.plain_modulus << ANSWER_BITS  # a decrypted number is a multiple of Q / _WRAP


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
    #: Of scores: the first position of each probed cell. Of records: those that are fetched, best first.
    positions: tuple[int, ...] = field(repr=False)
    version: int = field(repr=False)
    buckets: tuple[int, ...] = field(repr=False, default=())  # the position that each bucket asks for, or -1


@dataclass(frozen=True, eq=False)
class PadRequest:
    """A request for tokens, and the keys that read them. Send it before any query; a retry sends the same bytes."""

    data: bytes
    process: object = field(repr=False)
    pads: list[tuple[TokenKey, Pad]] = field(repr=False)  # of each stage, without masks


class SealedClient:
    """Asks a :class:`SealedIndex` encrypted questions, which reveal nothing about the query.

    Every question has the same length and asks all colours. The messages never depend on decrypted values: the question
    for records is encrypted too, and always asks every bucket for a record. A server that returns a wrong answer causes
    wrong matches, which the client cannot detect, and learns nothing.

    A question needs pads, which are made before its query is known: the client sends its encrypted secrets, and the
    server returns a token (:meth:`prepare`). Prepared pads are used once, by one thread of one process: forks, copies
    and pickles of a client start without them.

    Parameters
    ----------
    layout : bytes
        The frame of the index's public layout.
    tokens : bytes
        The frame of the public parts of its tokens.
    source : Source, optional
        The operating system's cryptographic generator by default. Questions from a seed are not secret.

    Examples
    --------
    >>> import numpy as np
    >>> from nearveil.sealed import SealedIndex
    >>> rows = np.random.default_rng(0).normal(size=(100, 8))
    >>> index = SealedIndex.build(rows)
    >>> client = SealedClient(index.layout.to_bytes(), index.get_public_tokens())
    >>> client.prepare(1, index.answer)
    >>> question = client.ask(rows[3])
    >>> matches = client.read_scores(question, index.answer(question.data), 1)
    >>> index.get_item(matches[0].position)
    3
    """

    _encrypt_zeros = staticmethod(encrypt_zeros)  # the audit replaces these by weaker encryptions
    _make_key = staticmethod(TokenKey.make)

    def __init__(self, layout: bytes, tokens: bytes, *, source: Source | None = None) -> None:
        self._source = secure_source() if source is None else source
        self.layout = Layout.from_bytes(layout)
        lengths = [public_bytes(stage.secret_rows) for stage in self.layout.stages.values()]
        self._public_tokens = read_parts(tokens, Kind.SEALED_TOKENS, self.layout.version, lengths)
        self._stocks = {part: PadStock() for part in self.layout.stages}

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of a question and of the fetch that follows it. It is computational, so epsilon is 0."""
        return Guarantee(
            epsilon=0.0,
            delta=0.0,
            protects="query",
            unit="record",
            relation="replace",
            basis=Basis("sealed search", "docs/theory/sealed.md"),
            assumptions=(
                Assumption(f"{LWE} is hard", LWE.core_svp_bits),
                Assumption(f"{RING} is hard", RING.core_svp_bits),
                Assumption("its rotation keys are circular secure", RING.core_svp_bits),
            ),
        ).with_source(self._source)

    @property
    def n_prepared(self) -> int:
        """Number of questions with pads."""
        return min(map(len, self._stocks.values()))

    def prepare(self, n_questions: int, send: Callable[[bytes], bytes]) -> None:
        """Prepare pads until there are `n_questions` of each stage; `send` sends a request and returns its token.

        Any thread may call it at any time. Call it in idle time, and never because of an image: an observer of the
        network sees when a question is late.
        """
        check_count(n_questions, "n_questions", 0)
        while self.n_prepared < n_questions:
            request = self.begin_pads()
            self.finish_pads(request, send(request.data))
        for stock in self._stocks.values():  # questions for scores alone leave pads of records
            stock.trim(n_questions)

    def begin_pads(self) -> PadRequest:
        """Return a request for the tokens of one question, with new secrets and errors for each stage."""
        process, seed, pads = get_process(), self.layout.seed, []
        for name, stage in self.layout.stages.items():
            shape = stage.n_groups, stage.n_columns
            zeros, secrets = self._encrypt_zeros(name, seed, shape, stage.n_secrets, self._source)
            masks = np.empty((stage.n_groups, stage.n_rows), np.int64)
            pads.append((self._make_key(name, seed, secrets, self._source), Pad(zeros, masks, secrets)))
        data = write_parts(Kind.SEALED_TOKEN_REQUEST, self.layout.version, [key.request for key, _ in pads])
        return PadRequest(data, process, pads)

    def finish_pads(self, request: PadRequest, token: bytes) -> None:
        """Store the pads of a request, once. Any token of the right size makes pads: nothing in it is checked."""
        stages, version = self.layout.stages, self.layout.version
        rows = [stage.secret_rows for stage in stages.values()]
        parts = read_parts(token, Kind.SEALED_TOKEN, version, [token_bytes(counts) for counts in rows])
        of_stages = zip(stages.items(), request.pads, parts, self._public_tokens, rows, strict=True)
        for (name, stage), (key, pad), part, public, counts in of_stages:
            for k, masks in enumerate(key.read(part, public, counts)):
                pad.masks[k :: stage.n_secrets] = masks.reshape(-1, stage.n_rows)
            if not self._stocks[name].add(pad, request.process):
                raise SealedError("the request was made by another process: make a new one")

    def reserve(self) -> "SealedClient":
        """Return a client with one pad of each stage, taken from the stocks of this client.

        Use it for one question if other threads ask questions too.
        """
        client, process = copy(self), get_process()
        client._stocks = {part: PadStock() for part in self._stocks}
        for part, stock in client._stocks.items():
            stock.add(self._take_pad(part), process)
        return client

    def _reserve_or_request(self, send: Callable[[bytes], bytes]) -> "SealedClient":
        while True:
            if not self.n_prepared:
                request = self.begin_pads()
                self.finish_pads(request, send(request.data))
            with suppress(SealedError):  # another thread took a pad meanwhile
                return self.reserve()

    def _take_pad(self, part: str) -> Pad:
        pad = self._stocks[part].take()
        if pad is None:
            raise SealedError(f"No pad of {part} is prepared; call prepare() before every question.")
        return pad

    def ask(self, row: ArrayLike, near: ArrayLike | None = None) -> SealedQuestion:
        """Return a question for the scores of items with a row, shape (n_features,), in the cells nearest to `near`.

        By default those nearest to the row itself, scaled to norm one.
        """
        layout = self.layout
        pad = self._take_pad("scores")
        messages, cells = make_messages(layout, row, near)
        first = (np.arange(layout.n_colours) * layout.cells_per_colour + cells) * layout.n_slots
        return self._make_question("scores", pad, messages, first)

    def _make_question(
        self, part: str, pad: Pad, messages: Longs, positions: NDArray[np.integer], buckets: Sequence[int] = ()
    ) -> SealedQuestion:
        bits, version = self.layout.stages[part].question_bits, self.layout.version
        data = write_question(part, version, add_messages(pad.zeros, messages, bits), bits)
        return SealedQuestion(data, pad, tuple(positions.tolist()), version, tuple(buckets))

    def read_scores(self, question: SealedQuestion, answer: bytes, n_matches: int = 8) -> list[SealedMatch]:
        """Decrypt the scores of an answer; return the best matches, best first; fewer if the cells hold fewer items."""
        layout = self.layout
        raw = self._decrypt("scores", question, answer)
        raw = (raw + _WRAP // 2) % _WRAP - _WRAP // 2
        first = np.array(question.positions)
        filled = np.arange(layout.n_slots) < layout.counts[first // layout.n_slots][:, None]
        best = choose_best(raw, filled, n_matches)
        positions = (first[:, None] + np.arange(layout.n_slots)).ravel()[best]
        scores = raw.ravel()[best] * (SPAN / _WRAP)
        slots = zip(positions.tolist(), scores.tolist(), filled.ravel()[best], strict=True)
        return [SealedMatch(position, score) for position, score, is_filled in slots if is_filled]

    def _decrypt(self, part: str, question: SealedQuestion, answer: bytes) -> Longs:
        """Return the numbers of an answer without their masks, shape (groups, rows)."""
        if question.version != self.layout.version:
            raise SealedError("question was made for an older layout: make a new one")
        masks = question.pad.masks
        values = read_answer(answer, part, question.version, masks.size)
        return remove_masks(values.reshape(masks.shape), masks)

    def ask_records(self, positions: Sequence[int]) -> SealedQuestion:
        """Return a question for records at positions, best first, as many as can be fetched together.

        It always asks every bucket for one column. Each position is in two buckets; positions that find both taken by
        better ones are left out.
        """
        records = self.layout.records
        if records is None:
            raise SealedError("this index has no records: identify matches by their positions")
        pad = self._take_pad("records")
        n_positions = self.layout.counts.size * self.layout.n_slots
        numbers = [int(position) for position in positions]
        if len(numbers) > records.n_candidates or not all(0 <= number < n_positions for number in numbers):
            raise SealedError(f"positions must be at most {records.n_candidates}, each of a slot of the index")
        padded = np.array(numbers + [0] * (records.n_candidates - len(numbers)))  # the same work for all
        blocks, columns, _ = place_records(records, self.layout.seed, padded)
        buckets = find_buckets(records, blocks)
        is_real = np.arange(len(padded)) < len(numbers)
        owners = np.array(match_buckets(buckets, is_real.tolist(), records.n_buckets))
        numbered = np.arange(records.n_buckets)
        along = buckets.sum(axis=1)[owners] - numbered - np.where(numbered < records.side, records.side, 0)
        chosen = np.where(owners < 0, -1, along * records.n_columns + columns[owners])
        messages = (np.arange(records.side * records.n_columns) == chosen[:, None]) * np.int64(_ENTRY)
        fetched = padded[np.sort(owners[owners >= 0])]
        by_bucket = np.where(owners < 0, -1, padded[owners])
        return self._make_question("records", pad, messages, fetched, by_bucket.tolist())

    def read_records(self, question: SealedQuestion, answer: bytes) -> list[bytes]:
        """Decrypt the records at the positions of a question."""
        layout = self.layout.records
        assert layout is not None
        raw = self._decrypt("records", question, answer)
        buckets = np.maximum(question.buckets, 0)  # the same work for idle buckets
        _, _, numbers = place_records(layout, self.layout.seed, buckets)
        columns = raw.reshape(layout.n_buckets, layout.per_column, -1)[np.arange(layout.n_buckets), numbers]
        entries = ((columns << ENTRY_BITS) + _WRAP // 2) // _WRAP
        padded = decode_records(layout, self.layout.seed, buckets, entries)
        records = dict(zip(question.buckets, map(unpad_record, padded), strict=True))
        return [records[position] for position in question.positions]

    def search(self, row: ArrayLike, send: Callable[[bytes], bytes], n_matches: int = 8) -> list[SealedMatch]:
        """Ask for scores, then for the records of the best matches; `send` sends a question and returns its answer.

        An index without records gets the first question alone. Number and lengths of the messages are public. A client
        without a pad requests one first. Several threads may search at the same time.
        """
        client = self._reserve_or_request(send)
        question, records = client.ask(row), self.layout.records
        matches = self.read_scores(question, send(question.data), records.n_candidates if records else n_matches)
        if records is None:
            return matches
        fetch = client.ask_records([match.position for match in matches])
        fetched = dict(zip(fetch.positions, self.read_records(fetch, send(fetch.data)), strict=True))
        matches = [replace(match, record=fetched[match.position]) for match in matches if match.position in fetched]
        return matches[:n_matches]


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
    return 2.0**LWE.modulus_bits / (SPAN * layout.reach)
