"""The codes of a gallery for local search, the same for everyone: a manifest, groups of ids, and blocks of a group.

A block has a digest of its content, a group one of its blocks' digests, and the manifest lists the groups. So a client
with a copy fetches the manifest, the lists of changed groups, and their changed blocks (``docs/theory/home.md``).
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from nearveil.gallery.answers import LARGEST_DETAILS
from nearveil.gallery.codes import Bytes
from nearveil.wire import frames
from nearveil.wire.frames import Kind, Reader, WireError
from nearveil.wire.messages import PublicPart

GROUP_BITS, BLOCK_BITS = 14, 8  # of ids: a group is one file and one request, a block is the unit of an update
_BLOCKS = 1 << (GROUP_BITS - BLOCK_BITS)  # of a group
_DIGEST = 32  # bytes
_LENGTH = 4  # bytes of the length of a block
_MAX_COLUMNS = 4
_COMPRESSED = 0.9  # of its size: a group that shrinks less is sent uncompressed

Text = Callable[[NDArray[np.uint32]], Sequence[bytes]]


@dataclass(frozen=True, eq=False)
class Block:
    """Ids, codes and texts of at most 256 items with consecutive ids."""

    ids: NDArray[np.uint32]
    codes: Bytes
    texts: tuple[tuple[NDArray[np.int64], bytes], ...] = ()  # for each column: the ends of its texts, and all of them

    @classmethod
    def make(cls, ids: NDArray[np.uint32], codes: Bytes, columns: Iterable[Sequence[bytes]]) -> Self:
        """Return a block of items; `columns` has a text for each of them."""
        ends = (np.cumsum([len(text) for text in column], dtype=np.int64) for column in columns)
        texts = tuple(zip(ends, map(b"".join, columns), strict=True))
        return cls(ids, codes, texts)

    def to_bytes(self) -> bytes:
        """Encode the block; its digest is that of these bytes."""
        parts = [np.array(self.codes.shape, "<u4").tobytes(), self.ids.astype("<u4").tobytes(), self.codes.tobytes()]
        for ends, text in self.texts:
            parts += [ends.astype("<u4").tobytes(), text]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes, width: int, n_columns: int) -> Self:
        """Decode a block. Nothing in it is trusted."""
        reader = Reader(data)
        count, code_bytes = np.frombuffer(reader.take(8), "<u4").tolist()
        if not 1 <= count <= 1 << BLOCK_BITS or code_bytes != width:
            raise WireError(f"a block must hold 1 to {1 << BLOCK_BITS} codes of {width} bytes")
        ids = np.frombuffer(reader.take(4 * count), "<u4").astype(np.uint32)
        if (ids[1:] <= ids[:-1]).any() or ids[0] >> BLOCK_BITS != ids[-1] >> BLOCK_BITS:
            raise WireError("ids of a block must rise, and follow each other")
        codes = np.frombuffer(reader.take(count * width), np.uint8).reshape(count, width)
        texts = []
        for _ in range(n_columns):
            ends = np.frombuffer(reader.take(4 * count), "<u4").astype(np.int64)
            lengths = np.diff(ends, prepend=0)
            if (lengths < 0).any() or (lengths > LARGEST_DETAILS).any():
                raise WireError(f"texts of a block must follow each other, each of at most {LARGEST_DETAILS:,} bytes")
            texts.append((ends, reader.take(int(ends[-1]))))
        reader.check_end()
        return cls(ids, codes, tuple(texts))


@dataclass(frozen=True, eq=False)
class CodesManifest:
    """The codes that a gallery offers: one digest for each group of ids."""

    kind: ClassVar[Kind] = Kind.CODES_MANIFEST

    gallery: str
    revision: int  # of the map
    public_digest: str  # of the public part that decodes the codes
    width: int  # bytes of a code
    columns: tuple[str, ...]  # texts of each item, such as its name
    items: int
    groups: Mapping[int, bytes] = field(repr=False)  # digest by number

    def to_bytes(self) -> bytes:
        """Encode the manifest as a frame."""
        body = frames.write_fields(
            self.gallery,
            self.revision,
            self.public_digest,
            self.width,
            " ".join(self.columns),
            self.items,
            np.array(list(self.groups), "<u4").tobytes(),
            b"".join(self.groups.values()),
        )
        return frames.frame(self.kind, body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode a manifest. Nothing in it is trusted."""
        gallery, revision, digest, width, words, items, listed, digests = frames.read_fields(
            frames.open_frame(data, cls.kind), str, int, str, int, str, int, bytes, bytes
        )
        columns = tuple(words.split())
        if len(listed) % 4:
            raise WireError("groups must be numbers of 32 bits")
        numbers = np.frombuffer(listed, "<u4")
        frames.check_text(gallery, "gallery")
        frames.check_whole(width, "width", 1 << 20)
        if len(columns) > _MAX_COLUMNS or not all(column.isidentifier() for column in columns):
            raise WireError(f"columns must be at most {_MAX_COLUMNS} names")
        if (numbers[1:] <= numbers[:-1]).any() or len(numbers) > 1 << (32 - GROUP_BITS):
            raise WireError("groups must rise, each once")
        if len(digests) != _DIGEST * len(numbers) or not width or not items <= len(numbers) << GROUP_BITS:
            raise WireError("a manifest must hold a digest for each group, and no more items than they can")
        cut = [digests[start : start + _DIGEST] for start in range(0, len(digests), _DIGEST)]
        groups = dict(zip(numbers.tolist(), cut, strict=True))
        return cls(gallery, revision, digest, width, columns, items, groups)


