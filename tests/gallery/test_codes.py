import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nearveil.cluster import SpreadRows
from nearveil.gallery.answers import Answer
from nearveil.gallery.codes import (
    ID_BYTES,
    KEPT_RECALL,
    Codes,
    ExactCodes,
    ProductCodes,
    ScalarCodes,
    Singles,
    WholeCodes,
    codes_from_bytes,
    codes_to_bytes,
    estimate_code_bytes,
    learn_codes,
    limit_code_bytes,
    list_code_sizes,
    make_codes,
)
from nearveil.mechanisms import Message
from nearveil.mechanisms.base import CODE_BYTES
from nearveil.mechanisms.messages import fingerprint
from nearveil.metrics import Metric, ScoreSpace
from nearveil.wire.frames import Kind, WireError, frame


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
    codes = make_codes(gallery, CODE_BYTES)
    written = codes.encode(gallery)
    assert written.shape == (1500, codes.width)
    assert codes.width == min(2 * dimension, CODE_BYTES - ID_BYTES)
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
    codes = ProductCodes.fit(SpreadRows.cut(gallery), 42, ScoreSpace("cosine", np.zeros(80)))
    turned = gallery @ codes.projection
    errors = ((turned - codes._reconstruct(codes.encode(gallery)[:, 2:].copy())) ** 2).mean(axis=0)
    slope = np.polyfit(np.log(turned.var(axis=0)), np.log(errors), 1)[0]
    assert slope < -0.3  # without weights errors are spread evenly, or grow with the variance


def test_whole_codes_lose_nothing() -> None:
    gallery, queries = rows(500, 100), rows(100, 100, 1)
    for codes, width, error in ((make_codes(gallery, None), 400, 1e-6), (WholeCodes(100), 200, 1e-3)):
        assert codes.width == width
        assert np.abs(codes.scores(queries, codes.encode(gallery)) - queries @ gallery.T).max() < error
    assert type(make_codes(gallery, None)) is ExactCodes


@pytest.mark.parametrize("n", [1, 2, 9, 300])
def test_small_galleries(n: int) -> None:
    gallery = rows(n, 150)
    codes = make_codes(gallery, CODE_BYTES)
    scores = codes.scores(gallery, codes.encode(gallery))
    assert scores.argmax(axis=1).tolist() == list(range(n))


@pytest.mark.parametrize("size", [16, 60])
def test_rows_of_zeros_and_equal_rows(size: int) -> None:
    gallery = np.concatenate([np.zeros((3, 20), np.float32), np.tile(rows(1, 20), (300, 1))])
    codes = make_codes(gallery, size)
    scores = codes.scores(gallery, codes.encode(gallery))
    assert np.isfinite(scores).all()
    assert np.abs(scores[-1] - gallery[-1] @ gallery.T).max() < 0.05


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("size", [12, 24, 52])
def test_the_measured_recall_is_that_of_brute_force(metric: Metric, size: int) -> None:
    """The share of each item's 10 nearest other items that are among its 10 nearest by their codes."""
    original = rows(300, 40) * np.random.default_rng(1).uniform(0.5, 2, (300, 1))
    space = ScoreSpace.fit(metric, original)
    items = space.encode(original).astype(np.float32)
    learned = learn_codes(SpreadRows.cut(items), size, space)
    exact = -np.linalg.norm(original[:, None] - original[None], axis=2)
    if metric != "euclidean":
        queries = original / np.linalg.norm(original, axis=1, keepdims=True)
        exact = queries @ (queries if metric == "cosine" else original).T
    coded = learned.table.scores(space.make_queries(items), learned.codes).astype(np.float64)
    kept = []
    for number in range(300):
        others = np.delete(np.arange(300), number)
        truth, found = (set(others[np.argsort(-values[number, others])[:10]]) for values in (exact, coded))
        kept.append(len(truth & found) / 10)
    assert learned.recall == pytest.approx(np.mean(kept), abs=2e-3)
    assert size > 12 or learned.recall < 0.9


def test_auto_takes_the_smallest_codes_that_keep_what_is_stated() -> None:
    gallery = SpreadRows.cut(rows(3000, 64))
    space = ScoreSpace.fit("cosine", rows(3000, 64))
    sizes, chosen = list_code_sizes(3000, 64), learn_codes(gallery, "auto", space)
    assert chosen.recall >= KEPT_RECALL
    assert chosen.table.width in sizes
    smaller = [size for size in sizes[: sizes.index(chosen.table.width)] if size >= 64]
    assert smaller
    for size in smaller:
        assert learn_codes(gallery, size + ID_BYTES, space).recall < KEPT_RECALL
    assert estimate_code_bytes(3000, 64) in sizes


