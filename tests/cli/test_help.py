"""Help of every command: it fits 80 columns, breaks no word, and speaks of no Python types."""

import re
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from nearveil.cli import app


def list_commands(group: Any = None, *names: str) -> list[tuple[str, ...]]:
    group = group or get_command(app)
    paths: list[tuple[str, ...]] = [names]
    for name, command in getattr(group, "commands", {}).items():
        paths += list_commands(command, *names, name)
    return paths


COMMANDS = list_commands()


def show_help(path: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(app, [*path, "-h"], prog_name="nearveil")
    assert result.exit_code == 0, result.output
    return str(result.output).splitlines()


def split_words(lines: list[str]) -> set[str]:
    text = " ".join(line for line in lines if not line.startswith(("╭", "╰")))
    return set(re.sub(r"[│\\]", " ", text).split())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_fits_80_columns(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = show_help(path, 80, monkeypatch)
    assert max(map(len, narrow)) <= 80
    assert split_words(narrow) == split_words(show_help(path, 300, monkeypatch))
    text = "\n".join(narrow)
    assert not re.search(r"<(bool|path|str|int|float|list)|\[\[|\{[A-Z]|<=", text)
    assert ("--quiet" in text and "--verbose" in text) or path in [(), ("budget",), ("token",)]


def test_certificates_have_one_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [word for path in COMMANDS for word in split_words(show_help(path, 300, monkeypatch))]
    spellings = {word for word in options if word.startswith("--") and re.search(r"cert|\bca\b|tls", word)}
    assert spellings == {"--ca", "--cert", "--cert-key"}


def test_every_command_with_a_result_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those that run until they are stopped."""
    plain = {path for path in COMMANDS if "--json" not in split_words(show_help(path, 300, monkeypatch))}
    assert plain == {(), ("budget",), ("token",), ("serve",), ("ui",), ("mcp",)}


def test_quiet_excludes_verbose() -> None:
    result = CliRunner().invoke(app, ["mechanisms", "-q", "-v"])
    assert result.exit_code == 2
    assert "not together with --verbose" in result.output


def test_values_outside_a_range_are_refused() -> None:
    result = CliRunner().invoke(app, ["plan", "--items", "0", "--epsilon", "4"])
    assert result.exit_code == 2
    assert "must be at least 1" in result.output
