"""Killed and cut off under load: nothing is lost, nothing is paid twice, and all goes on by itself."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from nearveil import Client
from nearveil.client.errors import UnansweredError
from nearveil.client.results import Nearest
from nearveil.gallery import Index, Item
from nearveil.ledger import Account, Ledger, new_key
from nearveil.server import TokenStore
from tests.programs import Program

from ..gallery.index_places import WEBP, index_server, index_url, unit_rows
from .protected import CLASSES, make, published, rows
from .serving import index_of

__all__ = ["index_server", "index_url"]  # fixtures

QUERIES = unit_rows(30, seed=9)


class Process:
    """``nearveil serve`` on one port, as often as it is started."""

    def __init__(self, folder: Path, tokens: str, *words: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        with TokenStore(tokens) as store:
            _, self.token = store.create("tests")
        told = ["--port", str(self.port), "--tokens", tokens, "--log-file", str(folder / "log")]
        self._command = ["-m", "nearveil", "serve", *words, *told]
        self.start()

    def start(self) -> None:
        self._process = Program(*self._command, env={**os.environ, "NEARVEIL_SERVER_SHUTDOWN_DELAY": "0"})
        assert self._process.stdout.readline().strip(), "it did not start"

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def end(self, how: int = signal.SIGTERM) -> int:
        self._process.send_signal(how)
        with self._process:
            return self._process.wait(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def running(folder: Path, tokens: str, *words: str) -> Iterator[Process]:
    process = Process(folder, tokens, *words)
    try:
        yield process
    finally:
        process.end()


@contextlib.contextmanager
def purse(place: str | Path, epsilon: float = 400.0) -> Iterator[Account]:
    with Ledger(str(place), timeout=30) as ledger:
        yield ledger.open_account(
            "me", owner="me", protects="query", unit="image", relation="replace", epsilon=epsilon, delta=0.0
        )


@contextlib.contextmanager
def asking(folder: Path, *words: str) -> Iterator[tuple[Process, Account, Client]]:
    """Run a server, and a client of it with an account."""
    with (
        running(folder, str(folder / "tokens.db"), *words) as process,
        purse(folder / "ledger.db") as account,
        Client(process.url, process.token, account=account) as client,
    ):
        yield process, account, client


def insist(client: Client, number: int, key: str) -> Nearest:
    """Ask until there is an answer, always with one key; a paid question may be asked again for nothing."""
    for _ in range(20):
        with contextlib.suppress(UnansweredError, ValueError):
            return client.nearest(QUERIES[number % len(QUERIES)], 4, 2.0, key=key)
        time.sleep(0.2)
    raise AssertionError("there was no answer for a long time")


def trouble(process: Process, *pauses: float) -> Callable[[], None]:
    def work() -> None:
        for pause in pauses:
            time.sleep(pause)
            process.kill()
            process.start()

    return work


def test_a_server_killed_again_and_again_under_load(tmp_path: Path) -> None:
    index_of(tmp_path / "birds").close()
    keys = [new_key() for _ in range(40)]
    with asking(tmp_path, str(tmp_path / "birds")) as (process, account, client):
        killer = threading.Thread(target=trouble(process, 0.2, 0.35))
        killer.start()
        with ThreadPoolExecutor(4) as pool:
            first = list(pool.map(lambda one: insist(client, *one), enumerate(keys)))
        killer.join()
        again = [insist(client, number, key) for number, key in enumerate(keys)]
        paid = [entry.key for entry in account.history() if entry.kind == "debit"]
        assert sorted(paid, key=str) == sorted(keys)
        assert account.balance().left == pytest.approx(400 - 2.0 * len(keys))
    # The same key is the same message, whichever server process answered it.
    assert [one.set for one in first] == [one.set for one in again]
    assert [one.matches for one in first] == [one.matches for one in again]
    assert all(one.repeated for one in again)


def test_indexing_killed_while_the_gallery_is_asked(tmp_path: Path) -> None:
    place = tmp_path / "birds"
    index_of(place).close()
    program = (
        "import sys, time; from nearveil.gallery import Index, Item; from tests.gallery.index_places import unit_rows\n"
        "index = Index.open(sys.argv[1])\n"
        "for step in range(10**6):\n"
        "    ids = index.add(Item(row, f'new {step}') for row in unit_rows(3, seed=step))\n"
        "    print(index.revision, *ids, flush=True)\n"
        "    index.republish()\n"
        "    time.sleep(0.5)  # two maps are kept, and a question takes a fixed time\n"
    )
    with (
        running(tmp_path, str(tmp_path / "tokens.db"), str(place)) as process,
        purse(tmp_path / "ledger.db") as account,
    ):
        held: set[int] = set(range(60))
        for turn in range(2):
            # The last words of a process that is killed may be cut off.
            with Program("-c", program, str(place)) as writer:
                said = [writer.stdout.readline()]
                with Client(process.url, process.token, account=account) as client:
                    for number in range(4):
                        found = insist(client, number, new_key())
                        assert len(found.matches) == 4
                writer.kill()
                said += writer.stdout.readlines()
            held |= {int(word) for line in said if line.endswith("\n") for word in line.split()[1:]}
            with Index.open(place) as index:
                index.verify()
                assert held <= set(index.ids().tolist()), f"turn {turn}: what was acknowledged is lost"
        # The server has seen the newest map without being told.
        with Index.open(place) as index:
            newest = index.republish().revision
        with Client(process.url, process.token) as client:
            assert client.galleries()[0].revision == newest


def config(folder: Path, **more: str | int) -> Path:
    """Write the configuration of a protected gallery."""
    told = {
        "name": "scans",
        "kind": "protected",
        "index": str(folder / "private"),
        "public": str(folder / "public"),
        "ledger": str(folder / "votes.db"),
        "account": "scans",
    } | more
    lines = [f"{name} = {json.dumps(value)}" for name, value in told.items()]
    text = "\n".join(["[[galleries]]", *lines, f"classes = {json.dumps(CLASSES)}", "epsilon = 2.0", "delta = 1e-6"])
    (folder / "nearveil.toml").write_text(text)
    return folder / "nearveil.toml"


def test_a_server_of_a_protected_gallery_that_is_killed_shows_the_same_model_and_pays_nothing(tmp_path: Path) -> None:
    """The command publishes; servers show what is in the ledger, also after a kill, and take up what is newer."""
    make(tmp_path)
    told = str(config(tmp_path, publications=2))
    published(tmp_path, ledger=tmp_path / "votes.db", epsilon=2.0, publications=2).close()
    with asking(tmp_path, "--config", told) as (process, account, client):
        first = client.model().to_bytes()
        process.kill()
        process.start()
        with Client(process.url, process.token) as again:
            assert again.model().to_bytes() == first
        command = Program("-m", "nearveil", "protect", "--config", told, "--publish")
        command.read(120)
        assert command.returncode == 0
        until = time.monotonic() + 60
        while (info := client.galleries()[0]).revision == 1 and time.monotonic() < until:
            time.sleep(0.2)
        assert info.revision == 2
        assert client.classify(rows(1, 5)[0][0]).label in CLASSES
        with Client(process.url, process.token) as again:
            assert again.model().to_bytes() != first
        assert account.balance().left == 400
    with Ledger(tmp_path / "votes.db") as ledger:
        entries = ledger.account("scans").history()
        assert [entry.key for entry in entries if entry.kind == "debit"] == ["model:0", "model:1"]
        assert sum(entry.message is not None for entry in entries) == 2
        assert "all is well" in str(ledger.verify())


def test_postgresql_restarted_under_load(tmp_path: Path, index_server: object, index_url: str) -> None:
    from ..ledger.postgres import Postgres

    assert isinstance(index_server, Postgres)
    with Index.create(index_url, dimension=12, extractor="tests") as index:
        index.add(Item(row, f"item {number}", WEBP) for number, row in enumerate(unit_rows(60)))
        index.publish(4.0, 0.25, n_sets=4, reach=0.0)
    keys = [new_key() for _ in range(30)]
    words = (index_url, "--name", "birds")
    with running(tmp_path, index_url, *words) as process, purse(tmp_path / "ledger.db") as account:
        with Client(process.url, process.token, account=account, retries=1) as client:

            def restart() -> None:
                time.sleep(0.3)
                index_server.stop("immediate")
                time.sleep(0.5)
                index_server.start()

            other = threading.Thread(target=restart)
            other.start()
            with ThreadPoolExecutor(3) as pool:
                found = list(pool.map(lambda one: insist(client, *one), enumerate(keys)))
            other.join()
            assert all(len(one.matches) == 4 for one in found)
            assert [one.matches for one in found] == [insist(client, *one).matches for one in enumerate(keys)]
        assert account.balance().left == pytest.approx(400 - 2.0 * len(keys))
        log = (tmp_path / "log").read_text()
    assert " 500" not in log
    assert not [line for line in log.splitlines() if json.loads(line).get("status") == 500]


def test_the_client_killed_between_debit_and_answer(tmp_path: Path) -> None:
    index_of(tmp_path / "birds").close()
    program = (
        "import os, signal, sys; import numpy as np; from nearveil.ledger import Ledger\n"
        "from nearveil import Client; from nearveil.client.transport import HttpTransport\n"
        "send = HttpTransport.send\n"
        "async def dying(self, request):\n"
        "    if 'query' in str(request): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return await send(self, request)\n"
        "HttpTransport.send = dying\n"
        "with Ledger(sys.argv[3]) as ledger, Client(*sys.argv[1:3], account=ledger.account('me')) as client:\n"
        "    client.nearest(np.load(sys.argv[4]), 4, 2.0, key='the one question')\n"
    )
    np.save(tmp_path / "row.npy", QUERIES[0])
    with asking(tmp_path, str(tmp_path / "birds")) as (process, account, _):
        said = [process.url, process.token, str(tmp_path / "ledger.db"), str(tmp_path / "row.npy")]
        with Program("-c", program, *said) as client:
            assert client.wait(60) == -signal.SIGKILL
        assert account.balance().left == pytest.approx(398.0)
        with Client(process.url, process.token, account=account) as client:
            found = client.nearest(QUERIES[0], 4, 2.0, key="the one question")
        assert found.repeated
        assert len(found.matches) == 4
        assert account.balance().left == pytest.approx(398.0)


def test_nothing_of_a_question_is_written_by_the_server(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Everything that the process wrote, searched for the key, the token and the message."""
    index_of(tmp_path / "birds").close()
    key, own = new_key(), tmp_path_factory.mktemp("client")
    with running(tmp_path, str(tmp_path / "tokens.db"), str(tmp_path / "birds")) as process:
        with purse(own / "ledger.db") as account, Client(process.url, process.token, account=account) as client:
            client.nearest(QUERIES[0], 4, 2.0, key=key)
        secret = process.token.split("_", 2)[2].encode()
    assert (tmp_path / "tokens.db").exists()
    for path in tmp_path.rglob("*"):
        if path.is_file() and os.access(path, os.R_OK):
            content = path.read_bytes()
            assert key.encode() not in content, path
            assert secret not in content, path
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    asked = [line for line in told if line.get("route", "").endswith("/query")]
    assert len(asked) == 1
    assert "sets" not in json.dumps(asked)
