"""Image files of every kind, sound and bad, made in memory."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Image: Any = pytest.importorskip("PIL.Image", reason="Pillow is not installed (the extra `images`)")
ImageFile: Any = pytest.importorskip("PIL.ImageFile", reason="Pillow is not installed (the extra `images`)")


def picture(height: int = 40, width: int = 60, seed: int = 0) -> NDArray[np.uint8]:
    """A smooth picture: what a lossy format keeps almost."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def saved(image: Any, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    (image if hasattr(image, "save") else Image.fromarray(image)).save(out, kind, **options)
    return out.getvalue()


def chunk(name: bytes, data: bytes, *, length: int | None = None) -> bytes:
    """A chunk of a PNG; `length` lies."""
    stated = len(data) if length is None else length
    return struct.pack(">I", stated) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, depth: int, colour: int, data: bytes, *, length: int | None = None) -> bytes:
    """A PNG by hand, where Pillow writes none such."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(data), length=length)
        + chunk(b"IEND", b"")
    )


def deep_rgb_png() -> bytes:
    """16 bits in each of three channels, which Pillow would cut down silently."""
    return png(4, 4, 16, 2, (b"\0" + bytes(range(24))) * 4)


def tiff(depth: int, samples: int) -> bytes:
    """A little TIFF of 2 x 2 pixels by hand."""
    data = bytes(2 * 2 * samples * depth // 8)
    depths = struct.pack("<" + "H" * samples, *[depth] * samples)
    entries = 9
    after = 8 + 2 + 12 * entries + 4
    place = after + len(depths)
    first = struct.unpack("<I", depths.ljust(4, b"\0"))[0] if len(depths) <= 4 else after
    tags = [
        (256, 3, 1, 2),
        (257, 3, 1, 2),
        (258, 3, samples, first),
        (259, 3, 1, 1),
        (262, 3, 1, 2 if samples == 3 else 1),
        (273, 4, 1, place),
        (277, 3, 1, samples),
        (278, 3, 1, 2),
        (279, 4, 1, len(data)),
    ]
    written = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<IH", 8, entries) + written + struct.pack("<I", 0) + depths + data


def tiled(side: int, *, twice: bool = False, kind: int = 4) -> bytes:
    """A TIFF of 16 x 16 pixels in one deflated tile of `side`; `twice` hides its width behind a second, small one."""
    data = zlib.compress(bytes(min(side, 64) ** 2))
    tags = [(256, 4, 16), (257, 4, 16), (258, 3, 8), (259, 3, 8), (262, 3, 1), (277, 3, 1), (322, kind, side)]
    tags += [(322, 4, 16)] * twice + [(323, kind, side), (324, 4, 8), (325, 4, len(data))]
    data += bytes(len(data) % 2)
    written = b"".join(struct.pack("<HHII", tag, form, 1, value) for tag, form, value in tags)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + written + bytes(4)


def animation(kind: str) -> bytes:
    frames = [Image.fromarray(picture(seed=seed)) for seed in range(3)]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:])
