"""The demonstration from words and photographs to a contact sheet and the command of the page."""

import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("skimage")
pytest.importorskip("fastapi")

from nearveil import Client, Index
from nearveil.features import load_image
from studies import demo
from studies.pictures import PHOTOGRAPHS, SIDE, cut_details
from studies.serving import serve_on_loopback
from tests.clocks import hurry


def test_the_demonstration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hurry(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(demo, "DETAILS", 10)
    (tmp_path / "demo" / "private").mkdir(parents=True)  # files of an earlier run are replaced
    demo.main(["--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[  0 s] Load the library")
    text = " ".join(" ".join(lines).split())
    assert text.count("clinic, medical, hospitals, nursing") >= 2  # the copy and the sealed query
    table = text[text.index("kB once") :]
    rows = re.findall(r"(local copy|sealed query|message) .*? [04] (\d\.\d\d) ", table)
    recall = {way: float(value) for way, value in rows}
    assert recall["local copy"] > 0.95
    assert recall["sealed query"] > 0.9
    assert 0.2 < recall["message"] < 0.95
    assert re.search(
        r"local copy nothing 0 .* sealed query noise (\w\w ?){2}\.\.\. 0 .* message set \d+ of 13 4 ", text
    )
    assert "budget epsilon 4 at delta 0, spent 4, left 0; this costs 4; nothing was spent" in text
    assert "44 entries of 2 accounts checked: all is well" in text
    out = tmp_path / "demo"
    assert load_image(out / "photo.png").shape == (600, 1560, 3)
    command = shlex.split(next(line for line in lines if line.startswith("    ") and " ui " in line))
    assert command[1:] == ["ui", "--index", str(out / "gallery"), "--ledger", str(out / "budget.db")]
    with Client(out / "gallery") as client:
        assert sorted(client.galleries()[0].candidates) == [0.1, 0.2]
        found = client.nearest(out / "private" / "rocket.png", 5)
    assert {match.name.partition("/")[0] for match in found.matches} == {"rocket"}


def test_details_are_the_same_each_time() -> None:
    for name in PHOTOGRAPHS:
        first, second = (next(cut_details(name, 1)) for _ in range(2))
        assert first.shape == (SIDE, SIDE, 3)
        assert np.array_equal(first, second)
        assert first.std() > 5  # something can be seen


def test_a_server_that_does_not_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="did not start: exit code 1"), serve_on_loopback(tmp_path / "nothing"):
        pass
    assert "No index at" in capfd.readouterr().err


def test_a_server_stops_with_its_context(tmp_path: Path) -> None:
    with Index.create(tmp_path / "index", dimension=20) as index:
        index.add_table(np.random.default_rng(0).standard_normal((100, 20)))
        index.publish(4.0)
    with serve_on_loopback(tmp_path / "index") as server:
        os.kill(server.process, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(server.process, 0)
