"""Servers of bad will: the promise holds for whatever they publish and answer, or the client stops before it pays."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Context, Decimal
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nearveil.gallery.answers import Answer, Extras
from nearveil.gallery.codes import ProductCodes, ScalarCodes, make_codes
from nearveil.ledger import Ledger, OverBudgetError
from nearveil.mechanisms import Covers, Message
from nearveil.mechanisms.covers.channels import RandomizedResponse
from nearveil.mechanisms.covers.maps import MapError
from nearveil.metrics import LARGEST_SCALE, METRICS, SMALLEST_SCALE, ScoreSpace
from nearveil.privacy.noise import unsafe_seeded
from nearveil.wire.client import ProtocolError, encode_queries
from nearveil.wire.frames import Kind, WireError, frame, unframe
from nearveil.wire.messages import MapChanged, PublicPart, Query, decode_frame
from nearveil.wire.server import ServerProtocol
from tests.mechanisms.conformance import Floats, shown_epsilon
from tests.wire.wiring import (
    DIMENSION,
    EPSILON,
    GALLERY,
    PUBLIC,
    QUERIES,
    Purse,
    ask,
    choose,
    crafted,
    part,
    published,
    ready,
)

VICTIM = QUERIES[0]
MEAN = PUBLIC.mean(axis=0)
ROWS = np.concatenate(
    [
        QUERIES,
        GALLERY[:40],
        MEAN + 1e-12 * np.eye(DIMENSION),
        1e6 * np.eye(DIMENSION),
        MEAN[None],
    ]
)
ITEMS = len(part().map.prototypes)


def _suspect() -> PublicPart:
    """Return a map on which the victim's row has a set of its own, and whatever lies opposite the other."""
    direction = VICTIM - MEAN
    prototype = np.rint(127 * direction / np.abs(direction).max()).astype(np.int8)
    return crafted(
        components=np.eye(DIMENSION, dtype=np.float16),
        prototypes=np.stack([prototype, -prototype]),
        coverage=np.array([[255, 0], [0, 255]], np.uint8),
    )


CRAFTED: dict[str, Callable[[], PublicPart]] = {
    "honest": part,
    "a cell for each item": lambda: crafted(coverage=255 * np.eye(ITEMS, dtype=np.uint8)),
    "empty cells": lambda: crafted(coverage=np.zeros((ITEMS, 9), np.uint8)),
    "full cells": lambda: crafted(coverage=np.full((ITEMS, 2), 255, np.uint8)),
    "4096 sets": lambda: crafted(coverage=np.random.default_rng(0).integers(0, 256, (ITEMS, 4096), np.uint8)),
    "components of zeros": lambda: crafted(
        components=np.zeros((DIMENSION, 3), np.float16), prototypes=np.ones((ITEMS, 3), np.int8)
    ),
    "huge components": lambda: crafted(
        components=np.full((DIMENSION, 5), 65504, np.float16), prototypes=np.ones((ITEMS, 5), np.int8)
    ),
    "prototypes of zeros": lambda: crafted(prototypes=np.zeros_like(part().map.prototypes)),
    "a map for one client": _suspect,
    "the record as the mean": lambda: crafted(space=ScoreSpace("cosine", VICTIM / np.linalg.norm(VICTIM))),
    "the record as the mean of scaled rows": lambda: crafted(space=ScoreSpace("centred cosine", VICTIM)),
    "a mean far away": lambda: crafted(space=ScoreSpace("cosine", np.full(DIMENSION, -1e6))),
    "the dot product": lambda: part("dot"),
    "the Euclidean distance": lambda: part("euclidean"),
    "one item in an answer": lambda: crafted(n_items=5, candidates=0.2),
    "another public digest": lambda: crafted(public_digest="f" * 32),
    "an epsilon of its own": lambda: crafted(epsilon=40.0),
}
LIMITS = (SMALLEST_SCALE, LARGEST_SCALE)
SPACES = [
    ScoreSpace(metric, mean, *constants)
    for metric in METRICS
    for mean in (np.zeros(DIMENSION), np.full(DIMENSION, 1e6), 1e-300 * VICTIM, VICTIM)
    for constants in (product(LIMITS, LIMITS) if metric in ("dot", "euclidean") else [()])
]
CRAFTED |= {
    f"{space.metric}, mean {space.mean[0]:.0e}, constants {space.scale:g} and {space.balance:g}": partial(
        lambda space: replace(part(space.metric), space=space), space
    )
    for space in SPACES
}


