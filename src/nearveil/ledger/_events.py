"""Events as text: the single mechanisms of an event, in one exact and canonical form."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import dp_accounting as dp
from dp_accounting import DpEvent

from nearveil.privacy import Guarantee
from nearveil.privacy import events as own
from nearveil.privacy._checks import check_count, check_finite
from nearveil.privacy._guarantee import Protects, Relation, _needs_add_remove, count_events
from nearveil.privacy.accounting._leaves import SampledScreening, leaves

Events: TypeAlias = DpEvent | Iterable[DpEvent | tuple[DpEvent, int]]
"""One event, or several, each perhaps with how often it happens."""

Charge: TypeAlias = tuple[tuple[str, int], ...]
"""The canonical text of each single mechanism and how often it happens, sorted by the text."""

_MOST = 2**63 - 1
_SHARE, _LEAST_SHARE = 1e-5, 1e-20  # of an account's delta, that samplers may cost with one mechanism; at least


def canonical_json(value: object) -> str:
    """Return the one JSON text of a value: sorted, without spaces, floats to the last bit, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _float(value: Any) -> float:
    return check_finite(value, "events: a parameter")


def _whole(value: Any) -> int:
    return check_count(value, "events: a count")


def _event(value: Any) -> DpEvent | dict[str, Any]:
    return _decoded(value) if isinstance(value, dict) else _encoded(value)


def _events(value: Any) -> list[Any]:
    return [_event(one) for one in value]


# What each field is. The same function reads a field and writes it: floats and counts are themselves in JSON, an
# event becomes a dictionary and a dictionary an event.
_FIELDS: dict[type[DpEvent], dict[str, Callable[[Any], Any]]] = {
    dp.NoOpDpEvent: {},
    dp.NonPrivateDpEvent: {},
    dp.GaussianDpEvent: {"noise_multiplier": _float},
    dp.LaplaceDpEvent: {"noise_multiplier": _float},
    dp.RandomizedResponseDpEvent: {"noise_parameter": _float, "num_buckets": _whole},
    dp.ZCDpEvent: {"rho": _float, "xi": _float},
    dp.dp_event.RepeatAndSelectDpEvent: {"event": _event, "mean": _float, "shape": _float},
    dp.PoissonSampledDpEvent: {"sampling_probability": _float, "event": _event},
    dp.SelfComposedDpEvent: {"event": _event, "count": _whole},
    dp.ComposedDpEvent: {"events": _events},
    own.PureDp: {"epsilon": _float},
    own.NoisyScreening: {"noise": _float, "threshold": _float, "n_neighbors": _whole},
    own.VoteHistogram: {"noise": _float},
    own.ClippedVotes: {"noise": _float, "clip": _float, "votes": str},
    own.GaussianNoisyMax: {"noise": _float},
    own.LaplaceNoisyMax: {"noise": _float},
    SampledScreening: {"sampling_rate": _float, "screening": _event},
}
_TYPES: Mapping[str, type[DpEvent]] = {kind.__name__: kind for kind in _FIELDS}


def _encoded(event: DpEvent) -> dict[str, Any]:
    fields = _FIELDS.get(type(event))
    if fields is None:
        raise ValueError(f"events: the ledger has no text for {type(event).__name__}; use one that accountants price")
    return {"type": type(event).__name__} | {name: write(getattr(event, name)) for name, write in fields.items()}


def _decoded(value: Mapping[str, Any]) -> DpEvent:
    kind = _TYPES.get(value.get("type", ""))
    if kind is None or set(value) != {"type", *_FIELDS[kind]}:
        raise ValueError("events: this text is of no event that is known here")
    return kind(**{name: read(value[name]) for name, read in _FIELDS[kind].items()})


def event_text(event: DpEvent) -> str:
    """Return the canonical text of an event.

    Examples
    --------
    >>> event_text(dp.GaussianDpEvent(4))
    '{"noise_multiplier":4.0,"type":"GaussianDpEvent"}'
    """
    return canonical_json(_encoded(event))


def text_event(text: str) -> DpEvent:
    """Return the event of a canonical text.

    Examples
    --------
    >>> text_event('{"noise_multiplier":4.0,"type":"GaussianDpEvent"}')
    GaussianDpEvent(noise_multiplier=4.0)
    """
    return _decoded(json.loads(text))


