"""Secrets, errors and the public matrix: each number is a draw of its own, computed a second time from the source.

Sixteen colours, and both stages of a search: scores and records.
"""

import hashlib
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from nearveil.privacy.noise import gaussian_integers
from nearveil.sealed import SealedClient, SealedIndex
from nearveil.sealed.client import SealedQuestion, make_messages
from nearveil.sealed.lwe import Longs, add_messages, expand_matrix
from nearveil.sealed.parameters import FETCH, SCORES, LweParameters
from nearveil.sealed.wire import write_question
from tests.sources import Tape, record_words

ROWS = np.random.default_rng(0).normal(size=(200, 12))
COLOURS, FETCHED, WANTED = 16, 20, (3, 7, 11)


@pytest.fixture(scope="module")
def index() -> SealedIndex:
    return SealedIndex.build(
        ROWS,
        records=[b"%d" % i for i in range(200)],
        n_cells=48,
        n_colours=COLOURS,
        n_fetched=FETCHED,
        kernel="numpy",
    )


def make_matrix(parameters: LweParameters, seed: bytes, rows: range) -> Longs:
    """Return rows of the public matrix, one block of AES at a time: block i of the key stream is the cipher of i."""
    key = hashlib.sha256(b"nearveil sealed matrix\0" + parameters.name.encode() + b"\0" + seed).digest()
    encrypt = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update  # noqa: S305 (block by block)
    per_row = parameters.dimension // 4
    blocks = range(rows.start * per_row, rows.stop * per_row)
    stream = encrypt(b"".join(block.to_bytes(16, "big") for block in blocks))
    words = np.frombuffer(stream, "<i4").reshape(len(rows), -1).astype(np.int64)
    return words // (1 << (32 - parameters.modulus_bits))


@pytest.mark.parametrize("parameters", [SCORES, FETCH], ids=lambda one: one.name)
@pytest.mark.parametrize("start", [0, 127, 4095, 8191, 16384, 65534])
def test_the_matrix_is_the_key_stream_to_its_last_row(parameters: LweParameters, start: int) -> None:
    seed = bytes(range(32))
    expected = make_matrix(parameters, seed, range(start, start + 2))
    np.testing.assert_array_equal(expand_matrix(parameters, seed, start, start + 2), expected)


def replay_question(index: SealedIndex, part: str, tape: Tape) -> tuple[bytes, Longs]:
    """Return the bytes of a question and its secrets, computed from recorded words."""
    layout = index.layout
    assert layout.records is not None
    if part == "scores":
        parameters, messages = SCORES, make_messages(layout, ROWS[0])[0]
    else:
        columns = np.array([*WANTED, *[0] * (FETCHED - len(WANTED))]) // layout.records.per_column
        parameters, messages = FETCH, np.eye(layout.records.n_columns, dtype=np.int64)[columns] << 24
    count, samples = messages.shape
    secrets = gaussian_integers(parameters.sigma, count * parameters.dimension, tape).reshape(count, -1)
    errors = gaussian_integers(parameters.sigma, count * samples, tape).reshape(count, -1)
    zeros = (secrets @ make_matrix(parameters, layout.seed, range(samples)).T + errors) % 2**parameters.modulus_bits
    ciphertexts = add_messages(parameters, zeros.astype(np.uint32), messages)
    return write_question(part, layout.version, ciphertexts), secrets


@pytest.mark.parametrize("default", [True, False], ids=["default source", "seeded source"])
@pytest.mark.parametrize("prepared", [0, 2])
def test_questions_are_made_of_the_words_of_the_source(
    index: SealedIndex, prepared: int, default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, hints = index.layout.to_bytes(), index.get_hints()

    def ask(source: Any) -> list[SealedQuestion]:
        client = SealedClient(layout, hints, source=source)
        client.prepare(prepared)
        questions = [question for _ in range(2) for question in (client.ask(ROWS[0]), client.ask_records(WANTED))]
        return questions[::2] + questions[1::2] if prepared else questions

    questions, tape = record_words(monkeypatch, ask, default=default)
    parts = ["scores", "scores", "records", "records"] if prepared else ["scores", "records"] * 2
    for part, question in zip(parts, questions, strict=True):
        data, secrets = replay_question(index, part, tape)
        np.testing.assert_array_equal(question.pad.secrets, secrets)
        assert question.data == data
    assert len(tape) == 0
