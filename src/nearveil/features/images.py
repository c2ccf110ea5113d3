"""Decode image files. A file may be broken or hostile; it is then refused with a reason."""

import contextlib
import math
import os
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.errors import NearveilError
from nearveil.lazy import require_extra

Pixels = NDArray[np.uint8]
Source = str | os.PathLike[str] | bytes

MOST_BYTES = 64 * 2**20
MOST_PIXELS = 64_000_000
MOST_SCANS = 100
SIDE = 128  # pixels of thumbnails
_MOST_SEGMENTS = 10_000
_MOST_CHANNELS = 4
_BAND = 2**20  # pixels converted at a time
_QUALITY = 80  # of thumbnails

MISSING = "missing: there is no such file"
UNREADABLE = "not a file that can be read"
EMPTY = "empty: it holds no bytes"
NO_IMAGE = "not an image: only JPEG, PNG, WebP, GIF, BMP, TIFF and HEIC are read"
BROKEN = "broken or truncated: it begins like an image, but cannot be decoded to its end"
TOO_LARGE = "too large: more than 64 megapixels or 64 MiB"
SCANS = f"too many scans: a JPEG of more than {MOST_SCANS} passes over its pixels"
ANIMATED = "animated, or with several pages: save a single image"
NO_HEIC = 'HEIC: pip install "nearveil[heic]" to read it, or convert it to JPEG'
DEEP = "16-bit: more than 8 bits a channel; convert it to 8"
COLOURS = "neither RGB nor grey: convert it to RGB"

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_HEIC = re.compile(rb"....ftyp(hei[cmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)
_PLAIN = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")
# Markers of segments of a JPEG: within the data of a scan, a byte of 255 is followed by a zero or a restart marker.
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")
_END, _SCAN = 0xD9, 0xDA
_PNG_DEPTH = 24  # offset of the bits per channel in a PNG header
_TIFF_DEPTHS, _TIFF_SAMPLES, _TIFF_TILE = 258, 277, (322, 323)  # tags
_BIG_TIFF = 43  # the version of a BigTIFF

# Warning filters are global to the process: two threads must not set and restore them at the same time.
_FILTERS = threading.Lock()


class ImageError(NearveilError, ValueError):
    """A file cannot be used as an image. The message contains nothing of its content."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(f"image: {text or reason}")
        self.reason = reason  #: without the file name, which may be private


def load_image(source: Source) -> Pixels:
    """Decode an image file, a path or its bytes, to RGB (height, width, 3), identified by its content.

    JPEG, PNG, WebP, GIF, BMP, TIFF or HEIC, which needs the extra `heic`. EXIF rotation is applied. Palettes, grey and
    CMYK become RGB; the colour profile of CMYK is ignored; transparent pixels become white.

    Raises
    ------
    ImageError
        If the file is missing, not an image, broken, truncated or animated, or has several pages, more than 8 bits per
        channel, more than 64 megapixels or 64 MiB, larger tiles, or more than 100 scans. Pillow's warnings about a
        header are errors as well.
    ModuleNotFoundError
        If Pillow is not installed (the extra `images`).

    Examples
    --------
    >>> load_image(b"a text, whatever its name")
    Traceback (most recent call last):
        ...
    nearveil.features.images.ImageError: image: not an image: only JPEG, PNG, WebP, GIF, BMP, TIFF and HEIC are read
    """
    pixels: Pixels = _load(source, _copy_pixels)
    return pixels


def load_picture(source: Source) -> Any:
    """Decode an image file like :func:`load_image`, to a Pillow image: faster to resize than pixels."""
    return _load(source, _convert_to_rgb)


def _load(source: Source, convert: Callable[[Any], Any]) -> Any:
    content = source if isinstance(source, bytes) else read_file(source)
    if not content:
        raise ImageError(EMPTY)
    if len(content) > MOST_BYTES:
        raise ImageError(TOO_LARGE)
    pixels = _decode(content, convert)
    # Raised here, without a chained error: messages of decoders may hold private values.
    if isinstance(pixels, str):
        raise ImageError(pixels)
    return pixels


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Read a file, up to one byte more than the limit of an image."""
    missing = False
    with contextlib.suppress(OSError, ValueError):  # ValueError: a path with a zero byte
        if Path(path).is_file():  # a pipe would block
            with Path(path).open("rb") as file:
                return file.read(MOST_BYTES + 1)
        missing = not Path(path).exists()
    if missing:
        raise ImageError(MISSING, f"there is no file at {os.fspath(path)}; correct the path")
    raise ImageError(UNREADABLE)


def resize(image: Any, side: int) -> Pixels:
    """Resize pixels or a Pillow image to `side` x `side` pixels: bicubic, ignoring the aspect ratio."""
    small = _as_picture(image).resize((side, side), _import_pillow().Resampling.BICUBIC)
    return np.asarray(small, dtype=np.uint8)


def _as_picture(image: Any) -> Any:
    return _import_pillow().fromarray(image) if isinstance(image, np.ndarray) else image


def _import_pillow() -> Any:
    with require_extra("images"):
        from PIL import Image
    return Image


def _decode(content: bytes, convert: Callable[[Any], Any]) -> Any:
    """Return the decoded image, converted, or the reason for refusing the file."""
    pillow = _import_pillow()
    from PIL import UnidentifiedImageError

    try:
        with _raise_warnings(), _open(content) as image:
            image.verify()  # checks lengths and checksums of a PNG; the file must be opened again afterwards
        with _raise_warnings():
            image = _open(content)
        with image:
            return _find_fault(image, content) or convert(_turn_upright(image))
    except (pillow.DecompressionBombWarning, pillow.DecompressionBombError):
        return TOO_LARGE
    except UnidentifiedImageError:
        return BROKEN if content.startswith(_BEGINNINGS) else NO_IMAGE
    except ModuleNotFoundError:
        return NO_HEIC
    except MemoryError:
        raise
    except Exception:  # decoders raise many types for a broken file; warnings arrive here as well
        return BROKEN


def _open(content: bytes) -> Any:
    """Open an image with Pillow, which reads the header only."""
    if _HEIC.match(content) is None:
        return _import_pillow().open(BytesIO(content), formats=_FORMATS)
    from pillow_heif import HeifImageFile  # not registered with Pillow: registration is global to the process

    return HeifImageFile(BytesIO(content))  # type: ignore[no-untyped-call, unused-ignore]


@contextlib.contextmanager
def _raise_warnings() -> Iterator[None]:
    """Turn Pillow's warnings into errors; for headers only, because other threads wait for the lock."""
    with _FILTERS, warnings.catch_warnings():
        warnings.filterwarnings("error", module=r"PIL\.")
        # Cameras append a second image, and other programs cut it off; the first image is complete.
        warnings.filterwarnings("ignore", message="Image appears to be a malformed MPO", module=r"PIL\.")
        yield


def _find_fault(image: Any, content: bytes) -> str:
    """Return the reason for refusing an image before decoding it, or an empty string."""
    if image.format in ("JPEG", "MPO") and _has_many_scans(content):
        return SCANS
    with _raise_warnings():
        tile, depth = _read_sizes(image, content)
        if image.width * image.height > MOST_PIXELS or tile > _MOST_CHANNELS * MOST_PIXELS:
            return TOO_LARGE
        # MPO and HEIC files of cameras hold more images, which are not shown.
        if image.format not in ("MPO", "HEIF") and getattr(image, "is_animated", False):
            return ANIMATED
        if image.mode.startswith(("I", "F")) or depth > 8:
            return DEEP
        if image.mode not in _PLAIN:
            return COLOURS
        if image.format != "PNG":  # a PNG may store EXIF at its end, and would be decoded here
            image.getexif()
    return ""


def _has_many_scans(content: bytes) -> bool:
    """Return whether a JPEG has more than 100 scans; each scan is a pass over all pixels."""
    offset = scans = segments = 0
    while (marker := _MARKER.search(content, offset)) and marker[0][1] != _END:
        scans += marker[0][1] == _SCAN
        segments += 1
        if scans > MOST_SCANS or segments > _MOST_SEGMENTS:
            return True
        offset = marker.end() + int.from_bytes(content[marker.end() : marker.end() + 2], "big")
    return False


def _read_sizes(image: Any, content: bytes) -> tuple[int, int]:
    """Return the samples in a tile (0 without tiles) and the bits per channel, which Pillow silently reduces to 8."""
    if image.format == "PNG":
        return 0, content[_PNG_DEPTH]
    if image.format != "TIFF":
        return 0, 8
    tags, values = _read_tiff_tags(content), image.tag_v2
    # Pillow and libtiff may read different ones of two equal tags, and Pillow drops the second silently.
    if len(set(tags)) < len(tags):
        raise ValueError
    depth = int(max(values.get(_TIFF_DEPTHS, (1,))))
    if not set(_TIFF_TILE) & set(tags):
        return 0, depth
    sizes = [*map(values.get, _TIFF_TILE), values.get(_TIFF_SAMPLES, 1)]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError
    return math.prod(sizes), depth


def _read_tiff_tags(content: bytes) -> list[int]:
    """Return the tags of the first image in a TIFF, in file order."""
    order = "<" if content[:2] == b"II" else ">"
    big = _BIG_TIFF in content[2:4]
    (start,) = struct.unpack_from(order + ("Q" if big else "I"), content, 8 if big else 4)
    (count,) = struct.unpack_from(order + ("Q" if big else "H"), content, start)
    first, step = start + (8 if big else 2), 20 if big else 12
    if first + count * step > len(content):
        raise ValueError
    return [struct.unpack_from(order + "H", content, first + number * step)[0] for number in range(count)]


def _turn_upright(image: Any) -> Any:
    """Decode an image, and rotate it as its EXIF says."""
    from PIL import ImageOps

    image.load()
    if image.width * image.height > MOST_PIXELS:  # a HEIC may be larger than its header says
        raise ValueError
    with _raise_warnings():
        image.getexif()
    ImageOps.exif_transpose(image, in_place=True)
    return image


def _convert_to_rgb(image: Any) -> Any:
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    return _import_pillow().fromarray(_copy_pixels(image))


def _copy_pixels(image: Any) -> Pixels:
    """Convert an image to RGB pixels in bands, which limits the memory."""
    width, height = image.size
    out = np.empty((height, width, 3), dtype=np.uint8)
    step = max(1, _BAND // width)
    for top in range(0, height, step):
        band = image.crop((0, top, width, min(top + step, height)))
        if image.has_transparency_data:
            layer, band = band.convert("RGBA"), _import_pillow().new("RGB", band.size, "white")
            band.paste(layer, mask=layer)
        out[top : top + step] = np.asarray(band.convert("RGB"))
    return out


def thumbnail(image: Any, side: int = SIDE) -> bytes:
    """Reduce pixels, or a Pillow image in place, to `side` pixels along the longer side at most; return WebP."""
    pillow = _import_pillow()
    small = _as_picture(image)
    small.thumbnail((side, side), pillow.Resampling.LANCZOS)
    out = BytesIO()
    pillow.fromarray(np.asarray(small)).save(out, "WEBP", quality=_QUALITY)  # without the metadata of a file
    return out.getvalue()
