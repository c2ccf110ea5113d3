"""Sealed search: the server computes on an encrypted question and learns nothing from it, if a lattice problem is hard.

Scores of items come from one pass over all codes (:class:`SealedIndex`, :class:`SealedClient`); records of the best
come from a second, sealed just as well. Proofs and limits: ``docs/theory/sealed.md``.
"""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.sealed.client import SealedClient, SealedMatch
    from nearveil.sealed.index import SealedIndex
    from nearveil.sealed.layout import SealedError
    from nearveil.sealed.parameters import FETCH, SCORES, LweParameters

__all__ = ["FETCH", "SCORES", "LweParameters", "SealedClient", "SealedError", "SealedIndex", "SealedMatch"]

__getattr__ = import_later(
    __name__,
    {
        "client": ("SealedClient", "SealedMatch"),
        "index": ("SealedIndex",),
        "layout": ("SealedError",),
        "parameters": ("FETCH", "SCORES", "LweParameters"),
    },
)


def __dir__() -> list[str]:
    return __all__
