"""``nearveil budget`` as a person types it."""

import csv
import json
import shutil
import socket
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent
from rich.console import Console
from typer.testing import CliRunner

from nearveil.cli import app
from nearveil.cli._budget import Bar
from nearveil.cli._options import LedgerOptions
from nearveil.ledger import Ledger
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import analytic_gaussian_scale
from tests.ledger.stating import stated

ABOUT = {"protects": "query", "relation": "replace"}
SECRET = b"the public message, which is nobody's business here"


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["budget", *words])


def fine(*words: str) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return str(result.output)


def answer(*words: str) -> Any:
    return json.loads(fine(*words, "--json"))


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with one pure account of epsilon 4, of which 1 is spent, and a client."""
    path = tmp_path_factory.mktemp("made") / "nearveil.db"
    there = ("--ledger", str(path))
    fine("create", "camera", "--owner", "me", "--epsilon", "4", "--delta", "0", *there)
    fine("quota", "camera", "ann", "--epsilon", "2", *there)
    with Ledger(path) as ledger:
        with ledger.account("camera").spend(stated(PureDp(0.25), **ABOUT), "first", client="ann") as debit:
            debit.store(SECRET)
        ledger.account("camera").spend(stated((PureDp(0.25), 3), **ABOUT), "second")
    return path


@pytest.fixture
def camera(made: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, with its witness, where commands look for one."""
    monkeypatch.setenv("NEARVEIL_LEDGER", str(here / "nearveil.db"))
    for name in ("nearveil.db", "nearveil.db.witness"):
        shutil.copy(made.with_name(name), here / name)
    return here / "nearveil.db"


def test_create_opens_the_three_kinds(here: Path) -> None:
    fine("create", "free", "--owner", "me", "--epsilon", "2", "--delta", "1e-5")
    fine("create", "messages", "--owner", "me", "--epsilon", "2")
    fine("create", "sums", "--owner", "me", "--epsilon", "2", "--delta", "0", "--unit", "person")
    shared = ("--protects", "database", "--relation", "add-remove")
    fine("create", "plan", "100x0.1", "2x0.5", "--owner", "the archive", "--epsilon", "9", *shared)
    with Ledger(LedgerOptions().location) as ledger:
        kinds = {account.name: (account.kind, account.epsilon, account.delta) for account in ledger.accounts()}
        assert kinds.pop("messages") == ("pure", 2.0, 0.0)
        assert kinds == {"free": ("filter", 2.0, 1e-5), "sums": ("pure", 2.0, 0.0), "plan": ("plan", 9.0, 1e-5)}
        plan = ledger.account("plan")
        assert set(plan.balance().remaining) == {(PureDp(0.1), 100), (PureDp(0.5), 2)}
        assert (plan.owner, plan.protects, plan.relation) == ("the archive", "database", "add-remove")
        assert [ledger.account(name).unit for name in ("free", "sums", "plan")] == ["image", "person", "record"]


@pytest.mark.parametrize(
    ("mechanism", "event"),
    [
        ("pure", PureDp(0.1)),
        ("laplace", LaplaceDpEvent(10.0)),
        ("gaussian", GaussianDpEvent(analytic_gaussian_scale(1.0, 0.1, 1e-6))),
    ],
)
def test_a_plan_and_its_preview_mean_the_same_events(here: Path, mechanism: str, event: Any) -> None:
    words = ("10x0.1", "--mechanism", mechanism)
    fine("create", "plan", *words, "--owner", "me", "--epsilon", "3", "--delta", "1e-6")
    with Ledger(LedgerOptions().location) as ledger:
        assert ledger.account("plan").balance().remaining == ((event, 10),)
    assert answer("preview", "plan", *words)["total"] <= 3
    assert run("preview", "plan", "11x0.1", "--mechanism", mechanism).exit_code == 1


