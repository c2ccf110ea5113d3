import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nearveil.features import Extractor, HogColor, gallery, gallery_features, load_image
from nearveil.features import images as reasons
from nearveil.features.gallery import FeatureCache
from nearveil.features.images import load_picture, thumbnail
from tests.features.files import animation, picture, saved

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "tempfile.", "shutil.",
           "socket.connect", "socket.sendto", "subprocess.Popen", "os.system", "sqlite3.connect", "mmap.")  # fmt: skip
_RECORDERS: list[list[str]] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _RECORDERS:
        return
    if (event == "open" and args[2] & _WRITES) or event.startswith(_EVENTS):
        _RECORDERS[-1].append(f"{event} {args!r}")


sys.addaudithook(_hook)  # cannot be taken away again; it does nothing outside `writes`


def _written() -> int:
    """Bytes that this process has handed to write calls, native code included; 0 where nothing counts them."""
    path = Path("/proc/self/io")
    return int(path.read_text().split("wchar:")[1].split()[0]) if path.exists() else 0


@contextmanager
def writes() -> Iterator[list[str]]:
    """Record every write to disk or network, by Python's audit events and by the kernel's count of bytes."""
    found: list[str] = []
    _RECORDERS.append(found)
    before = _written()
    try:
        yield found
    finally:
        _RECORDERS.pop()
    if (count := _written() - before) > 0:
        found.append(f"{count} bytes")


