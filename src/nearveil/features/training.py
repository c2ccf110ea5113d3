"""Train a head of global descriptors on a backbone, save it, and load it.

After Jun, Ko, Kim, Kim and Kim (2019), "Combination of Multiple Global Descriptors for Image Retrieval" (CGD).
"""

import copy
import functools
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.cluster import Tick
from nearveil.errors import NearveilError
from nearveil.features.backbones import EfficientNetLite0, MobileNetV2
from nearveil.features.extractor import FeatureError, Floats, unit_rows
from nearveil.features.images import Pixels, resize
from nearveil.features.networks import TorchExtractor, import_torch, scale_pixels
from nearveil.privacy.checks import check_integer, check_range
from nearveil.storage import replace_file

Maps = NDArray[np.float16]

_LETTERS = "SMG"
_MARGIN, _TEMPERATURE, _SMOOTHING = 0.1, 0.5, 0.1
_GEM_MIN = 1e-6  # GeM clamps smaller values to this
_GEM_P = 3.0  # initial exponent of GeM
_FORMAT = "nearveil model 1"
_BACKBONES = {"EfficientNet-Lite0": EfficientNetLite0, "MobileNetV2": MobileNetV2}
_CLASSES, _PER_CLASS = 8, 4  # of a batch
_CLASSIFIER_RATE, _BACKBONE_RATE = 100.0, 0.1  # in learning rates of the head
_BATCH = 256  # images pooled together


def check_descriptors(descriptors: str) -> str:
    """Return a combination of descriptor letters, or raise if it is invalid."""
    letters = set(descriptors) if isinstance(descriptors, str) else set()
    if not letters or not letters <= set(_LETTERS) or len(letters) < len(descriptors):
        raise ValueError("descriptors must be some of the letters S (SPoC), M (MAC) and G (GeM), each once, as SG")
    return descriptors