def test_create_says_what_a_delta_buys(here: Path) -> None:
    album = fine("create", "album", "--owner", "me", "--epsilon", "40", "--delta", "1e-6", "--sets", "20")
    assert "149 at epsilon 1 (40), 25 at epsilon 2 (20), 9 at epsilon 4 (10)" in " ".join(album.split())
    assert answer("preview", "album", "149x1", "--sets", "20")["allowed"]
    assert not json.loads(run("preview", "album", "150x1", "--sets", "20", "--json").output)["allowed"]
    pure = fine("create", "pure", "--owner", "me", "--epsilon", "40", "--delta", "0")
    assert "with a delta of 1e-06 (and with delta 0): 149 at epsilon 1 (40)" in " ".join(pure.split())
    words = ("--owner", "me", "--epsilon", "1", "--delta", "1e-6", "--protects", "database", "--releases", "gaussian")
    noisy = fine("create", "noisy", *words)
    assert "pays for 394, 560 with --releases gaussian" in " ".join(noisy.split())
    assert "Accounting: Gaussian filter" in noisy
    planned = fine("create", "plan", "178x1", "--sets", "20", "--owner", "me", "--epsilon", "40", "--delta", "1e-6")
    assert "What delta buys" not in planned
    assert run(
        "create", "more", "179x1", "--sets", "20", "--owner", "me", "--epsilon", "40", "--delta", "1e-6"
    ).exit_code


def test_a_plan_that_costs_too_much_is_refused_with_figures(here: Path) -> None:
    result = run("create", "plan", "100x0.1", "--owner", "me", "--epsilon", "1")
    assert result.exit_code == 1
    assert "the plan costs epsilon" in result.output
    assert answer("show") == []