class Counting(Extractor):
    """Mean colours, and a count of the images that were extracted. Black has no feature."""

    def __init__(self, kind: str = "a") -> None:
        super().__init__(name="counting", identity={"kind": kind}, dimension=3, side=4)
        self.seen: list[int] = []

    def extract(self, images: Sequence[NDArray[np.uint8]], **options: Any) -> NDArray[np.float32]:
        self.seen.append(len(images))
        return super().extract(images, **options)

    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        return np.asarray(images.mean(axis=(1, 2)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    where = tmp_path / "gallery"
    where.mkdir()
    for number in range(5):
        (where / f"{number}.png").write_bytes(saved(picture(seed=number), "PNG"))
    return where


def _bad(folder: Path) -> dict[str, str]:
    (folder / "0-empty.jpg").touch()
    (folder / "1-cut.png").write_bytes(saved(picture(), "PNG")[:300])
    (folder / "2-text.png").write_text("words")
    (folder / "3-moving.gif").write_bytes(animation("GIF"))
    (folder / "4-black.png").write_bytes(saved(np.zeros((5, 5, 3), dtype=np.uint8), "PNG"))
    return {
        "0-empty.jpg": reasons.EMPTY,
        "1-cut.png": reasons.BROKEN,
        "2-text.png": reasons.NO_IMAGE,
        "3-moving.gif": reasons.ANIMATED,
        "4-black.png": gallery.NO_FEATURE,
        "5-missing.png": reasons.MISSING,
    }


def test_rows_in_order_and_the_rest_with_reasons(folder: Path, tmp_path: Path) -> None:
    bad = _bad(folder)
    paths = [*sorted(folder.iterdir()), folder / "5-missing.png"]
    for cache in (None, FeatureCache(tmp_path / "cache"), FeatureCache(tmp_path / "cache")):
        steps: list[int] = []
        found = gallery_features(map(str, paths), Counting(), cache=cache, tick=steps.append)
        assert sum(steps) == len(paths) == 11
        assert {path.name: reason for path, reason in found.skipped} == bad
        assert [path.name for path, _ in found.skipped] == sorted(bad)
        assert found.paths == tuple(path for path in paths if path.name not in bad)
        wanted = Counting().extract([load_image(path) for path in found.paths])
        np.testing.assert_array_equal(found.features, wanted)


def test_nothing_at_all() -> None:
    found = gallery_features([], Counting())
    assert found.features.shape == (0, 3)
    assert not found.paths
    assert not found.skipped


def test_images_are_reduced_before_the_next_ones_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory holds one image in full size for each thread."""
    extractor = Counting()
    sizes: set[tuple[int, ...]] = set()
    alive: list[int] = []
    loaded: list[weakref.ref[Any]] = []

    def count(content: Any) -> Any:
        alive.append(sum(reference() is not None for reference in loaded))
        picture = load_picture(content)
        loaded.append(weakref.ref(picture))
        return picture

    def note(images: Sequence[NDArray[np.uint8]], **options: Any) -> NDArray[np.float32]:
        sizes.update(image.shape for image in images)
        return Extractor.extract(extractor, images, **options)

    monkeypatch.setattr(gallery, "load_picture", count)
    monkeypatch.setattr(extractor, "extract", note)
    for threads in (1, 2):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        alive.clear()
        gallery_features(sorted(folder.iterdir()), extractor)
        assert max(alive) <= threads
    assert sizes == {(4, 4, 3)}


@pytest.mark.parametrize("row_exact", [False, True])
def test_threads_and_order_change_no_bit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lite0: Extractor, *, row_exact: bool
) -> None:
    paths = sorted(folder.iterdir())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone = [gallery_features([path], lite0, row_exact=row_exact).features[0].tobytes() for path in paths]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    made = gallery_features(paths[::-1], lite0, row_exact=row_exact, cache=FeatureCache(tmp_path / "cache"))
    assert [row.tobytes() for row in made.features[::-1]] == alone
    assert lite0.extract([load_image(path) for path in paths]).tobytes() == b"".join(alone)


def test_thumbnails_are_those_of_the_files(folder: Path, tmp_path: Path) -> None:
    paths, cache = sorted(folder.iterdir()), FeatureCache(tmp_path / "cache")
    first = gallery_features(paths, Counting(), cache=cache)
    assert first.thumbnails == tuple(thumbnail(load_image(path)) for path in paths)
    again = gallery_features(paths, Counting(), cache=cache)
    assert again.thumbnails == (b"",) * len(paths)
    assert not any(content in path.read_bytes() for content in first.thumbnails
                   for path in cache.directory.rglob("*") if path.is_file())  # fmt: skip


def test_the_cache_goes_by_content_and_extractor(folder: Path, tmp_path: Path) -> None:
    cache, extractor = FeatureCache(tmp_path / "cache"), Counting()
    paths = sorted(folder.iterdir())
    first = gallery_features(paths, extractor, cache=cache)
    assert sum(path.stat().st_size for path in cache.directory.rglob("*") if path.is_file()) == 5 * (32 + 4 * 3)
    assert oct((tmp_path / "cache").stat().st_mode)[-3:] == "700"
    assert all(oct(path.stat().st_mode)[-3:] == "600" for path in (tmp_path / "cache").rglob("*") if path.is_file())
    (folder / "0.png").rename(folder / "9.png")  # another name, the same content
    again = gallery_features(sorted(folder.iterdir()), extractor, cache=cache)
    assert extractor.seen == [5]
    np.testing.assert_array_equal(again.features, np.roll(first.features, -1, axis=0))
    (folder / "1.png").write_bytes(saved(picture(seed=77), "PNG"))  # the same name, another content
    gallery_features(sorted(folder.iterdir()), extractor, cache=cache)
    assert extractor.seen == [5, 1]
    other = Counting("b")
    gallery_features(sorted(folder.iterdir()), other, cache=cache)
    assert other.seen == [5]


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "longer", "folder"])
def test_a_damaged_row_is_computed_anew(folder: Path, tmp_path: Path, damage: str) -> None:
    cache, extractor = FeatureCache(tmp_path / "cache"), Counting()
    wanted = gallery_features(sorted(folder.iterdir()), extractor, cache=cache).features
    row = next(path for path in sorted((tmp_path / "cache").rglob("*")) if path.is_file())
    content = row.read_bytes()
    row.write_bytes(
        {
            "empty": b"",
            "cut": content[:-1],
            "flipped": content[:-1] + bytes([content[-1] ^ 1]),
            "longer": content + bytes(4),
            "folder": content,
        }[damage]
    )
    if damage == "folder":
        row.chmod(0)
        row.unlink()
    again = gallery_features(sorted(folder.iterdir()), extractor, cache=cache).features
    np.testing.assert_array_equal(again, wanted)
    assert extractor.seen == [5, 1]
    assert row.read_bytes() == content


def test_a_crash_while_writing_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FeatureCache(tmp_path)
    row = np.array([1, 0, 0], dtype=np.float32)
    cache.put("aa" * 32, "bb" * 32, row)

    def crash(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(OSError, match="full"):
        cache.put("aa" * 32, "bb" * 32, -row)
    with pytest.raises(OSError, match="full"):
        cache.put("ac" * 32, "bb" * 32, row)
    np.testing.assert_array_equal(cache.get("aa" * 32, "bb" * 32, 3), row)
    assert cache.get("ac" * 32, "bb" * 32, 3) is None
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_a_killed_writer_does_no_harm(tmp_path: Path) -> None:
    place = tmp_path / ("bb" * 32) / "aa"
    place.mkdir(parents=True)
    (place / ".half").write_bytes(b"part of a row")  # what a process leaves that was killed before it renamed
    cache = FeatureCache(tmp_path)
    assert cache.get("aa" * 32, "bb" * 32, 3) is None
    cache.put("aa" * 32, "bb" * 32, np.array([0, 1, 0], dtype=np.float32))
    assert cache.get("aa" * 32, "bb" * 32, 3) is not None


@pytest.mark.parametrize("kind", ["hog", "lite0"])
def test_a_query_never_touches_the_disk(kind: str, request: pytest.FixtureRequest, folder: Path) -> None:
    extractor = HogColor() if kind == "hog" else request.getfixturevalue(kind)
    content = saved(picture(seed=3), "JPEG")
    extractor.extract([picture()])  # libraries may prepare themselves with their first image, which is nobody's
    with writes() as found:
        extractor.extract([load_image(content)])
        extractor.extract([load_image(folder / "2.png")])
        with pytest.raises(reasons.ImageError):
            load_image(content[:200])
    assert found == []


def test_the_recorder_would_see_it(folder: Path, tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "cache")
    with writes() as found:
        gallery_features(sorted(folder.iterdir())[:1], Counting(), cache=cache)
    assert any(line.startswith("open") for line in found)
    assert any(line.startswith("os.rename") for line in found)
    if Path("/proc/self/io").exists():
        assert found[-1] == "44 bytes"
