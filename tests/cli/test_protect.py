"""``nearveil protect`` and ``nearveil classify``: a model is published by its operator, and used at home."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("PIL")
pytest.importorskip("skimage")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import uvicorn

from nearveil.ledger import Ledger
from nearveil.server import Settings, TokenStore, create_app, open_galleries
from tests.cli.galleries import fine, picture, refused, run, told
from tests.clocks import hurry

KINDS = ("red", "green")
COLOURS = {"red": (200, 20, 30), "green": (20, 190, 40)}


def photos(folder: Path, count: int, *, labelled: bool, seed: int) -> Path:
    """Write pictures of two colours, in folders if they are records."""
    for number in range(count):
        kind = KINDS[number % 2]
        place = folder / kind if labelled else folder
        place.mkdir(parents=True, exist_ok=True)
        picture(place / f"{seed + number}.png", COLOURS[kind], seed=seed + number)
    return folder


def config(folder: Path, **changed: object) -> Path:
    """Write the configuration of a protected gallery."""
    given: dict[str, object] = {
        "name": "colours",
        "kind": "protected",
        "index": str(folder / "private"),
        "public": str(folder / "public"),
        "classes": list(KINDS),
        "epsilon": 60.0,
        "delta": 1e-5,
        "publications": 2,
        "ledger": str(folder / "ledger.db"),
        "account": "colours",
    } | changed
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]
    path = folder / "nearveil.toml"
    tokens = f"tokens = {json.dumps(str(folder / 'tokens.db'))}"
    path.write_text("\n".join([tokens, "port = 0", "[[galleries]]", *lines]))
    return path


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colours")
    photos(folder / "records", 40, labelled=True, seed=0)
    photos(folder / "shown", 20, labelled=False, seed=100)
    fine("index", folder / "records", "--into", folder / "private", "--extractor", "hog", "--private")
    fine("index", folder / "shown", "--into", folder / "public", "--extractor", "hog", "--candidates", 0.2)
    return folder


@dataclass
class Served:
    """A server on loopback, and a token for it."""

    url: str
    token: str


@pytest.fixture(scope="module")
def served(indexed: Path) -> Iterator[Served]:
    text = fine("protect", "--config", config(indexed), "--publish")
    assert "Published: model 1 of colours" in text
    assert text.strip().endswith("Publications left: 1.")  # as it is afterwards, and said once
    assert text.count("Publications left") == 1
    settings = Settings.load(indexed / "nearveil.toml", log_file=indexed / "log", rate=None)
    held = open_galleries(settings)
    with TokenStore(settings.tokens) as tokens, socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(create_app(held, tokens, settings), log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = listening.getsockname()[1]
        yield Served(f"http://127.0.0.1:{port}", tokens.create("test")[1])
        server.should_exit = True
        thread.join()
    for one in held:
        one.close()
    assert "accuracy" not in (indexed / "log").read_text()  # what was forecast is in no log


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def test_images_are_classified_without_an_account(served: Served, tmp_path: Path) -> None:
    images = sorted(photos(tmp_path, 6, labelled=True, seed=300).glob("*/*.png"))
    words = ("classify", *images, "--server", served.url, "--token", served.token)
    found = told(*words)
    assert [one["image"] for one in found["images"]] == list(map(str, images))
    assert [one["label"] for one in found["images"]] == ["green"] * 3 + ["red"] * 3
    for one in found["images"]:
        assert set(one["probabilities"]) == set(KINDS)
        assert sum(one["probabilities"].values()) == pytest.approx(1.0)
    assert (found["epsilon"], found["paid"]) == (0.0, 0.0)
    assert "any one record is in the database" in found["gallery_guarantee"]
    text = fine(*words, "--gallery", "colours")
    assert "nothing was paid" in text
    assert "green" in text
    assert found["caution"] == ""
    assert found["failed"] == []
    assert "much noise" not in text


def test_files_that_are_no_images_are_named_and_the_others_are_classified(served: Served, tmp_path: Path) -> None:
    images = sorted(photos(tmp_path, 2, labelled=True, seed=300).glob("*/*.png"))
    (notes := tmp_path / "no\x1b[2Jtes.png").write_text("no image")
    missing = tmp_path / "missing.png"
    words = ("classify", images[0], notes, missing, images[1], "--server", served.url, "--token", served.token)
    text = refused(*words)
    assert "green" in text
    assert "red" in text
    assert "tes.png: not an image" in text
    assert "missing.png: missing" in text
    assert "\x1b" not in text
    found = json.loads(run(*words, "--json").stdout)
    assert [one["image"] for one in found["images"]] == list(map(str, images))
    assert [one["image"] for one in found["failed"]] == [str(notes), str(missing)]
    text = refused("classify", missing, "--server", served.url, "--token", served.token)
    assert "missing.png: missing" in text


def test_what_is_wrong_is_said_in_options(served: Served, tmp_path: Path) -> None:
    (image,) = photos(tmp_path, 1, labelled=False, seed=300).glob("*.png")
    words = ("classify", image, "--server", served.url)
    assert "--token" in refused(*words)
    assert "--gallery: there is none named 'birds'" in refused(*words, "--token", served.token, "--gallery", "birds")
    (tmp_path / "notes.png").write_text("no image")
    told_of = refused("classify", tmp_path / "notes.png", "--server", served.url, "--token", served.token)
    assert "notes.png: not an image" in told_of
    assert "--url" not in refused("classify", image, "--server", "birds.example", "--token", "x")


def test_what_to_expect_is_told_before_anything_is_paid(indexed: Path, tmp_path: Path) -> None:
    path = config(indexed, ledger=str(tmp_path / "other.db"), account="other")
    text = " ".join(fine("protect", "--config", path).split())
    assert "For you only" in text
    number = r"[01]\.\d\d"
    expected = rf"Expected accuracy: {number}, and between {number} and {number} in 8 of 10 draws of the noise; "
    assert re.search(rf"{expected}without noise {number}; by guessing 0\.50", text)
    assert re.search(rf"green │ 20 │ ± \d\.\d │ {number}", text)
    assert "too few to rely on" not in text
    assert "Publications left: 2" in text
    assert "20" in text
    with Ledger(tmp_path / "other.db") as ledger:
        assert ledger.accounts() == []
    assert "NAME: must be a protected gallery of the file: colours" in refused("protect", "birds", "--config", path)
    path = config(indexed, ledger=str(tmp_path / "other.db"), account="other", epsilon=2.5)
    text = " ".join(fine("protect", "--config", path).split())
    assert "2 of 2 classes have fewer than five times as many records as there is noise on their count" in text


def test_noise_alone_is_refused_unless_allowed(tmp_path: Path) -> None:
    photos(tmp_path / "records", 12, labelled=True, seed=0)
    photos(tmp_path / "shown", 12, labelled=False, seed=100)
    fine("index", tmp_path / "records", "--into", tmp_path / "private", "--extractor", "hog", "--private")
    fine("index", tmp_path / "shown", "--into", tmp_path / "public", "--extractor", "hog", "--candidates", 0.2)
    path = config(tmp_path, epsilon=0.001, publications=1)
    assert "The model would be pure noise" in " ".join(fine("protect", "--config", path).split())
    assert "noise alone" in refused("protect", "--config", path, "--publish")
    assert "has no model yet" in refused("serve", "--config", path)
    assert "Published: model 1" in fine("protect", "--config", path, "--publish", "--allow-noise")
    refusal = refused(
        "protect", "--config", config(tmp_path, epsilon=0.001, publications=1, allow_noise=True), "--publish"
    )
    assert "paid for all 1 that it was opened for" in refusal
