import json

import pytest
from typer.testing import CliRunner

from nearveil.cli import app

runner = CliRunner()


def _plan(*options: str) -> str:
    done = runner.invoke(app, ["plan", *options])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_a_gallery_that_a_release_suits() -> None:
    text = _plan("--items", "100000", "--epsilon", "4", "--answer", "2MB")
    assert "By covers" in text
    assert "nearveil sync URL" in text
    assert "No private release finds more than" in text


def test_a_small_gallery_needs_no_release() -> None:
    assert "epsilon is 0" in _plan("--items", "1000", "--epsilon", "1", "--answer", "1MiB")


def test_what_cannot_work_is_said() -> None:
    found = json.loads(_plan("--items", "1000000", "--epsilon", "1", "--answer", "100kB", "--json"))
    assert found["release"] == "none"
    assert found["ceiling"] < 0.01
    assert "No local release can work" in found["advice"]


def test_no_room_at_all_is_still_json() -> None:
    found = json.loads(_plan("--items", "10", "--epsilon", "1", "--answer", "1", "--json"))
    assert found["release"] == "none"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--items", "10", "--epsilon", "1", "--answer", "much"], "is not a size"),
        (["--items", "0", "--epsilon", "1", "--answer", "1MB"], "items"),
        (["--items", "10", "--epsilon", "-1", "--answer", "1MB"], "epsilon"),
        (["--items", "10", "--epsilon", "1", "--answer", "1MB", "--delta", "2"], "delta"),
    ],
)
def test_mistakes_are_told_in_words(options: list[str], words: str) -> None:
    done = runner.invoke(app, ["plan", *options])
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output
