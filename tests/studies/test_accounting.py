"""The headline table: known values, bounds in their order, and a page that says it."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from nearveil.privacy.events import NoisyScreening
from studies import accounting
from studies._report import write
from studies._study import run
from studies.accounting import ACCOUNTANTS, BELOW, BEST, PLANS, PUBLISHED, compute_cost, compute_lower_bound, find_noise

pytestmark = pytest.mark.usefixtures("quick_figures")

SMALL = accounting.Plan(0.2, NoisyScreening(40.0, 20.0, 30), 40, 15.0, 25, 0.3)


def test_the_published_parameters_cost_what_two_other_accountants_say() -> None:
    plan = PLANS["MNIST"]
    # 1000 x (1) + 735 x (2) + ln(1e5) / 20, from moments computed with 40 digits; tight conversion.
    assert compute_cost(plan, PUBLISHED) == pytest.approx(1.17856477931025, rel=1e-9)
    assert compute_cost(plan, "RDP (Gaussian), tight conversion") == pytest.approx(0.966239486641195, rel=1e-9)
    assert compute_cost(plan, "PLD, Gaussian") == pytest.approx(0.88332541, abs=1e-4)
    assert compute_cost(plan, BEST) == pytest.approx(0.871049, abs=1e-4)
    assert compute_cost(plan, BEST, votes=False) == pytest.approx(0.161940, abs=1e-4)
    assert compute_lower_bound(plan, votes=False) >= 0.161520090


@pytest.mark.parametrize("votes", [False, True])
def test_no_accountant_is_below_the_lower_bound_and_the_tightest_is_near(votes: bool) -> None:
    below = compute_lower_bound(SMALL, votes=votes)
    found = {name: compute_cost(SMALL, name, votes=votes) for name in ACCOUNTANTS}
    assert below < min(found.values()) == found[BEST]
    assert found[BEST] < 1.03 * below
    assert found[PUBLISHED] == max(found.values())


def test_the_lower_bound_is_that_of_a_gaussian_where_votes_are_all() -> None:
    """One screening of next to no weight and one vote on all records: the analytic Gaussian mechanism's epsilon."""
    from scipy.stats import norm

    plan = replace(SMALL, sampling_rate=1.0, screened=1, screening=NoisyScreening(1e6, 20.0, 30), answered=1)
    mean = math.sqrt(2) / plan.vote_noise

    def delta(epsilon: float) -> float:
        return float(norm.cdf(mean / 2 - epsilon / mean) - math.exp(epsilon) * norm.cdf(-mean / 2 - epsilon / mean))

    found = compute_lower_bound(plan)
    assert delta(found) == pytest.approx(1e-5, rel=1e-3)


def test_the_noise_for_a_claim_costs_the_claim() -> None:
    noise = find_noise(SMALL, BEST)
    assert compute_cost(replace(SMALL, vote_noise=noise), BEST) == pytest.approx(0.3, rel=5e-3)
    with pytest.raises(ValueError, match="plan must have a claim"):
        find_noise(replace(SMALL, claimed=None), BEST)


def test_the_page_shows_claims_below_the_lower_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = {"MNIST": SMALL, "SVHN": replace(SMALL, vote_noise=12.0), "8,192 screenings": replace(SMALL, answered=0)}
    few = {name: replace(plan, claimed=0.3 if plan.answered else None) for name, plan in few.items()}
    for name, plan in few.items():
        monkeypatch.setitem(PLANS, name, plan)
    monkeypatch.setattr(accounting, "_INTERVAL", 1e-4)
    monkeypatch.setattr(accounting, "WHOLE_ORDERS", (2.0, 4.0, 8.0, 16.0, 32.0, 64.0))
    found = run(accounting.STUDY, tmp_path, jobs=1)
    page = write(accounting.STUDY, found, tmp_path).read_text()
    values = {(row["plan"], row["part"], row["accounting"]): row["epsilon"] for row in found.rows if "part" in row}
    assert values["MNIST", "all", BELOW] > max(0.3, values["MNIST", "votes", BELOW])
    assert f"**{values['SVHN', 'all', BEST]:.6f}**" in page
    assert f"{values['MNIST', 'all', BEST] / 0.3:.2f} times the claim on MNIST" in page
    assert values["8,192 screenings", "all", BEST] == values["8,192 screenings", "screenings", BEST]
    assert "| 1 | 20 | 27.7 | 149 | 178 |" in page
    assert "| 4 | 7,020 | 5,399 |" in page


def test_messages_and_answers_cost_what_the_page_says() -> None:
    rows = [accounting.price_messages(epsilon, 20) for epsilon in (1.0, 2.0)]
    assert [round(row["cost"], 1) for row in rows] == [27.7, 97.0]
    assert [(row["filter"], row["planned"]) for row in rows] == [(149, 178), (25, 29)]
    row = accounting.count_answers(1.0)
    assert (row["Gaussian filter"], row["Renyi filter"]) == (560, 394)
