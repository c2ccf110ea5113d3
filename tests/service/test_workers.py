"""Several processes that serve: one of them dies, and nobody notices."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from nearveil import Client
from nearveil.ledger import Ledger
from nearveil.server import TokenStore
from nearveil.server.keys import IdempotencyStore
from nearveil.wire.schema import FRAME, KEY_HEADER
from tests.programs import Program

from ..gallery.index_places import index_server, index_url, unit_rows
from .serving import EPSILON, index_of
from .test_serve import Process, started

__all__ = ["index_server", "index_url"]  # fixtures

TRUST = httpx.create_ssl_context()  # once: every connection of its own would read all certificates anew


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    index_of(tmp_path / "birds").close()
    found = started(tmp_path, str(tmp_path / "birds"), "--workers", "2", SHUTDOWN_GRACE="2")
    yield found
    found.end()


def children(process: Process) -> set[int]:
    text = Path(f"/proc/{process.running.pid}/task/{process.running.pid}/children").read_text()
    found = map(int, text.split())
    return {one for one in found if b"resource_tracker" not in Path(f"/proc/{one}/cmdline").read_bytes()}


def test_one_is_killed_and_no_question_is_lost_or_paid_twice(process: Process, tmp_path: Path) -> None:
    with Ledger(tmp_path / "budget.db") as ledger:
        account = ledger.open_account(
            "mine", owner="me", protects="query", unit="image", relation="replace", epsilon=400.0, delta=0.0
        )
        before = children(process)
        assert len(before) == 2
        with Client(process.url, process.secret, account=account, extractor=None) as client:
            row = unit_rows(1)[0]
            for number in range(12):
                if number == 4:
                    os.kill(min(before), signal.SIGKILL)
                assert len(client.nearest(row, epsilon=EPSILON).matches) == 8
        assert sum(entry.kind == "debit" for entry in account.history()) == 12
    until = time.monotonic() + 60
    while len(children(process) - before) < 1 and time.monotonic() < until:
        time.sleep(0.1)
    assert len(children(process)) == 2
    mine = children(process)
    process.running.send_signal(signal.SIGTERM)
    assert process.running.wait(30) == 0
    assert not any(map(lives, mine))


def lives(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


FORKED = """
import multiprocessing
from nearveil.server import app, supervisor
from nearveil.__main__ import main
app.HEARTBEAT_INTERVAL, supervisor._HEARTBEAT_TIMEOUT = 1.0, 6.0
supervisor.get_context = lambda _: multiprocessing.get_context("fork")  # shares imports: starts at once
main()
"""


def test_one_that_is_stopped_is_noticed_and_started_anew(tmp_path: Path) -> None:
    """A worker that hangs dies by no signal but SIGKILL, and its parent hears nothing of it unless it listens."""
    index_of(tmp_path / "birds").close()
    process = started(tmp_path, str(tmp_path / "birds"), "--workers", "2", program=["-c", FORKED], SHUTDOWN_GRACE="1")
    try:
        before = children(process)
        until = time.monotonic() + 60
        os.kill(min(before), signal.SIGSTOP)
        while lives(min(before)) or len(children(process)) < 2:
            assert time.monotonic() < until
            assert (
                httpx.get(f"{process.url}/health", timeout=60, verify=TRUST).status_code == 200
            )  # the other one answers
            time.sleep(0.1)
        process.running.send_signal(signal.SIGTERM)
        assert process.running.wait(30) == 0
    finally:
        process.end()


def test_what_the_dead_had_under_way_is_not_counted_and_all_end_with_their_parent(process: Process) -> None:
    before = children(process)
    with process.connect() as waiting:
        waiting.sendall(process.question(b"a message that does not come"))
        time.sleep(0.5)
        for one in before:
            os.kill(one, signal.SIGKILL)
        until = time.monotonic() + 60
        while len(children(process) - before) < 2:
            assert time.monotonic() < until
            time.sleep(0.1)
        headers = {"authorization": f"Bearer {process.secret}"}
        text = httpx.get(f"{process.url}/metrics", headers=headers, timeout=60, verify=TRUST).text
    assert "nearveil_in_flight 1.0" in text.splitlines()  # this request itself
    mine = children(process)
    process.running.kill()
    process.running.wait()
    until = time.monotonic() + 60
    while any(map(lives, mine)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(lives, mine))


def test_figures_keys_and_revocations_are_those_of_all_processes(process: Process, tmp_path: Path) -> None:
    for _ in range(20):  # each on a connection of its own, which any process may take
        httpx.get(f"{process.url}/health", verify=TRUST)
    headers = {"authorization": f"Bearer {process.secret}", "content-type": FRAME, KEY_HEADER: "one-key-of-a-client"}
    text = httpx.get(f"{process.url}/metrics", headers=headers, verify=TRUST).text
    assert 'nearveil_requests_total{route="/health",status="200"} 20.0' in text
    address = f"{process.url}/v1/galleries/birds/query"
    statuses = [
        httpx.post(address, content=b"message %d" % min(number, 1), headers=headers, verify=TRUST).status_code
        for number in range(40)
    ]
    assert set(statuses[1:]) == {409}
    with TokenStore(tmp_path / "tokens.db") as store:
        store.revoke(store.list()[0].id)
    time.sleep(0.3)
    assert {httpx.post(address, content=b"m", headers=headers, verify=TRUST).status_code for _ in range(20)} <= {
        401,
        429,
    }
    # One that is stopped does not delay the end.
    mine = children(process)
    os.kill(min(mine), signal.SIGSTOP)
    process.running.send_signal(signal.SIGTERM)
    assert process.running.wait(30) == 0
    assert not any(map(lives, mine))


def test_two_servers_on_one_postgresql_and_one_is_killed(tmp_path: Path, index_url: str) -> None:
    """Keys and revocations outlive the process that noted them, also where it was killed under load."""
    index_of(tmp_path / "birds").close()
    with TokenStore(index_url) as store:
        secret = store.create("ann")[1]
    servers: list[Program] = []
    try:
        for _ in range(2):
            words = ["serve", str(tmp_path / "birds"), "--port", "0", "--tokens", index_url]
            servers.append(Program("-m", "nearveil", *words, quiet=True))
        urls = [one.stdout.readline().split()[-1] for one in servers]
        headers = {"authorization": f"Bearer {secret}", "content-type": FRAME}

        def ask(url: str, data: bytes, key: str = "one-key-of-a-client") -> int:
            with suppress(httpx.TransportError):
                told = {**headers, KEY_HEADER: key}
                return httpx.post(
                    f"{url}/v1/galleries/birds/query", content=data, headers=told, verify=TRUST
                ).status_code
            return 0  # nobody is there any more

        assert ask(urls[0], b"a message") == 400
        assert ask(urls[1], b"a message") == 400
        assert ask(urls[1], b"another") == 409
        with ThreadPoolExecutor(4) as pool:
            keys = [f"key-number-{number}-of-a-client" for number in range(40)]
            under_way = pool.map(lambda key: ask(urls[0], b"a message", key), keys)
            first = [next(under_way) for _ in range(10)]
            servers[0].kill()
            first += under_way
            assert first[:10] == [400] * 10
            for key, status in zip(keys, first, strict=True):
                if status:  # the one that was killed had noted it: the other knows
                    assert ask(urls[1], b"another", key) == 409
                assert ask(urls[1], b"a message", key) == 400
        with TokenStore(index_url) as store:
            store.revoke(store.list()[0].id)
        time.sleep(1.2)
        assert ask(urls[1], b"a message") == 401
    finally:
        for running in servers:
            with running:
                running.kill()


AT_ONCE = """
import os
os.dup2(1, 2)  # errors and all else are heard together
from nearveil.__main__ import main
main()
"""


def test_what_is_wrong_is_told_once(tmp_path: Path) -> None:
    broken = [{"name": "birds", "index": str(tmp_path / "nothing")}]
    words = ["serve", "--workers", "2", "--port", "0", "--tokens", str(tmp_path / "t")]
    done = Program("-c", AT_ONCE, *words, env={**os.environ, "NEARVEIL_SERVER_GALLERIES": json.dumps(broken)})
    said = done.read(60)
    assert done.returncode == 1
    assert said.count("nothing") == 1
    assert "Traceback" not in said


def test_hosts_that_begin_together_make_the_same_tables(index_url: str) -> None:
    for _ in range(4):
        with ThreadPoolExecutor(16) as pool:
            for store in pool.map(lambda _: IdempotencyStore(index_url, 10.0), range(16)):
                store.close()
