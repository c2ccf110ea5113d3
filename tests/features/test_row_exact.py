"""Rows of private records: nothing but its own image changes a bit of a row."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
    gallery,
    gallery_features,
    train_head,
)
from nearveil.features.backbones import EXTRACTORS
from nearveil.features.gallery import FeatureCache
from nearveil.features.networks import align, is_stateless
from nearveil.private_knn.neighbors import NeighborSearch
from tests.features.files import picture
from tests.features.test_extractors import _graph

PICTURES = [picture(30 + number, 40, seed=number) for number in range(10)]


def moody() -> Any:
    """Normalises by the batch that it sees, in evaluation mode too; and no two threads sum alike."""
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")

    class Threads(torch.nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: Any) -> Any:
            return x + 1e-3 * torch.get_num_threads()

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8, track_running_stats=False),
        torch.nn.Conv2d(8, 9, 3),
        Threads(),
    )


def plain() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))


def trained() -> Extractor:
    backbone = TorchExtractor(moody(), side=16)
    return train_head(PICTURES[:4], [0, 0, 1, 1], backbone=backbone, dimension=6, epochs=1, random_state=0)


NETWORKS: dict[str, Callable[[Path], Extractor]] = {
    "moody": lambda _: TorchExtractor(moody(), side=16),
    "plain": lambda _: TorchExtractor(plain(), side=16),
    "trained": lambda _: trained(),
    "onnx": lambda folder: OnnxExtractor(_graph(folder / "a.onnx"), side=16),
    "onnx fixed": lambda folder: OnnxExtractor(_graph(folder / "b.onnx", batch=4), side=16),
}


@pytest.fixture(params=[*NETWORKS, "hog", "lite0", "lite0 without onnxruntime"])
def extractor(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extractor:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    if request.param == "hog":
        return HogColor()
    if request.param.endswith("without onnxruntime"):
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        request.getfixturevalue("lite0")  # skips if there is no network
        return EfficientNetLite0()
    found: Extractor = (
        NETWORKS[request.param](tmp_path) if request.param in NETWORKS else request.getfixturevalue(request.param)
    )
    return found


@pytest.fixture
def threads() -> Iterator[Any]:
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def same(first: NDArray[np.float32], second: NDArray[np.float32]) -> bool:
    return first.dtype == second.dtype and first.tobytes() == second.tobytes()


def test_only_what_keeps_every_bit_says_so(extractor: Extractor) -> None:
    assert extractor.row_exact == isinstance(extractor, HogColor)


def test_removing_a_record_changes_the_others_in_a_batch() -> None:
    """The exploit: [16, 0] and [14, 2] votes, because rows of others changed."""
    extractor = TorchExtractor(moody(), side=16)
    assert not same(extractor.extract(PICTURES)[1:], extractor.extract(PICTURES[1:]))


def test_removing_records_changes_no_bit_of_the_others(extractor: Extractor, threads: Any) -> None:
    some = PICTURES[:4]
    whole = extractor.extract(some, row_exact=True)
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-6)
    for gone in range(len(some)):
        left = [number for number in range(len(some)) if number != gone]
        threads(1 + gone % 2)
        assert same(extractor.extract([some[number] for number in left], row_exact=True), whole[left])
    threads(2)
    backwards = extractor.extract([*some[:0:-1], PICTURES[9], some[0]], row_exact=True)
    assert same(backwards[[-1, 2, 1, 0]], whole)


def test_exact_rows_are_those_of_queries_up_to_rounding(extractor: Extractor) -> None:
    if extractor.name.startswith("Sequential"):
        pytest.skip("this network means something else by a batch")
    rows = extractor.extract(PICTURES[:3])
    np.testing.assert_allclose(extractor.extract(PICTURES[:3], row_exact=True), rows, rtol=0, atol=1e-6)


_ELSEWHERE = """
import sys, numpy as np, torch
from pathlib import Path
from nearveil.features.backbones import EXTRACTORS
from tests.features.test_row_exact import NETWORKS, PICTURES
assert torch.get_num_threads() == 2
for name in sys.argv[2:]:
    made = NETWORKS[name](Path(sys.argv[1])) if name in NETWORKS else EXTRACTORS[name]()
    print(made.extract(PICTURES[3:1:-1], row_exact=True).tobytes().hex())
