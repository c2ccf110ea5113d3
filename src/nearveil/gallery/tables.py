"""Keep an index of vectors that somebody brings: add or replace them by their ids, delete some, publish the map."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nearveil.features.vectors import VectorTable
from nearveil.gallery.errors import UnknownItemError
from nearveil.gallery.folder import MapTerms, describe_place, find_index, find_terms, open_index, publish_map
from nearveil.gallery.index import Index
from nearveil.gallery.items import Progress, check_table
from nearveil.gallery.publishing import Published
from nearveil.storage import make_data_folder


@dataclass(frozen=True)
class TableReport:
    """What :func:`sync_table` did, and the index afterwards.

    `learned`: Whether the map had to be learned or updated.
    """

    index: str  # where it is, without a password
    items: int
    dimension: int
    revision: int
    added: int
    deleted: int
    published: Published
    learned: bool


def sync_table(
    table: VectorTable | None,
    index: str | os.PathLike[str] | None = None,
    *,
    delete: Sequence[str] = (),
    progress: Progress | None = None,
    **given: Any,
) -> TableReport:
    """Add the vectors of a table to an index, or replace those with the same ids; delete others; publish the map.

    `table`: None where there is only something to delete.
    `index`: Made if it is not there; by default the one of the command line.
    `delete`: External ids.
    `given`: As of :meth:`Index.publish`; by default as before.
    """
    start = progress or (lambda _, __: lambda ___: None)
    where = find_index(index)
    held = open_index(where)
    if held is None:
        if table is None:
            raise ValueError(f"delete: there is no index at {describe_place(where)}")
        MapTerms().updated(**given).check(len(table.rows))
        check_table(*table, table.rows.shape[1])  # before anything is made
        if index is None:
            make_data_folder()
        held = Index.create(where, dimension=table.rows.shape[1])
    with held:
        held.assert_open()
        if held.extractor and table is not None:
            raise ValueError("vectors: this index has features of images: use another index")
        terms, before, count = find_terms(held).updated(**given), held.ids(), len(held)
        if delete:
            try:
                held.delete(list(delete))
            except UnknownItemError as error:
                missing = ", ".join(map(str, error.ids[:5]))
                raise ValueError(f"delete: the index does not hold {missing}; nothing was changed") from None
        if table is not None:
            held.add_table(*table, replace=True, progress=start)
        added = len(set(held.ids().tolist()) - set(before.tolist()))
        terms.check(len(held))
        published, learned = publish_map(held, terms, start)
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
