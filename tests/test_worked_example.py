"""The diff in the architecture page adds a mechanism, and everything that reads the registry knows it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIFF = ROOT / "docs" / "examples" / "mechanism.diff"
_USE = """
from nearveil.audit.registry import list_mechanisms
from nearveil.mechanisms.catalog import describe_mechanisms


def test_anchor_is_known():
    (found,) = (one for one in describe_mechanisms() if one.name == "anchor")
    assert (found.sound, found.kind) == (True, "pure"), found
    assert {"nearveil.mechanisms.NearestAnchor"} <= {one.subject for one in list_mechanisms() if one.name == "anchor"}
"""


def test_a_mechanism_is_added_in_at_most_three_files(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(DIFF)], cwd=tmp_path, check=True)  # noqa: S603, S607
    assert DIFF.read_text().count("\ndiff --git") + 1 <= 3
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}:{tmp_path}:{ROOT}"}
    alone = ["-q", "-p", "no:cacheprovider", "--disable-plugin-autoload"]
    (tmp_path / "tests" / "test_use.py").write_text(_USE)
    tests = ["-m", "pytest", *alone, "tests/test_use.py", "tests/mechanisms/test_freezing.py", "-k", "anchor"]
    ruff = ["-m", "ruff", "check", "--isolated", "--select", "E,F,I", "--line-length", "120", "src/nearveil/mechanisms"]
    for arguments in (ruff, tests):
        done = subprocess.run(  # noqa: S603
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
