"""Upgrade indexes of formats 1 (nearveil 0.1), 2 (nearveil 0.2) and 3 to format 4, in one transaction."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import sqlalchemy as sa

from nearveil.gallery import store
from nearveil.gallery.errors import CorruptedIndexError, IndexStoreError
from nearveil.gallery.store import BLOCK, FORMAT, DigestKind, Header, images, load_header, published
from nearveil.metrics import CENTRED
from nearveil.storage import Database, is_among

_OLD_DETAILS = "nearveil_details"  # names, external ids and metadata of consecutive items, in one row of JSON
_STATEMENTS = (
    "ALTER TABLE nearveil_item RENAME TO nearveil_image",
    "ALTER TABLE nearveil_image DROP COLUMN crc",
    "ALTER TABLE nearveil_image DROP COLUMN original_crc",
    "ALTER TABLE nearveil_deleted DROP COLUMN crc",
    "ALTER TABLE nearveil_published DROP COLUMN crc",
    "ALTER TABLE nearveil_published DROP COLUMN parts",
    "ALTER TABLE nearveil_published ADD COLUMN digest TEXT",
    "ALTER TABLE nearveil_published_part DROP COLUMN crc",
)
Rows = list[tuple[int, str, str | None, str | None]]


def migrate(database: Database, location: str, migrate_features: Callable[[sa.Connection, Header], None]) -> None:
    """Upgrade an index to the current format, unless it has that already."""
    with database.begin_read() as connection:
        if load_header(connection, location).format == FORMAT:
            return
    if database.is_read_only:
        raise IndexStoreError(
            f"index {location} has an older format and is read-only. Upgrade it: run `nearveil index` on it, or call "
            "Index.open() once with write permission"
        )
    with database.begin_write() as connection:
        header = load_header(connection, location, lock=True)
        if header.format == FORMAT:  # another process was faster
            return
        if header.format < 3:
            _upgrade_to_3(connection, header, location)
            migrate_features(connection, header)
        connection.exec_driver_sql("ALTER TABLE nearveil_index ADD COLUMN metric TEXT")
        store.save_header(connection, replace(header, format=FORMAT, metric=CENTRED))


def _upgrade_to_3(connection: sa.Connection, header: Header, location: str) -> None:
    """Move names, external ids and metadata to a table of their own, and replace CRCs of rows by digests of blocks."""
    for statement in _STATEMENTS:
        connection.exec_driver_sql(statement)
    store.metadata.create_all(connection)
    for rows in _read_items(connection, header, location):
        store.insert_hashed(connection, "item", rows)
    connection.exec_driver_sql("ALTER TABLE nearveil_image DROP COLUMN name")
    connection.exec_driver_sql(f"DROP TABLE IF EXISTS {_OLD_DETAILS}")
    kinds: tuple[DigestKind, ...] = ("image", "deleted")
    for kind in kinds:
        for _, crcs in store.hash_blocks(connection, kind, header.next_id):
            store.add_to_digests(connection, kind, crcs)
    for number in connection.execute(sa.select(published.c.number)).scalars().all():
        change = sa.update(published).where(published.c.number == number)
        connection.execute(change.values(digest=store.read_map(connection, number)))


def _read_items(connection: sa.Connection, header: Header, location: str) -> Iterator[Rows]:
    """Yield rows of items, in blocks; format 1 has names in the table of images alone."""
    missing = np.zeros(header.next_id, np.bool_)
    missing[store.load_ids(connection, header, location)] = True
    if sa.inspect(connection).has_table(_OLD_DETAILS):
        for first in connection.exec_driver_sql(f"SELECT first FROM {_OLD_DETAILS}").scalars().all():  # noqa: S608
            rows = _unpack_details(connection, first, location)
            missing[[row[0] for row in rows]] = False
            yield rows
    unnamed = np.flatnonzero(missing).tolist()
    for start in range(0, len(unnamed), BLOCK):
        chosen = is_among(connection, images.c.id, unnamed[start : start + BLOCK])
        query = sa.select(images.c.id, sa.column("name", sa.Text)).where(chosen)
        yield [(row.id, row.name, None, None) for row in connection.execute(query)]


def _unpack_details(connection: sa.Connection, first: int, location: str) -> Rows:
    """Return the rows of items that one row of the old table has."""
    query = f"SELECT first, last, external_ids, columns, crc FROM {_OLD_DETAILS} WHERE first = {first}"  # noqa: S608
    row = connection.exec_driver_sql(query).one()
    try:
        if store.checksum(*row[:-1]) != row.crc:
            raise ValueError
        columns, ids = json.loads(row.columns), range(row.first, row.last + 1)
        external_ids = [None] * len(ids) if row.external_ids is None else json.loads(row.external_ids)
        texts = [text or None for text in columns.get("metadata") or [None] * len(ids)]
        store.add_metadata_keys(connection, frozenset(key for text in texts if text for key in json.loads(text)))
        return list(zip(ids, columns.get("names") or [""] * len(ids), external_ids, texts, strict=True))
    except (TypeError, ValueError, AttributeError):
        raise CorruptedIndexError(location, "the list of names") from None
