"""Global descriptors of a backbone's maps, a head that combines them, and the losses that train it.

After Jun, Ko, Kim, Kim and Kim (2019), "Combination of Multiple Global Descriptors for Image Retrieval" (CGD).
"""

import functools
from typing import Any

from nearveil.features._torch import need_torch

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
