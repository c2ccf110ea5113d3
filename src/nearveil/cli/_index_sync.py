"""How an index keeps in step with a folder: what is there, what is known, what changes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nearveil.cli._label_task import Bars, Tick
from nearveil.features import ImageError, load_image
from nearveil.features.gallery import GalleryFeatures
from nearveil.features.images import thumbnail
from nearveil.gallery import Index, Item, NotPublishedError, Published
from nearveil.mechanisms.base import candidate_count
from nearveil.mechanisms.covers.channel import checked_epsilon

EPSILON, CANDIDATES = 4.0, 0.1
_AT_ONCE = 1024  # items read, or written in one transaction
_SAME = 1e-5  # two features of one image differ by less: networks add in another order in another batch
_LINK = "a link: only what lies in the folder itself is indexed"
_NO_TEXT = "its name is not text"

Skipped = tuple[Path, str]
CodeBytes = int | Literal["auto"] | None


@dataclass(frozen=True)
class Terms:
    """What a map is learned for."""

    epsilon: float = EPSILON
    candidates: float = CANDIDATES
    n_sets: int | None = None  # none for the number that is found best
    code_bytes: CodeBytes = "auto"  # as of ``Index.publish``

    @classmethod
    def of(cls, published: Published) -> "Terms":
        """Return those of a map that there is."""
        release = published.release
        return cls(float(release.epsilon), float(release.candidates), release.n_sets, published.code_bytes)

    def but(self, **given: Any) -> "Terms":
        """Return these, but for what was given: 0 was given, too, and is an error."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Change:
    """What a run did to an index. Nothing is published of private images."""

    added: int
    deleted: int
    skipped: tuple[Skipped, ...]
    published: Published | None
    learned: bool


def files_below(root: Path, *, leave_out: Sequence[Path] = ()) -> tuple[list[Path], list[Skipped]]:
    """Return the files below a folder, in order, and the links and strange names that are left out.

    Hidden files and folders are passed over in silence. No link is followed.

    `leave_out`: Folders that are not looked into.
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
            reason = _LINK if path.is_symlink() else "" if is_text(path) else _NO_TEXT
            if reason:
                skipped.append((path, reason))
            else:
                files.append(path)
    return files, skipped


def synchronise(held: Index, root: Path, found: GalleryFeatures, bar: Bars, **given: Any) -> Change:
    """Bring an index in step with a folder.

    An image is known by its path and its feature: if both are there, nothing is done. Items whose originals lie
    elsewhere stay. Of private images every bit of a feature counts, and no map is learned.

    `root`: The folder, absolute.
    `found`: All that is below it.
    `bar`: Starts a bar of progress.
    Terms of the map; as before where they are None.
    """
    known = _known(held, root)
    if held.is_private:
        return _synchronise_private(held, root, found, known, bar)
    gone, new = _difference(known, _unchanged(held, known, found, _SAME), found)
    terms = _terms(held).but(**given)
    check_terms(len(held) - len(gone) + len(new), terms)
    skipped = list(found.skipped)
    added = _add(held, root, found, new, skipped, bar("adding", len(new)))
    held.delete(gone)
    bar("learning the map", None)
    published, learned = _publish(held, terms)
    return Change(added, len(gone), tuple(skipped), published, learned)


def _synchronise_private(
    held: Index, root: Path, found: GalleryFeatures, known: dict[Path, list[int]], bar: Bars
) -> Change:
    # Rows that nobody called exact are made anew, also where they happen to be equal.
    same = _unchanged(held, known, found, 0.0) if held.row_exact else {}
    gone, new = _difference(known, same, found)
    skipped = list(found.skipped)
    held.delete(gone)  # before the others come: of an image that has changed, two rows would vote
    added = _add(held, root, found, new, skipped, bar("adding", len(new)))
    return Change(added, len(gone), tuple(skipped), None, learned=False)


def _difference(
    known: dict[Path, list[int]], same: dict[Path, int], found: GalleryFeatures
) -> tuple[list[int], list[int]]:
    """Return the ids that are gone, and the positions of images that are new."""
    gone = {number for numbers in known.values() for number in numbers} - set(same.values())
    return sorted(gone), [position for position, path in enumerate(found.paths) if path not in same]


def is_text(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _known(held: Index, root: Path) -> dict[Path, list[int]]:
    """Return the items whose originals lie below a folder. There is one for a path, but for two runs at once."""
    known: dict[Path, list[int]] = {}
    ids = held.ids()
    for start in range(0, len(ids), _AT_ONCE):
        for item in held.items(ids[start : start + _AT_ONCE], lenient=True):
            if isinstance(item.original, Path) and item.original.is_relative_to(root):
                known.setdefault(item.original, []).append(item.id)
    return known


def _unchanged(held: Index, known: dict[Path, list[int]], found: GalleryFeatures, most: float) -> dict[Path, int]:
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


def _terms(held: Index) -> Terms:
    try:
        return Terms.of(held.current().published)
    except NotPublishedError:
        return Terms()


def check_terms(items: int, terms: Terms) -> None:
    """Raise if no map can be learned, before anything is changed."""
    if items < 2:
        raise ValueError("DIR: a map needs two images at least; nothing was changed")
    try:
        checked_epsilon(terms.epsilon)
        candidate_count(terms.candidates, items)
    except ValueError as error:
        raise ValueError(f"--{error} ({items:,} images); nothing was changed") from None
    if terms.n_sets is not None and not 2 <= terms.n_sets <= items:
        raise ValueError(f"--sets must be from 2 to {items:,}, the number of images; nothing was changed")


def _publish(held: Index, terms: Terms) -> tuple[Published, bool]:
    """Return the map in step with the index, and whether it had to be learned."""
    keep = 2
    try:
        newest, stale = held.current()
        if not stale and Terms.of(newest) == terms:
            return newest, False
        if not held.alive(newest).all():
            keep = 1  # an older map tells of what was deleted
    except NotPublishedError:
        pass
    return (
        held.publish(terms.epsilon, terms.candidates, n_sets=terms.n_sets, code_bytes=terms.code_bytes, keep=keep),
        True,
    )
