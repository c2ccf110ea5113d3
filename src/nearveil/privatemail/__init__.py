"""PrivateMail (2021, 2022): supervised manifold embeddings, their sensitivity, and the private mechanism."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.privatemail.manifold import SupervisedManifold
    from nearveil.privatemail.mechanism import PrivateMail

__all__ = ["PrivateMail", "SupervisedManifold"]

__getattr__ = import_later(__name__, {".manifold": "SupervisedManifold", ".mechanism": "PrivateMail"})
