import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from nearveil.ledger import Account, Ledger

from .postgres import NoPostgresError, Postgres, share_postgres

ABOUT: dict[str, Any] = {"owner": "the archive", "protects": "database", "unit": "image", "relation": "add-remove"}


@pytest.fixture(scope="session")
def postgres() -> Postgres:
    """One server for all tests."""
    try:
        return share_postgres()
    except NoPostgresError as reason:
        pytest.skip(str(reason))


@pytest.fixture
def doomed() -> Iterator[Postgres]:
    """A server of one's own, to kill."""
    try:
        server = Postgres()
    except NoPostgresError as reason:
        pytest.skip(str(reason))
    yield server
    server.remove()


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    """A new schema on it, in which everything is found and made."""
    name = f"t{uuid.uuid4().hex}"
    engine = sa.create_engine(postgres.url().replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {name}")
    engine.dispose()
    return f"{postgres.url()}&options=-csearch_path%3D{name}"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new ledger goes; every test that takes it runs on both databases."""
    if request.param == "sqlite":
        return str(tmp_path / "a ledger.db")
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def ledger(url: str, tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(url, witness=tmp_path / "witness", timeout=10.0) as opened:
        yield opened


@pytest.fixture
def open_account(ledger: Ledger) -> Callable[..., Account]:
    """Open an account with what most tests do not care about filled in."""

    def opened(name: str = "images", **terms: Any) -> Account:
        return ledger.open_account(name, **{**ABOUT, "epsilon": 1.0, "delta": 1e-5, **terms})

    return opened
