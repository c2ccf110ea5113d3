"""The index for sealed questions of a gallery: kept in a file beside its map, and changed where the gallery changed."""

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
from nearveil.sealed import SealedError, SealedIndex
from nearveil.wire.server import ServedMap, serve_maps

_LOG = logging.getLogger(__name__)
_MOST_CHANGED = 0.05  # part of the items; beyond it the index is built anew


def open_sealed_index(served: ServedMap, workers: Cluster = LOCAL, previous: SealedIndex | None = None) -> SealedIndex:
    """Return an index for sealed questions of all items of a map that are still there.

    A record is id, code and name, and the owner's own id where the gallery offers metadata. The index is kept in a file
    that all processes map into memory, and brought in step with the gallery; for PostgreSQL it is built in memory, or
    is a changed copy of the `previous` one. Workers make the hints where it is built anew.
    """
    path = served.index.sealed_file
    if path is None:
        previous = None if previous is None else _check_seed(previous, served)
        if previous is not None and _is_in_step(previous, served):
            return previous
        return (_change(served, previous, previous.copy) if previous else None) or _build(served, workers)
    held = _load(path, served)
    if held is not None and _is_in_step(held, served):
        return held
    try:
        with _lock(path):
            held = _load(path, served)  # another process may have been here
            if held is not None and _is_in_step(held, served):
                return held
            made = held and _change(served, held, lambda: _load(path, served, writable=True))
            made = made or _build(served, workers)
            made.save(path)
            _check_open(served, path)
        return _load(path, served) or made
    except ClusterError:
        raise
    except OSError as error:
        _LOG.warning("the sealed index cannot be kept in a file, and is held in memory: %s", type(error).__name__)
        return _build(served, workers)


def keep_sealed_index(index: Index, workers: Cluster = LOCAL) -> None:
    """Make the index for sealed questions, or bring the one that is there in step: its records tell what they told."""
    path = index.sealed_file
    assert path is not None
    plain, told = (serve_maps(index, "index", offers=offers)[0] for offers in (("names",), ("names", "metadata")))
    open_sealed_index(plain if _load(path, told) is None else told, workers)


def _check_open(served: ServedMap, path: Path) -> None:
    """Delete the file again if its rows were made private meanwhile."""
    try:
        served.index.assert_open()
    except PrivateIndexError:
        path.unlink(missing_ok=True)
        raise


def _load(path: Path, served: ServedMap, *, writable: bool = False) -> SealedIndex | None:
    """Return what is in a file, if codes and records are made as those of a map; None for anything else."""
    try:
        held = SealedIndex.load(path, writable=writable)
    except SealedError:
        return None
    return _check_seed(held, served)


def _check_seed(index: SealedIndex, served: ServedMap) -> SealedIndex | None:
    """Return an index if its codes and records are made as those of a map, else None."""
    return index if index.layout.seed == hashlib.sha256(_make_seed(served)).digest() else None


def _is_in_step(index: SealedIndex, served: ServedMap) -> bool:
    """Return whether an index has the items of a map that are still there, and no others."""
    return np.array_equal(index.get_items(), served.read_alive()[0])


def _change(served: ServedMap, held: SealedIndex, copy: Callable[[], SealedIndex | None]) -> SealedIndex | None:
    """Return a copy without items that are gone and with those that came; None where it must be built anew."""
    ids, stored = served.read_alive()[0], held.get_items()
    gone, came = np.setdiff1d(stored, ids), np.setdiff1d(ids, stored)
    if len(gone) + len(came) > _MOST_CHANGED * len(stored):
        return None
    changed = copy()
    if changed is None:
        return None
    try:
        if len(gone):
            changed.remove(gone)
        if len(came):
            changed.add(*_read(served, came), items=came)
    except SealedError:  # no room, or a record that is too long
        return None
    return changed


def _build(served: ServedMap, workers: Cluster) -> SealedIndex:
    ids = served.read_alive()[0]
    rows, records = _read(served, ids)
    n_jobs = joblib.cpu_count() if workers is LOCAL else 1  # a worker has a core of its own
    return SealedIndex.build(rows, records=records, items=ids, seed=_make_seed(served), n_jobs=n_jobs, cluster=workers)


def _read(served: ServedMap, wanted: NDArray[np.integer]) -> tuple[NDArray[np.float32], list[bytes]]:
    """Return rows and records of items."""
    alive, codes = served.read_alive()
    ids, codes = wanted.astype(np.uint32), codes[np.searchsorted(alive, wanted)]
    release = served.published.release
    rows = np.array(release.features(served.index.features(ids), "rows", lenient=True), np.float32)
    rows[~rows.any(axis=1)] = 1  # an item at the mean has no direction: any will do, as its code ranks it
    parts = zip(ids.astype("<u4"), codes, _read_texts(served, ids), strict=True)
    return rows, [number.tobytes() + code.tobytes() + text for number, code, text in parts]


def _read_texts(served: ServedMap, ids: NDArray[np.uint32]) -> Sequence[bytes]:
    """Return what records tell: names where they are offered; with metadata, a zero and the owner's id after them."""
    if "metadata" in served.offers:
        details = map(read_details, served.read_extras(ids, "metadata", 0))
        return [encode_name(about.name) + b"\0" + (about.external_id or "").encode() for about in details]
    return served.read_extras(ids, "names", 0) if "names" in served.offers else [b""] * len(ids)


def _make_seed(served: ServedMap) -> bytes:
    """Return the seed of an index: another table of codes, or records that tell something else, make another index."""
    told = "ids" if "metadata" in served.offers else "names" in served.offers
    return f"{served.published.release.public_digest}\0{told}".encode()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Wait until no other process makes the file."""
    with path.with_name(f"{path.name}.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