"""


def test_another_process_with_more_threads_and_fewer_records_gives_the_same_bits(
    tmp_path: Path, lite0: Extractor
) -> None:
    names = ["moody", "plain", "onnx", "efficientnet-lite0"]
    root = Path(__file__).parents[2]
    # A cluster that was started by this process has left its own number of threads in the environment.
    threads = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    environment = os.environ | threads | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    told = subprocess.run(  # noqa: S603
        [sys.executable, "-c", _ELSEWHERE, str(tmp_path), *names],
        env=environment, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    for name, line in zip(names, told.stdout.split(), strict=True):
        made = NETWORKS[name](tmp_path) if name in NETWORKS else lite0
        assert made.extract(PICTURES[:4], row_exact=True)[3:1:-1].tobytes().hex() == line, name


def test_threads_are_restored(threads: Any) -> None:
    import torch

    threads(2)
    TorchExtractor(plain(), side=16).extract(PICTURES[:1], row_exact=True)
    assert torch.get_num_threads() == 2

    class Broken(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            if len(x) == 1:
                raise RuntimeError("broken")
            return x

    with pytest.raises(RuntimeError, match="broken"):
        TorchExtractor(Broken(), side=16).extract(PICTURES[:1], row_exact=True)
    assert torch.get_num_threads() == 2


def test_threads_are_restored_after_the_last_of_several(threads: Any) -> None:
    import torch

    threads(2)
    extractor = TorchExtractor(plain(), side=16)
    counts: list[int] = []

    def tick(_: int) -> None:
        if not counts:
            counts.append(torch.get_num_threads())
            other = threading.Thread(target=lambda: extractor.extract(PICTURES[:3], tick=lambda _: None))
            other.start()
            other.join()

    wanted = extractor.extract(PICTURES)
    assert same(extractor.extract(PICTURES, tick=tick), wanted)
    fresh: list[int] = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [*counts, torch.get_num_threads(), *fresh] == [2, 2, 2]


def test_a_network_with_state_is_not_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook keeps a map until the module returns it: another thread would replace it."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    maps: dict[str, Any] = {}

    def keep(module: Any, inputs: Any, output: Any) -> None:
        del module, inputs
        maps["last"] = output
        time.sleep(0.002)

    class Hooked(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Conv2d(3, 8, 3)
            self.inner.register_forward_hook(keep)

        def forward(self, x: Any) -> Any:
            self.inner(x)
            return maps["last"]

    extractor = TorchExtractor(Hooked(), side=8, batch=1)
    alone = np.vstack([extractor.extract([image]) for image in PICTURES])
    assert same(extractor.extract(PICTURES), alone)
    assert same(extractor.extract(PICTURES, row_exact=True), alone)


def test_an_interrupted_run_computes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C need not wait for thousands of images."""
    calls: list[int] = []

    class Slow(Extractor):
        _parallel = True

        def __init__(self) -> None:
            super().__init__(name="slow", identity={}, dimension=3, side=4, batch=1)

        def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
            calls.append(len(images))
            time.sleep(0.005)
            return np.asarray(images.mean(axis=(1, 2)) + 1.0)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with pytest.raises(KeyboardInterrupt):
        Slow().extract(PICTURES * 20, tick=interrupt)
    assert len(calls) < 100


def test_modules_with_state_are_recognised() -> None:
    modules = [plain() for _ in range(4)]
    modules[1][1].register_forward_hook(lambda *_: None)
    modules[2][1].register_forward_pre_hook(lambda *_: None)
    modules[3][1].forward = lambda x: x[:, :64]
    assert [is_stateless(module) for module in modules] == [True, False, False, False]
    assert not is_stateless(moody())


_WORKER = """
import pickle, sys
from pathlib import Path
from tests.features.test_row_exact import PICTURES
for extractor in pickle.loads(Path(sys.argv[1]).read_bytes()):
    print(extractor.extract(PICTURES[:2]).tobytes().hex())
"""


def test_an_extractor_in_use_can_be_sent_to_a_worker(tmp_path: Path, lite0: Extractor) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    extractors = [NETWORKS["plain"](tmp_path), NETWORKS["onnx"](tmp_path), lite0]
    rows = [extractor.extract(PICTURES[:2]).tobytes().hex() for extractor in extractors]
    (tmp_path / "extractors").write_bytes(cloudpickle.dumps(extractors))
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", _WORKER, str(tmp_path / "extractors")],
        env=environment, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split() == rows


