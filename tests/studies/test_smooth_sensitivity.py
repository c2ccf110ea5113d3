"""Smooth sensitivity cannot help one target: the theorem's two parts, on numbers."""

import math
from pathlib import Path

import numpy as np
import pytest

from studies import smooth_sensitivity as smooth
from studies._quick import shrink
from studies._report import write
from studies._study import as_frame, run, select
from studies.data_dependent import compute_smooth_price


@pytest.mark.parametrize("order", [2.0, 3.0, 18.0, 200.0])
def test_a_smooth_guarantee_is_never_cheaper_than_plain_noise(order: float) -> None:
    for beta in np.geomspace(1e-4, -0.4999 * math.log1p(-1 / order), 20):
        scale = 5.0
        price = compute_smooth_price(order, float(beta), np.array([scale]))[0]
        least = math.exp(-beta) * scale
        assert price >= order / (2 * least**2) * (1 - 1e-12)


def test_below_order_two_it_could_be_cheaper() -> None:
    price = compute_smooth_price(1.25, 0.5, np.array([0.5]))[0]
    assert price < 1.25 / (2 * (math.exp(-0.5) * 0.5) ** 2)


def test_every_target_has_half_of_the_largest_local_sensitivity() -> None:
    local, proved = smooth.find_local_sensitivities(1.0)
    assert local.max() / 2 <= local.min() * (1 + 1e-12)
    assert local.max() <= proved


def test_the_search_finds_the_farthest_target() -> None:
    anchors, _ = smooth.load_rows()
    start = np.random.default_rng(1).normal(size=(len(anchors), 2))
    direction = np.array([0.6, 0.8])
    best = smooth.place(smooth._climb(direction, anchors, start, 1.0), anchors, start, 1.0) @ direction
    others = np.random.default_rng(0).normal(size=(5000, anchors.shape[1]))
    others /= np.linalg.norm(others, axis=1, keepdims=True)
    assert best[0] >= (smooth.place(others, anchors, start, 1.0) @ direction).max()


def test_the_study_in_miniature(tmp_path: Path, quick_figures: None) -> None:
    with shrink(smooth.STUDY) as small:
        measured = run(small, tmp_path)
        page = write(small, measured, tmp_path).read_text()
    scales = select(as_frame(measured.rows), part="noise").pivot(index="epsilon", columns="way", values="scale")
    assert (scales[smooth.LEAST] >= scales[smooth.RENYI] * (1 - 1e-3)).all()
    assert (scales[smooth.RENYI] > scales[smooth.ANALYTIC]).all()
    assert "no smoothing at all" in page