def test_show_draws_what_is_spent_and_what_is_left(camera: Path) -> None:
    text = fine("show")
    row = next(line for line in text.splitlines() if line.strip().startswith("camera"))
    assert row.split()[-4:] == ["1", "3", "4", "0"]
    bar = row.split()[1]
    assert bar.count("█") == -(-len(bar) // 4)
    assert bar.count("░") == len(bar) - bar.count("█")
    client = next(line for line in text.splitlines() if line.strip().startswith("ann"))
    assert client.split()[-4:] == ["0.25", "1.75", "2", "0"]
    assert max(map(len, text.splitlines())) <= 80


def test_show_as_json(camera: Path) -> None:
    (account,) = answer("show", "camera")
    assert {name: account[name] for name in ("account", "owner", "kind", "epsilon", "spent", "left")} == {
        "account": "camera",
        "owner": "me",
        "kind": "pure",
        "epsilon": 4.0,
        "spent": 1.0,
        "left": 3.0,
    }
    assert [(one["client"], one["spent"]) for one in account["clients"]] == [("ann", 0.25)]


@pytest.mark.parametrize(
    ("spent", "total", "drawn"),
    [(0.0, 0.0, "░░░░░░░░░░"), (0.01, 0.01, "█░░░░░░░░░"), (3.0, 3.0, "████████░░"), (3.99, 3.99, "██████████"),
     (0.01, 3.0, "█▒▒▒▒▒▒▒░░"), (1.0, float("inf"), "███▒▒▒▒▒▒▒"), (4.0, 4.0, "██████████")],
)  # fmt: skip
def test_a_cell_of_the_bar_that_is_begun_counts_as_gone(spent: float, total: float, drawn: str) -> None:
    console = Console(width=10, force_terminal=False)
    with console.capture() as printed:
        console.print(Bar(4.0, spent, total))
    assert printed.get().strip() == drawn


def test_preview_spends_nothing_and_tells_by_its_exit_code(camera: Path) -> None:
    before = camera.read_bytes()
    allowed = run("preview", "camera", "4x0.5")
    assert allowed.exit_code == 0
    assert "this costs 2 of epsilon 4; then 3 is spent and 1 left" in " ".join(allowed.output.split())
    refused = run("preview", "camera", "7x0.5", "--json")
    assert refused.exit_code == 1
    figures = json.loads(refused.output)
    assert (figures["allowed"], figures["cost"], figures["total"], figures["left"]) == (False, 3.5, 4.5, 0.0)
    assert run("preview", "camera", "4x0.5", "--client", "ann").exit_code == 1
    assert run("preview", "camera", "3x0.5", "--client", "ann").exit_code == 0
    assert camera.read_bytes() == before


def test_what_has_no_price_is_null_in_json(here: Path) -> None:
    fine("create", "plan", "5x0.1", "--owner", "me", "--epsilon", "3")
    result = run("preview", "plan", "1x0.2", "--json")
    assert result.exit_code == 1
    assert json.loads(result.output)["cost"] is None


def test_quota_of_a_plan_is_a_part_of_it(here: Path) -> None:
    fine("create", "plan", "5x0.1", "--owner", "me", "--epsilon", "3")
    assert answer("quota", "plan", "ann", "2x0.1")["remaining"][0]["count"] == 2
    assert run("quota", "plan", "bob", "6x0.1").exit_code == 1
    assert run("quota", "plan", "bob", "--epsilon", "1").exit_code == 1


def test_history_tells_the_length_of_a_message_and_nothing_more(camera: Path) -> None:
    entries = answer("history", "camera")
    assert [entry["kind"] for entry in entries] == ["opened", "quota", "debit", "message", "debit"]
    assert [entry["message_bytes"] for entry in entries] == [None, None, None, len(SECRET), None]
    assert entries[4]["events"] == [{"count": 3, "event": {"type": "PureDp", "epsilon": 0.25}}]
    text = fine("history")
    assert f"{len(SECRET)} bytes" in text
    assert "3 x PureDp(0.25)" in text
    assert max(map(len, text.splitlines())) <= 80
    short = fine("history", "--last", "2")
    assert "3 earlier entries" in short
    assert "opened" not in short
    assert "earlier entries" not in fine("history", "--last", "0")
    assert len(answer("history", "--last", "0")) == 5


def test_no_command_prints_a_message(camera: Path, here: Path) -> None:
    import base64

    commands = [
        ("show",), ("show", "camera"), ("show", "--json"), ("history",), ("history", "--json"), ("verify",),
        ("verify", "--json"), ("preview", "camera", "1x0.25"), ("export", "out.json"), ("export", "out.csv"),
        ("backup", "copy.db"),
    ]  # fmt: skip
    for words in commands:
        printed = fine(*words)
        for form in (SECRET.decode(), repr(SECRET), base64.b64encode(SECRET).decode(), SECRET.hex()):
            assert form[:12] not in printed


def test_export_writes_every_entry_to_a_new_private_file(camera: Path, here: Path) -> None:
    fine("export", "out.json")
    fine("export", "out.csv")
    lines = json.loads((here / "out.json").read_text())
    with (here / "out.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [line["hash"] for line in lines] == [row["hash"] for row in rows]
    assert len(rows) == 5
    assert stat.S_IMODE((here / "out.json").stat().st_mode) == 0o600
    before = (here / "out.json").read_text()
    again = run("export", "out.json")
    assert again.exit_code == 1
    assert "exists and is not overwritten" in again.output
    assert (here / "out.json").read_text() == before
    assert run("export", "out.txt").exit_code == 2
    assert run("export", "nowhere/out.csv").exit_code == 1


def test_backup_is_a_copy_and_overwrites_nothing(camera: Path, here: Path) -> None:
    fine("backup", "copy.db")
    assert answer("history", "--ledger", "copy.db") == answer("history")
    assert run("backup", "copy.db").exit_code == 1


def test_verify_names_the_entry_that_is_wrong(camera: Path) -> None:
    assert "5 entries" in fine("verify")
    (receipt,) = [account["receipt"] for account in answer("show")]
    assert run("verify", "--receipt", receipt).exit_code == 0
    with sqlite3.connect(camera) as database:
        database.execute("UPDATE nearveil_entry SET time = '1999' WHERE sequence = 3")
    database.close()
    result = run("verify")
    assert result.exit_code == 1
    assert "account camera, entry 3" in result.output
    found = run("verify", "camera", "--json")
    assert found.exit_code == 1
    assert 3 in [problem["sequence"] for problem in json.loads(found.output)["problems"]]
    assert run("history").exit_code == 0


def test_verify_notices_an_old_copy_and_a_receipt_of_the_future(camera: Path, here: Path) -> None:
    fine("backup", "old.db")
    with Ledger(camera) as ledger:
        ledger.account("camera").spend(stated(PureDp(1.0), **ABOUT))
        receipt = str(ledger.account("camera").receipt())
    camera.write_bytes((here / "old.db").read_bytes())
    result = run("verify")
    assert result.exit_code == 1
    assert "rolled back" in result.output
    refused = run("quota", "camera", "bob", "--epsilon", "1")  # spending side: refused altogether
    assert refused.exit_code == 1
    assert "`nearveil budget verify` lists the problems" in refused.output
    (here / "nearveil.db.witness").write_bytes(b"")
    assert run("verify").exit_code == 0
    assert run("verify", "--receipt", receipt).exit_code == 1


def test_verify_says_that_it_had_no_witness_to_ask(camera: Path, here: Path) -> None:
    assert "no witness" not in fine("verify")
    assert answer("verify")["witness"] is True
    (here / "nearveil.db.witness").unlink()
    assert "There is no witness" in fine("verify")
    assert answer("verify")["witness"] is False


@pytest.mark.parametrize("words", [("show",), ("history",), ("verify",), ("backup", "o.db"), ("export", "o.json")])
@pytest.mark.parametrize("content", [[], ["CREATE TABLE t (x)"]])
def test_looking_leaves_the_file_of_another_program_as_it_is(
    words: tuple[str, ...], content: list[str], here: Path
) -> None:
    path = here / "other.db"
    path.touch()
    with sqlite3.connect(path) as database:
        for statement in content:
            database.execute(statement)
    database.close()
    before = path.read_bytes()
    result = run(*words, "--ledger", "other.db")
    assert result.exit_code == 1
    assert "not a ledger" in result.output
    assert path.read_bytes() == before
    assert [file.name for file in here.iterdir()] == ["other.db"]


@pytest.mark.parametrize(
    "words",
    [("show",), ("history",), ("verify",), ("preview", "a", "1x1"), ("quota", "a", "b", "--epsilon", "1"),
     ("export", "o.json"), ("backup", "o.db")],
)  # fmt: skip
def test_looking_for_a_ledger_makes_none(words: tuple[str, ...], here: Path) -> None:
    result = run(*words)
    assert result.exit_code == 1
    assert "No ledger at" in result.output
    assert "Traceback" not in result.output
    assert list(here.iterdir()) == []


def test_the_ledger_is_named_by_option_or_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine("create", "one", "--owner", "me", "--epsilon", "1", "--ledger", "my budgets.db")
    assert (here / "my budgets.db").exists()
    assert [path.name for path in here.iterdir() if not path.name.startswith("my budgets.db")] == []
    monkeypatch.setenv("NEARVEIL_LEDGER", str(here / "my budgets.db"))
    assert [account["account"] for account in answer("show")] == ["one"]
    elsewhere = ("--ledger", "b.db", "--witness", str(here / "w"))
    fine("create", "two", "--owner", "me", "--epsilon", "1", *elsewhere)
    assert (here / "w").stat().st_size == 256
    assert not (here / "b.db.witness").exists()


def test_the_default_is_where_queries_pay(here: Path) -> None:
    fine("create", "holiday", "--owner", "me", "--epsilon", "1")
    place = here / "data" / "nearveil" / "ledger.db"
    assert place.parent.stat().st_mode & 0o777 == 0o700
    assert LedgerOptions().location == str(place)
    assert [account["account"] for account in answer("show", "--ledger", str(place))] == ["holiday"]
    assert [path.name for path in here.iterdir()] == ["data"]


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("show", "nobody"), 1, "No account 'nobody'"),
        (("show", "--ledger", "mysql://x/y"), 1, "SQLite file or a PostgreSQL database"),
        (("show", "--ledger", "text.db"), 1, "not a SQLite database"),
        (("preview", "camera", "five"), 2, "500x0.5"),
        (("preview", "camera", "1x1", "--mechanism", "gaussian"), 2, "Gaussian noise is not pure"),
        (("preview", "camera", "1x1", "--client", "eve"), 1, "has no quota"),
        (("create", "camera", "--owner", "me", "--epsilon", "1"), 1, "exists already"),
        (("create", "x", "--owner", "me", "--epsilon", "-1"), 2, "must be a finite number above 0"),
        (("create", "x", "--owner", "me", "--epsilon", "inf"), 2, "must be a finite number above 0"),
        (("create", "x", "--owner", "me", "--epsilon", "nan"), 2, "must be a finite number above 0"),
        (("create", "x", "--owner", "me", "--epsilon", "1", "--delta", "2"), 1, "delta must"),
        (("create", "x", "--owner", " ", "--epsilon", "1"), 1, "owner must"),
        (("create", "x", "--owner", "me"), 2, "--epsilon"),
        (("create", "x", "--owner", "me", "--epsilon", "1", "--protects", "me"), 2, "query"),
        (("quota", "camera", "bob"), 1, "must have an epsilon"),
        (("quota", "camera", "ann", "--epsilon", "3"), 1, "quotas do not change"),
        (("verify", "--receipt", "nonsense"), 1, "SEQUENCE:HASH:ACCOUNT"),
        (("verify", "nobody"), 1, "No account"),
        (("history", "--last", "-1"), 2, "--last"),
    ],
)
def test_a_mistake_is_told_in_words(words: tuple[str, ...], code: int, why: str, camera: Path, here: Path) -> None:
    (here / "text.db").write_text("this is a text, and long enough to be read as the head of something else " * 20)
    result = run(*words)
    assert result.exit_code == code, result.output
    assert why in result.output
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit | None)


