"""Local search: fetch a copy of a gallery's codes on command and search it here. No question causes a request."""

import asyncio
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from nearveil.client.copies import MANIFEST, PUBLIC, HomeCopy, HomeError, LoadedCopy
from nearveil.client.errors import QuestionError, ReplyError
from nearveil.client.images import FeatureMaker
from nearveil.client.questions import NOTHING_SENT, NearestQuestion, Outcome, check_filter, limit_count, make_matches
from nearveil.client.results import Nearest
from nearveil.client.session import Session, Traffic
from nearveil.client.timing import FILTERING, TEXT, extraction_period, private_step, scoring_period
from nearveil.client.transport import Request, read_body
from nearveil.gallery.answers import ItemDetails
from nearveil.gallery.codes import ID_BYTES
from nearveil.privacy.checks import is_integer
from nearveil.remote import copy_folder, is_remote, read_object
from nearveil.storage import data_folder, make_private_folder, replace_file
from nearveil.wire.codes import CodesGroup, CodesManifest
from nearveil.wire.frames import Kind, WireError
from nearveil.wire.messages import PublicPart, decode_frame
from nearveil.wire.schema import GALLERY_NAME, GalleryInfo

if TYPE_CHECKING:
    from nearveil.gallery import Index

Progress = Callable[[int, int], None]
_FIRST_READ, _NEXT_READ = 16, 8  # items of an index to read for each match with a filter; growth if too few pass it
_MAX_ATTEMPTS = 3  # if the gallery changes during a download
_PARALLEL = 4  # requests for groups
_LOCK_POLL, _LOCK_POLLS = 0.02, 500  # seconds between attempts to lock a copy, and their number
_SEARCH = 0.1  # seconds: a search in a copy, besides its numbers
_OPERATION = 2e-9  # seconds for each number that is compared
_MORE, _MORE_FILTERED = 1 / 5, 1 / 2  # of the seconds to compare, for each query after the first
_ITEM = 1e-7  # seconds for each item besides its numbers: a heap takes 3 to 30e-9, by the order of scores
_TEXT_BYTE = 1e-7  # seconds to parse a byte of metadata
_CONDITIONS = 8  # of a filter that fit into one period
_CONDITION, _PAIR = 1e-4, 1e-8  # seconds for a condition, and for each pair of metadata and each item: 1.3e-9
_GUARANTEE = replace(NOTHING_SENT, basis=replace(NOTHING_SENT.basis, link="docs/theory/home.md"))


class HomeCopies:
    """The local copies of the galleries of a server, in a folder; or read from the URL of such a folder, `source`."""

    def __init__(self, location: str | os.PathLike[str] | None, url: str) -> None:
        self.source = os.fspath(location).rstrip("/") if location is not None and is_remote(location) else ""
        folder = None if location is None else Path(location)
        self._parent, self._url = copy_folder(self.source) if self.source else folder, url
        self._copies: dict[str, HomeCopy] = {}

    @cached_property
    def _folder(self) -> Path:
        """Folder of all copies; the default exists only for users with a home directory."""
        return self._parent or data_folder() / "home" / hashlib.sha256(self._url.encode()).hexdigest()[:16]

    def find(self, gallery: str | None) -> HomeCopy | None:
        """Return the copy of a gallery, or the only copy; None if there is none. Nothing is sent."""
        folder = self._folder
        if gallery is not None:
            names = [gallery]
        else:
            names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        copies = [copy for copy in map(self.open, names) if len(copy) or copy.is_corrupted]
        if len(copies) > 1:
            raise QuestionError("gallery", f"there are copies of {', '.join(names)}: name one of them")
        return copies[0] if copies else None

    def open(self, gallery: str) -> HomeCopy:
        """Return the copy of a gallery; it may be empty."""
        if gallery not in self._copies:
            self._copies[gallery] = HomeCopy(self._folder / gallery)
        return self._copies[gallery]

    def read_layout(self, gallery: str) -> tuple[str, bytes]:
        """Return the ETag and the public sealed layout that an earlier process fetched; empty without one."""
        # The ETag is the content's, as servers make it: no text by which a server would recognise this machine, and
        # a corrupted layout is fetched again.
        with suppress(OSError, RuntimeError):  # also without a home directory
            layout = (self._folder / f"_{gallery}.layout").read_bytes()  # no gallery has this name
            return f'"{hashlib.sha256(layout).hexdigest()}"', layout
        return "", b""

    def write_layout(self, gallery: str, layout: bytes) -> None:
        """Store a public sealed layout for the next process, if the disk allows it."""
        with suppress(OSError, RuntimeError):
            make_private_folder(self._folder)
            with replace_file(self._folder / f"_{gallery}.layout", durable=False) as file:
                file.write(layout)


