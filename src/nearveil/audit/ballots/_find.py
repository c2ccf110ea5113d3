"""From an estimator to what reads it."""

from typing import Any

from nearveil.audit.ballots._base import Ballot
from nearveil.audit.ballots._classes import ClassVotes, LabelVotes
from nearveil.audit.ballots._numbers import MeanVotes, MedianVotes
from nearveil.votes import PrivateKNeighborsRegressor


def ballot_of(voter: Any) -> Ballot:
    """Return what reads an estimator."""
    if isinstance(voter, PrivateKNeighborsRegressor):
        return MeanVotes(voter) if voter.method == "mean" else MedianVotes(voter)
    return ClassVotes(voter) if getattr(voter, "votes", "classes") in ("classes", "soft") else LabelVotes(voter)
