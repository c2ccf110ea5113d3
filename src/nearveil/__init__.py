"""Nearest neighbours with a privacy guarantee that you can check.

Begin with these:

- ``Client(where, token, account=..., ledger=...)`` asks a gallery, here or on a server: ``client.nearest(image)`` and
  ``client.classify(image)``. ``AsyncClient`` is the same for event loops.
- ``PrivateKNeighborsClassifier``, ``PrivateKNeighborsRegressor`` and ``PrivateDiscriminant`` answer from private
  records; ``PublicDiscriminant`` is the model that may be published.
- ``SupervisedManifold`` embeds rows; it protects nothing by itself.

Galleries are made with ``nearveil.gallery``, budgets with ``nearveil.ledger``, mechanisms are in
``nearveil.mechanisms`` and evaluation in ``nearveil.search``. On the command line: ``nearveil --help``.
"""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.errors import NearveilError
    from nearveil.manifold import SupervisedManifold
    from nearveil.service.client.clients import AsyncClient, Client
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
        "errors": "NearveilError",
        "manifold": "SupervisedManifold",
        "service.client.clients": "AsyncClient Client",
        "votes": "PrivateDiscriminant PrivateKNeighborsClassifier PrivateKNeighborsRegressor PublicDiscriminant",
    },
)


def __dir__() -> list[str]:
    return __all__
