"""Make the vectors of `nearveil.datasets` from the source and the chosen words, and print their SHA-256."""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from studies.data import find

FOLDER = Path("src/nearveil/datasets")


def quantize(words: list[str]) -> NDArray[np.int8]:
    """Return the vectors of words, each scaled to a largest component of 127 and rounded."""
    with np.load(find("glove100/glove100.npz")) as arrays:
        rows = {word: row for row, word in enumerate(bytes(arrays["words"]).decode().split("\n"))}
        vectors = arrays["vectors"][[rows[word] for word in words]].astype(np.float32)
    scaled: NDArray[np.float32] = np.rint(vectors * (127 / np.abs(vectors).max(axis=1, keepdims=True)))
    return scaled.astype(np.int8)


def main() -> None:
    """Write the file."""
    path = FOLDER / "words.npy"
    np.save(path, quantize((FOLDER / "words.txt").read_text(encoding="utf-8").split()))
    print(hashlib.sha256(path.read_bytes()).hexdigest(), path)  # noqa: T201


if __name__ == "__main__":
    main()
