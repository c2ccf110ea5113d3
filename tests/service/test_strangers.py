"""Strangers at the door of a real server: they cost little memory, few lines of log, and lock nobody out."""

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest

from .serving import index_of
from .test_serve import Process, closed_after, started

PIPELINED = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000
LARGEST_HEAD = 32 << 10


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("strangers")
    index_of(folder / "birds").close()
    found = started(
        folder, str(folder / "birds"), CONNECTIONS="100", RATE="1e9", BURST="1000000"
    )  # floods are answered
    yield found
    found.end()


def resident(process: Process) -> int:
    """Return the bytes of memory that a process holds."""
    status = Path(f"/proc/{process.running.pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def flood(process: Process, connections: int, rounds: int) -> int:
    """Send many requests at once on each connection, again and again; return how many bytes were sent."""
    sent = 0
    for _ in range(rounds):
        with ExitStack() as stack:
            for _ in range(connections):
                connection = stack.enter_context(process.connect())
                connection.settimeout(0.1)
                try:
                    while sent < 100_000_000:
                        sent += connection.send(PIPELINED)
                except OSError:  # closed, or the server stopped reading
                    pass
    return sent


def test_queued_requests_take_no_memory(process: Process) -> None:
    with httpx.Client(base_url=process.url, headers={"authorization": f"Bearer {process.secret}"}) as client:
        for path in ("/v1/galleries/birds/map", "/nothing", "/health", *["/v1/galleries"] * 100):  # what is loaded late
            client.get(path)
        before = resident(process)
        flood(process, 6, 6)
        assert client.get("/v1/galleries/birds/map").status_code == 200
        assert resident(process) < 1.1 * before


def seconds_until_closed(process: Process, request: bytes) -> float:
    began = time.monotonic()
    with process.connect() as connection:
        connection.sendall(request)
        closed_after(connection)
    return time.monotonic() - began


@pytest.mark.parametrize("request_line", [b"\x00\xff garbage", b"GET /v1/galleries HTTP/1.1\r\nHost: localhost"])
def test_refusals_without_end_are_slow_and_token_holders_notice_nothing(process: Process, request_line: bytes) -> None:
    for _ in range(150):
        with process.connect() as connection:
            connection.sendall(request_line + b"\r\n\r\n")
    with httpx.Client(base_url=process.url, headers={"authorization": f"Bearer {process.secret}"}) as client:
        assert seconds_until_closed(process, request_line + b"\r\n\r\n") > 0.9
        began = time.monotonic()
        for _ in range(30):
            assert client.get("/v1/galleries").status_code == 200
        assert time.monotonic() - began < 30  # none of them waits for a second


def test_a_few_requests_may_be_queued(process: Process) -> None:
    with process.connect() as connection:
        connection.sendall(process.head("/v1/galleries") * 6 + process.head("/v1/galleries", "Connection: close"))
        assert closed_after(connection)[1].count(b"HTTP/1.1 200 OK") == 7


def test_idle_strangers_lock_nobody_out(process: Process) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(process.connect())
        for _ in range(20):
            reply = httpx.get(f"{process.url}/v1/galleries", headers={"authorization": f"Bearer {process.secret}"})
            assert reply.status_code == 200


def test_a_token_keeps_its_connection_while_strangers_come(process: Process) -> None:
    mine, headers = HTTPConnection("127.0.0.1", process.port), {"authorization": f"Bearer {process.secret}"}
    with closing(mine), ExitStack() as stack:
        mine.connect()
        mine.auto_open = 0  # a connection that was closed is not opened again unseen
        for _ in range(4):
            mine.request("GET", "/v1/galleries", headers=headers)
            reply = mine.getresponse()
            assert (reply.status, len(reply.read()) > 0) == (200, True)
            for _ in range(100):
                stack.enter_context(process.connect())


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("excess", [-200, 20_000])
def test_headers_have_the_size_that_is_stated(process: Process, pieces: int, excess: int) -> None:
    plain = len(process.head("/v1/galleries", "Connection: close", "X-Long: "))
    head = process.head("/v1/galleries", "Connection: close", "X-Long: " + "a" * (LARGEST_HEAD + excess - plain))
    with process.connect() as connection:
        step = len(head) // pieces + 1
        for start in range(0, len(head), step):
            with suppress(BrokenPipeError):
                connection.sendall(head[start : start + step])
            time.sleep(0.02 if pieces > 1 else 0)
        _, said = closed_after(connection)
    assert said.startswith(b"HTTP/1.1 431" if excess > 0 else b"HTTP/1.1 200"), said[:100]


@pytest.mark.parametrize(
    "request_line", [b"CONNECT example.org:443 HTTP/1.1", b"GET /%s HTTP/1.1" % (b"a" * 100_000), b"GET * HTTP/1.1"]
)
def test_odd_requests_are_refused_in_words(process: Process, request_line: bytes) -> None:
    with process.connect() as connection:
        connection.sendall(request_line + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        _, said = closed_after(connection)
    head, _, body = said.partition(b"\r\n\r\n")
    assert 400 <= int(head.split()[1]) < 500
    assert set(json.loads(body)) == {"code", "message"}
    assert "HttpParser" not in log_of(process)


def log_of(process: Process) -> str:
    time.sleep(0.3)
    return (process.folder / "log.jsonl").read_text()


@pytest.mark.parametrize("path", ["/nothing", "/health", "/v1/galleries", None])
def test_lines_of_strangers_are_bounded(process: Process, path: str | None) -> None:
    before = len(log_of(process))
    request = (
        b"\x00\xff garbage\r\n\r\n" if path is None else f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    )
    for _ in range(700):
        with socket.create_connection(("127.0.0.1", process.port), timeout=10) as connection:
            connection.sendall(request)
    assert len(log_of(process)) - before < 200 * 300


@pytest.mark.parametrize("count", [2, 6, 100])
def test_strangers_who_leave_while_their_requests_wait_are_no_error(process: Process, count: int) -> None:
    one = PIPELINED[: len(PIPELINED) // 3000]
    for _ in range(130):  # from then on each refusal takes a second
        with process.connect() as connection:
            connection.sendall(one)
    for pause in (0.0, 0.02, 0.1) * 4:
        with process.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(one * count)
            time.sleep(pause)
    time.sleep(1.5)
    assert "Exception" not in log_of(process)
