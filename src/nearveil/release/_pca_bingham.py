"""Exact draws from the Bingham distribution, and the Gibbs chain for several directions at once."""

from fractions import Fraction

import numpy as np
from scipy.optimize import brentq

from nearveil.privacy.noise import Source
from nearveil.privacy.noise._samplers import gaussian_integers
from nearveil.release._base import Floats

_BATCH = 64  # proposals at a time
_GAUSS_BITS = 46


def bingham(scores: Floats, source: Source) -> Floats:
    """Draw a unit vector of density proportional to ``exp(v' scores v)``.

    By rejection from an angular central Gaussian distribution (Kent, Ganeiber and Mardia 2013): exact, but for
    doubles. With A = (largest eigenvalue) - scores, q dimensions and any b from 1 to q, the density
    ``exp(-u)``, u = v'Av, is at most ``exp((b - q) / 2) (q / b)^(q/2)`` times ``(1 + 2u / b)^(-q/2)``; b is chosen
    where fewest are rejected.

    `scores`: Symmetric.

    Examples
    --------
    >>> from nearveil.privacy.noise import unsafe_seeded
    >>> drawn = bingham(np.diag([1000.0, 0.0, 0.0]), unsafe_seeded(0))
    >>> bool(abs(drawn[0]) > 0.99)
    True
    """
    values, vectors = np.linalg.eigh(scores)
    gaps = values[-1] - values
    q = len(gaps)
    b = 1.0 if q == 1 else float(brentq(lambda b: np.sum(1 / (b + 2 * gaps)) - 1, 1.0, float(q)))
    while True:
        gauss = gaussian_integers(Fraction(1 << _GAUSS_BITS), _BATCH * q, source).reshape(_BATCH, q)
        proposals = gauss / np.sqrt(1 + 2 * gaps / b)
        with np.errstate(invalid="ignore"):  # a proposal of zeros is none, and is not accepted
            proposals /= np.linalg.norm(proposals, axis=1, keepdims=True)
        u = proposals**2 @ gaps
        log_accept = -u + q / 2 * np.log1p(2 * u / b) + (q - b) / 2 - q / 2 * np.log(q / b)
        accepted = np.flatnonzero(np.log(_uniform(_BATCH, source)) < log_accept)
        if len(accepted):
            return np.asarray(vectors @ proposals[accepted[0]])


def matrix_bingham_chain(scores: Floats, n_components: int, n_sweeps: int, source: Source) -> Floats:
    """Run the Gibbs chain whose limit has the density ``exp(tr(V' scores V))`` on orthonormal columns (Hoff 2009).

    Each column in turn is drawn anew, from the Bingham distribution across the others. How near the limit is after
    so many sweeps, nobody has proved. One column needs no chain and is exact.
    """
    d = len(scores)
    gauss = gaussian_integers(Fraction(1 << _GAUSS_BITS), d * n_components, source).reshape(d, n_components)
    columns, _ = np.linalg.qr(gauss * 2.0**-_GAUSS_BITS)
    for _ in range(1 if n_components == 1 else n_sweeps):
        for number in range(n_components):
            basis = complement(np.delete(columns, number, axis=1))
            columns[:, number] = basis @ bingham(basis.T @ scores @ basis, source)
    return np.asarray(columns)


def complement(columns: Floats) -> Floats:
    """Return orthonormal columns across those given, which are orthonormal."""
    d, k = columns.shape
    return np.asarray(np.linalg.qr(np.hstack([columns, np.eye(d)]))[0][:, k:d]) if k else np.eye(d)


def _uniform(count: int, source: Source) -> Floats:
    """Return uniform numbers above 0 that are as precise as doubles, however small."""
    words = source.words(2 * count).astype(np.float64)
    return np.asarray((words[:count] + (words[count:] + 0.5) * 2.0**-64) * 2.0**-64)
