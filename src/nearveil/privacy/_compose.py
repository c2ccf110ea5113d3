"""How guarantees become one: through an accountant, never by hand."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from dp_accounting import DpEvent

from nearveil.privacy._guarantee import (
    Basis,
    FilterTerms,
    Guarantee,
    Protects,
    Relation,
    bound_epsilon,
    count_events,
    find_epsilon,
    freeze_event,
)
from nearveil.privacy.accounting import RenyiFilter
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source

_LINK = "docs/theory/accounting.md"


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
        happened (`events`). What their samplers cost (`extra_delta`) is added up. Those of a filter
        (`within`) compose within a filter of all their events alone, and that of an account without a plan
        not at all. With `delta`, parts (:meth:`Guarantee.part`) are refused: compose their wholes. So is what
        promises nothing: an infinite epsilon, or a delta of 1.
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
    if any(guarantee.is_vacuous for guarantee in guarantees):
        raise ValueError(
            "guarantees must promise something: of an infinite epsilon or a delta of 1 nobody checks events"
        )
    if (delta is None) == (within is None):
        raise ValueError("give delta (parameters fixed beforehand) or within (chosen along the way), one of the two")
    merged: dict[str, Any] = {
        "events": tuple(event for guarantee in guarantees for event in guarantee.events),
        "extra_delta": sum(guarantee.extra_delta for guarantee in guarantees),
        "source": "seeded" if any(guarantee.source == "seeded" for guarantee in guarantees) else "system",
        "whole": None,
    }
    reasons = list(dict.fromkeys(guarantee.reason for guarantee in guarantees if not guarantee.sound))
    stated = _fixed(guarantees, delta, **merged) if within is None else _filtered(within, **merged)
    return replace(guarantees[0], sound=not reasons, reason="; ".join(reasons), **merged, **stated)


def compose_events(
    events: Iterable[DpEvent],
    *,
    delta: float,
    protects: Protects,
    unit: str,
    relation: Relation,
    basis: Basis,
    extra_delta: float = 0.0,
) -> Guarantee:
    """Return the guarantee of events whose parameters are fixed beforehand, with the least epsilon at `delta`.

    Parameters
    ----------
    events : iterable of DpEvent
        ``SelfComposedDpEvent(event, count)`` for repetitions.
    delta : float
        From 0 to 1; at 0 only pure mechanisms have a finite epsilon.
    protects : {"query", "database"}
    unit : str
    relation : {"replace", "add-remove"}
    basis : Basis
    extra_delta : float, default=0.0
        The part of `delta` that samplers cost.

    Returns
    -------
    Guarantee

    Examples
    --------
    >>> from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    >>> ten = compose_events(
    ...     [SelfComposedDpEvent(GaussianDpEvent(20.0), 10)], delta=1e-5, protects="database", unit="record",
    ...     relation="add-remove", basis=Basis("Gaussian mechanism"),
    ... )
    >>> f"{ten.epsilon:.3f}"
    '0.561'
    """
    happened = tuple(map(freeze_event, events))
    return Guarantee(
        epsilon=bound_epsilon(find_epsilon(count_events(happened), delta - extra_delta), extra_delta),
        delta=delta,
        protects=protects,
        unit=unit,
        relation=relation,
        basis=basis,
        events=happened,
        extra_delta=extra_delta,
    )


def _fixed(guarantees: Sequence[Guarantee], delta: float | None, **merged: Any) -> dict[str, Any]:
    if any(guarantee.within is not None for guarantee in guarantees):
        raise ValueError(
            "within must be given: parameters of some guarantees were chosen along the way, and the filter of all "
            "their events is the only promise; an epsilon computed afterwards would not be one"
        )
    if any(guarantee.whole is not None for guarantee in guarantees):
        raise ValueError(
            "guarantees must be wholes, not parts: how many parts happened may depend on the answers, so compose the "
            "whole that was fixed beforehand (guarantee.whole), once"
        )
    extra_delta = merged["extra_delta"]
    if delta is None or not 0 <= extra_delta < delta < 1:
        raise ValueError("delta must lie between 0, or what the samplers cost, and 1")
    return {
        "epsilon": bound_epsilon(find_epsilon(count_events(merged["events"]), delta - extra_delta), extra_delta),
        "delta": delta,
        "basis": Basis("PLD accountant, parameters fixed beforehand", _LINK),
    }


def _filtered(within: RenyiFilter, **merged: Any) -> dict[str, Any]:
    extra_delta = merged["extra_delta"]
    if not (extra_delta >= 0 and within.delta + extra_delta < 1):
        raise ValueError("extra_delta must not be negative, nor lift delta to 1")
    if Counter(dict(count_events(merged["events"]))) != Counter(dict(within.spent)):
        raise ValueError("within must be the filter that let exactly these events pass")
    return {
        "epsilon": bound_epsilon(within.epsilon, extra_delta),
        "delta": within.delta + extra_delta,
        "basis": Basis("Renyi filter, parameters chosen along the way", _LINK),
        "within": FilterTerms(within.epsilon, within.delta, within.orders),
    }


def noise_guarantee(
    noise: GaussianNoise | LaplaceNoise,
    *,
    delta: float,
    protects: Protects,
    unit: str,
    relation: Relation,
    source: Source,
) -> Guarantee:
    """Return what a release of values with `noise` promises.

    Parameters
    ----------
    noise : GaussianNoise or LaplaceNoise
        The specification; what its grid and tables cost is charged.
    delta : float
        Between ``noise.extra_delta`` and 1.
    protects : {"query", "database"}
    unit : str
    relation : {"replace", "add-remove"}
        That of the sensitivity.
    source : Source
        Where the randomness of the release came from: the one that `add_noise` was given. One that
        is not sound makes a guarantee that is not.

    Returns
    -------
    Guarantee

    Examples
    --------
    >>> from nearveil.privacy.noise import calibrate_gaussian, secure_source, unsafe_seeded
    >>> noise = calibrate_gaussian(1.0, 1e-5, sensitivity=2.0, size=64)
    >>> stated = {"delta": 1e-5, "protects": "query", "unit": "image", "relation": "replace"}
    >>> promise = noise_guarantee(noise, source=secure_source(), **stated)
    >>> f"{promise.epsilon:.3f}", promise.sound
    ('1.000', True)
    >>> print(noise_guarantee(noise, source=unsafe_seeded(7), **stated))
    No promise about which image was asked for: the noise came from a seed, so whoever knows the seed can take it away.
    """
    if not noise.extra_delta < delta < 1:
        raise ValueError(f"delta must lie between {noise.extra_delta:.1g}, which the sampler costs, and 1")
    return compose_events(
        [noise.event],
        delta=delta,
        extra_delta=noise.extra_delta,
        protects=protects,
        unit=unit,
        relation=relation,
        basis=Basis(f"{type(noise).__name__}, rounded, by its privacy loss", "docs/theory/noise.md"),
    ).with_source(source)
