"""Features of queries: images are decoded and extracted, vectors are checked."""

import os
from collections.abc import Sequence
from io import BytesIO
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearveil.client.errors import QuestionError
from nearveil.client.timing import needs_extraction
from nearveil.features import Extractor, ImageError, load_image
from nearveil.features.backbones import find_extractor
from nearveil.features.images import COLOURS
from nearveil.metrics import Metric
from nearveil.privacy.checks import OUT_OF_RANGE, as_rows, is_in_range

Image: TypeAlias = "str | os.PathLike[str] | bytes | NDArray[Any] | Any"
"""A path, the bytes of a file, a Pillow image, pixels (height, width, 3) in uint8; or a feature of any library."""
Images: TypeAlias = "Sequence[Image] | NDArray[Any]"
"""Several of them; the rows of a matrix are features."""


class FeatureMaker:
    """Make features with the user's extractor, or with that of the gallery, which is loaded once."""

    def __init__(self, extractor: Extractor | None) -> None:
        self._extractor = extractor
        self._gallery_extractors: dict[str, Extractor] = {}

    def rows(self, images: Images, fingerprint: str, dimension: int, metric: Metric = "cosine") -> list[NDArray[Any]]:
        """Return the features of images for a gallery, by its extractor; vectors are passed through."""
        arrays = decode_images(images)
        rows = self.extract(arrays, fingerprint)
        self.check(arrays, rows, fingerprint, dimension, metric)
        return rows

    def needs_gallery(self, images: Images) -> bool:
        """Return whether the extractor must come from the gallery."""
        return self._extractor is None and any(map(needs_extraction, images))

    def load(self, fingerprint: str) -> None:
        """Load the extractor of the gallery, unless the user has named one."""
        self._find_extractor(fingerprint)

    def extract(self, arrays: Sequence[NDArray[Any]], fingerprint: str | None = None) -> list[NDArray[Any]]:
        """Return features of decoded images and vectors, with the user's or the gallery's extractor."""
        pixels = [array for array in arrays if array.ndim == 3]
        extracted = iter(self._find_extractor(fingerprint).extract(pixels) if pixels else ())
        rows = [array if array.ndim == 1 else next(extracted) for array in arrays]
        for number, row in enumerate(rows):
            if not is_in_range(row):
                raise QuestionError(_name_argument(number), f"feature {OUT_OF_RANGE}")
        return rows

    def check(
        self,
        arrays: Sequence[NDArray[Any]],
        rows: Sequence[NDArray[Any]],
        fingerprint: str,
        dimension: int,
        metric: Metric,
    ) -> None:
        """Refuse features that are not comparable with those of a gallery."""
        extractor, has_pixels = self._extractor, any(array.ndim == 3 for array in arrays)
        if extractor is not None and extractor.fingerprint != fingerprint and has_pixels:
            words = f"the gallery has features of another extractor than {extractor.name}, which are not comparable: "
            raise QuestionError("extractor", f"{words}leave it out, or query another gallery")
        for number, row in enumerate(rows):
            if len(row) != dimension:
                words = f"a feature must have {dimension} numbers, like those of the gallery; it has {len(row)}"
                raise QuestionError(_name_argument(number), words)
            if metric != "euclidean" and not np.any(row):
                raise QuestionError(_name_argument(number), "its feature must not be all zeros: it has no direction")

    def _find_extractor(self, fingerprint: str | None) -> Extractor:
        if self._extractor is not None:
            return self._extractor
        assert fingerprint is not None
        if fingerprint not in self._gallery_extractors:
            try:
                self._gallery_extractors[fingerprint] = find_extractor(fingerprint)
            except ValueError as error:
                raise QuestionError("extractor", str(error)) from None
        return self._gallery_extractors[fingerprint]


def decode_images(images: Images) -> list[NDArray[Any]]:
    """Return features unchanged, and the pixels of all else."""
    arrays = []
    for number, image in enumerate(images):
        try:
            arrays.append(_decode_image(image))
        except ImageError as error:
            if number == 0:
                raise
            raise QuestionError(_name_argument(number), error.reason) from None
        except ValueError as error:
            raise QuestionError(_name_argument(number), str(error)) from None
    return arrays


def _name_argument(number: int) -> str:
    return "query" if number == 0 else f"images[{number}]"


def _decode_image(image: Image) -> NDArray[Any]:
    if isinstance(image, (str, os.PathLike)) and os.fspath(image).lower().endswith(".npy"):
        from nearveil.features.vectors import read_vector

        try:
            image = read_vector(image)
        except ValueError as error:
            raise ValueError(str(error).removeprefix("vectors: ")) from None
    if isinstance(image, (str, os.PathLike, bytes)):
        return load_image(image)
    if not isinstance(image, np.ndarray):
        if needs_extraction(image):
            return _read_pillow_image(image)
        try:
            image = as_rows(image)
        except ValueError:
            words = "it must be a path, bytes, a Pillow image, an array of pixels, or one row of numbers"
            raise ValueError(words) from None
    if image.ndim == 3 and image.dtype == np.uint8:
        return image
    if image.dtype.kind not in "fiu" or image.shape not in ((image.size,), (1, image.size)):
        raise ValueError("an array must be one row of numbers, or pixels (height, width, 3) in uint8")
    row = image.ravel()
    if row.dtype.kind == "f":
        return row.astype(np.float32) if row.dtype == np.float16 else row
    return row.astype(np.float64)


def _read_pillow_image(image: Any) -> NDArray[Any]:
    """Return the pixels of a Pillow image as if it were read from a file: on a white background."""
    from PIL import ImageOps

    out = BytesIO()
    try:
        upright = ImageOps.exif_transpose(image)
        (upright.convert("RGB") if upright.mode == "CMYK" else upright).save(out, "PNG", compress_level=1)
    except (OSError, ValueError):
        raise ImageError(COLOURS) from None
    return load_image(out.getvalue())
