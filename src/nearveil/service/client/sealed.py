"""Sealed questions over a transport: two requests of fixed length, which tell nothing of the image."""

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearveil.frames import DEFAULT_LIMITS, HEADER_BYTES, WireError
from nearveil.gallery.answers import ID_BYTES, LONGEST_ID, Answer, ItemDetails
from nearveil.protocol.client import Found, PublicPart
from nearveil.protocol.home import center_rows
from nearveil.service.client.errors import QuestionError, ReplyError
from nearveil.service.client.home import NO_COPY
from nearveil.service.client.questions import NearestQuestion, Session, count_matches
from nearveil.service.client.results import Match, Nearest
from nearveil.service.client.transport import Request, Tally, make_printable, make_refusal, read_etag, read_frame
from nearveil.service.schema import GalleryInfo

if TYPE_CHECKING:
    from nearveil.sealed import SealedClient

_NUMBER = 8e-8  # seconds of private work for each number that is sent or read: it takes 13 to 35e-9
_SLOT = 1.5e-7  # seconds for each score that is read
_LOOK = 3e-9  # seconds for each score, for each of the best that is chosen
_LEAST = 0.015  # seconds of private work
_KEPT = 4  # galleries whose hints are kept


@dataclass
class KeptSeal:
    """The sealed client of a gallery, the tag of the layout that it has, and what prepares its next question."""

    etag: str
    client: "SealedClient"
    preparing: asyncio.Task[None] | None = None

    async def prepare(self, count: int = 1) -> None:
        """Wait until so many questions are ready. No image plays a part: this may take as long as it takes."""
        await self.finish()
        await asyncio.to_thread(self.client.prepare, count)

    async def finish(self) -> None:
        """Wait for what is being prepared."""
        if self.preparing is not None and not self.preparing.done():
            await asyncio.wait([self.preparing])

    def prepare_next(self) -> None:
        """Begin to prepare a question, in a thread."""
        if self.preparing is None or self.preparing.done():
            self.preparing = asyncio.create_task(asyncio.to_thread(self.client.prepare))


async def prepare_sealed(session: Session, count: int, gallery: str | None, kept: dict[str, KeptSeal]) -> None:
    """Fetch what sealed questions of a gallery need, and prepare some."""
    info = await session.find_gallery(gallery, "open")
    _check_offered(info, "gallery")
    await (await _fetch_seal(session, info, kept, Tally())).prepare(count)


