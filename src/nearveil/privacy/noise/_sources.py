"""Where random bits come from: the operating system, or, for tests and studies alone, a seed."""

import os
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Source(Protocol):
    """A stream of uniform, independent 64-bit words.

    Attributes
    ----------
    sound : bool
        Whether nobody can foresee the words. A promise made with a source that is not sound is void.
    """

    @property
    def sound(self) -> bool:
        """Whether nobody can foresee the words."""
        ...

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next `count` words, shape (count,)."""
        ...


class _Secure:
    sound = True

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)

    def __repr__(self) -> str:
        return "secure_source()"


class _UnsafeSeeded:
    sound = False

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator = np.random.PCG64(seed)

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.asarray(self._generator.random_raw(count), dtype=np.uint64)

    def __repr__(self) -> str:
        return f"unsafe_seeded({self._seed})"


def secure_source() -> Source:
    """Return the operating system's cryptographic generator; the default everywhere.

    Returns
    -------
    Source
        With ``sound`` true. It has no state of its own, so a forked process repeats nothing.

    Examples
    --------
    >>> secure_source().words(3).shape
    (3,)
    """
    return _Secure()


def unsafe_seeded(seed: int) -> Source:
    """Return words that the seed foretells: for tests and for studies that must repeat.

    Whoever knows or guesses the seed subtracts the noise. ``sound`` is false, and a guarantee for
    what was released with it must say so.

    Parameters
    ----------
    seed : int
        At least 0.

    Returns
    -------
    Source
        With ``sound`` false, and independent of NumPy's global state.

    Examples
    --------
    >>> unsafe_seeded(7).sound
    False
    >>> bool((unsafe_seeded(7).words(5) == unsafe_seeded(7).words(5)).all())
    True
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError("seed must be an integer of at least 0")
    return _UnsafeSeeded(int(seed))
