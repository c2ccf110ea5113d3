"""Features by a torch module of the user's own."""

import copy
import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.features._extractor import Extractor

_ALONE = threading.Lock()  # two that set the number of threads at once would restore each other's
_LINE = 64  # bytes: what libraries align memory to, and may choose their loops by

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet, in grey levels


def need_torch() -> Any:
    """Return torch, or say how to get it."""
    try:
        import torch
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("this extractor needs torch: pip install nearveil[images,torch]") from missing
    return torch


class TorchExtractor(Extractor):
    """Features by any torch module that maps images to vectors or to maps of vectors.

    The module gets float32 of shape (n, 3, side, side), RGB, ``(grey level - mean) / std``, and gives (n, d), or
    (n, d, height, width), which is averaged over its places. The extractor keeps a copy of its own in evaluation
    mode: to train the module further changes nothing here. It runs where the parameters of the module are.

    The rows of an image alone and of the same image within a batch agree up to the rounding of float32, not bit for
    bit: the kernels of torch add in another order for another size of batch, or with another number of threads. This
    takes a module whose evaluation mode treats images one by one, as all common ones do. With ``row_exact=True`` the
    module sees one image at a time, on one thread of the CPU.

    Parameters
    ----------
    module : torch.nn.Module
    side : int, default=224
    mean, std : three floats, default ImageNet's
        For the channels, in grey levels from 0 to 255.
    name : str, optional
        By default that of the module's class. It enters the fingerprint beside the weights (names, shapes and
        numbers): give modules of equal weights that compute something else another name.
    batch : int, default=8

    Raises
    ------
    ValueError
        If the module does not give vectors, or side, mean or std cannot be.
    ModuleNotFoundError
        If torch is not installed.

    Examples
    --------
    >>> import numpy as np, torch
    >>> extractor = TorchExtractor(torch.nn.Conv2d(3, 5, 3), side=8)
    >>> rows = extractor.extract([np.full((20, 30, 3), 200, dtype=np.uint8)])
    >>> rows.shape, round(float(np.linalg.norm(rows)), 5)
    ((1, 5), 1.0)
    """

    def __init__(
        self,
        module: Any,
        *,
        side: int = 224,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        name: str | None = None,
        batch: int = 8,
    ) -> None:
        torch = need_torch()
        if not isinstance(module, torch.nn.Module):
            raise ValueError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        self._scale = check_scale(side, mean, std)
        self._module = copy.deepcopy(module).eval().requires_grad_(False)
        named = name or type(module).__qualname__
        probe = self._rows(np.zeros((2, side, side, 3), dtype=np.uint8))
        if probe.ndim != 2 or len(probe) != 2:
            raise ValueError(f"module must give a vector for each image; of two it made the shape {probe.shape}")
        identity = {"torch": named, "weights": _weights_hash(self._module), "scale": self._scale.tolist()}
        super().__init__(name=named, identity=identity, dimension=probe.shape[1], side=side, batch=batch)

    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        scaled = np.ascontiguousarray(scale_pixels(images, self._scale).transpose(0, 3, 1, 2))
        return self._run(self._module, scaled)

    def _exact_row(self, image: NDArray[np.uint8]) -> NDArray[Any]:
        with one_thread():
            return self._run(self._on_host, aligned(scale_pixels(image, self._scale).transpose(0, 3, 1, 2)))

    @cached_property
    def _on_host(self) -> Any:
        """The module on the CPU: what a GPU's libraries compute may depend on how much of its memory is free."""
        return self._module if _device(self._module) == "cpu" else copy.deepcopy(self._module).to("cpu")

    def _run(self, module: Any, scaled: NDArray[np.float32]) -> NDArray[Any]:
        torch = need_torch()
        with torch.inference_mode():
            out = module(torch.from_numpy(scaled).to(_device(module)))
            if out.ndim == 4:
                out = out.mean(dim=(2, 3))
            found: NDArray[Any] = out.float().cpu().numpy()
        return found


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread; afterwards on as many as before."""
    torch = need_torch()
    with _ALONE:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def aligned(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a copy that begins at a multiple of 64 bytes: where an array happens to lie must not change a sum."""
    room = np.empty(array.nbytes + _LINE, dtype=np.uint8)
    start = -room.ctypes.data % _LINE
    copied: NDArray[np.float32] = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def _device(module: Any) -> str:
    first = next(module.parameters(), None)
    return "cpu" if first is None else str(first.device)


def check_scale(side: int, mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """Return mean and std as one array of shape (2, 3), checked together with the side."""
    if not (isinstance(side, int) and 1 <= side <= 4096):
        raise ValueError("side must be a whole number of pixels from 1 to 4096")
    scale = np.array([np.broadcast_to(mean, 3), np.broadcast_to(std, 3)], dtype=np.float32)
    if not (np.isfinite(scale).all() and (scale[1] > 0).all()):
        raise ValueError("mean and std must be three finite numbers each, std above 0")
    return scale


def scale_pixels(images: NDArray[np.uint8], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return ``(grey level - mean) / std`` of images of shape (n, side, side, 3)."""
    scaled: NDArray[np.float32] = (images.astype(np.float32) - scale[0]) / scale[1]
    return scaled


def _weights_hash(module: Any) -> str:
    whole = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if not hasattr(tensor, "detach"):  # what a module keeps beside its tensors is its own affair
            continue
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        whole.update(tensor.detach().cpu().contiguous().flatten().view(dtype=need_torch().uint8).numpy().tobytes())
    return whole.hexdigest()
