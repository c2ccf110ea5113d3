"""The end of the demo: a gallery that stays, and a command that opens the page on it."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("PIL")
pytest.importorskip("skimage")
pytest.importorskip("fastapi")

from nearveil import Client
from nearveil.ledger import Ledger
from studies import photos


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> photos.Photos:
    monkeypatch.setenv("NEARVEIL_DATA", str(tmp_path / "nothing"))
    whole = photos.load_digit_photos()
    some = slice(0, 120)
    found = dataclasses.replace(
        whole,
        gallery=whole.gallery[some],
        gallery_y=whole.gallery_y[some],
        thumbnails=whole.thumbnails[some],
        names=whole.names[some],
    )
    monkeypatch.setattr(photos, "load_digit_photos", lambda: found)
    return found


def test_the_demo_ends_with_a_gallery_that_can_be_asked(
    few: photos.Photos, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # a second run takes the place of the first
        photos.offer_page(few, tmp_path / "out", Console(highlight=False))
    text = capsys.readouterr().out
    told = re.findall(r"^    (\S+)nearveil ui --index (\S+) --ledger (\S+)$", text, re.MULTILINE)
    gallery, ledger = Path(told[-1][1]), Path(told[-1][2])
    pictures = sorted((tmp_path / "out" / "pictures").iterdir())
    assert len(pictures) == photos.QUERIES
    with Ledger(ledger) as book:
        account = book.open_account(
            "me", owner="me", protects="query", unit="image", relation="replace", epsilon=30.0, delta=0.0
        )
        with Client(gallery, account=account) as client:
            assert sorted(client.galleries()[0].candidates) == [0.1, 0.2]
            found = client.nearest(pictures[0], 8, 30.0, 0.2, thumbnails=True)
    assert all(match.name.startswith("digit ") and match.image for match in found.matches)
    assert str(few.query_y[0]) in {match.name.removeprefix("digit ") for match in found.matches}


def test_without_what_the_page_needs_the_demo_says_so(
    few: photos.Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "skimage.feature", None)
    monkeypatch.setitem(sys.modules, "skimage", None)
    photos.offer_page(few, tmp_path / "out", Console(highlight=False))
    assert "The page needs more" in capsys.readouterr().out
    assert not (tmp_path / "out" / "gallery").exists()
