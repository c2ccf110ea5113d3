"""Search at home: a copy of a gallery's codes, fetched by command and searched here. No question causes a request."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nearveil.client.errors import QuestionError, ReplyError
from nearveil.client.questions import (
    NOTHING_TOLD,
    FeatureMaker,
    Filter,
    NearestQuestion,
    Session,
    count_matches,
    select_matches,
)
from nearveil.client.results import Match, Nearest
from nearveil.client.timing import extraction_period
from nearveil.client.transport import Request, Tally, make_refusal, read_frame
from nearveil.gallery.answers import ID_BYTES, Answer
from nearveil.privacy.checks import is_integer
from nearveil.wire.client import FILTERING, TEXT, Found, scoring_period
from nearveil.wire.frames import DEFAULT_LIMITS, HEADER_BYTES
from nearveil.wire.home import CodesGroup, CodesManifest, HomeCopy, HomeError
from nearveil.wire.schema import GalleryInfo

Progress = Callable[[int, int], None]
_TRIES = 3  # of a gallery that changes while it is fetched
_AT_ONCE = 4  # groups that are under way
_WAIT, _WAITS = 0.02, 500  # seconds between looks whether another synchronises the same copy, and looks
_SEARCH = 0.1  # seconds: a search in a copy, besides its numbers
_OPERATION = 2e-9  # seconds for each number that is compared
_ITEM = 1e-7  # seconds for each item besides its numbers: a heap takes 3 to 30e-9, by the order of scores
_TEXT_BYTE = 1e-7  # seconds to parse a byte of metadata
NO_COPY = (
    "at 0 a copy of the gallery's codes is searched, and there is none: fetch one with Client.sync or "
    "`nearveil sync`, on a schedule and not because of an image"
)
_GUARANTEE = replace(NOTHING_TOLD, basis=replace(NOTHING_TOLD.basis, link="docs/theory/home.md"))


class HomeCopies:
    """The copies that a client holds, one for each gallery of its server."""

    def __init__(self, folder: Path | None, where: str) -> None:
        self._given, self._where = folder, where
        self._open: dict[str, HomeCopy] = {}

    @property
    def folder(self) -> Path:
        """Where all copies of the server are."""
        if self._given is not None:
            return self._given
        from nearveil.storage import data_folder

        return data_folder() / "home" / hashlib.sha256(self._where.encode()).hexdigest()[:16]

    def find(self, gallery: str | None) -> HomeCopy | None:
        """Return the copy of a gallery, or the only one; None where there is none. Nothing is sent."""
        names = [gallery] if gallery is not None else self._names()
        held = [copy for copy in map(self.open, names) if len(copy) or copy.is_corrupted]
        if len(held) > 1:
            raise QuestionError("gallery", f"there are copies of {', '.join(names)}: name one of them")
        return held[0] if held else None

    def open(self, gallery: str) -> HomeCopy:
        """Return the copy of a gallery, perhaps an empty one."""
        if gallery not in self._open:
            self._open[gallery] = HomeCopy(self.folder / gallery)
        return self._open[gallery]

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir()) if self.folder.is_dir() else []


async def sync_codes(
    session: Session, copies: HomeCopies, gallery: str | None, most: int, progress: Progress | None
) -> HomeCopy:
    """Bring a copy of a gallery's codes to where the gallery is now. What is held already is not fetched again."""
    if not is_integer(most, 1):
        raise QuestionError("most", "it must be a whole number of bytes, at least 1")
    info = await session.look_up(gallery, "open")
    if "codes" not in info.offers:
        raise QuestionError("gallery", f"{info.name} does not hand out its codes: ask it by messages, at an epsilon")
    copy, tally = copies.open(info.name), Tally()
    download = _Download(session, info, copy, most, tally, progress)
    with await _lock(copy):
        return await _bring_up(session, download, most)


async def _lock(copy: HomeCopy) -> BinaryIO:
    """Wait until nobody else synchronises the copy, but not for ever."""
    for _ in range(_WAITS):
        held = copy.lock()
        if held is not None:
            return held
        await asyncio.sleep(_WAIT)
    raise HomeError(f"another program synchronises the copy in {copy.folder}: wait until that is done")


