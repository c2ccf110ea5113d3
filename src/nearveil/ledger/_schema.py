"""The tables as the code sees them, and the way there from any earlier version."""

from functools import lru_cache
from pathlib import Path

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from nearveil.ledger.errors import NewerLedgerError

_VERSION_TABLE = "nearveil_ledger_version"
_MIGRATION_LOCK = 0x6E6561727665696C  # "nearveil": of this ledger, among all that lock in the same server

_metadata = sa.MetaData()


def _text(name: str, *, primary_key: bool = False) -> "sa.Column[str]":
    return sa.Column(name, sa.Text, primary_key=primary_key)


accounts = sa.Table(
    "nearveil_account",
    _metadata,
    _text("name", primary_key=True),
    *map(_text, ("opening", "terms", "totals")),
    sa.Column("sequence", sa.BigInteger),
    _text("head"),
)
quotas = sa.Table(
    "nearveil_quota",
    _metadata,
    _text("account", primary_key=True),
    _text("client", primary_key=True),
    *map(_text, ("terms", "totals")),
    sa.Column("sequence", sa.BigInteger),
)
ledgers = sa.Table("nearveil_ledger", _metadata, _text("identity", primary_key=True))
entries = sa.Table(
    "nearveil_entry",
    _metadata,
    _text("account", primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    *map(_text, ("kind", "time", "key", "client", "nonce", "payload", "state", "client_state", "hash", "slot")),
)


@lru_cache(maxsize=1)
def _scripts() -> ScriptDirectory:
    return ScriptDirectory(Path(__file__).parent / "migrations")


def _version(connection: sa.Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table": _VERSION_TABLE}).get_current_revision()


def find_version(connection: sa.Connection) -> str | None:
    """Return the version of the tables, None where there are none; raise if it is a newer one."""
    version = _version(connection)
    known = {script.revision for script in _scripts().walk_revisions()}
    if version is not None and version not in known:
        raise NewerLedgerError(
            f"this ledger is of version {version}, which this nearveil does not know: install a newer nearveil"
        )
    return version


def is_current(connection: sa.Connection) -> bool:
    """Return whether the tables are of this version; raise if they are of a newer one."""
    return find_version(connection) == _scripts().get_current_head()


def find_identity(connection: sa.Connection) -> str | None:
    """Return what all copies of this ledger have, and no other; None where its tables are of an earlier version."""
    return connection.execute(sa.select(ledgers.c.identity)).scalar_one() if is_current(connection) else None


def migrate(connection: sa.Connection) -> None:
    """Bring the tables to this version, inside the caller's write transaction; others wait for the lock."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
    if is_current(connection):
        return
    scripts = _scripts()
    context = MigrationContext.configure(
        connection,
        opts={
            "version_table": _VERSION_TABLE,
            "transactional_ddl": True,
            "fn": lambda version, _: scripts._upgrade_revs("head", version),
        },
    )
    with Operations.context(context):
        context.run_migrations()
