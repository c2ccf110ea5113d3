"""The commands as a whole: they start at once, and their summaries are true."""

import io
import re
import subprocess
import sys
import time

import pytest
from rich.console import Console
from typer import Exit
from typer.testing import CliRunner

from nearveil.cli import _output, app
from nearveil.progress import start_stage
from tests.cli.galleries import refused, run

HEAVY = {"numpy", "scipy", "sklearn", "faiss", "sqlalchemy", "fastapi", "httpx", "matplotlib", "dp_accounting", "torch"}


@pytest.mark.parametrize("line", ["--version", "--help", "query --help", "budget create --help"])
def test_nothing_heavy_is_imported_for(line: str) -> None:
    code = f"import sys; from nearveil.cli import app\ntry: app({line.split()})\nexcept SystemExit: print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout  # noqa: S603
    assert not HEAVY & set(loaded.split())


def test_a_misspelt_command_is_understood() -> None:
    result = CliRunner().invoke(app, ["budgt"])
    assert result.exit_code == 2
    assert "Did you mean 'budget'" in result.output


def test_a_bar_is_there_before_there_is_anything_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(_output, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    with _output.show_bars() as start:
        assert "Getting ready" in screen.getvalue()
        tick = start("Making features", 2)
        tick(1)
        assert "Making features" in screen.getvalue()


def test_without_a_terminal_lines_say_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also during a long call that never ticks."""
    screen, interval = io.StringIO(), 0.05
    monkeypatch.setattr(_output, "Console", lambda **_: Console(file=screen, width=100))
    monkeypatch.setattr(_output, "_PROGRESS_INTERVAL", interval)
    with _output.show_bars() as start:
        start("reading", 4)(3)
        time.sleep(4 * interval)
        start_stage("learning")
        time.sleep(4 * interval)
    lines = screen.getvalue().splitlines()
    assert set(lines) == {"reading: 75%, 0 s", "learning: 0 s"}
    assert len(lines) < 10
    time.sleep(2 * interval)
    assert screen.getvalue().splitlines() == lines  # nothing after the command


@pytest.mark.parametrize(("level", "expected"), [(-1, ""), (0, ""), (1, "Getting ready: 0.0 s\nreading: 0.0 s\n")])
def test_verbosity_prints_the_seconds_of_stages(level: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(_output, "Console", lambda **_: Console(file=screen, width=100))
    _output.set_verbosity(level)
    with _output.show_bars() as start:
        start("reading", None)
    _output.set_verbosity(0)
    assert screen.getvalue() == expected


def test_errors_that_have_no_file_are_told_in_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed (the extra `cluster`)")
    words = ("index", "none.npy", "--cluster", "tls://127.0.0.1:1")
    said = refused(*words)
    assert said.startswith("Error: --cluster: tls://127.0.0.1:1 cannot be reached without certificates: give --ca")
    noted = ValueError("a row is wrong")
    noted.add_note("nothing was deleted")
    for error, told in (
        (noted, "Error: a row is wrong; nothing was deleted"),
        (OSError("timed out"), "Error: timed out"),
        (FileNotFoundError(2, "No such file or directory", "a.npy"), "Error: a.npy: No such file or directory"),
    ):
        screen = io.StringIO()
        monkeypatch.setattr(_output, "Console", lambda file=screen, **_: Console(file=file, width=100))
        with pytest.raises(Exit), _output.report_errors():
            raise error
        assert screen.getvalue() == f"{told}\n"


@pytest.mark.parametrize("where", [(), ("--cluster", "local:1"), ("--cluster", "tcp://127.0.0.1:1")])
def test_certificates_that_nobody_would_use_are_refused(where: tuple[str, ...]) -> None:
    assert "--ca, --cert, --cert-key: only for a --cluster at tls://" in refused(
        "index", "a.npy", "--ca", "ca.pem", *where
    )


@pytest.mark.parametrize(
    "words",
    [
        ("mechanisms",),
        ("plan", "--items", "100000", "--epsilon", "4", "-v", "--mechanism", "privunit"),
        ("plan", "--items", "100000", "--epsilon", "0.00001"),
        ("cost", "500x0.5", "--sets", "20"),
        ("budget", "show", "camera"),
        ("budget", "history"),
        ("study",),
        ("audit", "--list"),
    ],
    ids=" ".join,
)
def test_output_breaks_no_word_in_a_terminal_of_80_columns(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich prints as to a terminal
    if words[0] == "budget":
        run("budget", "create", "camera", "--owner", "me", "--epsilon", 4)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = re.sub(r"\x1b\[[\d;]*m", "", run(*words).stdout)
    monkeypatch.setenv("COLUMNS", "400")
    wide = re.sub(r"\x1b\[[\d;]*m", "", run(*words).stdout)
    assert max(map(len, narrow.splitlines())) <= 80
    frames = "│┃─━┏┓┗┛┡┩└┘┌┐┬┴┼╇┳\\█▒░"
    pieces = (re.sub(r"([/.])", r"\1 ", re.sub(f"[{frames}]", " ", text)) for text in (narrow, wide))  # of names, too
    in_narrow, in_wide = (set(text.split()) for text in pieces)
    assert in_wide <= in_narrow
