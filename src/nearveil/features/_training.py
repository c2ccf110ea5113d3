"""Train a head of global descriptors on a backbone, with one's own labelled images."""

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.features._descriptors import check_descriptors, classification_loss, descriptor_head, triplet_loss
from nearveil.features._extractor import Progress
from nearveil.features._images import Pixels, resize
from nearveil.features._torch import TorchExtractor, need_torch, scale_pixels
from nearveil.features._trained import TrainedExtractor

Maps = NDArray[np.float16]

_CLASSES, _EACH = 8, 4  # of a batch
_CLASSIFIER_RATE, _BACKBONE_RATE = 100.0, 0.1  # in learning rates of the head
_AT_ONCE = 256  # images whose maps are pooled together


def backbone_maps(images: Sequence[Pixels], backbone: TorchExtractor, *, progress: Progress | None = None) -> Maps:
    """Return the last maps of a backbone: what a head is trained on while the backbone stays as it is.

    Parameters
    ----------
    images : sequence of ndarray of shape (height, width, 3), uint8
    backbone : TorchExtractor
        Of a module that gives maps, as :class:`EfficientNetLite0` and :class:`MobileNetV2` do.
    progress : callable, optional
        Called with the number of images finished since it was called last.

    Returns
    -------
    ndarray of shape (n, c, h, w), float16
        For the two backbones named, 123 kB an image.
    """
    torch = need_torch()
    found: list[Maps] = []
    for start in range(0, len(images), backbone._batch):
        some = _scaled(images[start : start + backbone._batch], backbone)
        with torch.inference_mode():
            maps = backbone._module(some)
        if maps.ndim != 4:
            raise ValueError("backbone must give maps of shape (n, c, h, w): its last pooling must be taken off")
        halves = maps.half()
        if not halves.isfinite().all():
            raise ValueError("backbone gives NaN, or numbers beyond those of float16")
        found.append(halves.cpu().numpy())
        if progress is not None:
            progress(len(some))
    if not found:
        raise ValueError("images must hold at least one")
    return np.concatenate(found)


