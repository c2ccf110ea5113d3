"""A server as it runs: a process of its own, with clients that are slow, rude or late."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from nearveil import Client
from nearveil.client import UnreachableError
from nearveil.gallery import Index, Item
from nearveil.server import Settings, TokenStore, open_galleries, serve
from nearveil.server.settings import SettingsError
from nearveil.wire.schema import FRAME, KEY_HEADER
from tests.programs import Program

from ..gallery.index_places import WEBP, one_thread, unit_rows
from .serving import index_of

__all__ = ["one_thread"]  # fixture

QUICK = {"HEADER_TIMEOUT": "0.5", "BODY_TIMEOUT": "0.6", "SEND_TIMEOUT": "0.7", "IDLE_TIMEOUT": "3"}
LARGE = 6_000_000  # bytes: more than the system's buffers of a connection hold


@dataclass
class Process:
    """`nearveil serve`, its address and a token."""

    running: Program
    url: str
    secret: str
    folder: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def end(self) -> None:
        """See to it that nothing of it is left."""
        self.running.kill()
        self.running.wait()
        self.running.stdout.close()

    def connect(self, buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.settimeout(10)
        try:
            connection.connect(("127.0.0.1", self.port))
        except OSError:
            connection.close()
            raise
        return connection

    def head(self, path: str, *more: str, method: str = "GET") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {self.secret}", *more, "", ""]
        return "\r\n".join(lines).encode("latin-1")

    def question(self, body: bytes) -> bytes:
        told = (f"Content-Type: {FRAME}", f"{KEY_HEADER}: key-{time.monotonic_ns()}", f"Content-Length: {len(body)}")
        return self.head("/v1/galleries/birds/query", *told, method="POST")


def started(folder: Path, *words: str, program: Sequence[str] = ("-m", "nearveil"), **told: str) -> Process:
    with TokenStore(folder / "tokens.db") as store:
        secret = store.create("ann", scopes=["query", "originals", "metrics"])[1]
    variables = {f"NEARVEIL_SERVER_{name}": value for name, value in {"SHUTDOWN_DELAY": "0", **told}.items()}
    line = [*program, "serve", *words, "--port", "0", "--tokens", str(folder / "tokens.db")]
    log = {"NEARVEIL_SERVER_LOG_FILE": str(folder / "log.jsonl")}
    running = Program(*line, cwd=folder, env={**os.environ, **variables, **log}, quiet=True)
    said = running.stdout.readline()
    assert said.startswith("nearveil serves at http"), said
    return Process(running, said.split()[-1], secret, folder)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("serve")
    index = index_of(folder / "birds")
    with index:
        (folder / "big").write_bytes(bytes(LARGE))
        index.add([Item(unit_rows(1)[0], "large", WEBP, folder / "big")])
    galleries = json.dumps([{"name": "birds", "index": str(folder / "birds"), "offers": ["originals"]}])
    found = started(folder, GALLERIES=galleries, **QUICK)
    yield found
    found.end()


def closed_after(connection: socket.socket) -> tuple[float, bytes]:
    """Return how long it took until the other side closed a connection, and what it said before."""
    began, said = time.monotonic(), b""
    try:
        while part := connection.recv(65536):
            said += part
    except ConnectionResetError:
        pass
    return time.monotonic() - began, said


def test_it_answers_over_the_network(process: Process) -> None:
    with httpx.Client(base_url=process.url, headers={"authorization": f"Bearer {process.secret}"}) as client:
        assert client.get("/health").json() == {"status": "ok"}
        reply = client.get("/v1/galleries")
        assert [one["name"] for one in reply.json()["galleries"]] == ["birds"]
        assert "server" not in reply.headers
        assert client.get("/v1/galleries/birds/map").status_code == 200


def test_headers_that_do_not_come(process: Process) -> None:
    seconds = [10.0]
    while min(seconds) > 9 and len(seconds) < 6:  # it would be ten without the setting, or on a machine that is busy
        with process.connect() as silent, process.connect() as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
            ends = [closed_after(connection) for connection in (silent, slow)]
        assert [said for _, said in ends] == [b"", b""]
        seconds.append(sum(took for took, _ in ends))
    assert min(seconds) < 9


def test_headers_that_do_not_come_the_second_time(process: Process) -> None:
    with process.connect() as connection:
        connection.sendall(process.head("/health"))
        said = b""
        while not said.endswith(b'{"status":"ok"}'):
            said += connection.recv(65536)
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        assert closed_after(connection)[1] == b""


def test_a_body_that_does_not_come(process: Process) -> None:
    with process.connect() as connection:
        connection.sendall(process.question(bytes(1000)) + b"begin")
        _, said = closed_after(connection)
        assert said.startswith(b"HTTP/1.1 408")
        assert b'"code":"timeout"' in said


def test_a_client_that_does_not_read(process: Process) -> None:
    with process.connect(buffer=4096) as connection:
        connection.sendall(process.head("/v1/galleries/birds/items/60/original"))
        time.sleep(2.0)  # longer than it is waited for
        _, said = closed_after(connection)
        assert said.startswith(b"HTTP/1.1 200")
        assert len(said) < LARGE
    with process.connect() as connection:  # who reads gets all
        connection.sendall(process.head("/v1/galleries/birds/items/60/original", "Connection: close"))
        assert len(closed_after(connection)[1]) > LARGE


def test_what_is_not_http(process: Process) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10, b"GET\r\n\r\n"):
        with process.connect() as connection:
            connection.sendall(data)
            _, said = closed_after(connection)
            assert said.startswith(b"HTTP/1.1 400")
            assert b'"code":"http"' in said


def test_headers_without_end(process: Process) -> None:
    with process.connect() as connection:
        said = b""
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
            for _ in range(200):
                connection.sendall(b"x" * 10_000)
        except (BrokenPipeError, ConnectionResetError):
            pass
        try:
            said = connection.recv(65536)
        except ConnectionResetError:
            return  # it did not even wait for our reading
        assert said.startswith(b"HTTP/1.1 431")


CHUNKED = b"GET %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n%s\r\n"
PIECE = b"ea60\r\n" + bytes(60_000) + b"\r\n"


def flooded(connection: socket.socket, first: bytes, more: bytes, times: int) -> int:
    """Send something and then much of something else; return how often that went before the other side hung up."""
    sent = 0
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(first)
        for sent in range(times):  # noqa: B007
            connection.sendall(more)
            time.sleep(0.001)
    return sent


def test_trailers_without_end(process: Process) -> None:
    guarded = CHUNKED % (b"/v1/galleries", b"Authorization: Bearer %s\r\n" % process.secret.encode())
    many = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 1000) for number in range(60))
    floods = {
        "many": (CHUNKED % (b"/health", b"") + b"0\r\n", many),
        "one": (CHUNKED % (b"/health", b"") + b"0\r\nx: ", b"a" * 60_000),
        "with a token": (guarded + b"0\r\n", many),
        "extension": (CHUNKED % (b"/health", b"") + b"1;", b"a" * 60_000),
        "body": (CHUNKED % (b"/v1/galleries", b""), PIECE),
        "sealed": ((CHUNKED % (b"/v1/galleries/birds/sealed", b"")).replace(b"GET", b"POST"), PIECE),
    }
    for name, (first, more) in floods.items():
        with process.connect() as connection:
            assert flooded(connection, first, more, 400) < 399, name
    with process.connect() as connection:  # a few are no harm
        connection.sendall(CHUNKED % (b"/health", b"Connection: close\r\n") + b"0\r\nx: y\r\n\r\n")
        assert b'{"status":"ok"}' in closed_after(connection)[1]


def test_a_connection_takes_sealed_questions_which_are_larger_than_messages(process: Process) -> None:
    size = 1 << 20  # of a message 64 KiB are taken
    lines = (
        "POST /v1/galleries/birds/sealed HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {process.secret}",
        f"{KEY_HEADER}: a-large-question",
        f"Content-Type: {FRAME}",
        f"Content-Length: {size}",
        "Connection: close",
    )
    with process.connect() as connection:
        connection.sendall("\r\n".join((*lines, "", "")).encode() + bytes(size))
        assert b'"code":"not_offered"' in closed_after(connection)[1]  # all of it was read


def test_what_comes_in_trailers_is_not_believed(process: Process) -> None:
    token = b"Authorization: Bearer %s\r\n" % process.secret.encode()
    with process.connect() as connection:
        connection.sendall(CHUNKED % (b"/v1/galleries", b"Connection: close\r\n") + b"0\r\n" + token + b"\r\n")
        assert closed_after(connection)[1].startswith(b"HTTP/1.1 401")
    head = (CHUNKED % (b"/v1/galleries/birds/query", token)).replace(b"GET", b"POST")
    head = head.replace(b"Host", f"{KEY_HEADER}: key-of-a-client-0\r\nContent-Type: {FRAME}\r\nHost".encode())
    late = b"Content-Length: 1\r\n\r\n"
    with process.connect() as connection:
        connection.sendall(
            head.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nConnection: close\r\n") + b"1\r\nx\r\n0\r\n" + late
        )
        assert closed_after(connection)[1].startswith(b"HTTP/1.1 411")


def test_a_body_that_nobody_reads(process: Process) -> None:
    for path, status in (
        ("/health", b"200"),
        ("/nothing", b"404"),
        ("/v1/galleries", b"401"),
        ("/v1/galleries", b"200"),
    ):
        head = process.head(path, "Content-Length: 1000000000")
        head = head.replace(b"Bearer", b"Nobody") if status == b"401" else head
        with process.connect() as connection:
            connection.sendall(head)
            _, said = closed_after(connection)
            assert said.split(b" ")[1] == status
            assert b"connection: close" in said
    with process.connect() as connection:  # one that is refused, but comes: the connection is used on
        refused = process.head("/v1/galleries/none/query", "Content-Length: 5", method="POST")
        connection.sendall(refused)
        time.sleep(0.1)
        connection.sendall(b"body." + process.head("/health", "Connection: close"))
        said = closed_after(connection)[1]
        assert (said.count(b"HTTP/1.1 422"), said.count(b"HTTP/1.1 200")) == (1, 1)


def test_a_body_that_drips_while_its_request_waits(process: Process) -> None:
    """Not every route reads a body, and so has a time for it: the connection has."""
    with process.connect() as connection:
        connection.sendall(process.head("/v1/galleries/none/query", "Transfer-Encoding: chunked", method="POST"))
        began = time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() - began < 60:
                connection.sendall(b"1\r\nx\r\n")
                time.sleep(0.05)
        assert time.monotonic() - began < 60


def test_nothing_but_line_breaks_between_requests(process: Process) -> None:
    with process.connect() as connection:
        connection.sendall(process.head("/health"))
        began = time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() - began < 60:
                connection.sendall(b"\r\n")
                time.sleep(0.05)
        assert time.monotonic() - began < 60


def test_header_injection(process: Process) -> None:
    for bad in ("a\r\nSet-Cookie: x=y", "a\nSet-Cookie: x=y", "key-0123\x00456"):
        with process.connect() as connection:
            told = (f"Content-Type: {FRAME}", f"{KEY_HEADER}: {bad}", "Content-Length: 0", "Connection: close")
            connection.sendall(process.head("/v1/galleries/birds/query", *told, method="POST"))
            _, said = closed_after(connection)
            assert said.split(b" ")[1] in (b"400", b"422")
            assert b"set-cookie" not in said.lower()
    with process.connect() as connection:  # two lengths, as those who smuggle requests send them
        both = ("Content-Length: 3", "Transfer-Encoding: chunked")
        connection.sendall(process.head("/v1/galleries/birds/query", *both, method="POST") + b"0\r\n\r\n")
        assert closed_after(connection)[1].split(b" ")[1] in (b"400", b"411", b"415", b"422")


def test_two_requests_at_once_on_one_connection(process: Process) -> None:
    with process.connect() as connection:
        connection.sendall(process.head("/health") + process.head("/ready", "Connection: close"))
        assert closed_after(connection)[1].count(b"HTTP/1.1 200") == 2


def test_it_stops_when_what_is_under_way_is_done(process: Process) -> None:
    """The last of this process: it ends, with a request half sent that is still answered."""
    with process.connect() as idle, process.connect() as connection:
        data = b"no frame at all"
        connection.sendall(process.question(data) + data[:5])
        time.sleep(0.2)
        process.running.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        connection.sendall(data[5:])
        said = closed_after(connection)[1]
        assert said.startswith(b"HTTP/1.1 400")
        assert b"connection: close" in said
        closed_after(idle)
    assert process.running.wait(timeout=10) == 0
    with pytest.raises(ConnectionRefusedError):
        process.connect()
    told = [json.loads(line) for line in (process.folder / "log.jsonl").read_text().splitlines()]
    assert told[-1]["status"] == 400
    assert process.secret not in (process.folder / "log.jsonl").read_text()


def test_a_signal_that_comes_while_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index_of(tmp_path / "birds").close()
    monkeypatch.setattr("gc.freeze", lambda: signal.raise_signal(signal.SIGTERM))
    late: list[bool] = []

    def end_it() -> None:
        late.append(True)
        os.kill(os.getpid(), signal.SIGTERM)

    helper = threading.Timer(20, end_it)
    helper.start()
    birds = [{"name": "birds", "index": str(tmp_path / "birds")}]
    serve(Settings.load(galleries=birds, port=0, tokens=str(tmp_path / "t.db")))
    helper.cancel()
    assert not late


def test_tls_and_a_sudden_end(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    make = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    also = "-addext subjectAltName=DNS:localhost -keyout key.pem -out cert.pem"
    subprocess.run([openssl, *make.split(), *also.split()], cwd=tmp_path, check=True, capture_output=True)  # noqa: S603
    (tmp_path / "key.pem").chmod(0o644)
    index_of(tmp_path / "My Birds").close()
    trust = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    own = (tmp_path / "cert.pem", tmp_path / "key.pem")  # signed by itself, so it is its own authority
    tls = ("--cert", "cert.pem", "--cert-key", "key.pem", "--ca", "cert.pem")
    process = started(tmp_path, "My Birds", *tls, HEADER_TIMEOUT="2")
    where = f"https://localhost:{process.port}"
    silent = process.connect()
    try:
        assert process.url.startswith("https://")
        with Client(where, process.secret, ca=own[0], certificate=own) as known:
            assert [one.name for one in known.galleries()] == ["my-birds"]
        with Client(where, process.secret, ca=own[0], retries=0) as stranger, pytest.raises(UnreachableError):
            stranger.galleries()
        with Client(where, process.secret, certificate=own, retries=0) as wary, pytest.raises(UnreachableError):
            wary.galleries()  # the usual authorities do not know this server
        with httpx.Client(verify=trust) as client, pytest.raises(httpx.TransportError):
            client.get(f"{where}/health")
        with httpx.Client() as client, pytest.raises(httpx.RemoteProtocolError):
            client.get(f"http://localhost:{process.port}/health")
        assert closed_after(silent)[1] == b""  # it never began with TLS
    finally:
        silent.close()
        process.end()  # kill -9
    assert "tls_key: every user of this machine can read key.pem" in (tmp_path / "log.jsonl").read_text()
    with Index.open(tmp_path / "My Birds") as index, TokenStore(tmp_path / "tokens.db") as store:
        index.verify()
        assert store.verify(process.secret) is not None


def test_what_cannot_be_served(tmp_path: Path) -> None:
    store = {"tokens": str(tmp_path / "t.db")}
    with pytest.raises(SettingsError, match="galleries: none given"):
        serve(Settings.load(**store))
    index_of(tmp_path / "birds").close()
    birds = [{"name": "birds", "index": str(tmp_path / "birds")}]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SettingsError, match="host, port: cannot listen"):
            serve(Settings.load(galleries=birds, port=taken.getsockname()[1], **store))
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("no certificate")
    bad = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    with pytest.raises(SettingsError, match="tls_cert, tls_key"):
        serve(Settings.load(galleries=birds, port=0, **bad, **store))
    two = [*birds, {"name": "none", "index": str(tmp_path / "none")}]
    with pytest.raises(ValueError, match="No index at"):
        open_galleries(Settings.load(galleries=two, **store))
