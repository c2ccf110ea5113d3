"""The command: its table, its Markdown and its JSON."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import nearveil.audit
import studies.audits
from nearveil.audit import Check, audit
from nearveil.audit.registry import AuditEntry
from nearveil.cli import _audit
from nearveil.cli import app as whole
from tests.audit.mechanisms import coin, repeatable

app = typer.Typer()
app.command()(_audit.audit)
runner = CliRunner()


@pytest.fixture(autouse=True)
def no_more_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("list_baselines", "list_estimators", "list_side_channels"):
        monkeypatch.setattr(studies.audits, name, lambda _: [])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A house with one mechanism that keeps its promise, and one specimen that does not."""
    kept = [
        AuditEntry("bit", lambda: repeatable(coin(1.0, 0.6))),
        AuditEntry("bit, again", lambda: repeatable(coin(2.0, 1.2))),
    ]
    monkeypatch.setattr(nearveil.audit, "list_mechanisms", lambda _: kept)
    monkeypatch.setattr(
        studies.audits, "list_specimens", lambda: [AuditEntry("loud bit", lambda: repeatable(coin(1.0, 3.0)), "broken")]
    )


@pytest.mark.usefixtures("small")
def test_all_in_one_table_and_in_markdown(tmp_path: Path) -> None:
    done = runner.invoke(app, ["all", "--out", str(tmp_path / "new"), "--effort", "0.2"])
    assert done.exit_code == 0, done.output
    for words in (
        "bit, again",
        "loud bit",
        "kept",
        "broken",
        "Broken on purpose",
        "no proof",
        "a tenth",
    ):
        assert words in done.output
    result = json.loads((tmp_path / "new" / "audit.json").read_text())
    assert [len(reports) for reports in result["sections"].values()] == [2, 1]
    assert (result["outcome"], result["exit_status"], result["wrong"]) == ("kept", 0, [])
    markdown = (tmp_path / "new" / "audit.md").read_text()
    for line in (
        "## Broken on purpose: each must be caught",
        "(exit status 0)",
        "Read [the limits of an audit](../theory/audit.md).",
        "| loud bit | 1 | 0 | ",
        "- Undecided: none.",
    ):
        assert line in markdown
    assert (tmp_path / "new" / "audit.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("small")
def test_json_and_prefixes() -> None:
    done = runner.invoke(app, ["bit,", "--json", "--effort", "0.1", "--confidence", "0.9"])
    told = json.loads(done.output)
    (report,) = told["sections"]["Mechanisms"]
    assert (report["mechanism"], report["confidence"], told["wrong"]) == ("bit, again", 0.9, [])
    assert report["trials"] == 2_000


def test_a_promise_that_is_broken_and_a_specimen_that_is_not_caught_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        nearveil.audit, "list_mechanisms", lambda _: [AuditEntry("bad", lambda: repeatable(coin(1.0, 3.0)))]
    )
    monkeypatch.setattr(
        studies.audits, "list_specimens", lambda: [AuditEntry("good", lambda: repeatable(coin(1.0, 0.5)), "broken")]
    )
    done = runner.invoke(app, ["all", "--effort", "0.2"])
    assert done.exit_code == 1
    assert "bad must be kept, and is broken" in done.output
    assert re.search("good must be broken, and is (kept|undecided)", done.output)
    monkeypatch.setattr(
        nearveil.audit, "list_mechanisms", lambda _: [AuditEntry("bad", lambda: repeatable(coin(1.0, 3.0)), "open")]
    )
    assert runner.invoke(app, ["bad", "--effort", "0.2"]).exit_code == 0


