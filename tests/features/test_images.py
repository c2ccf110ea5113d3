import io
import os
import struct
import sys
import threading
import tracemalloc
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearveil.features import ImageError, load_image
from nearveil.features import images as reasons
from tests.features.files import Image, ImageFile, animation, chunk, deep_rgb_png, picture, png, saved, tiff, tiled

KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
WHOLE = {kind: saved(picture(), kind) for kind in KINDS}


def reason_of(content: Any) -> str:
    with pytest.raises(ImageError) as caught:
        load_image(content)
    assert caught.value.reason in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None, "the error of a decoder may hold what is private"
    return caught.value.reason


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_what_loses_nothing_comes_back_exactly(kind: str) -> None:
    np.testing.assert_array_equal(load_image(WHOLE[kind]), picture())


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_what_loses_a_little_comes_back_nearly(kind: str) -> None:
    found = load_image(WHOLE[kind])
    assert found.shape == (40, 60, 3)
    assert np.abs(found.astype(int) - picture()).mean() < 12


def test_the_pixels_may_be_written_to() -> None:
    found = load_image(WHOLE["PNG"])
    found[0, 0] = 7
    assert found[0, 0].tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("kind", "part"), [(kind, part) for kind in KINDS for part in (0.3, 0.6, 0.9)] + [("JPEG", 0.98), ("PNG", 0.02)]
)
def test_truncated(kind: str, part: float) -> None:
    assert reason_of(WHOLE[kind][: int(len(WHOLE[kind]) * part)]) == reasons.BROKEN


@pytest.mark.parametrize("length", [0, 1, 2**31 - 1, 2**32 - 1])
def test_a_chunk_that_lies_about_its_length(length: int) -> None:
    rows = (b"\0" + bytes(range(12))) * 4
    assert load_image(png(4, 4, 8, 2, rows)).shape == (4, 4, 3)
    assert reason_of(png(4, 4, 8, 2, rows, length=length)) == reasons.BROKEN


def test_a_wrong_checksum() -> None:
    damaged = bytearray(WHOLE["PNG"])
    damaged[20] ^= 1  # in the header: the size
    assert reason_of(bytes(damaged)) == reasons.BROKEN


