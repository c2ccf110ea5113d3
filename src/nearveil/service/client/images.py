"""From what a user calls an image to its feature. All of it stays in memory."""

import os
from collections.abc import Sequence
from io import BytesIO
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearveil.features import Extractor, ImageError, load_image
from nearveil.features.backbones import find_extractor
from nearveil.features.images import COLOURS, Pixels
from nearveil.protocol.wire import OUT_OF_RANGE, is_in_range
from nearveil.service.client.errors import QuestionError
from nearveil.service.schema import GalleryInfo

Image: TypeAlias = "str | os.PathLike[str] | bytes | NDArray[Any] | Any"
"""A path, the bytes of a file, an image of Pillow, pixels (height, width, 3) in uint8; or a feature, shape (d,)."""
Images: TypeAlias = "Sequence[Image] | NDArray[Any]"
"""Several of them; the rows of a matrix are features."""


class FeatureMaker:
    """Makes features with the extractor of a gallery, and keeps that extractor.

    `extractor`: Found by the gallery's fingerprint where it is not given.
    """

    def __init__(self, extractor: Extractor | None) -> None:
        self._given = extractor
        self._found: dict[str, Extractor] = {}

    def rows(self, images: Images, info: GalleryInfo) -> list[NDArray[Any]]:
        """Return the features of images for a gallery; features are passed through.

        `images`: The private one, then dummies: errors name the one that they are about.
        """
        given = decode_images(images)
        found = self.extract(given, info)
        self.check(given, found, info)
        return found

    def needs_gallery(self, given: Sequence[NDArray[Any]]) -> bool:
        """Return whether only the gallery says which extractor makes features of what was given."""
        return self._given is None and any(image.ndim == 3 for image in given)

    def extract(self, given: Sequence[NDArray[Any]], info: GalleryInfo | None = None) -> list[NDArray[Any]]:
        """Return features of pixels, by the extractor that was given or by that of the gallery."""
        pixels = [image for image in given if image.ndim == 3]
        made = iter(self._extractor(info).extract(pixels) if pixels else ())
        rows = [image if image.ndim == 1 else next(made) for image in given]
        for number, row in enumerate(rows):
            if not is_in_range(row):
                raise QuestionError(_argument(number), f"its feature {OUT_OF_RANGE}")
        return rows

    def check(self, given: Sequence[NDArray[Any]], rows: Sequence[NDArray[Any]], info: GalleryInfo) -> None:
        """Refuse features that a gallery cannot compare with its own."""
        own = self._given
        if own is not None and own.fingerprint != info.fingerprint and any(image.ndim == 3 for image in given):
            raise QuestionError(
                "extractor",
                f"the gallery has features of another extractor than {own.name}, and they do not compare: "
                "leave it out, or ask another gallery",
            )
        for number, row in enumerate(rows):
            if len(row) != info.dimension:
                words = f"a feature must have {info.dimension} numbers, as those of the gallery"
                raise QuestionError(_argument(number), words)

    def _extractor(self, info: GalleryInfo | None) -> Extractor:
        if self._given is not None:
            return self._given
        assert info is not None
        if info.fingerprint not in self._found:
            try:
                self._found[info.fingerprint] = find_extractor(info.fingerprint)
            except ValueError as error:
                raise QuestionError("extractor", str(error)) from None
        return self._found[info.fingerprint]


def decode_images(images: Images) -> list[NDArray[Any]]:
    """Return features as they are, and the pixels of everything else."""
    return [_decode(image, _argument(number)) for number, image in enumerate(images)]


def _argument(number: int) -> str:
    return "image" if number == 0 else f"dummies[{number - 1}]"


def _decode(image: Image, name: str) -> NDArray[Any]:
    """Return a feature as it is, and the pixels of everything else."""
    try:
        return _read_image(image, name)
    except ImageError as error:
        if name == "image":
            raise
        raise QuestionError(name, error.reason) from None


def _read_image(image: Image, name: str) -> NDArray[Any]:
    if isinstance(image, np.ndarray):
        if image.ndim == 1 and image.dtype.kind == "f":
            if not is_in_range(image):
                raise QuestionError(name, f"feature {OUT_OF_RANGE}")
            return image
        if image.ndim == 3 and image.dtype == np.uint8:
            return image
        raise QuestionError(name, "an array must be a row of floats, or pixels (height, width, 3) in uint8")
    if isinstance(image, (str, os.PathLike, bytes)):
        return load_image(image)
    if callable(getattr(image, "save", None)) and hasattr(image, "getexif"):
        return _pillow_pixels(image)
    raise QuestionError(name, "it must be a path, bytes, an image of Pillow, an array of pixels, or a feature")


def _pillow_pixels(image: Any) -> Pixels:
    """Return the pixels of Pillow's image, by the rules for files: what is transparent lies on white."""
    from PIL import ImageOps

    out = BytesIO()
    try:
        turned = ImageOps.exif_transpose(image)
        (turned.convert("RGB") if turned.mode == "CMYK" else turned).save(out, "PNG", compress_level=1)
    except (OSError, ValueError):
        raise ImageError(COLOURS) from None
    return load_image(out.getvalue())
