"""Sealed questions over a transport: two requests of fixed length that are independent of the image."""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearveil.client.errors import QuestionError, ReplyError
from nearveil.client.home import HomeCopies
from nearveil.client.questions import NearestQuestion, Outcome, limit_count, make_matches
from nearveil.client.results import Nearest
from nearveil.client.session import Session, Traffic
from nearveil.client.timing import private_step, scoring_period
from nearveil.client.transport import LONGEST_WORDS, Request, make_printable, read_body, read_etag
from nearveil.errors import NearveilError
from nearveil.gallery.answers import LONGEST_ID, LONGEST_NAME, ItemDetails
from nearveil.gallery.codes import ID_BYTES
from nearveil.progress import start_stage
from nearveil.wire.client import QueryRows, encode_queries
from nearveil.wire.frames import WireError
from nearveil.wire.messages import PublicPart
from nearveil.wire.schema import GalleryInfo

if TYPE_CHECKING:
    from nearveil.sealed import SealedClient
    from nearveil.sealed.client import SealedQuestion
    from nearveil.sealed.layout import Layout

_BASE = 0.015  # seconds of any private step
_NUMBER = 8e-8  # seconds for each number that is sent or read: it takes 13 to 35e-9
_SLOT = 1.5e-7  # seconds for each score that is read
_SELECT = 3e-9  # seconds for each score and each match that is selected
_MATCHED = 2e-6  # seconds for each match and each bucket that it may be fetched from
_PROJECTED = 5e-8  # seconds for each number of the projection and the centroids: it takes 5 to 15e-9
_RECORD = 5e-5  # seconds for each record, besides its bytes
_UTF8 = 4  # bytes of a character, at most
_MOST_TEXT = _UTF8 * (LONGEST_NAME + LONGEST_ID) + 1  # bytes of a name, a zero and the owner's id
_MOST_TOGETHER = 16  # questions that are sent together
_TOKENS_TOGETHER = 4  # requests for tokens that are sent together: a server's pass has as many
_MORE = 1 / 4  # of the seconds for a question, for each one after the first: it takes 1/8
_MAX_CACHED = 4  # galleries with sealed clients
_PAUSE = 0.2  # seconds from a question until the next one is prepared: a client that is closed before prepares nothing


class CachedSeal:
    """The sealed client of a gallery, the ETag of its layout, and the timer and task that prepare the next question."""

    def __init__(self, etag: str, client: "SealedClient") -> None:
        self.etag, self.client = etag, client
        self.timer: asyncio.TimerHandle | None = None
        self.preparing: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # held while pads are made: nobody takes those of another question
        self._token_traffic = 0, 0  # bytes of a request for tokens and of its reply, the same for all

    async def prepare(self, session: Session, gallery: str, count: int = 1) -> None:
        """Wait until `count` questions are ready. No image plays a part, so the time is not padded."""
        async with self._lock:
            await self._make_pads(session, gallery, count)

    async def reserve(self, session: Session, gallery: str, traffics: Sequence[Traffic]) -> "list[SealedClient]":
        """Return a client with pads for each question; make those that are missing."""
        self._stop_timer()
        async with self._lock:
            await self._make_pads(session, gallery, len(traffics))
            for traffic in traffics:  # tokens count for the questions that they are used for
                traffic.sent += self._token_traffic[0]
                traffic.received += self._token_traffic[1]
            return [self.client.reserve() for _ in traffics]

    async def _make_pads(self, session: Session, gallery: str, count: int) -> None:
        """Request tokens until there are pads for `count` questions."""
        client = self.client
        while (missing := count - client.n_prepared) > 0:
            start_stage("Preparing sealed queries")
            made = [await asyncio.to_thread(client.begin_pads) for _ in range(min(missing, _TOKENS_TOGETHER))]
            requests = [Request("token", gallery, pads.data, secrets.token_hex(16)) for pads in made]
            tokens = await asyncio.gather(*(session.fetch(request, Traffic()) for request in requests))
            for pads, token in zip(made, tokens, strict=True):
                await asyncio.to_thread(_read, client.finish_pads, pads, token)
                self._token_traffic = len(pads.data), len(token)

    async def finish(self) -> None:
        """Prepare nothing more; wait for the running preparation."""
        self._stop_timer()
        if self.preparing is not None and not self.preparing.done():
            await asyncio.wait([self.preparing])

    def prepare_next(self, session: Session, gallery: str) -> None:
        """Prepare a question after a pause. If that fails, the next question makes its pads itself."""

        async def prepare() -> None:
            with suppress(NearveilError):
                await self.prepare(session, gallery)

        def start() -> None:
            if self.preparing is None or self.preparing.done():
                self.preparing = asyncio.create_task(prepare())

        self._stop_timer()
        self.timer = asyncio.get_running_loop().call_later(_PAUSE, start)

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


async def prepare_sealed(
    session: Session, count: int, gallery: str | None, cache: dict[str, CachedSeal], copies: HomeCopies
) -> None:
    """Fetch the layout of a gallery, and prepare questions."""
    info = await session.find_gallery(gallery, "open")
    _check_offered(info, "gallery")
    await (await _fetch_seal(session, info, cache, copies, Traffic())).prepare(session, info.name, count)


