import numpy as np
import pytest
from numpy.typing import NDArray

from nearveil.features import EfficientNetLite0
from nearveil.features.backbones import MobileNetV2
from studies import alignment
from studies.alignment import fit_bridge
from studies.bridge import compare, extract_features
from studies.data import DataMissingError


def _unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    scaled: NDArray[np.float64] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return scaled


def _two_models(n: int, *, noise: float = 0.0, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two views of the same hidden things, of 20 and 30 dimensions, both far from centred."""
    rng = np.random.default_rng(1)
    first, second = np.linalg.qr(rng.normal(size=(20, 6)))[0], np.linalg.qr(rng.normal(size=(30, 6)))[0]
    shift, other = rng.normal(size=20) / 4, rng.normal(size=30) / 4
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(n, 6))
    here = hidden @ first.T + shift + noise * rng.normal(size=(n, 20))
    return _unit(here), _unit(hidden @ second.T + other + noise * rng.normal(size=(n, 30)))


def test_neighbours_are_found_across_models() -> None:
    anchors, same = _two_models(300, noise=0.05)
    queries, gallery = _two_models(200, noise=0.05, seed=5)
    carried = fit_bridge(anchors, same).apply(queries)
    np.testing.assert_allclose(np.linalg.norm(carried, axis=1), 1, atol=1e-6)
    assert carried.dtype == np.float32
    mean = same.mean(axis=0)
    nearest = np.argmax(_unit(carried - mean) @ _unit(gallery - mean).T, axis=1)
    assert np.mean(nearest == np.arange(200)) > 0.95
    # Anchors that were mixed up teach nothing: the check above is no accident.
    lost = fit_bridge(anchors, same[np.random.default_rng(0).permutation(300)]).apply(queries)
    assert np.mean(np.argmax(_unit(lost - mean) @ _unit(gallery - mean).T, axis=1) == np.arange(200)) < 0.1


def test_it_undoes_a_turn_exactly() -> None:
    rng = np.random.default_rng(0)
    known = _unit(rng.normal(size=(80, 7)) + 0.5)
    turn = np.linalg.qr(rng.normal(size=(7, 7)))[0]
    for mirrored in (1, -1):
        turn[:, 0] *= mirrored
        bridge = fit_bridge(known[:60], known[:60] @ turn)
        np.testing.assert_allclose(bridge.apply(known[60:]), known[60:] @ turn, atol=1e-6)


def test_the_direction_from_the_mean_is_kept() -> None:
    anchors, same = _two_models(300, noise=0.3)
    bridge = fit_bridge(anchors, same)
    queries = _two_models(50, seed=5)[0]
    ways = (queries - anchors.mean(axis=0)) @ bridge.matrix
    moved = bridge.apply(queries) - same.mean(axis=0)
    assert np.sum(_unit(ways) * _unit(moved), axis=1).min() > 1 - 1e-6


def test_anchors_that_do_not_fill_the_space() -> None:
    here, there = _two_models(12)
    queries = _two_models(5, seed=3)[0]
    np.testing.assert_allclose(np.linalg.norm(fit_bridge(here, there).apply(queries), axis=1), 1, atol=1e-6)
    flat = fit_bridge(here, np.tile(there[:2], (6, 1)))  # two different anchors leave one direction
    assert np.linalg.matrix_rank(flat.matrix) == 1


def test_bad_anchors_are_refused() -> None:
    here, there = _two_models(30)
    for source, target, text in (
        (here, there[:20], "one row for each anchor"),
        (here[:5], there[:5], "at least 8"),
        (here * 2, there, "source must have rows of norm one"),
        (here, np.full_like(there, np.nan), "target must be finite"),
        (here[0], there, "source must have rows and columns"),
    ):
        with pytest.raises(ValueError, match=text):
            fit_bridge(source, target)
    with pytest.raises(ValueError, match="same feature"):
        fit_bridge(here, np.repeat(there[:1], 30, axis=0))
    bridge = fit_bridge(here, there)
    with pytest.raises(ValueError, match="20 columns"):
        bridge.apply(there)
    with pytest.raises(ValueError, match="NaN"):
        bridge.apply(np.full((1, 20), np.inf))


def test_hostile_anchors_silence_nobody() -> None:
    """Anchors whose mean lay outside of the ball: a query across their axis was refused, and the others were not."""
    rng = np.random.default_rng(0)
    here, queries = _unit(rng.normal(size=(400, 8))), _unit(rng.normal(size=(200, 8)))
    centred = here - here.mean(axis=0)
    for norm, spread in ((1.0009, 1e-5), (1.0009, 1e-4), (0.9991, 1e-5)):
        there = norm * np.eye(8)[0] + spread * centred
        bridge = fit_bridge(here, there)
        assert np.linalg.norm(bridge.target_mean) < 1
        with np.errstate(all="raise"):
            carried = bridge.apply(queries)
        np.testing.assert_allclose(np.linalg.norm(carried, axis=1), 1, atol=1e-6)


def test_every_finite_feature_is_carried() -> None:
    bridge = fit_bridge(*_two_models(30))
    mean = bridge.source_mean
    odd = np.array([mean, mean + 1e-160, np.full(20, 1e308), np.zeros(20)])
    with np.errstate(all="raise"):
        carried = bridge.apply(odd)
    np.testing.assert_allclose(np.linalg.norm(carried, axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(carried[0], bridge.apply(mean[None])[0])


def test_two_real_networks_meet() -> None:
    pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (the extra `onnx`)")
    try:
        (asking, holding), labels = extract_features([MobileNetV2(), EfficientNetLite0()], most=4)
    except DataMissingError as missing:
        pytest.skip(str(missing))
    assert len(labels) == 80
    found = compare(asking, holding, labels)
    # 40 anchors of other species are few, and yet enough to tell; no alignment is as good as chance.
    assert found["the gallery's network alone"]["agreement"] == 1
    assert found["no alignment"]["recall"] < found["items at random"]["recall"] + 0.1
    assert found["bridge"]["recall"] > found["items at random"]["recall"] + 0.25
    assert found["bridge"]["agreement"] > 3 * found["items at random"]["agreement"]
    assert found["bridge"]["precision"] > 0.7 * found["the client's network alone"]["precision"]


def test_anchors_of_nothing_teach_nothing() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 12)
    centres = rng.normal(size=(20, 40))
    hidden = centres[labels] + 0.3 * rng.normal(size=(240, 40))
    views = [hidden @ np.linalg.qr(rng.normal(size=(40, 40)))[0] for _ in range(2)]
    asking, holding = ((view / np.linalg.norm(view, axis=1, keepdims=True)).astype(np.float32) for view in views)
    found = compare(asking, holding, labels)
    assert found["bridge"]["agreement"] > 0.99
    mixed = compare(asking[rng.permutation(240)], holding, labels)
    assert mixed["bridge"]["agreement"] < 0.1
    assert abs(found["items at random"]["recall"] - (1 - (1 - 11 / 119) ** 8)) < 0.15


def test_a_bridge_carries_rows_one_by_one() -> None:
    rng = np.random.default_rng(0)
    known = rng.normal(size=(80, 40))
    known /= np.linalg.norm(known, axis=1, keepdims=True)
    bridge = fit_bridge(known[:60], known[:60] @ np.linalg.qr(rng.normal(size=(40, 40)))[0])
    whole = bridge.apply(known, row_exact=True)
    np.testing.assert_allclose(whole, bridge.apply(known), rtol=0, atol=1e-6)
    for size in (1, 2, 3, 7, 20, 79):
        assert bridge.apply(known[-size:], row_exact=True).tobytes() == whole[-size:].tobytes()
        ordered = np.asfortranarray(known[:size])
        assert bridge.apply(ordered, row_exact=True).tobytes() == whole[:size].tobytes()


def test_exact_rows_are_carried_by_the_exact_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roundings of a product of matrices show in single precision once in many millions of numbers."""
    rng = np.random.default_rng(0)
    seen: list[NDArray[np.float64]] = []
    known = rng.normal(size=(2, 60, 40))
    known /= np.linalg.norm(known, axis=2, keepdims=True)
    bridge, rows = fit_bridge(*known), known[0, :5]
    product = alignment._multiply_exactly

    def watched(row: NDArray[np.float64], matrix: NDArray[np.float64]) -> NDArray[np.float64]:
        seen.append(row.copy())
        return product(row, matrix)

    monkeypatch.setattr(alignment, "_multiply_exactly", watched)
    bridge.apply(rows, row_exact=True)
    np.testing.assert_array_equal(seen, rows - bridge.source_mean)
