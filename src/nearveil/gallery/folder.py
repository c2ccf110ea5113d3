"""Keep an index in step with a folder of images: add what is new, delete what is gone, publish the map."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from sqlalchemy.engine import make_url

from nearveil.cluster import Cluster, connect
from nearveil.errors import NearveilError
from nearveil.features import Extractor, ImageError, default_extractor, gallery_features, load_image
from nearveil.features.backbones import find_extractor
from nearveil.features.gallery import FeatureCache, GalleryFeatures, assert_here
from nearveil.features.images import thumbnail
from nearveil.gallery.answers import ID_BYTES
from nearveil.gallery.errors import NotAnIndexError, NotPublishedError
from nearveil.gallery.index import Index
from nearveil.gallery.items import Item
from nearveil.gallery.publishing import KEPT_MAPS, Published
from nearveil.mechanisms.base import candidate_count
from nearveil.mechanisms.covers.channels import check_channel_epsilon
from nearveil.progress import Progress, Tick, no_progress
from nearveil.storage import data_folder, describe_url, make_data_folder

_AT_ONCE = 1024  # items read, or written in one transaction
_SAME = 1e-5  # two features of one image differ by less: networks add in another order in another batch
_LINK = "a link: only what lies in the folder itself is indexed"
_NO_TEXT = "its name is not text"

Skipped = tuple[Path, str]


@dataclass(frozen=True)
class MapTerms:
    """What a map is learned for; the parameters of :meth:`Index.publish`."""

    epsilon: float = 4.0
    candidates: float = 0.1
    n_sets: int | None = None
    code_bytes: int | Literal["auto"] | None = "auto"
    reach: float = 0.0

    @classmethod
    def from_map(cls, published: Published) -> "MapTerms":
        """Return those of a map that there is."""
        release = published.release
        epsilon, candidates, reach = (float(value) for value in (release.epsilon, release.candidates, release.reach))
        return cls(epsilon, candidates, release.n_sets, published.code_bytes, reach)

    def updated(self, **given: Any) -> "MapTerms":
        """Return these, but for what was given and is not None."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def check(self, items: int, state: str = "nothing was changed") -> None:
        """Raise if no map of so many items can be learned; the error says what state the index is in."""
        self.check_at_most(items, state)
        if self.n_sets is not None and self.n_sets * candidate_count(self.candidates, items) < self.reach * items:
            raise ValueError(f"n_sets must be larger, so that sets of this size reach so many; {state}")

    def check_at_most(self, items: int, state: str = "nothing was changed") -> None:
        """Raise if no map of so many items can be learned, nor of fewer."""
        if items < 2:
            raise ValueError(f"a map needs two items at least; {state}")
        try:
            check_channel_epsilon(self.epsilon)
            candidate_count(self.candidates, items)
        except ValueError as error:
            raise ValueError(f"{error} ({items:,} items); {state}") from None
        if self.n_sets is not None and not 2 <= self.n_sets <= items:
            raise ValueError(f"n_sets must be from 2 to {items:,}, the number of items; {state}")
        if not 0 <= self.reach <= 1:
            raise ValueError(f"reach must be a part of the items, from 0 to 1; {state}")
        if self.n_sets is not None and self.n_sets * self.candidates < self.reach * (1 - 1e-9):
            raise ValueError(f"n_sets must be larger, so that sets of this size reach so many; {state}")


@dataclass(frozen=True)
class FolderReport:
    """What :func:`sync_folder` did, and the index afterwards.

    Attributes
    ----------
    index : str
        Where it is, without a password.
    images, dimension, revision : int
    added, deleted : int
    skipped : tuple of (Path, str)
        Files that are no sound images, and why.
    extractor : str
    private, row_exact : bool
    published : Published or None
        The map; private images have none.
    learned : bool
        Whether the map had to be learned.
    """

    index: str
    images: int
    dimension: int
    revision: int
    added: int
    deleted: int
    skipped: tuple[Skipped, ...]
    extractor: str
    private: bool
    row_exact: bool
    published: Published | None
    learned: bool

    @property
    def item_bytes(self) -> int:
        """Bytes of an image in an answer; 0 without a map."""
        return 0 if self.published is None else self.published.table.width + ID_BYTES


