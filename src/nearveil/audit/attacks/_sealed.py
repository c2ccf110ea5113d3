"""Sealed questions: a distinguisher that knows the two images, and a look at the errors that only their owner can take.

No attack that runs in an audit tells errors of a tenth the width from none at all: the lattice is too large for that.
So the width of errors and secrets is measured with the secrets in hand, and what a server sees is attacked without.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.audit._experiment import DIMENSION, Experiment, Floats, Pair, draw_gallery
from nearveil.audit.report import Check
from nearveil.privacy.noise import Source
from nearveil.sealed import SealedClient, SealedIndex
from nearveil.sealed.client import SealedQuestion, make_messages
from nearveil.sealed.layout import Layout
from nearveil.sealed.lwe import WORD_BITS, Longs, Words, centre, draw_gaussians, expand_matrix, unpack_question
from nearveil.sealed.pads import Pad
from nearveil.sealed.parameters import SCORES, LweParameters

_TRIALS = 400
_CHECKED = 20  # questions whose errors are measured
_HEADER = 14 + 8  # bytes of a question before its numbers


def make_sealed_experiment(kind: type[SealedClient] = SealedClient, *, name: str = "sealed: question") -> Experiment:
    """Return the experiment of a client that seals its questions, perhaps a weaker one than it should be."""
    index = _make_index()
    layout, hints = index.layout.to_bytes(), index.get_hints()
    axes = np.eye(DIMENSION)
    pair = Pair("opposite unit vectors", axes[0], -axes[0])
    candidates = [make_messages(index.layout, one)[0] for one in (pair.first, pair.second)]

    def run(row: Floats, runs: int, source: Source) -> list[SealedQuestion]:
        client = kind(layout, hints, source=source)
        client.prepare(min(runs, _CHECKED) // 2)  # what is prepared, and what is not
        return [client.ask(row) for _ in range(runs)]

    def look(source: Source, mistake: float) -> Check:
        return check_errors(index.layout, run(pair.first, _CHECKED, source), candidates[0], mistake)

    return Experiment(
        name=name,
        guarantee=SealedClient(layout, hints).guarantee,
        pairs=(pair,),
        run=run,
        numbers=lambda seen: np.array([_describe(index.layout, one, candidates) for one in seen]),
        checks=(look,),
        trials=_TRIALS,
    )


def check_errors(layout: Layout, questions: list[SealedQuestion], message: Longs, mistake: float) -> Check:
    """Measure errors and secrets of questions about one image, whose messages are known."""
    matrix = expand_matrix(SCORES, layout.seed, 0, layout.n_samples).astype(np.int64)
    drop, rounded = SCORES.modulus_bits - WORD_BITS, SCORES.modulus_bits - SCORES.question_bits
    secrets = np.concatenate([one.pad.secrets for one in questions])
    sent = np.concatenate([_read(layout, one) for one in questions])
    messages = np.tile(message, (len(questions), 1))
    masks = np.asarray(secrets @ matrix.T, dtype=np.int64)
    errors = centre((sent << drop) - masks - messages, SCORES.modulus_bits)
    expected = float(SCORES.sigma) ** 2
    failed = [
        f"the variance of {word} is {found / wanted:.3g} times what it must be"
        for word, values, wanted in (("errors", errors, expected + 4.0**rounded / 12), ("secrets", secrets, expected))
        if abs((found := float(values.var())) / wanted - 1) > 2 * math.sqrt(2 / values.size * 2 * math.log(8 / mistake))
    ]
    if len(np.unique(secrets, axis=0)) < len(secrets):
        failed.append("a secret is used again")
    return Check("errors and secrets", "failed" if failed else "passed", "; ".join(failed))


def _describe(layout: Layout, question: SealedQuestion, candidates: list[Longs]) -> NDArray[np.float64]:
    """Return what a server sees as numbers: the length, and how well either image explains what colours share."""
    sent, drop = _read(layout, question), SCORES.modulus_bits - WORD_BITS
    fits = []
    for message in candidates:
        rest = (sent << drop) - message
        apart = centre(rest[:-1] - rest[1:], SCORES.modulus_bits)  # small, if two colours share their secret
        own = centre(rest, SCORES.modulus_bits)
        fits += [math.log1p(float(np.abs(apart).mean())), float(np.abs(own).mean()), float(own.mean())]
    return np.array([len(question.data), *fits])


def _read(layout: Layout, question: SealedQuestion) -> Longs:
    """Return the numbers of a question, shape (colours, columns)."""
    count = layout.n_colours * layout.n_samples
    packed = question.data[_HEADER : _HEADER + layout.question_bytes]
    return unpack_question(packed, SCORES.question_bits, count).reshape(layout.n_colours, -1).astype(np.int64)


@lru_cache(maxsize=1)
def _make_index() -> SealedIndex:
    return SealedIndex.build(draw_gallery(), n_cells=24, n_colours=6, kernel="numpy")


_TENTH = Fraction(1, 10)


def _join(parameters: LweParameters, seed: bytes, secrets: Longs, errors: Longs) -> tuple[Words, Longs]:
    matrix = expand_matrix(parameters, seed, 0, errors.shape[1]).astype(np.int64)
    zeros = (secrets @ matrix.T + errors) & ((1 << parameters.modulus_bits) - 1)
    return zeros.astype(np.uint32), secrets


def _without_errors(
    parameters: LweParameters, seed: bytes, shape: tuple[int, int], source: Source
) -> tuple[Words, Longs]:
    secrets = draw_gaussians(parameters, (shape[0], parameters.dimension), source)
    return _join(parameters, seed, secrets, np.zeros(shape, np.int64))


def _with_one_secret(
    parameters: LweParameters, seed: bytes, shape: tuple[int, int], source: Source
) -> tuple[Words, Longs]:
    secrets = np.repeat(draw_gaussians(parameters, (1, parameters.dimension), source), shape[0], axis=0)
    return _join(parameters, seed, secrets, draw_gaussians(parameters, shape, source))


def _with_small_errors(
    parameters: LweParameters, seed: bytes, shape: tuple[int, int], source: Source
) -> tuple[Words, Longs]:
    secrets = draw_gaussians(parameters, (shape[0], parameters.dimension), source)
    wide = draw_gaussians(replace(parameters, sigma=10 * parameters.sigma), shape, source)
    return _join(parameters, seed, secrets, np.rint(wide * float(_TENTH * _TENTH)).astype(np.int64))


class _Errorless(SealedClient):
    _encrypt_zeros = staticmethod(_without_errors)


class _OneSecret(SealedClient):
    _encrypt_zeros = staticmethod(_with_one_secret)


class _Tenth(SealedClient):
    _encrypt_zeros = staticmethod(_with_small_errors)


class _Repeating(SealedClient):
    """Keeps what it has used."""

    def _take_pad(self, part: str) -> Pad:
        pad = super()._take_pad(part)
        self._stocks[part].fill(1, lambda: pad)
        return pad


class _TellingLength(SealedClient):
    def ask(self, row: ArrayLike) -> SealedQuestion:
        question = super().ask(row)
        return replace(question, data=question.data + bytes(int(make_messages(self.layout, row)[1][0])))


SPECIMENS: dict[str, Callable[[], Experiment]] = {
    "no errors": lambda: make_sealed_experiment(_Errorless),
    "one secret for all colours": lambda: make_sealed_experiment(_OneSecret),
    "what was prepared is used again": lambda: make_sealed_experiment(_Repeating),
    "errors of a tenth the width": lambda: make_sealed_experiment(_Tenth),
    "a length that tells the cell": lambda: make_sealed_experiment(_TellingLength),
}
