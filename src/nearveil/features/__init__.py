"""Images to vectors."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.features.backbones import EfficientNetLite0, default_extractor
    from nearveil.features.extractor import Extractor, HogColor
    from nearveil.features.gallery import gallery_features
    from nearveil.features.images import ImageError, load_image
    from nearveil.features.networks import OnnxExtractor, TorchExtractor
    from nearveil.features.training import load_extractor, train_head

__all__ = [
    "EfficientNetLite0",
    "Extractor",
    "HogColor",
    "ImageError",
    "OnnxExtractor",
    "TorchExtractor",
    "default_extractor",
    "gallery_features",
    "load_extractor",
    "load_image",
    "train_head",
]

__getattr__ = import_later(
    __name__,
    {
        ".backbones": "EfficientNetLite0 default_extractor",
        ".extractor": "Extractor HogColor",
        ".gallery": "gallery_features",
        ".images": "ImageError load_image",
        ".networks": "OnnxExtractor TorchExtractor",
        ".training": "load_extractor train_head",
    },
)
