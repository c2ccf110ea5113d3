"""Classifiers that are trained to tell the two worlds apart, from nothing but what is seen."""

import numpy as np
from numpy.typing import NDArray
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import HistGradientBoostingClassifier
from threadpoolctl import threadpool_limits

from nearveil.audit._bounds import Floats
from nearveil.audit._experiment import Outcomes
from nearveil.audit.attacks._threshold import Score

_MOST = 20_000  # outcomes of either world that a classifier learns from
_MOST_COLUMNS = 512


def linear(first: Outcomes, second: Outcomes) -> Score | None:
    """Learn the direction in which two noisy means differ most, in units of the noise.

    Returns: None where there is nothing to learn from.
    """
    rows, worlds = _examples(first, second)
    spread = rows.std(axis=0)
    if rows.shape[1] > _MOST_COLUMNS or not np.isfinite(rows).all() or not spread.any():
        return None
    middle, scale = rows.mean(axis=0), np.where(spread > 0, spread, 1.0)
    with threadpool_limits(1):
        model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=1e-3).fit((rows - middle) / scale, worlds)
    direction = model.coef_[0] / scale

    def score(outcomes: Outcomes) -> Floats:
        return np.asarray((outcomes.numbers - middle) @ direction, dtype=np.float64)

    return score


def boosted(first: Outcomes, second: Outcomes) -> Score | None:
    """Learn any difference, by boosted trees."""
    return boosted_on(first, second, lambda outcomes: outcomes.numbers)


def boosted_on(first: Outcomes, second: Outcomes, look: object) -> Score | None:
    """Learn by boosted trees from what `look` makes of outcomes."""
    assert callable(look)
    rows, worlds = _examples(
        *(Outcomes(np.asarray(look(part.part(slice(0, _MOST)))), None) for part in (first, second))
    )
    if rows.shape[1] > _MOST_COLUMNS or not rows.std(axis=0).any():
        return None
    model = HistGradientBoostingClassifier(
        max_iter=60, max_leaf_nodes=15, min_samples_leaf=20, early_stopping=False, random_state=0
    )
    with threadpool_limits(1):  # so that the same runs give the same trees everywhere
        model.fit(rows, worlds)

    def score(outcomes: Outcomes) -> Floats:
        with threadpool_limits(1):
            return np.asarray(model.decision_function(np.asarray(look(outcomes), dtype=np.float64)))

    return score


def _examples(first: Outcomes, second: Outcomes) -> tuple[Floats, NDArray[np.int64]]:
    """Return some outcomes of either world, and 1 for those of the first."""
    parts = [np.asarray(part.numbers[:_MOST], dtype=np.float64) for part in (first, second)]
    worlds = np.repeat([1, 0], [len(part) for part in parts])
    return np.concatenate(parts), worlds
