"""Private search on one machine, how good it is, and how good it can be."""

from nearveil.search.evaluation import Evaluation, evaluate
from nearveil.search.planning import Plan, plan
from nearveil.search.retriever import Retriever

__all__ = ["Evaluation", "Plan", "Retriever", "evaluate", "plan"]
