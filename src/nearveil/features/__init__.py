"""Images to vectors."""

from nearveil.features.backbones import EfficientNetLite0, default_extractor
from nearveil.features.bridge import fit_bridge
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
    "fit_bridge",
    "gallery_features",
    "load_extractor",
    "load_image",
    "train_head",
]
