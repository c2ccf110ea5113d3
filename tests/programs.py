"""Programs in processes of their own that begin at once.

They are forked from a process that has imported what most of them need: to import it anew takes longer than all that
they do in a test. How a program begins is tested with `subprocess`.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Self

import nearveil.__main__
import nearveil.cli._server
import nearveil.client.transport
import nearveil.server.protected
import nearveil.server.serving
from nearveil.ledger import Ledger

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["pytest", "sqlalchemy.dialects.postgresql.psycopg", "psycopg", __name__])

with TemporaryDirectory() as _folder:  # what a first ledger imports is imported once, in the fork server
    Ledger(Path(_folder) / "warm.db").close()


class Program:
    """A program of Python that runs, with the words of `subprocess.Popen`.

    Parameters
    ----------
    *words : str
        ``"-m", "nearveil"`` or ``"-c", CODE``, and what it is told.
    env : mapping, optional
    cwd : Path, optional
    quiet : bool, default=False
        Whether nobody hears what it says of errors.
    """

    def __init__(
        self, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, quiet: bool = False
    ) -> None:
        reading, writing = PROCESSES.Pipe(duplex=False)
        told = (writing, words, dict(os.environ if env is None else env), str(cwd or Path.cwd()), quiet)
        self._process = PROCESSES.Process(target=_run, args=told)
        self._process.start()
        writing.close()
        self.stdout = os.fdopen(os.dup(reading.fileno()), encoding="utf-8")
        reading.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def read(self, timeout: float) -> str:
        """Return all that it says, when it has ended."""
        with self:
            text = self.stdout.read()
            self.wait(timeout)
            return text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.stdout.close()
        self.wait()


def _run(out: Connection, words: tuple[str, ...], env: dict[str, str], cwd: str, quiet: bool) -> None:
    """Become a program, in the process of its own."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    os.dup2(out.fileno(), 1)
    out.close()
    if quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    how, what, *rest = words
    sys.argv = [what if how == "-m" else how, *rest]
    if how == "-m":
        assert what == "nearveil"
        sys.modules["__main__"] = nearveil.__main__
        nearveil.__main__.main()
    else:
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(what, "<program>", "exec"), module.__dict__)  # noqa: S102 - a test's own
