"""Small pictures of a gallery's images: what an answer holds for every candidate."""

from io import BytesIO

from nearveil.features._images import Pixels, _pillow

SIDE = 64
_QUALITY = 80


def thumbnail(image: Pixels, side: int = SIDE) -> bytes:
    """Return an image as WebP, its longer side at most `side` pixels; small ones are not enlarged.

    Examples
    --------
    >>> import numpy as np
    >>> from nearveil.features import load_image
    >>> load_image(thumbnail(np.zeros((300, 600, 3), dtype=np.uint8))).shape
    (32, 64, 3)
    """
    pillow = _pillow()
    small = pillow.fromarray(image)
    small.thumbnail((side, side), pillow.Resampling.LANCZOS)
    out = BytesIO()
    small.save(out, "WEBP", quality=_QUALITY)
    return out.getvalue()
