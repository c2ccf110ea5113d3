"""Galleries that a server answers from: the open kind, its snapshots, and answers that are kept."""

import logging
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import NoReturn, Protocol, cast, get_args

from nearveil.features.backbones import name_extractor
from nearveil.gallery.answers import EXTRAS, Extras
from nearveil.gallery.errors import IndexStoreError, UnknownItemError
from nearveil.gallery.index import Index
from nearveil.gallery.publishing import Published, Stamp
from nearveil.server.errors import (
    ConflictError,
    FrameError,
    NotOfferedError,
    UnavailableError,
    UnknownError,
)
from nearveil.server.sealed_builds import SealedAnswers, SealedBuilder
from nearveil.wire.client import MapChanged, Refusal, RefusalCode, decode_frame
from nearveil.wire.frames import Kind, WireError
from nearveil.wire.home import CodesGroup, CodesSource
from nearveil.wire.schema import GALLERY_NAME, MOST_MAPS, GalleryInfo, Offer
from nearveil.wire.server import ServedMap, ServerProtocol

_OVERHEAD = 250  # bytes that an entry costs besides its own


class ByteCache:
    """Least-recently-used cache of bytes by bytes; keys, values and overhead take at most `most` bytes.

    Examples
    --------
    >>> cache = ByteCache(4000)
    >>> for number in range(20):
    ...     cache.put(b"%d" % number, bytes(300))
    >>> cache.get(b"0"), len(cache.get(b"19")), len(cache)
    (None, 300, 7)
    """

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> bytes | None:
        """Return what was put under a key, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: bytes, value: bytes) -> None:
        """Remember a value, unless it alone would be a quarter of what may be held."""
        size = len(key) + len(value) + _OVERHEAD
        if size > self._most // 4:
            return
        with self._lock:
            old = self._kept.pop(key, None)
            self._held += size - (0 if old is None else len(key) + len(old) + _OVERHEAD)
            self._kept[key] = value
            while self._held > self._most:
                gone, bytes_ = self._kept.popitem(last=False)
                self._held -= len(gone) + len(bytes_) + _OVERHEAD


KIND, FLAGS = 4, 5  # where a frame says what it holds
_REFUSALS = {
    RefusalCode.MALFORMED: 400,
    RefusalCode.VERSION: 400,
    RefusalCode.NOT_OFFERED: 403,
    RefusalCode.TOO_LARGE: 413,
    RefusalCode.FAILED: 503,
}


def frame_status(reply: bytes) -> int:
    """Return the HTTP status of our reply to a query: the frame of an answer, a changed map or a refusal.

    Examples
    --------
    >>> frame_status(Refusal(RefusalCode.TOO_LARGE, "too large").to_bytes())
    413
    """
    if reply[KIND] == Kind.ANSWER:
        return 200
    return 409 if reply[KIND] == Kind.MAP_CHANGED else _REFUSALS[decode_frame(reply, Refusal).code]


_SAME = 1e-9  # of fractions


@dataclass(frozen=True, eq=False)
class GallerySnapshot:
    """A gallery in one state of its index: its maps, newest first, and the answers that were made in it."""

    stamp: Stamp
    maps: tuple[ServedMap, ...]
    protocol: ServerProtocol | None
    answers: ByteCache
    frames: dict[int, bytes]

    def find_map(self, candidates: float | None) -> int | None:
        """Return which of the maps is the newest, or the newest for a fraction."""
        for number, one in enumerate(self.maps):
            if candidates is None or math.isclose(
                one.published.release.candidates, candidates, rel_tol=0, abs_tol=_SAME
            ):
                return number
        return None


_LOG = logging.getLogger(__name__)
OFFERS: tuple[Offer, ...] = get_args(Offer)
_LONGEST_KEY = 4096  # bytes of a query whose answer is remembered: ours have some hundred
_CACHE = 256 << 20
_PATIENCE = 25.0  # seconds that a request waits for the map that it asks
_GRACE = 2.0  # seconds that all requests wait for a new map; those of large galleries take longer to read
_ORIGINALS = EXTRAS.index("originals")


class Gallery(Protocol):
    """What both kinds of gallery do. Any thread may call it. Errors are `ServiceError`, and clients see their texts."""

    @property
    def name(self) -> str:
        """Of the gallery, as clients call it."""
        ...

    @property
    def is_published(self) -> bool:
        """Whether there was a map, or a model, when `refresh` was last called. It never waits."""
        ...

    def info(self) -> GalleryInfo:
        """Return what a client may know before it asks."""
        ...

    def map(self, candidates: float | None = None) -> bytes:
        """Return the frame of a public part: of the newest map, or of the newest for a fraction."""
        ...

    def query(self, data: bytes) -> bytes:
        """Answer the frame of a query by that of an answer, of word that the map changed, or of a refusal."""
        ...

    def model(self) -> bytes:
        """Return the model that was published of private records, as `PublicDiscriminant.to_bytes` writes it."""
        ...

    def original(self, number: int) -> bytes:
        """Return one original. Not private: the request says which one."""
        ...

    def codes(self) -> bytes:
        """Return the manifest of all codes, for those who search at home."""
        ...

    def codes_group(self, number: int, blocks: tuple[int, ...] | None = None) -> bytes:
        """Return a group of codes, with some of its blocks or all."""
        ...

    def sealed(self, part: int | None = None, since: int = 0) -> bytes:
        """Return the public layout for sealed questions, or a part of its hints: all, or what changed."""
        ...

    @property
    def sealed_pass_bytes(self) -> int:
        """Bytes of codes that a sealed question reads; 0 before their index is loaded."""
        ...

    def sealed_lengths(self) -> frozenset[int]:
        """Return the lengths of sealed questions, in bytes. It never waits."""
        ...

    def ask_sealed(self, data: bytes) -> bytes:
        """Answer a sealed question."""
        ...

    def refresh(self) -> None:
        """Look whether something new was published."""
        ...

    def close(self) -> None:
        """Close what it holds open."""
        ...


class OpenGallery:
    """A gallery whose candidates, codes, names and thumbnails clients may see; their queries stay private.

    Parameters
    ----------
    index : Index
        It may hold several maps; a query is answered by the one that it names. One with private rows is refused; if
        another process makes its rows private later on, nothing is answered from then on.
    name : str
        Small letters, digits, and ``. _ -`` between them.
    offers : sequence of {"names", "thumbnails", "originals", "codes", "metadata", "sealed"}
        By default names and thumbnails. What is sent with all candidates, to those who ask for it; "codes" hands out
        the codes of all items (and their names, if offered), for search at home: every client then sees every code.
        "sealed" answers sealed questions, each by one pass over all codes.
    extractor : str, default=""
        The name of what makes the features, for people. Those that come with nearveil are named without it.
    cache : int, default=256 MiB
        Bytes of answers that are kept. They depend on the message and the gallery alone. Nothing else is kept of a
        query.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from nearveil.gallery import Index, Item
    >>> folder = tempfile.TemporaryDirectory()
    >>> index = Index.create(Path(folder.name) / "birds", dimension=2, extractor="toy")
    >>> angles = np.linspace(0, 6, 40)
    >>> _ = index.add(Item(np.float32([np.cos(a), np.sin(a)]), f"bird {a:.1f}") for a in angles)
    >>> _ = index.publish(4.0, 0.1)
    >>> gallery = OpenGallery(index, "birds")
    >>> gallery.info().candidates, gallery.info().offers
    ((0.1,), ('names', 'thumbnails'))
    >>> gallery.close(); folder.cleanup()
    """

    def __init__(
        self,
        index: Index,
        name: str,
        *,
        offers: Sequence[Offer] = ("names", "thumbnails"),
        extractor: str = "",
        cache: int = _CACHE,
    ) -> None:
        check_name(name)
        unknown = [word for word in offers if word not in OFFERS]
        if unknown:
            raise ValueError(f"offers must be of {', '.join(OFFERS)}")
        index.assert_open()
        self._index, self._name, self._cache = index, name, cache
        self._extractor = extractor or name_extractor(index.extractor)
        self._offers = tuple(word for word in OFFERS if word in offers)
        self._on_wire = cast("tuple[Extras, ...]", tuple(word for word in EXTRAS if word in offers))
        self._lock = threading.Lock()
        self._snapshot = GallerySnapshot(Stamp(-1, ()), (), None, ByteCache(0), {})
        self._reader = threading.Thread()  # of new maps; this one does nothing
        self._hashing = threading.Lock()
        self._hashed: dict[bytes, CodesGroup] = {}  # groups of codes, by what they hold
        self._source: tuple[ServedMap, CodesSource] | None = None
        self._builder = SealedBuilder()
        self.on_cache_miss: Callable[[], object] = lambda: None  # a server counts them

    @property
    def name(self) -> str:
        """Of the gallery, as clients call it."""
        return self._name

    @property
    def index(self) -> Index:
        """What is behind it."""
        return self._index

    @property
    def is_published(self) -> bool:
        """Whether there was a map when `refresh` was last called."""
        return bool(self._snapshot.maps)

    @property
    def stale(self) -> bool:
        """Whether items were added or deleted after the newest map was learned, or none was."""
        snapshot = self._read_snapshot()
        return not snapshot.maps or snapshot.maps[0].published.revision != snapshot.stamp.revision

    def info(self) -> GalleryInfo:
        """Return what a client may know before it asks."""
        maps = self._read_snapshot().maps
        fractions = dict.fromkeys(float(one.published.release.candidates) for one in maps)
        with _in_words():
            keys = self._index.metadata_keys() if "metadata" in self._offers else None
        return GalleryInfo(
            name=self._name,
            kind="open",
            candidates=tuple(fractions)[:MOST_MAPS],
            offers=self._offers,
            extractor=self._extractor,
            fingerprint=self._index.extractor,
            dimension=self._index.dimension,
            revision=maps[0].published.revision if maps else 0,
            metadata_keys=keys,
        )

    def map(self, candidates: float | None = None) -> bytes:
        """Return the frame of the newest map, or of the newest for a fraction.

        Parameters
        ----------
        candidates : float, optional

        Returns
        -------
        bytes
        """
        snapshot = self._read_snapshot()
        number = snapshot.find_map(candidates)
        if number is None:
            if not snapshot.maps:
                raise UnknownError("nothing was published in this gallery yet")
            there = ", ".join(f"{fraction:g}" for fraction in self.info().candidates)
            raise UnknownError(f"candidates must be a fraction that this gallery has a map for: {there}")
        frame = snapshot.frames.get(number)
        if frame is None:
            frame = snapshot.frames[number] = snapshot.maps[number].make_public_part().to_bytes()
        return frame

    def query(self, data: bytes) -> bytes:
        """Answer the frame of a query, whatever it holds.

        Parameters
        ----------
        data : bytes

        Returns
        -------
        bytes
            The frame of an answer, of word that the map changed, or of a refusal.
        """
        found = self._reply(self._read_snapshot(), data)
        if found[KIND] == Kind.MAP_CHANGED and self._is_reading():  # another server may have the new map already
            self._reader.join(_PATIENCE)
            if self._is_reading():
                raise UnavailableError("a new map is being read: ask again later")
            found = self._reply(self._read_snapshot(), data)
        return found

    def model(self) -> NoReturn:
        """Refuse: a client of an open gallery sees the candidates."""
        raise NotOfferedError("this gallery is open: ask it for candidates; only protected galleries have a model")

    def original(self, number: int) -> bytes:
        """Return one original. Not private: the request says which one.

        Parameters
        ----------
        number : int
            The item's id.

        Returns
        -------
        bytes
        """
        if "originals" not in self._offers:
            raise NotOfferedError("this gallery does not offer originals")
        with _in_words():
            self._index.assert_open()
            try:
                (item,) = self._index.items([number])
            except UnknownItemError:
                raise UnknownError("there is no such item") from None
        content = item.read_original()
        if content is None:
            raise UnknownError("there is no original of this item")
        return content

    def codes(self) -> bytes:
        """Return the manifest of all codes.

        Returns
        -------
        bytes
        """
        return self._read_codes().manifest.to_bytes()

    def codes_group(self, number: int, blocks: tuple[int, ...] | None = None) -> bytes:
        """Return a group of codes.

        Parameters
        ----------
        number : int
        blocks : tuple of int, optional
            Which of its blocks; all by default.

        Returns
        -------
        bytes
        """
        source, answers = self._read_codes(), self._snapshot.answers
        key = b"codes" + source.manifest.groups.get(number, b"")
        found = answers.get(key) if blocks is None else None
        if found is not None:
            return found
        group = source.group(number, blocks)
        if group is None:
            raise UnknownError("there is no such group of codes any more: ask for the manifest again")
        found = group.to_bytes()
        if blocks is None:
            answers.put(key, found)
        return found

    def prepare(self, patience: float | None = None) -> None:
        """Wait until the sealed index of the newest map is built or loaded, if sealed questions are offered.

        Parameters
        ----------
        patience : float, optional
            Seconds to wait at most; as long as it takes by default.
        """
        if "sealed" in self._offers and find_spec("cryptography") is not None:
            self._request_sealed()
            with _in_words():
                self._builder.wait(patience)

    def sealed(self, part: int | None = None, since: int = 0) -> bytes:
        """Return what clients need for sealed questions.

        Parameters
        ----------
        part : int, optional
            Of the hints: 0 of scores, 1 of records. The layout by default.
        since : int, default=0
            The version of the layout that a client has: rows that did not change since are left out, where that is
            still known.

        Returns
        -------
        bytes
        """
        answers = self._read_sealed()
        return answers.layout if part is None else answers.make_hint(part, since)

    def sealed_lengths(self) -> frozenset[int]:
        """Return the lengths of sealed questions for scores and for records.

        Returns
        -------
        frozenset of int
            Bytes of a frame, as the layout fixes them.
        """
        self._check_sealed()
        return self._builder.get().question_lengths

    @property
    def sealed_pass_bytes(self) -> int:
        """Bytes of codes that a sealed question reads; 0 before their index is loaded."""
        return self._builder.pass_bytes

    def ask_sealed(self, data: bytes) -> bytes:
        """Answer a sealed question; those of threads that wait meanwhile are answered in one pass.

        Parameters
        ----------
        data : bytes

        Returns
        -------
        bytes
        """
        from nearveil.sealed import SealedError

        try:
            return self._read_sealed().index.answer(data)
        except SealedError as error:
            raise ConflictError(str(error)) from None
        except WireError as error:
            raise FrameError(str(error)) from None

    def refresh(self) -> None:
        """Look whether something new was published; begin to build its sealed index where one is used."""
        maps = self._read_snapshot().maps
        if maps and self._builder.is_used:
            self._builder.request(maps[0])

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def _reply(self, snapshot: GallerySnapshot, data: bytes) -> bytes:
        found = snapshot.answers.get(data)
        if found is not None:
            return found
        if snapshot.protocol is None:
            return MapChanged(self._name, 0).to_bytes()
        found = snapshot.protocol.answer(data)
        self.on_cache_miss()
        # Originals may be files, which change without our knowing.
        if found[KIND] == Kind.ANSWER and found[FLAGS] != _ORIGINALS and len(data) <= _LONGEST_KEY:
            snapshot.answers.put(data, found)
        return found

    def _read_codes(self) -> CodesSource:
        """Return the codes of the newest map that are still there."""
        if "codes" not in self._offers:
            raise NotOfferedError("this gallery does not hand out its codes: ask it by messages")
        maps = self._read_snapshot().maps
        if not maps:
            raise UnknownError("nothing was published in this gallery yet")
        with self._hashing, _in_words():  # one thread reads every name, the others wait for it
            if self._source is None or self._source[0] is not maps[0]:
                self._source = maps[0], maps[0].make_codes_source(self._hashed)
            self._source[1].manifest  # noqa: B018 (made once)
            if self._source[1].is_too_large:
                raise NotOfferedError(
                    "names and metadata of this gallery are too long for a copy, which takes about 16 kB an item: "
                    "ask it by messages, or ask its operator to offer codes without metadata"
                )
            return self._source[1]

    def _check_sealed(self) -> None:
        if "sealed" not in self._offers:
            raise NotOfferedError("this gallery answers no sealed questions: ask it by messages")
        if find_spec("cryptography") is None:
            raise NotOfferedError("this server lacks what sealed questions need: install nearveil[sealed]")

    def _request_sealed(self) -> None:
        """Let the sealed index of the newest map be built, if it is not."""
        maps = self._read_snapshot().maps
        if not maps:
            raise UnknownError("nothing was published in this gallery yet")
        self._builder.request(maps[0])

    def _read_sealed(self) -> SealedAnswers:
        """Return an index that may answer now, without waiting for one that is being built."""
        self._check_sealed()
        self._request_sealed()
        return self._builder.get()

    def _read_snapshot(self) -> GallerySnapshot:
        """Return the snapshot of now, after reading what has changed."""
        with _in_words():
            stamp = self._index.stamp()
            if stamp == self._snapshot.stamp:
                return self._snapshot
            with self._lock:  # one thread reads, the others wait for it
                stamp = self._index.stamp()
                if stamp != self._snapshot.stamp:
                    self._snapshot = self._take_snapshot(self._snapshot, stamp)
                return self._snapshot

    def _take_snapshot(self, old: GallerySnapshot, stamp: Stamp) -> GallerySnapshot:
        """Return the next snapshot; answers are kept where no item of a map was deleted."""
        stamp, found = self._find_maps(old, stamp)
        maps = tuple(
            ServedMap(self._index, one, self._name, self._extractor, self._on_wire, self._index.alive(one))
            for one in found
        )
        pairs = zip(maps, old.maps, strict=False)
        if len(maps) != len(old.maps) or any(new.published is not was.published for new, was in pairs):
            return GallerySnapshot(stamp, maps, ServerProtocol(*maps) if maps else None, ByteCache(self._cache), {})
        if all(new.alive is was.alive for new, was in zip(maps, old.maps, strict=True)):
            return replace(old, stamp=stamp)
        return GallerySnapshot(stamp, maps, ServerProtocol(*maps), ByteCache(self._cache), old.frames)

    def _find_maps(self, old: GallerySnapshot, stamp: Stamp) -> tuple[Stamp, list[Published]]:
        """Return all maps; where new ones take long to read, those in memory, and a stamp that is not of now."""
        if old.maps and not set(stamp.maps) <= set(old.stamp.maps):
            if not self._is_reading():
                self._reader = threading.Thread(target=self._read_maps, daemon=True)
                self._reader.start()
                self._reader.join(_GRACE)
            if self._is_reading():
                known = self._index.maps(read=False)
                if known:
                    return stamp._replace(maps=()), known
                self._reader.join()
        return stamp, self._index.maps()

    def _read_maps(self) -> None:
        try:
            self._index.maps()
        except IndexStoreError as error:  # the next look meets it again, and says so
            _LOG.warning("a new map cannot be read: %s", type(error).__name__)

    def _is_reading(self) -> bool:
        return self._reader.is_alive()


def check_name(name: str) -> None:
    """Raise ValueError unless a gallery may be called by a name."""
    if not isinstance(name, str) or not re.fullmatch(GALLERY_NAME, name):
        raise ValueError(
            "name must be 1 to 64 small letters, digits, dots, dashes and underscores, and begin and end with a "
            "letter or digit"
        )


@contextmanager
def _in_words() -> Iterator[None]:
    """Turn what is wrong with an index into what a client may know of it."""
    try:
        yield
    except IndexStoreError as error:
        _LOG.warning("an index does not answer: %s", type(error).__name__)
        raise UnavailableError("the gallery cannot be read now: ask again later") from None