def train_head(
    images: Sequence[Pixels] | NDArray[np.floating[Any]],
    labels: ArrayLike,
    *,
    backbone: TorchExtractor,
    descriptors: str = "SG",
    dimension: int = 512,
    epochs: int = 20,
    freeze_backbone: bool = True,
    learning_rate: float = 1e-4,
    progress: Progress | None = None,
    random_state: int | None = None,
) -> TrainedExtractor:
    """Train a combination of global descriptors (CGD, Jun et al. 2019) on a backbone.

    The sum of two losses is made small by Adam: the batch-hard triplet loss of the whole rows (margin 0.1), and a
    classification loss of the first descriptor (temperature 0.5, label smoothing 0.1). A batch holds 4 images of
    each of 8 classes. The paper classifies what the first descriptor has pooled; here it is what the first branch has
    made of it, since under a frozen backbone SPoC and MAC have nothing that the loss could change.

    Nothing protects the images: what is trained tells of them.

    Parameters
    ----------
    images : sequence of ndarray of shape (height, width, 3), uint8; or ndarray of shape (n, c, h, w), floats
        Images; or their maps, as :func:`backbone_maps` gives them, if the backbone is frozen.
    labels : array-like of shape (n,)
        The class of each image. There must be two, and one of them must have two images.
    backbone : TorchExtractor
        Of a module that gives maps, as :class:`EfficientNetLite0` and :class:`MobileNetV2` do.
    descriptors : str, default="SG"
        Letters out of S (SPoC), M (MAC) and G (GeM with an exponent that is trained), each once.
    dimension : int, default=512
        Of the features; shared out among the descriptors.
    epochs : int, default=20
        How often as many images are shown as there are.
    freeze_backbone : bool, default=True
        If so, maps are computed once and kept in memory. If not, the backbone is trained, too, at a tenth of the
        learning rate; its batch norms keep their statistics.
    learning_rate : float, default=1e-4
        Of the head; the classifier, which is dropped in the end, learns a hundred times as fast.
    progress : callable, optional
        Called with 1 after each epoch.
    random_state : int, optional
        With the same number, the same machine with as many threads trains the same head.

    Returns
    -------
    TrainedExtractor

    Examples
    --------
    >>> import numpy as np, torch
    >>> backbone = TorchExtractor(torch.nn.Conv2d(3, 5, 3), side=8)
    >>> images = [np.full((8, 8, 3), grey, dtype=np.uint8) for grey in (0, 10, 200, 250)]
    >>> extractor = train_head(images, ["dark", "dark", "light", "light"], backbone=backbone, dimension=4, epochs=1)
    >>> extractor.extract(images).shape
    (4, 4)
    """
    check_descriptors(descriptors)
    codes = _codes(labels, len(images))
    _check_numbers(epochs, learning_rate)
    rng = np.random.default_rng(random_state)
    maps = _given_maps(images, backbone)
    if maps is None:
        maps = backbone_maps(cast("Sequence[Pixels]", images), backbone)
    elif not freeze_backbone:
        raise ValueError("images must be images, not maps, where the backbone is trained, too")
    head = _start(backbone, descriptors, dimension, maps, rng)
    body = None if freeze_backbone else copy.deepcopy(backbone._module).requires_grad_(True)

    def inputs(batch: NDArray[np.int64]) -> Any:
        if body is None:
            return need_torch().from_numpy(maps[batch]).to(_device(backbone)).float()
        return body(_scaled([images[place] for place in batch], backbone))

    step = _stepper(head, body, int(codes.max()) + 1, learning_rate)
    batches = balanced_batches(codes, rng)
    for _ in range(epochs):
        for batch in islice(batches, -(-len(codes) // (_CLASSES * _EACH))):
            step(inputs(batch), codes[batch])
        if progress is not None:
            progress(1)
    return TrainedExtractor(backbone, head, body)


def balanced_batches(codes: NDArray[np.int64], rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Yield batches without end: 4 rows of each of 8 classes, or of all classes if there are fewer.

    Classes take turns in random order, and so do the rows of a class: all are shown equally often.
    """
    turns = [_turns(np.flatnonzero(codes == code), rng) for code in range(int(codes.max()) + 1)]
    while True:
        order = rng.permutation(len(turns))
        # The last group is filled up with the first classes of this order: none is twice in a batch.
        width = min(_CLASSES, len(turns))
        for start in range(0, len(turns), width):
            some = np.roll(order, -start)[:width]
            yield np.array([next(turns[code]) for code in some for _ in range(_EACH)])


def _start(backbone: TorchExtractor, descriptors: str, dimension: int, maps: Maps, rng: np.random.Generator) -> Any:
    """Return a head that is not trained yet: it centres what the descriptors pool, and projects it at random."""
    device = _device(backbone)
    head = descriptor_head(backbone.dimension, descriptors, dimension).to(device)
    head.start(_means(head, maps, device), need_torch().Generator(device).manual_seed(int(rng.integers(2**62))))
    return head


def _stepper(head: Any, body: Any, classes: int, learning_rate: float) -> Callable[[Any, NDArray[np.int64]], None]:
    """Return what makes one step of training, given maps and the classes of a batch."""
    torch = need_torch()
    device = head.reductions[0].weight.device
    classifier = torch.nn.utils.skip_init(torch.nn.Linear, head.reductions[0].out_features, classes, device=device)
    for parameter in classifier.parameters():
        torch.nn.init.zeros_(parameter)
    # A classifier that lags behind bends the rows to its will: held-out classes suffer. So it runs ahead.
    groups = [
        {"params": list(head.parameters()), "lr": learning_rate},
        {"params": list(classifier.parameters()), "lr": _CLASSIFIER_RATE * learning_rate},
    ]
    if body is not None:
        groups.append({"params": list(body.parameters()), "lr": _BACKBONE_RATE * learning_rate})
    optimizer = torch.optim.Adam(groups)

    def step(maps: Any, codes: NDArray[np.int64]) -> None:
        targets = torch.from_numpy(codes).to(device)
        branches = head.branches(maps)
        rows = torch.nn.functional.normalize(torch.cat(branches, dim=1), dim=1)
        loss = triplet_loss(rows, targets) + classification_loss(classifier(branches[0]), targets)
        if not loss.isfinite():
            raise ValueError("learning_rate is too large: the loss is no longer a number")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _turns(rows: NDArray[np.int64], rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from rng.permutation(rows).tolist()


def _scaled(images: Sequence[Pixels], backbone: TorchExtractor) -> Any:
    some = np.stack([resize(image, backbone.side) for image in images])
    scaled = np.ascontiguousarray(scale_pixels(some, backbone._scale).transpose(0, 3, 1, 2))
    return need_torch().from_numpy(scaled).to(_device(backbone))


def _device(backbone: TorchExtractor) -> Any:
    first = next(backbone._module.parameters(), None)
    return "cpu" if first is None else first.device


def _means(head: Any, maps: Maps, device: Any) -> list[Any]:
    """Return the mean over all images of what each descriptor pools."""
    torch = need_torch()
    sums: list[Any] = [0] * len(head.descriptors)
    with torch.no_grad():
        for start in range(0, len(maps), _AT_ONCE):
            some = torch.from_numpy(maps[start : start + _AT_ONCE]).to(device).float()
            sums = [
                total + head.pooled(letter, some).sum(dim=0)
                for total, letter in zip(sums, head.descriptors, strict=True)
            ]
    return [total / len(maps) for total in sums]


def _codes(labels: ArrayLike, count: int) -> NDArray[np.int64]:
    names = np.asarray(labels)
    if names.shape != (count,):
        raise ValueError("labels must be one for each image")
    _, codes, sizes = np.unique(names, return_inverse=True, return_counts=True)
    if len(sizes) < 2 or sizes.max() < 2:
        raise ValueError("labels must be of at least two classes, one of them with at least two images")
    return codes.astype(np.int64)


def _check_numbers(epochs: int, learning_rate: float) -> None:
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ValueError("epochs must be a whole number of at least 1")
    if not 0 < learning_rate <= 1:
        raise ValueError("learning_rate must be above 0 and at most 1")


def _given_maps(images: object, backbone: TorchExtractor) -> Maps | None:
    """Return maps if these are maps, checked; None if they are images."""
    if not (isinstance(images, np.ndarray) and np.issubdtype(images.dtype, np.floating)):
        return None
    if images.ndim != 4 or images.shape[1] != backbone.dimension or not images.size:
        raise ValueError(f"images: maps must have the shape (n, {backbone.dimension}, h, w), as backbone_maps gives")
    with np.errstate(over="ignore"):  # it is told in words
        halves = images.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ValueError("images: maps must be finite numbers of float16")
    return halves