def test_bad_luck_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guarantee that is undecided, perhaps by chance, is audited again with more runs; that report stands."""
    asked: list[tuple[float, int]] = []

    def attack(experiment: Any, *, confidence: float, trials: int, progress: Any) -> Any:
        asked.append((confidence, trials))
        report = audit(experiment, confidence=confidence, trials=trials, progress=progress)
        return replace(report, interval=(1.1, 1.3), shown_epsilon=1.1) if len(asked) == 1 else report

    monkeypatch.setattr("nearveil.audit.auditing.audit", attack)
    monkeypatch.setattr(
        nearveil.audit, "list_mechanisms", lambda _: [AuditEntry("bit", lambda: repeatable(coin(1.0, 0.6)))]
    )
    done = runner.invoke(app, ["bit", "--json", "--effort", "0.2"])
    (report,) = json.loads(done.output)["sections"]["Mechanisms"]
    assert (done.exit_code, report["verdict"], asked) == (0, "kept", [(0.95, 4_000), (0.95, 8_000)])
    assert "second audit" in report["notes"][0]


def verdicts(monkeypatch: pytest.MonkeyPatch, **found: str) -> Any:
    """Run the command with mechanisms of these verdicts, all of which must be kept."""
    entries = [AuditEntry(name, lambda: repeatable(coin(1.0, 0.6))) for name in found]
    check = {"broken": (Check("caps", "failed", "2 for 1"),), "kept": (), "undecided": ()}
    reach = {"broken": 0.9, "kept": 0.9, "undecided": 2.0}
    report = audit(coin(1.0, 0.6), trials=400)

    def attack(experiment: Any, **_: Any) -> Any:
        kind = found[experiment.name]
        return replace(report, mechanism=experiment.name, interval=(0.5, reach[kind]), checks=check[kind])

    monkeypatch.setattr("nearveil.audit.auditing.audit", attack)
    monkeypatch.setattr(nearveil.audit, "list_mechanisms", lambda _: entries)
    monkeypatch.setattr(studies.audits, "list_specimens", list)
    return runner.invoke(app, ["all", "--json"])


@pytest.mark.parametrize(
    ("found", "status", "outcome"),
    [
        ({"a": "kept"}, 0, "kept"),
        ({"a": "kept", "b": "undecided"}, 3, "undecided"),
        ({"a": "undecided", "b": "broken", "c": "kept"}, 1, "broken"),
        ({"a": "broken"}, 1, "broken"),
    ],
)
def test_exit_statuses(monkeypatch: pytest.MonkeyPatch, found: dict[str, str], status: int, outcome: str) -> None:
    """Broken wins over undecided, and undecided over kept."""
    done = verdicts(monkeypatch, **found)
    told = json.loads(done.output)
    assert (done.exit_code, told["exit_status"], told["outcome"]) == (status, status, outcome)
    assert [one["verdict"] for one in told["sections"]["Mechanisms"]] == list(found.values())
    assert len(told["wrong"]) == sum(kind != "kept" for kind in found.values())
    if "broken" in found.values():
        assert any("caps: 2 for 1" in line for line in told["wrong"])


def test_what_can_be_audited_and_what_cannot() -> None:
    done = runner.invoke(app, ["--list"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    for words in (
        "caps that are ignored",
        "mechanisms.PrivUnit",
        "nearveil.private_knn.Answers",
        "Not auditable",
    ):
        assert words in done.output
    told = json.loads(runner.invoke(app, ["--list", "--json"]).output)
    assert {"name": "covers", "audits": "nearveil.mechanisms.Covers", "must_be": "kept"} in told["auditable"]
    assert told["not_auditable"]["nearveil.mechanisms.Message"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nobody"], "is none of"),
        ([], "a mechanism of --list, or all"),
        (["all", "--confidence", "1"], "between 0 and 1"),
        (["all", "--effort", "0"], "between 0 and 100"),
        (["all", "--epsilon", "0"], "from 0.01 to 12"),
    ],
)
def test_bad_words(words: list[str], said: str) -> None:
    done = runner.invoke(app, words, env={"COLUMNS": "400"})
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


@pytest.mark.usefixtures("small")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = runner.invoke(app, ["bit", "--effort", "0.05", "--out", str(tmp_path / "file")], env={"COLUMNS": "400"})
    assert done.exit_code == 2
    assert "is not writable" in " ".join(done.output.split())


def test_the_command_is_there() -> None:
    done = runner.invoke(whole, ["audit", "--help"])
    assert done.exit_code == 0
    assert "[NAME|all]" in done.output


@pytest.mark.usefixtures("small")
def test_mechanisms_are_audited_without_the_studies_and_all_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearveil.cli._output.has_studies", lambda: False)
    done = runner.invoke(app, ["all"])
    assert (done.exit_code, "nearveil-studies" in done.output) == (2, True)
    missing = runner.invoke(app, ["student"])
    assert (missing.exit_code, "nearveil-studies" in missing.output) == (2, True)
    assert runner.invoke(app, ["bit,", "--effort", "0.1"]).exit_code == 0
    assert "loud bit" not in runner.invoke(app, ["--list"]).output
