"""TLS between all processes of a cluster, a scheduler that is killed, and the topology of deploy/compose.yaml."""

import signal
import socket
import socketserver
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest

from nearveil import Client, cluster
from nearveil.client.errors import UnansweredError, UnreachableError
from nearveil.cluster import ClusterError, connect
from nearveil.gallery import Index
from nearveil.ledger import Ledger
from nearveil.server import TokenStore
from tests.cli.galleries import fine
from tests.gallery.index_places import index_server, index_url, unit_rows
from tests.ledger.postgres import Postgres
from tests.programs import Program

from . import stages
from .certificates import Certificates
from .processes import Processes

__all__ = ["index_server", "index_url"]  # fixtures
PARTS = [np.full(10, number) for number in range(8)]
TOTALS = [10.0 * number + 3 for number in range(8)]


def test_tls_between_all_processes(processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.address.startswith("tls://127.0.0.1:")
    assert all(worker.startswith("tls://") for worker in processes.client.nthreads())
    ca, cert, key = processes.certificates
    with connect(processes.address, ca=ca, cert=cert, key=key) as found:
        assert list(found.map(stages.add, found.place(PARTS), np.ones(3), stage="adding")) == TOTALS
    wrong: list[dict[str, Any]] = [{}, Certificates.make(tmp_path)._asdict()]
    for given in wrong:
        with pytest.raises(ClusterError, match="cannot be reached"), connect(processes.address, **given):
            pass
    with pytest.raises(ClusterError), connect(processes.address.replace("tls", "tcp")):
        pass
    np.save(tmp_path / "emb.npy", unit_rows(60))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    words = ("--cluster", processes.address, "--ca", ca, "--cert", cert, "--cert-key", key)
    said = fine("index", "emb.npy", "--into", "texts", "--sets", 3, "--candidates", 0.2, "--reach", 0, *words)
    assert "60 (60 added, 0 deleted)" in said


def test_a_scheduler_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was under way is done again by the next one, or one error says that the cluster was lost.

    Where the next one hangs, has no workers or is gone, too, that is told after one wait, not several.
    """
    with Processes(tmp_path, 1) as processes, connect(processes.client) as found:
        results = found.map(stages.wait_and_add, found.place(PARTS), np.ones(3), stage="adding")
        done = [next(results)]
        processes.restart_scheduler()
        processes.add_workers()
        try:
            done += results
        except ClusterError as error:
            assert "lost while adding" in str(error)
            assert done == TOTALS[: len(done)]
        else:
            assert done == TOTALS

        monkeypatch.setattr(cluster, "_WORKER_TIMEOUT", 0.5)
        monkeypatch.setattr(cluster, "_POLL_INTERVAL", 0.1)
        results = found.map(stages.wait_and_add, found.place(PARTS), np.ones(3), stage="adding")
        assert next(results) == TOTALS[0]
        with suspended(processes.scheduler):
            expect_gone(lambda: list(results), caplog)
        processes.stop_workers()
        expect_gone(lambda: found.reduce(stages.add, max, found.place(PARTS), np.ones(3), stage="adding"), caplog)
        processes.scheduler.kill()
        expect_gone(lambda: list(found.map(stages.add, found.place(PARTS), np.ones(3), stage="adding")), caplog)


@contextmanager
def suspended(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    child.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        child.send_signal(signal.SIGCONT)


def expect_gone(work: Callable[[], object], caplog: pytest.LogCaptureFixture) -> None:
    """Run what finds no worker: it says that it waits, and raises one error."""
    caplog.clear()
    with pytest.raises(ClusterError, match=r"^cluster: no worker answered for 0\.5 s while adding: start scheduler"):
        work()
    assert caplog.messages.count("waiting for workers of the cluster while adding") == 1


def new_schema(server: Postgres) -> str:
    name = f"s{uuid.uuid4().hex}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
    return f"{server.url()}&options=-csearch_path%3D{name}"


class Proxy(socketserver.ThreadingTCPServer):
    """Hands each connection to a server in turn, and to the next one where that does not answer."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        self.ports, self.turn = list[int](), 0
        super().__init__(("127.0.0.1", 0), _Connection)

    def connect(self) -> socket.socket:
        """Connect to a server."""
        for _ in range(100):
            self.turn += 1
            with suppress(OSError):
                return socket.create_connection(("127.0.0.1", self.ports[self.turn % len(self.ports)]))
            time.sleep(0.05)
        raise ConnectionError


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Proxy)
        with suppress(OSError), self.server.connect() as there:
            back = threading.Thread(target=self.pass_on, args=(there, self.request), daemon=True)
            back.start()
            self.pass_on(self.request, there)
            back.join()

    @staticmethod
    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as found:
        threading.Thread(target=found.serve_forever, args=(0.05,), daemon=True).start()
        yield found
        found.shutdown()


