"""The query's side: mechanisms that tell a server about a private record no more than their guarantee says."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.mechanisms.base import Message, MessageError, Release
    from nearveil.mechanisms.baselines._embeddings import DPdSNE, PlainLDA, PlainManifold, PlainTSNE, RawFeatures
    from nearveil.mechanisms.baselines._pca import PrivatePCA, PrivatePCARelease
    from nearveil.mechanisms.bits._bitwise import OME, Latent, Unary
    from nearveil.mechanisms.catalog import default
    from nearveil.mechanisms.covers.covers import Cells, Covers, PublicMap
    from nearveil.mechanisms.privatemail._privatemail import PrivateMail
    from nearveil.mechanisms.vectors._fisher import VonMisesFisher
    from nearveil.mechanisms.vectors._gaussian import AnalyticGaussian, RandomProjection
    from nearveil.mechanisms.vectors._privunit import PrivUnit

__all__ = [
    "OME",
    "AnalyticGaussian",
    "Cells",
    "Covers",
    "DPdSNE",
    "Latent",
    "Message",
    "MessageError",
    "PlainLDA",
    "PlainManifold",
    "PlainTSNE",
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
        "base": ["Message", "MessageError", "Release"],
        "baselines._embeddings": ["DPdSNE", "PlainLDA", "PlainManifold", "PlainTSNE", "RawFeatures"],
        "baselines._pca": ["PrivatePCA", "PrivatePCARelease"],
        "bits._bitwise": ["OME", "Latent", "Unary"],
        "catalog": ["default"],
        "covers.covers": ["Cells", "Covers", "PublicMap"],
        "privatemail._privatemail": ["PrivateMail"],
        "vectors._fisher": ["VonMisesFisher"],
        "vectors._gaussian": ["AnalyticGaussian", "RandomProjection"],
        "vectors._privunit": ["PrivUnit"],
    },
)