def divide_dimension(dimension: int, branches: int) -> list[int]:
    """Divide a dimension among branches as evenly as possible."""
    dimension = check_integer(dimension, "dimension", branches, 65_536)
    return [dimension // branches + (number < dimension % branches) for number in range(branches)]


def pool_maps(letter: str, maps: Any, p: Any = None) -> Any:
    """Pool maps (n, c, h, w) to (n, c): S mean, M maximum, G generalised mean ``(mean of x^p)^(1/p)``, x >= 1e-6."""
    if letter == "S":
        return maps.mean(dim=(2, 3))
    if letter == "M":
        return maps.amax(dim=(2, 3))
    positive = maps.clamp(min=_GEM_MIN)
    # Divided by the maximum, and multiplied by it afterwards: powers of at most 1 cannot overflow.
    maximum = positive.detach().amax(dim=(2, 3), keepdim=True)
    return (positive / maximum).pow(p).mean(dim=(2, 3)).pow(1 / p) * maximum[:, :, 0, 0]


def compute_triplet_loss(rows: Any, labels: Any, margin: float = _MARGIN) -> Any:
    """Return the batch-hard loss: mean of ``max(0, margin + farthest same label - nearest other label)``."""
    torch = import_torch()
    # The faster product form loses digits of small distances, which matter most.
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    same = labels[:, None] == labels[None, :]
    farthest = distances.masked_fill(~same, -torch.inf).amax(dim=1)
    nearest = distances.masked_fill(same, torch.inf).amin(dim=1)
    return (margin + farthest - nearest).clamp(min=0).mean()


def compute_classification_loss(scores: Any, labels: Any) -> Any:
    """Return the cross-entropy of softmax(scores / 0.5) and labels smoothed by 0.1."""
    return import_torch().nn.functional.cross_entropy(scores / _TEMPERATURE, labels, label_smoothing=_SMOOTHING)


def make_descriptor_head(channels: int, descriptors: str, dimension: int) -> Any:
    """Return a head with a branch for each descriptor: maps (n, channels, h, w) to rows (n, dimension) of norm one."""
    return _make_head_class()(channels, check_descriptors(descriptors), dimension)


@functools.cache
def _make_head_class() -> Any:
    """Define the class of heads, only when torch is needed."""
    torch = import_torch()
    from torch import nn

    class DescriptorHead(nn.Module):
        def __init__(self, channels: int, descriptors: str, dimension: int) -> None:
            super().__init__()
            self.descriptors, self.dimension = descriptors, dimension
            shares = divide_dimension(dimension, len(descriptors))
            # No random initialisation: torch's global generator belongs to the user.
            layers = [torch.nn.utils.skip_init(nn.Linear, channels, share) for share in shares]
            self.reductions: Any = nn.ModuleList(layers)
            for parameter in self.parameters():
                nn.init.zeros_(parameter)
            if "G" in descriptors:  # the logarithm keeps the exponent positive during training
                self.log_p = nn.Parameter(torch.tensor(_GEM_P).log())

        def pool(self, letter: str, maps: Any) -> Any:
            return pool_maps(letter, maps, self.log_p.exp() if letter == "G" else None)

        def branches(self, maps: Any) -> list[Any]:
            pairs = zip(self.reductions, self.descriptors, strict=True)
            return [nn.functional.normalize(reduce(self.pool(letter, maps)), dim=1) for reduce, letter in pairs]

        def join(self, branches: list[Any]) -> Any:
            return nn.functional.normalize(torch.cat(branches, dim=1), dim=1)

        def forward(self, maps: Any) -> Any:
            return self.join(self.branches(maps))

        def start(self, means: list[Any], generator: Any) -> None:
            """Set random orthogonal weights, and biases that subtract the mean of each descriptor."""
            with torch.no_grad():
                for layer, mean in zip(self.reductions, means, strict=True):
                    nn.init.orthogonal_(layer.weight, generator=generator)
                    layer.bias.copy_(-(layer.weight @ mean))

    return DescriptorHead


class ExtractorFileError(NearveilError, ValueError):
    """A model file cannot be used; the message gives the reason."""


class TrainedExtractor(TorchExtractor):
    """A backbone with a trained head; `body` is the backbone's module if it was trained as well."""

    def __init__(self, backbone: TorchExtractor, head: Any, body: Any = None) -> None:
        torch = import_torch()
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
        """Return features computed from maps of shape (n, c, h, w). They are not row-exact."""
        if not self._frozen:
            raise ValueError("maps cannot be used, because the backbone was trained as well; use extract")
        torch = import_torch()
        rows = np.empty((len(maps), self.dimension), np.float32)
        with torch.inference_mode():
            for start in range(0, len(maps), _BATCH):
                batch = torch.from_numpy(maps[start : start + _BATCH]).to(self.device).float()
                rows[start : start + _BATCH] = self._module[1](batch).cpu().numpy()
        rows, valid = unit_rows(rows)
        if not valid.all():
            raise FeatureError(self.name, tuple(map(int, np.flatnonzero(~valid))))
        return rows

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write head and trained backbone to a file atomically: numbers and JSON, no code."""
        header = {
            "format": _FORMAT,
            "backbone": self.backbone,
            "backbone_fingerprint": self._origin,
            "descriptors": self.descriptors,
            "dimension": self.dimension,
            "fingerprint": self.fingerprint,
        }
        body, head = self._module
        weights = {"head": head.state_dict(), "body": {} if self._frozen else body.state_dict()}
        content = io.BytesIO()
        import_torch().save({"about": json.dumps(header), **weights}, content)
        with replace_file(Path(path), private=False) as file:
            file.write(content.getvalue())


def load_extractor(path: str | os.PathLike[str], backbone: TorchExtractor | None = None) -> TrainedExtractor:
    """Load a trained extractor, with the fingerprint that was saved, from its file. No code from the file is run.

    A file that is not a model, is corrupted, or was made for another backbone raises a ValueError.

    `backbone` is required unless it is EfficientNet-Lite0 or MobileNetV2.
    """
    content = Path(path).read_bytes()
    header, head_weights, body_weights = _parse(content)
    if backbone is None:
        if header.get("backbone") not in _BACKBONES:
            raise ExtractorFileError("backbone must be given: the model was trained on one that is not built in")
        backbone = _BACKBONES[str(header["backbone"])]()
    if backbone.fingerprint != header.get("backbone_fingerprint"):
        raise ExtractorFileError("backbone: the model was trained on another one, or on other weights")
    # The file holds all weights: a header that claims more is false, and must not allocate memory.
    if header["dimension"] * backbone.dimension * 4 > len(content):
        raise ExtractorFileError("model: the file is smaller than the head that its header describes")
    try:
        head = make_descriptor_head(backbone.dimension, header["descriptors"], header["dimension"])
        head.load_state_dict(head_weights)
        body = copy.deepcopy(backbone._module) if body_weights else None
        if body is not None:
            body.load_state_dict(body_weights)
        extractor = TrainedExtractor(backbone, head, body)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise ExtractorFileError("model: its weights do not fit the network that its header describes") from error
    if extractor.fingerprint != header["fingerprint"]:
        raise ExtractorFileError("model: its weights are not those that were saved; the file is corrupted")
    return extractor


def _parse(content: bytes) -> tuple[dict[str, Any], Any, Any]:
    """Return the header of a model file, and the weights of its head and body."""
    torch = import_torch()
    try:
        stored = torch.load(_repack(content), map_location="cpu", weights_only=True)
        header = json.loads(stored["about"])
        head, body = stored["head"], stored["body"]
        valid = type(header["dimension"]) is int and isinstance(header["fingerprint"], str)
        check_descriptors(header["descriptors"])
        supported = valid and header["format"] == _FORMAT
    except Exception as error:  # torch raises many types for a corrupted file
        raise ExtractorFileError("model: not a file written by nearveil train, or corrupted") from error
    if not supported:
        raise ExtractorFileError("model: unknown format; use a newer version of nearveil")
    return header, head, body


def _repack(content: bytes) -> io.BytesIO:
    """Copy the archive of a model, so that torch reads only the entries that were checked here."""
    # Models are not compressed: a file with entries larger than itself is refused before it allocates memory.
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(out, "w") as copied:
        entries = archive.infolist()
        compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if compressed or sum(entry.file_size for entry in entries) > len(content):
            raise ValueError
        for entry in entries:
            copied.writestr(entry.filename, archive.read(entry))
    out.seek(0)
    return out


def compute_backbone_maps(images: Sequence[Pixels], backbone: TorchExtractor) -> Maps:
    """Return the last maps of a backbone, shape (n, c, h, w), for training a head: 123 kB for each image."""
    torch = import_torch()
    parts: list[Maps] = []
    for start in range(0, len(images), backbone._batch):
        with torch.inference_mode():
            maps = backbone._module(_scale_images(images[start : start + backbone._batch], backbone))
        if maps.ndim != 4:
            raise ValueError("backbone must give maps of shape (n, c, h, w): remove its last pooling")
        halves = maps.half()
        if not halves.isfinite().all():
            raise ValueError("backbone gives NaN, or numbers beyond those of float16")
        parts.append(halves.cpu().numpy())
    if not parts:
        raise ValueError("images must contain at least one")
    return np.concatenate(parts)


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
    tick: Tick | None = None,
    random_state: int | None = None,
) -> TrainedExtractor:
    """Train a combination of global descriptors (CGD, Jun et al. 2019) on a backbone.

    Adam minimises the batch-hard triplet loss of the rows (margin 0.1) plus a classification loss of the first branch
    (temperature 0.5, label smoothing 0.1). A batch holds 4 images of each of 8 classes.

    Its method ``save(path)`` writes a file for :func:`load_extractor`. The model reveals its training images: nothing
    protects them.

    Parameters
    ----------
    images : sequence of ndarray of shape (height, width, 3), uint8; or ndarray of shape (n, c, h, w), floats
        Images, or maps of a frozen backbone.
    labels : array-like of shape (n,)
        At least two classes, one of them with two images.
    backbone : TorchExtractor
        With a module that gives maps, such as :class:`EfficientNetLite0`.
    descriptors : str, default="SG"
        Letters of S (SPoC), M (MAC) and G (GeM with a trained exponent), each at most once; they share the dimension.
    freeze_backbone : bool, default=True
        If true, maps are computed once and stay in memory. If false, the backbone is trained as well, at a tenth of the
        learning rate; its batch norms keep their statistics.
    learning_rate : float, default=1e-4
        Of the head; the classifier, which is dropped at the end, learns a hundred times as fast.
    random_state : int, optional
        The same number trains the same head on the same machine with as many threads.

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
    names = np.asarray(labels)
    if names.shape != (len(images),):
        raise ValueError("labels must be one for each image")
    _, codes, sizes = np.unique(names, return_inverse=True, return_counts=True)
    if len(sizes) < 2 or sizes.max() < 2:
        raise ValueError("labels must be of at least two classes, one of them with at least two images")
    check_integer(epochs, "epochs", 1)
    check_range(learning_rate, "learning_rate", 1e-12, 1)
    rng = np.random.default_rng(random_state)
    maps = _check_maps(images, backbone)
    if maps is None:
        maps = compute_backbone_maps(cast("Sequence[Pixels]", images), backbone)
    elif not freeze_backbone:
        raise ValueError("images must be images, not maps, if the backbone is trained as well")
    head = _initialise_head(backbone, descriptors, dimension, maps, rng)
    body = None if freeze_backbone else copy.deepcopy(backbone._module).requires_grad_(True)

    def compute_maps(batch: NDArray[np.int64]) -> Any:
        if body is None:
            return import_torch().from_numpy(maps[batch]).to(backbone.device).float()
        return body(_scale_images([images[row] for row in batch], backbone))

    step = _make_stepper(head, body, int(codes.max()) + 1, learning_rate)
    batches = draw_balanced_batches(codes, rng)
    for _ in range(epochs):
        for batch in islice(batches, -(-len(codes) // (_CLASSES * _PER_CLASS))):
            step(compute_maps(batch), codes[batch])
        if tick is not None:
            tick(1)
    return TrainedExtractor(backbone, head, body)


def draw_balanced_batches(codes: NDArray[np.int64], rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Yield endless batches: 4 rows of each of 8 classes, or of all classes. Classes appear equally often."""
    cycles = [_cycle_rows(np.flatnonzero(codes == code), rng) for code in range(int(codes.max()) + 1)]
    width = min(_CLASSES, len(cycles))
    while True:
        order = rng.permutation(len(cycles))
        # The last group wraps around to the first classes of this order: none is twice in a batch.
        for start in range(0, len(cycles), width):
            chosen = np.roll(order, -start)[:width]
            yield np.array([next(cycles[code]) for code in chosen for _ in range(_PER_CLASS)])


def _cycle_rows(rows: NDArray[np.int64], rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from rng.permutation(rows).tolist()


def _initialise_head(
    backbone: TorchExtractor, descriptors: str, dimension: int, maps: Maps, rng: np.random.Generator
) -> Any:
    """Return an untrained head, which centres the pooled maps and projects them at random."""
    torch = import_torch()
    device = backbone.device
    head = make_descriptor_head(backbone.dimension, descriptors, dimension).to(device)
    sums: list[Any] = [0] * len(descriptors)
    with torch.no_grad():
        for start in range(0, len(maps), _BATCH):
            batch = torch.from_numpy(maps[start : start + _BATCH]).to(device).float()
            sums = [
                total + head.pool(letter, batch).sum(dim=0) for total, letter in zip(sums, descriptors, strict=True)
            ]
    generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
    head.start([total / len(maps) for total in sums], generator)
    return head


def _make_stepper(head: Any, body: Any, classes: int, learning_rate: float) -> Callable[[Any, NDArray[np.int64]], None]:
    """Return a function that makes one training step from the maps and classes of a batch."""
    torch = import_torch()
    device = head.reductions[0].weight.device
    classifier = torch.nn.utils.skip_init(torch.nn.Linear, head.reductions[0].out_features, classes, device=device)
    for parameter in classifier.parameters():
        torch.nn.init.zeros_(parameter)
    # A slow classifier distorts the rows, at the expense of held-out classes; so it learns faster.
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
        rows = head.join(branches)
        loss = compute_triplet_loss(rows, targets) + compute_classification_loss(classifier(branches[0]), targets)
        if not loss.isfinite():
            raise ValueError("learning_rate is too large: the loss is not a finite number")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _scale_images(images: Sequence[Pixels], backbone: TorchExtractor) -> Any:
    pixels = np.stack([resize(image, backbone.side) for image in images])
    scaled = np.ascontiguousarray(scale_pixels(pixels, backbone._scale))
    return import_torch().from_numpy(scaled).to(backbone.device)


def _check_maps(images: object, backbone: TorchExtractor) -> Maps | None:
    """Return checked maps, or None if `images` are images."""
    if not (isinstance(images, np.ndarray) and np.issubdtype(images.dtype, np.floating)):
        return None
    if images.ndim != 4 or images.shape[1] != backbone.dimension or not images.size:
        raise ValueError(f"images: maps must have the shape (n, {backbone.dimension}, h, w)")
    with np.errstate(over="ignore"):  # the next check reports overflow
        halves = images.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ValueError("images: maps must be finite numbers of float16")
    return halves
