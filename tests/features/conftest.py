from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nearveil.features import EfficientNetLite0, Extractor
from nearveil.features.backbones import MobileNetV2


def _built(kind: Any) -> Extractor:
    try:
        found: Extractor = kind()
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    return found


@pytest.fixture(scope="package", autouse=True)
def use_one_thread() -> Iterator[None]:
    """Many small networks: threads that wait for each other take longer than one alone, above all beside others."""
    try:
        import torch
    except ModuleNotFoundError:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def lite0() -> Extractor:
    return _built(EfficientNetLite0)


@pytest.fixture(scope="session")
def mobilenet() -> Extractor:
    return _built(MobileNetV2)


@pytest.fixture(scope="session")
def small_photos() -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """CIFAR-100 with features of EfficientNet-Lite0 that another implementation computed."""
    from studies.data import DataMissingError, find

    try:
        path = find("cifar100_partial/cifar100_partial.npz")
    except DataMissingError as missing:
        pytest.skip(str(missing))
    with np.load(path) as arrays:
        return arrays["images"], arrays["features"].astype(np.float32)
