"""What released versions stored and sent is still read, and gives the same answers."""

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearveil import PublicDiscriminant
from nearveil.gallery import Index, Item
from nearveil.gallery.errors import UnknownItemError
from nearveil.ledger import Ledger
from nearveil.mechanisms import Message
from nearveil.privacy.events import PureDp
from nearveil.server import TokenStore
from nearveil.wire.messages import decode_frame
from tests.ledger.stating import stated
from tests.stored.models import ROWS, describe_discriminant, search_copy
from tests.wire.test_wire import ALL, spoken

PRICE = stated(PureDp(0.5), protects="query", relation="replace")
HERE = Path(__file__).parent
NAMES = sorted(path.name.removeprefix("frames-").removesuffix(".json") for path in HERE.glob("frames-*.json"))


def answers(place: Path) -> dict[str, str]:
    """Return, in hexadecimal, what an index answers to every message that its map knows."""
    with Index.open(place) as index:
        index.verify()
        published = index.current().published
        asked = [
            Message("covers", published.public_id, {"sets": np.array([one], np.int32)})
            for one in range(published.map.n_sets)
        ]
        return {message.to_bytes().hex(): index.answer(message).to_bytes().hex() for message in asked}


def restored(name: str, into: Path) -> Path:
    """Return a database that was stored as SQL."""
    connection = sqlite3.connect(into)
    connection.executescript((HERE / name).read_text())
    connection.close()
    into.chmod(0o600)
    return into


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_frames(name: str) -> None:
    kept = json.loads((HERE / f"frames-{name}.json").read_text())
    for text in kept.values():
        assert decode_frame(bytes.fromhex(text), *ALL).to_bytes().hex() == text
    if name == NAMES[-1]:  # today's version writes them so
        frames = {f"{type(one).__name__}{number}": one.to_bytes().hex() for number, one in enumerate(spoken())}
        assert kept.items() <= frames.items()


def unpacked(name: str, into: Path, kind: str = "index") -> Path:
    """Return an index as a version wrote it."""
    into.mkdir(mode=0o700)
    database = into / "index.db"
    database.write_bytes(gzip.decompress((HERE / f"{kind}-{name}.db.gz").read_bytes()))
    database.chmod(0o600)
    return into


def test_an_index(name: str, tmp_path: Path) -> None:
    assert answers(unpacked(name, tmp_path / "birds")) == json.loads((HERE / f"answers-{name}.json").read_text())


def test_an_index_changes_after_opening(name: str, tmp_path: Path) -> None:
    place = unpacked(name, tmp_path / "birds")
    with Index.open(place) as index:
        old, revision = index.ids(), index.revision
        rows, names = index.features(old), [item.name for item in index.items(old)]
        (first,) = index.add([Item(rows[0], "new", external_id="own")])
        index.delete([int(old[0])])
        assert index.revision > revision
    with Index.open(place) as index:
        index.verify()
        kept = index.ids()
        assert kept.tolist() == [*old[1:].tolist(), int(first)]
        np.testing.assert_array_equal(index.features(kept), np.concatenate([rows[1:], rows[:1]]))
        assert [item.name for item in index.items(kept)] == [*names[1:], "new"]
        assert index.texts(kept, "names") == [name.encode() for name in (*names[1:], "new")]
        assert index.items(["own"])[0].id == first
        published = index.republish()
        assert first in published.ids
        assert not index.current().stale
    assert answers(place)


def test_tokens(name: str, tmp_path: Path) -> None:
    secrets = json.loads((HERE / f"secrets-{name}.json").read_text())
    with TokenStore(restored(f"tokens-{name}.sql", tmp_path / "tokens.db")) as store:
        found = store.verify(secrets["good"])
        assert found is not None
        assert found.label == "ann"
        assert store.verify(secrets["revoked"]) is None


def test_a_ledger(name: str, tmp_path: Path) -> None:
    path = restored(f"ledger-{name}.sql", tmp_path / "ledger.db")
    Path(f"{path}.witness").touch()
    with Ledger(path) as ledger:
        assert ledger.verify()
        account = ledger.account("pure")
        assert account.spend(PRICE, "first").message == b"kept"
        account.spend(PRICE, "second")
        assert account.balance().spent == 1.0
        assert ledger.verify()


def expected_answers(name: str) -> Any:
    """Return what the models of a version answered when they were stored."""
    return json.loads((HERE / f"models-{name}.json").read_text())


def test_an_index_keeps_external_ids_and_metadata(tmp_path: Path) -> None:
    with Index.open(unpacked("0.2", tmp_path / "texts", "texts")) as index:
        index.verify()
        numbers = [n for n in range(len(ROWS)) if n != 3]  # doc-3 was deleted
        items = index.items([f"doc-{n}" for n in numbers])
        assert [item.metadata for item in items] == [{"even": n % 2 == 0} for n in numbers]
        unit = ROWS[numbers] / np.linalg.norm(ROWS[numbers], axis=1, keepdims=True)
        np.testing.assert_allclose(index.features([item.id for item in items]), unit, atol=1e-6)
        with pytest.raises(UnknownItemError):
            index.items(["doc-3"])


def test_a_local_copy(tmp_path: Path) -> None:
    pytest.importorskip("httpx")
    assert search_copy(HERE / "copy-0.2.zip", tmp_path) == expected_answers("0.2")["copy"]


def test_a_published_discriminant() -> None:
    model = PublicDiscriminant.load(HERE / "discriminant-0.2.bin")
    assert describe_discriminant(model) == expected_answers("0.2")["discriminant"]


def test_a_trained_head() -> None:
    pytest.importorskip("torch")
    from nearveil.features.training import load_extractor
    from tests.features.test_training import _backbone, _photos

    rows = load_extractor(HERE / "head-0.2.nvm", _backbone()).extract(_photos(2)[0])
    np.testing.assert_allclose(rows, expected_answers("0.2")["head"], atol=1e-4)
