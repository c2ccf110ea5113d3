"""Whether an ONNX file holds all of its weights; onnxruntime would look for the others in the current folder."""

from collections.abc import Iterator

# The messages of onnx.proto through which a tensor can be reached: field to message.
_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14  # of a tensor
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # ways in which protobuf writes a field
_MOST_DIGITS = 10


def is_whole(content: bytes) -> bool:
    r"""Return whether no tensor of an ONNX file, at whatever depth, lies in another file.

    Returns: False, too, if it is not sound protobuf.

    Examples
    --------
    >>> is_whole(b"\x08\x08"), is_whole(b"no network")
    (True, False)
    """
    waiting = [("model", memoryview(content))]
    try:
        while waiting:
            kind, message = waiting.pop()
            for field, value in _fields(message):
                if kind == "tensor" and (field == _EXTERNAL_DATA or (field == _DATA_LOCATION and value != 0)):
                    return False
                inner = _FIELDS[kind].get(field)
                if inner is not None and isinstance(value, memoryview):
                    waiting.append((inner, value))
    except (ValueError, IndexError):
        return False
    return True


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the fields of a protobuf message: number, and value or content."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        field, way = tag >> 3, tag & 7
        value: int | memoryview
        if tag >= 2**32:  # some readers cut it off: they would see another field
            raise ValueError
        if way == _VARINT:
            value, place = _varint(message, place)
        elif way in (_BYTES, _EIGHT, _FOUR):
            length, place = _varint(message, place) if way == _BYTES else (8 if way == _EIGHT else 4, place)
            if length > len(message) - place:
                raise ValueError
            value, place = message[place : place + length], place + length
        else:  # groups, which ONNX does not use
            raise ValueError
        yield field, value


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """Return a number written in digits of 7 bits, the lowest first, and the place after it."""
    value = 0
    for digit in range(_MOST_DIGITS):
        byte = message[place + digit]
        value |= (byte & 0x7F) << (7 * digit)
        if byte < 0x80:
            return value, place + digit + 1
    raise ValueError
