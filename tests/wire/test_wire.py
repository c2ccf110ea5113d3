import hashlib
import struct
import tracemalloc
import zlib
from typing import Any, Self

import numpy as np
import pytest

from nearveil.gallery.answers import Answer
from nearveil.gallery.codes import WholeCodes, codes_from_bytes, codes_to_bytes
from nearveil.mechanisms import Message, MessageError, PublicMap
from nearveil.metrics import CENTRED, METRICS, Metric, ScoreSpace
from nearveil.wire.frames import (
    HEADER_BYTES,
    Kind,
    Reader,
    WireError,
    WireSizeError,
    WireVersionError,
    frame,
    read_fields,
    unframe,
    write_fields,
)
from nearveil.wire.messages import MapChanged, PublicPart, Query, Refusal, RefusalCode, decode_frame


class PublicRequest:
    """A frame of version 0.2 that no program sends any more; only its kind is still known."""

    kind = Kind.PUBLIC_REQUEST

    def to_bytes(self) -> bytes:
        return frame(self.kind, b"")

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        if (flags, body) != (0, b""):
            raise WireError("a public request has no flags and no body")
        return cls()


ALL: Any = (PublicRequest, PublicPart, Query, Answer, MapChanged, Refusal)


def small_map(**changed: Any) -> PublicMap:
    fields: dict[str, Any] = {
        "components": np.ones((3, 2), np.float16),
        "prototypes": np.ones((4, 2), np.int8),
        "coverage": np.ones((4, 5), np.uint8),
        "n_items": 10,
        "set_size": 2,
    }
    return PublicMap(**(fields | changed))


def space(*mean: float, **constants: Any) -> ScoreSpace:
    return ScoreSpace(**{"metric": CENTRED, "mean": np.array(mean)} | constants)


def small_part(**changed: Any) -> PublicPart:
    fields: dict[str, Any] = {
        "gallery": "birds",
        "revision": 7,
        "mechanism": "covers",
        "epsilon": 2.0,
        "candidates": 0.2,
        "public_digest": "0123456789abcdef" * 2,
        "space": space(0.5, -1e-300, 3.0),
        "map": small_map(),
        "table": WholeCodes(3),
        "extractor": "a model",
        "fingerprint": "model-1",
        "offers": ("originals",),
    }
    return PublicPart(**(fields | changed))


def spoken() -> list[Any]:
    message = Message("covers", "ab" * 16, {"sets": np.array([3], np.int32)})
    ids, codes = np.array([4, 9], np.uint32), np.arange(6, dtype=np.uint8).reshape(2, 3)
    return [
        PublicRequest(),
        small_part(),
        Query(message, "thumbnails"),
        Answer(ids, codes),
        Answer(ids, codes, "originals", (b"", b"picture")),
        MapChanged("birds", (1 << 64) - 1),
        Refusal(RefusalCode.FAILED, "later"),
        Answer(ids, codes, "names", (b"", b"a bird.png")),
    ]


@pytest.mark.parametrize("sent", spoken(), ids=lambda one: type(one).__name__)
def test_what_is_sent_is_what_is_read(sent: Any) -> None:
    data = sent.to_bytes()
    found = decode_frame(data, *ALL)
    assert type(found) is type(sent)
    assert found.to_bytes() == data
    others = [kind for kind in ALL if kind is not type(sent)]
    with pytest.raises(WireError, match="not expected here"):
        decode_frame(data, *others)


def test_a_public_part_keeps_every_field() -> None:
    sent = small_part()
    found = decode_frame(sent.to_bytes(), PublicPart)
    for name in ("gallery", "revision", "mechanism", "epsilon", "candidates", "public_digest", "extractor"):
        assert getattr(found, name) == getattr(sent, name)
    assert codes_to_bytes(found.table) == codes_to_bytes(sent.table)
    assert (found.fingerprint, found.offers) == ("model-1", ("originals",))
    assert found.space.mean.tolist() == [0.5, -1e-300, 3.0]
    assert found.map.map_id == sent.map.map_id
    for offers in ((), ("thumbnails",), ("thumbnails", "originals"), ("names",), ("thumbnails", "originals", "names")):
        assert decode_frame(small_part(offers=offers).to_bytes(), PublicPart).offers == offers


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("recall", [None, 0.0, 0.97])
def test_a_public_part_keeps_its_metric_with_the_constants(metric: Metric, recall: float | None) -> None:
    mean = (0.5, -2.0) if metric == "euclidean" else (0.5, -2.0, 3.0)
    sent = small_part(space=space(*mean, metric=metric, scale=0.25, balance=7.0), code_recall=recall)
    found = decode_frame(sent.to_bytes(), PublicPart)
    assert found.to_bytes() == sent.to_bytes()
    assert (found.space.metric, found.space.mean.tolist(), found.dimension) == (metric, list(mean), len(mean))
    is_old = metric == CENTRED  # in the bytes of version 0.2, which had neither constants nor a recall
    assert (found.space.scale, found.space.balance) == ((1.0, 1.0) if is_old else (0.25, 7.0))
    assert found.code_recall == (None if is_old else recall)
    if is_old:
        fields = write_fields(metric, 1.0, 1.0, -1.0)
        kind, flags, body = unframe(sent.to_bytes())
        with pytest.raises(WireError, match="metric"):
            decode_frame(frame(kind, body + fields, flags | 16), PublicPart)


