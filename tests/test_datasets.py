"""The words that come with the library."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from nearveil import datasets
from nearveil.datasets import load_words
from studies import words as maker
from studies.data import DataMissingError

FOLDER = Path(datasets.__file__).parent
SHA256 = "be3842a83787ecb1594905b1908fac0818e744238d8589c6c22a3dde6b239340"


def test_words_have_vectors_whose_neighbours_have_their_sense() -> None:
    words, vectors = load_words()
    assert len(words) == len(set(words)) == 5000
    assert vectors.shape == (5000, 100)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-6)
    order = np.argsort(-(vectors @ vectors[words.index("hospital")]))[:5]
    assert [words[number] for number in order] == ["hospital", "clinic", "medical", "hospitals", "nursing"]


def test_the_file_is_the_one_that_the_script_makes() -> None:
    content = FOLDER / "words.npy"
    assert hashlib.sha256(content.read_bytes()).hexdigest() == SHA256
    assert sum(path.stat().st_size for path in FOLDER.glob("words.*")) < 1_000_000
    try:
        made = maker.quantize(load_words()[0])
    except DataMissingError as missing:
        pytest.skip(str(missing))
    assert np.array_equal(made, np.load(content))
