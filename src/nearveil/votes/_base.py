"""What all voting estimators have in common: pay, screen, pay, vote."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source, secure_source
from nearveil.votes._plan import Ballot, VotePlan, Wish, make_plan
from nearveil.votes._spending import Spending, find_account

Progress = Callable[[int], None]
"""Called with how many queries were finished since the last call."""


@dataclass(frozen=True)
class Tally:
    """What the private records say about a batch of queries. Never leaves the estimator.

    Attributes
    ----------
    rows : slice
        Which queries.
    sums : ndarray of int64
        Of the votes of one sample; the first axis is the queries'.
    largest : ndarray of float64, shape (n_batch,), or None
        The max-vote of another sample, where there is a screening.
    """

    rows: slice
    sums: NDArray[np.int64]
    largest: NDArray[np.float64] | None

    def __repr__(self) -> str:
        return "Tally(private)"


class VotingEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """Queries answered by votes of private records, up to caps fixed beforehand.

    Subclasses say what is voted on (`Ballot`) and how votes are counted (`_tallies`).

    Attributes
    ----------
    plan_ : VotePlan
        What may be asked and with how much noise.
    """

    epsilon: float | None
    delta: float
    max_answered: int
    plan_: VotePlan

    def _open(self, ballot: Ballot, wish: Wish, *, unit: str) -> None:
        """Fix the plan, and find who pays."""
        self.plan_ = make_plan(wish, ballot)
        self._guarantee = self.plan_.guarantee(wish.delta, unit=unit, sound=bool(self._source.sound))
        parameters: dict[str, Any] = self.get_params(deep=False)
        account = find_account(parameters["ledger"], parameters["account"], self.plan_, self._guarantee)
        self._spending = Spending(self.plan_, account)

    @property
    def guarantee(self) -> Guarantee:
        """The promise of everything answered so far and of everything that the caps still allow.

        How many queries pass the screening depends on the records, and when a caller stops may depend on the answers.
        So what happened to be asked is no ground for a smaller figure; the caps are.
        """
        check_is_fitted(self)
        return self._guarantee

    @abstractmethod
    def _tallies(self, queries: NDArray[np.float64], progress: Progress | None) -> Iterator[Tally]:
        """Count the votes on each query, a batch at a time."""

    def _release(self, sums: NDArray[np.int64]) -> NDArray[np.float64]:
        """Release the votes on queries that were paid for."""
        return self.plan_.votes.release(sums, self._source)

    @property
    def _source(self) -> Source:
        source: Source | None = self.get_params(deep=False)["source"]
        return secure_source() if source is None else source

    def _ask(
        self, queries: NDArray[np.float64], progress: Progress | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return which queries are answered, and the noisy sums of their votes."""
        spending, screening = self._spending, self.plan_.screening
        spending.assert_open()
        if screening is None:
            paid = spending.take("answered", len(queries))
            released = [self._release(tally.sums) for tally in self._tallies(queries[:paid], progress)]
            return np.arange(paid), np.concatenate(released) if released else np.zeros((0, self.plan_.size))
        paid = spending.take("screened", len(queries))
        tallies = list(self._tallies(queries[:paid], progress))
        largest = np.concatenate([tally.largest for tally in tallies if tally.largest is not None])
        passed = np.flatnonzero(screening.toss(largest, self._source))
        # Whether a query passed is public from here on; so is how many votes are paid for.
        chosen = passed[: spending.take("answered", len(passed))]
        return chosen, self._release(np.concatenate([tally.sums for tally in tallies])[chosen])
