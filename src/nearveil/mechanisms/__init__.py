"""Mechanisms for private queries: their messages reveal no more about a record than their guarantee says."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.mechanisms._bitwise import OME, Latent
    from nearveil.mechanisms._gaussian import AnalyticGaussian
    from nearveil.mechanisms._privunit import PrivUnit
    from nearveil.mechanisms.base import Release
    from nearveil.mechanisms.catalog import default
    from nearveil.mechanisms.covers.covers import Covers
    from nearveil.mechanisms.covers.maps import PublicMap
    from nearveil.mechanisms.messages import Message, MessageError

__all__ = [
    "OME",
    "AnalyticGaussian",
    "Covers",
    "Latent",
    "Message",
    "MessageError",
    "PrivUnit",
    "PublicMap",
    "Release",
    "default",
]

__getattr__ = import_later(
    __name__,
    {
        "._bitwise": "OME Latent",
        "._gaussian": "AnalyticGaussian",
        "._privunit": "PrivUnit",
        ".base": "Release",
        ".catalog": "default",
        ".covers.covers": "Covers",
        ".covers.maps": "PublicMap",
        ".messages": "Message MessageError",
    },
)
