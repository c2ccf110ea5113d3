"""Pickles of ledgers and accounts carry no secret."""

import copy
import pickle
from pathlib import Path
from weakref import WeakValueDictionary

import pytest
import sqlalchemy as sa

from nearveil.ledger import Ledger
from nearveil.privacy.events import PureDp
from nearveil.storage import without_secrets

from .conftest import ABOUT
from .stating import stated

PASSWORD = "hunter2-and-more"  # noqa: S105


def test_a_pickle_of_an_account_holds_no_password(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres_url.replace("postgres@", f"postgres:{PASSWORD}@") + f"&password={PASSWORD}"
    with Ledger(url, witness=tmp_path / "w") as ledger:
        account = ledger.open_account("images", **ABOUT, epsilon=1.0, delta=0.0)
        for handle in (ledger, account):
            stored = pickle.dumps(handle)
            assert PASSWORD.encode() not in stored
            assert pickle.loads(stored) == handle  # noqa: S301
        loaded = pickle.loads(pickle.dumps(account))  # noqa: S301
        assert loaded._ledger is ledger  # in this process it is open, with its password
        assert copy.deepcopy(account)._ledger is ledger
        stored = pickle.dumps(account)
    monkeypatch.setattr("nearveil.ledger._ledger._OPEN", WeakValueDictionary())  # as in another process
    elsewhere = pickle.loads(stored)  # noqa: S301
    assert elsewhere._ledger._database.url.password is None  # libpq looks into PGPASSWORD and ~/.pgpass
    assert PASSWORD not in str(elsewhere._ledger._database.url.query)
    elsewhere.spend(stated(PureDp(0.5)))
    assert elsewhere.balance().spent == 0.5
    elsewhere._ledger.close()


@pytest.mark.parametrize(
    "name", ["password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"]
)
def test_every_secret_of_an_address_is_dropped_and_the_rest_is_kept(name: str) -> None:
    address = sa.make_url(f"postgresql://me:{PASSWORD}@host:5433/db?sslmode=require&{name}={PASSWORD}")
    assert without_secrets(address) == sa.make_url("postgresql://me@host:5433/db?sslmode=require")
