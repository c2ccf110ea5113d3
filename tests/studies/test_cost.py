"""The study of cost in miniature; that contenders compute the same; that a process's memory is its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from studies import _cost_graph as graph
from studies import _cost_release as release
from studies import _cost_votes as votes
from studies import cost
from studies._report import write
from studies._study import run
from studies._timing import measure_peak_gib, run_in_new_process, time_repeatedly

pytestmark = pytest.mark.usefixtures("quick_figures")


def embedded(X: Any, Z: Any, labels: Any) -> Any:
    """The steps in plain matrices, from their definition."""
    W = np.exp(-cdist(X, X, "sqeuclidean") / (2 * graph.BANDWIDTH**2))
    V = np.exp(-((labels[:, None] - labels) ** 2) / (2 * graph.BANDWIDTH**2))
    np.fill_diagonal(W, 0)
    np.fill_diagonal(V, 0)
    L_X, L_Y = np.diag(W.sum(axis=1)) - W, np.diag(V.sum(axis=1)) - V
    for _ in range(graph.STEPS):
        Z = Z + np.diag(1 / np.diag(L_X)) @ (graph.LABEL_WEIGHT * L_Y - L_X) @ Z / 2
        Z = Z * np.sqrt(len(Z)) / np.linalg.norm(Z)
    return Z


@pytest.mark.parametrize("index", range(len(graph.CPU)))
def test_every_contender_embeds_alike(index: int) -> None:
    contender = graph.CPU[index]
    needed = {"pyKeOps": "pykeops", "fused attention, torch": "torch", "exact (ours, torch tensors)": "torch"}
    if contender.name in needed:
        pytest.importorskip(needed[contender.name], reason="a rival that is not installed")
    if contender.name == "pyKeOps":
        pytest.skip("pyKeOps compiles for a minute")
    X, Z = graph.draw_in_dtype(300, contender.dtype)
    labels = np.random.default_rng(1).integers(0, graph.CLASSES, 300)
    expected = embedded(X.astype(float), Z.astype(float), labels.astype(float))
    found = graph.embed(contender.prepare, X, Z, labels)
    far = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    if contender.name.startswith("15 nearest"):
        assert far > 0.01  # another graph
    else:
        assert far < 1e-3
        np.testing.assert_allclose(
            contender.step(X, Z), graph.use_dense(X.astype(float))(Z.astype(float))[0], rtol=2e-3, atol=2e-3
        )


def test_voters_are_the_nearest() -> None:
    rng = np.random.default_rng(0)
    rows, queries = rng.random((400, 16), dtype=np.float32), rng.random((5, 16), dtype=np.float32)
    unit, asked = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (rows, queries))
    nearest = np.argsort(cdist(asked, unit), axis=1)[:, :7]
    (found,) = votes.use_listed("numpy", 7)(rows)(queries)
    assert np.mean([len(set(a) & set(b)) for a, b in zip(found, nearest, strict=True)]) > 6.5  # up to their rounding
    loop = votes.use_published("float32")(rows)(queries)
    assert [len(voters) for voters in loop] == [60] * 5  # all of a sample of 15%


def test_the_study_in_miniature(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cost, "SIZES", (200,))
    kept = [("pyKeOps", "float32"), ("exact (ours, NumPy)", "float32"), (cost.DENSE, "float64")]
    monkeypatch.setattr(cost, "LARGEST", {one: cost.LARGEST[one] for one in kept})
    monkeypatch.setattr(cost, "PRIVATE", (500,))
    monkeypatch.setattr(cost, "VOTERS", dict.fromkeys(cost.VOTERS, 8))
    monkeypatch.setattr(release, "DIMENSION", 16)
    monkeypatch.setattr(release, "PUBLIC", 40)
    few = {
        name: make for name, make in release.list_releases().items() if name in ("analytic Gaussian", "k-means cells")
    }
    monkeypatch.setattr(release, "list_releases", lambda: few)
    rng = np.random.default_rng(0)
    monkeypatch.setattr(votes, "load_rows", lambda: (rng.random((520, 324), dtype=np.float32), "random rows"))
    cost._load_rows.cache_clear()

    def without_keops(function: str, **arguments: Any) -> Any:  # in this process, which is quicker
        if arguments["name"] == "pyKeOps":
            raise RuntimeError("ModuleNotFoundError: No module named 'pykeops'")
        assert function == "studies._cost_graph:measure_embedding"
        return graph.measure_embedding(**arguments)

    monkeypatch.setattr(cost, "run_in_new_process", without_keops)
    # A few private rows are too few for the list that 300 voters out of a sample of 15% need: coins pass its end.
    monkeypatch.setattr(votes, "K", 30)
    found = run(cost.STUDY, tmp_path)
    page = write(cost.STUDY, found, tmp_path).read_text()
    assert "pyKeOps is left out: ModuleNotFoundError: No module named 'pykeops'." in page
    measured = [row for row in found.rows if "left_out" not in row]
    assert len(measured) == cost.REPEATS * (2 + 3 + len(cost.VOTERS))
    assert (
        f"before a measurement was {np.sort([row['load'] for row in found.rows])[len(found.rows) // 2]:.1f} on " in page
    )
    for row in measured:
        figures = [row[name] for name in ("seconds", "peak_gib", "single", "batched", "per_second") if name in row]
        assert figures
        assert min(figures) > 0
    cost._load_rows.cache_clear()


def test_a_new_process_has_its_own_memory_and_says_why_it_failed() -> None:
    held = np.ones(60_000_000)
    assert measure_peak_gib() > 0.44
    assert run_in_new_process("studies._timing:measure_peak_gib") < 0.4
    assert held[0] == 1
    with pytest.raises(RuntimeError, match="ModuleNotFoundError: No module named 'nowhere'"):
        run_in_new_process("nowhere:nothing")


def test_work_is_repeated_as_often_as_asked() -> None:
    done: list[int] = []
    assert len(time_repeatedly(lambda: done.append(1), least=3, most=5, seconds=100)) == len(done) == 5
    assert len(time_repeatedly(lambda: None, least=3, most=5, seconds=0)) == 3
