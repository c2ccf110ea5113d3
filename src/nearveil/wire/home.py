"""Search at home: a gallery's codes, handed out to everybody alike, kept in a folder and searched there.

Ids are cut into groups, groups into blocks. A block has a digest of its content, a group one of its blocks' digests,
and the manifest lists the groups. So a client that has a copy fetches the manifest, the list of a group that changed,
and the blocks that changed in it. ``docs/theory/home.md`` says what that tells, and what it does not.
"""

import fcntl
import hashlib
import os
import re
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.errors import NearveilError
from nearveil.gallery.answers import LARGEST_DETAILS, Bytes, ItemDetails, Rows, Singles, encode_name, read_details
from nearveil.privacy.checks import is_integer
from nearveil.storage import flush_folder, make_private_folder
from nearveil.wire.client import center_rows
from nearveil.wire.frames import (
    DEFAULT_LIMITS,
    Kind,
    Reader,
    WireError,
    check_text,
    check_whole,
    frame,
    open_frame,
    read_fields,
    unframe,
    write_fields,
)
from nearveil.wire.messages import PublicPart, decode_frame

GROUP_BITS, BLOCK_BITS = 14, 8  # ids of a group, which is one file and one request; of a block, which is fetched alone
_BLOCKS = 1 << (GROUP_BITS - BLOCK_BITS)  # of a group
_DIGEST = 32  # bytes
_LENGTH = 4  # bytes that say how long a block is
_MOST_COLUMNS = 4
_WORTH = 0.9  # of its size that a group must shrink to, or it is sent as it is
_HALF = 1 << 30  # bytes of rows in memory above which they are held in 16 bits
_SMALLEST_NUMBER, _LARGEST_NUMBER = 1e-10, 6e4  # of rows that FAISS compares; 16 bits hold 6e4
_WIDER = 4  # candidates for each neighbour that are compared by their codes
_MANIFEST, _PUBLIC, _LOCK, _DRAFT, _METADATA = "manifest", "public", "lock", "draft-", "metadata"
_OWN = re.compile(rf"[0-9a-f]{{64}}\.codes|{_DRAFT}.*")  # files that may be deleted: groups, and what was cut off

Text = Callable[[NDArray[np.uint32]], Sequence[bytes]]


class HomeError(NearveilError):
    """A copy of a gallery's codes cannot be used: it is missing, damaged, or of another gallery."""


@dataclass(frozen=True, eq=False)
class Block:
    """Ids, codes and texts of at most 256 items whose ids follow each other."""

    ids: NDArray[np.uint32]
    codes: Bytes
    texts: tuple[tuple[NDArray[np.int64], bytes], ...] = ()  # for each column, where its texts end, and all of them

    @classmethod
    def make(cls, ids: NDArray[np.uint32], codes: Bytes, columns: Iterable[Sequence[bytes]]) -> Self:
        """Return a block of items; `columns` has a text for each of them."""
        texts = tuple((np.cumsum([len(one) for one in texts], dtype=np.int64), b"".join(texts)) for texts in columns)
        return cls(ids, codes, texts)

    def to_bytes(self) -> bytes:
        """Return the block as bytes: what its digest is of."""
        parts = [np.array(self.codes.shape, "<u4").tobytes(), self.ids.astype("<u4").tobytes(), self.codes.tobytes()]
        for ends, text in self.texts:
            parts += [ends.astype("<u4").tobytes(), text]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes, width: int, n_columns: int) -> Self:
        """Read a block. Nothing in it is trusted."""
        taken = Reader(data)
        count, found = np.frombuffer(taken.take(8), "<u4").tolist()
        if not 1 <= count <= 1 << BLOCK_BITS or found != width:
            raise WireError(f"a block must hold 1 to {1 << BLOCK_BITS} codes of {width} bytes")
        ids = np.frombuffer(taken.take(4 * count), "<u4").astype(np.uint32)
        if (ids[1:] <= ids[:-1]).any() or ids[0] >> BLOCK_BITS != ids[-1] >> BLOCK_BITS:
            raise WireError("ids of a block must rise, and follow each other")
        codes = np.frombuffer(taken.take(count * width), np.uint8).reshape(count, width)
        texts = []
        for _ in range(n_columns):
            ends = np.frombuffer(taken.take(4 * count), "<u4").astype(np.int64)
            lengths = np.diff(ends, prepend=0)
            if (lengths < 0).any() or (lengths > LARGEST_DETAILS).any():
                raise WireError(f"texts of a block must follow each other, each of at most {LARGEST_DETAILS:,} bytes")
            texts.append((ends, taken.take(int(ends[-1]))))
        taken.check_end()
        return cls(ids, codes, tuple(texts))


