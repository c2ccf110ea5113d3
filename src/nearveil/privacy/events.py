"""What happened: frozen events, where dp-accounting has none.

An event says what was released and with how much noise; an accountant says what it costs
(:mod:`nearveil.privacy.accounting`). These events stand inside dp-accounting's own
``ComposedDpEvent``, ``SelfComposedDpEvent`` and ``PoissonSampledDpEvent``.

Events about neighbours' votes speak of databases that differ by one record added or removed. Their
sensitivities hold only if the order of neighbours is a total order that depends on the query and the
record alone: exact search, ties broken by record id. Pass the *unscaled* noise; the event knows the sensitivity.
"""

import math
from typing import Literal

import attr
from dp_accounting import DpEvent, GaussianDpEvent

from nearveil.privacy._checks import check_count, check_finite, check_positive

__all__ = [
    "Budgeted",
    "ClippedVotes",
    "GaussianNoisyMax",
    "LaplaceNoisyMax",
    "NoisyScreening",
    "PureDp",
    "VoteHistogram",
]


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PureDp(DpEvent):  # type: ignore[misc]
    """Any release that is epsilon-differentially private, with delta 0: randomised response, a cell, PrivUnit.

    Nothing else is known of it, so its cost is that of the worst such mechanism, randomised response on one bit.

    Parameters
    ----------
    epsilon : float
    """

    epsilon: float

    def __attrs_post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if check_finite(self.epsilon, "epsilon") < 0:
            raise ValueError("epsilon must not be negative")


@attr.s(frozen=True, slots=True, auto_attribs=True)
class Budgeted(DpEvent):  # type: ignore[misc]
    """Whatever a budget lets pass, its parameters chosen along the way: the guarantee of an account without a plan.

    No accountant prices it, so it neither composes nor is paid for; a guarantee states it within that budget alone.

    Parameters
    ----------
    epsilon : float
    delta : float
    """

    epsilon: float
    delta: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class NoisyScreening(DpEvent):  # type: ignore[misc]
    """Say whether the votes agree: max-vote + N(0, noise^2) >= threshold.

    One record more or less changes the max-vote, a whole number from 0 to `n_neighbors`, by at most 1.

    Parameters
    ----------
    noise : float
        Standard deviation.
    threshold : float
    n_neighbors : int
    """

    noise: float
    threshold: float
    n_neighbors: int

    def __attrs_post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        check_positive(self.noise, "noise")
        check_finite(self.threshold, "threshold")
        check_count(self.n_neighbors, "n_neighbors", least=1)

    @property
    def gaussian(self) -> GaussianDpEvent:
        """The Gaussian mechanism whose output, compared with the threshold, is this event's."""
        return GaussianDpEvent(self.noise)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class VoteHistogram(DpEvent):  # type: ignore[misc]
    """Release the neighbours' votes for each class, or the class that wins, plus N(0, noise^2) on every count.

    One neighbour enters and one leaves: L2 sensitivity sqrt(2).

    Parameters
    ----------
    noise : float
        Standard deviation on each count.
    """

    noise: float

    def __attrs_post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        check_positive(self.noise, "noise")

    @property
    def gaussian(self) -> GaussianDpEvent:
        """The same as a Gaussian mechanism of sensitivity 1."""
        return GaussianDpEvent(self.noise / math.sqrt(2))


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ClippedVotes(DpEvent):  # type: ignore[misc]
    """Release a sum of votes on many labels, each neighbour's votes scaled down to L1 norm `clip` (tau).

    Squared L2 sensitivity, one neighbour entering and one leaving (``docs/theory/accounting.md``, Lemma 7;
    attacked by ``test_accounting.py``): ``2 clip`` for votes of 0 and 1 (if clip is at least 1, else
    ``2 clip^2``), ``2 clip^2`` for other votes that are not negative, ``4 clip^2`` for votes of either sign.

    Parameters
    ----------
    noise : float
        Standard deviation on each label.
    clip : float
        Largest L1 norm of one neighbour's votes.
    votes : {"binary", "nonnegative", "signed"}
        What a vote is before the clipping.
    """

    noise: float
    clip: float
    votes: Literal["binary", "nonnegative", "signed"] = "signed"

    def __attrs_post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        check_positive(self.noise, "noise")
        check_positive(self.clip, "clip")
        if self.votes not in ("binary", "nonnegative", "signed"):
            raise ValueError('votes must be "binary", "nonnegative" or "signed"')

    @property
    def sensitivity(self) -> float:
        """The L2 sensitivity of the sum."""
        squares = {
            "binary": 2 * min(self.clip, self.clip**2),
            "nonnegative": 2 * self.clip**2,
            "signed": 4 * self.clip**2,
        }
        return math.sqrt(squares[self.votes])

    @property
    def gaussian(self) -> GaussianDpEvent:
        """The same as a Gaussian mechanism of sensitivity 1."""
        return GaussianDpEvent(self.noise / self.sensitivity)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class GaussianNoisyMax(DpEvent):  # type: ignore[misc]
    """PATE's GNMax: the class with the most teachers' votes after N(0, noise^2) on every count.

    One record sits with one teacher and can move its vote: L2 sensitivity sqrt(2).

    Parameters
    ----------
    noise : float
        Standard deviation on each count.
    """

    noise: float

    def __attrs_post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        check_positive(self.noise, "noise")

    @property
    def gaussian(self) -> GaussianDpEvent:
        """The same as a Gaussian mechanism of sensitivity 1."""
        return GaussianDpEvent(self.noise / math.sqrt(2))


@attr.s(frozen=True, slots=True, auto_attribs=True)
class LaplaceNoisyMax(DpEvent):  # type: ignore[misc]
    """PATE's LNMax: the class with the most teachers' votes after Laplace noise on every count.

    One vote moves: two counts change by 1 each.

    Parameters
    ----------
    noise : float
        Scale of the Laplace distribution (the inverse of the paper's gamma).
    """

    noise: float

    def __attrs_post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        check_positive(self.noise, "noise")
