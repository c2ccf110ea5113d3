import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nearveil.cli import app
from tests.programs import Program

from .galleries import fine, told

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
    text = _plan("--items", "1000", "--epsilon", "1", "--answer", "4MiB")
    assert "message: none." in text
    assert "epsilon is 0" in text
    assert "99-100%" in text
    assert "--epsilon 1" not in text
    assert " 0 bytes" not in text


def test_every_command_that_is_printed_runs(here: Path) -> None:
    pytest.importorskip("fastapi")
    rows = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)
    np.save("all.npy", rows)
    np.save("one.npy", rows[7])
    Path("TOKEN").touch(0o600)
    Path("TOKEN").write_text(fine("token", "create", "ann").splitlines()[0])
    ways = json.loads(_plan("--items", "60", "--epsilon", "3", "--dimension", "8", "--json"))["ways"]
    assert [way["name"] for way in ways] == ["home", "sealed", "message"]
    for way in (ways[0], ways[2]):  # a sealed index takes seconds to make, and differs in the option alone
        url, server = "", None
        for line in way["commands"]:
            names = {"DIR": "all.npy", "GALLERY": way["name"], "IMAGE": "one.npy", "URL": url}
            words = [names.get(word, word) for word in line.split()][1:]
            if words[0] == "serve":
                variables = {**os.environ, "NEARVEIL_SERVER_SHUTDOWN_DELAY": "0"}
                server = Program("-m", "nearveil", *words, "--port", "0", cwd=here, env=variables)
                url = server.stdout.readline().split()[-1]
            elif words[0] == "query":
                found = told(*words)
            else:
                fine(*words)
        assert server is not None
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        server.stdout.close()
        assert found["epsilon"] == found["paid"] == way["epsilon"]
        assert len(found["found"]) == (6 if way["name"] == "message" else 8)


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