async def ask_sealed(session: Session, question: NearestQuestion, kept: dict[str, KeptSeal]) -> Nearest:
    """Find the nearest items by encrypted questions: one for scores, one for records. Nothing is paid."""
    for word, asked in (("thumbnails", question.thumbnails), ("originals", question.originals)):
        if asked:
            raise QuestionError(word, "a sealed question fetches no images: leave it out, or ask by a message")
    if len(question.dummies) or question.candidates is not None or question.repeat != 1:
        raise QuestionError("by", "a sealed question tells nothing: leave out dummies, candidates and repeat")
    if question.where is not None:
        raise QuestionError("where", "a sealed question fetches no metadata: leave it out, or ask by a message")
    tally = Tally(heard=session.clock.now())
    info, rows = await session.prepare_features([question.image], question.gallery)
    if "sealed" not in info.offers and question.by == "auto":
        neither = f"{info.name} hands out no codes and answers no sealed questions: ask it at an epsilon above 0"
        raise QuestionError("epsilon", NO_COPY if "codes" in info.offers else neither)
    _check_offered(info, "by")
    public = await session.fetch_map(info, None, tally)
    seal = await _fetch_seal(session, info, kept, tally)
    await seal.prepare()
    client = await asyncio.to_thread(seal.client.reserve)  # before the slot: others may ask at the same time
    layout = client.layout
    if layout.records is None or layout.projection.shape[0] != info.dimension:
        raise ReplyError("the gallery's layout is of other features than the gallery's")
    count = count_matches(question.k, min(layout.records.n_fetched, int(layout.counts.sum())))
    since, numbers = session.clock.now(), layout.n_colours * layout.n_samples
    fetched, slots = layout.records.n_fetched, layout.n_colours * layout.n_slots
    choice = slots * (_SLOT + _LOOK * fetched) + _NUMBER * fetched * layout.records.n_columns
    row = center_rows(public, rows[0])[0]
    sealed = await asyncio.to_thread(client.ask, row)
    await session.end_slot(since, _LEAST + _NUMBER * numbers)
    answer = await _send(session, info, sealed.data, HEADER_BYTES + DEFAULT_LIMITS.sealed_answer, tally)
    found = await asyncio.to_thread(_read, client.read_scores, sealed, answer, layout.records.n_fetched)
    fetch = await asyncio.to_thread(client.ask_records, [match.position for match in found])
    await session.end_slot(tally.heard, _LEAST + choice)
    answer = await _send(session, info, fetch.data, HEADER_BYTES + DEFAULT_LIMITS.sealed_answer, tally)
    records = await asyncio.to_thread(_read, client.read_records, fetch, answer)
    result = _rank(public, row, records, count)
    await session.end_slot(tally.heard, _LEAST + _NUMBER * fetched * layout.records.n_rows)
    seal.prepare_next()
    chosen, told = result
    return Nearest(
        matches=tuple(
            Match(number, told[number].name, min(float(score), 1.0), external_id=told[number].external_id)
            for number, score in zip(chosen.ids.tolist(), chosen.scores, strict=True)
        ),
        guarantee=client.guarantee,
        key="",
        repeated=False,
        n_candidates=int(layout.counts[np.array(sealed.positions) // layout.n_slots].sum()),
        sets=(),
        n_sets=0,
        bytes_sent=tally.sent,
        bytes_received=tally.received,
        found=chosen,
        names={number: about.name for number, about in told.items()},
        sealed=(sealed.data, fetch.data),
    )


def _check_offered(info: GalleryInfo, argument: str) -> None:
    if "sealed" not in info.offers:
        raise QuestionError(argument, f"{info.name} answers no sealed questions: ask it by messages, or at home")


async def _fetch_seal(session: Session, info: GalleryInfo, kept: dict[str, KeptSeal], tally: Tally) -> KeptSeal:
    """Return what reads answers of a gallery as it is now. What is held already is not sent again."""
    try:
        from nearveil.sealed import SealedClient, SealedError
    except ImportError:
        raise QuestionError("by", "sealed questions need cryptography: pip install nearveil[sealed]") from None
    held = kept.get(info.name)
    most = HEADER_BYTES + DEFAULT_LIMITS.sealed_public
    response = await session.send(
        Request("layout", info.name, etag="" if held is None else held.etag, most=most), tally
    )
    if response.status == 304 and held is not None:
        return held
    if response.status != 200:
        raise make_refusal(response)
    layout, hints = read_frame(response), []
    try:
        known = held.client if held is not None and held.client.can_update(layout) else None
        since = 0 if known is None else known.layout.version
        for part in range(2):
            most = HEADER_BYTES + DEFAULT_LIMITS.sealed_hint
            reply = await session.send(Request("hint", info.name, number=part, since=since, most=most), tally)
            if reply.status != 200:
                raise make_refusal(reply)
            hints.append(read_frame(reply))
        client = await asyncio.to_thread(SealedClient if known is None else known.update, layout, hints)
    except (SealedError, WireError) as error:
        raise ReplyError(f"the gallery's hints cannot be used, or it has changed just now: {error}") from None
    while len(kept) >= _KEPT:
        kept.pop(next(iter(kept)))
    kept[info.name] = seal = KeptSeal(read_etag(response), client)
    return seal


async def _send(session: Session, info: GalleryInfo, body: bytes, most: int, tally: Tally) -> bytes:
    response = await session.send(Request("sealed", info.name, body, secrets.token_hex(16), most=most), tally)
    if response.status != 200:
        raise make_refusal(response)
    return read_frame(response)


def _read(read: Any, *given: Any) -> Any:
    """Read an answer; what is wrong with it is the server's."""
    from nearveil.sealed import SealedError

    try:
        return read(*given)
    except (SealedError, WireError) as error:
        raise ReplyError(f"the server's answer cannot be read: {error}") from None


def _rank(
    public: PublicPart, row: NDArray[Any], records: list[bytes], count: int
) -> tuple[Found, dict[int, ItemDetails]]:
    """Rank what was fetched by its codes; a record that is too short is read as if zeros followed.

    Were it refused, a server could spoil the records of some cells, and an error would tell that one was asked for.
    """
    width = public.table.width
    padded = [one.ljust(ID_BYTES + width, b"\0") for one in records or [b""]]
    whole = {int.from_bytes(one[:ID_BYTES], "little"): one for one in padded}
    ids = np.array(sorted(whole), np.int64)
    codes = np.stack([np.frombuffer(whole[one], np.uint8, width, ID_BYTES) for one in ids.tolist()])
    with np.errstate(all="ignore"):  # a hostile table may hold numbers of any size
        scores = np.nan_to_num(public.table.scores(row[None], codes)[0], nan=float(np.finfo(np.float32).min))
    best = np.argsort(-scores, kind="stable")[:count]
    told = {one: _read_text(whole[one][ID_BYTES + width :]) for one in ids.tolist()}
    answer = Answer(ids.astype(np.uint32), codes)
    return Found(ids[best], codes[best], (), answer, scores[best].astype(np.float32)), told


def _read_text(text: bytes) -> ItemDetails:
    """Return name and owner's id of a record, whatever it holds."""
    name, _, own = text.decode(errors="replace").partition("\0")
    return ItemDetails(make_printable(name), own[:LONGEST_ID] or None)
