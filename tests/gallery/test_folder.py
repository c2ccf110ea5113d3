"""``sync_folder`` from Python: what it did, and errors that name its own parameters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("PIL")
pytest.importorskip("skimage")

from PIL import Image

from nearveil.cluster import Cluster
from nearveil.features import Extractor, HogColor, gallery_features
from nearveil.gallery import Index, sync_folder
from tests.programs import Program


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def test_a_folder_and_its_index_stay_in_step(photos: Path, tmp_path: Path) -> None:
    steps: list[str] = []

    def progress(text: str, _: int | None) -> object:
        steps.append(text)
        return lambda _: None

    place = tmp_path / "index"
    report = sync_folder(photos, place, extractor=HogColor(), candidates=0.5, n_sets=2, reach=0.0, progress=progress)  # type: ignore[arg-type]
    assert (report.items, report.added, report.deleted, report.learned, report.private) == (6, 6, 0, True, False)
    assert steps == ["reading", "adding", "learning the map"]
    (photos / "0.png").unlink()
    (photos / "notes.txt").write_text("no image")
    report = sync_folder(photos, place)
    assert (report.items, report.added, report.deleted, report.learned) == (5, 0, 1, True)
    assert [path.name for path, _ in report.skipped] == ["notes.txt"]
    with Index.open(place) as index:
        assert len(index) == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_sets": 7, "candidates": 0.5}, "n_sets must be from 2 to 6"),
        ({"epsilon": -1.0, "candidates": 0.5}, "epsilon must be"),
        ({"candidates": 2.0}, "candidates"),
        ({"private": True, "epsilon": 1.0}, "^epsilon: private images have no map"),
    ],
)
def test_errors_name_the_parameter_and_make_no_index(
    photos: Path, tmp_path: Path, options: dict[str, float], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        sync_folder(photos, tmp_path / "index", extractor=HogColor(), **options)  # type: ignore[arg-type]
    assert not (tmp_path / "index").exists()


class Elsewhere(Cluster):
    """A cluster whose workers are on other machines."""

    is_local = False


class Grey(Extractor):
    """Mean levels, for thousands of images."""

    def __init__(self) -> None:
        super().__init__(name="grey", identity={"grey": 1}, dimension=3, side=2)
        self.n_images = 0

    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        self.n_images += len(images)
        return np.asarray(images.mean(axis=(1, 2)) + 1)


_SYNC = """
import sys
from nearveil.gallery import sync_folder
from tests.gallery.test_folder import Grey
sync_folder(*sys.argv[1:], extractor=Grey(), progress=lambda text, _: lambda count: print(text, count, flush=True))
"""


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    """Killed while it reads, adds and learns the map, it loses less than 64 rows and a transaction of 1,024 images."""
    folder, place = tmp_path / "photos", tmp_path / "index"
    folder.mkdir()
    colours = np.random.default_rng(0).choice(2**24, 1100, replace=False)
    for number, colour in enumerate(colours.tolist()):
        Image.new("RGB", (2, 2), colour).save(folder / f"{number:04}.bmp")
    made = extracted = 0
    for stage, steps in (("reading", 9), ("adding", 1050), ("learning", 1)):
        program = Program("-c", _SYNC, str(folder), str(place))
        seen: list[str] = []
        for line in program.stdout:
            seen.append(line)
            if sum(text.startswith(stage) for text in seen) == steps:
                break
        read = sum(int(text.split()[-1]) for text in seen if text.startswith("reading"))
        program.kill()
        program.wait()
        program.stdout.close()
        extracted = max(extracted, read)
        rows = [path for path in Path(f"{place}.features").rglob("*") if len(path.name) == 64 and path.is_file()]
        assert len(rows) >= extracted
        if place.exists():
            with Index.open(place) as index:
                assert len(index) in (0, 1024, 1100)
                made = max(made, len(index))
    assert (extracted, made) == (1100, 1100)
    extractor = Grey()
    report = sync_folder(folder, place, extractor=extractor)
    assert (report.items, report.added, report.deleted, report.skipped) == (1100, 0, 0, ())
    assert extractor.n_images == 0
    with Index.open(place) as index:
        items = list(index.items(index.ids()))
        assert sorted(item.name for item in items) == [f"{number:04}.bmp" for number in range(1100)]
        pixels = [np.asarray(Image.open(folder / item.name)) for item in items]
        np.testing.assert_allclose(index.features(index.ids()), Grey().extract(pixels), atol=1e-6)
        assert all(item.thumbnail for item in items)


def test_private_images_are_refused_on_other_machines(photos: Path, tmp_path: Path) -> None:
    place, tool = tmp_path / "index", HogColor()
    with pytest.raises(ValueError, match="cluster: features of private images"):
        sync_folder(photos, place, extractor=tool, private=True, cluster=Elsewhere())
    assert sorted(tmp_path.iterdir()) == [photos]
    sync_folder(photos, place, extractor=tool, private=True, cluster=Cluster())
    with pytest.raises(ValueError, match="cluster: features of private images"):
        sync_folder(photos, place, cluster=Elsewhere())  # the index remembers


def test_exact_rows_are_refused_on_other_machines(photos: Path) -> None:
    files, tool = sorted(photos.iterdir()), HogColor()
    with pytest.raises(ValueError, match="cluster: features of private images"):
        gallery_features(files, tool, row_exact=True, cluster=Elsewhere())
    assert len(gallery_features(files, tool, cluster=Elsewhere()).features) == len(files)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder: there is no folder at"):
        sync_folder(tmp_path / "nowhere", tmp_path / "index")
