"""Where things are kept: one database engine (SQLite, PostgreSQL), private files, the user's folder.

* :class:`Database`: connections for threads and forks, and transactions;
* :func:`parse_url`, :func:`describe_url`, :func:`without_secrets`: addresses of databases;
* :class:`FileWatch`: whether a SQLite file was changed;
* :func:`data_folder`, :func:`make_data_folder`, :func:`make_private_file`: files for their owner alone.
"""

from nearveil.storage._database import (
    Database,
    FileWatch,
    Mark,
    create_tables,
    describe_url,
    find_error,
    is_connection_refused,
    is_of_database,
    is_transient,
    parse_url,
    prepare_durable,
    without_secrets,
)
from nearveil.storage._files import data_folder, flush_folder, make_data_folder, make_private_file

__all__ = [
    "Database",
    "FileWatch",
    "Mark",
    "create_tables",
    "data_folder",
    "describe_url",
    "find_error",
    "flush_folder",
    "is_connection_refused",
    "is_of_database",
    "is_transient",
    "make_data_folder",
    "make_private_file",
    "parse_url",
    "prepare_durable",
    "without_secrets",
]
