"""The database's side: private records vote on public queries.

* :class:`PrivateKNeighborsClassifier`: the nearest private records vote for a class, or for many labels;
* :class:`PrivateKNeighborsRegressor`: they give the mean or the median of their values.
"""

from nearveil.votes._classifier import Answers, PrivateKNeighborsClassifier
from nearveil.votes._plan import VotePlan
from nearveil.votes._regressor import PrivateKNeighborsRegressor
from nearveil.votes._spending import ExhaustedError

__all__ = ["Answers", "ExhaustedError", "PrivateKNeighborsClassifier", "PrivateKNeighborsRegressor", "VotePlan"]