class _GalleryChangedError(Exception):
    """The gallery has changed since its manifest was fetched."""


async def sync_codes(
    session: Session, copies: HomeCopies, gallery: str | None, most: int, progress: Progress | None
) -> HomeCopy:
    """Update a local copy to the current codes of its gallery. Unchanged blocks are not fetched again."""
    if not is_integer(most, 1):
        raise QuestionError("most", "it must be a whole number of bytes, at least 1")
    if copies.source:
        if gallery is None or not re.fullmatch(GALLERY_NAME, gallery):
            raise QuestionError("gallery", "name the gallery: the server is not asked for it if `home` is a URL")
        copy = copies.open(gallery)
        with await _lock(copy):
            await asyncio.to_thread(_read_copy, f"{copies.source}/{gallery}", gallery, copy, most)
        return copy
    info = await session.find_gallery(gallery, "open", refresh=True)
    if "codes" not in info.offers:
        raise QuestionError("gallery", f"{info.name} offers no copy of its codes: query it with an epsilon")
    copy, traffic = copies.open(info.name), Traffic()
    download = _Download(session, info, copy, most, traffic, progress)
    with await _lock(copy):
        for attempt in range(_MAX_ATTEMPTS):
            manifest = await _fetch_manifest(session, info, most, traffic)
            public = copy.public
            if public is None or public.public_digest != manifest.public_digest:
                public = await session.fetch_map(info, None, traffic)
            with suppress(_GalleryChangedError):
                if public.public_digest == manifest.public_digest:
                    await download.fetch_all(manifest)
                    await asyncio.to_thread(copy.commit, manifest, public)
                    copy.fetched = traffic.received
                    return copy
            await session.clock.pause(float(attempt))
    raise ReplyError("The gallery changes faster than it can be fetched; run `nearveil sync` later")


def _read_copy(url: str, gallery: str, copy: HomeCopy, most: int) -> None:
    """Update a copy from the URL of another one, which is trusted no more than a server."""
    copy.fetched, limit = 0, most + Kind.PUBLIC_PART.frame_limit

    def read(name: str) -> bytes:
        data = read_object(url, name, limit - copy.fetched)
        copy.fetched += len(data)
        return data

    try:
        manifest = _decode_manifest(read(MANIFEST), gallery, most)
        public, unpacked = decode_frame(read(PUBLIC), PublicPart), 0
        for number in copy.find_changed(manifest):
            digest = manifest.groups[number]
            group = CodesGroup.from_bytes(read(f"{digest.hex()}.codes"))
            unpacked += group.size
            if unpacked > most:
                raise QuestionError("most", f"the codes and texts have more than {most:,} bytes, unpacked")
            if (group.number, group.digest) != (number, digest) or group.blocks.keys() != group.digests.keys():
                raise WireError("a group is incomplete")
            group.check_blocks(manifest.width, len(manifest.columns))
            copy.write_group(group)
        copy.commit(manifest, public)
    except WireError as error:
        raise HomeError(f"The copy of {gallery} at the URL is corrupted: {error}; upload it again.") from None


async def _lock(copy: HomeCopy) -> BinaryIO:
    """Wait, with a time limit, until no other program updates the copy."""
    for _ in range(_LOCK_POLLS):
        file = copy.lock()
        if file is not None:
            return file
        await asyncio.sleep(_LOCK_POLL)
    raise HomeError(f"Another program updates the copy in {copy.folder}; try again when it is done.")