def client_chances(public: PublicPart, rows: Floats, epsilon: float = EPSILON) -> Floats:
    """Return how likely every message is for every row, exactly, shape (n_sets, n_rows)."""
    release = Covers(epsilon, public.candidates).fit_space(public.space, public.public_digest).use_map(public.map)
    assert release.public_id == ready(epsilon, public).public_id
    directions = encode_queries(public, rows).directions
    messages = [
        Message("covers", release.public_id, {"sets": np.array([one], np.int32)}) for one in range(public.map.n_sets)
    ]
    chances = np.exp(release._log_density(messages, directions))
    return np.asarray(chances / chances.sum(axis=0))


@pytest.mark.parametrize("name", CRAFTED)
def test_no_two_rows_are_further_apart_than_promised(name: str) -> None:
    public = CRAFTED[name]()
    for epsilon in (0.3, EPSILON):
        chances = client_chances(public, ROWS, epsilon)
        assert chances.min() > 0  # every row may send every message
        assert (chances.max(axis=1) / chances.min(axis=1)).max() <= math.exp(epsilon) * (1 + 1e-12)
        odds = RandomizedResponse(epsilon, public.map.n_sets).odds
        assert odds <= Fraction(Context(prec=60).exp(Decimal(repr(epsilon))))  # in integers, without a rounding


@pytest.mark.parametrize("name", CRAFTED)
def test_every_row_is_asked_about_at_the_same_price_and_in_the_same_form(name: str) -> None:
    """Silence, an error or a longer message for some rows would tell them, and no noise would hide it."""
    public, sizes, purse = CRAFTED[name](), set(), Purse()
    for row in ROWS:
        sent = ask(ready(public=public), row, purse)
        query = decode_frame(sent, Query)
        assert 0 <= int(query.message["sets"][0]) < public.map.n_sets
        sizes.add(len(sent))
    assert len(sizes) == 1
    assert [promise.epsilon for promise in purse.paid] == [EPSILON] * len(ROWS)


@pytest.mark.parametrize(
    "name",
    [
        "honest",
        "a cell for each item",
        "a map for one client",
        "the record as the mean",
        "the dot product",
        "the Euclidean distance",
    ],
)
def test_messages_that_were_sampled_keep_the_promise(name: str) -> None:
    public, source = CRAFTED[name](), unsafe_seeded(11)
    rows = np.concatenate([QUERIES, [2 * MEAN - VICTIM]])
    chances = client_chances(public, rows)
    other = int(np.flatnonzero(chances.argmax(axis=0) != chances[:, 0].argmax())[-1])
    ratio = np.log(chances[:, 0] / chances[:, other])

    client = ready(public=public)

    def drawn(row: Floats) -> Floats:
        sent = [decode_frame(ask(client, row, rng=source), Query) for _ in range(2000)]
        return np.array([ratio[int(query.message["sets"][0])] for query in sent])

    shown = shown_epsilon(drawn(VICTIM), drawn(rows[other]), 0.0)
    assert shown <= EPSILON
    if public.map.n_sets <= 6:
        assert shown >= 0.6 * EPSILON  # the attack sees the difference, so it would see a larger one


def test_the_record_as_the_mean_is_a_row_as_any_other() -> None:
    """A release refuses a row that equals its mean; a server that sends its suspect as the mean must not notice."""
    with pytest.raises(ValueError, match="equals the public mean"):
        Covers(EPSILON).fit(VICTIM[None]).release(VICTIM)
    reply = ServerProtocol(published()).answer(ask(ready(), VICTIM))
    for name in ("the record as the mean", "the record as the mean of scaled rows"):
        public = CRAFTED[name]()
        assert ask(ready(public=public), VICTIM)
        assert len(choose(ready(public=public), VICTIM, reply)[0]) == 8


