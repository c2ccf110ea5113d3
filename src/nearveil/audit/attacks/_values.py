"""Whole outcomes as words: those that come more than once, and how often each comes in either world."""

import numpy as np

from nearveil.audit._bounds import Floats
from nearveil.audit._experiment import Outcomes
from nearveil.audit._law import row_hashes
from nearveil.audit.attacks._threshold import Score

_MOST = 4096  # different outcomes
_PRIOR = 0.5  # of a run, for each outcome that was not seen


def table(first: Outcomes, second: Outcomes) -> Score | None:
    """Score an outcome by the ratio of how often the very same one came in training.

    Returns: None where no outcome came twice.
    """
    every, place = np.unique(
        np.concatenate([row_hashes(first.numbers), row_hashes(second.numbers)]), return_inverse=True
    )
    counts = np.array([np.bincount(part, minlength=len(every)) for part in np.split(place, [len(first)])])
    often = np.argsort(-counts.sum(axis=0), kind="stable")[:_MOST]
    often = np.sort(often[counts.sum(axis=0)[often] > 1])
    if not len(often):
        return None
    known, (own, other) = every[often], counts[:, often] + _PRIOR
    ratios = np.append(np.log(own / other), 0.0)

    def score(outcomes: Outcomes) -> Floats:
        hashes = row_hashes(outcomes.numbers)
        at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        return np.asarray(ratios[np.where(known[at] == hashes, at, len(known))])

    return score
