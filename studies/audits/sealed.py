"""Attacks on sealed questions: a distinguisher that knows both images, and checks that know the secrets.

No affordable attack distinguishes errors of a tenth the width from none: the lattice is too large. So the checks open
the questions with the secrets, and the attacks use only the data that a server sees.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.audit._conduct import make_check
from nearveil.audit._experiment import DIMENSION, ROWS, Experiment, Floats, Pair, draw_gallery
from nearveil.privacy.noise import Source, unsafe_seeded
from nearveil.sealed import SealedClient, SealedIndex
from nearveil.sealed.accuracy import BYTE_BITS
from nearveil.sealed.client import SealedQuestion, make_messages
from nearveil.sealed.layout import Layout
from nearveil.sealed.lwe import WORD_BITS, Longs, Words, centre, draw_gaussians, expand_matrix, unpack_question
from nearveil.sealed.pads import Pad
from nearveil.sealed.parameters import FETCH, SCORES, LweParameters
from nearveil.sealed.sizes import count_question_bytes

_TRIALS = 400
_CHECKED = 20  # questions to open
_HEADER = 14 + 8  # bytes of a question before its numbers
_CELLS, _COLOURS, _FETCHED = 48, 12, 12


def make_sealed_experiment(open_client: Callable[..., SealedClient] = SealedClient) -> Experiment:
    """Return the experiment of a client for sealed search, or of a weak one."""
    index = _make_index()
    layout, hints = index.layout.to_bytes(), index.get_hints()
    axes = np.eye(DIMENSION)
    pair = Pair("opposite unit vectors", axes[0], -axes[0])
    candidates = [make_messages(index.layout, row)[0] for row in (pair.first, pair.second)]

    def prepare_client(count: int, source: Source) -> SealedClient:
        client = open_client(layout, hints, source=source)
        client.prepare(count // 2)  # half of the pads are prepared
        return client

    def run(row: Floats, runs: int, source: Source) -> list[SealedQuestion]:
        client = prepare_client(min(runs, _CHECKED), source)
        return [client.ask(row) for _ in range(runs)]

    def search(count: int, source: Source) -> list[tuple[SealedQuestion, SealedQuestion]]:
        client = prepare_client(count, source)
        return [(client.ask(pair.first), client.ask_records(range(_FETCHED))) for _ in range(count)]

    def find_weakness(source: Source, alpha: float) -> str | None:
        scores, fetches = zip(*search(_CHECKED, source), strict=True)
        draws = {
            "scores": _open_questions(index.layout, SCORES, scores, candidates[0]),
            "records": _open_questions(index.layout, FETCH, fetches, _make_fetch_messages(index.layout)),
        }
        return "; ".join([*_list_wrong_widths(draws, alpha / 2), *_list_dependent(draws, alpha / 2)]) or None

    def find_other_source(source: Source, alpha: float) -> str | None:
        del alpha
        seed = int(source.words(1)[0])
        first, second = (
            [question.data for pair in search(2, unsafe_seeded(seed)) for question in pair] for _ in range(2)
        )
        return None if first == second else "questions do not depend on the words of the source alone"

    return Experiment(
        name="sealed: question",
        guarantee=SealedClient(layout, hints).guarantee,
        pairs=(pair,),
        run=run,
        numbers=lambda questions: np.array([_describe(index.layout, question, candidates) for question in questions]),
        checks=(make_check("errors and secrets", find_weakness), make_check("the source", find_other_source)),
        trials=_TRIALS,
    )


@dataclass(frozen=True, eq=False)
class Draws:
    """Secrets and errors of many questions: shapes (questions, rows, n) and (questions, rows, C)."""

    secrets: Longs
    errors: Longs


def _open_questions(
    layout: Layout, parameters: LweParameters, questions: tuple[SealedQuestion, ...], messages: Longs
) -> Draws:
    """Return the secrets of questions with these messages, and their errors before rounding or against their pads."""
    matrix = expand_matrix(parameters, layout.seed, 0, messages.shape[1]).astype(np.float64)
    drop, half = parameters.modulus_bits - WORD_BITS, 1 << (parameters.modulus_bits - parameters.question_bits - 1)
    secrets = np.stack([question.pad.secrets for question in questions])
    zeros = np.stack([question.pad.zeros for question in questions]).astype(np.int64)
    sent = np.stack([_read(parameters, question, messages.shape) for question in questions]) << drop
    rounding = centre(sent - zeros - messages, parameters.modulus_bits)
    products = (secrets.astype(np.float64) @ matrix.T).astype(np.int64)
    errors = centre(zeros - products, parameters.modulus_bits)
    return Draws(secrets, np.where(np.abs(rounding) <= half, errors, rounding))


def _make_fetch_messages(layout: Layout) -> Longs:
    """Return the messages of a question for the records of the first positions."""
    assert layout.records is not None
    columns = np.arange(_FETCHED) // layout.records.per_column
    chosen = np.arange(layout.records.n_columns) == columns[:, None]
    return np.where(chosen, np.int64(1 << (FETCH.modulus_bits - BYTE_BITS)), np.int64(0))


def _list_wrong_widths(draws: dict[str, Draws], alpha: float) -> Iterator[str]:
    for part, draw in draws.items():
        for word, values in (("errors", draw.errors), ("secrets", draw.secrets)):
            ratio = float(values.var()) / float(SCORES.sigma) ** 2
            if abs(ratio - 1) > 2 * math.sqrt(2 / values.size * 2 * math.log(8 / alpha)):
                yield f"the variance of {word} of {part} is {ratio:.3g} times the required one"
        rows = draw.secrets.reshape(-1, draw.secrets.shape[2])
        if len(np.unique(rows, axis=0)) < len(rows):
            yield f"a secret of {part} is reused"


def _list_dependent(draws: dict[str, Draws], alpha: float) -> Iterator[str]:
    scores, records = draws["scores"], draws["records"]
    pairs = {
        "secrets of scores and of records": (scores.secrets, records.secrets),
        "errors of scores and of records": (scores.errors, records.errors),
    }
    for part, draw in draws.items():
        secrets, errors = draw.secrets, draw.errors
        pairs |= {
            f"secrets of {part}": (secrets, secrets),
            f"errors of {part}": (errors, errors),
            f"secrets and errors of {part}": (secrets, errors),
            f"secrets of successive questions for {part}": (secrets[:-1], secrets[1:]),
            f"errors of successive questions for {part}": (errors[:-1], errors[1:]),
        }
    for name, (first, second) in pairs.items():
        if are_dependent(first, second, alpha / len(pairs)):
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
    drop = SCORES.modulus_bits - WORD_BITS
    sent = _read(SCORES, question, (layout.n_colours, layout.n_samples)) << drop
    first, second = np.triu_indices(layout.n_colours, 1)
    fits = []
    for message in candidates:
        rest = sent - message
        differences = centre(rest[first] - rest[second], SCORES.modulus_bits)  # small if colours share a secret
        residuals = centre(rest, SCORES.modulus_bits)
        closest = float(np.abs(differences).mean(axis=1).min())
        fits += [math.log1p(closest), float(np.abs(residuals).mean()), float(residuals.mean())]
    return np.array([len(question.data), *fits])


def _read(parameters: LweParameters, question: SealedQuestion, shape: tuple[int, ...]) -> Longs:
    """Return the numbers of a question, in this shape."""
    count = math.prod(shape)
    packed = question.data[_HEADER : _HEADER + count_question_bytes(parameters, count)]
    return unpack_question(packed, parameters.question_bits, count).reshape(shape).astype(np.int64)


@lru_cache(maxsize=1)
def _make_index() -> SealedIndex:
    records = [b"%d" % number for number in range(ROWS)]
    return SealedIndex.build(
        draw_gallery(), records=records, n_cells=_CELLS, n_colours=_COLOURS, n_fetched=_FETCHED, kernel="numpy"
    )


Weakness = Callable[[LweParameters, Longs, Longs], tuple[Longs, Longs]]
"""From parameters, secrets and errors of a sound client to weaker secrets and errors."""


def _open_weak_client(make_weakness: Callable[[], Weakness], *published: Any, source: Source) -> SealedClient:
    """Return a client with a new weakness."""
    client, weaken = SealedClient(*published, source=source), make_weakness()

    def encrypt_zeros(
        parameters: LweParameters, seed: bytes, shape: tuple[int, int], source: Source
    ) -> tuple[Words, Longs]:
        drawn = draw_gaussians(parameters, (shape[0], parameters.dimension), source)
        secrets, errors = weaken(parameters, drawn, draw_gaussians(parameters, shape, source))
        matrix = expand_matrix(parameters, seed, 0, shape[1]).astype(np.float64)
        zeros = (secrets.astype(np.float64) @ matrix.T).astype(np.int64) + errors
        return (zeros & ((1 << parameters.modulus_bits) - 1)).astype(np.uint32), secrets

    client._encrypt_zeros = encrypt_zeros
    return client


def _draw_by_clock(parameters: LweParameters, secrets: Longs, errors: Longs) -> tuple[Longs, Longs]:
    drawn = np.random.default_rng(time.time_ns()).normal(0, float(parameters.sigma), errors.shape)
    return secrets, np.rint(drawn).astype(np.int64)


def _make_secret_keeper() -> Weakness:
    """Return the weakness of fetching records with the secrets of the scores."""
    last: list[Longs] = []

    def weaken(parameters: LweParameters, secrets: Longs, errors: Longs) -> tuple[Longs, Longs]:
        if parameters is SCORES:
            last.append(secrets)
        else:
            secrets[:, : SCORES.dimension] = last.pop(0)
        return secrets, errors

    return weaken


class _ReusingClient(SealedClient):
    """Reuses its pads."""

    def _take_pad(self, part: str) -> Pad:
        pad = super()._take_pad(part)
        self._stocks[part].fill(1, lambda: pad)
        return pad


class _LengthLeakClient(SealedClient):
    def ask(self, row: ArrayLike, near: ArrayLike | None = None) -> SealedQuestion:
        question = super().ask(row, near)
        return replace(question, data=question.data + bytes(int(make_messages(self.layout, row)[1][0])))


_WEAKNESSES: dict[str, Callable[[], Weakness]] = {
    "no errors": lambda: lambda _, secrets, errors: (secrets, 0 * errors),
    "one secret for all colours": lambda: lambda _, secrets, errors: (0 * secrets + secrets[0], errors),
    "errors of a tenth the width": lambda: lambda _, secrets, errors: (secrets, errors // 10),
    "300 numbers of each secret twice": lambda: (
        lambda _, secrets, errors: (np.hstack([secrets[:, :300], secrets[:, :300], secrets[:, 600:]]), errors)
    ),
    "secrets that distant colours share": lambda: (
        lambda parameters, secrets, errors: (
            np.concatenate([secrets[:8], secrets[:-8]]) if parameters is SCORES else secrets,
            errors,
        )
    ),
    "one error for all records": lambda: (
        lambda parameters, secrets, errors: (secrets, errors[[0] * len(errors)] if parameters is FETCH else errors)
    ),
    "errors of a clock": lambda: _draw_by_clock,
    "records under the secrets of scores": _make_secret_keeper,
}
SPECIMENS: dict[str, Callable[[], Experiment]] = {
    "pads that are reused": partial(make_sealed_experiment, _ReusingClient),
    "a length that depends on the cell": partial(make_sealed_experiment, _LengthLeakClient),
    **{name: partial(make_sealed_experiment, partial(_open_weak_client, make)) for name, make in _WEAKNESSES.items()},
}
