"""Signals to a server that runs: SIGTERM resets no connection, SIGHUP reloads the certificate."""

import json
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import httpx
import pytest

from .serving import index_of
from .test_serve import Process, started

CLIENTS = 16


def ask_until_refused(process: Process, counts: Counter[str], until: float) -> None:
    """Ask on one connection, and on a new one when the server closes it, until nobody listens any more."""
    headers = {"authorization": f"Bearer {process.secret}"}
    connection = HTTPConnection("127.0.0.1", process.port, timeout=30)
    while time.monotonic() < until:
        try:
            connection.request("GET", "/v1/galleries", headers=headers)
            reply = connection.getresponse()
            reply.read()
        except ConnectionRefusedError:
            counts["refused"] += 1
            break
        except (OSError, HTTPException):
            counts["reset"] += 1
            connection.close()
            continue
        counts[f"{reply.status} {reply.headers.get('connection', 'keep-alive')}"] += 1
    connection.close()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_clients_that_go_on_asking_during_sigterm_see_no_reset(tmp_path: Path, workers: str) -> None:
    index_of(tmp_path / "birds").close()
    process = started(
        tmp_path, str(tmp_path / "birds"), "--workers", workers, SHUTDOWN_DELAY="0.7", RATE="1e9", BURST="1000000"
    )
    counts: Counter[str] = Counter()
    until = time.monotonic() + 60
    try:
        clients = [threading.Thread(target=ask_until_refused, args=(process, counts, until)) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        while counts["200 keep-alive"] < 3 * CLIENTS:
            time.sleep(0.01)
        process.running.send_signal(signal.SIGTERM)
        for client in clients:
            client.join()
        assert process.running.wait(30) == 0
    finally:
        process.end()
    assert counts["200 close"] >= CLIENTS  # each was told to go elsewhere
    assert counts["refused"] == CLIENTS
    assert set(counts) == {"200 keep-alive", "200 close", "refused"}, counts


def test_a_server_that_stops_is_alive_but_not_ready(tmp_path: Path) -> None:
    index_of(tmp_path / "birds").close()
    process = started(tmp_path, str(tmp_path / "birds"), SHUTDOWN_DELAY="60")
    try:
        assert httpx.get(f"{process.url}/ready").status_code == 200
        process.running.send_signal(signal.SIGTERM)
        until = time.monotonic() + 10
        while (reply := httpx.get(f"{process.url}/ready")).status_code == 200 and time.monotonic() < until:
            time.sleep(0.02)
        assert (reply.status_code, reply.headers["connection"]) == (503, "close")
        assert httpx.get(f"{process.url}/health").status_code == 200
    finally:
        process.end()


def make_certificate(folder: Path, name: str) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj"
    files = ["-keyout", f"{name}-key.pem", "-out", f"{name}.pem"]
    subprocess.run([openssl, *command.split(), f"/CN={name}", *files], cwd=folder, check=True, capture_output=True)  # noqa: S603


def fetch_certificate(process: Process) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", process.port), timeout=10) as plain,
        context.wrap_socket(plain) as secured,
    ):
        return secured.getpeercert(binary_form=True) or b""


def count_lines(process: Process, text: str) -> int:
    log = process.folder / "log.jsonl"
    messages = [json.loads(line).get("message", "") for line in log.read_text().splitlines()] if log.exists() else []
    return sum(text in message for message in messages)


@pytest.mark.parametrize("workers", [1, 2])
def test_sighup_reloads_the_certificate_and_keeps_it_if_the_new_one_is_bad(tmp_path: Path, workers: int) -> None:
    for name in ("first", "second"):
        make_certificate(tmp_path, name)
    first, second = (ssl.PEM_cert_to_DER_cert((tmp_path / f"{name}.pem").read_text()) for name in ("first", "second"))
    shutil.copy(tmp_path / "first.pem", tmp_path / "cert.pem")
    shutil.copy(tmp_path / "first-key.pem", tmp_path / "key.pem")
    index_of(tmp_path / "birds").close()
    tls = ("--cert", "cert.pem", "--cert-key", "key.pem")
    process = started(tmp_path, "birds", *tls, "--workers", str(workers))

    def reload(expected: str, count: int) -> None:
        process.running.send_signal(signal.SIGHUP)
        until = time.monotonic() + 30
        while count_lines(process, expected) < count and time.monotonic() < until:
            time.sleep(0.05)
        assert count_lines(process, expected) == count

    try:
        assert fetch_certificate(process) == first
        shutil.copy(tmp_path / "second.pem", tmp_path / "cert.pem")  # the key does not fit it
        reload("certificate not reloaded", workers)
        assert {fetch_certificate(process) for _ in range(8)} == {first}
        shutil.copy(tmp_path / "second-key.pem", tmp_path / "key.pem")
        reload("certificate reloaded", workers)
        assert {fetch_certificate(process) for _ in range(8)} == {second}
        process.running.send_signal(signal.SIGTERM)
        assert process.running.wait(30) == 0
    finally:
        process.end()


def test_sighup_without_a_certificate_stops_nothing(tmp_path: Path) -> None:
    index_of(tmp_path / "birds").close()
    process = started(tmp_path, "birds")
    try:
        process.running.send_signal(signal.SIGHUP)
        until = time.monotonic() + 30
        while not count_lines(process, "no certificate") and time.monotonic() < until:
            time.sleep(0.05)
        assert httpx.get(f"{process.url}/health").status_code == 200
    finally:
        process.end()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.mark.parametrize("workers", ["1", "2"])
def test_management_port_serves_probes_alone_whatever_their_host_says(tmp_path: Path, workers: str) -> None:
    index_of(tmp_path / "birds").close()
    port = free_port()
    process = started(tmp_path, "birds", "--workers", workers, MANAGEMENT_PORT=str(port))
    management, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {process.secret}"}
    try:
        for path in ("/health", "/ready", "/metrics"):
            assert httpx.get(process.url + path, headers=headers).status_code == 404
            by_address = {**headers, "host": f"10.1.2.3:{port}"}  # a probe knows the address of a pod
            assert httpx.get(management + path, headers=by_address).status_code == 200
        assert httpx.get(f"{management}/metrics").status_code == 401
        for path in ("/v1/galleries", "/openapi.json"):
            assert httpx.get(process.url + path, headers=headers).status_code == 200
            assert httpx.get(management + path, headers=headers).status_code == 404
        # Requests of others for the same paths use nothing up that probes need.
        with httpx.Client() as outsider, httpx.Client() as probe:
            while outsider.get(f"{process.url}/openapi.json").status_code == 200:
                pass
            assert {probe.get(f"{management}/health").status_code for _ in range(73)} == {200}
    finally:
        process.end()


def test_management_port_that_is_taken_is_named(tmp_path: Path) -> None:
    from nearveil.server import Settings, serve
    from nearveil.server.settings import SettingsError

    index_of(tmp_path / "birds").close()
    galleries = [{"name": "birds", "index": str(tmp_path / "birds")}]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = Settings.load(galleries=galleries, port=0, management_port=port, tokens=str(tmp_path / "t.db"))
        with pytest.raises(SettingsError, match="management_host, management_port: cannot listen"):
            serve(settings)
