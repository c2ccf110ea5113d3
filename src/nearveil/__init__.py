"""Nearest neighbours with a privacy promise that you can check."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

__version__ = "0.1.0"

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

_LATER = {
    "AsyncClient": "nearveil.service",
    "Client": "nearveil.service",
    "NearveilError": "nearveil.errors",
    "PrivateDiscriminant": "nearveil.votes",
    "PrivateKNeighborsClassifier": "nearveil.votes",
    "PrivateKNeighborsRegressor": "nearveil.votes",
    "PublicDiscriminant": "nearveil.votes",
    "SupervisedManifold": "nearveil.manifold",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: none needs all the others."""
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