def test_maps_that_change_between_questions_add_up_and_no_more(tmp_path: Path) -> None:
    """Adaptive: each next map splits the rows that the last messages left likely. n questions, n times epsilon."""
    generator, epsilon, questions = np.random.default_rng(5), 0.7, 4
    total = np.zeros(len(QUERIES))
    with Ledger(tmp_path / "budget.db") as ledger:
        account = ledger.open_account(
            "me", owner="me", protects="query", unit="record", relation="replace", epsilon=2.8, delta=0.0
        )
        for number in range(questions):
            direction = VICTIM - QUERIES[int(np.argsort(total)[-2])] + 0.01 * generator.standard_normal(DIMENSION)
            prototype = np.rint(127 * direction / np.abs(direction).max()).astype(np.int8)
            public = crafted(
                components=np.eye(DIMENSION, dtype=np.float16),
                prototypes=np.stack([prototype, -prototype]),
                coverage=np.array([[255, 0], [0, 255]], np.uint8),
            )
            sent = ready(epsilon, public).pay(VICTIM, account, f"question {number}").message
            total += np.log(client_chances(public, QUERIES, epsilon)[int(Message.from_bytes(sent or b"")["sets"][0])])
            if account.balance().left < epsilon:
                break
        assert total.max() - total.min() <= questions * epsilon + 1e-9
        assert account.balance().left == pytest.approx(0.0, abs=1e-9)
        with pytest.raises(OverBudgetError):
            ready(epsilon).pay(VICTIM, account, "another")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 7).flatmap(
        lambda width: st.tuples(
            hnp.arrays(np.uint16, (DIMENSION, width)),
            hnp.arrays(np.int8, (5, width)),
            st.integers(2, 9).flatmap(lambda sets: hnp.arrays(np.uint8, (5, sets))),
        )
    ),
    hnp.arrays(np.float64, DIMENSION, elements=st.floats(-1e6, 1e6)),
    st.floats(1e-3, 8.0),
)
def test_maps_of_noise(tables: tuple[Any, Any, Any], mean: Floats, epsilon: float) -> None:
    components, prototypes, coverage = tables
    try:
        public = crafted(
            components=components.view(np.float16),
            prototypes=prototypes,
            coverage=coverage,
            space=ScoreSpace("cosine", mean),
        )
    except MapError:
        assert not np.isfinite(components.view(np.float16)).all()
        return
    chances = client_chances(public, np.concatenate([ROWS[::7], mean[None] if mean.any() else ROWS[:1]]), epsilon)
    assert (chances.max(axis=1) / chances.min(axis=1)).max() <= math.exp(epsilon) * (1 + 1e-12)


def sent_by(change: Callable[[bytes], bytes]) -> bytes:
    """Return the bytes of the honest public part, its body changed, its checksum made to fit."""
    kind, flags, body = unframe(part().to_bytes())
    changed = change(body)
    assert changed != body
    return frame(kind, changed, flags)


def _number(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda body: body.replace(old, new, 1)


COMPONENTS = part().map.components.tobytes()
NAN = np.full(part().map.components.shape, np.nan, np.float16).tobytes()
SIZES = np.array([200, 40], np.int64).tobytes()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (sent_by(_number(COMPONENTS, NAN)), "components must be finite"),
        (sent_by(_number(COMPONENTS, NAN.replace(b"\x7e", b"\x7c"))), "components must be finite"),
        (sent_by(_number(COMPONENTS, bytes(len(COMPONENTS)))), "does not match its map_id"),
        (sent_by(_number(SIZES, np.array([200, 41], np.int64).tobytes())), "does not match its map_id"),
        (sent_by(_number(SIZES, np.array([200, 0], np.int64).tobytes())), "set_size"),
        (sent_by(_number(SIZES, np.array([-1, -1], np.int64).tobytes())), "set_size"),
        (sent_by(_number(b'"coverage":["|u1",[200,6]]', b'"coverage":["|u1",[200,9]]')), "truncated"),
        (sent_by(_number(b'"coverage":["|u1",[200,6]]', b'"coverage":["|u1",[100,6]]')), "after its end"),
        (sent_by(_number(b'"coverage":["|u1",[200,6]]', b'"coverage":["|u1",[6,200]]')), "a row for each prototype"),
        (sent_by(_number(b"birds", b"bi\x1bds")), "gallery must be"),
        (sent_by(_number(b"covers", b"plain!")), "mechanism must be"),
        (sent_by(lambda body: body + b"\0"), "after its end"),
        (sent_by(lambda body: body[:-1]), "longer than the rest"),
        (MapChanged("birds", 2).to_bytes(), "not expected here"),
    ],
)
def test_public_parts_that_are_refused_before_anything_is_paid(data: bytes, words: str) -> None:
    with pytest.raises((WireError, ProtocolError), match=words):
        ready(public=decode_frame(data, PublicPart))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"coverage": np.zeros((ITEMS, 1), np.uint8)}, "2 to 4096 sets"),
        ({"coverage": np.zeros((ITEMS, 4097), np.uint8)}, "at most 32768 x 4096"),
        ({"prototypes": np.zeros((32769, 6), np.int8)}, "at most 32768 x 64"),
        ({"prototypes": np.zeros((8193, 6), np.int8), "coverage": np.ones((8193, 2), np.uint8)}, "0 or 255"),
        ({"set_size": 39}, "sets of as many items as candidates says"),
        ({"n_items": 1 << 33}, "n_items must be at most"),
        ({"n_items": 10**9}, "bytes, and the limit"),  # an answer that no client would read
        ({"space": ScoreSpace("cosine", np.zeros(DIMENSION - 1))}, "one dimension"),
        ({"components": np.ones((DIMENSION + 1, 6), np.float16)}, "one dimension"),
    ],
)
def test_sizes_that_lie_are_refused_before_anything_is_paid(changed: dict[str, Any], words: str) -> None:
    with pytest.raises((MapError, WireError, ProtocolError), match=words):
        ready(public=crafted(**changed))


