"""A local copy of the codes of a gallery: stored in a folder, loaded into memory, searched there."""

import fcntl
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.cluster import cut_rows
from nearveil.errors import NearveilError
from nearveil.gallery.answers import ItemDetails, encode_name, read_details
from nearveil.gallery.codes import Rows, Singles
from nearveil.storage import flush_folder, make_private_folder, replace_file
from nearveil.wire.client import encode_queries
from nearveil.wire.codes import Block, CodesGroup, CodesManifest
from nearveil.wire.frames import WireError
from nearveil.wire.messages import PublicPart, decode_frame

_MAX_FLOAT32 = 1 << 30  # bytes of rows in memory; more are held in 16 bits
_LARGEST_STEP = 32767  # of a number in 16 bits
_BLOCK = 1 << 13  # rows that are converted and compared at once: they fit into a cache
_SCORES = 1 << 23  # of many queries in memory
_SMALLEST_NUMBER, _LARGEST_NUMBER = 1e-10, 6e4  # of rows that are compared
_WIDER = 4  # candidates for each neighbour that are compared by their codes
MANIFEST, PUBLIC, _LOCK, _METADATA = "manifest", "public", "lock", "metadata"
# Groups, and files of an interrupted write, also those of earlier versions.
_DELETABLE = re.compile(r"[0-9a-f]{64}\.codes|\..+\.[0-9a-f]{8}\.part|draft-.*")


class HomeError(NearveilError):
    """A local copy cannot be used: it is missing, corrupted, or of another gallery."""


class HomeCopy:
    """All codes of a gallery, in a folder, searched on this machine."""

    # Every client of a gallery downloads the same, so neither the copy nor a search reveals a query.

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder, self._lock = Path(folder), threading.Lock()
        self._loaded: LoadedCopy | None = None
        self.manifest: CodesManifest | None = None
        self.public: PublicPart | None = None
        self.fetched = 0  # bytes of the last synchronisation by this process
        self.is_corrupted = False  # whether the manifest is unreadable; the next synchronisation replaces it
        self._read_manifest()

    def _read_manifest(self) -> None:
        """Load the manifest and the public part, if the folder holds a complete copy."""
        self.is_corrupted = False
        try:
            manifest_bytes, public_bytes = ((self.folder / name).read_bytes() for name in (MANIFEST, PUBLIC))
            manifest, public = CodesManifest.from_bytes(manifest_bytes), decode_frame(public_bytes, PublicPart)
        except (FileNotFoundError, NotADirectoryError):
            return
        except WireError:
            self.manifest = self.public = None
            self.is_corrupted = True
            return
        except OSError as error:
            raise HomeError(f"Cannot read the local copy in {self.folder}: {error.strerror}.") from error
        if manifest.public_digest == public.public_digest:  # else it was killed between the two files
            self.manifest, self.public = manifest, public

    def __len__(self) -> int:
        return 0 if self.manifest is None else self.manifest.items

    def load(self) -> "LoadedCopy":
        """Load the copy into memory, unless it is there; HomeError if it is missing or corrupted."""
        # A synchronisation does not change a loaded copy: a search that fails because a nearest item was deleted
        # meanwhile would depend on the query.
        with self._lock:
            if self._loaded is None:
                self._read_manifest()  # another process may have synchronised since
                if self.is_corrupted:
                    raise self._make_corruption_error()
                if self.manifest is None or self.public is None or not self.manifest.items:
                    raise HomeError(f"No local copy in {self.folder}; run `nearveil sync` first.")
                self._loaded = LoadedCopy(self.public, self.manifest, self._read_blocks(self.manifest))
            return self._loaded

    def _read_blocks(self, manifest: CodesManifest) -> list[Block]:
        blocks: list[Block] = []
        for number in manifest.groups:
            group = self.read_group(number)
            if group is None:
                raise self._make_corruption_error()
            blocks.extend(group.read_blocks(manifest.width, len(manifest.columns)))
        if sum(len(block.ids) for block in blocks) != manifest.items:
            raise self._make_corruption_error()
        return blocks

    def find_changed(self, manifest: CodesManifest) -> dict[int, bool]:
        """Return the groups of a manifest that the copy lacks or has corrupted; True if it has an older version."""
        is_same = self.manifest is not None and self.manifest.public_digest == manifest.public_digest
        changed = {}
        for number, digest in manifest.groups.items():
            stored = self.read_group(number) if is_same else None
            if stored is None or stored.digest != digest:
                changed[number] = stored is not None
        return changed

    def read_group(self, number: int) -> CodesGroup | None:
        """Return a stored group; None if it is missing or corrupted."""
        digest = self.manifest.groups.get(number) if self.manifest is not None else None
        try:
            group = None if digest is None else CodesGroup.from_bytes(self._path(digest).read_bytes())
        except (WireError, OSError):
            return None
        return group if group is not None and group.digest == digest else None

    def write_group(self, group: CodesGroup) -> None:
        """Store a whole group. It is part of the copy once :meth:`commit` names it."""
        with _report_disk_errors(self.folder):
            make_private_folder(self.folder)
            _write_file(self._path(group.digest), group.to_bytes())

    def commit(self, manifest: CodesManifest, public: PublicPart) -> None:
        """Switch to a manifest with stored groups, and delete unused files."""
        missing = [number for number, digest in manifest.groups.items() if not self._path(digest).is_file()]
        if missing:
            raise HomeError(f"{len(missing)} groups are missing; run `nearveil sync` again")
        if manifest.public_digest != public.public_digest or manifest.width != public.table.width:
            raise WireError("the codes are of another map than the public part; run `nearveil sync` again")
        with self._lock, _report_disk_errors(self.folder):
            make_private_folder(self.folder)
            _write_file(self.folder / PUBLIC, public.to_bytes())
            _write_file(self.folder / MANIFEST, manifest.to_bytes())
            flush_folder(self.folder)
            self.manifest, self.public, self._loaded, self.is_corrupted = manifest, public, None, False
        used = {self._path(digest).name for digest in manifest.groups.values()}
        for path in self.folder.iterdir():
            if _DELETABLE.fullmatch(path.name) and path.name not in used:  # never files of other programs
                path.unlink(missing_ok=True)

    def lock(self) -> BinaryIO | None:
        """Lock the copy for one writer until the returned file is closed; return None if another has the lock."""
        with _report_disk_errors(self.folder):
            make_private_folder(self.folder)
            file = (self.folder / _LOCK).open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        self._read_manifest()  # another process may have synchronised since
        return file

    def _make_corruption_error(self) -> HomeError:
        return HomeError(f"The local copy in {self.folder} is corrupted; run `nearveil sync` or Client.sync().")

    def _path(self, digest: bytes) -> Path:
        return self.folder / f"{digest.hex()}.codes"


