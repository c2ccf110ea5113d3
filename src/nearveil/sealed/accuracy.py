"""How far scores are off, and how often a byte of a record is wrong: the bounds of docs/theory/sealed.md."""

import math

from nearveil.sealed.parameters import (
    ANSWER_BITS,
    ENTRY_BITS,
    LWE,
    PUBLIC_BITS,
    RING,
    SCORE_BITS,
    SECRET_BITS,
    TOKEN_BITS,
)

_NOISE_SPREAD = 5  # the variance of a token's noise, given its keys, is below so many times the mean: but for e^-100
SPAN = 2.1  # a score of the largest length is Q / 2.1: a little below the half, where it would wrap


def find_score_deviation(row_norm: float, reach: float) -> float:
    """Return the standard deviation of a score's error, for the norm of a row (all items of a slot) (Theorem 2)."""
    variance = _find_variance(row_norm, SCORE_BITS) + reach**2 / 12  # the query is rounded, too
    return math.sqrt(variance) * SPAN / 2.0**LWE.modulus_bits


def bound_score_error(row_norm: float, reach: float, tolerance: float) -> float:
    """Return a bound on the probability that a score is off by more than a tolerance (Theorem 2)."""
    return min(1.0, 2 * math.exp(-((tolerance / find_score_deviation(row_norm, reach)) ** 2) / 2))


def bound_fetch_failure(row_norm: float, question_bits: int) -> float:
    """Return a bound on the probability that an entry of a record is read wrongly (Theorem 3)."""
    half = 2.0 ** (LWE.modulus_bits - ENTRY_BITS - 1)
    return min(1.0, 2 * math.exp(-(half**2) / (2 * _find_variance(row_norm, question_bits))))


def _find_variance(row_norm: float, question_bits: int) -> float:
    """Return the variance of ``D u - mask - D message``, in steps of the modulus: errors and three roundings."""
    sigma2, bits = float(LWE.sigma) ** 2, LWE.modulus_bits
    question = row_norm**2 * (sigma2 + 4.0 ** (bits - question_bits) / 12)
    step = 4.0 ** (bits - ANSWER_BITS) / 12  # of hints and answers
    return question + (LWE.dimension * sigma2 + 1) * step


def find_token_deviation() -> float:
    """Return the standard deviation of a coefficient of a token, in units of its message (Theorem 4).

    Beside it is the rounding to 20 bits, of at most ``t / 2^21`` units; half a unit changes the message.
    """
    sigma2, degree, t = float(RING.sigma) ** 2, RING.degree, RING.plain_modulus
    rotation = sigma2 * degree * sum(p**2 - 1 for p in RING.primes) / 12
    fresh = sigma2 + (4.0 ** (RING.modulus.bit_length() - SECRET_BITS) + 1) / 12
    steps = RING.baby_steps, RING.giant_steps
    baby = steps[0] * fresh + steps[0] * (steps[0] - 1) / 2 * rotation
    noise = (t**2 - 1) / 12 * degree * steps[1] * baby + (steps[1] - 1) * rotation
    public = degree * sigma2 / 12 / 4.0**PUBLIC_BITS  # its rounding, times the ring secret
    return t * math.sqrt(noise / RING.modulus**2 + public)


def bound_token_failure(n_secrets: int, n_blocks: int) -> float:
    """Return a bound on the probability that a token has a wrong mask (Theorem 4)."""
    margin = 0.5 - RING.plain_modulus / 2.0 ** (TOKEN_BITS + 1)
    tail = 2 * math.exp(-(margin**2) / (2 * _NOISE_SPREAD * find_token_deviation() ** 2))
    return min(1.0, n_secrets * math.exp(-100) + n_blocks * RING.degree * tail)
