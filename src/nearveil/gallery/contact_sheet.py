"""The contact sheet of one private search: the server's view beside the client's."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from nearveil.features.images import ImageError, Pixels, load_image
from nearveil.lazy import require_extra
from nearveil.mechanisms.covers.channels import RandomizedResponse
from nearveil.storage import open_private

with require_extra("images"):
    from PIL import Image, ImageOps

_SAMPLE = (4, 6)  # rows and columns of candidates
_COLUMNS = 4  # of matches
_MOST = 16  # matches
_LONGEST = 16  # letters of a line below a picture
_GREY = 237  # of the server's side
_SIDE = 128  # pixels of a thumbnail
_TITLE: dict[str, Any] = {"fontsize": 15, "fontweight": "bold", "va": "top"}
_TEXT: dict[str, Any] = {"fontsize": 9.5, "va": "top", "linespacing": 1.4}
_CAPTION: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 7, "parse_math": False}


@dataclass(frozen=True)
class ContactSheet:
    """A search, to be drawn as one figure."""

    query: Pixels = field(repr=False)  # private: drawn on the client's side only
    named: int  # the set that the message names, from 0
    n_sets: int
    candidates: Sequence[bytes] = field(repr=False)  # thumbnails of all images in the answer
    matches: Sequence[bytes] = field(repr=False)  # thumbnails of the chosen images, best first
    captions: Sequence[str]  # of the matches
    epsilon: float

    def to_png(self) -> bytes:
        """Draw the sheet as a PNG."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 5), dpi=120)
        left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15), squeeze=False)[0]
        left.set_facecolor((_GREY / 255,) * 3)
        _draw_server(left, self)
        _draw_client(right, self)
        out = BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")  # letters that the font lacks are boxes
            figure.savefig(out, format="png")
        return out.getvalue()

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Draw the sheet to a file readable by its owner only; an existing file is replaced only with `force`."""
        content = self.to_png()
        if force:
            Path(path).unlink(missing_ok=True)  # the new file gets its own rights, and no link is followed
        with open(path, "xb", opener=open_private) as out:
            out.write(content)


def _draw_server(side: Any, sheet: ContactSheet) -> None:
    rows, columns = _SAMPLE
    count = len(sheet.candidates)
    shown = np.unique(np.linspace(0, count - 1, min(count, rows * columns)).astype(int)).tolist()
    part = f"{len(shown)} of them" if len(shown) < count else "here they are"
    side.text(0.04, 0.955, "What the server saw", **_TITLE)
    text = (
        f"One message and no picture: “set {sheet.named + 1} of {sheet.n_sets}”, the right one with probability "
        f"{RandomizedResponse(sheet.epsilon, sheet.n_sets).hit:.2f}.\n"
        f"The {count:,} images of that set were returned, as for any client that names it; {part}:"
    )
    side.text(0.04, 0.875, text, **_TEXT)
    grid = side.add_gridspec(rows, columns, left=0.04, right=0.96, top=0.77, bottom=0.04, wspace=0.08, hspace=0.08)
    for number, position in enumerate(shown):
        _draw_thumbnail(side.add_subplot(grid[number // columns, number % columns]), sheet.candidates[position], _GREY)


def _draw_client(side: Any, sheet: ContactSheet) -> None:
    count = min(len(sheet.matches), _MOST)
    rows = -(-count // _COLUMNS)
    best = f"the {count} best" if count == len(sheet.matches) else f"{count} of the {len(sheet.matches):,} best"
    side.text(0.04, 0.955, "What you got", **_TITLE)
    text = (
        f"Your picture, which stayed with you, and {best} of the {len(sheet.candidates):,}, chosen here.\n"
        f"Epsilon {sheet.epsilon:g}; the number below a picture is its similarity."
    )
    side.text(0.04, 0.875, text, **_TEXT)
    grid = side.add_gridspec(
        rows, _COLUMNS + 2, left=0.04, right=0.98, top=0.76, bottom=0.1, wspace=0.12, hspace=0.3 if rows < 3 else 0.6
    )
    panel = side.add_subplot(grid[:, :2])
    panel.imshow(sheet.query, interpolation="nearest" if max(sheet.query.shape[:2]) < 24 else "antialiased")
    panel.set(xticks=[], yticks=[])
    for line in panel.spines.values():
        line.set(color="tab:blue", linewidth=3)
    panel.set_xlabel("your picture (private)", fontsize=10)
    for number, (image, caption) in enumerate(zip(sheet.matches[:count], sheet.captions, strict=False)):
        panel = side.add_subplot(grid[number // _COLUMNS, 2 + number % _COLUMNS])
        _draw_thumbnail(panel, image, 255)
        panel.text(0.5, -0.04, _shorten(caption), transform=panel.transAxes, **_CAPTION)


def _shorten(caption: str) -> str:
    """Return a caption with lines that fit below a picture."""
    lines = ["".join(letter if letter.isprintable() else "?" for letter in line) for line in caption.split("\n")]
    return "\n".join(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…" for line in lines)


def _draw_thumbnail(panel: Any, thumbnail: bytes, grey: int) -> None:
    """Draw a thumbnail centred in a square, so that captions are aligned; grey if it cannot be decoded."""
    panel.set_axis_off()
    try:
        image = Image.fromarray(load_image(thumbnail))
    except ImageError:
        image = Image.new("RGB", (_SIDE, _SIDE), (200, 200, 200))
    panel.imshow(ImageOps.pad(image, (_SIDE, _SIDE), color=(grey, grey, grey)))
