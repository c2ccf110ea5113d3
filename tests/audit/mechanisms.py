"""Small mechanisms whose law is known, to test the audit with."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from nearveil.audit import Experiment, Pair
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import unsafe_seeded

SURE = 1 - 1e-6
"""The confidence of tests: an interval is wrong with a probability of at most 1e-6, each end with half of it."""


def promise(epsilon: float, delta: float = 0.0) -> Guarantee:
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        protects="query",
        unit="bit",
        relation="replace",
        basis=Basis("a claim"),
        events=(PureDp(epsilon),),
    )


def repeatable(experiment: Experiment) -> Experiment:
    """Return the same with coins of its own seed, for callers that cannot be given one."""
    source = unsafe_seeded(11)
    return replace(experiment, run=lambda given, runs, _: experiment.run(given, runs, source))


def coin(epsilon: float, truth: float | None = None, *, known: bool = True) -> Experiment:
    """Randomised response on a bit that has epsilon `truth`, and promises `epsilon`."""
    hit = 1 / (1 + math.exp(-(epsilon if truth is None else truth)))
    weight = math.log(hit / (1 - hit))

    def run(bit: int, runs: int, source: Any) -> Any:
        lies = source.words(runs) >= np.uint64(int(hit * 2**64))
        return (bit ^ lies.astype(np.int64))[:, None]

    return Experiment(
        name="a bit",
        guarantee=promise(epsilon),
        pairs=(Pair("one and zero", 1, 0),),
        run=run,
        log_ratio=(lambda seen, _: np.where(seen[:, 0] == 1, weight, -weight)) if known else None,
        trials=20_000,
    )
