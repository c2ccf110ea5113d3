"""Secrets, errors and the public matrix: each number is a draw of its own, computed a second time from the source.

Sixteen colours, and both stages of a search: scores and records.
"""

import hashlib
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from nearveil.privacy.noise import gaussian_integers
from nearveil.sealed import SealedIndex
from nearveil.sealed.client import SealedQuestion, make_messages
from nearveil.sealed.lwe import Longs, add_messages, expand_matrix
from nearveil.sealed.parameters import LWE
from nearveil.sealed.records import place_records
from nearveil.sealed.wire import write_question
from tests.sealed.exact import ExactClient
from tests.sources import Tape, record_words

ROWS = np.random.default_rng(0).normal(size=(200, 12))
COLOURS, SECRETS, WANTED = 16, 3, (3, 7, 11)


@pytest.fixture(scope="module")
def index() -> SealedIndex:
    return SealedIndex.build(
        ROWS,
        records=[b"%d" % i for i in range(200)],
        n_cells=48,
        n_colours=COLOURS,
        n_secrets=SECRETS,
        kernel="numpy",
    )


def make_matrix(stage: str, seed: bytes, rows: range) -> Longs:
    """Return rows of the public matrices, one block of AES at a time: block i of the key stream is the cipher of i."""
    key = hashlib.sha256(b"nearveil sealed matrix\0" + stage.encode() + b"\0" + seed).digest()
    encrypt = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update  # noqa: S305 (block by block)
    per_row = LWE.dimension // 4
    blocks = range(rows.start * per_row, rows.stop * per_row)
    stream = encrypt(b"".join(block.to_bytes(16, "big") for block in blocks))
    words = np.frombuffer(stream, "<i4").reshape(len(rows), -1).astype(np.int64)
    return words // (1 << (32 - LWE.modulus_bits))


@pytest.mark.parametrize("stage", ["scores", "records"])
@pytest.mark.parametrize("start", [0, 127, 4095, 65534, LWE.most_samples - 2])
def test_the_matrix_is_the_key_stream_to_its_last_row(stage: str, start: int) -> None:
    seed = bytes(range(32))
    expected = make_matrix(stage, seed, range(start, start + 2))
    np.testing.assert_array_equal(expand_matrix(stage, seed, start, start + 2), expected)


def replay_question(client: ExactClient, part: str, question: SealedQuestion, tape: Tape) -> tuple[bytes, Longs]:
    """Return the bytes of a question and its secrets, computed from recorded words."""
    layout = client.layout
    stage, records = layout.stages[part], layout.records
    assert records is not None
    if part == "scores":
        messages = make_messages(layout, ROWS[0])[0]
    else:
        messages = np.zeros((records.n_buckets, stage.n_columns), np.int64)
        for bucket, position in enumerate(question.buckets):
            if position >= 0:
                (block,), (column,), _ = place_records(records, layout.seed, np.array([position]))
                row, along = divmod(int(block), records.side)
                assert bucket in {row, records.side + along}
                messages[bucket, (along if bucket == row else row) * records.n_columns + int(column)] = 1 << 20
    secrets = gaussian_integers(LWE.sigma, stage.n_secrets * LWE.dimension, tape).reshape(stage.n_secrets, -1)
    errors = gaussian_integers(LWE.sigma, messages.size, tape).reshape(messages.shape)
    zeros = errors.copy()
    for group in range(stage.n_groups):
        start = group // stage.n_secrets * stage.n_columns
        matrix = make_matrix(part, layout.seed, range(start, start + stage.n_columns))
        zeros[group] += matrix @ secrets[group % stage.n_secrets]
    zeros %= 2**LWE.modulus_bits
    ciphertexts = add_messages(zeros.astype(np.uint32), messages, stage.question_bits)
    return write_question(part, layout.version, ciphertexts, stage.question_bits), secrets


@pytest.mark.parametrize("default", [True, False], ids=["default source", "seeded source"])
@pytest.mark.parametrize("prepared", [0, 2])
def test_questions_are_made_of_the_words_of_the_source(
    index: SealedIndex, prepared: int, default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = []

    def ask(source: Any) -> list[SealedQuestion]:
        clients.append(client := ExactClient(index, source))
        client.prepare(prepared)
        questions = [question for _ in range(2) for question in (client.ask(ROWS[0]), client.ask_records(WANTED))]
        return questions[::2] + questions[1::2] if prepared else questions

    questions, tape = record_words(monkeypatch, ask, default=default)
    # An exact client that finds a stock empty fills both.
    parts = ["scores", "scores", "records", "records"] if prepared else ["scores", "records"] * 2
    for part, question in zip(parts, questions, strict=True):
        data, secrets = replay_question(clients[0], part, question, tape)
        np.testing.assert_array_equal(question.pad.secrets, secrets)
        assert question.data == data
    assert len(tape) == 0
