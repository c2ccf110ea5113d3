"""How voting estimators are read: worst-case records, and the stated law of answers."""

from nearveil.audit.ballots._base import DIMENSION, LARGEST_VALUE, Ballot, Database, Read, twin
from nearveil.audit.ballots._classes import ClassVotes, LabelVotes
from nearveil.audit.ballots._find import ballot_of
from nearveil.audit.ballots._numbers import MeanVotes, MedianVotes

__all__ = [
    "DIMENSION",
    "LARGEST_VALUE",
    "Ballot",
    "ClassVotes",
    "Database",
    "LabelVotes",
    "MeanVotes",
    "MedianVotes",
    "Read",
    "ballot_of",
    "twin",
]
