import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nearveil.mechanisms import Message, MessageError


def _packed(top: object, body: bytes = b"") -> bytes:
    text = json.dumps(top).encode()
    return struct.pack("<3sBI", b"NVM", 1, len(text)) + text + body


@given(
    st.text(max_size=20),
    st.dictionaries(
        st.text(max_size=5),
        hnp.arrays(st.sampled_from(["i1", "u2", ">i4", "i8"]), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_round_trip(name, arrays, seeded):  # type: ignore[no-untyped-def]
    message = Message(name, "id", arrays, seeded=seeded)
    read = Message.from_bytes(message.to_bytes())
    assert read == message
    assert hash(read) == hash(message)
    for key, values in arrays.items():
        assert np.array_equal(read[key], values)


@given(st.binary(max_size=200), st.integers(0, 60), st.integers(0, 255))
def test_broken_bytes_never_do_anything_but_raise(noise, place, value):  # type: ignore[no-untyped-def]
    message = Message("cells", "ab", {"cell": np.arange(3), "x": np.ones((2, 2))})
    good = bytearray(message.to_bytes())
    good[place] = value
    for data in (noise, bytes(good), message.to_bytes()[:place]):
        try:
            read = Message.from_bytes(data)
        except MessageError:
            continue
        assert read.to_bytes()  # a byte of the numbers changed: another message, still a whole one


@pytest.mark.parametrize(
    ("top", "body", "words"),
    [
        ([], b"", "fields"),
        ({"mechanism": "a"}, b"", "fields"),
        ({"mechanism": 1, "public_id": "b", "seeded": False, "arrays": {"x": ["<i4", []]}}, b"0000", "must be str"),
        ({"mechanism": "a", "public_id": "b", "seeded": 0, "arrays": {"x": ["<i4", []]}}, b"0000", "seeded"),
        ({"mechanism": "a", "public_id": "b", "seeded": False, "arrays": {}}, b"", "1 to 16"),
        ({"mechanism": "a", "public_id": "b", "seeded": False, "arrays": {"x": ["|O", []]}}, b"0" * 8, "type"),
        ({"mechanism": "a", "public_id": "b", "seeded": False, "arrays": {"x": ["<i4", [-1]]}}, b"", "shape"),
        ({"mechanism": "a", "public_id": "b", "seeded": False, "arrays": {"x": ["<i4", [True]]}}, b"0000", "shape"),
        ({"mechanism": "a", "public_id": "b", "seeded": False, "arrays": {"x": ["<i4", [1] * 4]}}, b"0000", "shape"),
        ({"mechanism": "a", "public_id": "b", "seeded": False, "arrays": {"x": ["<i4", [9**7] * 3]}}, b"", "truncated"),
        (
            {"mechanism": "a", "public_id": "b", "seeded": False, "arrays": {"x": ["<f4", []]}},
            b"\0\0\xc0\x7f",
            "finite",
        ),
    ],
)
def test_headers_that_lie(top, body, words):  # type: ignore[no-untyped-def]
    with pytest.raises(MessageError, match=words):
        Message.from_bytes(_packed(top, body))


def test_other_versions_and_sizes():  # type: ignore[no-untyped-def]
    data = bytearray(Message("a", "b", {"x": np.zeros(2)}).to_bytes())
    data[3] = 2
    with pytest.raises(MessageError, match="version 2"):
        Message.from_bytes(bytes(data))
    with pytest.raises(MessageError, match="at most"):
        Message.from_bytes(b"NVM" + bytes(65 << 20))
    with pytest.raises(MessageError, match="integers or floats"):
        Message("a", "b", {"x": np.array(["text"])})
    with pytest.raises(MessageError, match="finite"):
        Message("a", "b", {"x": np.array([np.nan])})


def test_the_message_keeps_its_own_copy():  # type: ignore[no-untyped-def]
    values = np.arange(3)
    message = Message("a", "b", {"x": values})
    values[0] = 7
    assert message["x"].tolist() == [0, 1, 2]
    with pytest.raises(MessageError, match="must hold 'y'"):
        message["y"]
