"""What can go wrong with an index, and what to do then."""

import sqlite3
from collections.abc import Sequence

from sqlalchemy.engine import URL

from nearveil.errors import NearveilError
from nearveil.mechanisms import MessageError
from nearveil.storage import describe_url, find_error, is_connection_refused


class IndexStoreError(NearveilError):
    """The index could not do what was asked; nothing was changed, unless the text says otherwise."""


class NotAnIndexError(IndexStoreError, ValueError):
    """There is no index at this place."""


class DamagedIndexError(IndexStoreError):
    """A checksum does not fit, or the file cannot be read: put a backup back."""


class UnknownItemError(IndexStoreError, ValueError):
    """The index does not hold some ids: they were deleted, or never given.

    `ids`: Those that it does not hold.
    """

    def __init__(self, ids: Sequence[int | str]) -> None:
        self.ids = tuple(ids)
        shown = ", ".join(map(str, self.ids[:5])) + (", ..." if len(self.ids) > 5 else "")
        super().__init__(f"ids must be of items in the index; it does not hold {shown}")

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling: processes send errors to one another."""
        return UnknownItemError, (self.ids,)


class NotPublishedError(IndexStoreError):
    """Nothing was published yet, so no message can be answered."""


class PrivateIndexError(IndexStoreError):
    """The rows of this index are private: they are not served, published or asked as an open gallery."""


class InexactRowsError(IndexStoreError, ValueError):
    """Private rows must be row-exact: each a function of its own image alone, to the last bit."""


class StaleMapError(IndexStoreError):
    """A map is too old: no answer of its size can be made any more, or a newer one was published meanwhile."""


class MapChangedError(MessageError):
    """A message was made for a map that is not served any more: fetch the public part and ask anew.

    `asked`: The map that the message was made for.
    `current`: The map that is served now.
    `revision`: The revision of the gallery that the current map was learned on.
    """

    def __init__(self, asked: str, current: str, revision: int) -> None:
        self.asked, self.current, self.revision = asked, current, revision
        super().__init__(
            f"message was made for map {asked[:32]!r}, which is not served any more; the map is now {current!r}, of "
            f"revision {revision}: fetch the public part and ask anew"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling."""
        return MapChangedError, (self.asked, self.current, self.revision)


_DAMAGED = "its file is damaged: put a backup back"
_ERRORS: dict[int | str, tuple[type[IndexStoreError], str]] = {
    sqlite3.SQLITE_FULL: (IndexStoreError, "the disk is full; nothing was changed: make room, then try again"),
    sqlite3.SQLITE_READONLY: (IndexStoreError, "it is read-only: give this user the right to write"),
    sqlite3.SQLITE_CANTOPEN: (
        IndexStoreError,
        "it cannot be opened: the directory must be writable, or a copy that was made after all writers closed it",
    ),
    sqlite3.SQLITE_PERM: (IndexStoreError, "this user may not open it"),
    sqlite3.SQLITE_NOTADB: (DamagedIndexError, _DAMAGED),
    sqlite3.SQLITE_CORRUPT: (DamagedIndexError, _DAMAGED),
    sqlite3.SQLITE_MISMATCH: (DamagedIndexError, _DAMAGED),
    sqlite3.SQLITE_ERROR: (DamagedIndexError, "its tables are not those of an index: put a backup back"),
    sqlite3.SQLITE_IOERR: (
        IndexStoreError,
        "the disk is full or does not answer; a change may stand or not: see to it",
    ),
    sqlite3.SQLITE_BUSY: (IndexStoreError, "others held its lock all the time; nothing was changed: try again"),
    "53100": (IndexStoreError, "the server's disk is full; nothing was changed: make room, then try again"),
    "55P03": (IndexStoreError, "others held its lock all the time; nothing was changed: try again"),
    "42P01": (NotAnIndexError, "there is no index in this database: Index.create makes one"),
    "42501": (IndexStoreError, "this role may not do that: grant it the right"),
    "0A000": (IndexStoreError, "the server has no pgvector: install the extension `vector` there"),
    "58P01": (IndexStoreError, "the server has no pgvector: install the extension `vector` there"),
    "25006": (IndexStoreError, "the server is read-only (a replica?): connect to the primary"),
    "28P01": (IndexStoreError, "the server refuses the password"),
    "3D000": (IndexStoreError, "the server has no such database: create it first"),
    "XX001": (DamagedIndexError, "the server found damaged data: put a backup back"),
    "XX002": (DamagedIndexError, "the server found a damaged index: REINDEX may help"),
}


def explain(error: BaseException, url: URL, reading: bool = False) -> IndexStoreError:
    """Return a database error as one that says what to do, without what was being written, if not only `reading`."""
    where = f"index {describe_url(url)}"
    if isinstance(error, ModuleNotFoundError):
        return IndexStoreError("PostgreSQL needs psycopg and pgvector: pip install nearveil[postgres]")
    found = find_error(error, _ERRORS)
    # SQLite tells of damaged text by an error of Python's own, or in letters that Python cannot read.
    if isinstance(error, UnicodeDecodeError) or (
        isinstance(error, sqlite3.OperationalError) and getattr(error, "sqlite_errorcode", None) is None
    ):
        found = (DamagedIndexError, _DAMAGED)
    if found is not None:
        return found[0](f"{where}: {found[1]}")
    if is_connection_refused(error):
        return IndexStoreError(
            f"{where}: connection refused: no server listens there. Start it, or check host and port"
        )
    state = "it was only read" if reading else "a change that was under way may stand or not: look at the revision"
    return IndexStoreError(f"{where}: the database did not answer as it should ({type(error).__name__}); {state}")
