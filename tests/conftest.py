from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from studies.data import DataMissingError, FeatureSet, load_features


@pytest.fixture(params=["numpy", "torch"])
def convert(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Turn a NumPy array into one of the library under test, so that every test runs on both."""
    if request.param == "numpy":
        return np.asarray
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    return lambda array: torch.from_numpy(np.ascontiguousarray(array))


@pytest.fixture
def same_nonces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same nonces for every question: then whatever differs on the wire was not drawn."""
    same = SimpleNamespace(token_hex=lambda count: "5a" * count)
    monkeypatch.setattr("nearveil.ledger.account.secrets", same)


@pytest.fixture(scope="session", autouse=True)
def data_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes into the data folder of whoever runs it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="session")
def birds() -> FeatureSet:
    try:
        return load_features("cub200_cropped_lite0")
    except DataMissingError as missing:
        pytest.skip(str(missing))
