"""Extractors from the user's own networks: a torch module or an ONNX file."""

import copy
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.features.extractor import Extractor

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
    (n, d, height, width), which is averaged over its places. The extractor keeps a copy in evaluation mode, and runs
    where the module's parameters are. Rows of an image alone and within a batch agree up to rounding; with
    ``row_exact=True`` the module sees one image at a time, on one thread of the CPU.

    Parameters
    ----------
    module : torch.nn.Module
    side : int, default=224
    mean, std : three floats, default ImageNet's
        For the channels, in grey levels from 0 to 255.
    name : str, optional
        By default that of the module's class. It enters the fingerprint beside the weights: give modules of equal
        weights that compute something else another name.
    batch : int, default=8

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
        identity = {"torch": named, "weights": _hash_weights(self._module), "scale": self._scale.tolist()}
        super().__init__(name=named, identity=identity, dimension=probe.shape[1], side=side, batch=batch)

    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        scaled = np.ascontiguousarray(scale_pixels(images, self._scale).transpose(0, 3, 1, 2))
        return self._run(self._module, scaled)

    def _exact_row(self, image: NDArray[np.uint8]) -> NDArray[Any]:
        with use_one_thread():
            return self._run(self._on_host, align(scale_pixels(image, self._scale).transpose(0, 3, 1, 2)))

    @cached_property
    def _on_host(self) -> Any:
        """The module on the CPU: what a GPU's libraries compute may depend on how much of its memory is free."""
        return self._module if self.device == "cpu" else copy.deepcopy(self._module).to("cpu")

    @property
    def device(self) -> str:
        """Where the parameters of the module are."""
        return _find_device(self._module)

    def _run(self, module: Any, scaled: NDArray[np.float32]) -> NDArray[Any]:
        torch = need_torch()
        with torch.inference_mode():
            out = module(torch.from_numpy(scaled).to(_find_device(module)))
            if out.ndim == 4:
                out = out.mean(dim=(2, 3))
            found: NDArray[Any] = out.float().cpu().numpy()
        return found


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Let torch compute on one thread; afterwards on as many as before."""
    torch = need_torch()
    with _ALONE:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def align(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a copy that begins at a multiple of 64 bytes: where an array happens to lie must not change a sum."""
    room = np.empty(array.nbytes + _LINE, dtype=np.uint8)
    start = -room.ctypes.data % _LINE
    copied: NDArray[np.float32] = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def _find_device(module: Any) -> str:
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


def _hash_weights(module: Any) -> str:
    whole = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if not hasattr(tensor, "detach"):  # what a module keeps beside its tensors is its own affair
            continue
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        whole.update(tensor.detach().cpu().contiguous().flatten().view(dtype=need_torch().uint8).numpy().tobytes())
    return whole.hexdigest()