def test_the_bytes_are_those_that_the_documentation_says() -> None:
    data = MapChanged("ab", 258).to_bytes()
    body = b"\x02\0\0\0ab" + b"\x02\x01" + bytes(6)
    head = b"NVW\x01\x05\0" + b"\x0e\0\0\0"
    assert data == head + struct.pack("<I", zlib.crc32(head + body)) + body


def test_version_one_is_written_as_it_always_was() -> None:
    """Clients and servers of different age talk to each other: these digests never change."""
    digests = [hashlib.sha256(one.to_bytes()).hexdigest()[:16] for one in spoken()]
    assert digests[:7] == [
        "c8ad9ea64a1c3dfa",
        "11c6ca520752aa06",
        "10fc8e1fd281c965",
        "ad3681082ce9496c",
        "65cd24d2c2516a53",
        "14596027264147b2",
        "e906be3f69e9bb29",
    ]


def resealed(data: bytes, **changed: int) -> bytes:
    """Return a frame with other fields in its header, and a checksum that fits them."""
    magic, version, kind, flags, length, _ = struct.unpack_from("<3sBBBII", data)
    fields = {"version": version, "kind": kind, "flags": flags, "length": length} | changed
    head = struct.pack("<3sBBBI", magic, *fields.values())
    return head + struct.pack("<I", zlib.crc32(head + data[14:])) + data[14:]


CHANGED = spoken()[5].to_bytes()


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", WireError, "not of the nearveil protocol"),
        (b"NVW\x01\x05", WireError, "not of the nearveil protocol"),
        (b"NVM" + CHANGED[3:], WireError, "not of the nearveil protocol"),
        (resealed(CHANGED, version=2), WireVersionError, "version 2"),
        (resealed(CHANGED, version=0), WireVersionError, "version 0"),
        (resealed(CHANGED, kind=0), WireError, "kind 0"),
        (resealed(CHANGED, kind=7), WireError, "kind 7"),
        (resealed(CHANGED, flags=1), WireError, "flags 1"),
        (resealed(spoken()[1].to_bytes(), flags=32), WireError, "flags 32"),
        (resealed(spoken()[2].to_bytes(), flags=5), WireError, "flags 5"),
        (resealed(spoken()[5].to_bytes(), flags=1), WireError, "flags 1"),
        (resealed(spoken()[6].to_bytes(), flags=1), WireError, "flags 1"),
        (resealed(spoken()[2].to_bytes(), length=(1 << 32) - 1), WireSizeError, "at most 65536 bytes"),
        (spoken()[6].to_bytes() + b"\0", WireError, "after its end"),
        (spoken()[6].to_bytes()[:-1], WireError, "truncated"),
        (spoken()[6].to_bytes()[:-1] + b"R", WireError, "checksum"),
        (frame(Kind.MAP_CHANGED, b"\x01\0\0\0a" + bytes(9)), WireError, "after its end"),
        (frame(Kind.MAP_CHANGED, b"\xff\0\0\0a"), WireError, "longer than the rest"),
        (frame(Kind.MAP_CHANGED, b"\xff\xff\xff\xffa"), WireError, "more than 1000 characters"),
        (frame(Kind.MAP_CHANGED, b"\x02\0\0\0\xff\xff" + bytes(8)), WireError, "UTF-8"),
        (frame(Kind.MAP_CHANGED, b"\x02\0\0\0a\x1b" + bytes(8)), WireError, "printable"),
        (frame(Kind.REFUSAL, struct.pack("<QI", 99, 0)), WireError, "refusal code 99"),
        (frame(Kind.QUERY, b"NVM"), WireError, "the message cannot be read"),
        (bytearray(CHANGED), WireError, "must be bytes"),
    ],
)
def test_what_is_not_known_is_refused(data: bytes, error: type[WireError], words: str) -> None:
    with pytest.raises(error, match=words):
        decode_frame(data, *ALL)


