"""One run, many records: a fair coin for each, one run of the mechanism, and as many guesses as one likes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearveil.audit._bounds import Floats, one_run_epsilon, proportion
from nearveil.audit._experiment import Experiment, Pair
from nearveil.audit.attacks._threshold import Score
from nearveil.privacy.noise import Source

_MOST = 4096  # records
_SHARES = np.geomspace(0.002, 0.5, 40)


@dataclass(frozen=True)
class Guesser:
    """Guesses the first input from `high` on, the second up to `low`, and abstains between."""

    low: float
    high: float

    def __call__(self, scores: Floats) -> NDArray[np.int64]:
        """Return 1 for the first input, -1 for the second, 0 for no guess."""
        return (scores >= self.high).astype(np.int64) - (scores <= self.low)


def choose_guesser(first: Floats, second: Floats, mistake: float) -> Guesser:
    """Choose how sure the attacker has to be, on runs that are not used again.

    `first, second`: Scores in either world.
    """
    pooled = np.concatenate([first, second])
    best, most = Guesser(-np.inf, np.inf), -1.0
    for share in _SHARES:
        low, high = np.quantile(pooled, [share, 1 - share], method="nearest")
        guesser = Guesser(float(low), float(high)) if low < high else Guesser(float(np.nextafter(high, -1e300)), high)
        right = int((guesser(first) == 1).sum() + (guesser(second) == -1).sum())
        told = int((guesser(pooled) != 0).sum())
        shown = float(proportion(right, told, 2 * mistake)[0]) if told else 0.0
        if shown > most:
            best, most = guesser, shown
    return best


def one_run(
    experiment: Experiment, pair: Pair, score: Score, guesser: Guesser | None, mistake: float, source: Source
) -> float | None:
    """Run the mechanism once on many records and return the epsilon that the guesses show.

    Returns: None where the mechanism takes one record alone.
    """
    if experiment.together is None or guesser is None:
        return None
    delta = experiment.promise.delta
    # Half of the mistake may go to delta: the theorem pays delta for every record.
    records = _MOST if delta == 0 else int(min(_MOST, mistake / (2 * delta)))
    if records < 1:
        return 0.0
    coins = source.words(records) % np.uint64(2) == 1
    scores = score(experiment.outcomes(experiment.together(coins, pair, source), pair))
    told = guesser(scores)
    right = int(((told == 1) & coins).sum() + ((told == -1) & ~coins).sum())
    return one_run_epsilon(right, int((told != 0).sum()), records, delta, mistake)