def sync_folder(
    folder: str | os.PathLike[str],
    index: str | os.PathLike[str] | None = None,
    *,
    extractor: Extractor | None = None,
    private: bool = False,
    epsilon: float | None = None,
    candidates: float | None = None,
    n_sets: int | None = None,
    code_bytes: int | None = None,
    reach: float | None = None,
    progress: Progress | None = None,
    cluster: Any = None,
) -> FolderReport:
    """Bring an index in step with a folder of images, and publish its map.

    An image is known by its path and its feature: where both are unchanged, nothing is done. Images of other folders
    in the same index stay. Hidden files are passed over, and links are not followed. Nothing is changed unless all
    parameters are in order. Images come 1,024 in a transaction: a run that fails leaves those that are in, and the next
    one goes on from there.

    Parameters
    ----------
    folder : path
    index : path or URL, optional
        The index; made if it is not there. By default the one of the command line.
    extractor : Extractor, optional
        By default the index's own, or the best that is installed.
    private : bool, default=False
        Whether the images are records of a protected gallery: rows are row-exact, and no map is made. They stay on
        this machine: `cluster` must be ``"local"``, ``"local:N"`` or None.
    epsilon, candidates, n_sets, code_bytes, reach : optional
        As in :meth:`Index.publish`; by default as before, or 4, 0.1, the best number, the whole feature, and 0.
    progress : callable, optional
        ``progress(text, total)`` returns a function that is called with the number of images done.
    cluster : str or dask.distributed.Client, optional
        Whose workers make features and learn the map; see :func:`nearveil.cluster.connect`. They must reach the
        images under the same paths. The result is the same.

    Returns
    -------
    FolderReport

    Examples
    --------
    >>> report = sync_folder("photos", "gallery")  # doctest: +SKIP
    >>> report.added, report.deleted  # doctest: +SKIP
    (120, 0)
    """
    asked = {"epsilon": epsilon, "candidates": candidates, "n_sets": n_sets}
    given = {**asked, "code_bytes": code_bytes, "reach": reach}
    start = progress or no_progress
    root, where = _find_root(Path(folder)), find_index(index)
    with ExitStack() as stack:
        workers = stack.enter_context(connect(cluster))
        held = open_index(where)
        if held is not None:
            stack.enter_context(held)
        private = _check_private(held, given, asked=private)
        if private:
            assert_here(workers)
        tool = _choose_extractor(extractor, held)
        if index is None:
            make_data_folder()
        cache = data_folder() / "features" if "://" in where else Path(f"{where}.features")
        files, refused = list_files(root, leave_out=(cache.resolve(), Path(where).resolve()))
        tick = start("reading", len(files))
        found = gallery_features(
            files, tool, row_exact=private, cache=_open_cache(cache, where), progress=tick, cluster=workers
        )
        if not found.paths:
            with suppress(OSError):  # it holds rows of an earlier run
                cache.rmdir()
            empty = "" if held is None else f". To empty an index, delete {describe_place(where)}"
            raise ValueError(f"folder: there is no image below {root}; nothing was changed{empty}")
        if held is None:
            if not private:
                MapTerms().updated(**given).check(len(found.paths))
            held = stack.enter_context(Index.create(where, dimension=tool.dimension, extractor=tool.fingerprint))
        if private:
            held.protect()
        with note_changes():
            added, deleted, skipped, published, learned = _synchronise(held, root, found, start, given, workers)
        return FolderReport(
            describe_place(where),
            len(held),
            held.dimension,
            held.revision,
            added,
            deleted,
            (*refused, *skipped),
            tool.name,
            held.is_private,
            held.row_exact,
            published,
            learned,
        )


def _open_cache(cache: Path, where: str) -> FeatureCache:
    try:
        return FeatureCache(cache)
    except OSError as error:
        raise ValueError(f"index: nothing can be written at {describe_place(where)}: {error.strerror}") from None


def list_files(root: Path, *, leave_out: Sequence[Path] = ()) -> tuple[list[Path], list[Skipped]]:
    """Return the files below a folder, in order, and the links and strange names that are left out.

    Hidden files and folders are passed over in silence, and so are the folders of `leave_out`. No link is followed.
    """
    files: list[Path] = []
    skipped: list[Skipped] = []
    for folder, below, names in os.walk(root):
        here = Path(folder)
        links = [name for name in below if (here / name).is_symlink()]
        below[:] = sorted(
            name for name in below if name[0] != "." and name not in links and here / name not in leave_out
        )
        for path in (here / name for name in sorted((*links, *names)) if name[0] != "."):
            reason = _LINK if path.is_symlink() else "" if _is_text(path) else _NO_TEXT
            if reason:
                skipped.append((path, reason))
            else:
                files.append(path)
    return files, skipped


def _find_root(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"folder: there is no folder at {folder}")
    root = folder.resolve()
    if not _is_text(root):
        raise ValueError("folder: its path is not text: rename the folder")
    return root


def find_index(index: str | os.PathLike[str] | None) -> str:
    """Return where an index is: as given, or the default of the command line."""
    if index is None:
        return str(data_folder() / "index")
    given = os.fspath(index)
    return given if "://" in given else str(Path(given).expanduser().absolute())


def describe_place(where: str) -> str:
    """Return a path or a URL for people, without its password."""
    return describe_url(make_url(where)) if "://" in where else where


