"""Small mechanisms to test the protocol with."""

from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.mechanisms import Message, Release
from nearveil.mechanisms.messages import candidate_count
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source

Floats = NDArray[np.float64]


def promise(epsilon: float) -> Guarantee:
    return Guarantee(
        epsilon=epsilon,
        delta=0.0,
        protects="query",
        unit="record",
        relation="replace",
        basis=Basis("randomised response"),
        events=(PureDp(epsilon),) if np.isfinite(epsilon) else (),
    )


class Plain(Release):
    """Sends the feature as it is, and promises nothing."""

    name = "plain"

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        pass

    def _release(self, features: Floats, source: Source) -> list[Message]:
        return self._messages(source, x=features)

    def _rank(self, message: Message, features: Floats) -> Floats:
        return np.asarray(features @ message["x"], dtype=np.float64)

    def _public_parts(self) -> tuple[object, ...]:
        return ()

    def _make_guarantee(self) -> Guarantee:
        return promise(np.inf)


class RandomCells(Release):
    """Randomised response over sets of equal size around every (1/f)-th item of the gallery."""

    name = "random-cells"
    centres_: Floats
    members_: NDArray[np.int64]

    def __init__(self, epsilon: float, candidates: float) -> None:
        self.epsilon = epsilon
        self.candidates = candidates

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        pass

    def index(self, gallery: ArrayLike) -> Self:
        rows = self.features(gallery, "gallery", lenient=True)
        count = candidate_count(self.candidates, len(rows))
        centres = rows[:: max(1, round(len(rows) * self.candidates))]
        members = np.argsort(-(centres @ rows.T), axis=1)[:, :count]
        return self._with_attributes(centres_=centres, members_=members)

    def _release(self, features: Floats, source: Source) -> list[Message]:
        own = (features @ self.centres_.T).argmax(axis=1)
        sets = len(self.centres_)
        keep = np.exp(self.epsilon) / (np.exp(self.epsilon) + sets - 1)
        coins = source.words(2 * len(own)).reshape(2, -1) / 2.0**64
        other = (own + 1 + (coins[1] * (sets - 1)).astype(int)) % sets
        sent = np.where(coins[0] < keep, own, other)
        return self._messages(source, cell=sent.astype(np.int32))

    def _rank(self, message: Message, features: Floats) -> Floats:
        scores = np.zeros(len(features))
        scores[self.members_[int(message["cell"])]] = 1
        return scores

    def _public_parts(self) -> tuple[object, ...]:
        return (self.epsilon, self.members_)

    def _make_guarantee(self) -> Guarantee:
        return promise(self.epsilon)


def clustered(seed: int, n: int, dimension: int = 16, classes: int = 12) -> tuple[Floats, NDArray[np.int64]]:
    """Return rows around class centres that do not depend on the seed, and their classes."""
    centres = np.random.default_rng(99).standard_normal((classes, dimension))
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, n)
    return centres[labels] + 0.8 * generator.standard_normal((n, dimension)), labels
