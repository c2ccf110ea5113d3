"""The runner of mutants: what counts as a kill, and what does not."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import __main__ as command
from tests.mutants.runner import Mutant, MutantError, Outcome, Verdict, check_green, load, run, select_part

PACKAGE = """\
def double(x: int) -> int:
    return 2 * x


def triple(x: int) -> int:
    return 3 * x
"""
TESTS = """\
import pytest
import toy


@pytest.fixture
def number():
    assert toy.triple(1) == 3
    return 1


def test_double():
    assert toy.double(4) == 8


def test_nothing():
    toy.double(4)


def test_setup(number):
    pass


def test_skipped():
    pytest.skip("not here")


def test_long(tmp_path):
    assert [n * (toy.double(4) == 8) for n in range(2000)] == list(range(2000))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "src" / "toy.py").write_text(PACKAGE)
    (tmp_path / "tests" / "test_toy.py").write_text(TESTS)
    return tmp_path


def make(**given: Any) -> Mutant:
    usual = {"name": "m", "file": "toy.py", "old": "2 * x", "new": "2 + x", "why": "wrong"}
    return Mutant(**{**usual, "tests": ("tests/test_toy.py::test_double",), **given})


def judge(root: Path, *mutants: Mutant, timeout: float = 300) -> dict[str, Verdict]:
    seen: list[Outcome] = []
    outcomes = run(mutants, root, jobs=2, timeout=timeout, report=seen.append)
    assert seen == outcomes
    return {outcome.mutant.name: outcome.verdict for outcome in outcomes}


def test_only_a_failed_test_is_a_kill(root: Path) -> None:
    verdicts = judge(
        root,
        make(name="found"),
        make(name="missed", tests=("tests/test_toy.py::test_nothing",)),
        make(name="skipped", tests=("tests/test_toy.py::test_skipped",)),
        make(name="setup", old="3 * x", new="4 * x", tests=("tests/test_toy.py::test_setup",)),
        make(name="import", old="def triple", new="1 / 0\n\n\ndef triple"),
        make(name="no such test", tests=("tests/test_toy.py::test_missing",)),
        make(name="same second", old="2 * x", new="3 * x"),
    )
    assert verdicts == {
        "found": "killed",
        "missed": "survived",
        "skipped": "survived",
        "setup": "broken",
        "import": "broken",
        "no such test": "broken",
        "same second": "killed",
    }
    assert (root / "src" / "toy.py").read_text() == PACKAGE


def test_running_out_of_time_is_not_a_kill(root: Path) -> None:
    endless = make(old="    return 2 * x", new="    while True:\n        pass")
    assert judge(root, endless, timeout=3) == {"m": "timed out"}


def test_a_machine_that_tests_gets_no_long_diffs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    assert judge(root, make(tests=("tests/test_toy.py::test_long",)), timeout=30) == {"m": "killed"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"old": "5 * x"}, "0 times"),
        ({"old": "x: int"}, "2 times"),
        ({"file": "other.py"}, "no file"),
        ({"new": "2 *"}, "not Python"),
        ({"new": "(2 * x)"}, "does the same"),
    ],
)
def test_a_mutant_that_does_not_apply_is_an_error(root: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(MutantError, match=f"does not apply.*{words}"):
        judge(root, make(**given))


def test_tests_must_pass_without_mutants(root: Path) -> None:
    check_green([make()], root, jobs=2, timeout=300)
    (root / "src" / "toy.py").write_text(PACKAGE.replace("2 * x", "x"))
    with pytest.raises(MutantError, match="do not pass without mutants"):
        check_green([make(old="3 * x", new="x")], root, jobs=2, timeout=300)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[mutant]]\nname = "a"', "must have exactly"),
        ('[[mutant]]\nname = "a"\nfile = "f"\nold = "o"\nnew = "n"\nwhy = "w"\ntests = []', "node ids below tests/"),
        ('[[mutant]]\nname = "a"\nfile = "f"\nold = "o"\nnew = "n"\nwhy = "w"\ntests = ["src/a.py::f"]', "node ids"),
        (2 * '[[mutant]]\nname = "a"\nfile = "f"\nold = "o"\nnew = "n"\nwhy = "w"\ntests = ["tests/t::f"]\n', "twice"),
    ],
)
def test_bad_lists(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "list.toml").write_text(text)
    with pytest.raises(MutantError, match=words):
        load(tmp_path)


def test_parts_cover_all_mutants_once() -> None:
    mutants = [make(name=str(number)) for number in range(10)]
    parts = [select_part(mutants, part, 4) for part in (1, 2, 3, 4)]
    assert sorted(mutant.name for part in parts for mutant in part) == sorted(mutant.name for mutant in mutants)
    with pytest.raises(MutantError, match="K from 1 to N"):
        select_part(mutants, 5, 4)


def test_the_command_prints_survivors(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutants = [make(name="found"), make(name="missed", tests=("tests/test_toy.py::test_nothing",))]
    monkeypatch.setattr(command, "ROOT", root)
    monkeypatch.setattr(command, "load", lambda _: mutants)
    assert command.main([]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 mutants killed, 1 not" in said
    assert "--- missed: survived by tests/test_toy.py::test_nothing" in said
    assert command.main(["--only", "found", "--part", "1/2", "--tested"]) == 0
    assert command.main(["--part", "first"]) == 2
    assert command.main(["--only", "unknown"]) == 2


def test_the_whole_list_applies_and_names_tests_that_exist() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in command.ROOT.glob("tests/**/*.py")}
    known = set(re.findall(r"^ *(?:def|class) (\w+)", "\n".join(texts.values()), re.MULTILINE))
    for mutant in load(command.HERE):
        mutant.apply(command.ROOT / "src")
        for test in mutant.tests:
            path, *names = test.partition("[")[0].split("::")
            assert command.ROOT / path in texts, f"{mutant.name}: no file {path}"
            assert known.issuperset(names), f"{mutant.name}: no test {test}"
