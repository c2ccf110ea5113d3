"""Write what today's code stores and sends, beside what earlier versions did: once, when a format gets a new version.

Run ``python -m tests.stored NAME``, and commit the files: no test writes them.
"""

import gzip
import json
import sqlite3
import sys
import tempfile
from pathlib import Path

from nearveil.ledger import Ledger
from nearveil.server import TokenStore
from tests.service.serving import index_of
from tests.stored.models import write_copy, write_discriminant
from tests.stored.test_stored import HERE, PRICE, answers
from tests.wire.test_wire import spoken


def write(name: str) -> None:
    """Write an index, a ledger, tokens, frames, a local copy and a published model of one version."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        index_of(place / "birds").close()
        (HERE / f"index-{name}.db.gz").write_bytes(gzip.compress((place / "birds" / "index.db").read_bytes(), mtime=0))
        (HERE / f"answers-{name}.json").write_text(json.dumps(answers(place / "birds"), indent=1) + "\n")
        with TokenStore(place / "tokens.db") as store:
            secrets = {"good": store.create("ann")[1]}
            token, secrets["revoked"] = store.create("ben")
            store.revoke(token.id)
        _dump(place / "tokens.db", HERE / f"tokens-{name}.sql")
        with Ledger(place / "ledger.db") as ledger:
            account = ledger.open_account(
                "pure", owner="ann", protects="query", unit="image", relation="replace", epsilon=2.0, delta=0.0
            )
            account.spend(PRICE, "first").store(b"kept")
        _dump(place / "ledger.db", HERE / f"ledger-{name}.sql")
        write_copy(HERE / f"copy-{name}.zip", place)
    write_discriminant(HERE / f"discriminant-{name}.bin")
    frames = {type(one).__name__ + str(number): one.to_bytes().hex() for number, one in enumerate(spoken())}
    (HERE / f"frames-{name}.json").write_text(json.dumps(frames, indent=1) + "\n")
    (HERE / f"secrets-{name}.json").write_text(json.dumps(secrets, indent=1) + "\n")


def _dump(source: Path, into: Path) -> None:
    connection = sqlite3.connect(source)
    into.write_text("\n".join(connection.iterdump()) + "\n")
    connection.close()


if __name__ == "__main__":
    write(sys.argv[1])
