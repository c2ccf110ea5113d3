"""Train a head of global descriptors on a backbone, and keep it in a file.

After Jun, Ko, Kim, Kim and Kim (2019), "Combination of Multiple Global Descriptors for Image Retrieval" (CGD).
"""

import copy
import functools
import io
import json
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.errors import NearveilError
from nearveil.features.backbones import EfficientNetLite0, MobileNetV2
from nearveil.features.extractor import FeatureError, Floats, Progress, unit_rows
from nearveil.features.images import Pixels, resize
from nearveil.features.networks import TorchExtractor, need_torch, scale_pixels
from nearveil.privacy.checks import is_integer

Maps = NDArray[np.float16]

_LETTERS = "SMG"
_MARGIN, _TEMPERATURE, _SMOOTHING = 0.1, 0.5, 0.1
_LEAST = 1e-6  # GeM takes what is below as this
_FIRST_P = 3.0  # where the exponent of GeM starts
_FORMAT = "nearveil model 1"
_KNOWN = {"EfficientNet-Lite0": EfficientNetLite0, "MobileNetV2": MobileNetV2}
_CLASSES, _EACH = 8, 4  # of a batch
_CLASSIFIER_RATE, _BACKBONE_RATE = 100.0, 0.1  # in learning rates of the head
_AT_ONCE = 256  # images whose maps are pooled together


def check_descriptors(descriptors: str) -> str:
    """Return the letters of a combination if they are valid."""
    known = isinstance(descriptors, str) and set(descriptors) <= set(_LETTERS)
    if not known or not descriptors or len(set(descriptors)) < len(descriptors):
        raise ValueError("descriptors must be some of the letters S (SPoC), M (MAC) and G (GeM), each once, as SG")
    return descriptors