async def search_home(session: Session, question: NearestQuestion, copies: HomeCopies) -> Outcome:
    """Find the items nearest to each query in a local copy. Nothing is sent or paid."""
    for name, is_set in (("thumbnails", question.thumbnails), ("originals", question.originals)):
        if is_set:
            raise QuestionError(name, "a local copy holds no images; leave it out, or send a message with an epsilon")
    copy = await asyncio.to_thread(copies.find, question.gallery)
    if copy is None:
        raise QuestionError(
            "by",
            "there is no local copy of the gallery: fetch one with client.sync() or `nearveil sync`, on a schedule and "
            "not because of a query",
        )
    try:
        # Before the query is read: whether this fails depends on the copy alone.
        loaded = await asyncio.to_thread(copy.load)
        await asyncio.to_thread(loaded.build_index)
    except HomeError as error:
        raise QuestionError("home", str(error)) from None
    is_mapping = isinstance(question.where, Mapping)
    if is_mapping and not loaded.has_metadata:
        raise QuestionError("where", "this copy holds no metadata: leave it out, or ask the operator to offer it")
    pairs = await asyncio.to_thread(loaded.count_pairs) if is_mapping else None
    count, since = limit_count(question.k, len(loaded), "the copy"), session.clock.now()
    filtered = question.where is not None and not is_mapping
    searching = search_period(loaded, count, filtered=filtered, pairs=pairs, questions=len(question.queries))
    async with private_step(session, since, extraction_period(question.queries) + searching):
        return Outcome(await asyncio.to_thread(_search, loaded, session.features, question, count))


def search_period(
    copy: LoadedCopy, count: int, *, filtered: bool, pairs: int | None = None, questions: int = 1
) -> float:
    """Return the seconds for a search in a copy; a function filters (`filtered`), or a mapping by so many `pairs`."""
    public, more = copy.public, questions - 1
    features, n_scored = public.space.width, len(copy) if filtered else copy.count_scored(count)
    texts = copy.text_bytes if filtered else min(count * copy.longest_text, copy.text_bytes)
    share = _MORE if pairs is None else _MORE_FILTERED  # many queries are compared with a row while it is in a cache
    comparing = len(copy) * ((_ITEM + _OPERATION * features) * (1 + share * more) + filtered * FILTERING * questions)
    if pairs is not None:
        comparing += _CONDITIONS * (_CONDITION + _PAIR * (pairs + len(copy)))
    reading = TEXT * (len(copy) if filtered else count) + _TEXT_BYTE * texts
    return _SEARCH + comparing + questions * (scoring_period(public.table, features, n_scored) + reading)


def _search(copy: LoadedCopy, features: FeatureMaker, question: NearestQuestion, count: int) -> list[Nearest]:
    """Search a copy. A filter reads all items, so that the time does not depend on how many pass it."""
    metric, results = copy.public.space.metric, []
    rows = np.stack(features.rows(question.queries, copy.public.fingerprint, copy.public.dimension, metric))
    where, matching, n_ranked = question.where, None, count
    if isinstance(where, Mapping):
        matching, where = copy.find_matching(where), None
    elif where is not None:
        n_ranked = len(copy)
    for ids, values in zip(*copy.search(rows, n_ranked, matching), strict=True):
        matches = make_matches(ids, values, copy.details(ids), metric=metric, where=where, k=count)
        results.append(
            Nearest(
                matches=matches,
                way="home",
                metric=metric,
                code_recall=copy.public.code_recall,
                guarantee=_GUARANTEE,
                n_candidates=len(copy),
                names={match.id: match.name for match in matches},
                expected_share=1.0,
            )
        )
    return results


async def search_index(session: Session, question: NearestQuestion, index: "Index") -> Outcome:
    """Find the items nearest to each query in a local index, exactly. Nobody observes it: no deadline."""
    if question.gallery is not None:  # else no map is read
        await session.find_gallery(question.gallery, "open", published=False)
    check_filter(question.where, await asyncio.to_thread(index.metadata_keys))
    if not len(index):
        raise QuestionError("gallery", "the index is empty: add items first")
    extracted = question.queries, index.extractor, index.dimension, index.metric
    rows = await asyncio.to_thread(session.features.rows, *extracted)
    return Outcome([await asyncio.to_thread(_search_index, index, row, question) for row in rows])


def _search_index(index: "Index", row: NDArray[Any], question: NearestQuestion) -> Nearest:
    """Search an index; with a filter, read more items until enough pass it."""
    index.assert_open()
    size, metric = len(index), index.metric
    count = limit_count(question.k, size, "the index")
    n_read = count if question.where is None else min(size, _FIRST_READ * count)
    while True:
        ids, values = (best[0] for best in index.search(row, n_read))
        stored = {item.id: item for item in index.items(ids, lenient=True, originals=question.originals)}
        items, existing = list(stored.values()), np.isin(ids, list(stored))  # unless deleted meanwhile
        images = [(item.read_original() or b"") if question.originals else item.thumbnail for item in items]
        details = [ItemDetails(item.name, item.external_id, item.metadata) for item in items]
        matches = make_matches(
            ids[existing], values[existing], details, images, metric=metric, where=question.where, k=count
        )
        if len(matches) == count or n_read == size:
            break
        n_read = min(size, _NEXT_READ * n_read)
    return Nearest(
        matches=matches,
        way="index",
        metric=metric,
        code_recall=1.0,
        guarantee=NOTHING_SENT,
        n_candidates=size,
        names={match.id: match.name for match in matches},
        expected_share=1.0,
    )


