"""Nearest neighbours with a privacy promise that you can check."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.errors import NearveilError
    from nearveil.manifold import SupervisedManifold
    from nearveil.service import AsyncClient, Client
    from nearveil.votes import (
        PrivateDiscriminant,
        PrivateKNeighborsClassifier,
        PrivateKNeighborsRegressor,
        PublicDiscriminant,
    )

__version__ = "0.2.0"

__all__ = [
    "AsyncClient",
    "Client",
    "NearveilError",
    "PrivateDiscriminant",
    "PrivateKNeighborsClassifier",
    "PrivateKNeighborsRegressor",
    "PublicDiscriminant",
    "SupervisedManifold",
    "__version__",
]

__getattr__ = import_later(
    __name__,
    {
        "errors": ("NearveilError",),
        "manifold": ("SupervisedManifold",),
        "service": (
            "AsyncClient",
            "Client",
        ),
        "votes": (
            "PrivateDiscriminant",
            "PrivateKNeighborsClassifier",
            "PrivateKNeighborsRegressor",
            "PublicDiscriminant",
        ),
    },
)


def __dir__() -> list[str]:
    return __all__