def divide_dimension(dimension: int, branches: int) -> list[int]:
    """Divide a dimension among branches as evenly as possible."""
    if not is_integer(dimension, branches, 65_536):
        raise ValueError("dimension must be a whole number, at least one for each descriptor and at most 65,536")
    return [dimension // branches + (number < dimension % branches) for number in range(branches)]


def pool_mean(maps: Any) -> Any:
    """Return the mean over the places of maps of shape (n, c, h, w): shape (n, c)."""
    return maps.mean(dim=(2, 3))


def pool_largest(maps: Any) -> Any:
    """Return the largest value over the places of maps of shape (n, c, h, w): shape (n, c)."""
    return maps.amax(dim=(2, 3))


def pool_generalised_mean(maps: Any, p: Any) -> Any:
    """Return the generalised mean over the places of maps, ``(mean of x^p)^(1/p)``; x below 1e-6 counts as 1e-6."""
    positive = maps.clamp(min=_LEAST)
    # The mean of x / s, times s, is that of x for every s: powers of at most 1 cannot overflow.
    largest = positive.detach().amax(dim=(2, 3), keepdim=True)
    return (positive / largest).pow(p).mean(dim=(2, 3)).pow(1 / p) * largest[:, :, 0, 0]


def compute_triplet_loss(rows: Any, labels: Any, margin: float = _MARGIN) -> Any:
    """Return the batch-hard triplet loss, the mean of ``max(0, margin + a - b)``; there must be two labels.

    a is the distance to the farthest row of the same label, b that to the nearest row of another.
    """
    torch = need_torch()
    # The faster way by products loses the digits of small distances, which are those that matter.
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    same = labels[:, None] == labels[None, :]
    farthest = distances.masked_fill(~same, -torch.inf).amax(dim=1)
    nearest = distances.masked_fill(same, torch.inf).amin(dim=1)
    return (margin + farthest - nearest).clamp(min=0).mean()


def compute_classification_loss(scores: Any, labels: Any) -> Any:
    """Return the cross-entropy of softmax(scores / 0.5) and labels smoothed by 0.1."""
    return need_torch().nn.functional.cross_entropy(scores / _TEMPERATURE, labels, label_smoothing=_SMOOTHING)


def make_descriptor_head(channels: int, descriptors: str, dimension: int) -> Any:
    """Return a head with a branch for each descriptor: maps (n, channels, h, w) to rows (n, dimension) of norm one."""
    return _make_head_class()(channels, check_descriptors(descriptors), dimension)


@functools.cache
def _make_head_class() -> Any:
    """Return the class of heads; made here, so that the room loads without torch."""
    torch = need_torch()
    from torch import nn

    class DescriptorHead(nn.Module):
        def __init__(self, channels: int, descriptors: str, dimension: int) -> None:
            super().__init__()
            self.descriptors, self.dimension = descriptors, dimension
            shares = divide_dimension(dimension, len(descriptors))
            # Not drawn at random and then set: the random numbers of torch belong to the user.
            layers = [torch.nn.utils.skip_init(nn.Linear, channels, share) for share in shares]
            self.reductions: Any = nn.ModuleList(layers)
            for parameter in self.parameters():
                nn.init.zeros_(parameter)
            if "G" in descriptors:  # by its logarithm, so that no step of training makes it negative
                self.log_p = nn.Parameter(torch.tensor(_FIRST_P).log())

        def pool(self, letter: str, maps: Any) -> Any:
            return (
                pool_generalised_mean(maps, self.log_p.exp())
                if letter == "G"
                else {"S": pool_mean, "M": pool_largest}[letter](maps)
            )

        def branches(self, maps: Any) -> list[Any]:
            pairs = zip(self.reductions, self.descriptors, strict=True)
            reduced = [reduce(self.pool(letter, maps)) for reduce, letter in pairs]
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


class ExtractorFileError(NearveilError, ValueError):
    """A model file cannot be used here; the text says why."""


class TrainedExtractor(TorchExtractor):
    """A backbone with a trained head; `body` is the backbone's module if it was trained, too."""

    def __init__(self, backbone: TorchExtractor, head: Any, body: Any = None) -> None:
        torch = need_torch()
        self.backbone, self.descriptors = backbone.name, head.descriptors
        self._origin, self._frozen = backbone.fingerprint, body is None
        super().__init__(
            torch.nn.Sequential(backbone._module if body is None else body, head),
            side=backbone.side,
            mean=backbone._scale[0].tolist(),
            std=backbone._scale[1].tolist(),
            name=f"{backbone.name} {head.descriptors}",
            batch=backbone._batch,
        )

    def describe(self, maps: NDArray[np.floating[Any]]) -> Floats:
        """Return the features of images from their maps, shape (n, c, h, w). They are not row-exact."""
        if not self._frozen:
            raise ValueError("maps are of no use: the backbone was trained, too; use extract")
        torch = need_torch()
        head = self._module[1]
        with torch.inference_mode():
            parts = [
                head(torch.from_numpy(maps[start : start + _AT_ONCE]).to(self.device).float()).cpu().numpy()
                for start in range(0, len(maps), _AT_ONCE)
            ]
        rows, sound = unit_rows(np.concatenate([np.empty((0, self.dimension), np.float32), *parts]))
        if not sound.all():
            raise FeatureError(self.name, tuple(map(int, np.flatnonzero(~sound))))
        return rows

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write head and trained backbone to a file, whole or not at all: numbers and JSON, no code."""
        torch = need_torch()
        about = {
            "format": _FORMAT,
            "backbone": self.backbone,
            "backbone_fingerprint": self._origin,
            "descriptors": self.descriptors,
            "dimension": self.dimension,
            "fingerprint": self.fingerprint,
        }
        body, head = self._module
        content = io.BytesIO()
        weights = {"head": head.state_dict(), "body": {} if self._frozen else body.state_dict()}
        torch.save({"about": json.dumps(about), **weights}, content)
        _replace(Path(path), content.getvalue())


def load_extractor(path: str | os.PathLike[str], backbone: TorchExtractor | None = None) -> TrainedExtractor:
    """Read a trained extractor from its file. No code from the file is run.

    Parameters
    ----------
    path : path
    backbone : TorchExtractor, optional
        What the head was trained on; needed unless it was EfficientNet-Lite0 or MobileNetV2.

    Returns
    -------
    Extractor
        With the fingerprint that it had.

    Raises
    ------
    ValueError
        If the file is no such model, is damaged, or was made for another backbone.

    Examples
    --------
    >>> extractor = load_extractor("birds.nvm")  # doctest: +SKIP
    """
    content = Path(path).read_bytes()
    about, head_weights, body_weights = _parse(content)
    chosen = _find_backbone(about, backbone)
    # The weights lie in the file: what says that they are larger does not speak the truth, and gets no memory.
    if about["dimension"] * chosen.dimension * 4 > len(content):
        raise ExtractorFileError("model: it is smaller than the head that it tells of")
    try:
        head = make_descriptor_head(chosen.dimension, about["descriptors"], about["dimension"])
        head.load_state_dict(head_weights)
        body = copy.deepcopy(chosen._module) if body_weights else None
        if body is not None:
            body.load_state_dict(body_weights)
        found = TrainedExtractor(chosen, head, body)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise ExtractorFileError("model: its weights are not those of the network that it tells of") from error
    if found.fingerprint != about["fingerprint"]:
        raise ExtractorFileError("model: its weights are not those that were saved: it is damaged")
    return found


def _parse(content: bytes) -> tuple[dict[str, Any], Any, Any]:
    """Return what a file says of itself, and its weights."""
    torch = need_torch()
    try:
        stored = torch.load(_unpack(content), map_location="cpu", weights_only=True)
        about = json.loads(stored["about"])
        head, body = stored["head"], stored["body"]
        known = about["format"] == _FORMAT
        sound = type(about["dimension"]) is int and isinstance(about["fingerprint"], str)
        check_descriptors(about["descriptors"])
    except Exception as error:  # torch raises whatever a damaged file makes it
        raise ExtractorFileError("model: not a file that nearveil train has written, or damaged") from error
    if not known or not sound:
        raise ExtractorFileError("model: of a format that this version does not know")
    return about, head, body


def _unpack(content: bytes) -> io.BytesIO:
    """Return the archive of a model, written anew, so that torch reads what was checked here and no more.

    Models are not compressed: a file that says it unpacks to more than itself is refused before it takes memory.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if packed or sum(entry.file_size for entry in entries) > len(content):
            raise ValueError
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as copied:
            for entry in entries:
                copied.writestr(entry.filename, archive.read(entry))
    out.seek(0)
    return out


def _find_backbone(about: dict[str, Any], given: TorchExtractor | None) -> TorchExtractor:
    name = about.get("backbone")
    if given is None and name not in _KNOWN:
        raise ExtractorFileError("backbone must be given: the model was trained on one that is not built in")
    chosen = _KNOWN[str(name)]() if given is None else given
    if chosen.fingerprint != about.get("backbone_fingerprint"):
        raise ExtractorFileError("backbone: the model was trained on another one, or on other weights")
    return chosen


def _replace(path: Path, content: bytes) -> None:
    part = path.absolute().with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def compute_backbone_maps(
    images: Sequence[Pixels], backbone: TorchExtractor, *, progress: Progress | None = None
) -> Maps:
    """Return the last maps of a backbone, shape (n, c, h, w), for training a head: 123 kB for each image."""
    torch = need_torch()
    found: list[Maps] = []
    for start in range(0, len(images), backbone._batch):
        some = _scale_images(images[start : start + backbone._batch], backbone)
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

    Adam minimises the batch-hard triplet loss of the rows (margin 0.1) plus a classification loss of the first branch
    (temperature 0.5, label smoothing 0.1). A batch holds 4 images of each of 8 classes.

    Nothing protects the images: the trained model tells of them.

    Parameters
    ----------
    images : sequence of ndarray of shape (height, width, 3), uint8; or ndarray of shape (n, c, h, w), floats
        Images, or maps of a frozen backbone.
    labels : array-like of shape (n,)
        The class of each image. There must be two, and one of them must have two images.
    backbone : TorchExtractor
        Of a module that gives maps, as :class:`EfficientNetLite0` does.
    descriptors : str, default="SG"
        Letters out of S (SPoC), M (MAC) and G (GeM with a trained exponent), each once.
    dimension : int, default=512
        Of the features; divided among the descriptors.
    epochs : int, default=20
    freeze_backbone : bool, default=True
        If true, maps are computed once and kept in memory. If false, the backbone is trained, too, at a tenth of the
        learning rate; its batch norms keep their statistics.
    learning_rate : float, default=1e-4
        Of the head; the classifier, which is dropped in the end, learns a hundred times as fast.
    progress : callable, optional
        Called with 1 after each epoch.
    random_state : int, optional
        With the same number, the same machine with as many threads trains the same head.

    Returns
    -------
    Extractor
        Its method ``save(path)`` writes a file for :func:`load_extractor`.

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
    codes = _encode_labels(labels, len(images))
    _check_numbers(epochs, learning_rate)
    rng = np.random.default_rng(random_state)
    maps = _check_maps(images, backbone)
    if maps is None:
        maps = compute_backbone_maps(cast("Sequence[Pixels]", images), backbone)
    elif not freeze_backbone:
        raise ValueError("images must be images, not maps, where the backbone is trained, too")
    head = _start(backbone, descriptors, dimension, maps, rng)
    body = None if freeze_backbone else copy.deepcopy(backbone._module).requires_grad_(True)

    def inputs(batch: NDArray[np.int64]) -> Any:
        if body is None:
            return need_torch().from_numpy(maps[batch]).to(backbone.device).float()
        return body(_scale_images([images[place] for place in batch], backbone))

    step = _make_stepper(head, body, int(codes.max()) + 1, learning_rate)
    batches = draw_balanced_batches(codes, rng)
    for _ in range(epochs):
        for batch in islice(batches, -(-len(codes) // (_CLASSES * _EACH))):
            step(inputs(batch), codes[batch])
        if progress is not None:
            progress(1)
    return TrainedExtractor(backbone, head, body)


def draw_balanced_batches(codes: NDArray[np.int64], rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Yield batches without end: 4 rows of each of 8 classes, or of all. All are shown equally often."""
    turns = [_draw_turns(np.flatnonzero(codes == code), rng) for code in range(int(codes.max()) + 1)]
    while True:
        order = rng.permutation(len(turns))
        # The last group is filled up with the first classes of this order: none is twice in a batch.
        width = min(_CLASSES, len(turns))
        for start in range(0, len(turns), width):
            some = np.roll(order, -start)[:width]
            yield np.array([next(turns[code]) for code in some for _ in range(_EACH)])


def _start(backbone: TorchExtractor, descriptors: str, dimension: int, maps: Maps, rng: np.random.Generator) -> Any:
    """Return a head that is not trained yet: it centres what the descriptors pool, and projects it at random."""
    device = backbone.device
    head = make_descriptor_head(backbone.dimension, descriptors, dimension).to(device)
    head.start(_compute_means(head, maps, device), need_torch().Generator(device).manual_seed(int(rng.integers(2**62))))
    return head


def _make_stepper(head: Any, body: Any, classes: int, learning_rate: float) -> Callable[[Any, NDArray[np.int64]], None]:
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
        loss = compute_triplet_loss(rows, targets) + compute_classification_loss(classifier(branches[0]), targets)
        if not loss.isfinite():
            raise ValueError("learning_rate is too large: the loss is no longer a number")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _draw_turns(rows: NDArray[np.int64], rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from rng.permutation(rows).tolist()


def _scale_images(images: Sequence[Pixels], backbone: TorchExtractor) -> Any:
    some = np.stack([resize(image, backbone.side) for image in images])
    scaled = np.ascontiguousarray(scale_pixels(some, backbone._scale).transpose(0, 3, 1, 2))
    return need_torch().from_numpy(scaled).to(backbone.device)


def _compute_means(head: Any, maps: Maps, device: Any) -> list[Any]:
    """Return the mean over all images of what each descriptor pools."""
    torch = need_torch()
    sums: list[Any] = [0] * len(head.descriptors)
    with torch.no_grad():
        for start in range(0, len(maps), _AT_ONCE):
            some = torch.from_numpy(maps[start : start + _AT_ONCE]).to(device).float()
            sums = [
                total + head.pool(letter, some).sum(dim=0) for total, letter in zip(sums, head.descriptors, strict=True)
            ]
    return [total / len(maps) for total in sums]


def _encode_labels(labels: ArrayLike, count: int) -> NDArray[np.int64]:
    names = np.asarray(labels)
    if names.shape != (count,):
        raise ValueError("labels must be one for each image")
    _, codes, sizes = np.unique(names, return_inverse=True, return_counts=True)
    if len(sizes) < 2 or sizes.max() < 2:
        raise ValueError("labels must be of at least two classes, one of them with at least two images")
    return codes.astype(np.int64)


def _check_numbers(epochs: int, learning_rate: float) -> None:
    if not is_integer(epochs, 1):
        raise ValueError("epochs must be a whole number of at least 1")
    if not 0 < learning_rate <= 1:
        raise ValueError("learning_rate must be above 0 and at most 1")


def _check_maps(images: object, backbone: TorchExtractor) -> Maps | None:
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
