"""The label graph against dense references."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.privatemail.graph import label_graph, labels
from tests.reference import dense_label_weights, laplacian, unit_rows

Convert = Callable[[Any], Any]


@pytest.mark.parametrize("encoding", ["integer", "one-hot"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_it_equals_dense(convert: Convert, encoding: Any, dtype: type) -> None:
    y = np.random.default_rng(0).integers(-1, 7, size=90)
    Z = unit_rows(90, 3, seed=1).astype(dtype)
    weights = dense_label_weights(y, 2.5, encoding)
    graph = label_graph(convert(y), 2.5, encoding)
    rounding = 1e-12 if dtype == np.float64 else 1e-4
    np.testing.assert_allclose(graph.degree, weights.sum(axis=1), atol=1e-12)
    np.testing.assert_allclose(graph.matmul(convert(Z)), weights @ Z, atol=rounding)
    np.testing.assert_allclose(graph.laplacian_matmul(convert(Z)), laplacian(weights) @ Z, atol=rounding)
    assert np.asarray(graph.matmul(convert(Z))).dtype == dtype
    assert graph.error_bound == 0


@settings(deadline=None, max_examples=80)
@given(
    y=st.lists(st.integers(-1, 40), min_size=1, max_size=40),
    bandwidth=st.floats(0.05, 50),
    encoding=st.sampled_from(["integer", "one-hot"]),
)
def test_every_weight_is_exact(y: list[int], bandwidth: float, encoding: Any) -> None:
    graph = label_graph(y, bandwidth, encoding)
    np.testing.assert_allclose(
        graph.matmul(np.eye(len(y))), dense_label_weights(y, bandwidth, encoding), rtol=1e-12, atol=1e-13
    )


def test_labels_of_numpy_serve_values_of_torch(convert: Convert) -> None:
    y = [0, 1, 1, -1]
    Z = unit_rows(4, 2)
    np.testing.assert_allclose(label_graph(y).matmul(convert(Z)), dense_label_weights(y, 1.0) @ Z, atol=1e-15)


def test_many_classes_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    y, Z = np.arange(30), unit_rows(30, 2)
    whole = label_graph(y, 3.0).matmul(Z)
    monkeypatch.setattr(labels, "_KERNEL_BLOCK", 7)
    np.testing.assert_allclose(label_graph(y, 3.0).matmul(Z), whole, rtol=1e-13)


def test_names_are_classes() -> None:
    graph = label_graph(["wren", "crow", "wren"], 1.0, "one-hot")
    assert list(graph.classes) == ["crow", "wren"]
    np.testing.assert_allclose(graph.degree, [1 + np.exp(-1), 2 * np.exp(-1), 1 + np.exp(-1)])


@pytest.mark.parametrize("encoding", ["integer", "one-hot"])
def test_small_weights_between_classes_are_not_lost(encoding: Any) -> None:
    """Subtracting a self-term of 1 would leave nothing of a degree of 1e-17."""
    weights = dense_label_weights(np.arange(6), 0.16, encoding)
    assert weights.max() < 1e-8
    np.testing.assert_allclose(label_graph(np.arange(6), 0.16, encoding).degree, weights.sum(axis=1), rtol=1e-12)


def test_large_labels_keep_their_differences() -> None:
    small, large = label_graph([0, 1, 3], 0.7), label_graph([10**15, 10**15 + 1, 10**15 + 3], 0.7)
    np.testing.assert_array_equal(large.degree, small.degree)


def test_whole_numbers_are_multiplied_as_such(convert: Convert) -> None:
    expected = dense_label_weights([0, 0, 1], 1.0) @ np.array([[1.0], [2.0], [3.0]])
    np.testing.assert_allclose(label_graph([0, 0, 1]).matmul(convert(np.array([[1], [2], [3]]))), expected)


def test_a_large_class_is_summed_in_double(convert: Convert) -> None:
    n = 1_000_000
    ones = convert(np.full((n, 1), 0.1, dtype=np.float32))
    np.testing.assert_allclose(
        label_graph(np.zeros(n, dtype=int)).matmul(ones)[:3], (n - 1) * np.float32(0.1), rtol=2e-7
    )


@pytest.mark.parametrize("y", [["a", "b", -1], ["a", "b", "-1"], np.array(["a", "b", -1], dtype=object)])
def test_minus_one_among_names_is_no_class(y: Any) -> None:
    graph = label_graph(y, 1.0, "one-hot")
    assert list(graph.classes) == ["a", "b"]
    assert graph.degree[2] == 0


def test_no_columns_give_no_columns(convert: Convert) -> None:
    for operation in (label_graph([0, 1]).matmul, label_graph([0, 1]).laplacian_matmul):
        assert tuple(operation(convert(np.ones((2, 0)))).shape) == (2, 0)


def test_without_any_label_there_are_no_edges() -> None:
    graph = label_graph([-1, -1, -1])
    assert np.all(graph.degree == 0)
    assert np.all(graph.laplacian_matmul(np.ones((3, 2))) == 0)


@pytest.mark.parametrize(
    ("y", "parameters", "message"),
    [
        ([0, 1, -2], {}, "labels from 0 upwards, or -1"),
        ([0.5, 1.0], {}, "holds fractions, NaN"),
        ([0.0, np.nan], {}, "or -1 for a row without label: it holds fractions, NaN"),
        ([0.0, np.inf], {}, "or -1 for a row without label: it holds fractions, NaN"),
        ([[0, 1]], {}, "y must be a 1-D array"),
        ([], {}, "y must be a 1-D array"),
        (["a", "b"], {}, 'use encoding="one-hot" for names'),
        ([1j, 2j], {}, "Unknown label type"),
        (np.array([0, 2**64 - 1], dtype=np.uint64), {}, "whole numbers up to 9007199254740992"),
        ([1e300, 2e300], {}, "whole numbers up to 9007199254740992"),
        ([0, 1], {"bandwidth": 1e-200}, "bandwidth must be from 1e-100"),
        ([0, 1], {"bandwidth": 0.0}, "bandwidth must be from 1e-100"),
        ([0, 1], {"encoding": "two-hot"}, 'encoding must be "integer" or "one-hot"'),
    ],
)
def test_bad_input_is_named(y: Any, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        label_graph(y, **parameters)


@pytest.mark.parametrize("Z", [np.ones((2, 1)), np.ones(3), np.array([[1.0], [np.nan], [1.0]])])
def test_bad_columns_are_named(Z: Any) -> None:
    graph = label_graph([0, 1, 2])
    for operation in (graph.matmul, graph.laplacian_matmul):
        with pytest.raises(ValueError, match=r"Z must have shape|Z holds NaN"):
            operation(Z)
