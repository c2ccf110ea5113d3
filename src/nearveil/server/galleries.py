"""Galleries that a server answers from: their interface, and the open kind with its maps and cached answers."""

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args

import numpy as np

from nearveil.features.backbones import name_extractor
from nearveil.gallery.answers import EXTRAS, Extras
from nearveil.gallery.errors import IndexStoreError, UnknownItemError
from nearveil.gallery.index import Index
from nearveil.gallery.publishing import IndexState
from nearveil.server.errors import ServiceError
from nearveil.server.sealed_builds import SealedAnswers, SealedBuilder
from nearveil.wire.codes import CodesGroup, CodesSource
from nearveil.wire.frames import Kind, WireError, peek_header
from nearveil.wire.messages import MapChanged
from nearveil.wire.schema import GALLERY_NAME, MOST_MAPS, GalleryInfo, Offer
from nearveil.wire.server import ServedMap, ServerProtocol

if TYPE_CHECKING:
    from nearveil.ledger import Account

_LOG = logging.getLogger(__name__)
OFFERS: tuple[Offer, ...] = get_args(Offer)
_ENTRY_OVERHEAD = 250  # bytes of memory that a cache entry takes besides key and value
_MAX_CACHED_QUERY = 4096  # bytes; queries of our client have a few hundred
_CACHE_BYTES = 256 << 20
_TOLERANCE = 1e-9  # of fractions
_ORIGINALS = EXTRAS.index("originals")


class ByteCache:
    """Least-recently-used cache of bytes by bytes; keys, values and overhead take at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def put(self, key: bytes, value: bytes) -> None:
        """Store a value, unless it takes more than a quarter of the cache."""
        size = len(key) + len(value) + _ENTRY_OVERHEAD
        if size > self._limit // 4:
            return
        with self._lock:
            old = self._entries.pop(key, None)
            self._size += size - (0 if old is None else len(key) + len(old) + _ENTRY_OVERHEAD)
            self._entries[key] = value
            while self._size > self._limit:
                oldest, dropped = self._entries.popitem(last=False)
                self._size -= len(oldest) + len(dropped) + _ENTRY_OVERHEAD


@dataclass(eq=False)
class GalleryState:
    """A gallery in one state of its index: its maps, newest first, and data computed from them."""

    index_state: IndexState
    maps: tuple[ServedMap, ...]
    frames: ByteCache
    code_groups: dict[bytes, CodesGroup]  # by their contents; the next state goes on with them

    @cached_property
    def protocol(self) -> ServerProtocol:
        """The protocol of all maps."""
        return ServerProtocol(*self.maps)

    @cached_property
    def codes(self) -> CodesSource:
        """The codes of the newest map, without deleted items."""
        return self.maps[0].make_codes_source(self.code_groups)


class Gallery:
    """The interface of both kinds of gallery, for any thread. Errors are `ServiceError`, and clients see the texts."""

    _refusal: ClassVar[str] = "Not offered by this gallery."

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not re.fullmatch(GALLERY_NAME, name):
            raise ValueError(
                "name must be 1 to 64 lowercase letters, digits, dots, dashes and underscores, and begin and end with "
                "a letter or digit"
            )
        self.name = name

    @property
    def is_published(self) -> bool:
        """Whether there was a map, or a model, at the last `refresh`. Never blocks."""
        raise NotImplementedError

    @property
    def account(self) -> "Account | None":
        """The account that pays for publications, if any."""
        return None

    def sealed_pass_bytes(self, *, tokens: bool) -> int:
        """Return the bytes of codes that take as long as a sealed question or a request for tokens; 0 if not loaded."""
        del tokens
        return 0

    def info(self) -> GalleryInfo:
        """Return the public information about the gallery."""
        raise NotImplementedError

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ServiceError("not_offered", self._refusal)

    # Requests for a map, a model, an original, codes, and sealed questions.
    map = query = model = original = codes = codes_group = sealed = sealed_tokens = sealed_lengths = _refuse
    ask_sealed = _refuse

    def refresh(self) -> None:
        """Load new publications."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the databases of the gallery."""
        raise NotImplementedError