def _is_text(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def open_index(where: str) -> Index | None:
    """Return the index of a place; None where there is none."""
    try:
        return Index.open(where)
    except NotAnIndexError:
        return None


def _check_private(held: Index | None, given: dict[str, Any], *, asked: bool) -> bool:
    """Return whether the rows are private: as is asked for, or as the index itself says."""
    known = held is not None and held.is_private
    if asked and held is not None and not known and len(held):
        raise ValueError(
            "private: this index was made for an open gallery, and its images may have been shown: use another index"
        )
    if (asked or known) and any(value is not None for value in given.values()):
        raise ValueError(f"{', '.join(given)}: private images have no map: leave them out")
    return asked or known


def _choose_extractor(given: Extractor | None, held: Index | None) -> Extractor:
    """Return an extractor: the one given, which must be the index's, or the index's own, or the best."""
    fingerprint = None if held is None else held.extractor
    if given is not None:
        if fingerprint not in (None, given.fingerprint):
            raise ValueError(
                f"extractor: the index has features of another extractor than {given.name}, and they do not "
                "compare: leave it out, or make another index"
            )
        return given
    if fingerprint is None:
        return default_extractor()
    try:
        return find_extractor(fingerprint)
    except ValueError as error:
        raise ValueError(f"extractor: {error}; or make another index") from None


def _synchronise(
    held: Index, root: Path, found: GalleryFeatures, start: Progress, given: dict[str, Any], workers: Cluster
) -> tuple[int, int, list[Skipped], Published | None, bool]:
    known, skipped = _find_known(held, root), list(found.skipped)
    if held.is_private:
        # Rows that nobody called exact are made anew, also where they happen to be equal.
        same = _find_unchanged(held, known, found, 0.0) if held.row_exact else {}
        gone, new = _compare(known, same, found)
        held.delete(gone)  # before the others come: of an image that has changed, two rows would vote
        added = _add(held, root, found, new, skipped, start("adding", len(new)))
        return added, len(gone), skipped, None, False
    gone, new = _compare(known, _find_unchanged(held, known, found, _SAME), found)
    terms = find_terms(held).updated(**given)
    terms.check(len(held) - len(gone) + len(new))
    added = _add(held, root, found, new, skipped, start("adding", len(new)))
    held.delete(gone)
    return added, len(gone), skipped, *publish_map(held, terms, start, workers)


def _compare(
    known: dict[Path, list[int]], same: dict[Path, int], found: GalleryFeatures
) -> tuple[list[int], list[int]]:
    """Return the ids that are gone, and the positions of images that are new."""
    gone = {number for numbers in known.values() for number in numbers} - set(same.values())
    return sorted(gone), [position for position, path in enumerate(found.paths) if path not in same]


def _find_known(held: Index, root: Path) -> dict[Path, list[int]]:
    """Return the items whose originals lie below a folder. There is one for a path, but for two runs at once."""
    known: dict[Path, list[int]] = {}
    ids = held.ids()
    for start in range(0, len(ids), _AT_ONCE):
        for item in held.items(ids[start : start + _AT_ONCE], lenient=True):
            if isinstance(item.original, Path) and item.original.is_relative_to(root):
                known.setdefault(item.original, []).append(item.id)
    return known


def _find_unchanged(held: Index, known: dict[Path, list[int]], found: GalleryFeatures, most: float) -> dict[Path, int]:
    """Return the items whose features are off by at most `most`, by path."""
    rows = [(path, known[path][0], position) for position, path in enumerate(found.paths) if path in known]
    same: dict[Path, int] = {}
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        stored = held.features([number for _, number, _ in some])
        near = np.abs(stored - found.features[[position for _, _, position in some]]).max(axis=1) <= most
        same.update((path, number) for (path, number, _), alike in zip(some, near, strict=True) if alike)
    return same


def _add(held: Index, root: Path, found: GalleryFeatures, new: list[int], skipped: list[Skipped], tick: Tick) -> int:
    """Add images with their thumbnails, some in each transaction; return how many."""
    added = 0
    for start in range(0, len(new), _AT_ONCE):
        items: list[Item] = []
        for position in new[start : start + _AT_ONCE]:
            path = found.paths[position]
            try:
                small = thumbnail(load_image(path))
                items.append(Item(found.features[position], str(path.relative_to(root)), small, path))
            except ImageError as error:  # it was an image a moment ago
                skipped.append((path, error.reason))
            tick(1)
        added += len(held.add(items, row_exact=found.row_exact))
    return added


@contextmanager
def note_changes() -> Iterator[None]:
    """Say in an error that changes before it stand."""
    try:
        yield
    except NearveilError as error:
        error.add_note("what was added or deleted until then stays: run it again to finish")
        raise


def find_terms(held: Index) -> MapTerms:
    """Return the terms of the newest map, or the usual ones."""
    try:
        return MapTerms.from_map(held.current().published)
    except NotPublishedError:
        return MapTerms()


def publish_map(held: Index, terms: MapTerms, start: Progress, workers: Cluster) -> tuple[Published, bool]:
    """Return the map in step with the index, and whether it had to be learned or updated."""
    keep = KEPT_MAPS
    try:
        newest, stale = held.current()
        if not stale and MapTerms.from_map(newest) == terms:
            return newest, False
        if not held.alive(newest).all():
            keep = 1  # an older map tells of what was deleted
        if MapTerms.from_map(newest) == terms:
            return held.republish(keep, progress=start, cluster=workers), True
    except NotPublishedError:
        pass
    published = held.publish(
        terms.epsilon,
        terms.candidates,
        n_sets=terms.n_sets,
        reach=terms.reach,
        code_bytes=terms.code_bytes,
        keep=keep,
        progress=start,
        cluster=workers,
    )
    return published, True