def charge_of(events: Events, relation: Relation) -> Charge:
    """Return the single mechanisms of `events`, counted, equal ones together.

    Compositions are unfolded, and nearveil's own events put in terms of known ones, as accountants do; so two ways to
    say the same thing have one text.

    `relation`: Of the account. Events that are priced for one record more or less are refused in the other.

    Examples
    --------
    >>> charge_of([(own.PureDp(0.5), 2), dp.SelfComposedDpEvent(own.PureDp(0.5), 3)], "replace")
    (('{"epsilon":0.5,"type":"PureDp"}', 5),)
    """
    counts: Counter[str] = Counter()
    for event, times in _pairs(events):
        if relation == "replace" and _needs_add_remove(event):
            raise ValueError(
                "events: sampling, votes and screenings are priced for one record more or less; "
                'this account is "replace"'
            )
        for leaf, repeats in leaves(event, times):
            if repeats:
                counts[event_text(leaf)] += repeats
    if not counts:
        raise ValueError("events must hold at least one mechanism that happens at least once")
    return _checked(counts)


def repeated(charge: Charge, times: int) -> Charge:
    """Return a charge that happens several times."""
    return _checked({text: count * times for text, count in charge})


def joined(charges: Iterable[Charge]) -> Charge:
    """Return several charges as one."""
    counts: Counter[str] = Counter()
    for charge in charges:
        counts.update(dict(charge))
    return _checked(counts)


def _checked(counts: Mapping[str, int]) -> Charge:
    if any(count > _MOST for count in counts.values()):
        raise ValueError("events: a count is larger than any ledger holds")
    return tuple(sorted(counts.items()))


def guarantee_charge(guarantee: Guarantee, protects: Protects, unit: str, relation: Relation, delta: float) -> Charge:
    """Return what a guarantee costs an account, after checking that it is about what the account protects.

    `delta`: All four of the account.
    """
    if not isinstance(guarantee, Guarantee):
        raise TypeError(
            "guarantee must be a Guarantee: the ledger pays for nothing else. Mechanisms have one (release.guarantee); "
            "nearveil.privacy.compose_events makes one of events of your own"
        )
    if not guarantee.sound:
        raise ValueError("guarantee is not sound, so no budget covers it")
    if guarantee.is_vacuous:
        raise ValueError("guarantee promises nothing (epsilon is infinite, or delta 1), so nobody checked its events")
    if guarantee.protects != protects:
        raise ValueError(f"guarantee protects a {guarantee.protects}, this account a {protects}")
    # Every message is charged, whatever it asks for: an account of queries covers any unit. Of a database it does not:
    # a person with ten rows is in each answer ten times.
    if protects == "database" and guarantee.unit != unit:
        raise ValueError(f"guarantee is about the unit {guarantee.unit!r}, this account about {unit!r}")
    if guarantee.relation != relation:
        raise ValueError(f'guarantee is for "{guarantee.relation}", this account for "{relation}"')
    whole = guarantee if guarantee.whole is None else guarantee.whole
    check_samplers(whole.events, whole.extra_delta, delta)
    return charge_of(guarantee.events, relation)


def check_samplers(events: Iterable[DpEvent], extra_delta: float, delta: float) -> None:
    """Refuse events whose samplers add more to an account's delta than docs/theory/ledger.md allows.

    `extra_delta`: What their samplers cost; the events do not tell of it.
    `delta`: Of the account.
    """
    mechanisms = sum(times for _, times in count_events(events))
    if extra_delta > mechanisms * max(_SHARE * delta, _LEAST_SHARE):
        raise ValueError(
            f"guarantee: extra_delta is above {_SHARE:g} of this account's delta for each mechanism, and no event "
            "tells of it; open an account with a larger delta, or for screenings with a smaller epsilon"
        )


def _pairs(events: Events) -> list[tuple[DpEvent, int]]:
    if not isinstance(events, DpEvent | Iterable):
        raise ValueError("events must be a DpEvent, or a list of DpEvent or of (DpEvent, count)")
    parts = [events] if isinstance(events, DpEvent) else list(events)
    pairs = [part if isinstance(part, tuple) and len(part) == 2 else (part, 1) for part in parts]
    if not all(isinstance(event, DpEvent) for event, _ in pairs):
        raise ValueError("events must be a DpEvent, or a list of DpEvent or of (DpEvent, count)")
    return [(event, check_count(times, "events: a count", least=1)) for event, times in pairs]


def charge_events(charge: Charge) -> tuple[tuple[DpEvent, int], ...]:
    """Return a charge as events with counts."""
    return tuple((text_event(text), times) for text, times in charge)