def honest_answer() -> Answer:
    return decode_frame(ServerProtocol(published()).answer(ask(ready(), VICTIM)), Answer)  # type: ignore[no-any-return]


def outcome(data: bytes, feature: Floats, public: PublicPart | None = None, extras: Extras = "none") -> str:
    """Return what a client does with an answer."""
    try:
        ids, _, answer = choose(ready(public=public), feature, data, 5, extras)
    except (WireError, ProtocolError) as error:
        return str(error)
    assert len(ids) == 5
    assert np.isin(ids, answer.ids).all()
    return "chosen"


ANSWER = honest_answer()
BODY = unframe(ANSWER.to_bytes())[2]
IDS, CODES = ANSWER.ids, ANSWER.codes
NO_NUMBER = np.full_like(CODES, 255)  # NaN
FOREIGN = np.arange(40, dtype=np.uint32) + np.uint32((1 << 32) - 40)


@pytest.mark.parametrize(
    ("data", "happens"),
    [
        (ANSWER.to_bytes(), "chosen"),
        (Answer(FOREIGN, CODES).to_bytes(), "chosen"),  # ids that no gallery has: useless, and no more
        (Answer(IDS, NO_NUMBER).to_bytes(), "chosen"),
        (Answer(IDS, np.zeros_like(CODES)).to_bytes(), "chosen"),
        (Answer(IDS, np.full((40, 6), np.finfo("f4").max, "<f4").view(np.uint8)).to_bytes(), "chosen"),
        (Answer(IDS, np.full((40, 6), np.inf, "<f4").view(np.uint8)).to_bytes(), "chosen"),
        (frame(Kind.ANSWER, BODY[:8] + BODY[8:12] * 2 + BODY[16:]), "ids must rise"),
        (frame(Kind.ANSWER, BODY[:8] + BODY[12:16] + BODY[8:12] + BODY[16:]), "ids must rise"),
        (Answer(IDS[:39], CODES[:39]).to_bytes(), "must hold 40 candidates; it holds 39"),
        (Answer(IDS[:1], CODES[:1]).to_bytes(), "must hold 40 candidates; it holds 1"),
        (Answer(np.arange(41, dtype=np.uint32), np.zeros((41, 12), np.uint8)).to_bytes(), "must hold 40 candidates"),
        (Answer(IDS, CODES[:, :-1]).to_bytes(), "codes of 24 bytes"),
        (Answer(IDS, CODES, "originals", (b"x",) * 40).to_bytes(), "must have none as extras"),
        (part().to_bytes(), "not expected here"),
    ],
    ids=range(14),  # not by the bytes, which are drawn anew in every process
)
def test_what_a_client_does_with_an_answer_depends_on_the_answer_alone(data: bytes, happens: str) -> None:
    done = {outcome(data, row) for row in ROWS}
    assert len(done) == 1
    assert happens in done.pop()


def _with_image(first: bytes, others: bytes, kind: int) -> bytes:
    images = (first,) + (others,) * 39
    lengths = np.array([len(image) for image in images], "<u4").tobytes()
    return frame(Kind.ANSWER, BODY + lengths + b"".join(images), kind)


WEBP = b"RIFF\x04\0\0\0WEBPdata"