def test_auto_stays_within_the_size_of_a_copy_and_then_keeps_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearveil.gallery.codes._LARGEST_COPY", 600 * 40)
    monkeypatch.setattr("nearveil.gallery.codes._SMALLEST_LIMIT", 0)
    gallery = rows(600, 80)
    assert limit_code_bytes(600) == 40
    assert list_code_sizes(600, 80) == [20]
    learned = learn_codes(SpreadRows.cut(gallery), "auto", ScoreSpace.fit("cosine", gallery))
    assert learned.table.width == 20
    assert 0.2 < learned.recall < KEPT_RECALL
    assert estimate_code_bytes(600, 80) == 20


def test_codes_of_an_item_do_not_depend_on_the_others_in_the_call() -> None:
    gallery = rows(500, 30)
    space = ScoreSpace("cosine", np.zeros(30))
    for codes in (ProductCodes.fit(SpreadRows.cut(gallery), 20, space), ScalarCodes.fit(SpreadRows.cut(gallery), 40)):
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
    assert len(data) == sent.nbytes == 22 + 3 * 8
    read = Answer.from_bytes(data)
    assert np.array_equal(read.ids, sent.ids)
    assert np.array_equal(read.codes, sent.codes)


def framed(count: int, width: int, rest: bytes, flags: int = 0) -> bytes:
    return frame(Kind.ANSWER, struct.pack("<II", count, width) + rest, flags)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame(Kind.ANSWER, b"1234567"), "truncated"),
        (frame(Kind.QUERY, answer().to_bytes()[14:]), "must be an answer, not of kind QUERY"),
        (framed(3, 4, bytes(23)), "truncated"),
        (framed(3, 4, bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]) + bytes(13)), "bytes after its end"),
        (framed(3, 4, b"\xff" * 24), "ids must rise"),
        (framed(3, 4, bytes([2, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0]) + bytes(12)), "ids must rise"),
        (framed(0, 4, b""), "ids must be"),
        (framed(1, 0, bytes(4)), "at least one byte"),
        (framed((1 << 32) - 1, (1 << 32) - 1, bytes(50)), "truncated"),
        (framed(1, 1, bytes(5), flags=1), "truncated"),  # no length of an image
        (framed(1, 1, bytes(5) + struct.pack("<I", 3) + b"ab", flags=2), "truncated"),
        (framed(1, 1, bytes(5) + struct.pack("<I", 1) + b"ab", flags=2), "bytes after its end"),
        (framed(1, 1, bytes(5) + struct.pack("<I", 2) + b"ab", flags=1), "WebP"),
        (framed(1, 1, bytes(5) + struct.pack("<I", 1) + b"\xff", flags=3), "UTF-8"),
        (framed(1, 1, bytes(5) + struct.pack("<I", 2) + b"a\x1b", flags=3), "without control characters"),
        (framed(1, 1, bytes(5) + struct.pack("<I", 3) + "\u2028".encode(), flags=3), "without control characters"),
        (framed(1, 1, bytes(5) + struct.pack("<I", 4097) + bytes([97]) * 4097, flags=3), "at most 4096 characters"),
        (framed(1, 1, bytes(5), flags=5), "flags 5"),
    ],
)
def test_strange_answers_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        Answer.from_bytes(data)


def test_images_survive_the_wire_and_may_be_missing() -> None:
    plain = answer()
    for extras, images in (
        ("thumbnails", (b"RIFF1234WEBPxyz", b"", b"")),
        ("originals", (b"", b"any", b"thing")),
        ("names", ("\u00e9t\u00e9 \U0001f426\u200d.png".encode(), b"", b"a" * 4096)),
    ):
        sent = Answer(plain.ids, plain.codes, extras, images)  # type: ignore[arg-type]
        data = sent.to_bytes()
        assert len(data) == sent.nbytes
        read = Answer.from_bytes(data)
        assert (read.extras, read.contents) == (extras, images)
        assert read.to_bytes() == data


