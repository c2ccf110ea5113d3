"""Votes on classes, and on many labels at once."""

import math
from typing import Any

import numpy as np
from dp_accounting import DpEvent
from numpy.typing import NDArray
from scipy.special import ndtr

from nearveil.audit._experiment import Floats, Pair
from nearveil.audit._law import Coin, laplace_uniforms
from nearveil.audit.ballots._base import DIMENSION, Ballot, Bools, Database, Read
from nearveil.privacy.events import ClippedVotes, GaussianNoisyMax, LaplaceNoisyMax, VoteHistogram
from nearveil.votes import PateClassifier


class ClassVotes(Ballot):
    """Votes on classes, of neighbours or of teachers, whole or soft."""

    labelled = True

    @property
    def known(self) -> bool:
        """The default teacher names its record's class at the record's own place, whoever else is with it."""
        return not isinstance(self.own, PateClassifier) or self.own.estimator is None

    def read(self, answers: Any) -> Read:
        """Read labels, and votes for both classes."""
        return Read(answers.answered, np.nan_to_num(answers.votes), np.asarray(answers.labels))

    def consistent(self, read: Read) -> Bools:
        """Say whether a label is that of the most votes."""
        expected = np.where(read.answered, read.values.argmax(axis=1), -1)
        return np.asarray(read.labels == expected)

    def label_coins(self, labels: NDArray[Any], database: Database) -> list[Coin]:
        """Return how often each class wins."""
        rate, passes = self.plan.sampling_rate, self.passes(database)
        wins = [self._wins(float(sums[0] - sums[1])) for sums in (database.sums, database.without)]
        chance = float(np.dot([rate, 1 - rate], wins))
        # Screening and vote have a sample each, so that both chances multiply.
        return [(labels == 0, passes * chance), (labels == 1, passes * (1 - chance)), (labels == -1, 1 - passes)]

    def _wins(self, ahead: float) -> float:
        """Return the chance that class 0 wins, so many votes ahead."""
        if not self._laplace:
            return float(ndtr(ahead / (math.sqrt(2) * self.plan.vote_noise)))
        off = abs(ahead) / self.plan.vote_noise  # the difference of two Laplace numbers
        loses = math.exp(-off) * (2 + off) / 4
        return 1 - loses if ahead > 0 else loses

    @property
    def _laplace(self) -> bool:
        return isinstance(self.own, PateClassifier) and self.own.mechanism == "lnmax"

    @property
    def _whole(self) -> bool:
        return not self._soft

    @property
    def _soft(self) -> bool:
        return getattr(self.own, "votes", "classes") == "soft"

    def _public(self, voter: Any) -> dict[str, Any]:
        del voter
        return {"classes": [0, 1], "abstain_label": -1}

    def _event(self, noise: float) -> DpEvent:
        if isinstance(self.own, PateClassifier):
            return (LaplaceNoisyMax if self._laplace else GaussianNoisyMax)(noise)
        return VoteHistogram(noise)

    def _distance(self, off: Floats) -> Floats:
        return np.abs(off).sum(axis=-1) / self.plan.vote_noise if self._laplace else super()._distance(off)

    def _distribution(self, off: Floats) -> Floats:
        return laplace_uniforms(off) if self._laplace else super()._distribution(off)

    def vote(self, kind: int) -> Any:
        return self.worth(kind) if self._soft else np.int64(1 - kind)

    def worth(self, kind: int) -> Floats:
        return np.asarray(np.eye(2)[1 - kind])

    def _pairs(self) -> tuple[Pair, ...]:
        if not isinstance(self.own, PateClassifier):
            return super()._pairs()
        rows, most = np.eye(DIMENSION)[:2], float(self.own.n_teachers)
        before, after = np.array([most, 0.0]), np.array([most - 1, 1.0])
        # Teachers without records name class 0.
        without = Database(rows[1:], np.array([0]), before, before)
        return (Pair("a record alone with its teacher", Database(rows, np.array([1, 0]), after, before), without),)

    def _tallies(self) -> dict[int, str]:
        k, names = self.plan.n_neighbors, super()._tallies()
        if self.plan.sampling_rate == 1:
            names[k // 2 + 1] = "a record that flips the plurality"
            if self.plan.threshold is not None:
                names[int(min(max(round(self.plan.threshold), 1), k))] = "a record at the screening's threshold"
        return names


class LabelVotes(Ballot):
    """Votes on many labels at once, each record's scaled down to a clip."""

    labelled = True

    def read(self, answers: Any) -> Read:
        """Read zeros and ones, and votes for each label."""
        return Read(answers.answered, np.nan_to_num(answers.votes), np.asarray(answers.labels))

    def consistent(self, read: Read) -> Bools:
        """Say whether labels are those with enough votes."""
        expected = np.where(read.answered[:, None], read.values > self._least, -1)
        return np.asarray((read.labels == expected).all(axis=1))

    def label_coins(self, labels: NDArray[Any], database: Database) -> list[Coin]:
        """Return how often each label is given."""
        rate, noise = self.plan.sampling_rate, self.plan.vote_noise
        inside, outside = (ndtr((sums - self._least) / noise) for sums in (database.sums, database.without))
        return list(zip((labels == 1).T, rate * inside + (1 - rate) * outside, strict=True))

    @property
    def _least(self) -> float:
        """How many votes a label must have."""
        return 0.0 if self.own.votes == "signed" else float(self.plan.n_neighbors) / 2

    def _public(self, voter: Any) -> dict[str, Any]:
        # As many labels as make the clip matter: one record votes for the first half, another for the second.
        self._half = max(1, math.floor(voter.clip or 1)) if voter.votes == "binary" else 1
        return {"classes": list(range(2 * self._half)), "abstain_label": -1}

    def _event(self, noise: float) -> DpEvent:
        return ClippedVotes(noise, self.own.clip, self.own.votes)

    def vote(self, kind: int) -> Any:
        if self.own.votes == "signed":
            return np.array([self.own.clip if kind else -self.own.clip, 0.0])
        size = 1.0 if self.own.votes == "binary" else self.own.clip
        return np.repeat([size, 0.0] if kind else [0.0, size], self._half)

    def worth(self, kind: int) -> Floats:
        return np.asarray(self.vote(kind) * min(1.0, self.own.clip / np.abs(self.vote(kind)).sum()))
