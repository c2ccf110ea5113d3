"""A scheduler of Dask and its workers as plain processes, as an operator would start them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from .certificates import Certificates

distributed: Any = pytest.importorskip("distributed", reason="Dask is not installed (the extra `cluster`)")


# Workers, and those that follow one that was killed, are forked from a process that has imported what they need.
_QUICK = {"DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver"}
_WARM = """
import multiprocessing, distributed.utils
ours = ["nearveil.features", "nearveil.gallery.sync", "nearveil.private_knn.neighbors", "tests.cluster.stages"]
multiprocessing.get_context("forkserver").set_forkserver_preload(["distributed", *ours])
distributed.utils._forkserver_preload_set = True
"""


class Processes:
    """Starts and ends the processes of a cluster, which speak TLS where there are certificates."""

    def __init__(self, folder: Path, count: int, certificates: Certificates | None = None) -> None:
        self._folder, self._tls, security = folder, tuple[str, ...](), None
        if certificates is not None:
            self.certificates = certificates
            ca, cert, key = map(str, certificates)
            self._tls = ("--tls-ca-file", ca, "--tls-cert", cert, "--tls-key", key)
            files = {"tls_ca_file": ca, "tls_client_cert": cert, "tls_client_key": key}
            security = distributed.Security(require_encryption=True, **files)
        self._children: list[subprocess.Popen[bytes]] = []
        self.scheduler = self._start_scheduler(0)
        self.address = str(json.loads(self._place.read_text())["address"])
        self.add_workers(count)
        self.client: Any = distributed.Client(self.address, security=security, set_as_default=False)
        self.client.wait_for_workers(count, timeout=60)

    @property
    def _place(self) -> Path:
        return self._folder / "scheduler.json"

    def _start_scheduler(self, port: int) -> "subprocess.Popen[bytes]":
        self._place.unlink(missing_ok=True)
        protocol = "tls" if self._tls else "tcp"
        where = ("--protocol", protocol, "--host", "127.0.0.1", "--port", str(port))
        child = self._start("scheduler", *where, "--scheduler-file", str(self._place))
        deadline = time.monotonic() + 60
        while not (self._place.exists() and self._place.stat().st_size):
            assert child.poll() is None, "the scheduler does not start"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return child

    def restart_scheduler(self) -> None:
        """Kill the scheduler with -9, and start another at the same address."""
        self.scheduler.kill()
        self.scheduler.wait()
        self.scheduler = self._start_scheduler(int(self.address.rpartition(":")[2]))

    def add_workers(self, count: int = 1) -> None:
        """Start workers under nannies, which start others when they die."""
        where = ("--scheduler-file", str(self._place), "--local-directory", str(self._folder), "--host", "127.0.0.1")
        self._start("worker", *where, "--nworkers", str(count), "--nthreads", "1", "--preload-nanny", _WARM)

    def stop_workers(self) -> None:
        """End all workers and their nannies, and wait until the scheduler knows."""
        for child in self._children:
            if child is not self.scheduler:
                child.terminate()
        while self.client.nthreads():
            time.sleep(0.02)

    def _start(self, kind: str, *options: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *options, *self._tls, "--no-dashboard"]
        log = (self._folder / f"{kind}-{len(self._children)}.log").open("wb")
        child = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **_QUICK})  # noqa: S603
        log.close()
        self._children.append(child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.client.close()
        for child in reversed(self._children):
            child.terminate()
        for child in self._children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