async def _fetch_manifest(session: Session, info: GalleryInfo, most: int, traffic: Traffic) -> CodesManifest:
    """Return the manifest, unless it lists more than `most` bytes."""
    data = await session.fetch(Request("codes", info.name), traffic)
    return await asyncio.to_thread(_decode_manifest, data, info.name, most)


def _decode_manifest(data: bytes, gallery: str, most: int) -> CodesManifest:
    manifest = CodesManifest.from_bytes(data)
    if manifest.gallery != gallery:
        raise ReplyError("The server sent the codes of another gallery")
    size = manifest.items * (ID_BYTES + manifest.width)
    if size > most:
        raise QuestionError("most", f"the gallery's codes have {size:,} bytes, and the limit is {most:,}")
    return manifest


@dataclass
class _Download:
    """Fetch groups of codes for a copy. One group at a time is unpacked: a few bytes may unpack to 256 MiB."""

    session: Session
    info: GalleryInfo
    copy: HomeCopy
    most: int  # bytes of all groups, unpacked; replies may have a public part more
    traffic: Traffic
    progress: Progress | None
    unpacked: int = 0
    unpacking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def fetch_all(self, manifest: CodesManifest) -> None:
        """Fetch the groups that the copy lacks."""
        changed = await asyncio.to_thread(self.copy.find_changed, manifest)
        pending, done = iter(changed.items()), 0
        report = self.progress or (lambda *_: None)
        report(0, len(changed))

        async def fetch_groups() -> None:
            nonlocal done
            for number, is_update in pending:  # each is taken by one task
                await self._fetch(number, manifest, is_update=is_update)
                done += 1
                report(done, len(changed))

        tasks = [asyncio.ensure_future(fetch_groups()) for _ in range(_PARALLEL)]  # one writes while others are sent
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # nothing is written after this

    async def _fetch(self, number: int, manifest: CodesManifest, *, is_update: bool) -> None:
        """Fetch and write a group, or only the changed blocks of a group that the copy has in an older version."""
        blocks: tuple[int, ...] | None = None
        if is_update:
            listing = await self._request(number, ())
            async with self.unpacking:  # the stored group may be large: it is dropped before others unpack
                stored = (await self._load_stored(number)).digests
                digests = (await self._unpack(number, listing)).digests
            blocks = tuple(block for block, digest in digests.items() if stored.get(block) != digest)
        content = listing if blocks == () else await self._request(number, blocks)
        async with self.unpacking:
            group = await self._unpack(number, content)
            if is_update:
                old = await self._load_stored(number)
                merged = {
                    block: group.blocks.get(block) or old.blocks[block]
                    for block, digest in group.digests.items()
                    if block in group.blocks or old.digests.get(block) == digest
                }
                group = CodesGroup(number, group.digests, merged)
            if group.digest != manifest.groups[number] or group.blocks.keys() != group.digests.keys():
                raise _GalleryChangedError
            # Before anything of the copy is replaced: a digest does not show that bytes are valid.
            await asyncio.to_thread(group.check_blocks, manifest.width, len(manifest.columns))
            await asyncio.to_thread(self.copy.write_group, group)

    async def _load_stored(self, number: int) -> CodesGroup:
        return await asyncio.to_thread(self.copy.read_group, number) or CodesGroup(number, {})

    async def _unpack(self, number: int, content: bytes) -> CodesGroup:
        group = await asyncio.to_thread(CodesGroup.from_bytes, content)
        if group.number != number:
            raise ReplyError("The server sent another group than the requested one")
        self.unpacked += group.size
        if self.unpacked > self.most:
            raise QuestionError("most", f"the gallery's codes and texts have more than {self.most:,} bytes, unpacked")
        return group

    async def _request(self, number: int, blocks: tuple[int, ...] | None) -> bytes:
        request = Request("group", self.info.name, number=number, blocks=blocks)
        response = await self.session.send(request, self.traffic)
        if self.traffic.received > self.most + Kind.PUBLIC_PART.frame_limit:
            raise QuestionError("most", f"the server sent more than {self.most:,} bytes of codes")
        if response.status == 404:
            raise _GalleryChangedError
        return read_body(response)
