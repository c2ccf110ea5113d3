"""What is prepared for questions is used once: by no second thread, process, copy or layout."""

import copy
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from nearveil.sealed import SealedClient, SealedError, SealedIndex
from nearveil.sealed.lwe import Words, add_messages, expand_matrix
from nearveil.sealed.pads import Pad, PadStock, get_process
from nearveil.sealed.parameters import LWE
from nearveil.sealed.ring import token_bytes
from nearveil.sealed.wire import write_parts
from nearveil.wire.frames import Kind, WireError
from tests.sealed.exact import ExactClient, connect, make_hints

ROWS = np.random.default_rng(0).normal(size=(60, 12))


@pytest.fixture(scope="module")
def index() -> SealedIndex:
    return SealedIndex.build(ROWS, records=[b"%d" % i for i in range(60)], n_cells=6, n_colours=3)


@pytest.fixture
def client(index: SealedIndex) -> ExactClient:
    return connect(index, None)


def count_ready(client: SealedClient) -> list[int]:
    return [len(stock) for stock in client._stocks.values()]


def fill(stock: PadStock, count: int) -> PadStock:
    for mark in range(count):
        assert stock.add(make_pad(mark), get_process())
    return stock


def make_pad(mark: int = 0) -> Pad:
    return Pad(np.array([mark], np.uint32), np.zeros(1, np.int64), np.zeros(1, np.int64))


def name_pad(client: SealedClient) -> bytes:
    """Ask a question, and return the secrets that hid it."""
    return client.ask(ROWS[0]).pad.secrets.tobytes()


