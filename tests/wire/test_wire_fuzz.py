"""Bytes of all kinds: read as what they are, or refused in words; in memory that what was given bounds."""

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.gallery.answers import Answer
from nearveil.gallery.codes import codes_from_bytes, codes_to_bytes, make_codes
from nearveil.mechanisms import Message
from nearveil.wire.client import ProtocolError
from nearveil.wire.frames import Kind, WireError, frame, unframe
from nearveil.wire.messages import MapChanged, PublicPart, Query, Refusal, decode_frame
from nearveil.wire.server import ServerProtocol
from tests.wire.test_wire import ALL, spoken
from tests.wire.wiring import published, ready

FUZZ = settings(max_examples=150, deadline=None)
KINDS = st.sampled_from(list(Kind))
FLAGS = st.one_of(st.integers(0, 3), st.integers(0, 255))
NUMBERS = st.sampled_from([0, 1, 2, 255, 1 << 16, (1 << 31) - 1, (1 << 32) - 1])
MULTIPLE, CONSTANT = 40, 400_000  # of memory over what was given


@st.composite
def bodies(draw: Any) -> bytes:
    """Return numbers that lie about what follows them, among noise."""
    parts = draw(
        st.lists(
            st.one_of(
                st.binary(max_size=60),
                NUMBERS.map(lambda number: struct.pack("<I", number)),
                st.text(max_size=5).map(lambda text: struct.pack("<I", len(text.encode())) + text.encode()),
                st.floats().map(lambda number: struct.pack("<d", number)),
            ),
            max_size=8,
        )
    )
    return b"".join(parts)


@st.composite
def damaged(draw: Any) -> bytes:
    """Return a good frame with some bytes of its body changed, cut or put in, its checksum made to fit again."""
    kind, flags, body = unframe(draw(st.sampled_from(spoken())).to_bytes())
    data = bytearray(body)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(data)))
        what = draw(st.sampled_from(["change", "cut", "put", "number"]))
        if what == "change" and place < len(data):
            data[place] = draw(st.integers(0, 255))
        elif what == "cut":
            del data[place : place + draw(st.integers(1, 8))]
        elif what == "put":
            data[place:place] = draw(st.binary(min_size=1, max_size=8))
        else:
            data[place : place + 4] = struct.pack("<I", draw(NUMBERS))
    return frame(kind, bytes(data), draw(st.sampled_from([flags, flags, flags, 0, 1, 2, 3])))


ANY = st.one_of(
    st.binary(max_size=300),
    st.builds(frame, KINDS, bodies(), FLAGS),
    damaged(),
    st.builds(lambda one, at: one.to_bytes()[:at], st.sampled_from(spoken()), st.integers(0, 200)),
    st.sampled_from([one.to_bytes() for one in spoken()]),
)


def peak(work: Any, *arguments: Any) -> int:
    """Return how many bytes Python and NumPy held at most during a call that may refuse."""
    tracemalloc.start()
    try:
        work(*arguments)
    except WireError:
        pass
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return most


@FUZZ
@given(ANY)
def test_bytes_are_refused_or_are_the_only_way_to_write_what_was_read(data: bytes) -> None:
    try:
        found = decode_frame(data, *ALL)
    except WireError as refused:
        assert str(refused)
        return
    assert found.to_bytes() == data


@FUZZ
@given(ANY)
def test_memory_is_bounded_by_what_was_given(data: bytes) -> None:
    assert peak(lambda: decode_frame(data, *ALL)) <= MULTIPLE * len(data) + CONSTANT


@pytest.mark.parametrize("count", [1 << 20, (1 << 32) - 1])
@pytest.mark.parametrize("flags", [0, 1, 2])
def test_sizes_that_lie_cost_nothing(count: int, flags: int) -> None:
    data = frame(Kind.ANSWER, struct.pack("<II", count, 200) + bytes(1000), flags)
    assert peak(Answer.from_bytes, data) <= MULTIPLE * len(data) + CONSTANT
    top = b'{"arrays":{"x":["<f8",[%d,%d]]},"mechanism":"covers","public_id":"a","seeded":false}' % (count % 9**8, 9**7)
    data = frame(Kind.QUERY, struct.pack("<3sBI", b"NVM", 1, len(top)) + top + bytes(1000))
    assert peak(lambda: decode_frame(data, Query)) <= MULTIPLE * len(data) + CONSTANT


def test_large_answers_take_a_small_multiple_of_themselves() -> None:
    count = 20_000
    ids, codes = np.arange(count, dtype=np.uint32), np.ones((count, 1), np.uint8)
    for answer in (Answer(ids, codes), Answer(ids, codes, "originals", tuple(b"%04d" % (one % 9999) for one in ids))):
        data = answer.to_bytes()
        assert peak(Answer.from_bytes, data) <= 10 * len(data)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([None, 16, 64]), st.integers(0, 10**6), st.integers(0, 255), st.integers(0, 10**6))
def test_damaged_tables_are_refused_or_read_codes(size: int | None, place: int, value: int, cut: int) -> None:
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((40, 20)).astype(np.float32)
    codes = make_codes(rows, size)
    data = bytearray(codes_to_bytes(codes))
    data[place % len(data)] = value
    for one in (bytes(data), bytes(data[: cut % len(data)])):
        try:
            read_codes = codes_from_bytes(one)
        except WireError:
            continue
        with np.errstate(all="ignore"):
            assert read_codes.scores(rows[:2], generator.integers(0, 256, (5, read_codes.width), np.uint8)).shape == (
                2,
                5,
            )


SERVER = ServerProtocol(published())


@FUZZ
@given(ANY)
def test_a_server_replies_to_anything(data: bytes) -> None:
    assert decode_frame(SERVER.answer(data), MapChanged, Refusal)  # no message here is for its map


@FUZZ
@given(st.integers(-3, 9), st.sampled_from(["<i4", "<i8", "<f8"]), st.sampled_from([(1,), (2,), (), (1, 1), (0,)]))
def test_a_server_answers_messages_of_the_right_form_alone(named: int, kind: str, shape: tuple[int, ...]) -> None:
    message = Message("covers", published().published.release.public_id, {"sets": np.full(shape, named, kind)})
    reply = decode_frame(SERVER.answer(Query(message).to_bytes()), Answer, Refusal)
    good = 0 <= named < 6 and kind == "<i4" and shape == (1,)
    assert isinstance(reply, Answer) == good
    if good:
        assert len(reply.ids) == 40


@FUZZ
@given(ANY)
def test_a_client_stops_in_words_before_it_pays(data: bytes) -> None:
    try:
        ready(1.0, decode_frame(data, PublicPart))
    except (WireError, ProtocolError) as error:
        assert str(error)


@FUZZ
@given(ANY)
def test_a_client_reads_any_answer_or_none(data: bytes) -> None:
    with pytest.raises((WireError, ProtocolError)):  # no answer here has as many candidates as the map says
        ready().read_answer(data)