async def ask_sealed(
    session: Session, question: NearestQuestion, cache: dict[str, CachedSeal], copies: HomeCopies
) -> Outcome:
    """Find the items nearest to each query by two encrypted questions."""
    _check_question(question)
    traffic, results = Traffic(last_reply_at=session.clock.now()), list[Nearest]()
    info, rows = await session.prepare_features(question.queries, question.gallery)
    _check_offered(info, "by")
    public = await session.fetch_map(info, None, traffic)
    for start in range(0, len(rows), _MOST_TOGETHER):
        try:
            batch = rows[start : start + _MOST_TOGETHER]
            seal = await _fetch_seal(session, info, cache, copies, traffic)
            results += await _ask_together(session, info, public, np.stack(batch), question.k, seal, traffic)
        except Exception as error:
            return Outcome(results, error)
        traffic = Traffic()
    return Outcome(results)


async def _ask_together(
    session: Session,
    info: GalleryInfo,
    public: PublicPart,
    rows: NDArray[Any],
    k: int | None,
    seal: CachedSeal,
    traffic: Traffic,
) -> list[Nearest]:
    """Ask two encrypted questions about each row: prepare, ask for scores, ask for records, rank."""
    # Nothing is paid. The lengths of both questions are fixed, and each private step ends at a public deadline.
    layout = seal.client.layout
    if layout.records is None or layout.projection.shape[0] != public.space.width:
        raise ReplyError("The gallery's layout has other features than the gallery")
    # Two records of one bucket are not fetched together: half as many as are fetched are the nearest.
    count = limit_count(k, min(layout.records.n_buckets // 2, int(layout.counts.sum())), "a sealed answer")
    periods, traffics = sealed_periods(layout, public, len(rows)), [traffic, *(Traffic() for _ in rows[1:])]
    clients = await seal.reserve(session, info.name, traffics)
    async with private_step(session, session.clock.now(), periods.question):
        query = await asyncio.to_thread(encode_queries, public, rows, "query:")
        points = zip(clients, query.queries, public.space.make_probes(query.encoded), strict=True)
        scores = await asyncio.to_thread(lambda: [client.ask(row, near) for client, row, near in points])
    answers = await _send_all(session, info, scores, traffics)
    async with private_step(session, traffic.last_reply_at, periods.choice):
        fetches = await asyncio.to_thread(lambda: [*map(_choose_records, clients, scores, answers)])
    answers = await _send_all(session, info, fetches, traffics)
    async with private_step(session, traffic.last_reply_at, periods.ranking):
        queries = (QueryRows(*(part[number : number + 1] for part in query)) for number in range(len(rows)))
        pairs = zip(scores, fetches, strict=True)
        arguments = (clients, repeat(public), queries, pairs, answers, repeat(count), traffics)
        results = await asyncio.to_thread(lambda: [*map(_rank, *arguments)])
    seal.prepare_next(session, info.name)
    return results


def _check_question(question: NearestQuestion) -> None:
    """Refuse options that a sealed question does not have."""
    for name in ("thumbnails", "originals"):
        if getattr(question, name):
            raise QuestionError(name, "a sealed query fetches no images: leave it out, or pass an epsilon")
    if question.where is not None:
        raise QuestionError(
            "where",
            "a sealed query fetches no metadata: leave it out, fetch a copy with client.sync(), or pass an epsilon",
        )


class SealedPeriods(NamedTuple):
    """Seconds of the three private steps of a sealed question."""

    question: float
    choice: float
    ranking: float


def sealed_periods(layout: "Layout", public: PublicPart, questions: int = 1) -> SealedPeriods:
    """Return the seconds of each private step, from public sizes and the number of questions."""
    records = layout.records
    assert records is not None
    n_features, fetched, slots = public.space.width, records.n_buckets, layout.n_colours * layout.n_slots
    projecting = layout.dimension * (n_features + len(layout.centroids))
    candidates, sent = records.n_candidates, fetched * records.stage.n_columns
    seconds = (
        _NUMBER * layout.n_colours * layout.n_samples + _PROJECTED * projecting,
        slots * (_SLOT + _SELECT * candidates) + _MATCHED * candidates * fetched + _NUMBER * sent,
        fetched * (_RECORD + _NUMBER * (records.n_rows + public.table.width))
        + scoring_period(public.table, n_features, fetched),
    )
    return SealedPeriods(*(_BASE + (1 + _MORE * (questions - 1)) * work for work in seconds))


def _check_offered(info: GalleryInfo, argument: str) -> None:
    if "sealed" not in info.offers:
        raise QuestionError(argument, f"{info.name} offers no sealed queries: query it by messages, or in a local copy")


async def _fetch_seal(
    session: Session, info: GalleryInfo, cache: dict[str, CachedSeal], copies: HomeCopies, traffic: Traffic
) -> CachedSeal:
    """Return the client for the current state of a gallery. Cached parts are not sent again."""
    # The layout is public and is kept beside local copies. Tokens are not: each is used once.
    from nearveil.sealed import SealedClient, SealedError

    cached = cache.get(info.name)
    start_stage("Downloading the sealed layout")
    etag, stored = ("", b"") if cached or not session.pad_timing else copies.read_layout(info.name)
    response = await session.send(Request("layout", info.name, etag=cached.etag if cached else etag), traffic)
    if response.status == 304 and cached is not None:
        return cached
    is_stored = response.status == 304 and etag != ""
    layout = stored if is_stored else read_body(response)
    if session.pad_timing and not is_stored:
        copies.write_layout(info.name, layout)
    try:
        tokens = await session.fetch(Request("tokens", info.name), traffic)
        client = await asyncio.to_thread(SealedClient, layout, tokens)
    except (SealedError, WireError) as error:
        raise ReplyError(f"the gallery's layout cannot be used, or it has changed just now: {error}") from None
    while len(cache) >= _MAX_CACHED:
        cache.pop(next(iter(cache)))
    cache[info.name] = seal = CachedSeal(etag if is_stored else read_etag(response), client)
    return seal


async def _send_all(
    session: Session, info: GalleryInfo, questions: "Sequence[SealedQuestion]", traffics: Sequence[Traffic]
) -> list[bytes]:
    """Send questions, all at the same time: a server answers those that wait in one pass. Return the answers."""
    # The first of `traffics` notes when the last answer came.
    requests = [Request("sealed", info.name, question.data, secrets.token_hex(16)) for question in questions]
    answers = await asyncio.gather(*map(session.fetch, requests, traffics))
    traffics[0].last_reply_at = max(traffic.last_reply_at for traffic in traffics)
    return answers


def _read(decode: Any, *arguments: Any) -> Any:
    """Decode an answer; report errors as the server's."""
    from nearveil.sealed import SealedError

    try:
        return decode(*arguments)
    except (SealedError, WireError) as error:
        raise ReplyError(f"The server's answer cannot be read: {error}") from None


def _choose_records(client: "SealedClient", scores: "SealedQuestion", answer: bytes) -> "SealedQuestion":
    """Decode the scores, and return the question for the best records: one of every bucket."""
    assert client.layout.records is not None
    matches = _read(client.read_scores, scores, answer, client.layout.records.n_candidates)
    return client.ask_records([match.position for match in matches])


def _rank(
    client: "SealedClient",
    public: PublicPart,
    query: QueryRows,
    questions: tuple["SealedQuestion", "SealedQuestion"],
    reply: bytes,
    count: int,
    traffic: Traffic,
) -> Nearest:
    """Decode the records and rank them by their codes."""
    # A hostile server chooses records: all are scored, also repeated ids and the padding of a short fetch, and a record
    # that is too short is padded with zeros. An error, or less work, would reveal the question.
    layout, (scores, fetch) = client.layout, questions
    assert layout.records is not None
    records = _read(client.read_records, fetch, reply)
    records += [b""] * (layout.records.n_buckets - len(records))
    width = public.table.width
    padded = [record.ljust(ID_BYTES + width, b"\0") for record in records]
    codes = np.stack([np.frombuffer(record, np.uint8, width, ID_BYTES) for record in padded])
    with np.errstate(all="ignore"):  # a hostile table may hold numbers of any size
        scored = np.nan_to_num(public.table.scores(query.queries, codes)[0], nan=float(np.finfo(np.float32).min))
        values = public.space.measure(query.encoded, scored[None])[0]
    start = ID_BYTES + width
    details = [_decode_text(record[start : start + _MOST_TEXT]) for record in padded]
    ids = np.array([int.from_bytes(record[:ID_BYTES], "little") for record in padded], np.int64)
    n_records = len(fetch.positions)  # the rest is padding of idle buckets
    _, first = np.unique(ids[: max(n_records, 1)], return_index=True)
    best = first[np.argsort(-scored[first], kind="stable")[: min(count, n_records)]]
    return Nearest(
        matches=make_matches(
            ids[best], values[best], [details[position] for position in best.tolist()], metric=public.space.metric
        ),
        way="sealed",
        metric=public.space.metric,
        code_recall=public.code_recall,
        guarantee=client.guarantee,
        n_candidates=int(layout.counts[np.array(scores.positions) // layout.n_slots].sum()),
        bytes_sent=traffic.sent,
        bytes_received=traffic.received,
        names={int(ids[position]): details[position].name for position in first.tolist()},
        sealed=(scores.data, fetch.data),
    )


def _decode_text(text: bytes) -> ItemDetails:
    """Decode the name and the owner's id of any record, at most a few kilobytes of it."""
    # No other thread runs meanwhile, so a long text would delay other questions.
    name, _, external_id = text.partition(b"\0")
    return ItemDetails(
        make_printable(name[: _UTF8 * LONGEST_WORDS].decode(errors="replace")),
        external_id[: _UTF8 * LONGEST_ID].decode(errors="replace")[:LONGEST_ID] or None,
    )
