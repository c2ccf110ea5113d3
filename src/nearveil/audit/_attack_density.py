"""The hockey-stick estimate: with a density, the divergence itself, not one event of it."""

from dataclasses import dataclass

import numpy as np

from nearveil.audit._bounds import Floats, HockeyStick, ladder
from nearveil.audit._experiment import Outcomes

_BINS = 24
_RUNS_IN_A_BIN = 200
_LEAST_JUDGED = 25  # runs of P in a slice
_STRANGE = 6.5  # standard errors: 24 bins exceed that by chance once in 10^9 looks


@dataclass(frozen=True)
class Direction:
    """Which world the losses are drawn in, and what the choosing half promised."""

    swapped: bool
    promising: float


def choose_direction(
    first: Outcomes, second: Outcomes, epsilon: float, delta: float, mistake: float
) -> Direction | None:
    """Return the direction whose divergence shows more; none where the stated density is not that of the runs.

    Parameters
    ----------
    first, second : Outcomes
        Of as many runs in either world, with losses. All that were made for choosing: a density is not trained.
    epsilon, delta : float
        The promise.
    mistake : float

    Returns
    -------
    Direction or None
    """
    losses = first.losses, second.losses
    assert losses[0] is not None
    assert losses[1] is not None
    if not (agrees(losses[0], losses[1]) and agrees(-losses[1], -losses[0])):
        return None
    found = [
        Direction(swapped, HockeyStick(own).interval(delta, mistake, ladder(epsilon))[0])
        for swapped, own in ((False, losses[0]), (True, -losses[1]))
    ]
    return max(found, key=lambda one: one.promising)


def agrees(own: Floats, other: Floats) -> bool:
    """Say whether losses that were drawn under P and under Q can belong to one density.

    For every set B, ``Q(B) = E_P[e^(-L); B]``. The sets are slices of L. A density that fails is not used: an estimate
    that trusts it would be an estimate of something else. One that passes is still taken on trust.

    Parameters
    ----------
    own, other : ndarray of shape (n,)
        ``ln p/q`` of outcomes under P, and of outcomes under Q.

    Returns
    -------
    bool
    """
    bins = min(_BINS, max(2, len(own) // _RUNS_IN_A_BIN))
    edges = np.unique(np.quantile(np.concatenate([own, other]), np.linspace(0, 1, bins + 1), method="nearest"))
    # Equal losses share a slice; the first and the last have no end.
    slices = [np.searchsorted(edges[1:-1], losses, side="right") for losses in (own, other)]
    count = max(1, len(edges) - 1)
    weights = np.exp(-np.clip(own, -700, 700))
    expected = np.bincount(slices[0], weights, count) / len(own)
    squares = np.bincount(slices[0], weights**2, count) / len(own)
    found = np.bincount(slices[1], minlength=count) / len(other)
    # Where few outcomes of P stand for many of Q, weights are too wild to judge by.
    judged = np.bincount(slices[0], minlength=count) >= _LEAST_JUDGED
    spread = np.sqrt((squares - expected**2) / len(own) + np.maximum(found, 1 / len(other)) / len(other))
    # Densities are of cells as often as of points: a part in a thousand is forgiven.
    off = np.abs(found - expected) - 1e-3 * expected
    return bool(judged.any() and (off[judged] <= _STRANGE * spread[judged]).all())
