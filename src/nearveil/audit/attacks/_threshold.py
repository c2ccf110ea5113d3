"""Threshold tests: an event "the score is at least t" that comes more often in one world than in the other."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nearveil.audit._bounds import Floats, event_epsilon
from nearveil.audit._experiment import Outcomes

Score = Callable[[Outcomes], Floats]

_CANDIDATES = 300  # thresholds, half of them deep in the tails


@dataclass(frozen=True)
class Event:
    """A set of outcomes, told by a score, and the world that it speaks for."""

    threshold: float
    above: bool  # whether it is the outcomes with a score of at least the threshold, or those below it
    swapped: bool  # whether it speaks for the second world against the first
    promising: float  # the epsilon that the choosing half showed. No bound: it was maximised

    def holds(self, scores: Floats) -> int:
        """Count the outcomes that are in the set."""
        return int(np.count_nonzero((scores >= self.threshold) == self.above))


def likelihood(outcomes: Outcomes) -> Floats:
    """Score by the log-likelihood ratio: the best score there is, if the density is right."""
    assert outcomes.losses is not None
    return outcomes.losses


def choose_event(first: Floats, second: Floats, delta: float, mistake: float) -> Event:
    """Choose the threshold, the side and the direction that show most on these scores.

    Whatever is chosen here is measured on other runs, so the choice need not be paid for.

    `first, second`: Scores of as many runs in either world.
    """
    thresholds = _thresholds(np.concatenate([first, second]))
    runs = len(first)
    up = [runs - np.searchsorted(np.sort(scores), thresholds) for scores in (first, second)]
    best: list[Event] = []
    for above in (True, False):
        counts = up if above else [runs - one for one in up]
        for swapped in (False, True):
            hits, false_hits = counts[::-1] if swapped else counts
            shown = event_epsilon(hits, false_hits, runs, delta, mistake)[0]
            at = int(np.argmax(shown))
            best.append(Event(float(thresholds[at]), above, swapped, float(shown[at])))
    return max(best, key=lambda event: event.promising)


def _thresholds(scores: Floats) -> Floats:
    """Return candidates: even in rank, and ever denser towards both ends, where rare outcomes tell most."""
    deep = np.geomspace(1 / len(scores), 0.5, _CANDIDATES // 4)
    shares = np.concatenate([np.linspace(0, 1, _CANDIDATES // 2), deep, 1 - deep])
    return np.unique(np.quantile(scores, shares, method="nearest"))