class OpenGallery(Gallery):
    """A gallery that shows clients its candidates, codes, names and thumbnails; their queries stay private.

    Parameters
    ----------
    index : Index
        It may have several maps; a query is answered by the map that it names. An index with private rows is refused;
        if another process makes its rows private later, the gallery stops answering.
    name : str
        Lowercase letters, digits, and ``. _ -`` between them.
    offers : sequence of {"names", "thumbnails", "originals", "codes", "metadata", "sealed"}
        By default names and thumbnails. Sent with all candidates, to clients that request it; "codes" offers
        the codes of all items (and their names, if offered), for local copies: every client then sees every code.
        "sealed" answers sealed questions, each by one pass over all codes.
    extractor : str, default=""
        Display name of the feature extractor. Built-in extractors need none.
    cache : int, default=256 MiB
        Bytes of cached answers. They depend on the message and the gallery alone. Nothing else of a query is stored.

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

    _refusal = "This gallery is open: query it for candidates. Only protected galleries have a model."

    def __init__(
        self,
        index: Index,
        name: str,
        *,
        offers: Sequence[Offer] = ("names", "thumbnails"),
        extractor: str = "",
        cache: int = _CACHE_BYTES,
    ) -> None:
        super().__init__(name)
        if any(word not in OFFERS for word in offers):
            raise ValueError(f"offers must be of {', '.join(OFFERS)}")
        index.assert_open()
        self.index = index
        self.on_cache_miss: Callable[[], object] = lambda: None  # a server counts them
        self._extractor = extractor or name_extractor(index.extractor)
        self._offers = tuple(word for word in OFFERS if word in offers)
        self._extras = cast("tuple[Extras, ...]", tuple(word for word in EXTRAS if word in offers))
        self._cache_bytes = cache
        self._lock = threading.Lock()
        self._state = GalleryState(IndexState((), -1, ()), (), ByteCache(0), {})
        self._codes_lock = threading.Lock()
        self._builder = SealedBuilder(name)

    @property
    def is_published(self) -> bool:
        """Whether there was a map at the last `refresh`."""
        return bool(self._state.maps)

    @property
    def stale(self) -> bool:
        """Whether the index changed after its newest map was learned, or has no map."""
        state = self._load_state()
        return not state.maps or state.maps[0].published.revision != state.index_state.revision

    def info(self) -> GalleryInfo:
        """Return the public information about the gallery."""
        maps = self._load_state().maps
        fractions = dict.fromkeys(float(served.published.terms.candidates) for served in maps)
        with _translate_errors():
            keys = self.index.metadata_keys() if "metadata" in self._offers else None
        return GalleryInfo(
            name=self.name,
            kind="open",
            candidates=tuple(fractions)[:MOST_MAPS],
            offers=self._offers,
            extractor=self._extractor,
            fingerprint=self.index.extractor,
            dimension=self.index.dimension,
            revision=maps[0].published.revision if maps else 0,
            metric=maps[0].published.space.metric if maps else self.index.metric,
            metadata_keys=keys,
        )

    def map(self, candidates: float | None = None) -> bytes:
        """Return the frame of the newest map, or of the newest for a fraction."""
        state = self._load_state()
        _require_maps(state)
        available = [served.published.terms.candidates for served in state.maps]
        fraction = available[0] if candidates is None else candidates
        position = next((n for n, other in enumerate(available) if abs(other - fraction) <= _TOLERANCE), None)
        if position is None:
            fractions = ", ".join(f"{fraction:g}" for fraction in self.info().candidates)
            raise ServiceError("unknown", f"candidates must be a fraction that this gallery has a map for: {fractions}")
        key = b"map %d" % position
        frame = state.frames.get(key)
        if frame is None:
            frame = state.maps[position].make_public_part().to_bytes()
            state.frames.put(key, frame)
        return frame

    def query(self, data: bytes) -> bytes:
        """Answer the frame of a query with that of an answer, of a changed map, or of a refusal."""
        state = self._load_state()
        reply = state.frames.get(data)
        if reply is not None:
            return reply
        if not state.maps:
            return MapChanged(self.name, 0).to_bytes()
        reply = state.protocol.answer(data)
        self.on_cache_miss()
        kind, extras = peek_header(reply)
        # Originals may be files, which change without notice.
        if kind == Kind.ANSWER and extras != _ORIGINALS and len(data) <= _MAX_CACHED_QUERY:
            state.frames.put(data, reply)
        return reply

    def original(self, number: int) -> bytes:
        """Return the original of the item with an id. Not private: the request names the item."""
        if "originals" not in self._offers:
            raise ServiceError("not_offered", "This gallery does not offer originals.")
        with _translate_errors():
            self.index.assert_open()
            try:
                (item,) = self.index.items([number])
            except UnknownItemError:
                raise ServiceError("unknown", "No such item.") from None
        content = item.read_original()
        if content is None:
            raise ServiceError("unknown", "This item has no original.")
        return content

    def codes(self) -> bytes:
        """Return the manifest of all codes, for local copies."""
        return self._load_codes().manifest.to_bytes()

    def codes_group(self, number: int, blocks: tuple[int, ...] | None = None) -> bytes:
        """Return a group of codes: these blocks of it, or all."""
        source, frames = self._load_codes(), self._state.frames
        key = b"codes" + source.manifest.groups.get(number, b"")
        content = frames.get(key) if blocks is None else None
        if content is not None:
            return content
        group = source.group(number, blocks)
        if group is None:
            raise ServiceError("unknown", "No such group of codes. Fetch the manifest again: it may have changed.")
        content = group.to_bytes()
        if blocks is None:
            frames.put(key, content)
        return content

    def prepare(self, timeout: float | None = None) -> None:
        """Wait, at most `timeout` seconds, until the sealed index of the newest map is ready, if it is offered."""
        if "metadata" not in self._offers:
            with _translate_errors():
                if self.index.has_external_ids():
                    words = "%s: clients see numbers of items, not your ids; `--offer metadata` sends ids and metadata"
                    _LOG.warning(words, self.name)
        if "sealed" in self._offers and find_spec("numba") is not None:
            self._builder.request(_require_maps(self._load_state()))
            with _translate_errors():
                self._builder.wait(timeout)

    def sealed(self) -> bytes:
        """Return the layout for sealed questions."""
        return self._get_sealed().layout

    def sealed_tokens(self) -> bytes:
        """Return the public parts of tokens."""
        return self._get_sealed().tokens

    def sealed_lengths(self, *, tokens: bool) -> frozenset[int]:
        """Return the lengths of sealed questions, or of requests for tokens, in bytes. Never blocks."""
        self._check_sealed()
        return self._builder.get().get_lengths(tokens=tokens)

    def sealed_pass_bytes(self, *, tokens: bool) -> int:
        """Return the bytes of codes that take as long as a sealed question or a request for tokens; 0 if not loaded."""
        return self._builder.get_pass_bytes(tokens=tokens)

    def ask_sealed(self, data: bytes) -> bytes:
        """Answer a sealed question, or a request for tokens; those of threads that wait meanwhile share one pass."""
        from nearveil.sealed import SealedError

        try:
            return self._get_sealed().index.answer(data)
        except SealedError as error:
            raise ServiceError("conflict", str(error)) from None
        except WireError as error:
            raise ServiceError("frame", str(error)) from None

    def refresh(self) -> None:
        """Load new maps; start to build the sealed index of the newest if one was ever requested."""
        maps = self._load_state().maps
        if maps and self._builder.is_used:
            self._builder.request(maps[0])

    def close(self) -> None:
        """Close the index."""
        self.index.close()

    def _load_codes(self) -> CodesSource:
        """Return the codes of the newest map, without deleted items."""
        if "codes" not in self._offers:
            raise ServiceError("not_offered", "This gallery does not offer its codes. Query it by messages.")
        state = self._load_state()
        _require_maps(state)
        with self._codes_lock, _translate_errors():  # one thread reads every name, the others wait for it
            source = state.codes
            source.manifest  # noqa: B018 (computed once, here)
            if source.is_too_large:
                raise ServiceError(
                    "not_offered",
                    "Names and metadata of this gallery are too long for a local copy, at most about 16 kB an item. "
                    "Query it by messages, or ask its operator to offer codes without metadata.",
                )
            return source

    def _check_sealed(self) -> None:
        if "sealed" not in self._offers:
            raise ServiceError("not_offered", "This gallery does not answer sealed queries. Query it by messages.")
        if find_spec("numba") is None:
            raise ServiceError("not_offered", "The server cannot answer sealed queries: it lacks nearveil[sealed].")

    def _get_sealed(self) -> SealedAnswers:
        """Return a sealed index that may answer now, without waiting for a build."""
        self._check_sealed()
        self._builder.request(_require_maps(self._load_state()))
        return self._builder.get()

    def _load_state(self) -> GalleryState:
        """Return the current state, after loading changes."""
        with _translate_errors():
            if self.index.state() == self._state.index_state:
                return self._state
            with self._lock:  # one thread loads, the others wait for it
                index_state = self.index.state()
                if index_state != self._state.index_state:
                    self._state = self._build_state(self._state, index_state)
                return self._state

    def _build_state(self, old: GalleryState, index_state: IndexState) -> GalleryState:
        """Return the next state; it keeps the answers if its maps have the same items."""
        served = tuple(
            ServedMap(self.index, published, self.name, self._extractor, self._extras, self.index.alive(published))
            for published in self.index.maps()
        )
        pairs = list(zip(served, old.maps, strict=False))
        same_maps = len(served) == len(old.maps) and all(new.published is last.published for new, last in pairs)
        if same_maps and all(np.array_equal(np.asarray(new.alive), np.asarray(last.alive)) for new, last in pairs):
            old.index_state = index_state
            return old
        return GalleryState(index_state, served, ByteCache(self._cache_bytes), old.code_groups)


def _require_maps(state: GalleryState) -> ServedMap:
    """Return the newest map; raise ServiceError if there is none."""
    if not state.maps:
        raise ServiceError("unknown", "This gallery has not published a map yet.")
    return state.maps[0]


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn errors of an index, which may quote private values, into one for clients."""
    try:
        yield
    except IndexStoreError as error:
        _LOG.warning("cannot read an index: %s", type(error).__name__)
        raise ServiceError("unavailable", "The gallery cannot be read now. Try again later.") from None
