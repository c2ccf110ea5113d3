"""Extractors from your own networks: a torch module or an ONNX file."""

import copy
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.cluster import ThreadLimit
from nearveil.features.extractor import Extractor
from nearveil.lazy import require_extra
from nearveil.privacy.checks import check_integer

_STATELESS = "torch.nn.modules.", "torchvision.", "nearveil.features."
_ALIGNMENT = 64  # bytes; libraries may choose loops by the alignment of memory

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet, in grey levels


def import_torch() -> Any:
    """Return torch, or raise an error that says how to install it."""
    with require_extra("images,torch"):
        import torch
    return torch


class TorchExtractor(Extractor):
    """Features from any torch module that maps images to vectors or to maps of vectors.

    The module gets float32 of shape (n, 3, side, side), RGB, ``(grey level - mean) / std``, and returns (n, d), or
    (n, d, height, width), which is averaged over height and width. The extractor copies the module in evaluation mode
    and runs on the device of its parameters. On the CPU, modules that consist of modules of torch and torchvision see
    one image at a time; threads share the images. Others see batches, one after the other. An image's row is the same
    alone and in a batch, up to rounding; with ``row_exact=True`` a module sees one image at a time, on one CPU thread.

    Parameters
    ----------
    module : torch.nn.Module
    side : int, default=224
    mean, std : three floats, default ImageNet's
        For the channels, in grey levels from 0 to 255.
    name : str, optional
        By default the name of the module's class. It is a part of the fingerprint: give different names to modules with
        equal weights that compute different features.
    batch : int, default=8
        The most images in a batch.

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
        if not isinstance(module, import_torch().nn.Module):
            raise ValueError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        self._scale = check_scale(side, mean, std)
        self._module = copy.deepcopy(module).eval().requires_grad_(False)
        self._parallel = is_stateless(self._module)
        name = name or type(module).__qualname__
        identity = {"torch": name, "weights": _hash_weights(self._module), "scale": self._scale.tolist()}
        dimension = _measure_row(lambda images: self._run(self._module, images, self.device), side)
        batch = 1 if self._parallel and self.device == "cpu" else batch
        super().__init__(name=name, identity=identity, dimension=dimension, side=side, batch=batch)

    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        if self._parallel and self.device == "cpu":
            return self._exact_row(images)
        return self._run(self._module, images, self.device)

    def _exact_row(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        import_torch().set_num_threads(1)  # of this thread
        return self._run(self._cpu_module, images, "cpu")

    def _limit_threads(self) -> AbstractContextManager[None]:
        if self.device == "cpu":
            _ = self._cpu_module  # once, for all threads
        return _restore_torch_threads()

    @functools.cached_property
    def _cpu_module(self) -> Any:
        """The module on the CPU, in its fastest form: results of GPU libraries may depend on free memory."""
        module = self._module if self.device == "cpu" else copy.deepcopy(self._module).to("cpu")
        return make_fast(module) if self._parallel else module

    @property
    def device(self) -> str:
        """The device of the module's parameters."""
        first = next(self._module.parameters(), None)
        return "cpu" if first is None else str(first.device)

    def _run(self, module: Any, images: NDArray[np.uint8], device: str) -> NDArray[Any]:
        torch = import_torch()
        with torch.inference_mode():
            out = module(torch.from_numpy(align(scale_pixels(images, self._scale))).to(device))
            if out.ndim == 4:
                out = out.mean(dim=(2, 3))
            return np.asarray(out.float().cpu().numpy())


def _note_torch_threads() -> Callable[[], object]:
    torch = import_torch()
    return functools.partial(torch.set_num_threads, torch.get_num_threads())


_restore_torch_threads = ThreadLimit(_note_torch_threads).hold  # their number is global to the process


def is_stateless(module: Any) -> bool:
    """Return whether all parts are of classes that threads may call at the same time, without hooks."""
    return all(
        type(part).__module__.startswith(_STATELESS)
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
        for part in module.modules()
    )


def make_fast(module: Any) -> Callable[[Any], Any]:
    """Return a module of the CPU with the networks in it in their fastest form."""
    if hasattr(module, "make_fast"):
        return module.make_fast()  # type: ignore[no-any-return]
    if type(module) is import_torch().nn.Sequential:
        parts = list(map(make_fast, module))
        return lambda x: functools.reduce(lambda y, part: part(y), parts, x)
    return module  # type: ignore[no-any-return]


