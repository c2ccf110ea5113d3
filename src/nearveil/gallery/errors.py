"""Errors of an index, with the remedy in their text."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.engine import URL

from nearveil.errors import NearveilError
from nearveil.mechanisms import MessageError
from nearveil.remote import READ_ONLY, is_copy
from nearveil.storage import COMMON_ERRORS, describe_url, find_error_code, is_connection_refused


class IndexStoreError(NearveilError):
    """The index could not do the operation; nothing was changed, unless the text says otherwise."""


class NotAnIndexError(IndexStoreError, ValueError):
    """No index at this location."""


@dataclass(eq=False, repr=False)
class CorruptedIndexError(IndexStoreError):
    """A digest does not match, or the file cannot be read: restore a backup."""

    location: str
    part: str = "its file"

    def __str__(self) -> str:
        remedy = "upload it again" if is_copy(self.location) else "restore a backup"
        return f"index {self.location}: {self.part} is corrupted; {remedy}"


@dataclass(eq=False, repr=False)
class UnknownItemError(IndexStoreError, ValueError):
    """Some `ids` are not in the index: they were deleted, or never existed."""

    ids: Sequence[int | str]

    def __str__(self) -> str:
        shown = ", ".join(map(repr, self.ids[:5])) + (", ..." if len(self.ids) > 5 else "")
        return f"ids: no item with id {shown} in the index"


class NotPublishedError(IndexStoreError):
    """No map is published yet, so no message can be answered."""


class PrivateIndexError(IndexStoreError):
    """The rows of this index are private: they cannot be served, published or queried as an open gallery."""


class InexactRowsError(IndexStoreError, ValueError):
    """Private rows must be row-exact: each a function of its own image alone, to the last bit."""


class StaleMapError(IndexStoreError):
    """A map is too old: too few of its items are left for an answer, or a newer map was published meanwhile."""


@dataclass(eq=False, repr=False)
class MapChangedError(MessageError):
    """A message was made for a map that is no longer served: fetch the public part and send a new message."""

    asked: str
    current: str
    revision: int

    def __str__(self) -> str:
        return (
            f"message was made for map {self.asked[:32]!r}, which is no longer served; the map is now "
            f"{self.current!r}, of revision {self.revision}: fetch the public part and send a new message"
        )


_CORRUPTED = {
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_ERROR,
    "XX001",
    "XX002",
}
_ERRORS: dict[int | str, str] = {
    **COMMON_ERRORS,
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: the directory must be writable, or a copy that was made after all "
    "writers closed it",
    sqlite3.SQLITE_IOERR: "the disk is full or does not respond; a change may have been saved or not: check the disk",
    sqlite3.SQLITE_BUSY: "other processes locked it until the timeout; nothing was changed: try again",
    "55P03": "other processes locked it until the timeout; nothing was changed: try again",
    "0A000": "the server has no pgvector: install the extension `vector` there",
    "58P01": "the server has no pgvector: install the extension `vector` there",
}


def explain(error: BaseException, url: URL, reading: bool = False) -> IndexStoreError:
    """Translate a database error, without the values of the statement; `reading`: nothing was being written."""
    location = describe_url(url)
    if isinstance(error, ModuleNotFoundError):
        return IndexStoreError('PostgreSQL needs psycopg and pgvector: pip install "nearveil[postgres]"')
    code = find_error_code(error)
    # SQLite reports corrupted text as an error of Python, or without a code.
    is_corrupted_text = isinstance(error, UnicodeDecodeError) or (
        isinstance(error, sqlite3.OperationalError) and getattr(error, "sqlite_errorcode", None) is None
    )
    if code in _CORRUPTED or is_corrupted_text:
        return CorruptedIndexError(location)
    if code == "42P01":
        return NotAnIndexError(f"No index in {location}. Create one with Index.create().")
    if code in _ERRORS:
        is_fetched = code == sqlite3.SQLITE_READONLY and is_copy(location)
        return IndexStoreError(f"index {location}: {READ_ONLY if is_fetched else _ERRORS[code]}")
    if is_connection_refused(error):
        return IndexStoreError(f"index {location}: connection refused: start the server, or check host and port")
    state = "nothing was being written" if reading else "a change may have been saved or not: check the revision"
    return IndexStoreError(f"index {location}: unexpected database error ({type(error).__name__}); {state}")