class OnnxExtractor(Extractor):
    """Features by any ONNX file that maps images to vectors or to maps of vectors; run by onnxruntime on the CPU.

    Its one input is float32 of shape (n, 3, side, side) or (n, side, side, 3), RGB, ``(grey level - mean) / std``;
    n may be fixed. Its output has the shape (n, d), or is a map in the layout of the input, which is averaged over
    its places. With ``row_exact=True`` the network sees one image at a time, on one thread.

    Parameters
    ----------
    path : path
        Read once. A file whose weights lie in other files is refused: the fingerprint would not cover them.
    side : int, default=224
    mean, std : three floats, default ImageNet's
        For the channels, in grey levels from 0 to 255.
    output : str, optional
        Which output is the feature; needed if there are several.
    name : str, optional
        For people; the fingerprint is that of the file. By default ``ONNX``.
    batch : int, default=8
        Where the file does not fix it.

    Examples
    --------
    >>> extractor = OnnxExtractor("network.onnx", side=256)  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        side: int = 224,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        output: str | None = None,
        name: str | None = None,
        batch: int = 8,
    ) -> None:
        self._scale = check_scale(side, mean, std)
        self._content = content = Path(path).read_bytes()
        self._session = _load_session(content)
        self._input, self._channels_last, self._fixed = _find_input(self._session, side)
        self._output = _find_output(self._session, output)
        probe = self._rows(np.zeros((2, side, side, 3), dtype=np.uint8))
        if probe.ndim != 2 or len(probe) != 2:
            raise ValueError(f"path: the network must give a vector for each image; of two it made {probe.shape}")
        identity = {
            "onnx": hashlib.sha256(content).hexdigest(),
            "output": self._output,
            "scale": self._scale.tolist(),
        }
        super().__init__(
            name=name or "ONNX", identity=identity, dimension=probe.shape[1], side=side, batch=self._fixed or batch
        )

    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        step = self._fixed or len(images)
        parts = (images[start : start + step] for start in range(0, len(images), step))
        return np.concatenate([self._run(self._session, some) for some in parts])

    def _exact_row(self, image: NDArray[np.uint8]) -> NDArray[Any]:
        return self._run(self._exact_session, image)

    @cached_property
    def _exact_session(self) -> Any:
        return _load_session(self._content, threads=1)

    def _run(self, session: Any, images: NDArray[np.uint8]) -> NDArray[Any]:
        """Map images, at most as many as the network takes at once, to rows."""
        scaled = scale_pixels(images, self._scale)
        if not self._channels_last:
            scaled = scaled.transpose(0, 3, 1, 2)
        empty = np.zeros((max(0, (self._fixed or 0) - len(scaled)), *scaled.shape[1:]), np.float32)
        out = session.run([self._output], {self._input: align(np.concatenate([scaled, empty]))})[0]
        if out.ndim == 4:
            out = out.mean(axis=(1, 2) if self._channels_last else (2, 3), dtype=np.float64)
        found: NDArray[Any] = out[: len(images)]
        return found


def _load_session(content: bytes, threads: int = 0) -> Any:
    """Load a network, to run on so many threads; 0 for as many as there are cores."""
    try:
        import onnx
        import onnxruntime
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("this extractor needs onnxruntime: pip install nearveil[onnx]") from missing
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.use_deterministic_compute = threads == 1
    options.log_severity_level = 4  # what goes wrong is raised; it is not printed as well
    options.add_session_config_entry("session.load_model_format", "ONNX")  # the format whose parts are looked at
    try:
        model = onnx.load_model_from_string(content)
        if any(one.data_location != onnx.TensorProto.DEFAULT or one.external_data for one in _list_tensors(model)):
            raise ValueError
        # Written anew, without what is unknown: onnxruntime reads what was looked at here, and no more.
        model.DiscardUnknownFields()
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # the classes of its errors are not public, and their texts may be pages long
        raise ValueError(
            "path: onnxruntime does not accept this file: it must be one whole ONNX network of standard operators, "
            "without weights in other files"
        ) from None


def _list_tensors(message: Any) -> Iterator[Any]:
    """Yield all tensors of a protobuf message, at whatever depth."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for one in [value] if hasattr(value, "ListFields") else value:
            if field.message_type.name == "TensorProto":
                yield one
            else:
                yield from _list_tensors(one)


def _find_input(session: Any, side: int) -> tuple[str, bool, int | None]:
    """Return the input's name, whether channels come last, and the size of a batch if it is fixed."""
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(inputs[0].shape) != 4:
        raise ValueError("path: the network must have one input, float32 of four dimensions")
    shape = inputs[0].shape
    last = shape[3] == 3 and shape[1] != 3
    sides = shape[1:3] if last else shape[2:4]
    if any(isinstance(length, int) and length != side for length in sides):
        raise ValueError(f"side must be {sides[0]} for this network")
    return inputs[0].name, last, shape[0] if isinstance(shape[0], int) and shape[0] > 0 else None


def _find_output(session: Any, wanted: str | None) -> str:
    names = [one.name for one in session.get_outputs()]
    if wanted is None and len(names) == 1:
        return str(names[0])
    if wanted is None or wanted not in names:
        raise ValueError(f"output must be one of {', '.join(names)}")
    return wanted
