"""Several processes that answer requests of one socket: start, watch, restart and stop them."""

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prometheus_client import multiprocess

from nearveil.server.app import HEARTBEAT_INTERVAL
from nearveil.server.metrics import send_heartbeat
from nearveil.server.settings import Settings, SettingsError

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

_LOG = logging.getLogger(__name__)
_POLL_INTERVAL = 0.2  # seconds
_RESTART_DELAY = 1.0  # seconds
_HEARTBEAT_TIMEOUT = 30.0  # seconds without a heartbeat after which a process is killed
_STARTUP_TIMEOUT = 300.0  # more seconds until the first heartbeat: galleries are opened
CLOSE_TIMEOUT = 2.0  # seconds to close an index or a store
# Serves requests of sockets in this process until a signal stops it. Processes import it by name.
ServeFunction = Callable[..., None]


@dataclass
class Worker:
    """A process that serves; it sends heartbeats while it can work, as `/health` reports."""

    process: BaseProcess
    heartbeat: "Synchronized[float]"  # time of the last one, in shared memory; until the first, the latest for it

    def is_healthy(self) -> bool:
        """Return whether the process has sent a heartbeat recently."""
        return self.process.is_alive() and 0 <= time.monotonic() - self.heartbeat.value < _HEARTBEAT_TIMEOUT

    def kill_if_stuck(self) -> None:
        """Kill the process if a heartbeat is overdue: a stopped process handles no other signal."""
        if time.monotonic() - self.heartbeat.value > _HEARTBEAT_TIMEOUT:
            _LOG.error("a process sent no heartbeat for %g seconds and is restarted", _HEARTBEAT_TIMEOUT)
            self.process.kill()
            self.heartbeat.value = math.inf


def run_workers(
    serve: ServeFunction, sockets: list[socket.socket], settings: Settings, on_ready: Callable[[], None]
) -> None:
    """Run `settings.workers` processes until a signal stops them; restart those that end or get stuck."""
    stop_signals: list[int] = []  # not an event: two signals at once would deadlock
    workers: list[Worker] = []
    with ExitStack() as stack:
        # prometheus_client reads it when it is imported, so it must be set before a process starts.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = stack.enter_context(TemporaryDirectory(prefix="nearveil-metrics-"))
        stack.callback(os.environ.pop, "PROMETHEUS_MULTIPROC_DIR")
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, lambda sig, _: stop_signals.append(sig)))
        stack.callback(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, partial(_forward_signal, workers)))
        start = partial(_start_worker, serve, sockets, settings.for_one_worker())
        workers.extend(start() for _ in range(settings.workers))
        stack.callback(_stop_workers, workers, settings.shutdown_delay + settings.shutdown_grace)
        stack.callback(sockets[0].close)  # then the last process that stops closes the socket
        is_ready, heartbeat_sent = False, -math.inf
        while not stop_signals:
            if not is_ready and all(worker.is_healthy() for worker in workers):
                is_ready = True  # not with the first: the others take its processors while they start
                on_ready()
            is_due = time.monotonic() - heartbeat_sent > HEARTBEAT_INTERVAL
            if is_due and any(worker.is_healthy() for worker in workers):
                send_heartbeat()
                heartbeat_sent = time.monotonic()
            dead = _wait_for_dead(workers)
            if dead and not is_ready:
                raise SettingsError("workers: a process ended before it could answer. See the log")
            if dead:
                time.sleep(_RESTART_DELAY)  # a process that cannot start must not be restarted in a busy loop
                workers[:] = [start() if worker in dead else worker for worker in workers]


def _start_worker(serve: ServeFunction, sockets: list[socket.socket], settings: Settings) -> Worker:
    context = get_context("spawn")
    heartbeat = context.Value("d", time.monotonic() + _STARTUP_TIMEOUT, lock=False)
    process = context.Process(target=_run_worker, args=(serve, sockets, settings, heartbeat), daemon=True)
    # Ctrl-C reaches all processes of a terminal. Workers inherit blocked signals: they stop when this process stops
    # them, and unblock SIGHUP when they can handle it. To start Python's resource tracker unblocks SIGINT: start it
    # before.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGHUP))
    return Worker(process, heartbeat)


def _run_worker(
    serve: ServeFunction, sockets: list[socket.socket], settings: Settings, heartbeat: "Synchronized[float]"
) -> None:
    """Serve in this process until its parent stops it or dies."""
    threading.Thread(target=_stop_with_parent, daemon=True).start()

    def beat() -> None:
        heartbeat.value = time.monotonic()  # one clock for all processes of a machine

    serve(sockets, settings, send_heartbeat=beat)
    os._exit(0)  # everything is closed; a regular exit would collect all objects, for a second or more


def _stop_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _forward_signal(workers: list[Worker], number: int, _: object) -> None:
    for worker in workers:
        if worker.process.pid is not None and worker.process.is_alive():
            os.kill(worker.process.pid, number)


def _wait_for_dead(workers: list[Worker]) -> list[Worker]:
    """Wait for a moment; kill workers that are stuck, and return those that have ended."""
    connection.wait([worker.process.sentinel for worker in workers], timeout=_POLL_INTERVAL)
    for worker in workers:
        worker.kill_if_stuck()
    dead = [worker for worker in workers if not worker.process.is_alive()]
    for worker in dead:
        multiprocess.mark_process_dead(worker.process.pid)  # type: ignore[no-untyped-call]
    return dead


def _stop_workers(workers: list[Worker], grace: float) -> None:
    """Let processes finish requests in flight; kill those that take too long."""
    for worker in workers:
        worker.process.terminate()
    end = time.monotonic() + grace + 2 * CLOSE_TIMEOUT
    for worker in workers:
        worker.process.join(max(0.1, end - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
