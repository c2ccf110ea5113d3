"""TLS between all processes of a cluster, a scheduler that is killed, and the topology of deploy/compose.yaml."""

import datetime
import ipaddress
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest

from nearveil.cluster import ClusterError, connect
from nearveil.gallery import Index
from nearveil.ledger import Ledger
from nearveil.service import Client, TokenStore
from nearveil.service.client.errors import UnansweredError, UnreachableError
from tests.cli.galleries import fine
from tests.gallery.index_places import index_server, index_url, unit_rows
from tests.ledger.postgres import Postgres
from tests.programs import Program

from . import stages
from .processes import Processes, distributed

__all__ = ["index_server", "index_url"]  # fixtures
PARTS = [np.full(10, number) for number in range(8)]
TOTALS = [10.0 * number + 3 for number in range(8)]


def write_certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Write an authority, a certificate that it signed for this machine, and the key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder.mkdir()
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("authority", "worker")]
    now = datetime.datetime.now(datetime.UTC)
    made = []
    for name, key, is_authority in zip(names, keys, (True, False), strict=True):
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(names[0]).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(1))
        builder = builder.not_valid_after(now + datetime.timedelta(1))
        builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        host = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        made.append(
            builder.add_extension(x509.SubjectAlternativeName([host]), critical=False).sign(keys[0], hashes.SHA256())
        )
    pem = serialization.Encoding.PEM
    places = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
    plain = (serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    texts = made[0].public_bytes(pem), made[1].public_bytes(pem), keys[1].private_bytes(pem, *plain)
    for place, text in zip(places, texts, strict=True):
        place.write_bytes(text)
    return places


def test_tls_between_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca, cert, key = write_certificates(tmp_path / "ours")
    options = ("--tls-ca-file", str(ca), "--tls-cert", str(cert), "--tls-key", str(key))
    files = {"tls_ca_file": str(ca), "tls_client_cert": str(cert), "tls_client_key": str(key)}
    security = distributed.Security(require_encryption=True, **files)
    folder = tmp_path / "cluster"
    folder.mkdir()
    with Processes(folder, 1, tls=options, security=security) as processes:
        assert processes.address.startswith("tls://127.0.0.1:")
        (worker,) = processes.client.nthreads()
        assert worker.startswith("tls://")
        with connect(processes.address, ca=ca, cert=cert, key=key) as found:
            assert list(found.map(stages.add, found.place(PARTS), np.ones(3), stage="adding")) == TOTALS
        others = write_certificates(tmp_path / "theirs")
        wrong: list[dict[str, Any]] = [{}, dict(zip(("ca", "cert", "key"), others, strict=True))]
        for given in wrong:
            with pytest.raises(ClusterError, match="cannot be reached"), connect(processes.address, **given):
                pass
        with pytest.raises(ClusterError), connect(processes.address.replace("tls", "tcp")):
            pass
        rows = unit_rows(60)
        np.save(tmp_path / "emb.npy", rows)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        words = ("--cluster", processes.address, "--ca", ca, "--cert", cert, "--key", key)
        said = fine("index", "emb.npy", "--into", "texts", "--sets", 3, "--candidates", 0.2, *words)
        assert "60 (60 added, 0 deleted)" in said


def test_a_scheduler_that_is_killed(tmp_path: Path) -> None:
    """What was under way is done again by the next one, or one error says that the cluster was lost."""
    with Processes(tmp_path, 1) as processes, connect(processes.client) as found:
        results = found.map(stages.wait_and_add, found.place(PARTS), np.ones(3), stage="adding")
        done = [next(results)]
        processes.restart_scheduler()
        processes.add_worker()
        try:
            done += results
        except ClusterError as error:
            assert "lost while adding" in str(error)
            assert done == TOTALS[: len(done)]
        else:
            assert done == TOTALS


def new_schema(server: Postgres) -> str:
    name = f"s{uuid.uuid4().hex}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
    return f"{server.url()}&options=-csearch_path%3D{name}"


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


def test_servers_on_one_postgresql_are_killed_and_added_under_load(
    workers: Any, index_url: str, index_server: Postgres, start_server: tuple[Callable[[], Program], str]
) -> None:
    """A map is learned on the cluster and published meanwhile; no debit is lost, none is made twice.

    Where a server is killed after a question was paid for and the map is another one before it is asked again, that
    key is of no more use, as the client says: a new one pays anew.
    """
    start, secret = start_server
    rows, asked, clients = unit_rows(120), 36, 3
    with Index.create(index_url, dimension=12) as index:
        index.add_table(rows)
        index.publish(4.0, 0.2, n_sets=3, cluster=workers)
        servers = [start(), start()]
        urls = [one.stdout.readline().split()[-1] for one in servers]
        ledger_url, done, paid, lock = new_schema(index_server), list[str](), list[str](), threading.Lock()
        Ledger(ledger_url).close()

        def ask(worker: int) -> None:
            with Ledger(ledger_url) as ledger:
                account = ledger.open_account(
                    f"client {worker}", owner="me", protects="query", unit="text", relation="replace",
                    epsilon=400.0, delta=0.0,
                )  # fmt: skip
                for number in range(asked // clients):
                    key, turn = f"key-{worker}-{number}-of-a-client", number + worker
                    until = time.monotonic() + 60
                    while True:  # as a proxy does: another server, the same key
                        turn += 1
                        assert time.monotonic() < until
                        try:
                            with Client(urls[turn % len(urls)], secret, account=account, extractor=None) as client:
                                assert len(client.nearest(rows[number], k=3, key=key).matches) == 3
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
            urls[0] = start().stdout.readline().split()[-1]
            index.publish(4.0, 0.2, n_sets=4, cluster=workers)
            for one in under_way:
                one.result()
    assert len(done) == len(set(done)) == asked
    with Ledger(ledger_url) as ledger:
        for worker in range(clients):
            entries = ledger.account(f"client {worker}").history()
            debits = sum(entry.kind == "debit" for entry in entries)
            assert debits == sum(key.startswith(f"key-{worker}-") for key in paid)