class LoadedCopy:
    """A local copy in memory, with a search index. It does not change."""

    def __init__(self, public: PublicPart, manifest: CodesManifest, blocks: list[Block]) -> None:
        self.public, self.manifest, self._columns = public, manifest, manifest.columns
        self.ids = np.concatenate([block.ids for block in blocks])
        self.codes = np.concatenate([block.codes for block in blocks])
        self._edges = np.cumsum([0] + [len(block.ids) for block in blocks])
        self._texts = [block.texts for block in blocks]

    def __len__(self) -> int:
        return self.manifest.items

    @property
    def has_metadata(self) -> bool:
        """Whether the gallery offers metadata with its codes."""
        return _METADATA in self._columns

    @cached_property
    def text_bytes(self) -> int:
        """Bytes of all texts."""
        return sum(len(text) for texts in self._texts for _, text in texts)

    @cached_property
    def longest_text(self) -> int:
        """Bytes of the longest text of an item."""
        lengths = [int(np.diff(ends, prepend=0).max()) for texts in self._texts for ends, _ in texts]
        return max(lengths, default=0)

    def count_scored(self, k: int) -> int:
        """Return how many items are compared by their codes to find the k nearest."""
        return min(len(self.ids), _WIDER * k + 16)

    def build_index(self) -> None:
        """Decode the rows that are searched, unless that is done."""
        _ = self._rows

    @cached_property
    def _rows(self) -> tuple[Singles | NDArray[np.int16], Singles | None]:
        """The decoded codes in 32 bits; if they would take too much memory, in 16 bits, with a scale for each row."""
        table, n = self.public.table, len(self.codes)
        is_wide = 4 * table.columns * n <= _MAX_FLOAT32
        rows: Any = np.empty((n, table.columns), np.float32 if is_wide else np.int16)
        scales = None if is_wide else np.empty(n, np.float32)
        with np.errstate(all="ignore"):
            for block in cut_rows(n, _BLOCK):
                decoded = _limit_range(table.decode(self.codes[block]))
                if scales is not None:
                    scales[block] = np.maximum(np.abs(decoded).max(axis=1), _SMALLEST_NUMBER) / _LARGEST_STEP
                    decoded = np.rint(decoded / scales[block, None])
                rows[block] = decoded
        return rows, scales

    def _find_candidates(
        self, queries: Singles, count: int, matching: NDArray[np.bool_] | None
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the positions of the `count` best items of each query, in increasing order."""
        rows, scales = self._rows
        n = len(rows)
        for batch in cut_rows(len(queries), max(1, _SCORES // n)):
            scores = np.empty((len(queries[batch]), n), np.float32)
            for block in cut_rows(n, _BLOCK):
                np.matmul(queries[batch], rows[block].astype(np.float32, copy=False).T, out=scores[:, block])
            if scales is not None:
                scores *= scales
            if matching is not None:
                scores[:, ~matching] = -np.inf
            yield from np.sort(np.argpartition(scores, n - count, axis=1)[:, n - count :], axis=1)

    @cached_property
    def _pairs(self) -> tuple[dict[tuple[str, str], int], NDArray[np.int32], NDArray[np.int32]]:
        """The numbers of all names and values of metadata; and of each occurrence, its number and its item."""
        numbers: dict[tuple[str, str], int] = {}
        pairs: list[tuple[int, int]] = []
        for position, details in enumerate(self.details(self.ids)):
            for name, value in details.metadata.items():
                text = encode_value(value)
                if text is not None:
                    pairs.append((numbers.setdefault((name, text), len(numbers)), position))
        occurrences = np.array(pairs, np.int32).reshape(-1, 2).T.copy()
        return numbers, occurrences[0], occurrences[1]

    def count_pairs(self) -> int:
        """Return how many names with a value the metadata of all items has; read it, unless it was read before."""
        return len(self._pairs[1])

    def find_matching(self, where: Mapping[str, Any]) -> NDArray[np.bool_]:
        """Return which items have these values in their metadata. Every condition reads every item."""
        numbers, occurrences, positions = self._pairs
        matching = np.ones(len(self.ids), np.bool_)
        for name, value in where.items():
            number = numbers.get((name, encode_value(value) or ""), -1)
            matching &= np.bincount(positions, occurrences == number, minlength=len(matching)) > 0
        return matching

    def search(
        self, rows: ArrayLike, k: int = 8, matching: NDArray[np.bool_] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return ids and values of the metric, shape (q, k), of the nearest `matching` items, by their codes."""
        _, encoded, queries, _ = encode_queries(self.public, rows)
        table = self.public.table
        n_scored = self.count_scored(k)
        if matching is not None:
            n_matching = int(matching.sum())
            k, n_scored = min(k, n_matching), min(n_scored, n_matching)
        ids, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        if not k:
            return ids, scores.astype(np.float64)
        with np.errstate(all="ignore"):  # a hostile table may hold numbers of any size
            candidates = self._find_candidates(_limit_range(table.project(queries)), n_scored, matching)
            for row, positions in enumerate(candidates):
                similarities = table.scores(queries[row : row + 1], self.codes[positions])[0]
                similarities = np.nan_to_num(similarities, nan=float(np.finfo(np.float32).min))
                best = np.argsort(-similarities, kind="stable")[:k]
                ids[row], scores[row] = self.ids[positions[best]], similarities[best]
            return ids, self.public.space.measure(encoded, scores)

    def details(self, ids: NDArray[np.int64]) -> list[ItemDetails]:
        """Return names of items, and their external ids and metadata if the gallery offers them."""
        # Invalid metadata counts as empty: an error here would depend on the query.
        if self.has_metadata:
            return [_read_details_or_empty(content) for content in self._read_column(ids, _METADATA)]
        names = self._read_column(ids, "names") if "names" in self._columns else [b""] * len(ids)
        return [ItemDetails(encode_name(content.decode(errors="replace")).decode()) for content in names]

    def _read_column(self, ids: NDArray[np.int64], column: str) -> list[bytes]:
        number, contents, positions = self._columns.index(column), [], np.searchsorted(self.ids, ids)
        blocks = np.searchsorted(self._edges, positions, side="right") - 1
        for block, offset in zip(blocks.tolist(), (positions - self._edges[blocks]).tolist(), strict=True):
            ends, text = self._texts[block][number]
            contents.append(text[int(ends[offset - 1]) if offset else 0 : int(ends[offset])])
        return contents


def encode_value(value: Any) -> str | None:
    """Return the same text for equal values of JSON, such as 1 and 1.0; None for other values, which equal none."""
    # Not the value itself: a gallery could choose numbers with equal hashes, texts have secret ones.
    if type(value) is str:  # faster than as JSON
        return f'"{value}'
    try:
        value = _normalize(value)
        return '"' + value if isinstance(value, str) else json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None


def _normalize(value: Any) -> Any:
    if callable(getattr(value, "tolist", None)):  # NumPy
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _normalize(content) for name, content in value.items()}
    if isinstance(value, (list, tuple)):
        return [_normalize(content) for content in value]
    is_whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole else value


def _limit_range(values: Rows) -> Singles:
    """Return numbers with products that neither overflow nor are subnormal, in 32 bits."""
    # Scores that are not finite have no order, and subnormal numbers are slow on some processors: a hostile table would
    # choose for which queries. Numbers of an honest table are about 1.
    finite = np.clip(np.nan_to_num(values), -_LARGEST_NUMBER, _LARGEST_NUMBER)
    return np.where(np.abs(finite) < _SMALLEST_NUMBER, 0, finite).astype(np.float32)


def _read_details_or_empty(content: bytes) -> ItemDetails:
    """Decode the details of an item; those of a hostile gallery may be invalid."""
    try:
        return read_details(content)
    except WireError:
        return ItemDetails()


def _write_file(path: Path, content: bytes) -> None:
    with replace_file(path) as file:
        file.write(content)


@contextmanager
def _report_disk_errors(folder: Path) -> Iterator[None]:
    """Name the folder and the remedy if its disk is full or read-only."""
    try:
        yield
    except OSError as error:
        raise HomeError(
            f"Cannot write the local copy in {folder}: {error.strerror}. Free space on its disk, or choose another "
            "folder with home= or --home. The previous copy is still usable."
        ) from error
