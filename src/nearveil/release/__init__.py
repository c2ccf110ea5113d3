"""The query's side: mechanisms that tell a server about a private record no more than they promise."""

from nearveil.release._analytic import AnalyticGaussian
from nearveil.release._base import Release
from nearveil.release._bitwise_budget import Budgets, Price
from nearveil.release._bitwise_unary import Unary
from nearveil.release._cells import Cells
from nearveil.release._covers import Covers
from nearveil.release._default import default
from nearveil.release._dsne import DPdSNE
from nearveil.release._fisher import VonMisesFisher
from nearveil.release._latent import Latent
from nearveil.release._map import MapError, PublicMap
from nearveil.release._message import Message, MessageError
from nearveil.release._ome import OME
from nearveil.release._pca import PrivatePCA
from nearveil.release._pca_release import PrivatePCARelease
from nearveil.release._plain import PlainLDA, PlainManifold, PlainTSNE, RawFeatures
from nearveil.release._privatemail import PrivateMail
from nearveil.release._privatemail_common import GalleryEmbedding
from nearveil.release._privunit import PrivUnit
from nearveil.release._random_projection import RandomProjection

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
