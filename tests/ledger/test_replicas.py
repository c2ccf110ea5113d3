"""Copies of a PostgreSQL database that fell behind: a replica that lags, a dump that was put back."""

import sqlite3
import stat
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from nearveil.ledger import Ledger, LedgerError
from nearveil.ledger.errors import RolledBackError
from nearveil.privacy.events import PureDp
from nearveil.storage import parse_url

from .conftest import ABOUT
from .postgres import Postgres
from .stating import stated
from .test_caps import STORED

TENTH = stated(PureDp(0.1))
Run = Callable[..., None]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of a user who has opened no ledger yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "nearveil"


@pytest.fixture
def run(postgres: Postgres) -> Run:
    """Run statements outside of any ledger."""

    def work(*statements: str) -> None:
        engine = sa.create_engine(parse_url(postgres.url(), "url"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)
        engine.dispose()

    return work


@pytest.fixture
def names(run: Run) -> tuple[str, str]:
    """A database, and the name of a copy that is yet to be made."""
    first, second = (f"l{uuid.uuid4().hex}" for _ in range(2))
    run(f"CREATE DATABASE {first}")
    return first, second


def test_a_replica_that_lags_is_not_spent_from(
    postgres: Postgres, names: tuple[str, str], run: Run, data: Path, tmp_path: Path
) -> None:
    """It lost the debits that had not reached it, and nobody noticed."""
    primary, replica = (postgres.url(name) for name in names)
    with Ledger(primary) as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        account.spend(TENTH)
    run(f"CREATE DATABASE {names[1]} TEMPLATE {names[0]}")
    with Ledger(primary) as ledger:
        ledger.account("images").spend(TENTH)
        assert ledger.verify()
    with pytest.raises(RolledBackError, match="does not hold entry 3"):
        Ledger(replica)
    with Ledger(replica, read_only=True) as ledger:
        assert ledger.account("images").balance().spent == 0.1
        assert "rolled back" in str(ledger.verify())
    assert len(list((data / "witness").iterdir())) == 1  # one ledger, whatever its address
    with Ledger(primary) as ledger:
        assert ledger.account("images").balance().spent == 0.2


def test_a_database_that_falls_back_behind_an_open_ledger_is_noticed(
    postgres: Postgres, names: tuple[str, str], run: Run, data: Path
) -> None:
    """The same address leads to a replica, after a failover."""
    primary, replica = names
    with Ledger(postgres.url(primary)) as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        ledger.close()
        run(f"CREATE DATABASE {replica} TEMPLATE {primary}")
        account.spend(TENTH)
        ledger.close()
        run(f"ALTER DATABASE {primary} RENAME TO gone{primary}", f"ALTER DATABASE {replica} RENAME TO {primary}")
        with pytest.raises(RolledBackError, match="replica that lags"):
            account.spend(TENTH)
        with pytest.raises(RolledBackError, match="replica that lags"):
            account.take(TENTH, 1)
    assert data.exists()


def test_an_account_that_is_missing_altogether_is_noticed(
    postgres: Postgres, names: tuple[str, str], run: Run, data: Path
) -> None:
    primary, replica = names
    Ledger(postgres.url(primary)).close()
    run(f"CREATE DATABASE {replica} TEMPLATE {primary}")
    with Ledger(postgres.url(primary)) as ledger:
        ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0).spend(TENTH)
    with pytest.raises(RolledBackError, match="not in the database"):
        Ledger(postgres.url(replica))
    assert data.exists()


def test_ledgers_in_one_server_have_witnesses_of_their_own(
    postgres_url: str, postgres: Postgres, names: tuple[str, str], data: Path
) -> None:
    with Ledger(postgres_url) as ledger:
        ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0).spend(TENTH)
        (path,) = (data / "witness").iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert ledger._database.witness is not None
        assert ledger._database.witness.path == path
    with Ledger(postgres.url(names[0])) as other:
        assert other._database.witness is not None
        assert other._database.witness.path != path
    (data / "given").touch()
    with Ledger(postgres_url, witness=data / "given") as ledger:
        assert ledger._database.witness is not None
        assert ledger._database.witness.path == data / "given"
    assert len(list((data / "witness").iterdir())) == 2


def test_who_sees_a_ledger_for_the_first_time_remembers_where_it_was(
    postgres: Postgres, names: tuple[str, str], run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary, replica = names
    with Ledger(postgres.url(primary)) as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
    run(f"CREATE DATABASE {replica} TEMPLATE {primary}")
    with Ledger(postgres.url(primary)) as ledger:
        ledger.account(account.name).spend(TENTH)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another user"))
    Ledger(postgres.url(primary)).close()  # looks, and spends nothing
    with pytest.raises(RolledBackError):
        Ledger(postgres.url(replica))


def test_a_folder_that_cannot_be_made_is_told_with_what_to_do(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(LedgerError, match=r"witness=.*XDG_DATA_HOME"):
        Ledger(postgres_url)
    Ledger(postgres_url, witness=tmp_path / "given").close()


def test_all_copies_of_a_ledger_that_had_no_identity_get_the_same(
    postgres: Postgres, names: tuple[str, str], run: Run, data: Path
) -> None:
    """A dump from before identities, put back after: it is still the same ledger."""
    primary, replica = names
    engine = sa.create_engine(parse_url(postgres.url(primary), "url"))
    with engine.begin() as connection:
        for statement in sqlite3_as_postgres(STORED.read_text()):
            connection.exec_driver_sql(statement)
    engine.dispose()
    run(f"CREATE DATABASE {replica} TEMPLATE {primary}")
    with Ledger(postgres.url(replica), read_only=True) as ledger:
        assert ledger.verify()
        assert ledger._database.witness is None
    with Ledger(postgres.url(primary)) as ledger:
        ledger.account("pure").spend(TENTH)
        assert ledger.verify()
    with pytest.raises(RolledBackError):
        Ledger(postgres.url(replica))
    assert len(list((data / "witness").iterdir())) == 1


def sqlite3_as_postgres(script: str) -> list[str]:
    """A stored SQLite ledger as statements for PostgreSQL."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(script)
    order = ("nearveil_account", "nearveil_quota", "nearveil_entry", "nearveil_ledger_version")
    statements = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
    rows = [
        f"INSERT INTO {name} VALUES ({', '.join(map(_literal, row))})"  # noqa: S608
        for name in order
        for row in connection.execute(f"SELECT * FROM {name}")  # noqa: S608
    ]
    connection.close()
    return [*(statements[name] for name in order), *rows]


def _literal(value: object) -> str:
    return "NULL" if value is None else str(value) if isinstance(value, int) else f"'{value}'"
