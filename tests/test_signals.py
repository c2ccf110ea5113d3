"""The tests hear Ctrl-C wherever they are started: with `nohup`, by cron, or in a process of xdist."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_TEST = """
import multiprocessing, signal, subprocess, sys

def test_ctrl_c_is_heard_here_and_in_children():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    code = "import signal; signal.raise_signal(signal.SIGINT)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True)
    fork = multiprocessing.get_context("forkserver").Process(target=signal.raise_signal, args=(signal.SIGINT,))
    fork.start()
    fork.join()
    assert (child.returncode, fork.exitcode) == (-signal.SIGINT, 1)
"""


@pytest.mark.parametrize("options", [[], ["-n", "1", "--dist", "loadfile"]], ids=["alone", "xdist"])
def test_ctrl_c_is_heard_where_the_parent_ignores_it(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_child.py").write_text(_TEST)
    ignoring = "import os, signal, sys; signal.signal(2, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    pytest_line = [sys.executable, "-m", "pytest", "-q", "--disable-plugin-autoload", "-p", "xdist", "-p", "conftest"]
    place = ["-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path / "test_child.py")]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", ignoring, *pytest_line, *options, *place],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
