"""Global descriptors of a backbone's maps, a head that combines them, and the losses that train it.

After Jun, Ko, Kim, Kim and Kim (2019), "Combination of Multiple Global Descriptors for Image Retrieval" (CGD).
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import ArrayLike, NDArray

from nearveil.features._extractor import Extractor, Floats, unit_rows
from nearveil.features._torch import need_torch

_ORIENTATIONS = 9
_CELLS = 4  # along each side
_BLOCK = 2  # cells along each side of a block
_LEAST_SIDE = 8  # below, a cell is a single pixel
_CHUNK = 512  # images between two steps of progress; large beside the cost of handing a chunk to a process


def hog(
    images: ArrayLike, *, n_jobs: int | None = None, progress: Callable[[int], object] | None = None
) -> NDArray[np.float32]:
    """Return the histograms of oriented gradients of images, by scikit-image (the extra `images`).

    Nine orientations, 4 x 4 cells an image (a cell's side is that of the image divided by four, rounded down;
    what is left over at the right and at the bottom has no cell), blocks of 2 x 2 cells, normalised by L2-Hys.
    In colour, the channel with the strongest gradient counts at each pixel. A row depends on its own image
    alone, bit for bit: neither on the other images nor on `n_jobs`.

    Parameters
    ----------
    images : array of shape (n, height, width) or (n, height, width, 3)
        uint8, or floats from 0 to 1; both sides at least 8. Floats are multiplied by 255, so that an image has
        the same histograms in either form.
    n_jobs : int, default=None
        Number of processes, as in joblib: None is one, -1 is one for each core.
    progress : callable, default=None
        Called with the number of images finished since it was called last.

    Returns
    -------
    array of shape (n, 324), float32
        Between 0 and 1: nine blocks, four cells each, nine orientations each. Zeros for an image of one colour.

    Raises
    ------
    ValueError
        If the images are not as described.
    ModuleNotFoundError
        If scikit-image is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> edge = np.zeros((1, 28, 28), dtype=np.uint8)
    >>> edge[:, :, 14:] = 255  # dark at the left, bright at the right: all gradients point along the rows
    >>> row = hog(edge)[0].reshape(3, 3, 2, 2, 9)
    >>> row.shape, bool(row[..., 0].any()), bool(row[..., 1:].any())
    ((3, 3, 2, 2, 9), True, False)
    """
    checked = _check(images)
    _require()
    parts = (checked[start : start + _CHUNK] for start in range(0, len(checked), _CHUNK))
    rows = np.empty((len(checked), (_CELLS - _BLOCK + 1) ** 2 * _BLOCK**2 * _ORIENTATIONS), dtype=np.float32)
    done = 0
    for part in Parallel(n_jobs=n_jobs, return_as="generator")(delayed(_histograms)(part) for part in parts):
        rows[done : done + len(part)] = part
        done += len(part)
        if progress is not None:
            progress(len(part))
    return rows


def _check(images: ArrayLike) -> NDArray[np.uint8] | NDArray[np.floating]:
    try:
        array = np.asarray(images)
    except ValueError:
        raise ValueError("images must all have one size: resize them first") from None
    if not (array.ndim == 3 or (array.ndim == 4 and array.shape[3] == 3)):
        raise ValueError("images must have shape (n, height, width) or (n, height, width, 3)")
    if not len(array):
        raise ValueError("images must hold at least one image")
    if min(array.shape[1:3]) < _LEAST_SIDE:
        raise ValueError(f"images must have at least {_LEAST_SIDE} pixels a side, not {array.shape[1:3]}")
    if array.dtype == np.uint8:
        return array
    # Written so that NaN fails, too.
    if not (np.issubdtype(array.dtype, np.floating) and array.min() >= 0 and array.max() <= 1):
        raise ValueError(
            "images must be uint8, or floats from 0 to 1 without NaN: divide by the largest value possible"
        )
    return array


def _require() -> None:
    try:
        import skimage.feature  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("images: HOG needs scikit-image: pip install nearveil[images]") from missing


def _histograms(images: NDArray[np.uint8] | NDArray[np.floating]) -> Floats:
    from skimage.feature import hog as of_one

    # In the images' own precision k / 255 * 255 is exactly k, so that both forms of an image agree.
    grey_levels = images if images.dtype == np.uint8 else images * 255
    size = images.shape[1] // _CELLS, images.shape[2] // _CELLS
    blocks = _CELLS - _BLOCK + 1  # of a side such as 15 scikit-image makes a fifth cell
    rows = [
        of_one(
            one.astype(np.float64, order="C"),
            orientations=_ORIENTATIONS,
            pixels_per_cell=size,
            cells_per_block=(_BLOCK, _BLOCK),
            feature_vector=False,
            channel_axis=-1 if one.ndim == 3 else None,
        )[:blocks, :blocks].ravel()
        for one in grey_levels
    ]
    return np.asarray(rows, dtype=np.float32)


_SIDE = 128
_LEVELS = 4  # of a channel in the histogram: 64 colours
_PLACES = 4  # along each side of the layout
_EDGES = 324


class HogColor(Extractor):
    """Histograms of oriented gradients beside colours: needs scikit-image and Pillow, no network and no weights.

    Three parts of equal weight: the edges (:func:`hog` at 128 x 128 pixels, 324 numbers); how often each of 64 colours
    occurs (square roots of the shares); and the mean colour at 4 x 4 places, less the middle grey (48 numbers).
    A row depends on its image alone, bit for bit. Much weaker than a network, but it learnt from nobody's images.

    Examples
    --------
    >>> import numpy as np
    >>> red, blue = np.zeros((2, 40, 40, 3), dtype=np.uint8)
    >>> red[..., 0], blue[..., 2] = 255, 255
    >>> rows = HogColor().extract([red, red[:20], blue])
    >>> rows.shape, np.round(rows @ rows[0], 3)
    ((3, 436), array([ 1.   ,  1.   , -0.167], dtype=float32))
    """

    def __init__(self) -> None:
        super().__init__(
            name="HOG and colour",
            identity={"parts": ["hog 9 4 2", f"colours {_LEVELS}", f"layout {_PLACES}"]},
            dimension=_EDGES + _LEVELS**3 + 3 * _PLACES**2,
            side=_SIDE,
            batch=64,
            row_exact=True,
        )

    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        parts = (hog(images), _colours(images), _layout(images))
        # A part may be zero (no edges, middle grey everywhere); the histogram never is.
        return np.hstack([unit_rows(part)[0] for part in parts])


def _colours(images: NDArray[np.uint8]) -> Floats:
    levels = (images // (256 // _LEVELS)).astype(np.intp)
    bins = (levels[..., 0] * _LEVELS + levels[..., 1]) * _LEVELS + levels[..., 2]
    counts = [np.bincount(one.ravel(), minlength=_LEVELS**3) for one in bins]
    return np.asarray(np.sqrt(np.asarray(counts) / bins[0].size), dtype=np.float32)


def _layout(images: NDArray[np.uint8]) -> Floats:
    block = _SIDE // _PLACES
    places = images.reshape(len(images), _PLACES, block, _PLACES, block, 3).mean(axis=(2, 4), dtype=np.float64)
    return np.asarray(places.reshape(len(images), -1) / 255 - 0.5, dtype=np.float32)


LETTERS = "SMG"
MARGIN, TEMPERATURE, SMOOTHING = 0.1, 0.5, 0.1
_LEAST = 1e-6  # GeM takes what is below as this
_FIRST_P = 3.0  # where the exponent of GeM starts


def check_descriptors(descriptors: str) -> str:
    """Return the letters of a combination if they are one.

    Examples
    --------
    >>> check_descriptors("SG")
    'SG'
    """
    known = isinstance(descriptors, str) and set(descriptors) <= set(LETTERS)
    if not known or not descriptors or len(set(descriptors)) < len(descriptors):
        raise ValueError("descriptors must be some of the letters S (SPoC), M (MAC) and G (GeM), each once, as SG")
    return descriptors


def branch_dimensions(dimension: int, branches: int) -> list[int]:
    """Share a dimension out among branches, as evenly as can be.

    Examples
    --------
    >>> branch_dimensions(512, 3)
    [171, 171, 170]
    """
    if isinstance(dimension, bool) or not isinstance(dimension, int) or not branches <= dimension <= 65_536:
        raise ValueError("dimension must be a whole number, at least one for each descriptor and at most 65,536")
    return [dimension // branches + (number < dimension % branches) for number in range(branches)]


def spoc(maps: Any) -> Any:
    """Return the mean over the places of maps of shape (n, c, h, w): shape (n, c)."""
    return maps.mean(dim=(2, 3))


def mac(maps: Any) -> Any:
    """Return the largest value over the places of maps of shape (n, c, h, w): shape (n, c)."""
    return maps.amax(dim=(2, 3))


def gem(maps: Any, p: Any) -> Any:
    """Return the generalised mean over the places of maps, ``(mean of x^p)^(1/p)``.

    SPoC is p = 1, MAC the limit of large p. Values below 1e-6 count as 1e-6, as powers need positive numbers.

    Examples
    --------
    >>> import torch
    >>> maps = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> [round(float(gem(maps, p)), 3) for p in (1, 3, 500)]
    [2.5, 2.924, 3.989]
    """
    positive = maps.clamp(min=_LEAST)
    # The mean of x / s, times s, is that of x for every s: powers of at most 1 cannot overflow.
    largest = positive.detach().amax(dim=(2, 3), keepdim=True)
    return (positive / largest).pow(p).mean(dim=(2, 3)).pow(1 / p) * largest[:, :, 0, 0]


def triplet_loss(rows: Any, labels: Any, margin: float = MARGIN) -> Any:
    """Return the batch-hard triplet loss.

    The mean, over all rows, of ``max(0, margin + a - b)``: a is the distance to the farthest row of the same label
    (itself, at 0, if it is the only one), b that to the nearest row of another label.

    `labels`: Of at least two kinds.
    """
    torch = need_torch()
    # The faster way by products loses the digits of small distances, which are those that matter.
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    same = labels[:, None] == labels[None, :]
    farthest = distances.masked_fill(~same, -torch.inf).amax(dim=1)
    nearest = distances.masked_fill(same, torch.inf).amin(dim=1)
    return (margin + farthest - nearest).clamp(min=0).mean()


def classification_loss(scores: Any, labels: Any) -> Any:
    """Return the cross-entropy of softmax(scores / 0.5) and labels smoothed by 0.1."""
    return need_torch().nn.functional.cross_entropy(scores / TEMPERATURE, labels, label_smoothing=SMOOTHING)


def descriptor_head(channels: int, descriptors: str, dimension: int) -> Any:
    """Return a head: maps of shape (n, channels, h, w) to rows of shape (n, dimension) and norm one.

    Each descriptor has a branch: it pools the maps, a linear layer reduces them to a share of the dimension, and
    they are brought to norm one. The branches stand side by side, and the whole is brought to norm one.

    `descriptors`: Letters out of S (SPoC), M (MAC) and G (GeM with an exponent that is trained), each once.
    Returns: Its layers are zero: :meth:`start` sets them. `branches(maps)` gives the branches one by one.
    """
    return _head_class()(channels, check_descriptors(descriptors), dimension)


@functools.cache
def _head_class() -> Any:
    """Return the class of heads; made here, so that the room loads without torch."""
    torch = need_torch()
    from torch import nn

    class DescriptorHead(nn.Module):
        def __init__(self, channels: int, descriptors: str, dimension: int) -> None:
            super().__init__()
            self.descriptors, self.dimension = descriptors, dimension
            shares = branch_dimensions(dimension, len(descriptors))
            # Not drawn at random and then set: the random numbers of torch belong to the user.
            layers = [torch.nn.utils.skip_init(nn.Linear, channels, share) for share in shares]
            self.reductions: Any = nn.ModuleList(layers)
            for parameter in self.parameters():
                nn.init.zeros_(parameter)
            if "G" in descriptors:  # by its logarithm, so that no step of training makes it negative
                self.log_p = nn.Parameter(torch.tensor(_FIRST_P).log())

        def pooled(self, letter: str, maps: Any) -> Any:
            return gem(maps, self.log_p.exp()) if letter == "G" else {"S": spoc, "M": mac}[letter](maps)

        def branches(self, maps: Any) -> list[Any]:
            pairs = zip(self.reductions, self.descriptors, strict=True)
            reduced = [reduce(self.pooled(letter, maps)) for reduce, letter in pairs]
            return [nn.functional.normalize(rows, dim=1) for rows in reduced]

        def forward(self, maps: Any) -> Any:
            return nn.functional.normalize(torch.cat(self.branches(maps), dim=1), dim=1)

        def start(self, means: list[Any], generator: Any) -> None:
            """Set random orthogonal directions, and take off the mean of what each descriptor gives."""
            with torch.no_grad():
                for layer, mean in zip(self.reductions, means, strict=True):
                    nn.init.orthogonal_(layer.weight, generator=generator)
                    layer.bias.copy_(-(layer.weight @ mean))

    return DescriptorHead