@pytest.mark.parametrize(
    "words",
    [
        ("show",),
        ("show", "camera"),
        ("preview", "camera", "1x1"),
        ("quota", "camera", "ann", "--epsilon", "1"),
        ("history",),
        ("export", "entries.json"),
        ("verify",),
        ("backup", "copy.db"),
        ("create", "camera", "--owner", "me", "--epsilon", "-1"),
    ],
)
def test_nothing_is_made_for_a_misspelt_ledger_or_a_bad_epsilon(words: tuple[str, ...], here: Path) -> None:
    result = run(*words, "--ledger", "misspelt.db")
    assert result.exit_code in (1, 2)
    assert "must be a finite number above 0" in result.output or "Create one with `nearveil budget create`" in " ".join(
        result.output.split()
    )
    assert not list(here.rglob("*"))


def test_a_large_budget_is_opened_with_a_warning(here: Path) -> None:
    result = run("create", "large", "--owner", "me", "--epsilon", "1000", "--delta", "0")
    assert result.exit_code == 0, result.output
    assert "epsilon 1000 guarantees nothing about a record" in result.stderr
    assert "guarantees nothing" not in run("create", "small", "--owner", "me", "--epsilon", "40").stderr


def test_names_cannot_steer_the_terminal(here: Path) -> None:
    fine("create", "[red]name[/red]", "--owner", "me [/]", "--epsilon", "1", "--delta", "0")
    assert "[red]name[/red]" in fine("show")
    assert "me [/]" in fine("show", "[red]name[/red]")
    assert "[red]name[/red]" in run("preview", "[red]name[/red]", "2x1").output
    with sqlite3.connect(here / "data" / "nearveil" / "ledger.db") as database:
        database.execute("UPDATE nearveil_entry SET kind = char(27) || '[31mopened'")
    database.close()
    assert "\x1b" not in run("history").output
    assert "\x1b" not in run("verify").output


def test_examples_are_in_the_help() -> None:
    for command in ("create", "show", "preview", "quota", "history", "export", "verify", "backup"):
        assert f"nearveil budget {command}" in fine(command, "--help")


def test_a_database_that_is_not_there_is_said_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearveil.cli._options.DATABASE_TIMEOUT", 0.3)  # seconds that it is tried for
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]  # nobody listens there afterwards
    found = CliRunner().invoke(app, ["budget", "show", "--ledger", f"postgresql://me@127.0.0.1:{port}/{tmp_path.name}"])
    assert found.exit_code == 1
    assert "connection refused" in " ".join(found.output.split())
