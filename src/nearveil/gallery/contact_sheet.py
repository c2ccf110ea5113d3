"""The contact sheet of one private search: what the server saw, and what came of it at home."""

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from nearveil.features.images import ImageError, Pixels, load_image

_SAMPLE = (4, 6)  # rows and columns of candidates
_WIDE = 4  # matches in a row
_MOST = 16  # matches
_LONGEST = 16  # letters of a line below a picture
_GREY = 237  # of the server's side
_DPI = 120


@dataclass(frozen=True)
class ContactSheet:
    """One search, as it is drawn."""

    query: Pixels = field(repr=False)  # private: it is drawn on the client's side alone
    named: int  # the set that the message names, from 0
    n_sets: int
    candidates: Sequence[bytes] = field(repr=False)  # the thumbnails of all that the answer held
    found: Sequence[bytes] = field(repr=False)  # the thumbnails of those that were chosen, best first
    captions: Sequence[str]  # one for each of those
    epsilon: float

    def to_png(self) -> bytes:
        """Draw the sheet.

        Returns: A PNG.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 5), dpi=_DPI)
        FigureCanvasAgg(figure)
        left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15), squeeze=False)[0]
        left.set_facecolor((_GREY / 255,) * 3)
        _server(left, self)
        _client(right, self)
        out = BytesIO()
        with warnings.catch_warnings():
            # A name in letters that the font lacks shows boxes; the picture is none the worse.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            figure.savefig(out, format="png")
        return out.getvalue()

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Draw the sheet, and write it readable by its owner alone: it shows the private image.

        An existing file is replaced only with `force`.
        """
        content, place = self.to_png(), Path(path)
        if force:
            place.unlink(missing_ok=True)  # so that the new one has its own rights, and a link is not written through
        with os.fdopen(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
            out.write(content)


def right_set(epsilon: float, n_sets: int) -> float:
    """Return how often a message names the set that suits its image: e^epsilon to one for each of the others.

    Examples
    --------
    >>> round(right_set(4.0, 12), 3)
    0.832
    """
    return 1 / (1 + (n_sets - 1) * math.exp(-epsilon))


def _server(side: Any, sheet: ContactSheet) -> None:
    rows, columns = _SAMPLE
    held = len(sheet.candidates)
    shown = np.unique(np.linspace(0, held - 1, min(held, rows * columns)).astype(int))
    part = f"{len(shown)} of them" if len(shown) < held else "here they are"
    _heading(
        side,
        "What the server saw",
        f"One message and no picture: “set {sheet.named + 1} of {sheet.n_sets}”, the right one with probability "
        f"{right_set(sheet.epsilon, sheet.n_sets):.2f}.\n"
        f"The {held:,} images of that set went back, for whoever names it; {part}:",
    )
    side.subplots_adjust(left=0.04, right=0.96, top=0.77, bottom=0.04, wspace=0.08, hspace=0.08)
    panels = side.subplots(rows, columns, squeeze=False).ravel()
    for panel in panels:
        panel.set_axis_off()
    for panel, number in zip(panels, shown, strict=False):
        _picture(panel, _square(_decoded(sheet.candidates[number]), _GREY))


def _client(side: Any, sheet: ContactSheet) -> None:
    count = min(len(sheet.found), _MOST)
    rows = -(-count // _WIDE)
    best = f"the {count} best" if count == len(sheet.found) else f"{count} of the {len(sheet.found):,} best"
    _heading(
        side,
        "What you got",
        f"Your picture, which stayed with you, and {best} of the {len(sheet.candidates):,}, chosen here.\n"
        f"Epsilon {sheet.epsilon:g}; the number below a picture is its similarity.",
    )
    grid = side.add_gridspec(
        rows, _WIDE + 2, left=0.04, right=0.98, top=0.76, bottom=0.1, wspace=0.12, hspace=0.3 if rows < 3 else 0.6
    )
    panel = side.add_subplot(grid[:, :2])
    _picture(panel, sheet.query)
    panel.set_axis_on()
    panel.set(xticks=[], yticks=[])
    for line in panel.spines.values():
        line.set(color="tab:blue", linewidth=3)
    panel.set_xlabel("your picture (private)", fontsize=10)
    for number, (image, caption) in enumerate(zip(sheet.found[:count], sheet.captions, strict=False)):
        panel = side.add_subplot(grid[number // _WIDE, 2 + number % _WIDE])
        panel.set_axis_off()
        _picture(panel, _square(_decoded(image), 255))
        panel.text(
            0.5,
            -0.04,
            _short(caption),
            transform=panel.transAxes,
            ha="center",
            va="top",
            fontsize=7,
            parse_math=False,
        )


def _heading(side: Any, title: str, words: str) -> None:
    side.text(0.04, 0.955, title, fontsize=15, fontweight="bold", va="top")
    side.text(0.04, 0.875, words, fontsize=9.5, va="top", linespacing=1.4)


def _short(caption: str) -> str:
    """Return a caption whose lines fit below a picture.

    Examples
    --------
    >>> _short("a quite long name of a photograph.jpg")
    'a quite long na…'
    """
    lines = ["".join(letter if letter.isprintable() else "?" for letter in line) for line in caption.split("\n")]
    return "\n".join(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…" for line in lines)


def _decoded(image: bytes) -> Pixels:
    """Return a thumbnail's pixels; grey where there is none, or none that can be read."""
    try:
        return load_image(image)
    except ImageError:
        return np.full((64, 64, 3), 200, dtype=np.uint8)


def _picture(panel: Any, image: Pixels) -> None:
    panel.imshow(image, interpolation="nearest" if max(image.shape[:2]) < 24 else "antialiased")


def _square(image: Pixels, grey: int) -> Pixels:
    """Return an image in the middle of a square, so that all captions stand in line."""
    height, width = image.shape[:2]
    side = max(height, width)
    whole = np.full((side, side, 3), grey, dtype=np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    whole[top : top + height, left : left + width] = image
    return whole
