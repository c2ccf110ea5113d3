"""Attacks on sealed questions: a distinguisher that knows both images, and checks that know the secrets.

No affordable attack distinguishes errors of a tenth the width from none: the lattice is too large. So the checks open
questions and requests for tokens with the secrets, and the attacks use only the data that a server sees.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.audit._experiment import DIMENSION, ROWS, Experiment, Floats, Pair, draw_gallery, make_check
from nearveil.privacy.noise import Source, gaussian_integers, unsafe_seeded
from nearveil.sealed import SealedClient, SealedIndex
from nearveil.sealed.client import PadRequest, SealedQuestion, make_messages
from nearveil.sealed.layout import Layout
from nearveil.sealed.lwe import Longs, Words, draw_gaussians, expand_matrix, unpack_question
from nearveil.sealed.pads import Pad, get_process
from nearveil.sealed.parameters import LWE, PUBLIC_BITS, RING, SECRET_BITS, WORD_BITS
from nearveil.sealed.ring import (
    PRIMES,
    L,
    Limbs,
    N,
    T,
    TokenKey,
    derive_keys,
    derive_public,
    get_transform,
    public_bytes,
    read_request,
    request_bytes,
    rotate,
    round_fractions,
    to_coefficients,
)
from nearveil.sealed.wire import read_parts, write_parts
from nearveil.wire.frames import Kind

_TRIALS = 400
_CHECKED = 20  # questions to open
_HEADER = 14 + 8  # bytes of a question before its numbers
_CELLS, _COLOURS, _SIDE, _SECRETS = 48, 12, 4, 2
_MODULI = np.array(PRIMES, np.uint64)[:, None]


def centre(values: Longs, bits: int) -> Longs:
    """Return the representatives of values modulo 2^bits from -2^(bits - 1) to 2^(bits - 1) - 1."""
    half = 1 << (bits - 1)
    return ((values + half) & ((1 << bits) - 1)) - half


def make_sealed_experiment(open_client: Callable[..., SealedClient] = SealedClient) -> Experiment:
    """Return the experiment of a client for sealed search, or of a weak one."""
    index = _make_index()
    stages = index.layout.stages
    published = [public_bytes(stage.secret_rows) for stage in stages.values()]
    tokens = write_parts(Kind.SEALED_TOKENS, index.layout.version, [*map(bytes, published)])  # nothing is decrypted
    layout, axes = index.layout.to_bytes(), np.eye(DIMENSION)
    pair = Pair("opposite unit vectors", axes[0], -axes[0])
    candidates = [make_messages(index.layout, row)[0] for row in (pair.first, pair.second)]

    def run(row: Floats, runs: int, source: Source) -> list[SealedQuestion]:
        client = open_client(layout, tokens, source=source)
        questions = []
        for _ in range(runs):
            _stock_pads(client)
            questions.append(client.ask(row))
        return questions

    def search(count: int, source: Source) -> list[tuple[PadRequest, SealedQuestion, SealedQuestion]]:
        client = open_client(layout, tokens, source=source)
        requests = [client.begin_pads() for _ in range(count)]
        searches = []
        for request in requests:
            _stock_pads(client, request)
            searches.append((request, client.ask(pair.first), client.ask_records([])))
        return searches

    def find_weakness(source: Source, alpha: float) -> str | None:
        requests, scores, fetches = zip(*search(_CHECKED, source), strict=True)
        empty = np.zeros((stages["records"].n_groups, stages["records"].n_columns), np.int64)
        draws = {
            "scores": _open_questions(index.layout, "scores", scores, candidates[0]),
            "records": _open_questions(index.layout, "records", fetches, empty),
        }
        draws |= {f"tokens of {part}": _open_requests(index.layout, part, requests) for part in stages}
        mismatches = (problem for draw in draws.values() for problem in draw.problems)
        return (
            "; ".join([*_list_wrong_widths(draws, alpha / 2), *_list_dependent(draws, alpha / 2), *mismatches]) or None
        )

    def find_other_source(source: Source, alpha: float) -> str | None:
        del alpha
        seed = int(source.words(1)[0])
        first, second = (
            [message.data for messages in search(2, unsafe_seeded(seed)) for message in messages] for _ in range(2)
        )
        return None if first == second else "questions do not depend on the words of the source alone"

    return Experiment(
        name="sealed: question",
        guarantee=SealedClient(layout, tokens).guarantee,
        pairs=(pair,),
        run=run,
        numbers=lambda questions: np.array([_describe(index.layout, question, candidates) for question in questions]),
        checks=(make_check("errors and secrets", find_weakness), make_check("the source", find_other_source)),
        trials=_TRIALS,
    )


def _stock_pads(client: SealedClient, request: PadRequest | None = None) -> None:
    """Stock the pads of a request, or new ones; without masks, because no answer is read."""
    pads = [] if request is None else [pad for _, pad in request.pads]
    for number, (name, stage) in enumerate(client.layout.stages.items()):
        if request is None:
            shape = stage.n_groups, stage.n_columns
            zeros, secrets = client._encrypt_zeros(name, client.layout.seed, shape, stage.n_secrets, client._source)
            pads.append(Pad(zeros, np.empty((0, 0), np.int64), secrets))
        client._stocks[name].add(pads[number], get_process())


@dataclass(frozen=True, eq=False)
class Draws:
    """Secrets and errors of many messages: shapes (messages, rows, numbers)."""

    secrets: Longs
    errors: Longs
    problems: tuple[str, ...] = ()


def _open_questions(layout: Layout, part: str, questions: tuple[SealedQuestion, ...], messages: Longs) -> Draws:
    """Return the secrets of questions with these messages, and their errors before rounding or against their pads."""
    stage, (groups, columns) = layout.stages[part], messages.shape
    drop, half = LWE.modulus_bits - WORD_BITS, 1 << (LWE.modulus_bits - stage.question_bits - 1)
    secrets = np.stack([question.pad.secrets for question in questions])
    zeros = np.stack([question.pad.zeros for question in questions]).astype(np.int64)
    sent = np.stack([_read(layout, part, question) for question in questions]) << drop
    rounding = centre(sent - zeros - messages, LWE.modulus_bits)
    products = np.empty_like(zeros)
    for group in range(groups):
        matrix, number = divmod(group, stage.n_secrets)
        rows = expand_matrix(part, layout.seed, matrix * columns, (matrix + 1) * columns).astype(np.float64)
        products[:, group] = (secrets[:, number].astype(np.float64) @ rows.T).astype(np.int64)
    errors = centre(zeros - products, LWE.modulus_bits)
    return Draws(secrets, np.where(np.abs(rounding) <= half, errors, rounding))


def _open_requests(layout: Layout, part: str, requests: tuple[PadRequest, ...]) -> Draws:
    """Return the ring secrets of a stage, and the errors of their rotation keys."""
    number, n_secrets = list(layout.stages).index(part), layout.stages[part].n_secrets
    publics = derive_keys(part, layout.seed)
    fixed = [derive_public(part, layout.seed, "secret", k) for k in range(n_secrets)]
    lengths = [request_bytes(stage.n_secrets) for stage in layout.stages.values()]
    secrets, errors, wrong = [], [], 0
    for request in requests:
        sent = read_parts(request.data, Kind.SEALED_TOKEN_REQUEST, layout.version, lengths)[number]
        key, pad = request.pads[number]
        ring_secret = key._ring_secrets[0]
        ciphertexts, keys = read_request(sent, n_secrets)
        phases = (keys + publics * ring_secret) % _MODULI
        for k, steps in enumerate((1, RING.baby_steps)):
            for q, p in enumerate(PRIMES):
                phases[k, q, q] = (phases[k, q, q] + p - rotate(ring_secret, steps)[q]) % np.uint64(p)
        secrets.append(_lift(ring_secret)[None])
        errors.append(np.stack([_lift(phase) for phase in phases.reshape(2 * L, L, N)]))
        for ciphertext, public, secret in zip(ciphertexts, fixed, pad.secrets, strict=True):
            masked = ciphertext + to_coefficients(public * ring_secret % _MODULI)
            phase = round_fractions(masked % _MODULI, PUBLIC_BITS)
            plain = (phase * np.uint64(T) + np.uint64(1 << (PUBLIC_BITS - 1))) >> np.uint64(PUBLIC_BITS)
            repeated = np.tile(secret % T, N // len(secret))
            wrong += not np.array_equal(get_transform(T).to_slots(plain % np.uint64(T)), repeated)
    problem = f"{wrong} encrypted secrets of {part} do not match their public parts"
    return Draws(np.stack(secrets), np.stack(errors), (problem,) if wrong else ())


def _lift(slots: Limbs) -> Longs:
    """Return coefficients from their residues modulo the first prime, as whole numbers around 0."""
    values = get_transform(PRIMES[0]).to_coefficients(slots[0]).astype(np.int64)
    return values - (values > PRIMES[0] // 2) * PRIMES[0]


def _list_wrong_widths(draws: dict[str, Draws], alpha: float) -> Iterator[str]:
    for part, draw in draws.items():
        for word, values in (("errors", draw.errors), ("secrets", draw.secrets)):
            ratio = float((values.astype(np.float64) ** 2).mean()) / float(LWE.sigma) ** 2
            if abs(ratio - 1) > 2 * math.sqrt(2 / values.size * 2 * math.log(16 / alpha)):
                yield f"the variance of {word} of {part} is {ratio:.3g} times the required one"
        rows = draw.secrets.reshape(-1, draw.secrets.shape[2])
        if len(np.unique(rows, axis=0)) < len(rows):
            yield f"a secret of {part} is reused"


def _list_dependent(draws: dict[str, Draws], alpha: float) -> Iterator[str]:
    pairs = {}
    for (first, draw), (second, other) in combinations(draws.items(), 2):
        pairs[f"secrets of {first} and of {second}"] = draw.secrets, other.secrets
        pairs[f"errors of {first} and of {second}"] = draw.errors, other.errors
    for part, draw in draws.items():
        secrets, errors = draw.secrets, draw.errors
        pairs |= {
            f"secrets of {part}": (secrets, secrets),
            f"errors of {part}": (errors, errors),
            f"secrets and errors of {part}": (secrets, errors),
            f"secrets of successive questions for {part}": (secrets[:-1], secrets[1:]),
            f"errors of successive questions for {part}": (errors[:-1], errors[1:]),
        }
    for name, (left, right) in pairs.items():
        if are_dependent(left, right, alpha / len(pairs)):
            yield f"{name} are not independent"


def are_dependent(first: Longs, second: Longs, alpha: float) -> bool:
    """Test whether rows of two arrays, shapes (questions, rows, numbers), depend on each other at any offset."""
    # Signs and parities of independent draws are fair coins: the sum of their products is a martingale with steps <= 1.
    # By Azuma's inequality independent draws fail with probability `alpha` at most (docs/theory/audit.md, Lemma 10).
    length = 1 << (first.shape[2] + second.shape[2] - 1).bit_length()
    terms = len(first) * min(first.shape[2], second.shape[2])
    tests = 2 * first.shape[1] * second.shape[1] * length
    limit = math.sqrt(2 * terms * math.log(2 * tests / alpha))
    for signs in (tuple(map(np.sign, (first, second))), tuple(1 - 2 * (values & 1) for values in (first, second))):
        spectra = [np.fft.rfft(values, length) for values in signs]
        sums = np.fft.irfft(np.einsum("qaf,qbf->abf", spectra[0].conj(), spectra[1], optimize=True), length)
        if first is second:
            sums[np.diag_indices(len(sums))] *= np.arange(length) > 0  # each row equals itself
        if np.abs(sums).max() > limit:
            return True
    return False


def _describe(layout: Layout, question: SealedQuestion, candidates: list[Longs]) -> NDArray[np.float64]:
    """Return features of a question: its length, and how well either image explains what colours share."""
    drop = LWE.modulus_bits - WORD_BITS
    sent = _read(layout, "scores", question) << drop
    first, second = np.triu_indices(layout.n_colours, 1)
    fits = []
    for message in candidates:
        rest = sent - message
        differences = centre(rest[first] - rest[second], LWE.modulus_bits)  # small if colours share matrix and secret
        residuals = centre(rest, LWE.modulus_bits)
        closest = float(np.abs(differences).mean(axis=1).min())
        fits += [math.log1p(closest), float(np.abs(residuals).mean()), float(residuals.mean())]
    return np.array([len(question.data), *fits])


def _read(layout: Layout, part: str, question: SealedQuestion) -> Longs:
    """Return the numbers of a question, shape (groups, columns)."""
    stage = layout.stages[part]
    packed, count = question.data[_HEADER : _HEADER + stage.question_bytes], stage.n_groups * stage.n_columns
    return unpack_question(packed, stage.question_bits, count).reshape(stage.n_groups, -1).astype(np.int64)


@lru_cache(maxsize=1)
def _make_index() -> SealedIndex:
    records = [b"%d" % number for number in range(ROWS)]
    return SealedIndex.build(
        draw_gallery(),
        records=records,
        n_cells=_CELLS,
        n_colours=_COLOURS,
        side=_SIDE,
        n_secrets=_SECRETS,
    )


Weakness = Callable[[str, Longs, Longs], tuple[Longs, Longs]]
"""From a stage, secrets and errors of a sound client to weaker secrets and errors."""
RingWeakness = Callable[[str, Longs], Longs]
"""From a stage, a ring secret and the errors under it to weaker ones."""


def _open_weak_client(
    make_weakness: Callable[[], Weakness], *published: Any, source: Source, one_matrix: bool = False
) -> SealedClient:
    """Return a client with a new weakness of its questions."""
    client, weaken = SealedClient(*published, source=source), make_weakness()

    def encrypt_zeros(
        stage: str, seed: bytes, shape: tuple[int, int], n_secrets: int, source: Source
    ) -> tuple[Words, Longs]:
        drawn = draw_gaussians((n_secrets, LWE.dimension), source)
        secrets, zeros = weaken(stage, drawn, draw_gaussians(shape, source))
        for group in range(shape[0]):
            start = 0 if one_matrix else group // n_secrets * shape[1]
            matrix = expand_matrix(stage, seed, start, start + shape[1]).astype(np.int64)
            zeros[group] += matrix @ secrets[group % n_secrets]
        return (zeros & ((1 << LWE.modulus_bits) - 1)).astype(np.uint32), secrets

    client._encrypt_zeros = encrypt_zeros
    return client


def _open_client_of_weak_rings(
    make_weakness: Callable[[], RingWeakness], *published: Any, source: Source
) -> SealedClient:
    """Return a client with a new weakness of its requests for tokens."""
    client, weaken = SealedClient(*published, source=source), make_weakness()

    def make_key(stage: str, seed: bytes, secrets: Longs, source: Source) -> TokenKey:
        count = 1 + 2 * L + len(secrets)
        drawn = gaussian_integers(RING.sigma, count * N, source).reshape(-1, N)
        return TokenKey._encrypt(stage, seed, secrets, weaken(stage, drawn))

    client._make_key = make_key
    return client


def _open_client_of_one_public_part(*published: Any, source: Source) -> SealedClient:
    """Return a client that encrypts both secrets of a stage under the first public part."""
    client = SealedClient(*published, source=source)

    def make_key(stage: str, seed: bytes, secrets: Longs, source: Source) -> TokenKey:
        drawn = gaussian_integers(RING.sigma, (1 + 2 * L + len(secrets)) * N, source).reshape(-1, N)
        keys = [
            TokenKey._encrypt(stage, seed, secrets[k : k + 1], drawn[[*range(1 + 2 * L), 1 + 2 * L + k]])
            for k in range(len(secrets))
        ]
        size = N * SECRET_BITS // 8
        return TokenKey(b"".join(key.request[:size] for key in keys) + keys[0].request[size:], keys[0]._ring_secrets[0])

    client._make_key = make_key
    return client


def _draw_by_clock(stage: str, secrets: Longs, errors: Longs) -> tuple[Longs, Longs]:
    del stage
    drawn = np.random.default_rng(time.time_ns()).normal(0, float(LWE.sigma), errors.shape)
    return secrets, np.rint(drawn).astype(np.int64)


def _make_secret_keeper() -> Weakness:
    """Return the weakness of fetching records with the secrets of the scores."""
    last: list[Longs] = []

    def weaken(stage: str, secrets: Longs, errors: Longs) -> tuple[Longs, Longs]:
        if stage == "scores":
            last.append(secrets)
        return (secrets if stage == "scores" else last.pop(0)), errors

    return weaken


def _make_ring_keeper(*, whole: bool = False) -> RingWeakness:
    """Return the weakness of one ring secret for the stages of a question, or for all questions."""
    last: list[Longs] = []

    def weaken(stage: str, drawn: Longs) -> Longs:
        if not last or (stage == "scores" and not whole):
            last[:] = [drawn[0].copy()]
        drawn[0] = last[0]
        return drawn

    return weaken


class _ReusingClient(SealedClient):
    """Reuses its pads."""

    def _take_pad(self, part: str) -> Pad:
        pad = super()._take_pad(part)
        self._stocks[part].add(pad, get_process())
        return pad


class _LengthLeakClient(SealedClient):
    def ask(self, row: ArrayLike, near: ArrayLike | None = None) -> SealedQuestion:
        question = super().ask(row, near)
        return replace(question, data=question.data + bytes(int(make_messages(self.layout, row)[1][0])))


_WEAKNESSES: dict[str, Callable[[], Weakness]] = {
    "no errors": lambda: lambda _, secrets, errors: (secrets, 0 * errors),
    "one secret for groups that share a matrix": lambda: lambda _, secrets, errors: (0 * secrets + secrets[0], errors),
    "errors of a tenth the width": lambda: lambda _, secrets, errors: (secrets, errors // 10),
    "300 numbers of each secret twice": lambda: (
        lambda _, secrets, errors: (np.hstack([secrets[:, :300], secrets[:, :300], secrets[:, 600:]]), errors)
    ),
    "one error for all records": lambda: (
        lambda stage, secrets, errors: (secrets, errors[[0] * len(errors)] if stage == "records" else errors)
    ),
    "errors of a clock": lambda: _draw_by_clock,
    "records under the secrets of scores": _make_secret_keeper,
}
_RING_WEAKNESSES: dict[str, Callable[[], RingWeakness]] = {
    "one ring secret for both stages": _make_ring_keeper,
    "one ring secret for all questions": partial(_make_ring_keeper, whole=True),
    "ternary ring secrets": lambda: lambda _, drawn: np.vstack([np.sign(drawn[:1]), drawn[1:]]),
    "ring secrets with a mean": lambda: lambda _, drawn: drawn + 2 * (np.arange(len(drawn)) == 0)[:, None],
    "rotation keys without errors": lambda: lambda _, drawn: drawn * (np.arange(len(drawn)) == 0)[:, None],
    "ring errors of half the width": lambda: lambda _, drawn: np.vstack([drawn[:1], drawn[1:] // 2]),
    "one error for both rotation keys": lambda: (
        lambda _, drawn: np.vstack([drawn[: 1 + L], drawn[1 : 1 + L], drawn[1 + 2 * L :]])
    ),
}
SPECIMENS: dict[str, Callable[[], Experiment]] = {
    "pads that are reused": partial(make_sealed_experiment, _ReusingClient),
    "a length that depends on the cell": partial(make_sealed_experiment, _LengthLeakClient),
    **{name: partial(make_sealed_experiment, partial(_open_weak_client, make)) for name, make in _WEAKNESSES.items()},
    "one matrix for all colours": partial(
        make_sealed_experiment,
        partial(_open_weak_client, lambda: lambda _, secrets, errors: (secrets, errors), one_matrix=True),
    ),
    **{
        name: partial(make_sealed_experiment, partial(_open_client_of_weak_rings, make))
        for name, make in _RING_WEAKNESSES.items()
    },
    "one public part for both secrets": partial(make_sealed_experiment, _open_client_of_one_public_part),
}
