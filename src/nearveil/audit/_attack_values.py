"""Whole outcomes as words: where few different ones come, how often each comes in either world."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.audit._attack_threshold import Score
from nearveil.audit._bounds import Floats
from nearveil.audit._experiment import Outcomes

_MOST = 4096  # different outcomes
_PRIOR = 0.5  # of a run, for each outcome that was not seen


def table(first: Outcomes, second: Outcomes) -> Score | None:
    """Score an outcome by the ratio of how often the very same one came in training.

    Parameters
    ----------
    first, second : Outcomes

    Returns
    -------
    callable or None
        None where outcomes hardly ever repeat.
    """
    rows = np.concatenate([first.numbers, second.numbers])
    known, place = np.unique(_words(rows), return_inverse=True)
    if len(known) > min(_MOST, len(rows) // 8 + 2):
        return None
    counts = [np.bincount(part, minlength=len(known)) for part in (place[: len(first)], place[len(first) :])]
    ratios = np.append(np.log((counts[0] + _PRIOR) / (counts[1] + _PRIOR)), 0.0)

    def score(outcomes: Outcomes) -> Floats:
        words = _words(outcomes.numbers)
        at = np.minimum(np.searchsorted(known, words), len(known) - 1)
        return np.asarray(ratios[np.where(known[at] == words, at, len(known))])

    return score


def _words(rows: NDArray[Any]) -> NDArray[np.void]:
    """Return each row as one word of its bytes."""
    plain = np.ascontiguousarray(rows)
    return plain.view(np.dtype((np.void, plain.dtype.itemsize * plain.shape[1]))).ravel()