def align(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a copy that starts at a multiple of 64 bytes, because alignment may change the order of sums."""
    buffer = np.empty(array.nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    aligned: NDArray[np.float32] = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    aligned[...] = array
    return aligned


def check_scale(side: int, mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """Return mean and std as one array of shape (2, 3); check the side as well."""
    check_integer(side, "side", 1, 4096)
    scale = np.array([np.broadcast_to(mean, 3), np.broadcast_to(std, 3)], dtype=np.float32)
    if not (np.isfinite(scale).all() and (scale[1] > 0).all()):
        raise ValueError("mean and std must be three finite numbers each, std above 0")
    return scale


def scale_pixels(
    images: NDArray[np.uint8], scale: NDArray[np.float32], *, channels_last: bool = False
) -> NDArray[np.float32]:
    """Return ``(grey level - mean) / std`` of images of shape (n, side, side, 3), with channels first by default."""
    scaled = np.asarray((images.astype(np.float32) - scale[0]) / scale[1])
    return scaled if channels_last else scaled.transpose(0, 3, 1, 2)


def _measure_row(compute: Callable[[NDArray[np.uint8]], NDArray[Any]], side: int, count: int = 2) -> int:
    """Return the length of a row, or raise if the network does not map images to vectors."""
    shape = compute(np.zeros((count, side, side, 3), dtype=np.uint8)).shape
    if len(shape) != 2 or shape[0] != count:
        raise ValueError(f"the network must return a vector for each image; for {count} it returned shape {shape}")
    return int(shape[1])


def _hash_weights(module: Any) -> str:
    torch = import_torch()
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, torch.Tensor):  # a state may hold other objects
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(dtype=torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class OnnxExtractor(Extractor):
    """Features from any ONNX file that maps images to vectors or to maps of vectors; onnxruntime runs it on the CPU.

    Its only input is float32 of shape (n, 3, side, side) or (n, side, side, 3), RGB, ``(grey level - mean) / std``;
    n may be fixed. Its output has the shape (n, d), or is a map in the layout of the input, which is averaged. The
    network sees one image at a time, unless n is fixed and ``row_exact=False``; threads share the images.

    Parameters
    ----------
    path : path
        Read once. Files with external weights are refused: the fingerprint would not cover them.
    side, mean, std
        As for :class:`TorchExtractor`.
    output : str, optional
        The output that holds the features; required if there are several.
    name : str, optional
        A display name, by default ``ONNX``; the fingerprint depends on the file only.
    """

    _parallel = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        side: int = 224,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        output: str | None = None,
        name: str | None = None,
    ) -> None:
        self._scale = check_scale(side, mean, std)
        self._content = Path(path).read_bytes()
        self._input, self._channels_last, self._fixed = _find_input(self._session, side)
        self._output = _find_output(self._session, output)
        digest = hashlib.sha256(self._content).hexdigest()
        super().__init__(
            name=name or "ONNX",
            identity={"onnx": digest, "output": self._output, "scale": self._scale.tolist()},
            dimension=_measure_row(self._rows, side, self._fixed or 2),
            side=side,
            batch=self._fixed or 1,
        )

    @functools.cached_property
    def _session(self) -> Any:
        return load_session(self._content)

    def _rows(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        scaled = scale_pixels(images, self._scale, channels_last=self._channels_last)
        padding = np.zeros((max(0, (self._fixed or 0) - len(scaled)), *scaled.shape[1:]), np.float32)
        out = self._session.run([self._output], {self._input: align(np.concatenate([scaled, padding]))})[0]
        if out.ndim == 4:
            out = out.mean(axis=(1, 2) if self._channels_last else (2, 3), dtype=np.float64)
        return np.asarray(out[: len(images)])

    _exact_row = _rows


def load_session(content: bytes) -> Any:
    """Load a network that runs on the thread that calls it."""
    with require_extra("onnx"):
        import onnx
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.log_severity_level = 4  # errors are raised, and need not be printed
    options.add_session_config_entry("session.load_model_format", "ONNX")  # the only format that is checked here
    try:
        model = onnx.load_model_from_string(content)
        tensors = _list_tensors(model)
        if any(tensor.data_location != onnx.TensorProto.DEFAULT or tensor.external_data for tensor in tensors):
            raise ValueError
        # Serialised again without unknown fields: onnxruntime reads only fields that were checked.
        model.DiscardUnknownFields()
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # the error classes are private, and messages may be pages long
        raise ValueError(
            "path: onnxruntime does not accept this file: it must be a complete ONNX network of standard operators, "
            "without weights in other files"
        ) from None


def _list_tensors(message: Any) -> Iterator[Any]:
    """Yield all tensors of a protobuf message, at any depth."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for child in [value] if hasattr(value, "ListFields") else value:
            if field.message_type.name == "TensorProto":
                yield child
            else:
                yield from _list_tensors(child)


def _find_input(session: Any, side: int) -> tuple[str, bool, int | None]:
    """Return the input's name, whether channels are last, and the batch size if it is fixed."""
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(inputs[0].shape) != 4:
        raise ValueError("path: the network must have one input, float32 of four dimensions")
    shape = inputs[0].shape
    channels_last = shape[3] == 3 and shape[1] != 3
    sides = shape[1:3] if channels_last else shape[2:4]
    if any(isinstance(length, int) and length != side for length in sides):
        raise ValueError(f"side must be {sides[0]} for this network")
    return inputs[0].name, channels_last, shape[0] if isinstance(shape[0], int) and shape[0] > 0 else None


def _find_output(session: Any, output: str | None) -> str:
    names = [node.name for node in session.get_outputs()]
    chosen = names[0] if output is None and len(names) == 1 else output
    if chosen not in names:
        raise ValueError(f"output must be one of {', '.join(names)}")
    return str(chosen)
