"""Voting estimators that are broken on purpose. They misuse public interfaces alone, whatever lies below."""

from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source, secure_source
from nearveil.votes import Answers, PrivateDiscriminant, PrivateKNeighborsClassifier
from nearveil.votes._base import Progress

_HARDLY_ANY = 1e-9  # noise
_ONE_IN = np.uint64(2000)


class _Careless(PrivateKNeighborsClassifier):
    """Keeps its records where its own methods can misuse them."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Keep the private records, twice."""
        super().fit(X, y)
        self._records = X, y
        return self

    def answer(self, X: ArrayLike, *, progress: Progress | None = None) -> Answers:
        """Answer, and spoil what was answered."""
        return self._spoiled(super().answer(X, progress=progress), np.asarray(X))

    def _spoiled(self, answers: Answers, X: NDArray[Any]) -> Answers:
        """Return what leaves the estimator."""
        raise NotImplementedError

    def _votes_with(self, noise: float, X: NDArray[Any]) -> NDArray[np.float64]:
        """Return votes on the same queries with other noise, by an estimator that nobody pays."""
        same = {**self.get_params(deep=False), "epsilon": None, "ledger": None, "account": None}
        plain = {"n_neighbors": self.plan_.n_neighbors, "max_screened": 0, "screening_noise": None, "threshold": None}
        voter = PrivateKNeighborsClassifier(**{**same, **plain, "vote_noise": noise, "max_answered": len(X)})
        return np.asarray(voter.fit(*self._records).answer(X).votes)

    def _exact(self, X: NDArray[Any]) -> NDArray[np.float64]:
        """Return votes without noise."""
        return np.rint(self._votes_with(_HARDLY_ANY, X))

    def _decided(self, votes: NDArray[np.float64], answers: Answers) -> Answers:
        """Return answers with other votes and the labels that follow from them."""
        labels = np.where(answers.answered, self.classes_[np.argmax(np.nan_to_num(votes), axis=1)], self.abstain_label)
        return Answers(labels, answers.answered, votes)

    @property
    def _coins(self) -> Source:
        return secure_source() if self.source is None else self.source


class QuietVotes(_Careless):
    """Votes with four fifths of the noise that is charged."""

    def _spoiled(self, answers: Answers, X: NDArray[Any]) -> Answers:
        votes = self._votes_with(0.8 * self.plan_.vote_noise, X)
        return self._decided(np.where(answers.answered[:, None], votes, np.nan), answers)


class OnceExactVotes(_Careless):
    """Votes without any noise in one of 2,000 answers."""

    def _spoiled(self, answers: Answers, X: NDArray[Any]) -> Answers:
        slips = (self._coins.words(len(X)) % _ONE_IN == 0) & answers.answered
        return self._decided(np.where(slips[:, None], self._exact(X), answers.votes), answers)


class NoiselessLabels(_Careless):
    """Honest votes, and labels that were decided before the noise."""

    def _spoiled(self, answers: Answers, X: NDArray[Any]) -> Answers:
        return Answers(self._decided(self._exact(X), answers).labels, answers.answered, answers.votes)


class EndlessVotes(_Careless):
    """Fits itself again before every call, so that no cap is ever reached."""

    def answer(self, X: ArrayLike, *, progress: Progress | None = None) -> Answers:
        """Answer as if it were the first time."""
        return super(_Careless, self.fit(*self._records)).answer(X, progress=progress)


class FreeScreening(PrivateKNeighborsClassifier):
    """Pays for votes, and screens for nothing."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit one estimator that screens and another that pays."""
        given = self.get_params(deep=False)
        self._screener = PrivateKNeighborsClassifier(**{**given, "ledger": None, "account": None}).fit(X, y)
        self.plan_ = self._screener.plan_
        votes = {"epsilon": None, "vote_noise": self.plan_.vote_noise, "n_neighbors": self.plan_.n_neighbors}
        unscreened = {"max_screened": 0, "screening_noise": None, "threshold": None}
        self._payer = PrivateKNeighborsClassifier(**{**given, **votes, **unscreened}).fit(X, y)
        return self

    def answer(self, X: ArrayLike, *, progress: Progress | None = None) -> Answers:
        """Screen with one estimator, and let the other vote on what passed."""
        screened: Answers = self._screener.answer(X, progress=progress)
        rows = np.flatnonzero(screened.answered)
        if not len(rows):
            return screened
        voted, votes, labels = self._payer.answer(np.asarray(X)[rows]), screened.votes.copy(), screened.labels.copy()
        votes[rows], labels[rows] = voted.votes, voted.labels
        return Answers(labels, screened.answered, votes)

    @property
    def guarantee(self) -> Guarantee:
        """What is stated, for screenings and votes."""
        stated: Guarantee = self._screener.guarantee
        return stated


class QuietDiscriminant(PrivateDiscriminant):
    """Publishes with about half of the noise that is charged."""

    def fit(self, X: ArrayLike, y: ArrayLike, public: ArrayLike | None = None) -> Self:
        """Pay for one discriminant, and show another."""
        super().fit(X, y, public=public)
        stated = self.guarantee
        given = {**self.get_params(deep=False), "epsilon": 3 * self.epsilon, "ledger": None, "account": None}
        loud = PrivateDiscriminant(**given).fit(X, y, public=public)
        self.statistics_, self._model = loud.statistics_, replace(loud.export(), guarantee=stated)
        return self


class FreeDiscriminant(PrivateDiscriminant):
    """Publishes and does not pay."""

    def fit(self, X: ArrayLike, y: ArrayLike, public: ArrayLike | None = None) -> Self:
        """Forget the account."""
        self.set_params(ledger=None, account=None)
        super().fit(X, y, public=public)
        return self
