"""Private PCA: directions that a set of records chose, with one record replaced."""

from typing import Any

import numpy as np
from sklearn.base import clone

from nearveil.audit._experiment import Experiment, Floats, Pair
from nearveil.mechanisms import PrivatePCA
from nearveil.privacy.noise import Source

_TRIALS = 8_000  # every run is a fit


def projector_experiment(projector: PrivatePCA) -> Experiment:
    """Return the experiment of a private PCA: one record against one across it, in as few dimensions as possible."""
    own = clone(projector).set_params(mean=None)
    dimension = own.n_components + 1
    first, second = np.eye(dimension)[:1], np.eye(dimension)[-1:]
    promise = clone(own).fit(first).guarantee

    def run(rows: Floats, runs: int, source: Source) -> Floats:
        return np.array([clone(own).fit(rows, rng=source).components_.ravel() for _ in range(runs)])

    def numbers(seen: Floats) -> Any:
        # A direction has no sign: what counts is how much of it lies along each record.
        columns = seen.reshape(len(seen), own.n_components, dimension)
        return (columns**2)[:, :, [0, -1]].reshape(len(seen), -1)

    return Experiment(
        name=f"private-pca ({own.method})",
        promise=promise,
        pairs=(Pair("a record, and one across it", first, second),),
        run=run,
        numbers=numbers,
        trials=_TRIALS,
    )
