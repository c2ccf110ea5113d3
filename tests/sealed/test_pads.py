"""What is prepared for questions is used once: by no second thread, process, copy or layout."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from nearveil.sealed import SealedClient, SealedIndex
from nearveil.sealed.lwe import Words, add_messages, expand_matrix
from nearveil.sealed.pads import Pad, PadStock, multiply_hint
from nearveil.sealed.parameters import FETCH

ROWS = np.random.default_rng(0).normal(size=(60, 12))


@pytest.fixture(scope="module")
def index() -> SealedIndex:
    return SealedIndex.build(ROWS, records=[b"%d" % i for i in range(60)], n_cells=6, n_colours=3, kernel="numpy")


@pytest.fixture
def client(index: SealedIndex) -> SealedClient:
    return SealedClient(index.layout.to_bytes(), index.get_hints())


def count_ready(client: SealedClient) -> list[int]:
    return [len(stock) for stock in client._stocks.values()]


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


def test_prepared_questions_find_the_same(index: SealedIndex, client: SealedClient) -> None:
    client.prepare(2)
    assert count_ready(client) == [2, 2]
    for number, left in enumerate(([1, 1], [0, 0], [0, 0])):  # the last finds nothing ready
        assert client.search(ROWS[number], index.answer, 1)[0].record == b"%d" % number
        assert count_ready(client) == left


def test_preparing_tops_up(client: SealedClient) -> None:
    client.prepare(2)
    client.prepare()
    client.prepare(0)
    assert count_ready(client) == [2, 2]
    with pytest.raises(ValueError, match="n_questions must be"):
        client.prepare(-1)


def test_masks_are_the_answers_to_encryptions_of_zero(index: SealedIndex, client: SealedClient) -> None:
    pad = client._make_pad("records")
    matrix = expand_matrix(FETCH, index.layout.seed, 0, pad.zeros.shape[1]).astype(np.int64)
    errors = (pad.zeros - pad.secrets @ matrix.T + (1 << 31)) % (1 << 32) - (1 << 31)
    assert 5 < errors.std() < 8
    hint = client._hints["records"].astype(object)
    np.testing.assert_array_equal(pad.masks, (hint @ pad.secrets.T.astype(object)).T.astype(np.int64))


def test_products_with_hints_are_exact() -> None:
    rng = np.random.default_rng(1)
    hint, secrets = (
        rng.integers((1 << 24) - 9, 1 << 24, (300, 1280)).astype(np.uint32),
        rng.choice([-119, 119], (3, 1280)),
    )
    np.testing.assert_array_equal(multiply_hint(hint, secrets), secrets @ hint.astype(np.int64).T)


def test_no_two_questions_have_secrets_in_common(client: SealedClient) -> None:
    client.prepare(4)
    questions = [client.ask(ROWS[0]) for _ in range(8)] + [client.ask_records([1]) for _ in range(8)]
    secrets = [row.tobytes() for question in questions for row in question.pad.secrets]
    assert len(set(secrets)) == len(secrets)


def test_threads_never_get_the_same_pad() -> None:
    stock, count = PadStock(), 2000
    marks = iter(range(count))
    stock.fill(count, lambda: make_pad(next(marks)))
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda _: stock.take(), range(count + 50)))
    found = [int(pad.zeros[0]) for pad in taken if pad is not None]
    assert (len(found), len(set(found))) == (count, count)


def test_a_child_has_nothing_of_its_parent(client: SealedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 7)  # numbers of processes are used again
    client.prepare(1)
    theirs = in_child(lambda: name_pad(client))
    assert theirs
    assert theirs != name_pad(client)


def test_a_grandchild_has_nothing_of_its_parent(client: SealedClient) -> None:
    def have_a_child() -> bytes:
        client.prepare(1)
        return in_child(lambda: name_pad(client)) + name_pad(client)

    both = in_child(have_a_child)
    assert both[: len(both) // 2] != both[len(both) // 2 :]


def test_a_fork_while_a_pad_is_made_leaves_it_to_the_parent() -> None:
    stock, marks = PadStock(), iter((7, 8))

    def make() -> Pad:  # a signal's handler, say, forks after the secrets were drawn
        pad = make_pad(next(marks))
        if pad.zeros[0] == 7:
            children.append(os.fork())
        return pad

    children: list[int] = []
    read, write = os.pipe()
    try:
        stock.fill(1, make)
        mine = [int(pad.zeros[0]) for pad in iter(stock.take, None)]
    finally:
        if children == [0]:  # pragma: no cover
            os.write(write, bytes(mine))
            os._exit(0)
    os.waitpid(children[0], 0)
    assert (mine, os.read(read, 8)) == ([7], b"\x08")
    os.close(read)
    os.close(write)


def send(one: Any) -> Any:
    return pickle.loads(pickle.dumps(one))  # noqa: S301 (our own)


@pytest.mark.parametrize("copied", [copy.deepcopy, send])
def test_copies_of_a_client_begin_without_pads(client: SealedClient, copied: Callable[[Any], Any]) -> None:
    client.prepare(1)
    assert client._stocks["scores"]._state[1][0].secrets.tobytes() not in pickle.dumps(client)
    other = copied(client)
    assert count_ready(other) == [0, 0]
    assert count_ready(client) == [1, 1]
    assert len(copied(client._stocks["scores"])) == 0
    assert name_pad(other) != name_pad(client)


def test_a_shallow_copy_shares_its_stock(client: SealedClient) -> None:
    client.prepare(1)
    other = copy.copy(client)
    assert name_pad(other) != name_pad(client)
    assert len(copy.copy(client._stocks["scores"])) == 0


def test_a_question_that_fails_loses_its_pad(client: SealedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.prepare(1)
    first = client._stocks["scores"]._state[1][0].secrets.tobytes()

    def fail(parameters: Any, zeros: Words, messages: Any) -> Words:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nearveil.sealed.client.add_messages", fail)
        with pytest.raises(KeyboardInterrupt):
            client.ask(ROWS[0])
    assert count_ready(client) == [0, 1]
    assert name_pad(client) != first
    assert add_messages is not fail


def test_what_was_prepared_for_another_layout_is_not_used() -> None:
    index = SealedIndex.build(ROWS, records=[b"%d" % i for i in range(60)], n_cells=6, n_colours=6, kernel="numpy")
    client = SealedClient(index.layout.to_bytes(), index.get_hints())
    client.prepare(1)
    index.remove([3])
    fresh = client.update(index.layout.to_bytes(), index.get_hints(client.layout.version))
    assert count_ready(fresh) == [0, 0]
    assert fresh.search(ROWS[5], index.answer, 1)[0].record == b"5"


def test_a_pad_shows_nothing(client: SealedClient) -> None:
    question = client.ask(ROWS[0])
    assert "pad" not in repr(question)
    assert "zeros" not in repr(question.pad)


FORK = """
import ctypes, os
from tests.sealed.test_pads import PadStock, make_pad
stock = PadStock()
stock.fill(1, make_pad)
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


def test_a_reserved_question_is_nobody_elses(client: SealedClient) -> None:
    client.prepare()
    (ready,) = (stock._open()[0].secrets.tobytes() for part, stock in client._stocks.items() if part == "scores")
    first, second = client.reserve(), client.reserve()
    assert count_ready(client) == [0, 0]
    assert count_ready(first) == count_ready(second) == [1, 1]
    names = [name_pad(one) for one in (first, second, first, client)]  # the third finds nothing ready
    assert names[0] == ready
    assert len(set(names)) == 4
