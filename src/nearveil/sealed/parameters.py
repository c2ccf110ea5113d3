"""Named sets of parameters of the learning-with-errors problem (LWE), with the cost of the best attacks.

The figures are the lattice estimator's: ``bench/security.py`` is the run, ``docs/results/sealed-security.txt`` its
output. This module imports nothing, so that the run needs nothing else.
"""

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class LweParameters:
    """A set of parameters of LWE with secrets and errors of the same discrete Gaussian.

    Examples
    --------
    >>> print(LWE)
    LWE with n = 1024, Q = 2^26, sigma = 6.4
    >>> LWE.core_svp_bits
    132
    """

    dimension: int  #: numbers of a secret (n)
    modulus_bits: int  #: binary logarithm of the modulus (Q)
    sigma: Fraction  #: width of the discrete Gaussian of secrets and errors
    most_samples: int  #: samples of one secret that the figures hold for; a question never has more
    #: Binary logarithm of the cost of the cheapest attack, rounded down, in the core-SVP model (ADPS16), which counts
    #: one call of a sieve and ignores its overheads.
    core_svp_bits: int
    matzov_bits: int  #: the same in the model of MATZOV

    def __str__(self) -> str:
        return f"LWE with n = {self.dimension}, Q = 2^{self.modulus_bits}, sigma = {float(self.sigma):g}"


_SIGMA = Fraction(32, 5)

LWE = LweParameters(1024, 26, _SIGMA, 1 << 21, core_svp_bits=132, matzov_bits=156)
"""Of both stages, scores and records: each has secrets and public matrices of its own."""

WORD_BITS = 24  # of the numbers that servers multiply
ANSWER_BITS = 16
ENTRY_BITS = 6  # of a record
SCORE_BITS = 22  # leading bits of a number that a question for scores sends


@dataclass(frozen=True)
class RingParameters:
    """Parameters of ring-LWE, which encrypts the secrets of LWE in tokens. Secrets and errors are Gaussian.

    Examples
    --------
    >>> print(RING)
    ring-LWE with N = 4096, q of 87 bits, sigma = 6.4
    """

    degree: int  #: numbers of a ring element (N), a power of two
    plain_modulus: int  #: masks are known modulo this prime (t)
    primes: tuple[int, ...]  #: their product is the modulus (q); each is 1 modulo 2 N and of 29 bits
    sigma: Fraction  #: width of the discrete Gaussian of secrets and errors
    dimension: int  #: numbers of an encrypted secret (n); it divides N / 2
    baby_steps: int  #: rotations that all blocks of a matrix share
    core_svp_bits: int  #: as for :class:`LweParameters`
    matzov_bits: int

    @property
    def modulus(self) -> int:
        """The modulus of ciphertexts and of rotation keys (q)."""
        return math.prod(self.primes)

    @property
    def giant_steps(self) -> int:
        """Rotations of each block."""
        return self.dimension // self.baby_steps

    def __str__(self) -> str:
        bits = self.modulus.bit_length()
        return f"ring-LWE with N = {self.degree}, q of {bits} bits, sigma = {float(self.sigma):g}"


RING = RingParameters(
    4096, 65537, (536813569, 536690689, 536641537), _SIGMA, 1024, 32, core_svp_bits=140, matzov_bits=167
)
"""For tokens: the three largest primes below 2^29 that are 1 modulo 8192."""

SECRET_BITS = 51  # of a coefficient of an encrypted secret: the others are below the noise of rotations
TOKEN_BITS, PUBLIC_BITS = 20, 32  # of a coefficient of a token, and of its public part
