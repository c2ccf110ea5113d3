"""The public table of codes on the wire: in the form of messages, as the public map."""

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms import Message
from nearveil.mechanisms.base import fingerprint
from nearveil.mechanisms.covers.map import MOST_FEATURES
from nearveil.retrieval._codes import Codes, ProductCodes, ScalarCodes, Singles, WholeCodes
from nearveil.retrieval._wire import WireError

_CENTROIDS = 256  # a byte names one of them
_MOST_DIMENSIONS = 4  # that a byte of a product code stands for: more would make small answers large in memory
MOST_COLUMNS = 2 * MOST_FEATURES  # of a projection: groups of one size are filled up
_LARGEST = {
    "dimension": (),
    "double": (),
    "projection": (MOST_FEATURES, MOST_COLUMNS),
    "lowest": (MOST_COLUMNS,),
    "steps": (MOST_COLUMNS,),
    "weights": (MOST_COLUMNS,),
    "mean": (MOST_COLUMNS,),
    "centroids": (MOST_FEATURES, _CENTROIDS, _MOST_DIMENSIONS),
}


def codes_to_bytes(codes: Codes) -> bytes:
    """Return the public table that a client reads codes by.

    `codes`: As :func:`~nearveil.retrieval._codes.make_codes` made them. The server's sample is left out.

    Examples
    --------
    >>> codes_from_bytes(codes_to_bytes(WholeCodes(64))).width
    128
    """
    for name, kind, arrays_of, _ in _FORMS:
        if isinstance(codes, kind):
            arrays = arrays_of(codes)
            return Message(name, _identity(arrays), arrays).to_bytes()
    raise WireError("codes must be of a kind that has a wire form")


def codes_from_bytes(data: bytes) -> Codes:
    """Read a public table. Nothing in it is trusted.

    Returns: Good for :meth:`~nearveil.retrieval._codes.Codes.scores`; product codes encode nothing, for want of a
    sample.
    """
    try:
        message = Message.from_bytes(data, _LARGEST)
    except ValueError as error:
        raise WireError(f"the table of codes cannot be read: {error}") from None
    made = {name: reader for name, _, _, reader in _FORMS}.get(message.mechanism)
    if made is None:
        raise WireError("the table of codes is of a kind that is not known")
    codes: Codes = made(message)
    if codes_to_bytes(codes) != data:  # another fingerprint, arrays that are not known, another way to write it
        raise WireError("the table of codes is not written as it must be")
    return codes


def code_dimension(codes: Codes) -> int:
    """Return of how many dimensions the rows are that codes are compared with."""
    return codes.dimension if isinstance(codes, WholeCodes) else len(codes.projection)  # type: ignore[attr-defined]


def _identity(arrays: Any) -> str:
    return fingerprint(*(part for name in sorted(arrays) for part in (name, arrays[name])))


def _array(message: Message, name: str, kind: str, dimensions: int) -> NDArray[Any]:
    """Return a named array of a type, checked; a message without it is a WireError too."""
    values = message.arrays.get(name)
    if values is None or values.dtype != np.dtype(kind) or values.ndim != dimensions or 0 in values.shape:
        raise WireError(f"the table of codes must hold {name!r}, an array of type {kind} with {dimensions} dimensions")
    return values


def _whole_arrays(codes: WholeCodes) -> dict[str, NDArray[Any]]:
    return {"dimension": np.array(codes.dimension, dtype="<i8")}


def _whole(message: Message) -> WholeCodes:
    dimension = int(_array(message, "dimension", "<i8", 0))
    if not 1 <= dimension <= MOST_FEATURES:
        raise WireError(f"the table of codes must be of 1 to {MOST_FEATURES} dimensions")
    return WholeCodes(dimension)


def _scalar_arrays(codes: ScalarCodes) -> dict[str, NDArray[Any]]:
    double = np.array(codes.double, dtype="<i8")
    return {"projection": codes.projection, "lowest": codes.lowest, "steps": codes.steps, "double": double}


def _scalar(message: Message) -> ScalarCodes:
    projection, double = _array(message, "projection", "<f4", 2), int(_array(message, "double", "<i8", 0))
    lowest, steps = _array(message, "lowest", "<f4", 1), _array(message, "steps", "<f4", 1)
    if not projection.shape[1] == len(lowest) == len(steps) or not 0 <= double <= len(steps):
        raise WireError("the table of codes has arrays that do not fit each other")
    return ScalarCodes(projection, lowest, steps, double)


def _product_arrays(codes: ProductCodes) -> dict[str, NDArray[Any]]:
    groups = int(codes.quantiser.M)
    centroids = faiss.vector_to_array(codes.quantiser.centroids).reshape(groups, _CENTROIDS, -1)
    return {"projection": codes.projection, "weights": codes.weights, "mean": codes.mean, "centroids": centroids}


def _product(message: Message) -> ProductCodes:
    projection, centroids = _array(message, "projection", "<f4", 2), _array(message, "centroids", "<f4", 3)
    weights, mean = _array(message, "weights", "<f4", 1), _array(message, "mean", "<f4", 1)
    groups, levels, size = centroids.shape
    if levels != _CENTROIDS:
        raise WireError(f"the table of codes must have {_CENTROIDS} centroids for each byte")
    if not projection.shape[1] == len(weights) == len(mean) == groups * size:
        raise WireError("the table of codes has arrays that do not fit each other")
    quantiser = faiss.ProductQuantizer(groups * size, groups, 8)
    faiss.copy_array_to_vector(np.ascontiguousarray(centroids, np.float32).ravel(), quantiser.centroids)
    none: Singles = np.zeros((0, len(projection)), np.float32)
    return ProductCodes(projection, weights, mean, quantiser, none)


_FORMS: tuple[tuple[str, type, Any, Any], ...] = (
    ("codes-whole", WholeCodes, _whole_arrays, _whole),
    ("codes-scalar", ScalarCodes, _scalar_arrays, _scalar),
    ("codes-product", ProductCodes, _product_arrays, _product),
)
