"""Sealed search: the server computes on an encrypted question and learns nothing from it, if a lattice problem is hard.

Scores of items come from one pass over all codes (:class:`SealedIndex`, :class:`SealedClient`); records of the best
come from a second, sealed just as well. Proofs and limits: ``docs/theory/sealed.md``.
"""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.sealed.client import SealedClient
    from nearveil.sealed.index import SealedIndex
    from nearveil.sealed.layout import SealedError

__all__ = ["SealedClient", "SealedError", "SealedIndex"]

__getattr__ = import_later(__name__, {".client": "SealedClient", ".index": "SealedIndex", ".layout": "SealedError"})
