"""The query's side: mechanisms that tell a server about a private record no more than they promise."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.mechanisms.base import Release
    from nearveil.mechanisms.baselines._dsne import DPdSNE
    from nearveil.mechanisms.baselines._pca import PrivatePCA, PrivatePCARelease
    from nearveil.mechanisms.baselines._plain import PlainLDA, PlainManifold, PlainTSNE, RandomProjection, RawFeatures
    from nearveil.mechanisms.bits._budget import Budgets, Price
    from nearveil.mechanisms.bits._latent import OME, Latent, Unary
    from nearveil.mechanisms.catalog import default
    from nearveil.mechanisms.covers.covers import Cells, Covers
    from nearveil.mechanisms.covers.map import MapError, PublicMap
    from nearveil.mechanisms.message import Message, MessageError
    from nearveil.mechanisms.privatemail._privatemail import PrivateMail
    from nearveil.mechanisms.privatemail._steps import GalleryEmbedding
    from nearveil.mechanisms.vectors._analytic import AnalyticGaussian
    from nearveil.mechanisms.vectors._fisher import VonMisesFisher
    from nearveil.mechanisms.vectors._privunit import PrivUnit

__all__ = [
    "OME",
    "AnalyticGaussian",
    "Budgets",
    "Cells",
    "Covers",
    "DPdSNE",
    "GalleryEmbedding",
    "Latent",
    "MapError",
    "Message",
    "MessageError",
    "PlainLDA",
    "PlainManifold",
    "PlainTSNE",
    "Price",
    "PrivUnit",
    "PrivateMail",
    "PrivatePCA",
    "PrivatePCARelease",
    "PublicMap",
    "RandomProjection",
    "RawFeatures",
    "Release",
    "Unary",
    "VonMisesFisher",
    "default",
]

__getattr__ = import_later(
    __name__,
    {
        "base": ("Release",),
        "baselines._dsne": ("DPdSNE",),
        "baselines._pca": (
            "PrivatePCA",
            "PrivatePCARelease",
        ),
        "baselines._plain": (
            "PlainLDA",
            "PlainManifold",
            "PlainTSNE",
            "RandomProjection",
            "RawFeatures",
        ),
        "bits._budget": (
            "Budgets",
            "Price",
        ),
        "bits._latent": (
            "OME",
            "Latent",
            "Unary",
        ),
        "catalog": ("default",),
        "covers.covers": (
            "Cells",
            "Covers",
        ),
        "covers.map": (
            "MapError",
            "PublicMap",
        ),
        "message": (
            "Message",
            "MessageError",
        ),
        "privatemail._privatemail": ("PrivateMail",),
        "privatemail._steps": ("GalleryEmbedding",),
        "vectors._analytic": ("AnalyticGaussian",),
        "vectors._fisher": ("VonMisesFisher",),
        "vectors._privunit": ("PrivUnit",),
    },
)
