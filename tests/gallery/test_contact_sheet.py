"""Contact sheets of unusual names and pictures."""

import dataclasses

import numpy as np

from nearveil.features import load_image
from nearveil.gallery.contact_sheet import ContactSheet


def test_a_sheet_of_strange_names_and_pictures() -> None:
    grey = np.full((9, 30, 3), 128, dtype=np.uint8)
    strange = ContactSheet(
        query=grey, named=0, n_sets=2, candidates=[b"", b"no image"] * 30, matches=[b""] * 20,
        captions=["$x_1^", "鳥\x1b[31m", "a\nb"] + ["long " * 20] * 17, epsilon=0.5,
    )  # fmt: skip
    assert load_image(strange.to_png()).shape == (600, 1560, 3)
    one = dataclasses.replace(strange, candidates=[b""], matches=[b""], captions=["one"])
    assert one.to_png().startswith(b"\x89PNG")
