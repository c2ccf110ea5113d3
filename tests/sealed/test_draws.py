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
from nearveil.sealed.client import PadRequest, SealedQuestion, make_messages
from nearveil.sealed.lwe import Longs, add_messages, expand_matrix
from nearveil.sealed.parameters import LWE, RING, SECRET_BITS
from nearveil.sealed.records import place_records
from nearveil.sealed.ring import get_transform, rotate
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


def derive_slots(stage: str, seed: bytes, kind: str, number: int) -> np.ndarray:
    """Return a public ring element in slots, shape (L, N): 16 bytes of the key stream of AES for each."""
    name = b"\0".join([b"nearveil sealed ring", stage.encode(), kind.encode(), number.to_bytes(4, "little"), seed])
    cipher = Cipher(algorithms.AES(hashlib.sha256(name).digest()), modes.CTR(bytes(16)))
    stream = cipher.encryptor().update(bytes(16 * 3 * RING.degree))
    words = np.frombuffer(stream, "<u8").reshape(-1, 2).astype(object)
    residues = (words[:, 0] * 2**64 + words[:, 1]).reshape(3, -1) % np.array(RING.primes, object)[:, None]
    return np.asarray(residues, np.int64)


def make_slots(numbers: np.ndarray) -> np.ndarray:
    """Return the slots of a polynomial with whole coefficients."""
    slots = [get_transform(p).to_slots((numbers % p).astype(np.uint64)) for p in RING.primes]
    return np.stack(slots).astype(np.int64)


def pack_numbers(numbers: list[int], width: int) -> bytes:
    """Return numbers one after the other, the lowest bit of the first one first."""
    digits = "".join(f"{number:0{width}b}" for number in reversed(numbers))
    return int(digits, 2).to_bytes(len(digits) // 8, "little")


def encrypt_plainly(secret: Longs, public: np.ndarray, ring_secret: np.ndarray, error: np.ndarray) -> list[int]:
    """Return the coefficients of an encryption of a secret modulo q, as whole numbers, without their last bits."""
    t, q, moduli = RING.plain_modulus, RING.modulus, np.array(RING.primes)[:, None]
    plain = get_transform(t).to_coefficients(np.tile(secret % t, RING.degree // len(secret)).astype(np.uint64))
    scaled = (2 * plain.astype(object) * q + t) // (2 * t)
    slots = (make_slots(scaled) + error - public * ring_secret) % moduli
    whole = np.zeros(RING.degree, object)
    for p, residues in zip(RING.primes, slots, strict=True):
        coefficients = get_transform(p).to_coefficients(residues.astype(np.uint64))
        whole += coefficients.astype(object) * (q // p * pow(q // p, -1, p))
    drop = q.bit_length() - SECRET_BITS
    return [(int(number) % q + (1 << (drop - 1))) >> drop for number in whole]


def replay_request(index: SealedIndex, tape: Tape) -> bytes:
    """Return the bytes of a request for tokens, computed from recorded words."""
    request, moduli, seed = b"", np.array(RING.primes)[:, None], index.layout.seed
    for part, stage in index.layout.stages.items():
        shape = stage.n_secrets, LWE.dimension
        secrets = gaussian_integers(LWE.sigma, shape[0] * shape[1], tape).reshape(shape)
        gaussian_integers(LWE.sigma, stage.n_groups * stage.n_columns, tape)  # errors of the question
        numbers = gaussian_integers(RING.sigma, (1 + 6 + stage.n_secrets) * RING.degree, tape)
        ring_secret, *errors = map(make_slots, numbers.reshape(-1, RING.degree))
        keys = []
        for kind, steps in (("baby", 1), ("giant", RING.baby_steps)):
            for number in range(3):
                row = (errors.pop(0) - derive_slots(part, seed, kind, number) * ring_secret) % moduli
                row[number] = (row[number] + rotate(ring_secret, steps)[number]) % moduli[number]
                keys.append(row)
        for k, secret in enumerate(secrets):
            public = derive_slots(part, seed, "secret", k)
            request += pack_numbers(encrypt_plainly(secret, public, ring_secret, errors[k]), SECRET_BITS)
        request += pack_numbers(np.stack(keys).ravel().tolist(), 29)
    return request


@pytest.mark.parametrize("default", [True, False], ids=["default source", "seeded source"])
def test_requests_are_made_of_the_words_of_the_source(
    index: SealedIndex, default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(source: Any) -> list[PadRequest]:
        client = ExactClient(index, source)
        return [client.begin_pads() for _ in range(2)]

    requests, tape = record_words(monkeypatch, begin, default=default)
    for request in requests:
        expected = replay_request(index, tape)
        sizes = [len(key.request) for key, _ in request.pads]
        ends = np.cumsum([4 + size for size in sizes])  # each after its length
        sent = request.data[len(request.data) - ends[-1] :]
        assert b"".join(sent[end - size : end] for end, size in zip(ends, sizes, strict=True)) == expected
    assert len(tape) == 0
