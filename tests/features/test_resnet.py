"""ResNet-50 from a state dict: the same numbers as its definition, written out, and clear refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
pytest.importorskip("PIL", reason="Pillow is not installed (the extra `images`)")

from nearveil.features import train_head  # noqa: E402
from nearveil.features.backbones import ResNet50, make_extractor, make_resnet50  # noqa: E402

SIDE = 64


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """Random weights under torchvision's names, small enough that 50 layers neither vanish nor overflow."""
    torch.manual_seed(0)
    module = make_resnet50()
    stored = module.state_dict()
    for name, value in stored.items():
        if "running_var" in name:
            value.uniform_(0.5, 2)
        elif value.dtype.is_floating_point and value.ndim == 1:
            value.uniform_(0.1, 0.6)
    return {**stored, "fc.weight": torch.zeros(1000, 2048), "fc.bias": torch.zeros(1000)}


@pytest.fixture(scope="module")
def path(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "resnet50.pth"
    torch.save(state, file)
    return file


def compute_by_hand(state: dict[str, Any], x: Any, last_stride: int) -> Any:
    """The network from its table: 3, 4, 6 and 3 blocks of 1 x 1, 3 x 3 and 1 x 1."""
    f = torch.nn.functional

    def norm(x: Any, name: str) -> Any:
        parts = (state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return f.batch_norm(x, *parts)

    x = f.max_pool2d(f.relu(norm(f.conv2d(x, state["conv1.weight"], stride=2, padding=3), "bn1")), 3, 2, 1)
    for layer, (count, stride) in enumerate(((3, 1), (4, 2), (6, 2), (3, last_stride)), 1):
        for block in range(count):
            name, step = f"layer{layer}.{block}", stride if block == 0 else 1
            out = f.relu(norm(f.conv2d(x, state[f"{name}.conv1.weight"]), f"{name}.bn1"))
            out = f.conv2d(out, state[f"{name}.conv2.weight"], stride=step, padding=1)
            out = norm(f.conv2d(f.relu(norm(out, f"{name}.bn2")), state[f"{name}.conv3.weight"]), f"{name}.bn3")
            if block == 0:
                x = norm(f.conv2d(x, state[f"{name}.downsample.0.weight"], stride=step), f"{name}.downsample.1")
            x = f.relu(x + out)
    return x


def test_it_has_the_parameters_of_the_paper(state: dict[str, Any]) -> None:
    weights = {name: value for name, value in state.items() if "running" not in name and "num_" not in name}
    assert sum(value.numel() for name, value in weights.items() if not name.startswith("fc")) == 23_508_032


@pytest.mark.parametrize("last_stride", [2, 1])
def test_its_maps_are_those_of_the_definition(state: dict[str, Any], path: Path, last_stride: int) -> None:
    extractor = ResNet50(path, last_stride=last_stride, side=SIDE)
    x = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        maps, expected = extractor._module(x), compute_by_hand(state, x, last_stride)
    assert maps.shape == (2, 2048, 4 // last_stride, 4 // last_stride)
    np.testing.assert_allclose(maps.numpy(), expected.numpy(), rtol=2e-4, atol=2e-4 * float(expected.max()))
    images = [np.random.default_rng(i).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for i in range(2)]
    rows = extractor.extract(images)
    assert rows.shape == (2, 2048)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)


def test_other_weights_and_strides_are_other_extractors(path: Path, tmp_path: Path) -> None:
    first, second = ResNet50(path, side=SIDE), ResNet50(path, last_stride=1, side=SIDE)
    assert first.fingerprint != second.fingerprint
    assert first.fingerprint == ResNet50(path, side=SIDE).fingerprint


def test_it_carries_a_head_of_cgd(path: Path) -> None:
    backbone = ResNet50(path, last_stride=1, side=32)
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(8)]
    model = train_head(
        images, np.repeat([0, 1], 4), backbone=backbone, descriptors="SG", dimension=8, epochs=1, random_state=0
    )
    assert model.extract(images).shape == (8, 8)


def test_other_files_are_refused(path: Path, state: dict[str, Any], tmp_path: Path) -> None:
    short, text = tmp_path / "short.pth", tmp_path / "text.pth"
    torch.save({name: value for name, value in state.items() if name != "conv1.weight"}, short)
    text.write_text("no weights")
    whole = tmp_path / "module.pth"
    torch.save(torch.nn.Linear(2, 2), whole)  # a pickle with code
    for file in (short, text, whole):
        with pytest.raises(ValueError, match="weights: not a state dict of ResNet-50"):
            ResNet50(file, side=SIDE)
    with pytest.raises(FileNotFoundError):
        ResNet50(tmp_path / "nothing.pth")
    with pytest.raises(ValueError, match="last_stride"):
        ResNet50(path, last_stride=3)
    with pytest.raises(ValueError, match="weights of ResNet-50"):
        make_extractor(str(tmp_path / "nothing.pth"))
