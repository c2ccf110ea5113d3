"""Private search on one machine, how good it is, and how good it can be."""

from nearveil.search.evaluation import evaluate
from nearveil.search.planning import plan
from nearveil.search.retriever import Retriever

__all__ = ["Retriever", "evaluate", "plan"]
