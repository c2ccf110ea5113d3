"""Photographs that are free to ship: details of those that scikit-image carries.

All are in the public domain, or under CC0, which is as free: see the documentation of ``skimage.data``.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: Name in ``skimage.data``: source and licence.
PHOTOGRAPHS = {
    "astronaut": "NASA, public domain",
    "brick": "CC0Textures, CC0",
    "camera": "Lav Varshney, CC0",
    "chelsea": "Stéfan van der Walt, CC0",
    "coffee": "Rachel Michetti, CC0",
    "grass": "Linolafett, CC0",
    "gravel": "CC0Textures, CC0",
    "hubble_deep_field": "NASA, public domain",
    "retina": "Mikael Häggström, CC0",
    "rocket": "SpaceX, public domain",
}
SIDE = 192  # pixels
_SHARE = (0.4, 0.65)  # of the shorter side of a photograph


def cut_details(name: str, count: int) -> Iterator[NDArray[np.uint8]]:
    """Cut squares from a photograph, of random places and sizes; the same each time."""
    import skimage
    from PIL import Image

    picture = Image.fromarray(getattr(skimage.data, name)()).convert("RGB")
    rng = np.random.default_rng(sorted(PHOTOGRAPHS).index(name))
    for _ in range(count):
        side = int(rng.uniform(*_SHARE) * min(picture.size))
        left, top = (int(rng.integers(0, length - side + 1)) for length in picture.size)
        detail = picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS, (left, top, left + side, top + side))
        yield np.asarray(detail)


def write_details(folder: Path, private: Path, count: int) -> None:
    """Write `count` details of each photograph below `folder`, and one more of each, a private query, to `private`."""
    from PIL import Image

    private.mkdir(parents=True)
    for name in PHOTOGRAPHS:
        (folder / name).mkdir(parents=True)
        *details, query = cut_details(name, count + 1)
        for number, detail in enumerate(details):
            Image.fromarray(detail).save(folder / name / f"{number + 1:02}.png")
        Image.fromarray(query).save(private / f"{name}.png")