def test_a_bomb_is_refused_by_its_header() -> None:
    row = b"\0" + bytes(3 * 50_000)
    tracemalloc.start()
    assert reason_of(png(50_000, 50_000, 8, 2, row * 4)) == reasons.TOO_LARGE
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("width", "height", "refused"), [(8000, 8001, True), (64_000_001, 1, True), (10_000, 9_000, True), (9, 9, False)]
)
def test_the_limit_is_64_megapixels(width: int, height: int, refused: bool) -> None:
    # One bit a pixel: a whole image of few bytes. 90 megapixels are where Pillow only warns.
    content = png(width, height, 1, 0, (b"\0" + bytes(-(-width // 8))) * height)
    if refused:
        assert reason_of(content) == reasons.TOO_LARGE
    else:
        assert load_image(content).shape == (height, width, 3)


def test_a_tile_larger_than_the_picture() -> None:
    assert load_image(tiled(64)).shape == (16, 16, 3)
    assert reason_of(tiled(16_016)) == reasons.TOO_LARGE  # libtiff would ask for all of it
    assert reason_of(tiled(40_960)) == reasons.TOO_LARGE
    assert reason_of(tiled(40_960, twice=True)) == reasons.BROKEN  # Pillow reads the last, libtiff the first
    assert reason_of(tiled(64, kind=17)) == reasons.BROKEN  # a type that libtiff reads and Pillow does not


def _scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is repeated until there are `count`."""
    content = saved(Image.new("L", (16, 16), 128), "JPEG", progressive=True)
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + last * (count - content.count(b"\xff\xda")) + content[-2:]


def test_scans_are_counted() -> None:
    assert load_image(_scans(100)).shape == (16, 16, 3)
    assert reason_of(_scans(101)) == reasons.SCANS
    # What looks like scans, but lies in a comment or behind the end, as videos of telephones do, costs nothing.
    comment = b"\xff\xfe" + struct.pack(">H", 402) + b"\xff\xda" * 200
    whole = WHOLE["JPEG"]
    np.testing.assert_array_equal(load_image(whole[:2] + comment + whole[2:] + b"\xff\xda" * 200), load_image(whole))
    empty = b"\xff\xfe\0\x02"
    assert reason_of(whole[:-2] + empty * 20_000 + whole[-2:]) == reasons.SCANS


def test_others_may_warn_while_an_image_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters belong to the process: another thread's warning must not become an error, nor wait for a decoder."""
    seen: list[str] = []
    original = ImageFile.ImageFile.load

    def verify(image: Any) -> None:
        warnings.warn_explicit("another's", UserWarning, "other.py", 1, module="other")
        seen.append("header")

    def load(image: Any) -> Any:
        assert not reasons._FILTERS.locked() or image.tile == []
        seen.append("pixels" if warnings.filters == before else "pixels under other filters")
        return original(image)

    monkeypatch.setattr(ImageFile.ImageFile, "verify", verify)
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = list(warnings.filters)
        np.testing.assert_array_equal(load_image(WHOLE["BMP"]), picture())
    assert seen[:2] == ["header", "pixels"]


def test_bands_are_joined_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (37, 23, 4), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [saved(colours, "PNG", exif=exif), saved(colours[..., :3], "PNG"), saved(colours[..., 0], "GIF")]
    whole = [load_image(content) for content in files]
    for most in (1, 100):
        monkeypatch.setattr(reasons, "_BAND", most)
        for content, wanted in zip(files, whole, strict=True):
            np.testing.assert_array_equal(load_image(content), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reduced_picture_is_that_of_the_pixels(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "a private note"
    colours = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    files = [WHOLE[kind], saved(colours, kind), saved(Image.fromarray(colours).convert("L"), kind)]
    if kind not in ("GIF", "BMP"):
        files.append(saved(colours, kind, exif=exif, icc_profile=b"a private profile"))
    for content in files:
        pixels, loaded = load_image(content), reasons.load_picture(content)
        np.testing.assert_array_equal(reasons.resize(loaded, 32), reasons.resize(pixels, 32))
        small = reasons.thumbnail(loaded)
        assert small == reasons.thumbnail(pixels)
        assert b"private" not in small


def test_a_transparent_image_is_not_copied_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    convert = Image.Image.convert

    def watched(image: Any, *args: Any, **options: Any) -> Any:
        sizes.append(image.width * image.height)
        return convert(image, *args, **options)

    monkeypatch.setattr("PIL.Image.Image.convert", watched)
    load_image(saved(Image.new("RGBA", (2000, 2000), (1, 2, 3, 4)), "PNG"))
    assert sizes
    assert max(sizes) <= 2**20


def test_the_limit_is_64_mebibytes(tmp_path: Path) -> None:
    content = WHOLE["PNG"] + bytes(64 * 2**20)
    assert reason_of(content) == reasons.TOO_LARGE
    (tmp_path / "padded").write_bytes(content)
    assert reason_of(tmp_path / "padded") == reasons.TOO_LARGE


def test_a_text_in_a_png_that_swells() -> None:
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(100_000_000)))
    at = 8 + 25
    assert reason_of(WHOLE["PNG"][:at] + text + WHOLE["PNG"][at:]) == reasons.BROKEN


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animated(kind: str) -> None:
    assert reason_of(animation(kind)) == reasons.ANIMATED


def test_the_second_picture_of_a_camera_is_left_alone() -> None:
    found = load_image(animation("MPO"))
    np.testing.assert_array_equal(found, load_image(WHOLE["JPEG"]))
    spoilt = animation("MPO").replace(
        b"\x01\xb0\x04\0", b"\x09\xb0\x04\0", 1
    )  # the list of pictures lacks their number
    with pytest.warns(UserWarning, match="malformed MPO"):
        Image.open(io.BytesIO(spoilt)).close()
    np.testing.assert_array_equal(load_image(spoilt), found)


def test_cmyk_becomes_rgb() -> None:
    inks = Image.fromarray(picture()).convert("CMYK")
    np.testing.assert_array_equal(load_image(saved(inks, "TIFF")), np.asarray(inks.convert("RGB")))
    found = load_image(saved(inks, "JPEG"))
    assert np.abs(found.astype(int) - picture()).mean() < 12


def heic(pixels: Any, **options: Any) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif", reason="HEIC needs the extra heic")
    out = io.BytesIO()
    pillow_heif.from_pillow(Image.fromarray(pixels)).save(out, quality=95, **options)
    return out.getvalue()


def test_heic_is_read_and_pillow_left_as_it_is() -> None:
    content = heic(picture())
    found = load_image(content)
    assert found.shape == (40, 60, 3)
    assert np.abs(found.astype(int) - picture()).mean() < 12
    assert "HEIF" not in Image.registered_extensions().values()


def test_heic_on_white_and_turned() -> None:
    clear = np.zeros((40, 60, 4), np.uint8)
    assert load_image(heic(clear)).min() > 250
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees
    assert load_image(heic(picture(), exif=exif.tobytes())).shape == (60, 40, 3)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_broken_heic(part: float) -> None:
    content = heic(picture())
    assert reason_of(content[: int(len(content) * part)]) == reasons.BROKEN


def test_a_heic_beyond_the_limit_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = heic(picture())
    monkeypatch.setattr(reasons, "MOST_PIXELS", 40 * 60 - 1)
    assert reason_of(content) == reasons.TOO_LARGE


def test_heic_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    content = heic(picture())
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    assert reason_of(content) == reasons.NO_HEIC


def test_other_colours() -> None:
    assert reason_of(saved(Image.fromarray(picture()).convert("LAB"), "TIFF")) == reasons.COLOURS


def test_more_than_8_bits() -> None:
    grey = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000)
    for content in (
        saved(grey, "PNG"),
        saved(grey, "TIFF"),
        saved(Image.fromarray(np.zeros((8, 8), dtype=np.float32)), "TIFF"),
        saved(Image.fromarray(np.zeros((8, 8), dtype=np.int32)), "TIFF"),
        deep_rgb_png(),
        png(4, 4, 16, 6, (b"\0" + bytes(32)) * 4),
        png(4, 4, 16, 4, (b"\0" + bytes(16)) * 4),
        tiff(16, 3),
    ):
        assert reason_of(content) == reasons.DEEP
    assert load_image(tiff(8, 3)).shape == (2, 2, 3)
    assert load_image(tiff(8, 1)).shape == (2, 2, 3)


def test_no_image(tmp_path: Path) -> None:
    assert reason_of(b"") == reasons.EMPTY
    assert reason_of(b"hello, this is a text\n" * 50) == reasons.NO_IMAGE
    assert reason_of(bytes(1000)) == reasons.NO_IMAGE
    assert reason_of(b"%PDF-1.7\n" + bytes(100)) == reasons.NO_IMAGE
    assert reason_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>") == reasons.NO_IMAGE
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    assert reason_of(eps) == reasons.NO_IMAGE, "Pillow would run Ghostscript"
    for kind in ("PPM", "TGA", "ICO", "PCX", "JPEG2000"):
        assert reason_of(saved(picture(), kind)) == reasons.NO_IMAGE
    (tmp_path / "empty.png").touch()
    assert reason_of(tmp_path / "empty.png") == reasons.EMPTY
    (tmp_path / "text.jpg").write_text("no image")
    assert reason_of(tmp_path / "text.jpg") == reasons.NO_IMAGE


def test_the_name_plays_no_part(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.txt", "a", "a.eps"):
        (tmp_path / name).write_bytes(WHOLE["PNG"])
        np.testing.assert_array_equal(load_image(tmp_path / name), picture())
        np.testing.assert_array_equal(load_image(str(tmp_path / name)), picture())


def test_what_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / ("x" * 5000)):
        assert reason_of(path) == reasons.UNREADABLE
    for missing in (tmp_path / "nowhere.png", "zero\0byte"):
        with pytest.raises(ImageError, match="there is no file at") as caught:
            load_image(missing)
        assert str(missing) in str(caught.value)
        assert caught.value.reason == reasons.MISSING


@pytest.mark.parametrize("kind", KINDS)
def test_no_error_tells_the_name_or_the_content(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "secret-name.png"
    path.write_bytes(WHOLE[kind][:120])
    with pytest.raises(ImageError) as caught:
        load_image(path)
    assert "secret" not in repr(caught.value)
    assert str(caught.value) == f"image: {caught.value.reason}"


@pytest.mark.parametrize("turned", range(2, 9))
def test_the_rotation_of_the_camera_is_applied(turned: int) -> None:
    upright = picture()
    undo = {
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[turned]
    exif = Image.Exif()
    exif[0x0112] = turned
    np.testing.assert_array_equal(load_image(saved(np.ascontiguousarray(undo), "PNG", exif=exif)), upright)
    assert load_image(saved(np.ascontiguousarray(undo), "JPEG", exif=exif)).shape == upright.shape


def test_alpha_lies_on_white() -> None:
    colours = np.zeros((1, 3, 4), dtype=np.uint8)
    colours[0, :, 0] = 200
    colours[0, :, 3] = 0, 255, 128
    wanted = [[255, 255, 255], [200, 0, 0], [227, 127, 127]]
    for kind in ("PNG", "TIFF"):
        assert np.abs(load_image(saved(colours, kind))[0].astype(int) - wanted).max() <= 1
    grey = Image.fromarray(np.array([[[90, 0], [90, 255]]], dtype=np.uint8), "LA")
    assert load_image(saved(grey, "PNG"))[0].tolist() == [[255] * 3, [90] * 3]


def test_palettes_and_their_transparent_colour() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    assert load_image(saved(image, "PNG"))[0].tolist() == [[10, 20, 30], [40, 50, 60]]
    assert load_image(saved(image, "GIF"))[0].tolist() == [[10, 20, 30], [40, 50, 60]]
    assert load_image(saved(image, "PNG", transparency=1))[0].tolist() == [[10, 20, 30], [255, 255, 255]]
    assert load_image(saved(image, "PNG", transparency=b"\0\xff"))[0].tolist() == [[255, 255, 255], [40, 50, 60]]
    assert load_image(saved(image, "GIF", transparency=0))[0].tolist() == [[255, 255, 255], [40, 50, 60]]
    keyed = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], dtype=np.uint8))
    assert load_image(saved(keyed, "PNG", transparency=(1, 2, 3)))[0].tolist() == [[255, 255, 255], [4, 5, 6]]


def test_grey_and_two_colours() -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for kind in ("PNG", "BMP", "TIFF"):
        np.testing.assert_array_equal(load_image(saved(levels, kind)), np.repeat(levels[..., None], 3, axis=2))
    assert load_image(saved(levels, "JPEG")).shape == (16, 16, 3)
    bits = Image.fromarray(levels > 100)
    for kind in ("PNG", "BMP", "TIFF"):
        np.testing.assert_array_equal(load_image(saved(bits, kind))[..., 1], np.where(levels > 100, 255, 0))


def test_what_pillow_warns_of_is_refused() -> None:
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 200)  # 200 entries are promised, none is there
    content = WHOLE["JPEG"][:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + WHOLE["JPEG"][2:]
    with pytest.warns(UserWarning, match="EXIF"):
        Image.open(io.BytesIO(content)).getexif()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever the program that asks does with warnings
        assert reason_of(content) == reasons.BROKEN


def test_filters_of_warnings_stay_as_they_were() -> None:
    before = list(warnings.filters)

    def work() -> None:
        for _ in range(20):
            load_image(WHOLE["PNG"])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warnings.filters == before


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6), st.data())
def test_no_bytes_raise_anything_else(kind: str, changes: list[tuple[int, int]], data: st.DataObject) -> None:
    content = bytearray(WHOLE[kind])
    for place, value in changes:
        content[place % len(content)] = value
    del content[data.draw(st.integers(len(content) // 2, 2 * len(content))) :]
    try:
        found = load_image(bytes(content))
    except ImageError as refused:
        assert refused.reason
        return
    assert found.dtype == np.uint8
    assert found.ndim == 3
    assert found.shape[2] == 3
