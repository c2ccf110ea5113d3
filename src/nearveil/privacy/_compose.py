"""How guarantees become one: through an accountant, never by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace

from dp_accounting import ComposedDpEvent, DpEvent

from nearveil.privacy._guarantee import Basis, Guarantee
from nearveil.privacy.accounting import AdditionAccountant, PldAccountant, RenyiFilter
from nearveil.privacy.noise import LARGEST_EPSILON


def compose(
    guarantees: Sequence[Guarantee],
    *,
    delta: float | None = None,
    within: RenyiFilter | None = None,
) -> Guarantee:
    """Return what several releases about the same record promise together.

    Parameters
    ----------
    guarantees : sequence of Guarantee
        Of one record: they must protect the same thing, in the same unit and relation, and say what
        happened (`events`). What their samplers cost (`extra_delta`) is added up.
    delta : float, optional
        The delta of the whole, where the parameters of all releases were fixed before the first; they
        are composed by privacy loss distributions.
    within : RenyiFilter, optional
        The filter that let the releases pass, where parameters were chosen along the way. Its own
        epsilon and delta are then the promise; an epsilon computed afterwards would not be one.

    Returns
    -------
    Guarantee
        Unsound if one of them is, for the same reasons.

    Examples
    --------
    >>> from nearveil.privacy.events import PureDp
    >>> once = Guarantee(
    ...     epsilon=0.1, delta=0.0, protects="query", unit="image", relation="replace",
    ...     basis=Basis("randomised response"), events=(PureDp(0.1),),
    ... )
    >>> round(compose([once] * 100, delta=1e-5).epsilon, 2)
    4.31
    """
    if not guarantees:
        raise ValueError("guarantees must hold at least one guarantee")
    for field in ("protects", "unit", "relation"):
        if len({getattr(guarantee, field) for guarantee in guarantees}) > 1:
            raise ValueError(f"guarantees must agree in {field}: they are not about the same record")
    if not all(guarantee.events for guarantee in guarantees):
        raise ValueError("every guarantee must say what happened (events): nothing else can be composed")
    if (delta is None) == (within is None):
        raise ValueError("give delta (parameters fixed beforehand) or within (chosen along the way), one of the two")
    events = tuple(event for guarantee in guarantees for event in guarantee.events)
    extra_delta = sum(guarantee.extra_delta for guarantee in guarantees)
    reasons = list(dict.fromkeys(guarantee.reason for guarantee in guarantees if not guarantee.sound))
    epsilon, whole_delta, name = (
        _fixed(events, delta, extra_delta) if within is None else _filtered(events, within, extra_delta)
    )
    return replace(
        guarantees[0],
        epsilon=epsilon,
        delta=whole_delta,
        basis=Basis(name, "docs/theory/accounting.md"),
        sound=not reasons,
        reason="; ".join(reasons),
        events=events,
        extra_delta=extra_delta,
    )


def _fixed(events: Sequence[DpEvent], delta: float | None, extra_delta: float) -> tuple[float, float, str]:
    if delta is None or not 0 <= extra_delta < delta < 1:
        raise ValueError("delta must lie between 0, or what the samplers cost, and 1")
    accountant = PldAccountant()
    for event in events:
        accountant.compose(event)
    epsilon = accountant.epsilon(delta - extra_delta)
    if extra_delta and epsilon > LARGEST_EPSILON:  # beyond it the samplers' extra delta is not proved
        epsilon = math.inf
    return epsilon, delta, "PLD accountant, parameters fixed beforehand"


def _filtered(events: Sequence[DpEvent], within: RenyiFilter, extra_delta: float) -> tuple[float, float, str]:
    if not (extra_delta >= 0 and within.delta + extra_delta < 1):
        raise ValueError("extra_delta must not be negative, nor lift delta to 1")
    spent = AdditionAccountant().compose(ComposedDpEvent(list(events))).spent
    if sorted(map(repr, within.spent)) != sorted(map(repr, spent)):
        raise ValueError("within must be the filter that let exactly these events pass")
    return within.epsilon, within.delta + extra_delta, "Renyi filter, parameters chosen along the way"
