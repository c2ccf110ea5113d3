"""The query's side: mechanisms that tell a server about a private record no more than they promise."""

from nearveil.release._base import Release
from nearveil.release._catalog import default
from nearveil.release._message import Message, MessageError
from nearveil.release.baselines._dsne import DPdSNE
from nearveil.release.baselines._pca import PrivatePCA, PrivatePCARelease
from nearveil.release.baselines._plain import PlainLDA, PlainManifold, PlainTSNE, RawFeatures
from nearveil.release.baselines._random_projection import RandomProjection
from nearveil.release.bits._budget import Budgets, Price
from nearveil.release.bits._latent import Latent
from nearveil.release.bits._ome import OME
from nearveil.release.bits._unary import Unary
from nearveil.release.covers._covers import Cells, Covers
from nearveil.release.covers._map import MapError, PublicMap
from nearveil.release.privatemail._privatemail import PrivateMail
from nearveil.release.privatemail._steps import GalleryEmbedding
from nearveil.release.vectors._analytic import AnalyticGaussian
from nearveil.release.vectors._fisher import VonMisesFisher
from nearveil.release.vectors._privunit import PrivUnit

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