def test_onnx_computes_on_one_thread_from_aligned_memory(tmp_path: Path) -> None:
    extractor = OnnxExtractor(_graph(tmp_path / "a.onnx"), side=16)
    told = extractor._session.get_session_options()
    assert (told.intra_op_num_threads, told.inter_op_num_threads) == (1, 1)
    for shift in range(16):
        room = np.arange(shift + 12, dtype=np.float32)[shift:].reshape(1, 3, 2, 2)
        copied = align(room.transpose(0, 2, 3, 1))
        assert copied.ctypes.data % 64 == 0
        assert copied.flags.c_contiguous
        np.testing.assert_array_equal(copied, room.transpose(0, 2, 3, 1))


def test_a_network_that_draws_or_remembers_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")

    class Random(torch.nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: Any) -> Any:
            return x + torch.rand(1)

    class Memory(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        def forward(self, x: Any) -> Any:
            self.seen += 1
            return x + self.seen

    for module in (Random(), Memory()):
        extractor = TorchExtractor(module, side=4)
        assert len(extractor.extract(PICTURES[:2])) == 2
        with pytest.raises(ValueError, match="gives one image different rows"):
            extractor.extract(PICTURES[:2], row_exact=True)


def test_an_extractor_without_an_exact_way_refuses() -> None:
    class Mine(Extractor):
        def __init__(self) -> None:
            super().__init__(name="mine", identity={}, dimension=3, side=4)

        def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
            return np.asarray(images.mean(axis=(1, 2)) + 1.0)

    assert len(Mine().extract(PICTURES[:2])) == 2
    with pytest.raises(ValueError, match="no row-exact way"):
        Mine().extract(PICTURES[:2], row_exact=True)


def test_every_extractor_that_comes_with_nearveil_has_an_exact_way() -> None:
    for name, make in EXTRACTORS.items():
        try:
            made = make()
        except ModuleNotFoundError:
            continue
        assert made.row_exact or type(made)._exact_row is not Extractor._exact_row, name


# -- galleries and their cache --------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    from PIL import Image

    found = []
    for number, image in enumerate(PICTURES):
        found.append(tmp_path / f"{number}.png")
        Image.fromarray(image).save(found[-1])
    return found


def test_the_cache_keeps_exact_and_batched_rows_apart(files: list[Path], tmp_path: Path) -> None:
    extractor, cache = TorchExtractor(moody(), side=16), FeatureCache(tmp_path / "cache")
    batched = gallery_features(files, extractor, cache=cache)
    exact = gallery_features(files, extractor, row_exact=True, cache=cache)
    assert (batched.row_exact, exact.row_exact) == (False, True)
    assert same(exact.features, extractor.extract(PICTURES, row_exact=True))
    assert not same(exact.features, batched.features)
    for row_exact, first in ((False, batched), (True, exact)):
        again = gallery_features(files, extractor, row_exact=row_exact, cache=cache)
        assert same(again.features, first.features)
    assert gallery_features(files[:1], HogColor()).row_exact


def test_the_cache_forgets_exact_rows_of_other_libraries(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the row of a copy would tell whether its original was there before the libraries changed."""
    extractor, cache = TorchExtractor(plain(), side=16), FeatureCache(tmp_path / "cache")
    gallery_features(files[:1], extractor, row_exact=True, cache=cache)
    seen: list[int] = []
    exact_row = TorchExtractor._exact_row
    monkeypatch.setattr(TorchExtractor, "_exact_row", lambda *a: seen.append(1) or exact_row(*a))  # type: ignore[func-returns-value]
    gallery_features(files[:1], extractor, row_exact=True, cache=cache)
    assert not seen
    monkeypatch.setattr(gallery, "_describe_machinery", lambda: "another torch")
    gallery_features(files[:1], extractor, row_exact=True, cache=cache)
    assert seen


# -- votes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_exact", [False, True])
def test_one_record_changes_votes_by_what_is_charged(*, row_exact: bool) -> None:
    extractor = TorchExtractor(moody(), side=16, batch=2)
    records = [picture(20, 20, seed=100 + number) for number in range(24)]
    labels = np.random.default_rng(0).integers(0, 2, 24)
    queries = extractor.extract(PICTURES, row_exact=True)

    def votes(kept: NDArray[np.int64]) -> NDArray[np.int64]:
        rows = extractor.extract([records[number] for number in kept], row_exact=row_exact)
        nearest = NeighborSearch(rows, engine="numpy").nearest(queries, 8)
        return np.stack([np.bincount(labels[kept][one], minlength=2) for one in nearest])

    everybody = np.arange(24)
    changes = [votes(everybody) - votes(np.delete(everybody, gone)) for gone in range(0, 24, 3)]
    squared = int((np.stack(changes) ** 2).sum(axis=2).max())
    assert (squared <= 2) == row_exact, squared