@dataclass(frozen=True, eq=False)
class CodesManifest:
    """What a gallery hands out: one digest for each group of ids."""

    kind: ClassVar[Kind] = Kind.CODES_MANIFEST

    gallery: str
    revision: int  # of the map whose codes they are
    public_digest: str  # of mean and table: the public part that reads the codes
    width: int  # bytes of a code
    columns: tuple[str, ...]  # texts that come with each item, such as its name
    items: int
    groups: Mapping[int, bytes] = field(repr=False)  # number of a group: its digest

    def to_bytes(self) -> bytes:
        """Return the manifest as bytes."""
        body = write_fields(
            self.gallery,
            self.revision,
            self.public_digest,
            self.width,
            " ".join(self.columns),
            self.items,
            np.array(list(self.groups), "<u4").tobytes(),
            b"".join(self.groups.values()),
        )
        return frame(self.kind, body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a manifest. Nothing in it is trusted."""
        gallery, revision, digest, width, words, items, listed, digests = read_fields(
            open_frame(data, cls.kind), str, int, str, int, str, int, bytes, bytes
        )
        columns = tuple(words.split())
        if len(listed) % 4:
            raise WireError("groups must be numbers of 32 bits")
        numbers = np.frombuffer(listed, "<u4")
        check_text(gallery, "gallery")
        check_whole(width, "width", 1 << 20)
        if len(columns) > _MOST_COLUMNS or not all(column.isidentifier() for column in columns):
            raise WireError(f"columns must be at most {_MOST_COLUMNS} names")
        if (numbers[1:] <= numbers[:-1]).any() or len(numbers) > 1 << (32 - GROUP_BITS):
            raise WireError("groups must rise, each once")
        if len(digests) != _DIGEST * len(numbers) or not width or not items <= len(numbers) << GROUP_BITS:
            raise WireError("a manifest must hold a digest for each group, and no more items than they can")
        cut = [digests[start : start + _DIGEST] for start in range(0, len(digests), _DIGEST)]
        groups = dict(zip(numbers.tolist(), cut, strict=True))
        return cls(gallery, revision, digest, width, columns, items, groups)


@dataclass(frozen=True, eq=False)
class CodesGroup:
    """The digests of all blocks of a group, and some of the blocks, or all, as bytes."""

    kind: ClassVar[Kind] = Kind.CODES_GROUP

    number: int
    digests: Mapping[int, bytes]  # number of a block in the group: its digest
    blocks: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    read_from: bytes = field(default=b"", repr=False)  # the frame that it was read from, if it was
    size: int = 0  # bytes of all blocks, unpacked

    @property
    def digest(self) -> bytes:
        """What a manifest holds of it."""
        return hashlib.sha256(_join_digests(self.digests)).digest()

    def read_blocks(self, width: int, n_columns: int) -> Iterator[Block]:
        """Yield the blocks that are here, each with ids of its own place alone. Nothing in them is trusted."""
        first = self.number << (GROUP_BITS - BLOCK_BITS)
        for place, content in self.blocks.items():
            block = Block.from_bytes(content, width, n_columns)
            if block.ids[0] >> BLOCK_BITS != first + place:
                raise WireError("a block must hold the ids of its place")
            yield block

    def check_blocks(self, width: int, n_columns: int) -> None:
        """Read all blocks, one at a time: a digest does not show that bytes are valid."""
        for _ in self.read_blocks(width, n_columns):
            pass

    def to_bytes(self) -> bytes:
        """Return the group as bytes, packed where that is worth it; as it was read, if it was."""
        if self.read_from:
            return self.read_from
        plain = write_fields(*self.blocks.values())
        packed = zlib.compress(plain, 1) if _packs(plain) else plain
        body = write_fields(self.number, _join_digests(self.digests), bytes(self.blocks), len(plain), packed)
        return frame(self.kind, body, int(packed is not plain))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a group and check every block by its digest. Nothing else in it is trusted."""
        kind, flags, body = unframe(data, DEFAULT_LIMITS)
        if kind != cls.kind or flags > 1:
            raise WireError("data is no group of codes")
        number, joined, which, size, packed = read_fields(body, int, bytes, bytes, int, bytes)
        digests, size = _cut_digests(joined), size if flags else len(packed)
        blocks = dict(zip(which, _cut_blocks(_unpack(packed, size) if flags else packed, len(which)), strict=True))
        if list(blocks) != sorted(set(which)) or not digests.keys() >= blocks.keys():
            raise WireError("blocks must rise, each once, and have digests")
        if any(hashlib.sha256(content).digest() != digests[one] for one, content in blocks.items()):
            raise WireError("a block is not what its digest says")
        return cls(number, digests, blocks, data, size)


class CodesSource:
    """The server's side: all codes of a published map that are still there, cut into groups. `ids` rise.

    `known` holds groups by the digest of their ids and codes, so that a change costs only the groups that it touches.
    """

    def __init__(
        self,
        public: PublicPart,
        ids: NDArray[np.uint32],
        codes: Bytes,
        texts: Mapping[str, Text],
        known: "dict[bytes, CodesGroup] | None" = None,
    ) -> None:
        self._public, self._ids, self._codes, self._texts = public, ids, codes, texts
        self._known = {} if known is None else known
        self._keys: set[bytes] = set()
        self.is_too_large = False  # for clients, by texts that are too long; known with the manifest
        numbers, starts = np.unique(ids >> GROUP_BITS, return_index=True)
        self._ranges = dict(zip(numbers.tolist(), zip(starts, [*starts[1:], len(ids)], strict=True), strict=True))

    @cached_property
    def manifest(self) -> CodesManifest:
        """All groups with their digests. The first time, every item of a group that is not known is read."""
        before = set(self._known)
        held = {number: self._hash_group(number) for number in self._ranges}
        groups = {number: group.digest for number, group in held.items()}
        self.is_too_large = any(group.size > DEFAULT_LIMITS.codes_group for group in held.values())
        for key in before - self._keys:  # of groups that are no more
            del self._known[key]
        part, columns = self._public, tuple(self._texts)
        return CodesManifest(
            part.gallery, part.revision, part.public_digest, self._codes.shape[1], columns, len(self._ids), groups
        )

    def group(self, number: int, blocks: Iterable[int] | None = None) -> CodesGroup | None:
        """Return a group with some of its blocks, or all; None where there is no such group."""
        if number not in self._ranges:
            return None
        held = self._hash_group(number)
        wanted = set(held.digests) if blocks is None else set(blocks) & set(held.digests)
        contents = dict(self._blocks(number, wanted)) if wanted else {}
        return CodesGroup(number, held.digests, contents)

    def _hash_group(self, number: int) -> CodesGroup:
        rows = slice(*self._ranges[number])
        key = hashlib.sha256(self._ids[rows].tobytes() + np.ascontiguousarray(self._codes[rows]).tobytes()).digest()
        self._keys.add(key)
        if key not in self._known:
            digests, size = {}, 0
            for one, content in self._blocks(number):
                digests[one], size = hashlib.sha256(content).digest(), size + _LENGTH + len(content)
            self._known[key] = CodesGroup(number, digests, size=size)
        return self._known[key]

    def _blocks(self, number: int, wanted: set[int] | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield blocks of a group, as bytes."""
        start, stop = self._ranges[number]
        ids = self._ids[start:stop]
        places = (ids >> BLOCK_BITS) & (_BLOCKS - 1)
        if wanted is not None:
            keep = np.isin(places, sorted(wanted))
            ids, places, codes = ids[keep], places[keep], self._codes[start:stop][keep]
        else:
            codes = self._codes[start:stop]
        columns = [read(ids) for read in self._texts.values()]
        edges = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(ids)]
        for first, last in pairwise(edges):
            block = Block.make(ids[first:last], codes[first:last], [texts[first:last] for texts in columns])
            yield int(places[first]), block.to_bytes()


class HomeCopy:
    """All codes of a gallery, in a folder, searched on this machine. Made by :meth:`nearveil.Client.sync`.

    Everybody who may ask the gallery downloads the same, so neither the copy nor a search tells what is looked for.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder, self._lock = Path(folder), threading.Lock()
        self._loaded: _Rows | None = None
        self.manifest: CodesManifest | None = None
        self.public: PublicPart | None = None
        self.fetched = 0  # bytes, when it was last synchronised by this process
        self.is_corrupted = False  # whether the manifest cannot be read; the next synchronisation replaces it
        self._read_manifest()

    def _read_manifest(self) -> None:
        """Load the manifest and the public part, if the folder holds a whole copy."""
        self.is_corrupted = False
        try:
            held, part = (self._folder / _MANIFEST).read_bytes(), (self._folder / _PUBLIC).read_bytes()
            manifest, public = CodesManifest.from_bytes(held), decode_frame(part, PublicPart)
        except (FileNotFoundError, NotADirectoryError):
            return
        except WireError:
            self.manifest = self.public = None
            self.is_corrupted = True
            return
        except OSError as error:
            raise HomeError(f"Cannot read the local copy in {self._folder}: {error.strerror}.") from error
        if manifest.public_digest == public.public_digest:  # else it was killed between the two files
            self.manifest, self.public = manifest, public

    def __len__(self) -> int:
        return 0 if self.manifest is None else self.manifest.items

    @property
    def folder(self) -> Path:
        """Where the copy is."""
        return self._folder

    def find_changed(self, manifest: CodesManifest) -> dict[int, bool]:
        """Return the groups of a manifest that the copy lacks; True for those that it has in an older form.

        All files are read and compared with their digests, so that a corrupted one is fetched again.
        """
        same = self.manifest is not None and self.manifest.public_digest == manifest.public_digest
        held = self.manifest.groups if same and self.manifest is not None else {}
        changed = {}
        for number, digest in manifest.groups.items():
            if held.get(number) != digest or not self._is_intact(number):
                changed[number] = held.get(number) not in (None, digest) and self._is_intact(number)
        return changed

    def _is_intact(self, number: int) -> bool:
        """Return whether the file of a group is there and has the group's digest."""
        group = self.read_group(number)
        return group is not None and self.manifest is not None and group.digest == self.manifest.groups.get(number)

    def read_group(self, number: int) -> CodesGroup | None:
        """Return a group as the copy holds it; None where it is missing or damaged."""
        digest = self.manifest.groups.get(number) if self.manifest is not None else None
        try:
            return None if digest is None else CodesGroup.from_bytes(self._path(digest).read_bytes())
        except (WireError, OSError):
            return None

    def write_group(self, group: CodesGroup) -> None:
        """Keep a whole group. It counts when :meth:`commit` names it."""
        if group.blocks.keys() != group.digests.keys():
            raise WireError("a group must have all of its blocks")
        with _report_disk_errors(self._folder):
            make_private_folder(self._folder)
            _write_file(self._path(group.digest), group.to_bytes())

    def commit(self, manifest: CodesManifest, public: PublicPart) -> None:
        """Take a manifest whose groups are all there, and delete what it does not name."""
        missing = [number for number, digest in manifest.groups.items() if not self._path(digest).is_file()]
        if missing:
            raise HomeError(f"{len(missing)} groups are missing; run `nearveil sync` again")
        if manifest.public_digest != public.public_digest or manifest.width != public.table.width:
            raise WireError("the codes are of another map than the public part; run `nearveil sync` again")
        with self._lock, _report_disk_errors(self._folder):
            make_private_folder(self._folder)
            _write_file(self._folder / _PUBLIC, public.to_bytes())
            _write_file(self._folder / _MANIFEST, manifest.to_bytes())
            flush_folder(self._folder)
            self.manifest, self.public, self._loaded, self.is_corrupted = manifest, public, None, False
        kept = {self._path(digest).name for digest in manifest.groups.values()}
        for path in self._folder.iterdir():
            if _OWN.fullmatch(path.name) and path.name not in kept:  # what others put there is theirs
                path.unlink(missing_ok=True)

    def lock(self) -> BinaryIO | None:
        """Keep others from changing the copy until what this returns is closed; None where another does so now."""
        with _report_disk_errors(self._folder):
            make_private_folder(self._folder)
            file = (self._folder / _LOCK).open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        self._read_manifest()  # another process may have synchronised since
        return file

    def search(self, rows: ArrayLike, k: int = 8) -> tuple[NDArray[np.int64], Singles]:
        """Return ids and scores, shape (q, k), of the items nearest to private features, shape (q, d), best first.

        Nothing is sent, nothing is paid.
        """
        held = self._load()
        queries = center_rows(held.public, rows)
        if not is_integer(k, 1, len(held.ids)):
            raise ValueError(f"k must be a whole number from 1 to {len(held.ids)}, the items of the copy")
        return held.search(queries, k)

    def texts(self, ids: ArrayLike, column: str = "names") -> list[str]:
        """Return the names, or the texts of another column, of items; empty where the gallery tells none."""
        return self._load().texts(np.asarray(ids, np.int64), column)

    @property
    def has_metadata(self) -> bool:
        """Whether the gallery hands out metadata with its codes."""
        return self.manifest is not None and _METADATA in self.manifest.columns

    def details(self, ids: ArrayLike) -> list[ItemDetails]:
        """Return names of items, and their owner's ids and metadata where the gallery offers them.

        Invalid metadata of an item counts as empty. An error here would depend on what was searched for.
        """
        held, wanted = self._load(), np.asarray(ids, np.int64)
        if not self.has_metadata:
            return [ItemDetails(name) for name in held.texts(wanted, "names")]
        return [_read_details_or_empty(content) for content in held.contents(wanted, _METADATA)]

    def load(self) -> "HomeCopy":
        """Return the copy as it is now, in memory; HomeError where it is missing or corrupted.

        A synchronisation does not change it. Otherwise a search would fail if an item that it finds is deleted
        meanwhile: an error that depends on what was searched for.
        """
        rows, snapshot = self._load(), copy(self)
        rows.build_index()
        snapshot.manifest, snapshot.public, snapshot._loaded = rows.manifest, rows.public, rows
        return snapshot

    @property
    def text_bytes(self) -> int:
        """Bytes of all texts of the copy."""
        return self._load().text_bytes

    @property
    def longest_text(self) -> int:
        """Bytes of the longest text of an item."""
        return self._load().longest_text

    def count_scored(self, k: int) -> int:
        """Return how many items are compared by their codes to find the k nearest."""
        return self._load().count_scored(k)

    def codes(self, ids: ArrayLike) -> Bytes:
        """Return the codes of items, shape (n, b)."""
        held = self._load()
        return held.codes[held.find(np.asarray(ids, np.int64))]

    def _load(self) -> "_Rows":
        with self._lock:
            if self._loaded is None:
                self._read_manifest()  # another process may have synchronised since
                if self.is_corrupted:
                    raise self._make_corruption_error()
                if self.manifest is None or self.public is None or not self.manifest.items:
                    raise HomeError(f"there is no copy in {self._folder}: synchronise first (`nearveil sync`)")
                self._loaded = _Rows(self.public, self.manifest, self._read_blocks())
            return self._loaded

    def _read_blocks(self) -> Iterator[Block]:
        assert self.manifest is not None
        for number in self.manifest.groups:
            group = self.read_group(number)
            if group is None or group.digest != self.manifest.groups[number]:
                raise self._make_corruption_error()
            yield from group.read_blocks(self.manifest.width, len(self.manifest.columns))

    def _make_corruption_error(self) -> HomeError:
        return HomeError(f"The local copy in {self._folder} is corrupted; run `nearveil sync` or Client.sync().")

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}.codes"


class _Rows:
    """A copy in memory, ready to be searched."""

    def __init__(self, public: PublicPart, manifest: CodesManifest, blocks: Iterator[Block]) -> None:
        held = list(blocks)
        self.public, self.manifest, self._table, self._columns = public, manifest, public.table, manifest.columns
        self.ids = np.concatenate([block.ids for block in held])
        self.codes = np.concatenate([block.codes for block in held])
        if len(self.ids) != manifest.items:
            raise HomeError("the copy has other items than its manifest says: synchronise again")
        self._edges = np.cumsum([0] + [len(block.ids) for block in held])
        self._blocks = [block.texts for block in held]

    def build_index(self) -> None:
        """Build the search index, unless it is there."""
        self._index.search(np.zeros((1, self._index.d), np.float32), 1)

    @cached_property
    def text_bytes(self) -> int:
        """Bytes of all texts."""
        return sum(len(text) for texts in self._blocks for _, text in texts)

    @cached_property
    def longest_text(self) -> int:
        """Bytes of the longest text of an item."""
        lengths = [int(np.diff(ends, prepend=0).max()) for texts in self._blocks for ends, _ in texts]
        return max(lengths, default=0)

    def count_scored(self, k: int) -> int:
        """Return how many items are compared by their codes to find the k nearest."""
        return min(len(self.ids), _WIDER * k + 16)

    @cached_property
    def _index(self) -> Any:
        """FAISS over the rows that codes stand for."""
        import faiss

        sample = self._table.decode(self.codes[:1])
        n_bytes = 4 * sample.shape[1] * len(self.codes)
        make = faiss.IndexFlatIP if n_bytes <= _HALF else _make_half
        index = make(sample.shape[1])
        with np.errstate(all="ignore"):
            for start in range(0, len(self.codes), 1 << 16):
                index.add(_limit_range(self._table.decode(self.codes[start : start + (1 << 16)])))
        return index

    def search(self, queries: NDArray[np.float64], k: int) -> tuple[NDArray[np.int64], Singles]:
        """Return ids and scores of the nearest, compared by their codes."""
        with np.errstate(all="ignore"):  # a hostile table may hold numbers of any size
            turned = _limit_range(self._table.project(queries))
            places = self._index.search(turned, self.count_scored(k))[1]
            ids, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
            for row, found in enumerate(np.sort(places, axis=1)):
                near = self._table.scores(queries[row : row + 1], self.codes[found])[0]
                near = np.nan_to_num(near, nan=float(np.finfo(np.float32).min))
                best = np.argsort(-near, kind="stable")[:k]
                ids[row], scores[row] = self.ids[found[best]], near[best]
        return ids, scores

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return where items are."""
        places = np.searchsorted(self.ids, ids)
        if (places == len(self.ids)).any() or (self.ids[places] != ids).any():
            raise ValueError("ids must be of items of the copy")
        return places

    def texts(self, ids: NDArray[np.int64], column: str) -> list[str]:
        """Return a text of each id."""
        return [encode_name(content.decode(errors="replace")).decode() for content in self.contents(ids, column)]

    def contents(self, ids: NDArray[np.int64], column: str) -> list[bytes]:
        """Return what a column holds of each id, as it came; empty where there is no such column."""
        if column not in self._columns:
            return [b""] * len(ids)
        which, told = self._columns.index(column), []
        for place in self.find(ids).tolist():
            block = int(np.searchsorted(self._edges, place, side="right")) - 1
            ends, text = self._blocks[block][which]
            at = place - int(self._edges[block])
            told.append(text[int(ends[at - 1]) if at else 0 : int(ends[at])])
        return told


def _limit_range(values: Rows) -> Singles:
    """Return numbers with products that neither overflow nor are subnormal, in 32 bits.

    FAISS leaves out items without a finite score, and subnormal numbers are slow on some processors: a hostile table
    would choose for which queries. Numbers of an honest table are about 1.
    """
    finite = np.clip(np.nan_to_num(values), -_LARGEST_NUMBER, _LARGEST_NUMBER)
    return np.where(np.abs(finite) < _SMALLEST_NUMBER, 0, finite).astype(np.float32)


def _read_details_or_empty(content: bytes) -> ItemDetails:
    """Read the details of an item; those of a hostile gallery may be invalid."""
    try:
        return read_details(content)
    except WireError:
        return ItemDetails()


def _make_half(dimension: int) -> Any:
    import faiss

    return faiss.IndexScalarQuantizer(dimension, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)


def _join_digests(digests: Mapping[int, bytes]) -> bytes:
    return b"".join(bytes([number]) + digest for number, digest in digests.items())


def _cut_digests(joined: bytes) -> dict[int, bytes]:
    size = 1 + _DIGEST
    if len(joined) % size or not 0 < len(joined) <= _BLOCKS * size:
        raise WireError(f"a group must have 1 to {_BLOCKS} blocks")
    found = {joined[at]: joined[at + 1 : at + size] for at in range(0, len(joined), size)}
    if list(found) != sorted(found) or len(found) != len(joined) // size or max(found) >= _BLOCKS:
        raise WireError("blocks of a group must rise, each once")
    return found


def _cut_blocks(plain: bytes, count: int) -> list[bytes]:
    return list(read_fields(plain, *[bytes] * count))


def _packs(plain: bytes) -> bool:
    """Return whether packing is worth it, by a look at the middle."""
    middle = plain[len(plain) // 2 :][: 1 << 16]
    return len(zlib.compress(middle, 1)) < _WORTH * len(middle)


def _unpack(packed: bytes, size: int) -> bytes:
    """Unpack as many bytes as were said, and no more."""
    if size > DEFAULT_LIMITS.codes_group:
        raise WireError("a group is larger than any may be")
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(packed, size + 1)
    except zlib.error:
        raise WireError("a group cannot be unpacked") from None
    if len(plain) != size or not unpacker.eof or unpacker.unused_data:
        raise WireError("a group is not as long as it says")
    return plain


def _write_file(path: Path, content: bytes) -> None:
    """Write a file durably and whole, or not at all."""
    descriptor, name = tempfile.mkstemp(prefix=_DRAFT, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def _report_disk_errors(folder: Path) -> Iterator[None]:
    """Name the folder and the remedy if its disk is full or read-only."""
    try:
        yield
    except OSError as error:
        raise HomeError(
            f"Cannot write the local copy in {folder}: {error.strerror}. Free space on its disk, or choose another "
            "folder with home= or --home. What was there before is still usable."
        ) from error
