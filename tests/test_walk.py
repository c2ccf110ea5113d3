"""How many files of this library a question walks through: few enough to be read in an afternoon."""

from pathlib import Path

from tests.walk import walks

MOST = {"served": 26, "local": 21}  # private steps have a file of their own


def test_a_question_walks_through_few_files(tmp_path: Path) -> None:
    found = walks(tmp_path)
    assert {name: len(files) for name, files in found.items() if len(files) > MOST[name]} == {}, found
