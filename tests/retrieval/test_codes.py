import numpy as np
import pytest
from numpy.typing import NDArray

from nearveil.retrieval._answer import Answer, AnswerError
from nearveil.retrieval._codes import (
    CANDIDATE_BYTES,
    ID_BYTES,
    ProductCodes,
    ScalarCodes,
    Singles,
    WholeCodes,
    make_codes,
)


def rows(n: int, dimension: int, seed: int = 0) -> Singles:
    """Return rows of norm one whose variances fall."""
    found = np.random.default_rng(seed).standard_normal((n, dimension)) * np.arange(1, dimension + 1) ** -0.5
    unit: Singles = (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)
    return unit


def missed(gallery: Singles, queries: Singles, scores: Singles, k: int = 8) -> float:
    truth = np.argsort(-(queries @ gallery.T), axis=1)[:, :k]
    chosen = np.argsort(-scores, axis=1)[:, :k]
    return 1 - float((truth[:, :, None] == chosen[:, None]).any(axis=2).mean())


@pytest.mark.parametrize(("dimension", "most"), [(3, 0.01), (40, 0.005), (64, 0.005), (90, 0.01), (124, 0.03)])
def test_128_bytes_lose_next_to_nothing_in_few_dimensions(dimension: int, most: float) -> None:
    gallery, queries = rows(1500, dimension), rows(200, dimension, 1)
    codes = make_codes(gallery, CANDIDATE_BYTES)
    written = codes.encode(gallery)
    assert written.shape == (1500, codes.width)
    assert codes.width == min(2 * dimension, CANDIDATE_BYTES - ID_BYTES)
    assert missed(gallery, queries, codes.scores(queries, written)) <= most


def test_more_bytes_lose_less_in_many_dimensions() -> None:
    gallery, queries = rows(600, 160), rows(200, 160, 1)
    losses = []
    for size in (16, 48, 100):
        codes = make_codes(gallery, size)
        assert codes.width == size - ID_BYTES
        losses.append(missed(gallery, queries, codes.scores(queries, codes.encode(gallery))))
    assert losses[0] > 2 * losses[1] > 4 * losses[2]
    assert losses[2] < 0.03


def test_product_codes_beat_truncation_to_as_many_bytes() -> None:
    gallery, queries = rows(600, 160), rows(300, 160, 1)
    codes = make_codes(gallery, 46)
    leading = np.linalg.svd(gallery - gallery.mean(axis=0), full_matrices=False)[2][:42].T
    truncated = (queries @ leading) @ (gallery @ leading).T
    ours = missed(gallery, queries, codes.scores(queries, codes.encode(gallery)))
    assert ours < 0.8 * missed(gallery, queries, truncated)


def test_factors_make_scores_of_near_items_right_on_average() -> None:
    gallery = rows(600, 160)
    codes = make_codes(gallery, 32)
    written = codes.encode(gallery)
    plain = written.copy()
    plain[:, :2] = np.ones(1, "<f2").view(np.uint8)
    true = gallery @ gallery.T
    np.fill_diagonal(true, -1)
    near = np.argsort(-true, axis=1)[:, :30]

    def bias(some: NDArray[np.uint8]) -> float:
        wrong = codes.scores(gallery, some).T - true
        return float(np.abs(np.take_along_axis(wrong, near, axis=1).mean(axis=1)).mean())

    assert bias(written) < 0.5 * bias(plain)


def test_errors_are_smallest_where_queries_vary_most() -> None:
    gallery = rows(1500, 80)
    codes = ProductCodes.fit(gallery, 42)
    turned = gallery @ codes.projection
    errors = ((turned - codes._read(codes.encode(gallery)[:, 2:].copy())) ** 2).mean(axis=0)
    slope = np.polyfit(np.log(turned.var(axis=0)), np.log(errors), 1)[0]
    assert slope < -0.3  # without weights errors are spread evenly, or grow with the variance


def test_whole_codes_lose_nothing() -> None:
    gallery, queries = rows(500, 100), rows(100, 100, 1)
    codes = make_codes(gallery, None)
    assert isinstance(codes, WholeCodes)
    assert codes.width == 200
    assert np.abs(codes.scores(queries, codes.encode(gallery)) - queries @ gallery.T).max() < 1e-3


@pytest.mark.parametrize("n", [1, 2, 9, 300])
def test_small_galleries(n: int) -> None:
    gallery = rows(n, 150)
    codes = make_codes(gallery, CANDIDATE_BYTES)
    scores = codes.scores(gallery, codes.encode(gallery))
    assert scores.argmax(axis=1).tolist() == list(range(n))


@pytest.mark.parametrize("size", [16, 60])
def test_rows_of_zeros_and_equal_rows(size: int) -> None:
    gallery = np.concatenate([np.zeros((3, 20), np.float32), np.tile(rows(1, 20), (300, 1))])
    codes = make_codes(gallery, size)
    scores = codes.scores(gallery, codes.encode(gallery))
    assert np.isfinite(scores).all()
    assert np.abs(scores[-1] - gallery[-1] @ gallery.T).max() < 0.05


def test_codes_of_an_item_do_not_depend_on_the_others_in_the_call() -> None:
    gallery = rows(500, 30)
    for codes in (ProductCodes.fit(gallery, 20), ScalarCodes.fit(gallery, 40)):
        assert np.array_equal(codes.encode(gallery)[7:9], codes.encode(gallery[7:9]))


@pytest.mark.parametrize("size", [6, 0, -1, 1.5, True, "128"])
def test_absurd_sizes(size: int) -> None:
    with pytest.raises(ValueError, match="code_bytes must be"):
        make_codes(rows(10, 4), size)


def answer() -> Answer:
    return Answer(np.array([1, 5, 9], np.uint32), np.arange(12, dtype=np.uint8).reshape(3, 4))


def test_answers_survive_the_wire() -> None:
    sent = answer()
    data = sent.to_bytes()
    assert len(data) == sent.nbytes == 12 + 3 * 8
    read = Answer.from_bytes(data)
    assert np.array_equal(read.ids, sent.ids)
    assert np.array_equal(read.codes, sent.codes)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a nearveil answer"),
        (b"NVM" + answer().to_bytes()[3:], "not a nearveil answer"),
        (b"NVA\x09" + answer().to_bytes()[4:], "version 9"),
        (answer().to_bytes()[:-1], "truncated"),
        (answer().to_bytes() + b"\0", "truncated"),
        (answer().to_bytes()[:12] + b"\xff" * 24, "ids must rise"),
        (answer().to_bytes()[:4] + b"\0" * 8, "ids must be"),
    ],
)
def test_strange_answers_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(AnswerError, match=words):
        Answer.from_bytes(data)


def test_answers_are_checked_when_made() -> None:
    with pytest.raises(AnswerError, match="codes must hold"):
        Answer(np.array([1, 2], np.uint32), np.zeros((3, 4), np.uint8))
    with pytest.raises(AnswerError, match="ids must be"):
        Answer(np.array([1, 2]), np.zeros((2, 4), np.uint8))
