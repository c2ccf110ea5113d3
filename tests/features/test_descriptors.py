import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from nearveil.features.training import (  # noqa: E402
    check_descriptors,
    compute_classification_loss,
    compute_triplet_loss,
    divide_dimension,
    make_descriptor_head,
    pool_maps,
)

COMBINATIONS = ["".join(letters) for count in (1, 2, 3) for letters in permutations("SMG", count)]


def _maps(seed: int, shape: tuple[int, ...] = (3, 4, 2, 3), dtype: Any = torch.float64) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).uniform(0.1, 6, shape)).to(dtype)


def _head(channels: int, descriptors: str, dimension: int, seed: int = 0) -> Any:
    head = make_descriptor_head(channels, descriptors, dimension)
    head.start([torch.zeros(channels)] * len(descriptors), torch.Generator().manual_seed(seed))
    return head


def test_pools_are_the_plain_formulas() -> None:
    maps = _maps(0)
    for image in range(3):
        for channel in range(4):
            values = maps[image, channel].flatten().tolist()
            assert pool_maps("S", maps)[image, channel].item() == pytest.approx(sum(values) / 6)
            assert pool_maps("M", maps)[image, channel].item() == max(values)
            for p in (0.5, 2.0, 3.7):
                mean = (sum(value**p for value in values) / 6) ** (1 / p)
                assert pool_maps("G", maps, p)[image, channel].item() == pytest.approx(mean)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.floats(0.2, 30), st.floats(0.2, 30))
def test_generalised_mean_lies_between_spoc_and_mac_and_grows_with_p(seed: int, one: float, other: float) -> None:
    maps = _maps(seed)
    assert torch.allclose(pool_maps("G", maps, 1.0), pool_maps("S", maps))
    low, high = sorted((one, other))
    assert (pool_maps("G", maps, low) <= pool_maps("G", maps, high) * (1 + 1e-9)).all()
    # The mean of n values to the p is at least the largest by n^(1/p).
    assert (pool_maps("G", maps, 1000.0) >= pool_maps("M", maps) * 6 ** (-1 / 1000) * (1 - 1e-9)).all()
    assert (pool_maps("G", maps, 1000.0) <= pool_maps("M", maps) * (1 + 1e-9)).all()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_powers_neither_overflow_nor_vanish(scale: float) -> None:
    maps = _maps(1, dtype=torch.float32) * scale
    maps.requires_grad_(True)
    p = torch.tensor(40.0, requires_grad=True)
    pool_maps("G", maps, p).sum().backward()
    assert torch.isfinite(pool_maps("G", maps, p)).all()
    assert torch.isfinite(maps.grad).all()
    assert torch.isfinite(p.grad)


def test_gradient_of_the_generalised_mean() -> None:
    maps = _maps(2).requires_grad_(True)
    p = torch.tensor(2.6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *inputs: pool_maps("G", *inputs), (maps, p))


