"""``nearveil cost`` as a person types it."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

import nearveil
from nearveil.cli import app


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
    assert "500 releases about one record" in result.output
    price = prices("500x0.5")
    assert price["addition"] == pytest.approx(250)
    assert price["PLD"] < price["RDP"] < 250


@pytest.mark.parametrize("mechanism", ["pure", "laplace", "gaussian"])
def test_one_release_costs_what_it_says(mechanism: str) -> None:
    price = prices("1x0.5", "--mechanism", mechanism)
    assert price["PLD"] == pytest.approx(0.5, abs=1e-3)


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
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    result = run("cost", *words)
    assert result.exit_code == 2
    assert any(why in result.output for why in ("500x0.5", "between 0 and 1", "smaller deltas", "No such option"))


def test_version_and_help() -> None:
    assert run("--version").output.strip() == nearveil.__version__
    assert "Price a plan before it runs" in run("cost", "--help").output
