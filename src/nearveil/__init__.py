"""Nearest-neighbour search with a verifiable privacy guarantee.

Start with these:

- ``Client(location, token, account=..., ledger=...)`` queries a local or remote gallery: ``client.nearest(image)`` and
  ``client.classify(image)``. ``AsyncClient`` is the asynchronous version.
- ``PrivateKNeighborsClassifier``, ``PrivateKNeighborsRegressor`` and ``PrivateDiscriminant`` learn from private
  records; ``PublicDiscriminant`` is the model to publish.
- ``SupervisedManifold`` embeds rows, without privacy.

See ``nearveil.gallery`` to create galleries, ``nearveil.ledger`` for budgets, ``nearveil.mechanisms``,
``nearveil.search`` for evaluation, and ``nearveil --help`` for the command line.
"""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.client.clients import AsyncClient, Client
    from nearveil.errors import NearveilError
    from nearveil.gallery.index import Index
    from nearveil.ledger import Ledger
    from nearveil.mechanisms import OME, Covers, Latent
    from nearveil.private_knn import (
        PrivateDiscriminant,
        PrivateKNeighborsClassifier,
        PrivateKNeighborsRegressor,
        PublicDiscriminant,
    )
    from nearveil.privatemail import PrivateMail, SupervisedManifold
    from nearveil.search import Retriever, evaluate
    from studies.pate import PateClassifier

__version__ = "0.2.0"

__all__ = [
    "OME",
    "AsyncClient",
    "Client",
    "Covers",
    "Index",
    "Latent",
    "Ledger",
    "NearveilError",
    "PateClassifier",
    "PrivateDiscriminant",
    "PrivateKNeighborsClassifier",
    "PrivateKNeighborsRegressor",
    "PrivateMail",
    "PublicDiscriminant",
    "Retriever",
    "SupervisedManifold",
    "__version__",
    "evaluate",
]

__getattr__ = import_later(
    __name__,
    {
        ".client.clients": "AsyncClient Client",
        ".errors": "NearveilError",
        ".gallery.index": "Index",
        ".ledger": "Ledger",
        ".mechanisms": "Covers Latent OME",
        ".private_knn": "PrivateDiscriminant PrivateKNeighborsClassifier PrivateKNeighborsRegressor PublicDiscriminant",
        ".privatemail": "PrivateMail SupervisedManifold",
        ".search": "Retriever evaluate",
        "studies.pate": "PateClassifier",  # of nearveil-studies
    },
)


def __dir__() -> list[str]:
    return __all__
