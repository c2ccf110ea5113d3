"""The demo from photographs to a contact sheet, with and without what can be installed."""

import dataclasses
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from nearveil.client.results import Match, Nearest
from nearveil.features import HogColor, load_image
from nearveil.features.gallery import FeatureCache
from nearveil.gallery.contact_sheet import ContactSheet
from nearveil.ledger import Ledger
from nearveil.mechanisms.covers.covers import set_guarantee
from nearveil.privacy.events import PureDp
from studies import photos
from studies.photos import serve_on_loopback
from tests.clocks import hurry


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no client wait for the end of a private step."""
    hurry(monkeypatch)


@pytest.fixture(scope="module")
def few() -> photos.Photos:
    """Return digits, but a small gallery of them."""
    whole = photos.load_digit_photos()
    assert len(whole.gallery) == 1777
    return dataclasses.replace(
        whole, gallery=whole.gallery[:300], gallery_y=whole.gallery_y[:300], thumbnails=whole.thumbnails[:300]
    )


def test_the_demo_runs_from_the_base_install(
    few: photos.Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / photos.PHOTOS).mkdir()  # the photographs are there, but nothing to read them with
    for name in ("torch", "skimage", "skimage.feature"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(photos, "load_digit_photos", lambda: few)
    monkeypatch.setattr(photos, "EPSILONS", (1.0, 12.0))
    photos.main(["--out", str(tmp_path / "out")])
    text = " ".join(capsys.readouterr().out.split())
    assert "handwritten digits instead" in text
    assert "300 handwritten digits in the gallery, 20 private ones; features: their pixels, 64 dimensions" in text
    assert "account image 1: budget epsilon 13 at delta 0, spent 13, left 0" in text
    assert "21 accounts checked: all is well" in text
    rows = re.findall(r"│ (1|12) │ ([\d.]+) \([\d.-]+\) │ ([\d.]+) \([\d.-]+\) │ ([\d.]+) │ ([\d.]+) │ 0.10 │", text)
    assert [row[0] for row in rows] == ["1", "12"]
    (_, _, low, floor, little), (_, recall, high, _, much) = rows
    assert float(floor) < float(little) < 0.5 < float(much)
    assert float(low) < float(high)
    # At epsilon 12 another set than the right one is named once in thousands of questions.
    assert float(recall) > 0.85
    assert float(high) > 0.7
    assert (tmp_path / "out" / "photos.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_what_is_known(few: photos.Photos, tmp_path: Path) -> None:
    with photos.build(few, tmp_path / "index") as index:
        published = index.publish(4.0, 0.1, n_sets=3, reach=0.0)
    wanted, held = (few.queries, few.gallery)
    wanted, held = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (wanted, held))
    order = np.argsort(-(wanted @ held.T), axis=1)

    def measured(chosen: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> photos.Figures:
        asked = [_found(row.tolist()) for row in chosen]
        return photos.measure(few, published, asked, 10)

    best = measured(order[:, :8])
    assert best.nn_recall.value == 1
    assert best.recall.value == photos.score_without_privacy(few)
    assert (best.fraction, best.message_bytes, best.answer_bytes) == (0.1, 140, 20)
    assert measured(np.hstack([order[:, :4], order[:, -4:]])).nn_recall.value == 0.5
    assert measured(order[:, -8:]).nn_recall.value == 0


def _found(ids: list[int]) -> Nearest:
    """Return what a client would, of these items."""
    matches = tuple(Match(number, "", 0.5) for number in ids)
    return Nearest(matches, "message", set_guarantee(PureDp(4.0)), "key", False, 30, 0, 3, 140, 30)


def test_photographs_are_used_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("skimage")
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path))
    monkeypatch.setattr(photos, "default_extractor", HogColor)
    for place, hue in enumerate(((200, 30, 30), (30, 200, 30), (30, 30, 200))):
        folder = tmp_path / photos.PHOTOS / f"species {place}"
        folder.mkdir(parents=True)
        for number in range(4):
            noise = np.random.default_rng(10 * place + number).integers(-20, 20, (40, 60, 3))
            image.fromarray((np.array(hue) + noise).astype(np.uint8)).save(folder / f"{number}.jpg")
    cache = FeatureCache(tmp_path / "cache")
    found = photos.load_photos(cache, Console())
    assert found.what == "photographs of 3 species of birds"
    assert found.gallery_y.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert found.query_y.tolist() == [0, 1, 2]
    private = [load_image(tmp_path / photos.PHOTOS / f"species {place}" / "3.jpg") for place in range(3)]
    assert np.array_equal(found.queries, HogColor().extract(private))
    assert load_image(found.thumbnails[0]).shape == (40, 60, 3)
    # Of the gallery nine features are kept, of the queries none.
    assert sum(path.is_file() for path in cache.directory.rglob("*")) == 9


def test_what_is_asked_and_drawn(few: photos.Photos, tmp_path: Path) -> None:
    with photos.build(few, tmp_path / "index") as index, Ledger(tmp_path / "ledger.db") as ledger:
        published = index.publish(30.0, 0.2, n_sets=4, reach=0.0)
        account = ledger.open_account(
            "one", owner="me", protects="query", unit="image", relation="replace", epsilon=30.0, delta=0.0
        )
        with serve_on_loopback(tmp_path / "index") as server:
            asked = photos.ask(server, few.queries[3], 30.0, account)
        assert account.balance().left == 0
    assert asked.answer is not None
    assert asked.n_candidates == len(asked.answer.ids) == 60
    members = published.release.members_[[asked.set]].indices
    assert asked.answer.ids.tolist() == sorted(members.tolist())
    assert load_image(photos.draw_sheet(few, asked, 3)).shape == (600, 1560, 3)
    with pytest.raises(ProcessLookupError):  # it has stopped
        os.kill(server.process, 0)


def test_a_server_that_does_not_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="did not start: exit code 1"), serve_on_loopback(tmp_path / "nothing"):
        pass
    assert "No index at" in capfd.readouterr().err


def test_a_sheet_of_strange_names_and_pictures() -> None:
    grey = np.full((9, 30, 3), 128, dtype=np.uint8)
    strange = ContactSheet(
        query=grey, named=0, n_sets=2, candidates=[b"", b"no image"] * 30, matches=[b""] * 20,
        captions=["$x_1^", "鳥\x1b[31m", "a\nb"] + ["long " * 20] * 17, epsilon=0.5,
    )  # fmt: skip
    assert load_image(strange.to_png()).shape == (600, 1560, 3)
    one = dataclasses.replace(strange, candidates=[b""], matches=[b""], captions=["one"])
    assert one.to_png().startswith(b"\x89PNG")