def test_answers_are_checked_when_made() -> None:
    with pytest.raises(WireError, match="codes must hold"):
        Answer(np.array([1, 2], np.uint32), np.zeros((3, 4), np.uint8))
    with pytest.raises(WireError, match="ids must be"):
        Answer(np.array([1, 2]), np.zeros((2, 4), np.uint8))
    two = np.array([1, 2], np.uint32), np.zeros((2, 4), np.uint8)
    with pytest.raises(WireError, match="one for each id"):
        Answer(*two, "thumbnails", (b"",))
    with pytest.raises(WireError, match="one for each id"):
        Answer(*two, "none", (b"", b""))
    with pytest.raises(WireError, match="extras must be"):
        Answer(*two, "all", (b"", b""))  # type: ignore[arg-type]


def exchanged(codes: Codes) -> Codes:
    return codes_from_bytes(codes_to_bytes(codes))


@pytest.mark.parametrize("code_bytes", [None, 16, 64, 90])
def test_a_table_from_the_wire_scores_as_the_one_that_was_sent(code_bytes: int | None) -> None:
    gallery, queries = rows(300, 60), rows(20, 60, 1)
    codes = make_codes(gallery, code_bytes)
    read = exchanged(codes)
    assert type(read) is type(codes)
    assert read.width == codes.width
    assert read.nbytes == codes.nbytes
    written = codes.encode(gallery)
    assert np.abs(read.scores(queries, written) - codes.scores(queries, written)).max() < 1e-6  # sums in another order
    assert codes_to_bytes(read) == codes_to_bytes(codes)
    assert len(codes_to_bytes(codes)) < codes.nbytes + 500


SCALARS: dict[str, Any] = {
    "projection": np.eye(4, dtype=np.float32),
    "lowest": np.zeros(4, np.float32),
    "steps": np.ones(4, np.float32),
    "double": np.array(2),
}
PRODUCTS: dict[str, Any] = {
    "projection": np.ones((5, 6), np.float32),
    "weights": np.ones(6, np.float32),
    "mean": np.zeros(6, np.float32),
    "centroids": np.zeros((3, 256, 2), np.float32),
}


@pytest.mark.parametrize(
    ("name", "arrays", "words"),
    [
        ("codes-other", {"dimension": np.array(3)}, "unknown kind of table"),
        ("codes-whole", {"dimension": np.array(0)}, "1 to 16000 dimensions"),
        ("codes-whole", {"dimension": np.zeros(2, np.int64)}, "dimension must be"),
        ("codes-whole", {"double": np.array(3)}, "'dimension'"),
        ("codes-whole", {"dimension": np.array(3), "more": np.array(3)}, "unexpected array"),
        ("codes-whole", {"dimension": np.array(3), "double": np.array(3)}, "encoded canonically"),
        ("codes-scalar", SCALARS | {"double": np.array(5)}, "fit each other"),
        ("codes-scalar", SCALARS | {"double": np.array(-1)}, "fit each other"),
        ("codes-scalar", SCALARS | {"steps": np.ones(3, np.float32)}, "fit each other"),
        ("codes-scalar", SCALARS | {"steps": np.ones(4)}, "'steps'"),
        ("codes-scalar", SCALARS | {"projection": np.zeros((0, 4), np.float32)}, "'projection'"),
        ("codes-product", PRODUCTS | {"centroids": np.zeros((3, 255, 2), np.float32)}, "256 centroids"),
        ("codes-product", PRODUCTS | {"centroids": np.zeros((1, 256, 6), np.float32)}, "16000 x 256 x 4"),
        ("codes-product", PRODUCTS | {"centroids": np.zeros((2, 256, 2), np.float32)}, "fit each other"),
        ("codes-product", PRODUCTS | {"weights": np.ones(5, np.float32)}, "fit each other"),
    ],
)
def test_tables_that_are_none(name: str, arrays: dict[str, Any], words: str) -> None:
    with pytest.raises(WireError, match=words):
        codes_from_bytes(Message(name, fingerprint_of(arrays), arrays).to_bytes())


def fingerprint_of(arrays: dict[str, Any]) -> str:
    return fingerprint(*(part for name in sorted(arrays) for part in (name, arrays[name])))


def test_tables_without_their_fingerprint() -> None:
    assert codes_from_bytes(Message("codes-product", fingerprint_of(PRODUCTS), PRODUCTS).to_bytes()).width == 5
    with pytest.raises(WireError, match="encoded canonically"):
        codes_from_bytes(Message("codes-product", "0" * 32, PRODUCTS).to_bytes())
    with pytest.raises(WireError, match="cannot be read"):
        codes_from_bytes(b"nothing")
