import io
import json
import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nearveil.features.extractor import FeatureError, unit_rows  # noqa: E402
from nearveil.features.networks import TorchExtractor  # noqa: E402
from nearveil.features.training import (  # noqa: E402  # noqa: E402
    ExtractorFileError,
    TrainedExtractor,
    compute_backbone_maps,
    draw_balanced_batches,
    load_extractor,
    train_head,
)

SIDE = 8


def _backbone(seed: int = 0, channels: int = 12) -> TorchExtractor:
    with torch.random.fork_rng():
        module = torch.nn.Conv2d(3, channels, 3)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape)))
    return TorchExtractor(module, side=SIDE, mean=(128,) * 3, std=(64,) * 3, name="small", batch=16)


def _photos(classes: int, each: int = 6, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Make images whose hue tells the class, under light of any strength, which tells nothing."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), each)
    hues = rng.uniform(-25, 25, (classes, 3))
    hues -= hues.mean(axis=1, keepdims=True)
    light = rng.uniform(60, 200, len(labels))
    noise = rng.normal(0, 4, (len(labels), SIDE, SIDE, 3))
    pixels = light[:, None, None, None] + hues[labels][:, None, None, :] + noise
    return list(pixels.clip(0, 255).astype(np.uint8)), labels


def _recall(rows: np.ndarray, labels: np.ndarray) -> float:
    scores = rows @ rows.T
    np.fill_diagonal(scores, -np.inf)
    return float((labels[scores.argmax(axis=1)] == labels).mean())


def _train(**changes: Any) -> TrainedExtractor:
    images, labels = _photos(6)
    options: dict[str, Any] = {"backbone": _backbone(), "dimension": 6, "epochs": 2, "random_state": 0}
    return train_head(images, labels, **(options | changes))


@pytest.mark.parametrize("letters", ["S", "MG"])
def test_training_helps_on_classes_that_it_has_not_seen(letters: str) -> None:
    images, labels = _photos(40)
    seen = labels < 20
    backbone = _backbone()
    maps = compute_backbone_maps(images, backbone)

    def train(learning_rate: float) -> float:
        options: dict[str, Any] = {"descriptors": letters, "dimension": 12, "learning_rate": learning_rate}
        model = train_head(maps[seen], labels[seen], backbone=backbone, epochs=40, random_state=0, **options)
        return _recall(model.describe(maps[~seen]), labels[~seen])

    before = _recall(unit_rows(maps[~seen].mean(axis=(2, 3), dtype=np.float32))[0], labels[~seen])
    after = train(1e-2)
    assert after > before + 0.15
    assert after > train(1e-12) + 0.1  # the training, not where it starts


def test_a_seed_decides_all_and_nothing_else_is_touched() -> None:
    backbone = _backbone()
    state = torch.random.get_rng_state()
    one, again, other = (_train(random_state=seed, backbone=backbone) for seed in (0, 0, 1))
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert torch.equal(state, torch.random.get_rng_state())


def test_images_and_their_maps_train_the_same_head() -> None:
    images, labels = _photos(6)
    backbone = _backbone()
    maps = compute_backbone_maps(images, backbone)
    assert maps.dtype == np.float16
    model = train_head(maps, labels, backbone=backbone, dimension=6, epochs=2, random_state=0)
    assert model.fingerprint == _train().fingerprint
    rows = model.extract(images)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1, abs=1e-6)
    assert model.describe(maps) == pytest.approx(rows, abs=5e-3)


def test_maps_are_those_of_the_module() -> None:
    images, _ = _photos(2)
    maps = compute_backbone_maps(images * 3, _backbone())
    scaled = torch.from_numpy((images[1].astype(np.float32) - 128) / 64).permute(2, 0, 1)[None]
    assert maps[1] == pytest.approx(_backbone()._module(scaled)[0].numpy(), rel=1e-3, abs=1e-3)
    assert len(maps) == 36


