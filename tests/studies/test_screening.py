"""The supplement's figures: known vectors, maxima that are maxima, costs in their order, pictures that say it."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.special import ndtr

from nearveil.privacy.accounting.binary import compute_screening_rdp
from nearveil.privacy.events import NoisyScreening
from studies import screening
from studies._report import write
from studies._study import as_frame, run

pytestmark = pytest.mark.usefixtures("quick_figures")

STREET = NoisyScreening(noise=85.0, threshold=210.0, n_neighbors=300)
SMALL = NoisyScreening(noise=4.0, threshold=7.0, n_neighbors=12)


def plain_rdp(order: float, p: float, q: float) -> float:
    return math.log(p**order * q ** (1 - order) + (1 - p) ** order * (1 - q) ** (1 - order)) / (order - 1)


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_every_entry_of_figure_1_is_the_definition(rate: float) -> None:
    orders = np.array([1.5, 4.0, 11.0])
    found = screening.compute_rdp(orders, SMALL, sampling_rate=rate)
    passes = ndtr((np.arange(13) - 7.0) / 4.0)
    for row, order in zip(found, orders, strict=True):
        for t in range(13):
            near = [u for u in (t - 1, t + 1) if 0 <= u <= 12]
            pairs = [(passes[t], (1 - rate) * passes[t] + rate * passes[u]) for u in near]
            expected = max(plain_rdp(order, *pair) for p, q in pairs for pair in ((p, q), (q, p)))
            assert row[t] == pytest.approx(expected, rel=1e-9)


def test_the_maximum_of_figure_1_is_where_it_says() -> None:
    orders = np.arange(1.5, 50.5, 0.5)
    rdp = screening.compute_rdp(orders, STREET)
    assert rdp.shape == (len(orders), 301)  # from no votes on
    least, most = (as_frame(screening.find_worst(orders, which)).set_index("order") for which in (0, -1))
    for found in (least, most):
        np.testing.assert_allclose(rdp.max(axis=1), found["rdp"], rtol=1e-12)
        np.testing.assert_allclose(rdp[np.arange(len(orders)), found["votes"]], found["rdp"], rtol=1e-12)
        assert np.all(np.abs(found["votes"] - found["neighbour"]) == 1)
    assert tuple(least.loc[20, ["votes", "neighbour"]]) == (199, 198)
    assert tuple(most.loc[20, ["votes", "neighbour"]]) == (221, 222)
    assert most.loc[20, "rdp"] == pytest.approx(8.81961642761911e-4, rel=1e-12)  # vector 4
    # "When alpha is below 50 the worst case is at T": it is, up to order 2.
    elsewhere = (least["votes"] != 210) | (most["votes"] != 210)
    assert np.all(elsewhere[orders >= 5])
    assert not np.any(elsewhere[orders <= 2])


def test_figure_2_names_the_true_maximisers() -> None:
    orders = np.array([20.0, 80.0, 100.0, 150.0, 300.0])
    worst = as_frame(screening.find_worst(orders, -1))
    fixed = screening.compute_rdp(orders, STREET)[:, list(screening.FIXED_VOTES)]
    pairs = list(zip(worst["votes"], worst["neighbour"], strict=True))
    assert pairs == [(221, 222), (257, 258), (270, 271), (113, 112), (1, 0)]
    values = worst["rdp"].to_numpy()
    assert values[-1] == pytest.approx(1.62456745210433e-2, rel=1e-12)  # vector 4
    assert values[2] == pytest.approx(4.51813516879525e-3, rel=1e-12)
    assert screening.FIXED_VOTES == (210, 221, 300, 113, 30)
    assert np.all(fixed <= values[:, None] * (1 + 1e-12))
    assert fixed[0, 1] == pytest.approx(values[0], rel=1e-12)
    assert fixed[3, 3] == pytest.approx(values[3], rel=1e-12)
    # The published rule, the larger of T and k, is short at every one of them.
    assert np.all(np.maximum(fixed[:, 0], fixed[:, 2]) < 0.9985 * values)


def test_vector_5_the_cost_of_eight_thousand_screenings_as_published() -> None:
    values = screening.compute_rdp(np.array([24.0]), STREET, sampling_rate=0.25)
    assert values.max() == pytest.approx(6.61152575517683e-5, rel=1e-12)
    assert 8192 * values.max() + math.log(1e5) / 23 == pytest.approx(1.04217816660192, rel=1e-13)
    assert values.max() == compute_screening_rdp(24, STREET, sampling_rate=0.25)


def test_figure_3_lies_between_its_bounds_and_the_published_rule_is_too_low_for_few() -> None:
    rows = as_frame({"screenings": count, **row} for count in (1, 2, 4, 32) for row in screening.compute_costs(count))
    found = rows[rows["kind"] != "at"].pivot(index="screenings", columns="kind", values="epsilon")
    fixed = rows[rows["kind"] == "at"].pivot(index="screenings", columns="votes", values="epsilon")
    assert np.all(found["fixed pair"] <= found["Bellman"])
    assert np.all(found["Bellman"] <= found["tight"])
    assert np.all(found["tight"] <= found["classic"])
    assert np.all(fixed.max(axis=1) <= found["classic"])
    assert np.all(found["fixed pair"] >= 0.96 * found["Bellman"])
    assert found.loc[1, "fixed pair"] == pytest.approx(
        found.loc[1, "Bellman"], rel=1e-5
    )  # one question: the pair is all
    rule = fixed[[210, 300]].max(axis=1)  # at T and at k
    assert rule[1] < 0.7 * found.loc[1, "fixed pair"]
    assert rule[2] < found.loc[2, "fixed pair"]
    assert np.all(rule[[4, 32]] > found.loc[[4, 32], "Bellman"])


def test_the_search_for_a_fixed_pair_finds_the_best() -> None:
    found, pair = screening.find_worst_pair(40, SMALL, sampling_rate=0.4, delta=1e-5)
    everywhere = [
        screening.compute_fixed_pair_epsilon(40, SMALL, both, sampling_rate=0.4, delta=1e-5, direction=direction)
        for t in range(12)
        for both in ((t, t + 1), (t + 1, t))
        for direction in ("add", "remove")
    ]
    assert found == max(everywhere)
    assert abs(pair[0] - pair[1]) == 1


def test_the_study_tells_the_maximisers_and_draws_what_was_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(screening, "COUNTS", (1, 16))
    found = run(screening.STUDY, tmp_path, jobs=1)
    page = write(screening.STUDY, found, tmp_path).read_text()
    for expected in ("221, 222", "257, 258", "113, 112", "1.624567e-02", "0.006923", "holds up to order 2."):
        assert expected in page
    for name in ("surface", "worst", "cost"):
        assert f"(screening-{name}.svg)" in page
    cells = [row for row in found.rows if row["figure"] == 1 and row["kind"] == "at"]
    top = {row["order"]: row["rdp"] for row in found.rows if row["figure"] == 1 and row["kind"] == "worst"}
    assert all(row["rdp"] <= top[row["order"]] * (1 + 1e-12) for row in cells)
    second = [row for row in found.rows if row["figure"] == 2]
    axes = screening.draw_worst(as_frame(second)).axes[0]
    drawn = {line.get_label(): np.asarray(line.get_ydata()) for line in axes.lines}
    np.testing.assert_array_equal(drawn["t = 300 (k)"], [row["rdp"] for row in second if row["votes"] == 300][:150])
    assert [text.get_text() for text in axes.texts] == ["221", "257", "113", "1"]
    third = [row for row in found.rows if row["figure"] == 3]
    axes = screening.draw_costs(as_frame(third)).axes[1]
    drawn = {line.get_label(): np.asarray(line.get_ydata()) for line in axes.lines}
    costs = {(row["screenings"], row["kind"]): row["epsilon"] for row in third}
    pair = [costs[count, "fixed pair"] / costs[count, "Bellman"] for count in (1, 16)]
    np.testing.assert_array_equal(drawn["fixed pair: a lower bound"], pair)
