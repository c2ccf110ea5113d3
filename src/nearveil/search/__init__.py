"""Private search on one machine, its evaluation, its theoretical limits, and planning."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.search.evaluation import evaluate
    from nearveil.search.planning import plan
    from nearveil.search.retriever import Retriever

__all__ = ["Retriever", "evaluate", "plan"]

__getattr__ = import_later(__name__, {".evaluation": "evaluate", ".planning": "plan", ".retriever": "Retriever"})
