"""What headers of image files promise to unpack to, beyond the size of the picture."""

import re
import struct
from typing import Any

MOST_SCANS = 100
_MOST_SEGMENTS = 10_000
# Markers that something follows: in the data of a scan a byte of 255 has a zero or a restart behind it.
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")
_END, _SCAN = 0xD9, 0xDA
_TILE_SIDES, _SAMPLES = (322, 323), 277
_BIG = 43  # the version of a BigTIFF


def many_scans(content: bytes) -> bool:
    r"""Return whether a JPEG has more than 100 scans, each of which is a pass over all of its pixels.

    What stands behind the end of the picture does not count.

    Examples
    --------
    >>> scan = b"\xff\xda\x00\x02 data"
    >>> many_scans(b"\xff\xd8" + 100 * scan), many_scans(b"\xff\xd8" + 101 * scan)
    (False, True)
    """
    place = scans = segments = 0
    while (found := _MARKER.search(content, place)) and found[0][1] != _END:
        scans += found[0][1] == _SCAN
        segments += 1
        if scans > MOST_SCANS or segments > _MOST_SEGMENTS:
            return True
        place = found.end() + int.from_bytes(content[found.end() : found.end() + 2], "big")
    return False


def tile_size(image: Any, content: bytes) -> int:
    """Return how many numbers a tile of a TIFF holds; 0 if it has none. Tiles may be larger than the picture.

    If another reader could see another size: of a tag that is there twice, one takes the first, one the last.
    """
    tags = _tiff_tags(content)
    if len(set(tags)) < len(tags):
        raise ValueError
    if not set(_TILE_SIDES) & set(tags):
        return 0
    sides = [image.tag_v2.get(tag) for tag in _TILE_SIDES]
    samples = image.tag_v2.get(_SAMPLES, 1)
    if not all(isinstance(one, int) and one > 0 for one in (*sides, samples)):
        raise ValueError
    return int(sides[0]) * int(sides[1]) * int(samples)


def _tiff_tags(content: bytes) -> list[int]:
    """Return the tags of the first picture in a TIFF, in their order."""
    order = "<" if content[:2] == b"II" else ">"
    big = _BIG in content[2:4]
    (start,) = struct.unpack_from(order + ("Q" if big else "I"), content, 8 if big else 4)
    (count,) = struct.unpack_from(order + ("Q" if big else "H"), content, start)
    first, step = start + (8 if big else 2), 20 if big else 12
    if first + count * step > len(content):
        raise ValueError
    return [struct.unpack_from(order + "H", content, first + number * step)[0] for number in range(count)]