@pytest.mark.parametrize("letters", COMBINATIONS)
def test_gradient_of_every_head(letters: str) -> None:
    head = _head(4, letters, 6).double()
    weights = torch.arange(6, dtype=torch.float64)  # the sum of squares of a row is one, and tells nothing

    def value(maps: Any, *parameters: Any) -> Any:
        named = dict(zip(dict(head.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(head, named, (maps,)) @ weights

    parameters = [parameter.detach().clone().requires_grad_(True) for parameter in head.parameters()]
    assert torch.autograd.gradcheck(value, (_maps(3).requires_grad_(True), *parameters))


@pytest.mark.parametrize("letters", COMBINATIONS)
def test_a_head_is_its_branches_side_by_side(letters: str) -> None:
    maps = _maps(4, (5, 8, 3, 3), torch.float32)
    head = _head(8, letters, 7)
    pools = {"S": pool_maps("S", maps), "M": pool_maps("M", maps), "G": pool_maps("G", maps, 3.0)}
    parts = []
    for layer, letter in zip(head.reductions, letters, strict=True):
        rows = pools[letter].numpy() @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
        parts.append(rows / np.linalg.norm(rows, axis=1, keepdims=True))
    expected = np.concatenate(parts, axis=1) / math.sqrt(len(letters))
    assert head(maps).detach().numpy() == pytest.approx(expected, abs=1e-5)
    assert [part.shape[1] for part in head.branches(maps)] == divide_dimension(7, len(letters))


def test_a_head_starts_as_a_projection_of_what_is_centred() -> None:
    maps = _maps(5, (40, 6, 2, 2), torch.float32)
    head = make_descriptor_head(6, "S", 6)
    mean = pool_maps("S", maps).mean(dim=0)
    head.start([mean], torch.Generator().manual_seed(0))
    centred = (pool_maps("S", maps) - mean).numpy()
    centred /= np.linalg.norm(centred, axis=1, keepdims=True)
    rows = head(maps).detach().numpy()
    assert rows @ rows.T == pytest.approx(centred @ centred.T, abs=1e-5)


def _brute_force(rows: np.ndarray, labels: np.ndarray, margin: float) -> float:
    """Go through all triplets; the hardest of each anchor counts."""
    worst: list[float] = []
    for anchor in range(len(rows)):
        found = [
            margin + np.linalg.norm(rows[anchor] - rows[same]) - np.linalg.norm(rows[anchor] - rows[other])
            for same in range(len(rows))
            for other in range(len(rows))
            if labels[same] == labels[anchor] != labels[other]
        ]
        worst.append(max(0.0, *map(float, found)))
    return float(np.mean(worst))


def test_triplets_of_a_case_done_by_hand() -> None:
    rows = torch.tensor([[0.0], [3.0], [4.0], [10.0]])
    labels = torch.tensor([0, 0, 1, 1])
    # Farthest of its own, nearest other: (3, 4), (3, 1), (6, 1), (6, 7); margin 0.1.
    assert compute_triplet_loss(rows, labels).item() == pytest.approx((0 + 2.1 + 5.1 + 0) / 4)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.sampled_from([0.0, 0.1, 1.0]))
def test_triplet_loss_is_that_of_brute_force(seed: int, classes: int, margin: float) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((9, 3))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, 9 - classes)])
    loss = compute_triplet_loss(torch.from_numpy(rows), torch.from_numpy(labels), margin)
    assert loss.item() == pytest.approx(_brute_force(rows, labels, margin), abs=1e-12)


def test_gradient_of_the_triplet_loss() -> None:
    rows = torch.from_numpy(np.random.default_rng(6).standard_normal((8, 3))).requires_grad_(True)
    labels = torch.arange(8) // 2
    assert torch.autograd.gradcheck(lambda found: compute_triplet_loss(found, labels), (rows,))


def test_equal_rows_have_a_gradient() -> None:
    rows = torch.ones(4, 2, requires_grad=True)
    loss = compute_triplet_loss(rows, torch.tensor([0, 0, 1, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(0.1)
    assert torch.isfinite(rows.grad).all()


def test_classification_loss_is_the_plain_formula() -> None:
    scores = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]])
    labels = [2, 0]
    log_softmax = scores / 0.5 - np.log(np.exp(scores / 0.5).sum(axis=1, keepdims=True))
    target = np.full((2, 3), 0.1 / 3)
    target[[0, 1], labels] += 0.9
    expected = -(target * log_softmax).sum(axis=1).mean()
    assert compute_classification_loss(torch.from_numpy(scores), torch.tensor(labels)).item() == pytest.approx(expected)


@pytest.mark.parametrize("letters", ["", "X", "SS", "sg", "SGS", None, 3])
def test_letters_that_are_no_combination(letters: Any) -> None:
    with pytest.raises(ValueError, match="descriptors must be some of the letters"):
        check_descriptors(letters)


@pytest.mark.parametrize("dimension", [0, 1, -5, 65_537, 2.5, True])
def test_dimensions_that_cannot_be(dimension: Any) -> None:
    with pytest.raises(ValueError, match="dimension must be an integer"):
        make_descriptor_head(4, "SG", dimension)