async def _bring_up(session: Session, download: "_Download", most: int) -> HomeCopy:
    """Fetch what a copy lacks, anew where the gallery changes meanwhile."""
    info, copy, tally = download.info, download.copy, download.tally
    for attempt in range(_TRIES):
        manifest = await _fetch_manifest(session, info, most, tally)
        public = copy.public
        if public is None or public.public_digest != manifest.public_digest:
            public = await session.fetch_map(info, None, tally)
        if public.public_digest == manifest.public_digest and await download.fetch_all(manifest):
            await asyncio.to_thread(copy.commit, manifest, public)
            copy.fetched = tally.received
            return copy
        await session.clock.pause(float(attempt))
    raise ReplyError("the gallery changes faster than it can be fetched; run `nearveil sync` later")


async def search_home(session: Session, question: NearestQuestion, copies: HomeCopies) -> Nearest:
    """Find the nearest items in a copy. Nothing is sent, and nothing is paid."""
    for name, is_set in (("thumbnails", question.thumbnails), ("originals", question.originals)):
        if is_set:
            raise QuestionError(name, "a local copy holds no images; leave it out, or ask by a message")
    if question.candidates is not None:
        raise QuestionError("candidates", "it applies to messages only; leave it out at epsilon 0")
    copy = await asyncio.to_thread(copies.find, question.gallery)
    if copy is None:
        raise QuestionError("epsilon", NO_COPY)
    try:
        # Before the query is read: whether this fails depends on the copy alone.
        copy = await asyncio.to_thread(copy.load)
    except HomeError as error:
        raise QuestionError("home", str(error)) from None
    if isinstance(question.where, Mapping) and not copy.has_metadata:
        raise QuestionError("where", "this copy holds no metadata: leave it out, or ask the operator to offer it")
    count, info = count_matches(question.k, len(copy)), _describe(copy)
    since = session.clock.now()
    period = extraction_period([question.image]) + search_period(copy, count, filtered=question.where is not None)
    async with session.private_step(since, period) as step:
        return await step.run(_search, copy, info, session.features, question, count)


def search_period(copy: HomeCopy, count: int, *, filtered: bool) -> float:
    """Return the seconds for a search in a copy, by its sizes; a filter reads all items."""
    public = copy.public
    assert public is not None
    features, n_scored = len(public.mean), len(copy) if filtered else copy.count_scored(count)
    texts = copy.text_bytes if filtered else min(count * copy.longest_text, copy.text_bytes)
    comparing = len(copy) * (_ITEM + _OPERATION * features + filtered * FILTERING)
    reading = TEXT * (len(copy) if filtered else count) + _TEXT_BYTE * texts
    return _SEARCH + comparing + scoring_period(public.table, features, n_scored) + reading


def _search(
    copy: HomeCopy, info: GalleryInfo, features: FeatureMaker, question: NearestQuestion, count: int
) -> Nearest:
    """Search a copy. A filter reads all items, so that the time does not depend on how many it accepts."""
    (row,) = features.rows([question.image], info)
    where: Filter | None = question.where
    ids, scores = (best[0] for best in copy.search(row[None], count if where is None else len(copy)))
    ranked = [
        Match(number, about.name, min(score, 1.0), None, about.external_id, about.metadata)  # rounding may pass 1
        for number, score, about in zip(ids.tolist(), scores.tolist(), copy.details(ids), strict=True)
    ]
    codes, order, places = copy.codes(ids), np.argsort(ids), select_matches(ranked, where, count)
    answer = Answer(ids[order].astype(np.uint32), codes[order])
    matches = tuple(ranked[place] for place in places)
    return Nearest(
        matches=matches,
        guarantee=_GUARANTEE,
        key="",
        repeated=False,
        n_candidates=len(copy),
        set=None,
        n_sets=0,
        bytes_sent=0,
        bytes_received=0,
        found=Found(ids[places], codes[places], (), answer, scores[places]),
        names={match.id: match.name for match in matches},
        expected_share=1.0,
    )


def _describe(copy: HomeCopy) -> GalleryInfo:
    """Return what is known of the gallery of a copy, without asking it."""
    public, manifest = copy.public, copy.manifest
    assert public is not None
    assert manifest is not None
    return GalleryInfo(
        name=manifest.gallery,
        kind="open",
        candidates=(public.candidates,),
        offers=("codes",),
        extractor=public.extractor,
        fingerprint=public.fingerprint,
        dimension=len(public.mean),
        revision=manifest.revision,
    )