def test_a_message_has_one_way_to_be_written() -> None:
    message = Message("covers", "ab", {"sets": np.array([3], np.int32)}).to_bytes()
    length = int.from_bytes(message[4:8], "little")
    spaced = message[:4] + struct.pack("<I", length + 1) + message[8 : 8 + length] + b" " + message[8 + length :]
    assert Message.from_bytes(spaced).to_bytes() == message  # read by itself, it is the same message
    with pytest.raises(WireError, match="not encoded canonically"):
        decode_frame(frame(Kind.QUERY, spaced), Query)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"gallery": ""}, "gallery must be"),
        ({"gallery": "a\nb"}, "gallery must be"),
        ({"gallery": "x" * 1001}, "gallery must be"),
        ({"extractor": "\x1b[2J"}, "extractor must be"),
        ({"revision": -1}, "revision must be"),
        ({"revision": 1 << 64}, "revision must be"),
        ({"revision": True}, "revision must be"),
        ({"epsilon": 0.0}, "epsilon must be"),
        ({"epsilon": np.inf}, "epsilon must be"),
        ({"epsilon": np.nan}, "epsilon must be"),
        ({"candidates": 0.3}, "sets of as many items"),
        ({"candidates": 0.01}, "candidates must be at least"),
        ({"candidates": 2.0}, "candidates must be a fraction"),
        ({"public_digest": "0" * 31}, "public_digest must be"),
        ({"public_digest": "G" * 32}, "public_digest must be"),
        ({"space": space(0.5, np.nan, 3.0)}, "mean must be"),
        ({"space": space(0.5, np.inf, 3.0)}, "mean must be"),
        ({"space": space(0.5, 1e7, 3.0)}, "mean must be"),
        ({"space": space(mean=np.zeros((1, 3)))}, "mean must be"),
        ({"space": space(0.0, 0.0)}, "features of one dimension"),
        ({"space": space(0.0, 0.0, 0.0, metric="euclidean")}, "features of one dimension"),
        ({"space": space(0.0, 0.0, 0.0, metric="manhattan")}, "metric must be one of"),
        ({"space": space(0.0, 0.0, 0.0, metric="dot", scale=1e-10)}, "scale and balance must be"),
        ({"space": space(0.0, 0.0, 0.0, metric="dot", scale=np.nan)}, "scale and balance must be"),
        ({"space": space(0.0, 0.0, metric="euclidean", balance=1e10)}, "scale and balance must be"),
        ({"space": space(0.0, 0.0, metric="euclidean", balance=-1.0)}, "scale and balance must be"),
        ({"code_recall": 1.5}, "code_recall must be"),
        ({"code_recall": np.nan}, "code_recall must be"),
        ({"table": WholeCodes(4)}, "features of one dimension"),
        ({"map": small_map(components=np.ones((4, 2), np.float16))}, "features of one dimension"),
        ({"offers": ("originals", "thumbnails")}, "offers must be"),
        ({"offers": ("none",)}, "offers must be"),
    ],
)
def test_public_parts_that_are_none(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(WireError, match=words):
        small_part(**changed)


def test_numbers_that_are_not_finite_do_not_arrive() -> None:
    body = unframe(small_part().to_bytes())[2]
    for value in (2.0, 0.2):  # epsilon, candidates
        for bad in (np.nan, np.inf, -np.inf):
            changed = body.replace(struct.pack("<d", value), struct.pack("<d", bad), 1)
            assert changed != body
            with pytest.raises(WireError, match="not finite"):
                decode_frame(frame(Kind.PUBLIC_PART, changed), PublicPart)
    changed = body.replace(struct.pack("<d", -1e-300), struct.pack("<d", np.nan), 1)
    with pytest.raises(WireError, match="mean must be"):
        decode_frame(frame(Kind.PUBLIC_PART, changed), PublicPart)
    table = small_map().components.tobytes()
    changed = body.replace(table, np.full((3, 2), np.nan, np.float16).tobytes(), 1)
    with pytest.raises(WireError, match="components must be finite"):
        decode_frame(frame(Kind.PUBLIC_PART, changed), PublicPart)


LARGE_MAPS: dict[str, dict[str, Any]] = {
    "components": {"components": np.zeros((3, 65), np.uint16)},
    "prototypes": {"prototypes": np.zeros((32_769, 2), np.int8)},
    "coverage": {"coverage": np.zeros((4, 4097), np.uint8)},
    "more": {"more": np.zeros(1, np.int8)},
}


@pytest.mark.parametrize("name", LARGE_MAPS)
def test_maps_beyond_the_caps_are_refused_by_their_header(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = dict(Message.from_bytes(small_map().to_bytes()).arrays) | LARGE_MAPS[name]
    data = Message("map", "0" * 32, arrays).to_bytes()
    monkeypatch.setattr(np, "frombuffer", None)  # nothing of it is read
    with pytest.raises(MessageError, match=rf"{name}.* (at most|unexpected array)"):
        PublicMap.from_bytes(data)


LARGE_TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "dimension": ("codes-whole", {"dimension": np.array(16_001, "<i8")}),
    "projection": ("codes-scalar", {"projection": np.zeros((1, 32_001), "<f4")}),
    "steps": ("codes-scalar", {"steps": np.zeros(32_001, "<f4")}),
    "centroids": ("codes-product", {"centroids": np.zeros((1, 256, 5), "<f4")}),
    "more": ("codes-whole", {"more": np.zeros(1, np.int8)}),
}


@pytest.mark.parametrize("name", LARGE_TABLES)
def test_tables_beyond_the_caps_are_refused(name: str) -> None:
    kind, arrays = LARGE_TABLES[name]
    with pytest.raises(WireError, match=r"at most|1 to 16000|unexpected array"):
        codes_from_bytes(Message(kind, "0" * 32, arrays).to_bytes())


def test_long_fields_are_refused_before_they_are_read() -> None:
    with pytest.raises(WireError, match="more than 1000 characters"):
        decode_frame(frame(Kind.MAP_CHANGED, write_fields("x" * 4001)), MapChanged)
    body = unframe(small_part().to_bytes())[2]
    mean = small_part().space.mean.astype("<f8").tobytes()
    long = np.zeros(16_001, "<f8").tobytes()
    changed = body.replace(struct.pack("<I", len(mean)) + mean, struct.pack("<I", len(long)) + long, 1)
    with pytest.raises(WireError, match="mean must be a row of at most 16000"):
        decode_frame(frame(Kind.PUBLIC_PART, changed), PublicPart)


def test_refusals_are_checked_when_made() -> None:
    with pytest.raises(WireError, match="words must be"):
        Refusal(RefusalCode.FAILED, "a\x07")
    assert decode_frame(Refusal(RefusalCode.FAILED, "").to_bytes(), Refusal).words == ""


def test_limits_are_kept_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    data = spoken()[3].to_bytes()
    size = len(data) - HEADER_BYTES
    monkeypatch.setattr(Kind.ANSWER, "limit", size)
    assert decode_frame(data, Answer)
    monkeypatch.setattr(Kind.ANSWER, "limit", size - 1)
    with pytest.raises(WireSizeError, match=f"at most {size - 1} bytes"):
        decode_frame(data, Answer)


def test_fields_end_where_they_say() -> None:
    body = write_fields(5, -0.5, "grün", b"")
    assert read_fields(body, int, float, str, bytes) == (5, -0.5, "grün", b"")
    with pytest.raises(WireError, match="after its end"):
        read_fields(body, int, float, str)
    reader = Reader(body)
    assert reader.take(len(body)) == body
    with pytest.raises(WireError, match="truncated"):
        reader.take(1)


def test_many_empty_images_cost_little_memory() -> None:
    count = 200_000
    ids = np.arange(count, dtype="<u4").tobytes()
    body = struct.pack("<II", count, 1) + ids + bytes(count) + bytes(4 * count)
    tracemalloc.start()
    try:
        assert len(Answer.from_body(2, body).contents) == count
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("count", "width", "words"), [(0, 1, "at least one"), (2, 0, "at least one"), (2, 1, "rise")])
def test_answers_are_refused_before_images_are_cut(
    count: int, width: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[object] = []
    monkeypatch.setattr(Answer, "__post_init__", cut.append)
    body = struct.pack("<II", count, width) + bytes(count * (4 + width + 4))
    with pytest.raises(WireError, match=words):
        Answer.from_body(1, body)
    assert not cut
