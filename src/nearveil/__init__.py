"""Nearest neighbours with a privacy promise that you can check."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nearveil.manifold import SupervisedManifold

if TYPE_CHECKING:
    from nearveil.service import AsyncClient, Client
    from nearveil.votes import (
        PrivateDiscriminant,
        PrivateKNeighborsClassifier,
        PrivateKNeighborsRegressor,
        PublicDiscriminant,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Client",
    "PrivateDiscriminant",
    "PrivateKNeighborsClassifier",
    "PrivateKNeighborsRegressor",
    "PublicDiscriminant",
    "SupervisedManifold",
    "__version__",
]

_LATER = {
    "AsyncClient": "nearveil.service",
    "Client": "nearveil.service",
    "PrivateDiscriminant": "nearveil.votes",
    "PrivateKNeighborsClassifier": "nearveil.votes",
    "PrivateKNeighborsRegressor": "nearveil.votes",
    "PublicDiscriminant": "nearveil.votes",
}


def __getattr__(name: str) -> Any:
    """Import what needs databases and accountants when it is first asked for: graphs do without."""
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