async def _fetch_manifest(session: Session, info: GalleryInfo, most: int, tally: Tally) -> CodesManifest:
    """Return the manifest, unless it names more bytes than are wanted."""
    limit = HEADER_BYTES + DEFAULT_LIMITS.codes_manifest
    response = await session.send(Request("codes", info.name, most=limit), tally)
    if response.status != 200:
        raise make_refusal(response)
    manifest = await asyncio.to_thread(CodesManifest.from_bytes, read_frame(response))
    if manifest.gallery != info.name:
        raise ReplyError("the server sent the codes of another gallery")
    if manifest.items * (ID_BYTES + manifest.width) > most:
        size = manifest.items * (ID_BYTES + manifest.width)
        raise QuestionError("most", f"the gallery's codes are {size:,} bytes, and at most {most:,} are kept")
    return manifest


@dataclass
class _Download:
    """Fetches groups of codes for a copy. One group at a time is unpacked: a few bytes may unpack to 256 MiB."""

    session: Session
    info: GalleryInfo
    copy: HomeCopy
    most: int  # bytes of all groups, unpacked; what is sent may be a public part more
    tally: Tally
    progress: Progress | None
    unpacked: int = 0
    unpacking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def fetch_all(self, manifest: CodesManifest) -> bool:
        """Fetch what the copy lacks; return whether all of it was as the manifest says."""
        changed = await asyncio.to_thread(self.copy.find_changed, manifest)
        waiting, done = list(changed.items())[::-1], 0
        show = self.progress or (lambda *_: None)
        show(0, len(changed))

        async def fetch_groups() -> bool:
            nonlocal done
            while waiting:
                number, older = waiting.pop()
                if not await self._fetch(number, manifest, older=older):
                    return False
                done += 1
                show(done, len(changed))
            return True

        workers = [asyncio.ensure_future(fetch_groups()) for _ in range(_AT_ONCE)]  # one writes while others are sent
        try:
            return all(await asyncio.gather(*workers))
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)  # nothing is written after this

    async def _fetch(self, number: int, manifest: CodesManifest, *, older: bool) -> bool:
        """Fetch and write a group, or only what changed of one that is held in an older form.

        Return False if the gallery has changed meanwhile.
        """
        if not older:
            content = await self._request(number, None)
            return content is not None and await self._keep(number, content, manifest, merge=False)
        listing = await self._request(number, ())
        if listing is None:
            return False
        async with self.unpacking:
            held = await self._read_held(number)
            listed = await self._unpack(number, listing)
            wanted = tuple(block for block, digest in listed.digests.items() if held.digests.get(block) != digest)
            del held  # it may be large, and others unpack meanwhile
        content = await self._request(number, wanted) if wanted else listing
        return content is not None and await self._keep(number, content, manifest, merge=True)

    async def _keep(self, number: int, content: bytes, manifest: CodesManifest, *, merge: bool) -> bool:
        """Unpack, check and write a group; `merge` takes blocks that were not sent from the copy."""
        async with self.unpacking:
            group = await self._unpack(number, content)
            if merge:
                held = await self._read_held(number)
                blocks = {
                    block: group.blocks.get(block) or held.blocks[block]
                    for block, digest in group.digests.items()
                    if block in group.blocks or held.digests.get(block) == digest
                }
                group = CodesGroup(number, group.digests, blocks)
            if group.digest != manifest.groups[number] or group.blocks.keys() != group.digests.keys():
                return False
            # Before anything of the copy is replaced: a digest does not show that bytes are valid.
            await asyncio.to_thread(group.check_blocks, manifest.width, len(manifest.columns))
            await asyncio.to_thread(self.copy.write_group, group)
            return True

    async def _read_held(self, number: int) -> CodesGroup:
        return await asyncio.to_thread(self.copy.read_group, number) or CodesGroup(number, {})

    async def _unpack(self, number: int, content: bytes) -> CodesGroup:
        group = await asyncio.to_thread(CodesGroup.from_bytes, content)
        if group.number != number:
            raise ReplyError("the server sent another group than was asked for")
        self.unpacked += group.size
        if self.unpacked > self.most:
            raise QuestionError("most", f"the gallery's codes and texts are more than {self.most:,} bytes, unpacked")
        return group

    async def _request(self, number: int, blocks: tuple[int, ...] | None) -> bytes | None:
        limit = HEADER_BYTES + DEFAULT_LIMITS.codes_group
        request = Request("group", self.info.name, number=number, blocks=blocks, most=limit)
        response = await self.session.send(request, self.tally)
        if self.tally.received > self.most + HEADER_BYTES + DEFAULT_LIMITS.public_part:
            raise QuestionError("most", f"the server sent more than {self.most:,} bytes of codes")
        if response.status == 404:  # the gallery has changed
            return None
        if response.status != 200:
            raise make_refusal(response)
        return read_frame(response)