def in_child(work: Callable[[], bytes]) -> bytes:
    """Fork, and return what the child says."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:  # pragma: no cover
        try:
            os.write(write, work())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


def test_prepared_questions_find_the_same(index: SealedIndex) -> None:
    client = SealedClient(index.layout.to_bytes(), index.get_public_tokens())
    client.prepare(2, index.answer)
    assert count_ready(client) == [2, 2]
    for number, left in enumerate(([1, 1], [0, 0], [0, 0])):  # the last requests a token first
        assert client.search(ROWS[number], index.answer, 1)[0].record == b"%d" % number
        assert count_ready(client) == left


def test_preparing_tops_up(index: SealedIndex) -> None:
    client = SealedClient(index.layout.to_bytes(), index.get_public_tokens())
    sent: list[bytes] = []

    def send(data: bytes) -> bytes:
        sent.append(data)
        return index.answer(data)

    client.prepare(2, send)
    client.prepare(1, send)
    client.prepare(0, send)
    assert count_ready(client) == [0, 0]  # pads that nobody needs are dropped
    client.prepare(1, send)
    client.ask(ROWS[0])
    client.prepare(1, send)
    assert count_ready(client) == [1, 1]
    assert (len(sent), len(set(map(len, sent))), len(set(sent))) == (4, 1, 4)
    with pytest.raises(ValueError, match="n_questions must be"):
        client.prepare(-1, send)


def test_masks_of_tokens_are_those_of_hints(index: SealedIndex) -> None:
    client = SealedClient(index.layout.to_bytes(), index.get_public_tokens())
    request = client.begin_pads()
    client.finish_pads(request, index.answer(request.data))
    for number, (part, stage) in enumerate(index.layout.stages.items()):
        pad = client._stocks[part].take()
        assert pad is request.pads[number][1]
        exact, secrets = make_hints(index, part), np.resize(pad.secrets, (stage.n_groups, 1024))
        np.testing.assert_array_equal(pad.masks, np.einsum("grn,gn->gr", exact, secrets) % 65537)
        products = [
            expand_matrix(part, index.layout.seed, m * stage.n_columns, (m + 1) * stage.n_columns) @ secrets[group]
            for group in range(stage.n_groups)
            for m in [group // stage.n_secrets]
        ]
        half = 1 << (LWE.modulus_bits - 1)
        errors = (pad.zeros - np.stack(products) + half) % (2 * half) - half
        assert 5 < errors.std() < 8


def test_a_request_makes_pads_once_and_in_its_own_process(index: SealedIndex) -> None:
    client = SealedClient(index.layout.to_bytes(), index.get_public_tokens())
    request = client.begin_pads()
    token = index.answer(request.data)

    def finish_in_child() -> bytes:
        try:
            client.finish_pads(request, token)
        except (RuntimeError, SealedError):
            return b"refused %d" % client.n_prepared
        return b"made"

    assert in_child(finish_in_child) == b"refused 0"
    client.finish_pads(request, token)
    with pytest.raises(RuntimeError, match="was used"):
        client.finish_pads(request, token)
    assert count_ready(client) == [1, 1]
    for copied in (copy.deepcopy, send):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(request)
    assert "pads" not in repr(request)


def test_a_bad_token_makes_pads_without_a_visible_reaction(index: SealedIndex) -> None:
    client = SealedClient(index.layout.to_bytes(), index.get_public_tokens())
    request = client.begin_pads()
    lengths = [token_bytes(stage.secret_rows) for stage in index.layout.stages.values()]
    version = index.layout.version
    client.finish_pads(request, write_parts(Kind.SEALED_TOKEN, version, [*map(os.urandom, lengths)]))
    sent: list[int] = []

    def send(data: bytes) -> bytes:
        sent.append(len(data))
        return index.answer(data)

    assert len(client.search(ROWS[0], send, 4)) <= 4
    assert sent == [22 + stage.question_bytes for stage in index.layout.stages.values()]
    for wrong in ([lengths[0], lengths[1] - 1], [lengths[0] + 1, lengths[1]]):
        with pytest.raises(WireError, match="lengths"):
            client.finish_pads(client.begin_pads(), write_parts(Kind.SEALED_TOKEN, version, [*map(bytes, wrong)]))


def test_no_two_questions_have_secrets_in_common(client: ExactClient) -> None:
    client.prepare(4)
    questions = [client.ask(ROWS[0]) for _ in range(8)] + [client.ask_records([1]) for _ in range(8)]
    secrets = [row.tobytes() for question in questions for row in question.pad.secrets]
    assert len(set(secrets)) == len(secrets)


def test_threads_never_get_the_same_pad() -> None:
    count = 2000
    stock = fill(PadStock(), count)
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda _: stock.take(), range(count + 50)))
    found = [int(pad.zeros[0]) for pad in taken if pad is not None]
    assert (len(found), len(set(found))) == (count, count)


def test_threads_search_with_one_client(index: SealedIndex) -> None:
    client = SealedClient(index.layout.to_bytes(), index.get_public_tokens())
    client.prepare(3, index.answer)
    sent: list[bytes] = []

    def send(data: bytes) -> bytes:
        sent.append(data)
        return index.answer(data)

    def find(number: int) -> bytes | None:
        return client.search(ROWS[number], send, 1)[0].record

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(find, range(24))) == [b"%d" % number for number in range(24)]
    lengths = Counter(map(len, sent))  # nobody's question for scores stays without one for records
    assert [lengths[22 + stage.question_bytes] for stage in index.layout.stages.values()] == [24, 24]
    assert len(set(sent)) == len(sent)


def test_a_child_has_nothing_of_its_parent(client: ExactClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 7)  # numbers of processes are used again
    client.prepare(1)
    theirs = in_child(lambda: name_pad(client))
    assert theirs
    assert theirs != name_pad(client)


def test_a_grandchild_has_nothing_of_its_parent(client: ExactClient) -> None:
    def have_a_child() -> bytes:
        client.prepare(1)
        return in_child(lambda: name_pad(client)) + name_pad(client)

    both = in_child(have_a_child)
    assert both[: len(both) // 2] != both[len(both) // 2 :]


def test_a_fork_while_a_pad_is_made_leaves_it_to_the_parent() -> None:
    stock, process = PadStock(), get_process()
    pad = make_pad(7)  # a signal's handler, say, forks after the secrets were drawn
    assert in_child(lambda: b"%d %d" % (stock.add(pad, process), len(stock))) == b"0 0"
    assert stock.add(pad, process)
    assert len(stock) == 1


def send(one: Any) -> Any:
    return pickle.loads(pickle.dumps(one))  # noqa: S301 (our own)


@pytest.mark.parametrize("copied", [copy.deepcopy, send])
def test_copies_of_a_client_begin_without_pads(client: ExactClient, copied: Callable[[Any], Any]) -> None:
    client.prepare(1)
    assert client._stocks["scores"]._state[1][0].secrets.tobytes() not in pickle.dumps(client)
    other = copied(client)
    assert count_ready(other) == [0, 0]
    assert count_ready(client) == [1, 1]
    assert len(copied(client._stocks["scores"])) == 0
    assert name_pad(other) != name_pad(client)


def test_a_shallow_copy_shares_its_stock(client: ExactClient) -> None:
    client.prepare(1)
    other = copy.copy(client)
    assert name_pad(other) != name_pad(client)
    assert len(copy.copy(client._stocks["scores"])) == 0


def test_a_question_that_fails_loses_its_pad(client: ExactClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.prepare(1)
    first = client._stocks["scores"]._state[1][0].secrets.tobytes()

    def fail(zeros: Words, messages: Any, bits: int) -> Words:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nearveil.sealed.client.add_messages", fail)
        with pytest.raises(KeyboardInterrupt):
            client.ask(ROWS[0])
    assert count_ready(client) == [0, 1]
    assert name_pad(client) != first
    assert add_messages is not fail


def test_a_pad_shows_nothing(client: ExactClient) -> None:
    question = client.ask(ROWS[0])
    assert "pad" not in repr(question)
    assert "zeros" not in repr(question.pad)


FORK = """
import ctypes, os
from tests.sealed.test_pads import PadStock, fill
stock = fill(PadStock(), 1)
if (child := ctypes.CDLL(None).fork()) == 0:
    os._exit(len(stock))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(stock))
"""


def test_a_fork_that_python_did_not_make_has_nothing_of_its_parent() -> None:
    # In a process of one thread: where another holds Python's lock, the child would wait for it for ever.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)  # noqa: S603
    assert done.stdout.split() == ["0", "1"], done.stderr


def test_a_reserved_question_is_nobody_elses(client: ExactClient) -> None:
    client.prepare(1)
    (ready,) = (stock._open()[1][0].secrets.tobytes() for part, stock in client._stocks.items() if part == "scores")
    first, second = client.reserve(), client.reserve()
    assert count_ready(client) == [0, 0]
    assert count_ready(first) == count_ready(second) == [1, 1]
    names = [name_pad(one) for one in (first, second, first, client)]  # the third finds nothing ready
    assert names[0] == ready
    assert len(set(names)) == 4
