"""The sealed index of a gallery: stored in a file beside the index, and updated when the gallery changes."""

import fcntl
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import joblib
import numpy as np
from numpy.typing import NDArray

from nearveil.cluster import LOCAL, Cluster, ClusterError
from nearveil.gallery.answers import encode_name, read_details
from nearveil.gallery.errors import PrivateIndexError
from nearveil.gallery.index import Index
from nearveil.progress import start_stage
from nearveil.sealed import SealedError, SealedIndex
from nearveil.wire.server import ServedMap, serve_maps

_LOG = logging.getLogger(__name__)
_MOST_CHANGED = 0.05  # of the items; after larger changes the index is built again


def open_sealed_index(served: ServedMap, workers: Cluster = LOCAL, previous: SealedIndex | None = None) -> SealedIndex:
    """Return the sealed index of all live items of a map: loaded, updated or built."""
    # A record is id, code and name, and the owner's id if the gallery offers metadata. The index is a file that all
    # processes map into memory; with PostgreSQL it is in memory alone, and an update changes a copy of `previous`.
    path = served.index.sealed_file
    updated = None if previous is None else update_sealed_index(served, previous)
    if path is None:
        return updated or _build(served, workers)
    stored = _load(path, served)
    if stored is not None and _is_current(stored, served):
        return stored
    try:
        with _lock(path):
            stored = _load(path, served)  # another process may have updated it
            if stored is not None and _is_current(stored, served):
                return stored
            new = updated or (stored and _update(served, stored, lambda: _load(path, served, writable=True)))
            new = new or _build(served, workers)
            new.save(path)
            _check_open(served, path)
        return _load(path, served) or new
    except ClusterError:
        raise
    except OSError as error:
        _LOG.warning("cannot write the file of the sealed index; it is in memory only: %s", type(error).__name__)
        return _build(served, workers)


def update_sealed_index(served: ServedMap, previous: SealedIndex) -> SealedIndex | None:
    """Return an index with the live items of a map, changed in memory; None if it must be built again."""
    if _check_seed(previous, served) is None:
        return None
    return previous if _is_current(previous, served) else _update(served, previous, previous.copy)


def update_sealed_file(index: Index, workers: Cluster = LOCAL) -> None:
    """Build the file of the sealed index, or update it, with records of the same kind as before."""
    path = index.sealed_file
    assert path is not None
    plain, detailed = (serve_maps(index, "index", offers=offers)[0] for offers in (("names",), ("names", "metadata")))
    open_sealed_index(plain if _load(path, detailed) is None else detailed, workers)


def _check_open(served: ServedMap, path: Path) -> None:
    """Delete the file if the rows became private while it was written."""
    try:
        served.index.assert_open()
    except PrivateIndexError:
        path.unlink(missing_ok=True)
        raise


def _load(path: Path, served: ServedMap, *, writable: bool = False) -> SealedIndex | None:
    """Load a file; None if it is invalid, or if its codes or records do not match those of a map."""
    try:
        return _check_seed(SealedIndex.load(path, writable=writable), served)
    except SealedError:
        return None


def _check_seed(index: SealedIndex, served: ServedMap) -> SealedIndex | None:
    """Return the index if its codes and records match those of a map, else None."""
    return index if index.layout.seed == hashlib.sha256(_make_seed(served)).digest() else None


def _is_current(index: SealedIndex, served: ServedMap) -> bool:
    """Return whether an index has exactly the live items of a map."""
    return np.array_equal(index.get_items(), served.read_alive()[0])


def _update(served: ServedMap, index: SealedIndex, copy: Callable[[], SealedIndex | None]) -> SealedIndex | None:
    """Return a copy without deleted items and with new ones; None if it must be built again."""
    ids, stored = served.read_alive()[0], index.get_items()
    deleted, added = np.setdiff1d(stored, ids), np.setdiff1d(ids, stored)
    if len(deleted) + len(added) > _MOST_CHANGED * len(stored):
        return None
    updated = copy()
    if updated is None:
        return None
    try:
        if len(deleted):
            updated.remove(deleted)
        if len(added):
            updated.add(*_read(served, added), items=added)
        updated.prepare_tokens()
    except SealedError:  # no free slot, or a record is too long
        return None
    return updated


def _build(served: ServedMap, workers: Cluster) -> SealedIndex:
    start_stage("Building the sealed index")
    ids = served.read_alive()[0]
    rows, records = _read(served, ids)
    space = served.published.space
    index = SealedIndex.build(
        rows,
        records=records,
        items=ids,
        normalize=False,
        axis=space.axis,
        by_direction=space.metric == "dot",
        seed=_make_seed(served),
    )
    n_jobs = joblib.cpu_count() if workers is LOCAL else 1  # a worker of a cluster has one core
    index.prepare_tokens(n_jobs, workers)
    return index


def _read(served: ServedMap, items: NDArray[np.integer]) -> tuple[NDArray[np.float32], list[bytes]]:
    """Return rows and records of items."""
    alive, codes = served.read_alive()
    ids, codes = items.astype(np.uint32), codes[np.searchsorted(alive, items)]
    rows = served.published.space.encode(served.index.features(ids)).astype(np.float32)
    parts = zip(ids.astype("<u4"), codes, _read_texts(served, ids), strict=True)
    return rows, [number.tobytes() + code.tobytes() + text for number, code, text in parts]


def _read_texts(served: ServedMap, ids: NDArray[np.uint32]) -> Sequence[bytes]:
    """Return the texts of records: names if offered; with metadata, name, a zero byte and the owner's id."""
    if "metadata" in served.offers:
        details = map(read_details, served.read_extras(ids, "metadata", 0))
        return [encode_name(item.name) + b"\0" + (item.external_id or "").encode() for item in details]
    return served.read_extras(ids, "names", 0) if "names" in served.offers else [b""] * len(ids)


def _make_seed(served: ServedMap) -> bytes:
    """Return the seed of an index: it depends on the table of codes and on the kind of texts in records."""
    texts = "ids" if "metadata" in served.offers else "names" in served.offers
    return f"{served.published.public_digest}\0{texts}".encode()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Wait until no other process writes the file."""
    with path.with_name(f"{path.name}.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
