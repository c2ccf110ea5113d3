"""How much of this library one warm question runs through: little enough to be read in an afternoon."""

from dataclasses import astuple
from pathlib import Path

from tests.walk import Cost, walks

MAX_COSTS = {
    "served": Cost(functions=230, file_changes=158, depth=10),
    "local": Cost(functions=195, file_changes=131, depth=10),
}


def test_a_question_runs_through_few_functions_and_files(tmp_path: Path) -> None:
    for name, (cost, functions) in walks(tmp_path).items():
        limits = astuple(MAX_COSTS[name])
        assert all(figure <= limit for figure, limit in zip(astuple(cost), limits, strict=True)), (
            name,
            cost,
            functions,
        )
