"""Data that comes with the library, to try it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["load_words"]

_FOLDER = Path(__file__).parent


def load_words() -> tuple[list[str], NDArray[np.float32]]:
    """Load 5,000 frequent English words and their vectors.

    The vectors are GloVe's (100 dimensions, 6 billion tokens, public domain), rounded to 8 bits. Only their directions
    have a meaning: compare them by the cosine.

    Returns
    -------
    words : list of str
        The most frequent first.
    vectors : ndarray of shape (5000, 100), float32
        Of norm one.

    Examples
    --------
    >>> words, vectors = load_words()
    >>> similarity = vectors @ vectors[words.index("hospital")]
    >>> [words[number] for number in similarity.argsort()[:-4:-1]]
    ['hospital', 'clinic', 'medical']
    """
    words = (_FOLDER / "words.txt").read_text(encoding="utf-8").split()
    vectors = np.load(_FOLDER / "words.npy").astype(np.float32)
    return words, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
