"""Images to vectors."""

from nearveil.features._backbones import EfficientNetLite0, MobileNetV2, backbone, default_extractor
from nearveil.features._bridge import Bridge, fit_bridge
from nearveil.features._descriptors import HogColor, hog
from nearveil.features._extractor import Extractor, FeatureError
from nearveil.features._finding import find_extractor
from nearveil.features._gallery import FeatureCache, GalleryFeatures, gallery_features
from nearveil.features._images import ImageError, load_image
from nearveil.features._onnx import OnnxExtractor
from nearveil.features._torch import TorchExtractor
from nearveil.features._trained import ModelError, TrainedExtractor, load_extractor
from nearveil.features._training import backbone_maps, train_head

__all__ = [
    "Bridge",
    "EfficientNetLite0",
    "Extractor",
    "FeatureCache",
    "FeatureError",
    "GalleryFeatures",
    "HogColor",
    "ImageError",
    "MobileNetV2",
    "ModelError",
    "OnnxExtractor",
    "TorchExtractor",
    "TrainedExtractor",
    "backbone",
    "backbone_maps",
    "default_extractor",
    "find_extractor",
    "fit_bridge",
    "gallery_features",
    "hog",
    "load_extractor",
    "load_image",
    "train_head",
]
