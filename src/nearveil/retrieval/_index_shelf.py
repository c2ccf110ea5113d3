"""Where an index keeps what it published, so that a restart need not learn it again."""

import threading
from typing import NamedTuple

import sqlalchemy as sa

from nearveil.retrieval._index_errors import MapChangedError, NotPublishedError, StaleMapError
from nearveil.retrieval._index_tables import check_open, crc, damaged, load_head, parts, published
from nearveil.retrieval._published import Published
from nearveil.storage import Database

_PART = 16 << 20  # bytes in one row: far below what a database takes


class Current(NamedTuple):
    """The newest map, and whether the gallery has changed since it was learned."""

    published: Published
    stale: bool


class Shelf:
    """Maps of one index, newest last; those that were read stay in memory.

    `where`: What errors call the index.
    """

    def __init__(self, database: Database, where: str) -> None:
        self._database, self._where = database, where
        self._read: dict[int, Published] = {}
        self._lock = threading.Lock()

    def put(self, new: Published, keep: int) -> None:
        """Keep a map, and of the older ones as many as shall still be answered."""
        data = new.to_bytes()
        cut = [data[start : start + _PART] for start in range(0, len(data), _PART)]
        with self._database.begin_write() as connection:
            load_head(connection, self._where, lock=True)
            check_open(connection, self._where)  # a map is learned for a while: it may have become private meanwhile
            kept = connection.execute(sa.select(published.c.number, published.c.revision)).all()
            if any(row.revision > new.revision for row in kept):
                raise StaleMapError("a map of a newer revision was published meanwhile; this one is not kept")
            numbers = sorted(row.number for row in kept)
            number = numbers[-1] + 1 if numbers else 1
            values = {"number": number, "revision": new.revision, "public_id": new.public_id, "parts": len(cut)}
            connection.execute(sa.insert(published).values(**values, crc=crc(*values.values())))
            for part, some in enumerate(cut):
                row = {"number": number, "part": part, "data": some, "crc": crc(number, part, some)}
                connection.execute(sa.insert(parts).values(row))
            old = [*numbers, number][:-keep]
            connection.execute(sa.delete(parts).where(parts.c.number.in_(old)))
            connection.execute(sa.delete(published).where(published.c.number.in_(old)))

    def newest(self, connection: sa.Connection) -> Published:
        """Return the newest map."""
        listed = self._listed(connection)
        if not listed:
            raise NotPublishedError(f"index {self._where}: nothing was published yet: call publish(epsilon)")
        return self._load(connection, max(listed))

    def all(self, connection: sa.Connection) -> list[Published]:
        """Return all maps, the newest first."""
        return [self._load(connection, number) for number in sorted(self._listed(connection), reverse=True)]

    def numbers(self, connection: sa.Connection) -> set[int]:
        """Return the numbers of all maps."""
        return set(self._listed(connection))

    def reset(self) -> None:
        """Forget what was read."""
        with self._lock:
            self._read = {}

    def find(self, connection: sa.Connection, public_id: str) -> Published:
        """Return the map that a message names."""
        fitting = [number for number, name in self._listed(connection).items() if name == public_id]
        if fitting:
            return self._load(connection, max(fitting))
        newest = self.newest(connection)
        raise MapChangedError(public_id, newest.public_id, newest.revision)

    def _listed(self, connection: sa.Connection) -> dict[int, str]:
        """Return the fingerprints of all maps by number, and forget those that are kept no more. None is private."""
        check_open(connection, self._where)
        rows = connection.execute(sa.select(published)).all()
        for number, revision, public_id, count, told in rows:
            if crc(number, revision, public_id, count) != told:
                raise damaged(self._where, "what was published")
        listed = {row.number: row.public_id for row in rows}
        with self._lock:
            self._read = {number: kept for number, kept in self._read.items() if number in listed}
        return listed

    def _load(self, connection: sa.Connection, number: int) -> Published:
        known = self._read.get(number)
        if known is not None:
            return known
        count = connection.execute(sa.select(published.c.parts).where(published.c.number == number)).scalar_one()
        rows = connection.execute(sa.select(parts).where(parts.c.number == number).order_by(parts.c.part)).all()
        if len(rows) != count or any(crc(number, row.part, row.data) != row.crc for row in rows):
            raise damaged(self._where, "what was published")
        found = Published.from_bytes(b"".join(row.data for row in rows))
        with self._lock:
            self._read[number] = found
        return found
