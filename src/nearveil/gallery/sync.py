"""Synchronize an index with a folder of images or a table of vectors, and publish its map."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy.engine import make_url

from nearveil.cluster import Cluster, connect
from nearveil.errors import NearveilError
from nearveil.features import Extractor, ImageError, default_extractor, gallery_features
from nearveil.features.backbones import find_extractor
from nearveil.features.extractor import map_in_threads
from nearveil.features.gallery import FeatureCache, GalleryFeatures, assert_here
from nearveil.features.images import load_picture, thumbnail
from nearveil.features.vectors import TablePart, VectorFile, VectorTable
from nearveil.gallery.codes import ID_BYTES
from nearveil.gallery.errors import NotAnIndexError, NotPublishedError, UnknownItemError
from nearveil.gallery.index import Index, open_unchecked
from nearveil.gallery.items import Item, check_part, check_table, is_text, name_parts
from nearveil.gallery.publishing import KEPT_MAPS, MapTerms, Published
from nearveil.metrics import Metric, check_metric
from nearveil.progress import Progress, Tick, no_progress
from nearveil.remote import refuse_change
from nearveil.storage import data_folder, describe_url, make_data_folder

_CHUNK = 1024  # items read, or written in one transaction
_SAME = 1e-5  # features of one image differ by less: networks add in another order in another batch
_LINK = "a link: only files in the folder itself are indexed"
_NO_TEXT = "its name is not text"

Skipped = tuple[Path, str]


@dataclass(frozen=True)
class SyncReport:
    """The changes that :func:`sync_folder` or :func:`sync_table` made, and the index afterwards."""

    index: str  #: its location, without a password
    items: int
    dimension: int
    metric: Metric
    revision: int
    added: int
    replaced: int  #: items with the same external id or path, but another vector, name or metadata
    deleted: int
    published: Published | None  #: the map; private images have none
    learned: bool  #: whether the map was learned or updated
    skipped: tuple[Skipped, ...] = ()  #: files that cannot be used, with reasons
    extractor: str = ""  #: its name; empty for vectors
    private: bool = False
    row_exact: bool = False

    @property
    def item_bytes(self) -> int:
        """Bytes of an item in an answer; 0 without a map."""
        return 0 if self.published is None else self.published.table.width + ID_BYTES


def sync_folder(
    folder: str | os.PathLike[str],
    index: str | os.PathLike[str] | None = None,
    *,
    extractor: Extractor | None = None,
    private: bool = False,
    metric: Metric | None = None,
    progress: Progress | None = None,
    cluster: Any = None,
    **options: Any,
) -> SyncReport:
    """Synchronize an index with a folder of images, and publish its map.

    An image is identified by its path and its feature: if both are unchanged, nothing is done. Images of other folders
    in the same index stay. Hidden files are ignored, and links are not followed. All parameters are checked before
    anything is changed. Images are added 1,024 in a transaction: the next run continues after a failure.

    Parameters
    ----------
    index : path or URL, optional
        Created if it does not exist. By default that of the command line.
    extractor : Extractor, optional
        By default that of the index, or the best that is installed.
    private : bool, default=False
        Whether the images are records of a protected gallery: rows are row-exact, and no map is made. They stay on
        this machine: `cluster` must be ``"local"``, ``"local:N"`` or None.
    metric : {"cosine", "dot", "euclidean"}, optional
        As in :meth:`Index.create`; by default as before.
    progress : callable, optional
        As in :meth:`Index.publish`.
    cluster : str or dask.distributed.Client, optional
        Workers that make features and learn the map; see :func:`nearveil.cluster.connect`. They must be able to read
        the images under the same paths. The result is the same.
    options
        Of the map: epsilon, candidates, n_sets, code_bytes, reach, mechanism, labels and allow_unsound, as in
        :meth:`Index.publish`; by default as before.

    Examples
    --------
    >>> report = sync_folder("photos", "gallery")  # doctest: +SKIP
    >>> report.added, report.deleted  # doctest: +SKIP
    (120, 0)
    """
    wanted_metric = None if metric is None else check_metric(metric)
    start = progress or no_progress
    root, location = _find_root(Path(folder)), find_index(index)
    with ExitStack() as stack:
        workers = stack.enter_context(connect(cluster))
        gallery = open_index(location)
        if gallery is not None:
            stack.enter_context(gallery)
        private = _check_private(gallery, options, private)
        if private:
            assert_here(workers)
        extractor = _choose_extractor(extractor, gallery)
        if index is None:
            make_data_folder()
        images, skipped = _extract_folder(root, location, extractor, start, workers, private=private)
        if not images.paths:
            hint = "" if gallery is None else f". To empty an index, delete {describe_location(location)}"
            raise ValueError(f"folder: there is no image below {root}; nothing was changed{hint}")
        if gallery is None:
            if not private:
                MapTerms().updated(**options).check(len(images.paths))
            gallery = Index.create(
                location,
                dimension=extractor.dimension,
                extractor=extractor.fingerprint,
                metric=wanted_metric or "cosine",
            )
            stack.enter_context(gallery)
        elif wanted_metric is not None:
            gallery.set_metric(wanted_metric)
        if private:
            gallery.protect()
        with _note_changes():
            *changes, failed = _update_images(gallery, root, images, options, start, workers)
        files = (*skipped, *failed)
        return _report(gallery, location, *changes, files, extractor.name, private, gallery.row_exact)


def _update_images(
    gallery: Index, root: Path, images: GalleryFeatures, options: dict[str, Any], start: Progress, workers: Cluster
) -> tuple[int, int, int, Published | None, bool, list[Skipped]]:
    """Add, replace and delete images of a folder, and publish the map of an open gallery; return the changes."""
    gone, new, n_replaced = _compare(gallery, root, images)
    if gallery.is_private:
        gallery.delete(gone)  # before the insert: otherwise both rows of a changed image would vote
        added, failed = _add_images(gallery, root, images, new, start("adding", len(new)))
        return added - n_replaced, n_replaced, len(gone) - n_replaced, None, False, failed
    terms = _load_terms(gallery).updated(**options)
    terms.check(len(gallery) - len(gone) + len(new))
    added, failed = _add_images(gallery, root, images, new, start("adding", len(new)))
    gallery.delete(gone)
    changes = added - n_replaced, n_replaced, len(gone) - n_replaced
    return *changes, *publish_map(gallery, terms, start, workers), failed


def sync_table(
    table: VectorTable | VectorFile | None,
    index: str | os.PathLike[str] | None = None,
    *,
    delete: Sequence[str] = (),
    metric: Metric | None = None,
    progress: Progress | None = None,
    cluster: Any = None,
    **options: Any,
) -> SyncReport:
    """Add or replace the vectors of a table in an index, delete others by external ids, and publish the map."""
    # All vectors are added in one transaction, or none. If a later step fails, they stay, and the map does not change;
    # the error says so. `options` are those of `Index.publish`, by default as in the previous map.
    start = progress or no_progress
    location = find_index(index)
    gallery = open_index(location)
    usual: Metric = "cosine" if metric is None else check_metric(metric)
    with connect(cluster) as workers:
        if gallery is None:
            if table is None:
                raise ValueError(f"there is no index at {describe_location(location)}: name a source first")
            count, dimension = _check_rows(table, usual, workers, start)  # before anything is created
            MapTerms().updated(**options).check(count)
            if index is None:
                make_data_folder()
            gallery = Index.create(location, dimension=dimension, metric=usual)
        with gallery:
            gallery.assert_open()
            if metric is not None:
                gallery.set_metric(metric)
            if gallery.extractor and table is not None:
                raise ValueError("vectors: this index has features of images: use another index")
            terms, before, count = _load_terms(gallery).updated(**options), gallery.ids(), len(gallery)
            terms.check(count - len(set(delete)) + _count_rows(table), exact=False)
            gone = _resolve_ids(gallery, delete)
            written = np.empty(0, np.uint32)
            if isinstance(table, VectorFile):
                written = gallery.add_file(table, replace=True, progress=start, cluster=workers)
            elif table is not None:
                written = gallery.add_table(*table, replace=True, progress=start)
            with _note_changes():
                # After the insert: an invalid row deletes nothing. Rows of the table stay.
                deleted = np.setdiff1d(np.array(gone, np.uint32), written)
                deleted = deleted[np.isin(deleted, gallery.ids())]
                gallery.delete(deleted)
                n_new = len(np.setdiff1d(gallery.ids(), before, assume_unique=True))
                n_replaced = count + n_new - len(gallery) - len(deleted)
                terms.check(len(gallery), "the index has changed, and its map is as before: publish it on other terms")
                newest = publish_map(gallery, terms, start, workers)
            return _report(gallery, location, n_new - n_replaced, n_replaced, len(deleted), *newest)


def _report(gallery: Index, location: str, *changes: Any) -> SyncReport:
    size = len(gallery), gallery.dimension, gallery.metric, gallery.revision
    return SyncReport(describe_location(location), *size, *changes)


def publish_map(gallery: Index, terms: MapTerms, start: Progress, workers: Cluster) -> tuple[Published, bool]:
    """Return an up-to-date map, and whether it had to be learned or updated."""
    keep = KEPT_MAPS
    try:
        newest, stale = gallery.current()
        same_terms = newest.terms == terms
        if same_terms and not stale:
            return newest, False
        if not gallery.alive(newest).all():
            keep = 1  # an older map reveals deleted items
        if same_terms:
            return gallery.republish(keep, progress=start, cluster=workers), True
    except NotPublishedError:
        pass
    return gallery.publish(**asdict(terms), keep=keep, progress=start, cluster=workers), True


def find_index(index: str | os.PathLike[str] | None) -> str:
    """Return the location of an index, by default that of the command line."""
    if index is None:
        return str(data_folder() / "index")
    location = os.fspath(index)
    return location if "://" in location else str(Path(location).expanduser().absolute())


def describe_location(location: str) -> str:
    """Return a path or a URL for people, without its password."""
    return describe_url(make_url(location)) if "://" in location else location


def open_index(location: str) -> Index | None:
    """Open an index to change it; return None if there is none."""
    refuse_change(location)
    try:
        return open_unchecked(location)  # a change reads what it needs
    except NotAnIndexError:
        return None


@contextmanager
def _note_changes() -> Iterator[None]:
    """Note in an error that earlier changes were saved."""
    try:
        yield
    except NearveilError as error:
        error.add_note("earlier additions and deletions were saved: run it again to finish")
        raise


def _load_terms(gallery: Index) -> MapTerms:
    """Return the terms of the newest map, or the default."""
    try:
        return gallery.current().published.terms
    except NotPublishedError:
        return MapTerms()


def _find_root(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"folder: there is no folder at {folder}; correct the path")
    root = folder.resolve()
    if not is_text(str(root)):
        raise ValueError("folder: its path is not text: rename the folder")
    return root


def _check_private(gallery: Index | None, options: dict[str, Any], requested: bool) -> bool:
    """Return whether the rows are private: as requested, or as stored in the index."""
    stored = gallery is not None and gallery.is_private
    if requested and gallery is not None and not stored and len(gallery):
        raise ValueError("private: this index was made for an open gallery, which may have shown it: use another index")
    private = requested or stored
    named = [name for name, value in options.items() if value is not None]
    if private and named:
        raise ValueError(f"{', '.join(named)}: private images have no map: leave these options out")
    return private


def _choose_extractor(extractor: Extractor | None, gallery: Index | None) -> Extractor:
    """Return the extractor, which must match the index; by default that of the index, or the best."""
    if gallery is None:
        return extractor or default_extractor()
    if extractor is None:
        try:
            return find_extractor(gallery.extractor)
        except ValueError as error:
            raise ValueError(f"extractor: {error}; or make another index") from None
    if extractor.fingerprint != gallery.extractor:
        raise ValueError(
            f"extractor: the index has features of another extractor than {extractor.name}, which are not comparable: "
            "leave it out, or make another index"
        )
    return extractor


def _extract_folder(
    root: Path, location: str, extractor: Extractor, start: Progress, workers: Cluster, *, private: bool
) -> tuple[GalleryFeatures, list[Skipped]]:
    """Compute the features of the images below a folder, with a cache beside the index; return skipped files, too."""
    folder = data_folder() / "features" if "://" in location else Path(f"{location}.features")
    files, skipped = list_files(root, leave_out=(folder.resolve(), Path(location).resolve()))
    tick = start("reading", len(files))
    try:
        cache = FeatureCache(folder)
    except OSError as error:
        raise ValueError(f"index: nothing can be written at {describe_location(location)}: {error.strerror}") from None
    images = gallery_features(files, extractor, row_exact=private, cache=cache, tick=tick, cluster=workers)
    if not images.paths:
        with suppress(OSError):  # it has rows of an earlier run
            folder.rmdir()
    return images, [*skipped, *images.skipped]


def list_files(root: Path, *, leave_out: Sequence[Path] = ()) -> tuple[list[Path], list[Skipped]]:
    """Return the visible files below a folder, in order, and the links and undecodable names that are skipped."""
    files: list[Path] = []
    skipped: list[Skipped] = []
    for name, subfolders, names in os.walk(root):
        folder = Path(name)
        links = [link for link in subfolders if (folder / link).is_symlink()]
        visible = (name for name in subfolders if name[0] != "." and name not in links)
        subfolders[:] = sorted(name for name in visible if folder / name not in leave_out)
        for path in (folder / name for name in sorted((*links, *names)) if name[0] != "."):
            if path.is_symlink():
                skipped.append((path, _LINK))
            elif not is_text(str(path)):
                skipped.append((path, _NO_TEXT))
            else:
                files.append(path)
    return files, skipped


def _compare(gallery: Index, root: Path, images: GalleryFeatures) -> tuple[list[int], list[int], int]:
    """Return the ids of gone or changed items, the positions of new or changed images, and the number of changed."""
    stored: dict[Path, list[int]] = {}  # one id for each path, unless two runs were concurrent
    ids = gallery.ids()
    for start in range(0, len(ids), _CHUNK):
        for item in gallery.items(ids[start : start + _CHUNK], lenient=True):
            if isinstance(item.original, Path) and item.original.is_relative_to(root):
                stored.setdefault(item.original, []).append(item.id)
    tolerance = 0.0 if gallery.is_private else _SAME
    unchanged: dict[Path, int] = {}
    rows = [(path, stored[path][0], position) for position, path in enumerate(images.paths) if path in stored]
    if gallery.is_private and not gallery.row_exact:
        rows = []  # rows that are not known to be exact are replaced even if they happen to be equal
    for start in range(0, len(rows), _CHUNK):
        paths, numbers, positions = zip(*rows[start : start + _CHUNK], strict=True)
        differences = np.abs(gallery.features(numbers) - images.features[list(positions)]).max(axis=1)
        pairs = zip(paths, numbers, differences, strict=True)
        unchanged |= {path: number for path, number, difference in pairs if difference <= tolerance}
    gone = {number for numbers in stored.values() for number in numbers} - set(unchanged.values())
    new = [position for position, path in enumerate(images.paths) if path not in unchanged]
    return sorted(gone), new, sum(images.paths[position] in stored for position in new)


def _add_images(
    gallery: Index, root: Path, images: GalleryFeatures, positions: list[int], tick: Tick
) -> tuple[int, list[Skipped]]:
    """Add images with their thumbnails; return their number, and the files that are no longer images."""
    added, skipped = 0, []
    for start in range(0, len(positions), _CHUNK):
        items: list[Item] = []
        chunk = positions[start : start + _CHUNK]
        for position, small in zip(chunk, map_in_threads(partial(_make_thumbnail, images), chunk), strict=True):
            path = images.paths[position]
            if isinstance(small, bytes):
                items.append(Item(images.features[position], str(path.relative_to(root)), small, path))
            else:
                skipped.append((path, small))
            tick(1)
        added += len(gallery.add(items, row_exact=images.row_exact))
    return added, skipped


def _make_thumbnail(images: GalleryFeatures, position: int) -> bytes | str:
    """Return the thumbnail of an image, or the reason for skipping the file."""
    try:
        return images.thumbnails[position] or thumbnail(load_picture(images.paths[position]))
    except ImageError as error:
        return error.reason


def _resolve_ids(gallery: Index, external_ids: Sequence[str]) -> list[int]:
    """Return the ids of items to be deleted."""
    try:
        return [item.id for item in gallery.items(list(external_ids), originals=False)]
    except UnknownItemError as error:
        missing = ", ".join(map(str, error.ids[:5]))
        raise ValueError(f"delete: the index does not hold {missing}; nothing was changed") from None


def _count_rows(table: VectorTable | VectorFile | None) -> int:
    if isinstance(table, VectorFile):
        return sum(part.stop - part.start for part in table.cut())
    return 0 if table is None else len(table.rows)


def _check_rows(table: VectorTable | VectorFile, metric: Metric, workers: Cluster, start: Progress) -> tuple[int, int]:
    """Check all vectors; return their number and dimension."""
    if not isinstance(table, VectorFile):
        return check_table(*table, table.rows.shape[1], metric).features.shape
    parts = table.cut()
    tick = start("checking", len(parts))
    names = name_parts(table, parts)
    shapes = list(workers.map(_check_part, parts, table, metric, stage="checking", names=names, tick=tick))
    dimensions = {dimension for _, dimension in shapes}
    if len(dimensions) != 1:
        raise ValueError("vectors must be numbers, in rows of one length")
    return sum(count for count, _ in shapes), dimensions.pop()


def _check_part(part: TablePart, file: VectorFile, metric: Metric) -> tuple[int, int]:
    return check_part(part, file, None, metric).features.shape
