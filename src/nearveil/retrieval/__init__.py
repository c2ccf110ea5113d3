"""The protocol: a message goes out, candidates come back, the client chooses; and how good that can be."""

from nearveil.retrieval._answer import Answer, AnswerError
from nearveil.retrieval._client import Client
from nearveil.retrieval._evaluate import Estimate, Evaluation, evaluate
from nearveil.retrieval._plan import Plan, plan
from nearveil.retrieval._retriever import Retriever
from nearveil.retrieval._server import Server

__all__ = [
    "Answer",
    "AnswerError",
    "Client",
    "Estimate",
    "Evaluation",
    "Plan",
    "Retriever",
    "Server",
    "evaluate",
    "plan",
]
