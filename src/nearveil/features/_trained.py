"""An extractor with a trained head, and its file."""

import copy
import io
import json
import os
import secrets
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.errors import NearveilError
from nearveil.features._backbones import EfficientNetLite0, MobileNetV2
from nearveil.features._descriptors import check_descriptors, descriptor_head
from nearveil.features._extractor import FeatureError, Floats, unit_rows
from nearveil.features._torch import TorchExtractor, need_torch

_FORMAT = "nearveil model 1"
_AT_ONCE = 256
_KNOWN = {"EfficientNet-Lite0": EfficientNetLite0, "MobileNetV2": MobileNetV2}


class ModelError(NearveilError, ValueError):
    """A file does not hold a model that can be used here; says why."""


class TrainedExtractor(TorchExtractor):
    """A backbone with a trained head; :func:`train_head` makes it, :func:`load_extractor` reads it.

    Parameters
    ----------
    backbone : TorchExtractor
        Of a module that gives maps.
    head : torch.nn.Module
        Maps to rows.
    body : torch.nn.Module, optional
        The backbone's module after it was trained, too; by default it is as it was.

    Attributes
    ----------
    backbone : str
        Its name.
    descriptors : str
    """

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
        """Return the features of images whose maps are known.

        Parameters
        ----------
        maps : ndarray of shape (n, c, h, w)
            Of this extractor's backbone; the backbone must be as it was before the training.

        Returns
        -------
        ndarray of shape (n, dimension), float32
            Those that :meth:`extract` gives, up to the rounding of the maps. Not row-exact: not for private records
            that vote.
        """
        if not self._frozen:
            raise ValueError("maps are of no use: the backbone was trained, too; use extract")
        torch = need_torch()
        head = self._module[1]
        device = next(head.parameters()).device
        with torch.inference_mode():
            parts = [
                head(torch.from_numpy(maps[start : start + _AT_ONCE]).to(device).float()).cpu().numpy()
                for start in range(0, len(maps), _AT_ONCE)
            ]
        rows, sound = unit_rows(np.concatenate([np.empty((0, self.dimension), np.float32), *parts]))
        if not sound.all():
            raise FeatureError(self.name, tuple(map(int, np.flatnonzero(~sound))))
        return rows

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the head and, if it was trained, the backbone; a file that is there is replaced.

        The file appears whole or not at all. It holds numbers and JSON, no code.

        Parameters
        ----------
        path : path
        """
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
    """Read what :meth:`TrainedExtractor.save` wrote. No code out of the file is run.

    Parameters
    ----------
    path : path
    backbone : TorchExtractor, optional
        What the head was trained on; needed unless it was EfficientNet-Lite0 or MobileNetV2.

    Returns
    -------
    TrainedExtractor
        Of the fingerprint that it had.

    Raises
    ------
    ModelError
        If the file is not one, is damaged, or was made for another backbone.
    OSError
        If there is no file, or it may not be read.
    """
    content = Path(path).read_bytes()
    about, head_weights, body_weights = _parse(content)
    chosen = _backbone(about, backbone)
    # The weights lie in the file: what says that they are larger does not speak the truth, and gets no memory.
    if about["dimension"] * chosen.dimension * 4 > len(content):
        raise ModelError("model: it is smaller than the head that it tells of")
    try:
        head = descriptor_head(chosen.dimension, about["descriptors"], about["dimension"])
        head.load_state_dict(head_weights)
        body = copy.deepcopy(chosen._module) if body_weights else None
        if body is not None:
            body.load_state_dict(body_weights)
        found = TrainedExtractor(chosen, head, body)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise ModelError("model: its weights are not those of the network that it tells of") from error
    if found.fingerprint != about["fingerprint"]:
        raise ModelError("model: its weights are not those that were saved: it is damaged")
    return found


def _parse(content: bytes) -> tuple[dict[str, Any], Any, Any]:
    """Return what a file says of itself, and its weights."""
    torch = need_torch()
    try:
        stored = torch.load(_unpacked(content), map_location="cpu", weights_only=True)
        about = json.loads(stored["about"])
        head, body = stored["head"], stored["body"]
        known = about["format"] == _FORMAT
        sound = type(about["dimension"]) is int and isinstance(about["fingerprint"], str)
        check_descriptors(about["descriptors"])
    except Exception as error:  # torch raises whatever a damaged file makes it
        raise ModelError("model: not a file that nearveil train has written, or damaged") from error
    if not known or not sound:
        raise ModelError("model: of a format that this version does not know")
    return about, head, body


def _unpacked(content: bytes) -> io.BytesIO:
    """Return the archive that a model is, written anew, so that torch reads what was looked at here and no more.

    It was written without compression. A file that says it unpacks to more than itself gets no memory.
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


def _backbone(about: dict[str, Any], given: TorchExtractor | None) -> TorchExtractor:
    name = about.get("backbone")
    if given is None and name not in _KNOWN:
        raise ModelError("backbone must be given: the model was trained on one that is not built in")
    chosen = _KNOWN[str(name)]() if given is None else given
    if chosen.fingerprint != about.get("backbone_fingerprint"):
        raise ModelError("backbone: the model was trained on another one, or on other weights")
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
