"""Upgrade indexes of formats 1 (nearveil 0.1) and 2 (nearveil 0.2) to format 3, in one transaction."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import sqlalchemy as sa

from nearveil.gallery.errors import CorruptedIndexError, IndexStoreError
from nearveil.gallery.store import (
    BLOCK,
    FORMAT,
    DigestKind,
    Header,
    add_metadata_keys,
    add_to_digests,
    checksum,
    deleted,
    hash_map,
    hash_rows,
    images,
    insert_rows,
    is_among,
    items,
    load_header,
    load_ids,
    metadata,
    published,
    save_header,
)
from nearveil.storage import Database

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
            "Index.open() once, where it can be written"
        )
    with database.begin_write() as connection:
        header = load_header(connection, location, lock=True)
        if header.format == FORMAT:  # another process was faster
            return
        for statement in _STATEMENTS:
            connection.exec_driver_sql(statement)
        metadata.create_all(connection)
        for rows in _read_items(connection, header, location):
            insert_rows(connection, items, rows)
            add_to_digests(connection, "item", hash_rows(rows))
        connection.exec_driver_sql("ALTER TABLE nearveil_image DROP COLUMN name")
        connection.exec_driver_sql(f"DROP TABLE IF EXISTS {_OLD_DETAILS}")
        _hash_images_and_deletions(connection, header)
        for number in connection.execute(sa.select(published.c.number)).scalars().all():
            change = sa.update(published).where(published.c.number == number)
            connection.execute(change.values(digest=hash_map(connection, number)))
        migrate_features(connection, header)
        save_header(connection, replace(header, format=FORMAT))


def _read_items(connection: sa.Connection, header: Header, location: str) -> Iterator[Rows]:
    """Yield rows of items, in blocks; format 1 has names in the table of images alone."""
    missing = np.zeros(header.next_id, np.bool_)
    missing[load_ids(connection, header, location)] = True
    if sa.inspect(connection).has_table(_OLD_DETAILS):
        for first in connection.exec_driver_sql(f"SELECT first FROM {_OLD_DETAILS}").scalars().all():  # noqa: S608
            rows = _unpack_details(connection, first, location)
            missing[[row[0] for row in rows]] = False
            yield rows
    unnamed = np.flatnonzero(missing).tolist()
    for start in range(0, len(unnamed), BLOCK):
        query = sa.select(images.c.id, sa.column("name", sa.Text)).where(
            is_among(connection, images.c.id, unnamed[start : start + BLOCK])
        )
        yield [(row.id, row.name, None, None) for row in connection.execute(query)]


def _unpack_details(connection: sa.Connection, first: int, location: str) -> Rows:
    """Return the rows of items that one row of the old table has."""
    query = f"SELECT first, last, external_ids, columns, crc FROM {_OLD_DETAILS} WHERE first = {first}"  # noqa: S608
    row = connection.exec_driver_sql(query).one()
    try:
        if checksum(*row[:-1]) != row.crc:
            raise ValueError
        columns, ids = json.loads(row.columns), range(row.first, row.last + 1)
        external_ids = [None] * len(ids) if row.external_ids is None else json.loads(row.external_ids)
        texts = [text or None for text in columns.get("metadata") or [None] * len(ids)]
        add_metadata_keys(connection, frozenset(key for text in texts if text for key in json.loads(text)))
        return list(zip(ids, columns.get("names") or [""] * len(ids), external_ids, texts, strict=True))
    except (TypeError, ValueError, AttributeError):
        raise CorruptedIndexError(location, "the list of names") from None


def _hash_images_and_deletions(connection: sa.Connection, header: Header) -> None:
    kinds: tuple[tuple[DigestKind, sa.Table], ...] = (("image", images), ("deleted", deleted))
    for first in range(0, header.next_id, BLOCK):
        for kind, table in kinds:
            query = sa.select(table).where(table.c.id.between(first, first + BLOCK - 1))
            add_to_digests(connection, kind, hash_rows(connection.execute(query).all()))
