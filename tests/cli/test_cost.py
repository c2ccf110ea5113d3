"""``nearveil cost`` as a person types it."""

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

import nearveil
from nearveil.cli import app
from nearveil.privacy.accounting import RenyiFilter
from nearveil.privacy.events import NamedSets


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def prices(*words: str) -> dict[str, Any]:
    result = run("cost", *words, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    return {"releases": answer["releases"], **answer["epsilon"]}


def test_500_queries_at_a_half_each() -> None:
    result = run("cost", "500x0.5")
    assert result.exit_code == 0
    assert "500 releases (500x0.5)" in result.output
    price = prices("500x0.5")
    assert price["addition"] == pytest.approx(250)
    assert price["PLD"] < price["RDP"] < 250


@pytest.mark.parametrize("mechanism", ["pure", "laplace", "gaussian"])
def test_one_release_costs_what_it_says(mechanism: str) -> None:
    price = prices("1x0.5", "--mechanism", mechanism)
    assert price["PLD"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(("epsilon", "sets", "cost"), [(1, 20, 27.7), (1, 60, 15.7), (2, 20, 97.0), (2, 60, 54.7)])
def test_messages_cost_less_with_more_sets(epsilon: int, sets: int, cost: float) -> None:
    price = prices(f"100x{epsilon}", "--sets", f"{sets}", "--delta", "1e-6")
    assert price["PLD"] == pytest.approx(cost, abs=0.05)
    assert price["PLD"] < price["RDP"] < price["Renyi filter"] < price["addition"] == 100 * epsilon
    assert price["PLD"] < prices(f"100x{epsilon}", "--sets", "2", "--delta", "1e-6")["PLD"]


def test_the_price_of_a_filter_is_the_budget_that_it_needs() -> None:
    price = prices("100x1", "--sets", "20", "--delta", "1e-6")["Renyi filter"]
    gate = RenyiFilter(price * (1 + 1e-9), 1e-6)
    assert [gate.may_spend(NamedSets(1.0, 20), n) for n in (100, 101)] == [True, False]


def test_parts_are_composed() -> None:
    both = prices("100x0.1", "5x1")
    assert both["releases"] == 105
    assert both["addition"] == pytest.approx(15)
    assert prices("100x0.1")["PLD"] < both["PLD"] < 15


@pytest.mark.parametrize(
    "words",
    [
        ["500"],
        ["0x1"],
        ["5x0"],
        ["5x-1"],
        ["5xnan"],
        ["5x1e9"],
        ["ax1"],
        ["1x1", "--delta", "0"],
        ["1x1", "--delta", "2"],
        ["1x1", "--delta", "1e-20"],
        ["1x1e-9"],
        ["1x1", "--sets", "1"],
        ["1x1", "--sets", "20", "--mechanism", "laplace"],
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    result = run("cost", *words)
    assert result.exit_code == 2
    assert any(
        why in result.output for why in ("500x0.5", "between 0 and 1", "smaller deltas", "No such option", "--sets")
    )


def test_version_and_help() -> None:
    assert run("--version").output.strip() == nearveil.__version__
    assert "Price a plan before it runs" in run("cost", "--help").output


def test_a_search_plan_prices_its_messages() -> None:
    """Of about as many sets as the map would have, which `--json` and `nearveil cost` take."""
    words = ("plan", "--items", "1000000", "--epsilon", "2", "--answer", "12MB", "--code-bytes", "128")
    n_sets = json.loads(run(*words, "--json").output)["n_sets"]
    cost = prices("100x2", "--sets", f"{n_sets}", "--delta", "1e-6")["PLD"]
    output = " ".join(run(*words, "-v").output.split())
    assert f"Each message names one of about {n_sets} sets." in output
    (stated,) = re.findall(r"100 cost epsilon ([0-9.]+) instead of 200;", output)
    assert cost <= float(stated) <= cost * 1.01
    nothing = ("plan", "--items", "1000000", "--epsilon", "1", "--answer", "100kB")
    assert json.loads(run(*nothing, "--json").output)["n_sets"] == 0
    assert "Each message" not in run(*nothing).output
