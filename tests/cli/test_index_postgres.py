"""``nearveil index`` and ``nearveil query`` with the gallery in PostgreSQL."""

from pathlib import Path

import pytest

pytest.importorskip("PIL")
pytest.importorskip("skimage")
pytest.importorskip("psycopg")

from tests.cli.galleries import COUNT, colour, gallery, picture, refused, told
from tests.gallery.index_places import index_server, index_url, one_thread

__all__ = ["index_server", "index_url", "one_thread"]


def test_a_gallery_in_a_database(index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("NEARVEIL_LEDGER", raising=False)
    monkeypatch.setenv("NEARVEIL_INDEX", index_url)
    folder = gallery(tmp_path / "photos")
    assert told("index", folder, "--extractor", "hog", "--candidates", 0.2)["added"] == COUNT
    assert told("index", folder)["map_learned"] is False
    (folder / "0" / "00.png").unlink()
    assert told("index", folder)["deleted"] == 1
    found = told("query", picture(tmp_path / "private.png", colour(7), seed=1000), "--epsilon", 4)
    assert (len(found["found"]), found["candidates"], found["left"]) == (7, 7, 96.0)


def test_private_images_in_a_database(index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("NEARVEIL_INDEX", index_url)
    folder = gallery(tmp_path / "photos", 6)
    found = told("index", folder, "--extractor", "hog", "--private")
    assert (found["added"], found["private"], found["row_exact"]) == (6, True, True)
    assert told("index", folder)["added"] == 0
    question = picture(tmp_path / "question.png", colour(7))
    assert "has private rows" in refused("query", question)