@pytest.mark.parametrize(
    ("data", "extras", "happens"),
    [
        (_with_image(WEBP, WEBP, 1), "thumbnails", "chosen"),
        (_with_image(b"", WEBP, 1), "thumbnails", "chosen"),  # one without, all others with, and the reverse
        (_with_image(WEBP, b"", 1), "thumbnails", "chosen"),
        (_with_image(b"<script>", WEBP, 1), "thumbnails", "must be WebP"),
        (_with_image(b"\x89PNG", b"", 1), "thumbnails", "must be WebP"),
        (_with_image(b"anything", b"", 2), "originals", "chosen"),
        (_with_image(WEBP, WEBP, 2), "thumbnails", "must have thumbnails"),
        (frame(Kind.ANSWER, BODY, 1), "thumbnails", "truncated"),
    ],
)
def test_images_that_differ_between_candidates_change_nothing(data: bytes, extras: Any, happens: str) -> None:
    """Which candidates have an image may depend on the candidate, never what the client does next."""
    done = {outcome(data, row, extras=extras) for row in ROWS}
    assert len(done) == 1
    assert happens in done.pop()


def _change(table: ScalarCodes | ProductCodes, **arrays: Any) -> Any:
    changed = copy.copy(table)
    vars(changed).update(arrays)
    return changed


def _tables() -> list[Any]:
    features = published().published.release.features(GALLERY).astype(np.float32)
    scalar, grouped = make_codes(features, 16), make_codes(features, 8)
    assert isinstance(scalar, ScalarCodes)
    assert isinstance(grouped, ProductCodes)
    large = np.float32(3e38)
    return [
        _change(scalar, steps=np.full_like(scalar.steps, large)),
        _change(scalar, steps=np.full_like(scalar.steps, large), lowest=np.full_like(scalar.lowest, -large)),
        _change(scalar, projection=np.full_like(scalar.projection, large)),
        _change(grouped, weights=np.zeros_like(grouped.weights)),
        _change(grouped, weights=np.full_like(grouped.weights, 1e-38), mean=np.full_like(grouped.mean, large)),
    ]


def test_tables_of_tiny_numbers_are_read_in_wide_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 32-bit numbers are subnormal some processors are slow, for some queries more than for others."""
    seen = []
    table = type(part().table)
    compare = table.compare

    def watched(self: Any, projected: Any, codes: Any) -> Any:
        seen.append(projected.dtype)
        return compare(self, projected, codes)

    monkeypatch.setattr(table, "compare", watched)
    assert outcome(ANSWER.to_bytes(), VICTIM) == "chosen"
    assert seen == [np.float64]


@pytest.mark.parametrize("place", range(5))
def test_tables_that_overflow_scores_stop_no_client(place: int) -> None:
    """An error for the rows whose scores are no numbers, and none for others, would tell them apart."""
    table = _tables()[place]
    public = decode_frame(replace(part(), table=table).to_bytes(), PublicPart)
    codes = np.random.default_rng(0).integers(0, 256, (40, table.width), np.uint8)
    assert {outcome(Answer(IDS, codes).to_bytes(), row, public) for row in ROWS} == {"chosen"}
    for row in ROWS:
        _, scores, _ = choose(ready(public=public), row, Answer(IDS, codes).to_bytes(), 40)
        assert np.isfinite(scores).all()
        assert (np.diff(scores.astype(float)) <= 0).all()


@pytest.mark.parametrize("small", [0.0, 1e-60, 1e-200, 1e-310])
def test_numbers_that_underflow_stop_no_client(small: float) -> None:
    """Also where the program has told numpy to raise: silence after the debit would tell which row it was."""
    row, purse = np.zeros(DIMENSION), Purse()
    row[:2] = 3.0, small
    server = ServerProtocol(published())
    with np.errstate(all="raise"):
        ask(ready(public=crafted(space=ScoreSpace("cosine", np.zeros(DIMENSION)))), row, purse)
        _, scores, _ = choose(ready(), row, server.answer(ask(ready(), row, purse)))
        assert part().map.choose(row[None]).shape == (1,)
    assert len(purse.paid) == 2
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.metric)
def test_values_are_finite_and_sorted_for_every_space(space: ScoreSpace) -> None:
    """Also those of codes that are no numbers; the order of scores is that of values for every row."""
    client = ready(public=replace(part(space.metric), space=space))
    width = client.public.table.width
    infinite = np.full((40, width // 4), np.inf, "<f4").view(np.uint8)
    for codes in (NO_NUMBER[:, :1].repeat(width, axis=1), infinite, np.arange(40 * width).astype(np.uint8)):
        for row in ROWS[::5]:
            with np.errstate(all="raise"):
                ids, values = client.rank(row, Answer(IDS, codes.reshape(40, width)), 40)
            assert sorted(ids) == IDS.tolist()
            assert np.isfinite(values).all()
            steps = np.diff(values) if space.metric == "euclidean" else -np.diff(values)
            assert steps.min() >= 0