@dataclass(frozen=True, eq=False)
class CodesGroup:
    """The digests of all blocks of a group, and the bytes of some or all of them."""

    kind: ClassVar[Kind] = Kind.CODES_GROUP

    number: int
    digests: Mapping[int, bytes]  # by number in the group
    blocks: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    read_from: bytes = field(default=b"", repr=False)  # its frame, if it was decoded from one
    size: int = 0  # bytes of all blocks, unpacked

    @property
    def digest(self) -> bytes:
        """Digest of the group, as in a manifest."""
        return hashlib.sha256(_join_digests(self.digests)).digest()

    def read_blocks(self, width: int, n_columns: int) -> Iterator[Block]:
        """Decode the blocks; each must hold ids of its own range. Nothing in them is trusted."""
        first = self.number << (GROUP_BITS - BLOCK_BITS)
        for position, content in self.blocks.items():
            block = Block.from_bytes(content, width, n_columns)
            if block.ids[0] >> BLOCK_BITS != first + position:
                raise WireError("a block must hold ids of its own range")
            yield block

    def check_blocks(self, width: int, n_columns: int) -> None:
        """Decode all blocks, one at a time: a digest does not show that bytes are valid."""
        for _ in self.read_blocks(width, n_columns):
            pass

    def to_bytes(self) -> bytes:
        """Encode the group as a frame, compressed if that saves space; unchanged if it was decoded from one."""
        if self.read_from:
            return self.read_from
        plain = frames.write_fields(*self.blocks.values())
        packed = zlib.compress(plain, 1) if _is_compressible(plain) else plain
        body = frames.write_fields(self.number, _join_digests(self.digests), bytes(self.blocks), len(plain), packed)
        return frames.frame(self.kind, body, int(packed is not plain))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode a group and check every block by its digest. Nothing else in it is trusted."""
        kind, flags, body = frames.unframe(data)
        if kind != cls.kind:
            raise WireError("data is not a group of codes")
        number, joined, which, size, packed = frames.read_fields(body, int, bytes, bytes, int, bytes)
        digests, size = _split_digests(joined), size if flags else len(packed)
        plain = _decompress(packed, size) if flags else packed
        blocks = dict(zip(which, frames.read_fields(plain, *[bytes] * len(which)), strict=True))
        if list(blocks) != sorted(set(which)) or not digests.keys() >= blocks.keys():
            raise WireError("blocks must rise, each once, and have digests")
        if any(hashlib.sha256(content).digest() != digests[block] for block, content in blocks.items()):
            raise WireError("a block does not match its digest")
        return cls(number, digests, blocks, data, size)


class CodesSource:
    """The server's side: the codes of all live items of a published map, in groups. `ids` are sorted."""

    # `cache` has groups by the digest of their ids and codes: a change costs only the groups that it affects.

    def __init__(
        self,
        public: PublicPart,
        ids: NDArray[np.uint32],
        codes: Bytes,
        texts: Mapping[str, Text],
        cache: "dict[bytes, CodesGroup] | None" = None,
    ) -> None:
        self._public, self._ids, self._codes, self._texts = public, ids, codes, texts
        self._cache = {} if cache is None else cache
        self._keys: set[bytes] = set()
        self.is_too_large = False  # for clients, because of long texts; set with the manifest
        numbers, starts = np.unique(ids >> GROUP_BITS, return_index=True)
        self._ranges = dict(zip(numbers.tolist(), zip(starts, [*starts[1:], len(ids)], strict=True), strict=True))

    @cached_property
    def manifest(self) -> CodesManifest:
        """All groups with their digests. The first call reads every item of a group that is not cached."""
        previous = set(self._cache)
        groups = {number: self._hash_group(number) for number in self._ranges}
        self.is_too_large = any(group.size > Kind.CODES_GROUP.limit for group in groups.values())
        for key in previous - self._keys:  # of groups that no longer exist
            del self._cache[key]
        return CodesManifest(
            self._public.gallery,
            self._public.revision,
            self._public.public_digest,
            self._codes.shape[1],
            tuple(self._texts),
            len(self._ids),
            {number: group.digest for number, group in groups.items()},
        )

    def group(self, number: int, blocks: Iterable[int] | None = None) -> CodesGroup | None:
        """Return a group with some or all of its blocks; None if there is no such group."""
        if number not in self._ranges:
            return None
        digests = self._hash_group(number).digests
        selected = set(digests) if blocks is None else set(blocks) & set(digests)
        return CodesGroup(number, digests, dict(self._encode_blocks(number, selected)) if selected else {})

    def _hash_group(self, number: int) -> CodesGroup:
        rows = slice(*self._ranges[number])
        key = hashlib.sha256(self._ids[rows].tobytes() + np.ascontiguousarray(self._codes[rows]).tobytes()).digest()
        self._keys.add(key)
        if key not in self._cache:
            digests, size = {}, 0
            for block, content in self._encode_blocks(number):
                digests[block], size = hashlib.sha256(content).digest(), size + _LENGTH + len(content)
            self._cache[key] = CodesGroup(number, digests, size=size)
        return self._cache[key]

    def _encode_blocks(self, number: int, selected: set[int] | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield blocks of a group with their numbers; all by default."""
        rows = slice(*self._ranges[number])
        ids, codes = self._ids[rows], self._codes[rows]
        numbers = (ids >> BLOCK_BITS) & (_BLOCKS - 1)
        if selected is not None:
            keep = np.isin(numbers, sorted(selected))
            ids, numbers, codes = ids[keep], numbers[keep], codes[keep]
        columns = [read(ids) for read in self._texts.values()]
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(ids)]
        for first, last in pairwise(edges):
            block = Block.make(ids[first:last], codes[first:last], [texts[first:last] for texts in columns])
            yield int(numbers[first]), block.to_bytes()


def _join_digests(digests: Mapping[int, bytes]) -> bytes:
    return b"".join(bytes([number]) + digest for number, digest in digests.items())


def _split_digests(joined: bytes) -> dict[int, bytes]:
    size = 1 + _DIGEST
    if len(joined) % size or not 0 < len(joined) <= _BLOCKS * size:
        raise WireError(f"a group must have 1 to {_BLOCKS} blocks")
    digests = {joined[start]: joined[start + 1 : start + size] for start in range(0, len(joined), size)}
    if list(digests) != sorted(digests) or len(digests) != len(joined) // size or max(digests) >= _BLOCKS:
        raise WireError("blocks of a group must rise, each once")
    return digests


def _is_compressible(plain: bytes) -> bool:
    """Return whether compression saves space, from a sample of the middle."""
    middle = plain[len(plain) // 2 :][: 1 << 16]
    return len(zlib.compress(middle, 1)) < _COMPRESSED * len(middle)


def _decompress(packed: bytes, size: int) -> bytes:
    """Decompress exactly `size` bytes."""
    if size > Kind.CODES_GROUP.limit:
        raise WireError("a group is larger than the limit")
    decompressor = zlib.decompressobj()
    try:
        plain = decompressor.decompress(packed, size + 1)
    except zlib.error:
        raise WireError("a group cannot be decompressed") from None
    if len(plain) != size or not decompressor.eof or decompressor.unused_data:
        raise WireError("a group has another size than it states")
    return plain
