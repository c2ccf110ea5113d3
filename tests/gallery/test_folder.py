"""``sync_folder`` from Python: what it did, and errors that name its own parameters."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("skimage")

from PIL import Image

from nearveil.cluster import Cluster
from nearveil.features import HogColor, gallery_features
from nearveil.gallery import Index, sync_folder


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
