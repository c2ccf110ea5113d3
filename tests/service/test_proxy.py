"""The proxy as it is shipped: Caddy with deploy/Caddyfile before a server, on loopback."""

import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from nearveil import Client
from nearveil.ledger import Ledger
from nearveil.server import Settings
from nearveil.wire.frames import Kind

from ..gallery.index_places import unit_rows
from .serving import EPSILON, index_of
from .test_serve import Process, started
from .test_signals import free_port

REQUEST = "nearveil-request"  # the header of every answer of a server
CADDYFILE = Path(__file__).parents[2] / "deploy" / "Caddyfile"


@contextmanager
def run_caddy(folder: Path, upstream: int, management: int) -> Iterator[str]:
    """Run Caddy with the shipped file before a port of loopback; yield its URL. Its certificate is cert.pem."""
    caddy, openssl = shutil.which("caddy"), shutil.which("openssl")
    if caddy is None or openssl is None:
        pytest.skip("caddy or openssl is not installed: apt-get install caddy openssl")
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    more = "-addext subjectAltName=DNS:localhost -keyout key.pem -out cert.pem"
    subprocess.run([openssl, *command.split(), *more.split()], cwd=folder, check=True, capture_output=True)  # noqa: S603
    port = free_port()
    variables = {
        "NEARVEIL_SITE": "localhost",
        "NEARVEIL_UPSTREAMS": f"127.0.0.1:{upstream}",
        "NEARVEIL_MANAGEMENT_PORT": str(management),
        "NEARVEIL_HTTPS_PORT": str(port),
        "NEARVEIL_TLS": f"tls {folder / 'cert.pem'} {folder / 'key.pem'}",
        "XDG_DATA_HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
    }
    words = [caddy, "run", "--config", str(CADDYFILE), "--adapter", "caddyfile"]
    with (folder / "caddy.log").open("w") as log:
        running = subprocess.Popen(words, env={**os.environ, **variables}, stderr=log)  # noqa: S603
        try:
            until = time.monotonic() + 30
            while not is_open(port):
                assert running.poll() is None, (folder / "caddy.log").read_text()
                assert time.monotonic() < until, (folder / "caddy.log").read_text()
                time.sleep(0.05)
            yield f"https://localhost:{port}"
        finally:
            running.terminate()
            running.wait(20)


@dataclass
class Proxy:
    url: str
    certificate: Path
    server: Process
    management_port: int


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder, management_port = tmp_path_factory.mktemp("proxy"), free_port()
    index_of(folder / "birds").close()
    server = started(folder, "birds", MANAGEMENT_PORT=str(management_port))
    try:
        with run_caddy(folder, server.port, management_port) as url:
            yield Proxy(url, folder / "cert.pem", server, management_port)
    finally:
        server.end()


def is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def browser(proxy: Proxy) -> Iterator[httpx.Client]:
    """Return an HTTP client with a token that trusts the proxy's certificate."""
    context = ssl.create_default_context(cafile=proxy.certificate)
    headers = {"authorization": f"Bearer {proxy.server.secret}"}
    with httpx.Client(base_url=proxy.url, verify=context, headers=headers, timeout=30) as client:
        yield client


def test_a_client_works_through_the_proxy(proxy: Proxy, tmp_path: Path) -> None:
    with Ledger(tmp_path / "budget.db") as ledger:
        account = ledger.open_account(
            "mine", owner="me", protects="query", unit="image", relation="replace", epsilon=10.0, delta=0.0
        )
        with Client(proxy.url, proxy.server.secret, ca=proxy.certificate, account=account) as client:
            assert [gallery.name for gallery in client.galleries()] == ["birds"]
            assert client.nearest(unit_rows(1)[0], 3, EPSILON).matches


@pytest.mark.parametrize(
    "path",
    ["/health", "/ready", "/metrics", "/openapi.json", "/", "/HEALTH", "//health", "/%68ealth", "/v1/../health"],
)
def test_nobody_outside_reaches_what_is_for_operators(browser: httpx.Client, path: str) -> None:
    reply = browser.get(path)
    assert (reply.status_code, REQUEST in reply.headers) == (404, False)  # the server was not asked


class Reader(BaseHTTPRequestHandler):
    """Reads every body to its end, as no server of ours would."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        left = int(self.headers["content-length"])
        while left and (part := self.rfile.read(min(left, 1 << 16))):
            left -= len(part)
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_bodies_are_limited_to_what_a_server_takes(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Reader) as upstream:
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        port = upstream.server_port
        with run_caddy(tmp_path, port, port) as url:
            context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
            with httpx.Client(base_url=url, verify=context, timeout=30) as client:
                sealed = Kind.SEALED_QUESTION.frame_limit
                for what, size in (("query", Settings.model_fields["max_body"].default), ("sealed", sealed)):
                    path = f"/v1/galleries/birds/{what}"
                    assert client.post(path, content=bytes(size)).status_code == 200
                    # Caddy 2.6 says 502 where a body ends at its limit.
                    assert client.post(path, content=bytes(size + 1)).status_code in (413, 502)
        upstream.shutdown()


def test_outsiders_do_not_make_health_checks_fail(proxy: Proxy, browser: httpx.Client) -> None:
    for _ in range(200):
        assert browser.get("/health", headers={"authorization": ""}).status_code == 404
    with httpx.Client(base_url=f"http://127.0.0.1:{proxy.management_port}") as probe:
        assert {probe.get("/ready").status_code for _ in range(73)} == {200}
    assert browser.get("/v1/galleries").status_code == 200
