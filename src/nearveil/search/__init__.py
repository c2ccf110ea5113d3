"""Private search on one machine, its evaluation, its theoretical limits, and planning."""

from nearveil.lazy import require_extra

with require_extra("gallery"):
    from nearveil.search.evaluation import evaluate
    from nearveil.search.planning import plan
    from nearveil.search.retriever import Retriever

__all__ = ["Retriever", "evaluate", "plan"]
