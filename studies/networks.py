"""Neural networks for students, from tables 1 and 2 of the supplement of Private-kNN."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin, TransformerMixin, _fit_context
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import StrOptions
from sklearn.utils.validation import check_is_fitted

from nearveil.privacy.parameters import WEIGHT, Parameters, allow_integers, allow_reals, parameter
from nearveil.private_knn.student_model import IMAGE_FORMATS, ImageFormat

Architecture = Literal["mnist", "svhn"]

_MOST_SIDE = 512  # of an image that a restored network takes
_AT_ONCE = 1000  # images in a prediction
_MOMENTUM = 0.8  # of the running estimate of an image's class
_MIN_CONFIDENCE = 0.6  # of an estimate, for an unlabelled image to count in the loss
_LABEL_SMOOTHING = 0.1
_ROTATION, _SCALE, _SHEAR, _SHIFT = 0.26, 0.1, 0.2, 0.14  # at augmentation 1: 15 degrees; shares of the image


def _load_torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("NetworkStudent needs torch: pip install nearveil[torch]") from missing
    return torch


def _choose_device(torch: Any, name: str) -> Any:
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(automatic if name == "auto" else name)


def build_network(architecture: Architecture, shape: tuple[int, int, int], n_classes: int) -> Any:
    """Return an untrained network: table 1 or table 2 of the supplement, with 192 inputs of the last layer."""
    torch = _load_torch()
    nn = torch.nn
    if architecture == "mnist":
        layers = [nn.Conv2d(shape[0], 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(64, 128, 5), nn.ReLU(), nn.MaxPool2d(2)]
        dense = [nn.LazyLinear(384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU()]
    else:  # the third and the sixth convolution of stride 2; normalised by batch, or they do not train
        layers, width = [], shape[0]
        sizes = [(96, 3, 1), (96, 3, 1), (96, 3, 2), (192, 3, 1), (192, 3, 1), (192, 3, 2), (192, 5, 1)]
        for filters, side, stride in sizes:
            convolution = nn.Conv2d(width, filters, side, stride=stride, padding=side // 2, bias=False)
            layers += [convolution, nn.BatchNorm2d(filters), nn.ReLU()]
            width = filters
        layers.append(nn.AdaptiveAvgPool2d(4))
        dense = [nn.LazyLinear(192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU()]
    network = nn.Sequential(nn.Sequential(*layers, nn.Flatten(), *dense), nn.Linear(192, n_classes))
    with torch.no_grad():
        network.eval()(torch.zeros(1, *shape))  # sets the width of the first dense layer
    return network


def augment(torch: Any, images: Any, strength: float) -> Any:
    """Rotate, scale, shear and shift images at random. Digits are never mirrored."""

    def draw(most: float) -> Any:
        return (2 * torch.rand(len(images), device=images.device) - 1) * most * strength

    turn, scale = draw(_ROTATION), 1 + draw(_SCALE)
    cosine, sine = scale * turn.cos(), scale * turn.sin()
    first = torch.stack([cosine, draw(_SHEAR) - sine, draw(_SHIFT)], dim=1)
    second = torch.stack([sine, cosine, draw(_SHIFT)], dim=1)
    matrices = torch.stack([first, second], dim=1)
    grid = torch.nn.functional.affine_grid(matrices, images.shape, align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, align_corners=False)


@dataclass(eq=False, repr=False)
class NetworkStudent(ClassifierMixin, TransformerMixin, Parameters):  # type: ignore[misc]
    """A convolutional network for images, trained on few or noisy labels and on unlabelled images.

    Every epoch augments every image at random. Training keeps a running estimate of the class of each image, from its
    label and from earlier predictions, and fits the network to it. So a wrong label among many right ones is corrected,
    and an unlabelled image counts as soon as its estimate is confident.

    Parameters
    ----------
    architecture : {"mnist", "svhn"}, default="mnist"
        Table 1 or table 2 of the supplement of Private-kNN.
    epochs : int, default=12
    batch_size : int, default=128
    learning_rate : float, default=0.002
        The maximum of a one-cycle schedule.
    augmentation : float, default=1.0
        Strength of the augmentation: at 1 up to 15 degrees, a tenth of the size, a seventh of the width.
    device : str, default="auto"
        "auto" is CUDA if available, else the CPU.
    random_state : int, RandomState or None, default=None
        Two fits with one seed on one device give the same network.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    n_features_in_ : int
        Width of an image.

    Examples
    --------
    >>> images = np.repeat(np.eye(2)[:, :, None], 16, axis=2).repeat(8, axis=1)  # black above white, and the reverse
    >>> network = NetworkStudent(epochs=1, batch_size=1, random_state=0).fit(images, [0, 1])
    >>> network.transform(images).shape
    (2, 192)
    """

    architecture: Architecture = parameter("mnist", StrOptions({"mnist", "svhn"}))
    _: KW_ONLY
    epochs: int = parameter(12, allow_integers(1))
    batch_size: int = parameter(128, allow_integers(1))
    learning_rate: float = parameter(0.002, allow_reals(0))
    augmentation: float = parameter(1.0, WEIGHT)
    device: str = parameter("auto", str)
    random_state: int | np.random.RandomState | None = parameter(None, "random_state")

    @_fit_context(prefer_skip_nested_validation=True)  # type: ignore[untyped-decorator]
    def fit(self, X: ArrayLike, y: ArrayLike, unlabeled: ArrayLike | None = None) -> Self:
        """Train the network.

        Parameters
        ----------
        X : array-like of shape (n, height, width[, channels])
            uint8, or floats from 0 to 1.
        y : array-like of shape (n,)
        unlabeled : array-like of shape (n_unlabeled, height, width[, channels]), optional
        """
        images, labels = _move_channels_first(X), np.asarray(y)
        if labels.shape != (len(images),):
            raise ValueError("y must have one label for each image")
        self.classes_, class_numbers = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y must hold at least two classes")
        estimates = np.eye(len(self.classes_), dtype=np.float32)[class_numbers]
        if unlabeled is not None:
            unlabeled_images = _move_channels_first(unlabeled)
            if unlabeled_images.shape[1:] != images.shape[1:]:
                raise ValueError("unlabeled must hold images of the same shape as X")
            images = np.concatenate([images, unlabeled_images])
            uniform = np.full((len(unlabeled_images), len(self.classes_)), 1 / len(self.classes_), dtype=np.float32)
            estimates = np.concatenate([estimates, uniform])
        self.n_features_in_ = images.shape[3]
        self._shape = images.shape[1:]
        self._train(images, estimates, len(labels), int(check_random_state(self.random_state).randint(2**31)))
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the class of each image, shape (n,)."""
        return np.asarray(self.classes_[np.argmax(self.predict_proba(X), axis=1)])

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the probability of each class for each image, shape (n, n_classes)."""
        return self._run(X, lambda network, batch: network(batch).softmax(dim=1))

    def transform(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the input of the last layer for each image, shape (n, 192)."""
        return self._run(X, lambda network, batch: network[0](batch))

    def _run(self, X: ArrayLike, step: Callable[[Any, Any], Any]) -> NDArray[np.float64]:
        check_is_fitted(self)
        images = _move_channels_first(X)
        if images.shape[1:] != self._shape:
            raise ValueError("X must hold images of the shape that the network was trained on")
        torch = _load_torch()
        device, threads = _choose_device(torch, self.device), torch.get_num_threads()
        network = self._network.to(device)
        starts = range(0, len(images), _AT_ONCE)
        try:
            if len(images) == 1:  # takes less time than the start of a second thread
                torch.set_num_threads(1)
            with torch.no_grad():
                batches = (torch.from_numpy(images[i : i + _AT_ONCE]).to(device) for i in starts)
                parts = [step(network, batch).cpu().numpy() for batch in batches]
        finally:
            torch.set_num_threads(threads)
        return np.concatenate(parts).astype(np.float64)

    def _train(self, images: NDArray[np.float32], estimates: NDArray[np.float32], n_labels: int, seed: int) -> None:
        torch = _load_torch()
        device = _choose_device(torch, self.device)
        exact = torch.backends.cudnn.flags(deterministic=True, benchmark=False, allow_tf32=False)
        with torch.random.fork_rng([device] if device.type == "cuda" else []), exact:
            torch.manual_seed(seed)
            network = build_network(self.architecture, self._shape, len(self.classes_)).to(device).train()
            inputs, running = torch.from_numpy(images).to(device), torch.from_numpy(estimates).to(device)
            steps = -(-len(images) // self.batch_size)
            optimiser = torch.optim.AdamW(network.parameters(), self.learning_rate, weight_decay=0.01)
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimiser, self.learning_rate, total_steps=self.epochs * steps
            )
            for epoch in range(self.epochs):
                for rows in torch.randperm(len(images), device=device).tensor_split(steps):
                    out = network(augment(torch, inputs[rows], self.augmentation))
                    running[rows] = _MOMENTUM * running[rows] + (1 - _MOMENTUM) * out.detach().softmax(dim=1)
                    counts = (rows < n_labels) | (running[rows].amax(dim=1) >= _MIN_CONFIDENCE)
                    decided = epoch >= min(2, self.epochs // 2)
                    loss = _compute_loss(torch, out, running[rows], counts, decided=decided)
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                    schedule.step()
            self._network = network.eval().cpu()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True
        tags.non_deterministic = self.random_state is None
        return tags


def flatten_network(student: NetworkStudent) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Return the architecture and shape of a trained network, and all its numbers, layer by layer."""
    numbers = np.concatenate([values.numpy().ravel() for values in _list_numbers(student._network)]).astype("<f4")
    return {"architecture": student.architecture, "shape": list(student._shape)}, numbers


def restore_network(parameters: dict[str, Any], classes: NDArray[Any], numbers: NDArray[np.float32]) -> NetworkStudent:
    """Return a network from :func:`flatten_network`, or raise a ValueError if the parts do not fit."""
    architecture, shape = parameters["architecture"], parameters["shape"]
    if architecture not in get_args(Architecture):
        raise ValueError("architecture is not known")
    if not (isinstance(shape, list) and len(shape) == 3 and all(type(side) is int for side in shape)):
        raise ValueError("shape must be three numbers")
    if not (1 <= shape[0] <= 4 and all(1 <= side <= _MOST_SIDE for side in shape[1:])):
        raise ValueError(f"shape must fit an image: 1 to 4 channels, sides up to {_MOST_SIDE}")
    size = (shape[0], shape[1], shape[2])
    torch = _load_torch()
    try:
        with torch.device("meta"):  # without memory: the shape is not trusted
            planned = build_network(architecture, size, len(classes))
        n_numbers = sum(part.numel() for part in _list_numbers(planned))
    except RuntimeError:
        raise ValueError("shape is too small for the network") from None
    if numbers.shape != (n_numbers,):
        raise ValueError("network must have as many numbers as its architecture")
    network, start = build_network(architecture, size, len(classes)), 0
    for part in _list_numbers(network):
        part.copy_(torch.from_numpy(numbers[start : start + part.numel()].copy()).reshape(part.shape))
        start += part.numel()
    student = NetworkStudent(architecture)
    student.classes_, student._shape, student.n_features_in_ = classes, size, size[2]
    student._network = network.eval()
    return student


IMAGE_FORMATS["network"] = ImageFormat(NetworkStudent, flatten_network, restore_network)


def _list_numbers(network: Any) -> list[Any]:
    """Return the weights and statistics of a network, not its counters."""
    return [values for values in network.state_dict().values() if values.is_floating_point()]


def _compute_loss(torch: Any, out: Any, estimates: Any, counts: Any, *, decided: bool) -> Any:
    """Return the loss against the estimates that count: against their probabilities, or their class if `decided`."""
    functional = torch.nn.functional
    targets = functional.one_hot(estimates.argmax(dim=1), estimates.shape[1]).to(out.dtype) if decided else estimates
    each = functional.cross_entropy(out, targets, label_smoothing=_LABEL_SMOOTHING, reduction="none")
    return (each * counts).sum() / counts.sum().clamp_min(1)


def _move_channels_first(X: ArrayLike) -> NDArray[np.float32]:
    images = np.asarray(X)
    if images.ndim not in (3, 4) or not len(images):
        raise ValueError("X must hold images of shape (n, height, width) or (n, height, width, channels)")
    if images.dtype != np.uint8 and not (images.dtype.kind == "f" and images.min() >= 0 and images.max() <= 1):
        raise ValueError("X must be uint8, or floats from 0 to 1 without NaN")
    scaled = images.astype(np.float32) / np.float32(255 if images.dtype == np.uint8 else 1)
    return np.ascontiguousarray(scaled[:, None] if images.ndim == 3 else scaled.transpose(0, 3, 1, 2))
