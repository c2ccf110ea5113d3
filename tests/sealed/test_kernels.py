"""Every kernel gives the same numbers as Python's own, modulo 2^24."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.sealed.kernels import CompiledKernel, Kernel, TorchKernel


def reference(database: np.ndarray, questions: np.ndarray) -> np.ndarray:
    """Multiply in Python's whole numbers."""
    product = np.einsum("brc,qbc->qbr", database.astype(object), questions.astype(object))
    return np.asarray(product % (1 << 24), dtype=np.uint32)


def make_kernel(name: str, database: np.ndarray) -> Kernel:
    if name == "torch":
        pytest.importorskip("torch")
        return TorchKernel(database, "cpu")
    return CompiledKernel(database, int(name))


KERNELS = pytest.mark.parametrize("name", ["1", "3", "torch"])  # threads of the compiled one


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 19), st.integers(1, 140)),
    count=st.integers(1, 6),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=40, deadline=None)
def test_products_of_any_shape_are_exact(shape: tuple[int, int, int], count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    database = rng.integers(-128, 128, shape).astype(np.int8)
    questions = rng.integers(0, 1 << 24, (count, shape[0], shape[2])).astype(np.uint32)
    expected = reference(database, questions)
    np.testing.assert_array_equal(CompiledKernel(database).multiply(questions), expected)


@KERNELS
def test_the_largest_products_are_exact(name: str) -> None:
    database = np.full((1, 17, 1 << 16), -128, np.int8)
    questions = np.full((2, 1, 1 << 16), 1 << 23, np.uint32)
    questions[1] = (1 << 24) - 1
    found = make_kernel(name, database).multiply(questions)
    np.testing.assert_array_equal(found[0], (-128 * (1 << 16) * (1 << 23)) % (1 << 24))
    np.testing.assert_array_equal(found[1], (-128 * (1 << 16) * ((1 << 24) - 1)) % (1 << 24))


@KERNELS
@pytest.mark.parametrize("count", [1, 3, 8])
def test_kernels_agree_on_a_database_of_several_colours(name: str, count: int) -> None:
    rng = np.random.default_rng(count)
    database = rng.integers(-128, 128, (3, 45, 136)).astype(np.int8)
    questions = rng.integers(0, 1 << 24, (count, 3, 136)).astype(np.uint32)
    np.testing.assert_array_equal(make_kernel(name, database).multiply(questions), reference(database, questions))


def test_a_read_only_database_is_multiplied() -> None:
    database = np.ones((1, 20, 16), np.int8)
    database.setflags(write=False)
    questions = np.ones((1, 1, 16), np.uint32)
    np.testing.assert_array_equal(CompiledKernel(database).multiply(questions), reference(database, questions))
