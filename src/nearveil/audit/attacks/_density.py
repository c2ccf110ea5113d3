"""The hockey-stick estimate: with a density, the divergence itself, not one event of it."""

from dataclasses import dataclass

import numpy as np

from nearveil.audit._bounds import Floats, HockeyStick, ladder, proportion

_SLICES = 24
_RUNS_IN_A_SLICE = 200
_FORGIVEN = 1e-3  # part of a probability: densities are of cells as often as of points


@dataclass(frozen=True)
class Direction:
    """Which world the losses are drawn in, and what the choosing half promised."""

    swapped: bool
    promising: float


def choose_direction(first: Floats, second: Floats, epsilon: float, delta: float, mistake: float) -> Direction:
    """Return the direction whose divergence shows more.

    `first, second`: Losses in either world: all that were made for choosing, since a density is not trained.
    `epsilon, delta`: What is promised.
    """
    found = [
        Direction(swapped, HockeyStick(own).interval(delta, mistake, ladder(epsilon))[0])
        for swapped, own in ((False, first), (True, -second))
    ]
    return max(found, key=lambda one: one.promising)


@dataclass(frozen=True)
class Slices:
    """Sets of outcomes: those whose stated loss lies between two numbers, ends included."""

    low: Floats
    high: Floats

    @classmethod
    def choose(cls, losses: Floats) -> "Slices":
        """Choose slices that hold about as many outcomes each, by runs that do not judge.

        `losses`: Of both worlds.
        """
        ordered = np.sort(losses)
        count = min(_SLICES, max(2, len(losses) // _RUNS_IN_A_SLICE))
        starts = np.unique(ordered[(np.arange(count) * len(ordered)) // count])
        ends = np.append(np.searchsorted(ordered, starts[1:]), len(ordered)) - 1  # equal losses share a slice
        return cls(starts, ordered[ends])

    def misfit(self, first: Floats, second: Floats, mistake: float) -> str | None:
        """Say where the losses of other runs cannot be those of one density (Theorem 7).

        `first, second`: Stated losses ``ln p/q`` of outcomes under P, and of outcomes under Q.
        `mistake`: The probability with which a true density may be called false.
        """
        p, q = (
            proportion(self._hits(losses), len(losses), mistake / (2 * len(self.low))) for losses in (first, second)
        )
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            too_many = p[0] > np.exp(self.high) * q[1] * (1 + _FORGIVEN)
            too_few = p[1] < np.exp(self.low) * q[0] * (1 - _FORGIVEN)
            true = np.log(p[0] / q[1]), np.log(p[1] / q[0])
        wrong = np.flatnonzero(too_many | too_few)
        if not len(wrong):
            return None
        low, high, least, most = (float(ends[wrong[0]]) for ends in (self.low, self.high, *true))
        return f"where the stated log-ratio is {low:.3g} to {high:.3g}, it lies between {least:.3g} and {most:.3g}"

    def _hits(self, losses: Floats) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        ordered = np.sort(losses)
        found = np.searchsorted(ordered, self.high, side="right") - np.searchsorted(ordered, self.low)
        return found.astype(np.int64)
