"""Numbers: the mean of the voters' values, and their median by bisection."""

import math
from typing import Any

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent
from scipy.special import ndtr

from nearveil.audit._experiment import Floats, Pair
from nearveil.audit._law import Coin
from nearveil.audit.ballots._base import Ballot, Database, Read

_FAR = 12.0  # standard deviations that nothing is released beyond


class MeanVotes(Ballot):
    """The mean of the voters' numbers, seen as their sum: a number at one end of the range, or at the other."""

    @property
    def known(self) -> bool:
        """Where noise hardly ever leaves the range: what is cut off has another law."""
        ends = self.plan.n_neighbors * self._reach
        farthest = max(float(np.abs(one.sums).max()) for pair in self.pairs for one in (pair.first, pair.second))
        return farthest + _FAR * self.plan.vote_noise < ends and self.plan.sampling_rate == 1

    def read(self, answers: Any) -> Read:
        """Read the sum from the mean."""
        answered = ~np.isnan(answers)
        sums = (np.nan_to_num(answers, nan=self._middle) - self._middle) * self.plan.n_neighbors
        return Read(answered, np.where(answered, sums, 0.0)[:, None], np.empty((len(answered), 0)))

    @property
    def _middle(self) -> float:
        return (float(self.own.low) + float(self.own.high)) / 2

    @property
    def _reach(self) -> float:
        return (float(self.own.high) - float(self.own.low)) / 2

    def _event(self, noise: float) -> DpEvent:
        return GaussianDpEvent(noise / (2 * self._reach))

    def vote(self, kind: int) -> Any:
        return np.float64(self.own.high if kind else self.own.low)

    def worth(self, kind: int) -> Floats:
        return np.array([self._reach if kind else -self._reach])

    def _tallies(self) -> dict[int, str]:
        return {self.plan.n_neighbors // 2 + 1: "a number at one end of the range, or at the other"}


class MedianVotes(MeanVotes):
    """The median by bisection, seen as the turns it took: all voters lie at the ends, so every turn is one coin."""

    @property
    def known(self) -> bool:
        """Where all turns see the same voters."""
        return self.plan.sampling_rate == 1

    def read(self, answers: Any) -> Read:
        """Read the turns: 1 where the bisection went up."""
        answered, depth = ~np.isnan(answers), int(self.own.depth)
        part = (np.nan_to_num(answers, nan=self.own.low) - self.own.low) / (2 * self._reach)
        cells = np.clip(np.floor(part * 2**depth), 0, 2**depth - 1).astype(np.int64)
        turns = (cells[:, None] >> np.arange(depth)[::-1]) & 1
        return Read(answered, np.where(answered[:, None], turns, 0).astype(np.float64), np.empty((len(answered), 0)))

    def losses(self, values: Floats, pair: Pair) -> Floats:
        """Return the log-likelihood ratio of turns, of shape (..., depth)."""
        first, second = (self._up(database) for database in (pair.first, pair.second))
        return np.asarray(
            np.where(values > 0, math.log(first / second), math.log((1 - first) / (1 - second))).sum(axis=-1)
        )

    def uniforms(self, values: Floats, database: Database) -> list[Floats]:
        """Return nothing: turns are coins."""
        del values, database
        return []

    def coins(self, values: Floats, database: Database) -> list[Coin]:
        """Return the turns."""
        return [(turn > 0, self._up(database)) for turn in values.T]

    def _up(self, database: Database) -> float:
        """Return the chance of a turn up: half the surplus of high voters, with noise, is above 0."""
        surplus = float(database.sums[0]) / self._reach
        return float(ndtr(surplus / 2 / self.plan.vote_noise))

    def _event(self, noise: float) -> DpEvent:
        return GaussianDpEvent(noise / math.sqrt(self.own.depth))
