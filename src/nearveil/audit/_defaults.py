"""What a mechanism is fitted on where nobody has fitted it: stated, random and public."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROWS, DIMENSION, CLASSES = 200, 16, 4


def public_set() -> tuple[Floats, NDArray[np.int64]]:
    """Return 200 standard normal rows of 16 dimensions, and labels of 4 classes."""
    return np.random.default_rng(0).standard_normal((ROWS, DIMENSION)), np.arange(ROWS, dtype=np.int64) % CLASSES


def gallery() -> Floats:
    """Return 200 other rows, for mechanisms that have a map of a gallery."""
    return np.random.default_rng(1).standard_normal((ROWS, DIMENSION))
