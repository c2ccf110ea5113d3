"""Originals in files: what lies there later is not what was added."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nearveil.gallery import Index, Item

from .index_places import unit_rows


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    photo = tmp_path / "photos" / "birds" / "robin.jpg"
    photo.parent.mkdir(parents=True)
    photo.write_bytes(b"a robin")
    return photo


@pytest.fixture
def index(tmp_path: Path, photo: Path) -> Index:
    index = Index.create(tmp_path / "index", dimension=4)
    index.add([Item(unit_rows(1, 4)[0], "robin", original=photo)])
    return index


def served(index: Index) -> bytes | None:
    (item,) = index.items([0])
    return item.read_original()


def link(photo: Path) -> None:
    secret = photo.parents[2] / "secret"
    secret.write_bytes(b"a secret")
    photo.unlink()
    photo.symlink_to(secret)


def link_to_the_same_bytes(photo: Path) -> None:
    other = photo.parents[2] / "other"
    photo.rename(other)
    photo.symlink_to(other)


def link_a_folder(photo: Path) -> None:
    moved = photo.parents[2] / "moved"
    photo.parent.rename(moved)
    photo.parent.symlink_to(moved)


def pipe(photo: Path) -> None:
    photo.unlink()
    os.mkfifo(photo)


def folder(photo: Path) -> None:
    photo.unlink()
    photo.mkdir()


def other_content(photo: Path) -> None:
    photo.write_bytes(b"a wren!")


@pytest.mark.parametrize(
    "change", [link, link_to_the_same_bytes, link_a_folder, pipe, folder, other_content, Path.unlink]
)
def test_what_was_put_in_its_place_is_not_served(index: Index, photo: Path, change: Callable[[Path], None]) -> None:
    with index:
        assert served(index) == b"a robin"
        change(photo)
        assert served(index) is None


def test_a_link_at_indexing_is_followed_then_and_never_again(tmp_path: Path, photo: Path) -> None:
    alias = tmp_path / "alias"
    alias.symlink_to(photo.parent)
    with Index.create(tmp_path / "other", dimension=4) as index:
        index.add([Item(unit_rows(1, 4)[0], "robin", original=alias / "robin.jpg")])
        alias.unlink()
        alias.symlink_to(tmp_path)
        assert served(index) == b"a robin"


def test_a_file_that_is_too_large(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    with index:
        for most, content in ((6, None), (7, b"a robin")):
            monkeypatch.setattr("nearveil.gallery.items.LARGEST_ORIGINAL", most)
            assert served(index) == content
