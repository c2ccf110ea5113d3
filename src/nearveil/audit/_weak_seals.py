"""Clients that seal their questions badly, on purpose: an audit must catch each of them."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from nearveil.audit._experiment import Experiment
from nearveil.audit.attacks._sealed import make_sealed_experiment
from nearveil.privacy.noise import Source
from nearveil.sealed import LweParameters, SealedClient
from nearveil.sealed.client import SealedQuestion, make_messages
from nearveil.sealed.lwe import QUESTION_BITS, Longs, Words, draw_gaussians, encrypt, expand_matrix, round_down_to

_TENTH = Fraction(1, 10)


def _seal(parameters: LweParameters, seed: bytes, messages: Longs, secrets: Longs, errors: Longs) -> Words:
    matrix = expand_matrix(parameters, seed, 0, messages.shape[1]).astype(np.int64)
    return round_down_to(secrets @ matrix.T + errors + messages, parameters.modulus_bits, QUESTION_BITS)


def _without_errors(parameters: LweParameters, seed: bytes, messages: Longs, source: Source) -> tuple[Words, Longs]:
    secrets = draw_gaussians(parameters, (len(messages), parameters.dimension), source)
    return _seal(parameters, seed, messages, secrets, np.zeros_like(messages)), secrets


def _with_one_secret(parameters: LweParameters, seed: bytes, messages: Longs, source: Source) -> tuple[Words, Longs]:
    secrets = np.repeat(draw_gaussians(parameters, (1, parameters.dimension), source), len(messages), axis=0)
    return _seal(parameters, seed, messages, secrets, draw_gaussians(parameters, messages.shape, source)), secrets


def _with_small_errors(parameters: LweParameters, seed: bytes, messages: Longs, source: Source) -> tuple[Words, Longs]:
    secrets = draw_gaussians(parameters, (len(messages), parameters.dimension), source)
    wide = draw_gaussians(replace(parameters, sigma=10 * parameters.sigma), messages.shape, source)
    errors = np.rint(wide * float(_TENTH * _TENTH)).astype(np.int64)
    return _seal(parameters, seed, messages, secrets, errors), secrets


class _Errorless(SealedClient):
    _encrypt = staticmethod(_without_errors)


class _OneSecret(SealedClient):
    _encrypt = staticmethod(_with_one_secret)


class _Tenth(SealedClient):
    _encrypt = staticmethod(_with_small_errors)


class _TellingLength(SealedClient):
    _encrypt = staticmethod(encrypt)

    def ask(self, row: ArrayLike) -> SealedQuestion:
        question = super().ask(row)
        return replace(question, data=question.data + bytes(int(make_messages(self.layout, row)[1][0])))


SPECIMENS: dict[str, Callable[[], Experiment]] = {
    "no errors": lambda: make_sealed_experiment(_Errorless),
    "one secret for all colours": lambda: make_sealed_experiment(_OneSecret),
    "errors of a tenth the width": lambda: make_sealed_experiment(_Tenth),
    "a length that tells the cell": lambda: make_sealed_experiment(_TellingLength),
}