def test_a_frozen_backbone_stays_and_another_is_trained_as_a_copy() -> None:
    backbone = _backbone()
    before = {name: tensor.clone() for name, tensor in backbone._module.state_dict().items()}
    frozen, whole = _train(backbone=backbone), _train(backbone=backbone, freeze_backbone=False)
    for name, tensor in before.items():
        assert torch.equal(tensor, backbone._module.state_dict()[name])
        assert torch.equal(tensor, frozen._module[0].state_dict()[name])
        assert not torch.equal(tensor, whole._module[0].state_dict()[name])
    with pytest.raises(ValueError, match="use extract"):
        whole.describe(np.zeros((1, 12, 6, 6), dtype=np.float16))


def test_the_exponent_is_trained() -> None:
    assert abs(float(_train()._module[1].log_p.exp()) - 3) > 1e-4


def test_epochs_are_told() -> None:
    told: list[int] = []
    _train(epochs=5, tick=told.append)
    assert told == [1] * 5


def test_batches_are_balanced() -> None:
    sizes = [1, 2, 3, 5, 8, 13, 21, 4, 4, 4, 4]
    codes = np.repeat(np.arange(11), sizes)
    batches = list(islice(draw_balanced_batches(codes, np.random.default_rng(0)), 110))
    for batch in batches:
        assert sorted(Counter(codes[batch].tolist()).values()) == [4] * 8
    shown = Counter(np.concatenate(batches).tolist())
    for code, size in enumerate(sizes):
        counts = [shown[row] for row in np.flatnonzero(codes == code)]
        assert len(counts) == size
        assert max(counts) - min(counts) <= 1
    few = next(draw_balanced_batches(np.array([0, 1, 1]), np.random.default_rng(0)))
    assert Counter(np.array([0, 1, 1])[few].tolist()) == {0: 4, 1: 4}


@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_comes_back_from_its_file(frozen: bool, tmp_path: Path) -> None:
    model = _train(freeze_backbone=frozen)
    model.save(tmp_path / "model.nvm")
    again = load_extractor(tmp_path / "model.nvm", _backbone())
    images, _ = _photos(3, seed=1)
    assert np.array_equal(model.extract(images), again.extract(images))
    assert (again.fingerprint, again.name, again.dimension) == (model.fingerprint, "small SG", 6)
    assert [path.name for path in tmp_path.iterdir()] == ["model.nvm"]


def test_a_model_is_not_its_backbone() -> None:
    assert len({_train().fingerprint, _train(descriptors="S").fingerprint, _backbone().fingerprint}) == 3


class _Trap:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, ("raise SystemExit('code ran')",))


def test_no_code_out_of_a_file_is_run(tmp_path: Path) -> None:
    path = tmp_path / "model.nvm"
    for content in (pickle.dumps(_Trap()), _stored({"about": "{}", "head": _Trap(), "body": {}})):
        path.write_bytes(content)
        with pytest.raises(ExtractorFileError, match="not a file written by nearveil train"):
            load_extractor(path, _backbone())


