"""What a service answers from: galleries, and the kind whose candidates may be shown."""

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, NoReturn, Protocol, cast, get_args, runtime_checkable

from nearveil.frames import Kind
from nearveil.gallery.answers import EXTRAS, Extras
from nearveil.gallery.errors import IndexStoreError, UnknownItemError
from nearveil.gallery.index import Index
from nearveil.gallery.publishing import Stamp
from nearveil.protocol.server import ServerProtocol, public_part
from nearveil.protocol.wire import MapChanged
from nearveil.service._cache import ByteCache
from nearveil.service._errors import NotOfferedError, UnavailableError, UnknownError
from nearveil.service._frames import FLAGS, KIND
from nearveil.service._model import GALLERY_NAME, MOST_MAPS, GalleryInfo
from nearveil.service._shown import Settled, Shown

_LOG = logging.getLogger(__name__)
Offer = Literal["names", "thumbnails", "originals"]
OFFERS: tuple[Offer, ...] = get_args(Offer)
_LONGEST_KEY = 4096  # bytes of a query whose answer is remembered: ours have some hundred
_CACHE = 256 << 20
_ORIGINALS, _NOTHING_ELSE = EXTRAS.index("originals"), bytes([EXTRAS.index("none")])


class Gallery(Protocol):
    """What both kinds of gallery do. Any number of threads may call it at once.

    Errors are `ServiceError`; their texts go to clients.
    """

    @property
    def name(self) -> str:
        """Of the gallery, as clients call it."""
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

    def refresh(self) -> None:
        """Look whether something new was published."""
        ...

    def close(self) -> None:
        """Close what it holds open."""
        ...


@runtime_checkable
class QuickGallery(Protocol):
    """A gallery that may answer on the event loop, from memory, as it was when `refresh` was last called."""

    def known(self, data: bytes) -> bytes | None:
        """Return what `query` would have then, or None where that takes a thread."""
        ...

    def known_map(self, candidates: float | None = None) -> bytes | None:
        """Return what `map` would have then, or None where that takes a thread."""
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
    offers : sequence of {"names", "thumbnails", "originals"}, default=("names", "thumbnails")
        What is sent with all candidates, to those who ask for it.
    extractor : str, default=""
        The name of what makes the features, for people.
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
        self._index, self._name, self._extractor, self._cache = index, name, extractor, cache
        self._offers = tuple(word for word in OFFERS if word in offers)
        self._on_wire = cast("tuple[Extras, ...]", tuple(word for word in EXTRAS if word in offers))
        self._lock = threading.Lock()
        self._shown = Shown(Stamp(-1, ()), (), None, ByteCache(0), {})

    @property
    def name(self) -> str:
        """Of the gallery, as clients call it."""
        return self._name

    @property
    def index(self) -> Index:
        """What is behind it."""
        return self._index

    @property
    def stale(self) -> bool:
        """Whether items were added or deleted after the newest map was learned, or none was."""
        shown = self._now()
        return not shown.maps or shown.maps[0].revision != shown.stamp.revision

    def info(self) -> GalleryInfo:
        """Return what a client may know before it asks."""
        maps = self._now().maps
        fractions = dict.fromkeys(float(one.release.candidates) for one in maps)
        return GalleryInfo(
            name=self._name,
            kind="open",
            candidates=tuple(fractions)[:MOST_MAPS],
            offers=self._offers,
            extractor=self._extractor,
            fingerprint=self._index.extractor,
            dimension=self._index.dimension,
            revision=maps[0].revision if maps else 0,
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
        shown = self._now()
        number = shown.place(candidates)
        if number is None:
            if not shown.maps:
                raise UnknownError("nothing was published in this gallery yet")
            there = ", ".join(f"{fraction:g}" for fraction in self.info().candidates)
            raise UnknownError(f"candidates must be a fraction that this gallery has a map for: {there}")
        frame = shown.frames.get(number)
        if frame is None:
            frame = shown.frames[number] = public_part(shown.maps[number]).to_bytes()
        return frame

    def known_map(self, candidates: float | None = None) -> bytes | None:
        """Return what `map` would have when `refresh` was last called, if that takes no waiting."""
        shown = self._shown
        number = shown.place(candidates)
        return None if number is None else shown.frames.get(number)

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
        return self._reply(self._now(), data)

    def known(self, data: bytes) -> bytes | None:
        """Return what `query` would have when `refresh` was last called, if that takes no waiting.

        Parameters
        ----------
        data : bytes

        Returns
        -------
        bytes or None
            An answer that was made before, or a small one.
        """
        shown = self._shown
        if shown.small and data[FLAGS : FLAGS + 1] == _NOTHING_ELSE:  # ids and codes lie in memory
            return self._reply(shown, data)
        return shown.answers.get(data)

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

    def refresh(self) -> None:
        """Look whether something new was published."""
        self._now()

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def _reply(self, shown: Shown, data: bytes) -> bytes:
        found = shown.answers.get(data)
        if found is not None:
            return found
        if shown.protocol is None:
            return MapChanged(self._name, 0).to_bytes()
        found = shown.protocol.answer(data)
        # Originals may be files, which change without our knowing.
        if found[KIND] == Kind.ANSWER and found[FLAGS] != _ORIGINALS and len(data) <= _LONGEST_KEY:
            shown.answers.put(data, found)
        return found

    def _now(self) -> Shown:
        """Return what is shown now, after reading what has changed."""
        with _in_words():
            stamp = self._index.stamp()
            if stamp == self._shown.stamp:
                return self._shown
            with self._lock:  # one thread reads, the others wait for it
                stamp = self._index.stamp()
                if stamp != self._shown.stamp:
                    self._shown = self._changed(self._shown, stamp)
                return self._shown

    def _changed(self, old: Shown, stamp: Stamp) -> Shown:
        """Return what is shown from now on; answers are kept where no item of a map was deleted."""
        maps = tuple(
            Settled(self._index, one, self._name, self._extractor, self._on_wire, self._index.alive(one))
            for one in self._index.maps()
        )
        pairs = zip(maps, old.maps, strict=False)
        if len(maps) != len(old.maps) or any(new.published is not was.published for new, was in pairs):
            return Shown(stamp, maps, ServerProtocol(*maps) if maps else None, ByteCache(self._cache), {})
        if all(new.living is was.living for new, was in zip(maps, old.maps, strict=True)):
            return replace(old, stamp=stamp)
        return Shown(stamp, maps, ServerProtocol(*maps), ByteCache(self._cache), old.frames)


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
