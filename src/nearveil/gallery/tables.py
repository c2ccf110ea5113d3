"""Keep an index of vectors that somebody brings: add or replace them by their ids, delete some, publish the map."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearveil.cluster import Cluster, connect
from nearveil.features.vectors import TablePart, VectorFile, VectorTable
from nearveil.gallery.errors import UnknownItemError
from nearveil.gallery.folder import (
    MapTerms,
    describe_place,
    find_index,
    find_terms,
    note_changes,
    open_index,
    publish_map,
)
from nearveil.gallery.index import Index
from nearveil.gallery.items import check_part, check_table, name_parts
from nearveil.gallery.publishing import Published
from nearveil.progress import Progress, no_progress
from nearveil.storage import make_data_folder


@dataclass(frozen=True)
class TableReport:
    """What :func:`sync_table` did, and the index afterwards; `learned`: whether the map was learned or updated."""

    index: str  # where it is, without a password
    items: int
    dimension: int
    revision: int
    added: int
    deleted: int
    published: Published
    learned: bool


def sync_table(
    table: VectorTable | VectorFile | None,
    index: str | os.PathLike[str] | None = None,
    *,
    delete: Sequence[str] = (),
    progress: Progress | None = None,
    cluster: Any = None,
    **given: Any,
) -> TableReport:
    """Add the vectors of a table to an index, or replace those with the same ids; delete others; publish the map.

    The index is made if it is not there. `delete` holds external ids; `given` are arguments of :meth:`Index.publish`,
    by default those of the map before. All vectors come in one transaction: if one is wrong, nothing is changed. What
    fails later leaves them in, and the map as it was; the error says so.
    """
    start = progress or no_progress
    where = find_index(index)
    held = open_index(where)
    with connect(cluster) as workers:
        if held is None:
            if table is None:
                raise ValueError(f"delete: there is no index at {describe_place(where)}")
            count, dimension = _check(table, workers, start)  # before anything is made
            MapTerms().updated(**given).check(count)
            if index is None:
                make_data_folder()
            held = Index.create(where, dimension=dimension)
        with held:
            held.assert_open()
            if held.extractor and table is not None:
                raise ValueError("vectors: this index has features of images: use another index")
            terms, before, count = find_terms(held).updated(**given), held.ids(), len(held)
            terms.check_at_most(count - len(set(delete)) + _count_rows(table))
            gone = _find_gone(held, delete)
            came = np.empty(0, np.uint32)
            if isinstance(table, VectorFile):
                came = held.add_file(table, replace=True, progress=start, cluster=workers)
            elif table is not None:
                came = held.add_table(*table, replace=True, progress=start)
            with note_changes():
                # After the others came: a wrong row deletes nothing. What the table holds stays.
                held.delete(np.setdiff1d(np.intersect1d(gone, held.ids()), came))
                added = len(np.setdiff1d(held.ids(), before, assume_unique=True))
                terms.check(len(held), "the index has changed, and its map is as before: publish it on other terms")
                published, learned = publish_map(held, terms, start, workers)
            return TableReport(
                describe_place(where),
                len(held),
                held.dimension,
                held.revision,
                added,
                count + added - len(held),
                published,
                learned,
            )


def _find_gone(held: Index, delete: Sequence[str]) -> list[int]:
    """Return the index's own ids of what shall be deleted."""
    try:
        return [item.id for item in held.items(list(delete), originals=False)]
    except UnknownItemError as error:
        missing = ", ".join(map(str, error.ids[:5]))
        raise ValueError(f"delete: the index does not hold {missing}; nothing was changed") from None


def _count_rows(table: VectorTable | VectorFile | None) -> int:
    if isinstance(table, VectorFile):
        return sum(part.stop - part.start for part in table.cut())
    return 0 if table is None else len(table.rows)


def _check(table: VectorTable | VectorFile, workers: Cluster, start: Progress) -> tuple[int, int]:
    """Return how many vectors of how many dimensions there are, all of them checked."""
    if not isinstance(table, VectorFile):
        return check_table(*table, table.rows.shape[1]).features.shape
    parts = table.cut()
    tick = start("checking", len(parts))
    shapes = list(workers.map(_check_part, parts, table, stage="checking", names=name_parts(table, parts), tick=tick))
    dimensions = {dimension for _, dimension in shapes}
    if len(dimensions) != 1:
        raise ValueError("vectors must be numbers, in rows of one length")
    return sum(count for count, _ in shapes), dimensions.pop()


def _check_part(part: TablePart, file: VectorFile) -> tuple[int, int]:
    return check_part(part, file, None).features.shape