def _stored(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def _changed(path: Path, **changes: Any) -> dict[str, Any]:
    stored: dict[str, Any] = torch.load(path, weights_only=True)
    stored["about"] = json.dumps(json.loads(stored["about"]) | changes)
    return stored


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.nvm"
    _train().save(path)
    whole = path.read_bytes()
    for content in (b"", b"a text", whole[: len(whole) // 2], whole[:-30], _stored([1]), _stored({"about": "{}"})):
        path.write_bytes(content)
        with pytest.raises(ExtractorFileError):
            load_extractor(path, _backbone())
    path.write_bytes(whole)
    stored = _changed(path)
    stored["head"]["log_p"] += 1e-3
    path.write_bytes(_stored(stored))
    with pytest.raises(ExtractorFileError, match="corrupted"):
        load_extractor(path, _backbone())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "nearveil model 2"}, "unknown format"),
        ({"dimension": 60_000}, "smaller than the head"),
        ({"dimension": "6"}, "unknown format"),
        ({"dimension": 5}, "do not fit the network"),
        ({"dimension": -1}, "do not fit the network"),
        ({"descriptors": "SM"}, "do not fit the network"),
        ({"descriptors": "XY"}, "not a file written"),
        ({"backbone_fingerprint": "00"}, "trained on another one"),
    ],
)
def test_files_that_tell_of_something_else(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.nvm"
    _train().save(path)
    path.write_bytes(_stored(_changed(path, **changes)))
    with pytest.raises(ExtractorFileError, match=words):
        load_extractor(path, _backbone())


def test_a_model_that_unpacks_to_more_than_itself(tmp_path: Path) -> None:
    path, bomb = tmp_path / "model.nvm", tmp_path / "bomb.nvm"
    _train().save(path)
    for way, more in ((zipfile.ZIP_DEFLATED, 0), (zipfile.ZIP_DEFLATED, 50_000_000), (zipfile.ZIP_STORED, 0)):
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(bomb, "w", way) as written:
            for entry in archive.infolist():
                content = archive.read(entry)
                written.writestr(entry.filename, content + bytes(more if "/data/" in entry.filename else 0))
        if way == zipfile.ZIP_STORED:
            assert load_extractor(bomb, _backbone()).dimension == 6
            continue
        tracemalloc.start()
        with pytest.raises(ExtractorFileError, match="not a file written"):
            load_extractor(bomb, _backbone())
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
        tracemalloc.stop()


def test_a_model_needs_its_own_backbone(tmp_path: Path) -> None:
    _train().save(tmp_path / "model.nvm")
    with pytest.raises(ExtractorFileError, match="backbone must be given"):
        load_extractor(tmp_path / "model.nvm")
    with pytest.raises(ExtractorFileError, match="trained on another one"):
        load_extractor(tmp_path / "model.nvm", _backbone(seed=1))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.nvm"
    path.write_text("what was there")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        _train().save(path)
    assert path.read_text() == "what was there"
    assert [one.name for one in tmp_path.iterdir()] == ["model.nvm"]
    monkeypatch.undo()
    with path.open() as reader:  # who reads the old file while it is replaced reads it to its end
        _train().save(path)
        assert reader.read() == "what was there"
    assert load_extractor(path, _backbone()).dimension == 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"descriptors": "XY"}, "descriptors must be"),
        ({"dimension": 1}, "dimension must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"epochs": 1.5}, "epochs must be"),
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"learning_rate": np.nan}, "learning_rate must be"),
        ({"learning_rate": 2.0}, "learning_rate must be"),
        ({"backbone": TorchExtractor(torch.nn.Flatten(), side=SIDE)}, "backbone must give maps"),
    ],
)
def test_mistakes_are_told(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _train(**changes)


@pytest.mark.parametrize("labels", [[0] * 4, [0, 1, 2, 3], [0, 0, 1], [[0, 0, 1, 1]]])
def test_labels_that_cannot_be(labels: Any) -> None:
    with pytest.raises(ValueError, match="labels must be"):
        train_head(_photos(1, 4)[0], labels, backbone=_backbone())


def test_maps_that_cannot_be() -> None:
    good = np.ones((4, 12, 6, 6), dtype=np.float32)
    labels = [0, 0, 1, 1]
    for bad, words in ((good[:, :5], "must have the shape"), (good[0], "must have the shape"), (good * np.nan, "fin")):
        with pytest.raises(ValueError, match=words):
            train_head(bad, labels if len(bad) == 4 else [0] * 6 + [1] * 6, backbone=_backbone())
    with pytest.raises(ValueError, match="finite"):
        train_head(good * 1e9, labels, backbone=_backbone())
    with pytest.raises(ValueError, match="must be images"):
        train_head(good, labels, backbone=_backbone(), freeze_backbone=False)
    with pytest.raises(ValueError, match="at least one"):
        compute_backbone_maps([], _backbone())
    with pytest.raises(FeatureError):
        _train().describe(good * np.nan)


def test_a_built_in_backbone_is_not_written(tmp_path: Path) -> None:
    from nearveil.features.backbones import MobileNetV2

    try:
        backbone = MobileNetV2()
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    images, labels = _photos(2, 2)
    model = train_head(images, labels, backbone=backbone, descriptors="SM", dimension=8, epochs=1, random_state=0)
    model.save(tmp_path / "model.nvm")
    assert (tmp_path / "model.nvm").stat().st_size < 60_000  # 8 x 1,280 numbers, and their names
    assert load_extractor(tmp_path / "model.nvm").fingerprint == model.fingerprint


def test_the_room_loads_without_torch() -> None:
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch': raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "import nearveil.features.training as t\n"
        "try: t.compute_backbone_maps([1], type('B', (), {'_batch': 1})())\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert "torch is not installed: pip install" in done.stdout
