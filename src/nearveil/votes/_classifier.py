"""Private-kNN: the nearest private records vote on a public query."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils._param_validation import Interval, StrOptions

from nearveil.votes._ballots import (
    MULTILABEL,
    Labels,
    Votes,
    Weights,
    check_records,
    make_hard_votes,
    make_label_votes,
    make_soft_votes,
)
from nearveil.votes.estimator import ClassPoll, VoteTally, VotingClassifier
from nearveil.votes.neighbors import NeighborSearch, SearchParameters, draw_voters
from nearveil.votes.plan import Ballot


@dataclass(frozen=True, eq=False, repr=False)
class NeighborPoll(ClassPoll):
    """The nearest records vote."""

    ballots: Labels | Weights  # what each record votes for
    search: NeighborSearch
    votes: Votes

    def count_votes(self, queries: NDArray[np.float64]) -> Iterator[VoteTally]:
        plan, source = self.terms.plan, self.terms.source
        draws = 1 if plan.screening is None else 2
        for drawn in draw_voters(self.search, queries, plan.votes.sample, plan.n_neighbors, source, draws=draws):
            largest = self.ballots.count(drawn[1]).max(axis=1) * plan.votes.unit if draws == 2 else None
            yield VoteTally(self.ballots.count(drawn[0]), largest)

    def labels(self, votes: NDArray[np.float64], answered: NDArray[np.bool_]) -> NDArray[Any]:
        if self.votes not in MULTILABEL:
            return super().labels(votes, answered)
        # Of votes that may be negative more than none must be for a label, of the others more than half.
        least = 0.0 if self.votes == "signed" else self.terms.plan.n_neighbors / 2
        chosen = np.full(votes.shape, self.abstain_label, dtype=object)
        chosen[answered] = (votes[answered] > least).astype(int)
        return chosen.astype(int)


@dataclass(eq=False, repr=False)
class PrivateKNeighborsClassifier(SearchParameters, VotingClassifier):
    """Classify public queries by the votes of their nearest private records.

    Private-kNN (Zhu, Yu, Chandraker and Wang 2020), with what its parameters really cost. The guarantee is about the
    private records: whoever sees all answers learns almost nothing about whether one record, features and label, was
    among them. Queries and answers are public.

    Give ``epsilon``, ``delta`` and ``max_answered``, and the rest is calibrated. Or give the noise yourself, and the
    guarantee says what it costs.

    A fitted estimator holds the private records; so does its pickle. Treat both as private data.

    Parameters
    ----------
    epsilon : float, optional
        Of all answers together; 1 where `vote_noise` is not given either. Given with noise it is a limit.
    delta : float, default=1e-5
        Choose it well below one over the number of records.
    max_answered : int, default=1000
        At most so many queries are answered; later ones are declined.
    n_neighbors : int, optional
        How many records vote. By default 8 for each unit of vote noise. It must not be chosen by looking at the
        private records.
    sampling_rate : float, default=1.0
        Chance of a record to take part in a vote. Less than 1 saves nothing: at equal cost, a rate of 0.15 with 300
        voters is as noisy as a rate of 1 with 2,000, and adds the sampling's own variance.
    screening_noise : float, optional
        Standard deviation of the noise on the largest count; twice the vote noise by default.
    threshold : float, optional
        A query is answered where the noisy largest count reaches it; 0.6 of the voters by default.
    vote_noise : float, optional
        Standard deviation of the noise on every count.
    max_screened : int, optional
        At most so many queries are screened; 1.5 times `max_answered` by default. 0 for no screening: every query is
        answered, up to `max_answered`.
    votes : {"classes", "soft", "binary", "nonnegative", "signed"}, default="classes"
        "classes": y has one label a record. "soft": y has a row of weights a record, of at least 0, that sum to at
        most 1. The others vote on many labels at once, without screening: rows of 0 and 1, of weights, or of weights
        of either sign.
    clip : float, optional
        For many labels: a record's votes are scaled down to this L1 norm (the supplement's tau).
    classes : array-like, optional
        The public list of classes. Where it is not given, the classes are read from the labels, and the guarantee is
        about a record of a class that occurs anyway.
    feature_norm : float, optional
        Public. None scales every row to norm 1, so that angles are compared. A number compares distances; rows that
        are longer than it are scaled down to it.
    abstain_label : int or str, optional
        Given where a query was declined; -1, or "" where the classes are names. Must be of their kind, and no class.
    unit : str, default="record"
        What one row is, and so what is protected; it must be the account's unit. Give "person with all images" only
        where each person has one row.
    ledger : Ledger or str, optional
        Where spending is kept, with the name of an account; the account is opened where there is none. An
        address that holds a password is refused, as estimators show their parameters: leave it to PGPASSWORD or
        ~/.pgpass, or give a Ledger.
    account : Account or str, optional
        Pays for every query before it is answered, and counts the caps: all copies, pickles and processes share them.
        Without one, caps are counted in the memory of one process: fitting again starts anew, and a pickle refuses to
        answer.
    engine : {"auto", "numpy", "faiss", "torch", "cuda"}, default="auto"
        What searches. The answer does not depend on it.
    source : Source, optional
        Of the coins: the operating system's cryptographic generator by default.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    plan_ : VotePlan
        What may be asked and with how much noise.
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (d,)
        Where the features had names.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> voter = PrivateKNeighborsClassifier(epsilon=2.0, max_answered=20, max_screened=0, classes=range(10))
    >>> answers = voter.fit(X[:1500], y[:1500]).predict(X[1500:1520])
    >>> answers.shape
    (20,)
    >>> print(voter.guarantee)
    Seeing the answers makes any conclusion about whether any one record is in the database at most 7.4 times as
    likely as it would be otherwise, plus 1.0e-5.
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **VotingClassifier._parameter_constraints,
        **SearchParameters._parameter_constraints,
        "votes": [StrOptions({"classes", "soft", *MULTILABEL})],
        "clip": [Interval(Real, 0, None, closed="neither"), None],
    }

    epsilon: float | None = None
    delta: float = 1e-5
    max_answered: int = 1000
    _: KW_ONLY
    votes: Votes = "classes"
    clip: float | None = None

    def _make_poll(self, X: ArrayLike, y: ArrayLike) -> NeighborPoll:
        columns = self._columns()
        X, _ = check_records(columns, X, y, multi_output=True)
        classes, ballots, ballot = self._votes(y)
        declined = self._find_abstain_label(np.arange(2) if self.votes in MULTILABEL else classes)
        inferred = self.votes == "classes" and self.classes is None
        plan, guarantee = self._plan(ballot, self._wish(), inferred=inferred)
        search = NeighborSearch(X, feature_norm=self.feature_norm, engine=self.engine)
        terms = self._terms(columns, plan, guarantee)
        return NeighborPoll(terms, classes, declined, ballots, search, self.votes)

    def _votes(self, y: ArrayLike) -> tuple[NDArray[Any], Labels | Weights, Ballot]:
        if self.votes == "classes":
            return make_hard_votes(y, self.classes)
        if self.votes == "soft":
            return make_soft_votes(y, self.classes)
        return make_label_votes(y, self.classes, self.clip, self.votes)