@pytest.fixture
def start_server(index_url: str, index_server: Postgres) -> Iterator[tuple[Callable[[], Program], str]]:
    """What starts a server of the index, and the token for it."""
    tokens, running = new_schema(index_server), list[Program]()
    with TokenStore(tokens) as store:
        secret = store.create("ann")[1]

    def start() -> Program:
        words = ("serve", index_url, "--port", "0", "--tokens", tokens)
        running.append(Program("-m", "nearveil", *words, quiet=True))
        return running[-1]

    yield start, secret
    for one in running:
        with one:
            one.kill()


def read_port(server: Program) -> int:
    return int(server.stdout.readline().rpartition(":")[2])


def test_servers_on_one_postgresql_are_killed_and_added_under_load(
    workers: Any, index_url: str, index_server: Postgres, start_server: tuple[Callable[[], Program], str], proxy: Proxy
) -> None:
    """The topology of deploy/compose.yaml: a scheduler and workers with TLS, PostgreSQL, two servers, a proxy.

    A map is learned on the cluster and published meanwhile; no debit is lost, none is made twice. Where a server is
    killed after a question was paid for and the map is another one before it is asked again, that key is of no more
    use, as the client says: a new one pays anew.
    """
    start, secret = start_server
    rows, asked, clients = unit_rows(120), 36, 3
    with Index.create(index_url, dimension=12) as index:
        index.add_table(rows)
        index.publish(4.0, 0.2, n_sets=3, reach=0.0, cluster=workers)
        servers = [start(), start()]
        proxy.ports = [read_port(one) for one in servers]
        url = f"http://127.0.0.1:{proxy.server_address[1]}"
        ledger_url, done, paid, lock = new_schema(index_server), list[str](), list[str](), threading.Lock()
        Ledger(ledger_url).close()

        def ask(worker: int) -> None:
            with Ledger(ledger_url) as ledger:
                account = ledger.open_account(
                    f"client {worker}", owner="me", protects="query", unit="text", relation="replace",
                    epsilon=400.0, delta=0.0,
                )  # fmt: skip
                for number in range(asked // clients):
                    key, until = f"key-{worker}-{number}-of-a-client", time.monotonic() + 60
                    while True:
                        assert time.monotonic() < until
                        try:
                            with Client(url, secret, account=account, extractor=None) as client:
                                assert len(client.nearest(rows[number], epsilon=4.0, k=3, key=key).matches) == 3
                            break
                        except (UnreachableError, UnansweredError) as error:
                            if "another map" in str(error):
                                with lock:
                                    paid.append(key)
                                key = f"{key}-again"
                    with lock:
                        done.append(key)
                        paid.append(key)

        with ThreadPoolExecutor(clients) as pool:
            under_way = [pool.submit(ask, worker) for worker in range(clients)]
            while len(done) < asked // 4 and not any(one.done() for one in under_way):
                time.sleep(0.02)
            servers[0].kill()
            proxy.ports[0] = read_port(start())
            index.publish(4.0, 0.2, n_sets=4, reach=0.0, cluster=workers)
            for one in under_way:
                one.result()
    assert len(done) == len(set(done)) == asked
    with Ledger(ledger_url) as ledger:
        for worker in range(clients):
            entries = ledger.account(f"client {worker}").history()
            debits = sum(entry.kind == "debit" for entry in entries)
            assert debits == sum(key.startswith(f"key-{worker}-") for key in paid)
