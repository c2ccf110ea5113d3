"""Guarantees, checked against their events, and their composition."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context, Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from nearveil.lazy import LateModule
from nearveil.privacy.checks import check_choice, check_count, check_text
from nearveil.privacy.noise import LARGEST_EPSILON, GaussianNoise, LaplaceNoise, Source

if TYPE_CHECKING:
    import attr
    import dp_accounting as dp
    from dp_accounting import DpEvent

    from nearveil.privacy import accounting
    from nearveil.privacy import events as privacy_events
    from nearveil.privacy.accounting import GaussianFilter, RenyiFilter, Spent
else:  # a client that sends no message needs no accountant
    attr, dp = LateModule("attr", "budget"), LateModule("dp_accounting", "budget")
    accounting = LateModule("nearveil.privacy.accounting", "budget")
    privacy_events = LateModule("nearveil.privacy.events", "budget")

Protects = Literal["query", "database"]
Relation = Literal["replace", "add-remove"]
Randomness = Literal["system", "seeded"]

_SEEDED = "the noise came from a seed, so anyone who knows the seed can remove it"
_LINK = "docs/theory/accounting.md"
_PRECISE = Context(prec=40)
_FAR = 1e6  # a larger change of the odds amounts to certainty
ROUNDING = 2.0**-40
"""Relative tolerance between an epsilon and the cost of its events: the rounding of doubles."""


def freeze_event(event: DpEvent) -> DpEvent:
    """Check an event again and make it immutable: lists inside it become tuples."""
    fields = attr.fields(type(event)) if attr.has(type(event)) else ()
    parts = {field.name: getattr(event, field.name) for field in fields}
    frozen = {name: _freeze(value) for name, value in parts.items() if isinstance(value, dp.DpEvent | list | tuple)}
    return attr.evolve(event, **frozen) if fields else event


def _freeze(value: object) -> object:
    return freeze_event(value) if isinstance(value, dp.DpEvent) else tuple(map(_freeze, value))  # type: ignore[call-overload]


def count_events(events: Iterable[DpEvent]) -> Spent:
    """Return the distinct mechanisms of events, each with its number of runs."""
    counts: dict[DpEvent, int] = {}
    for event in events:
        for leaf, times in privacy_events.split_event(event):
            counts[leaf] = counts.get(leaf, 0) + times
    return tuple((leaf, times) for leaf, times in counts.items() if times)


@lru_cache(maxsize=1024)
def find_epsilon(spent: Spent, delta: float) -> float:
    """Return the least epsilon of events with fixed parameters by any accountant (delta 0: a sum), or infinity."""
    if delta <= 0:
        return accounting.sum_pure_epsilons(spent)
    for accountant in (accounting.PldAccountant(spent), accounting.RdpAccountant(spent)):
        try:
            return accountant.epsilon(delta)
        except dp.UnsupportedEventError:
            continue
    return math.inf


def costs_at_most(spent: Spent, epsilon: float, delta: float) -> bool:
    """Return whether an accountant confirms that events with fixed parameters cost at most (epsilon, delta)."""
    allowed = epsilon * (1 + ROUNDING)
    return accounting.sum_pure_epsilons(spent) <= allowed or find_epsilon(spent, delta) <= allowed


@lru_cache(maxsize=1024)
def passes_filter(spent: Spent, epsilon: float, delta: float, orders: tuple[float, ...]) -> bool:
    """Return whether a filter admits all events: Renyi; without orders Gaussian, or at delta 0 summed pure epsilons."""
    if not delta:
        return accounting.sum_pure_epsilons(spent) <= epsilon * (1 + ROUNDING)
    gate = accounting.RenyiFilter(epsilon, delta, orders) if orders else accounting.GaussianFilter(epsilon, delta)
    return gate.may_spend(dp.ComposedDpEvent([dp.SelfComposedDpEvent(leaf, times) for leaf, times in spent]))


@dataclass(frozen=True)
class Basis:
    """Why a guarantee holds: a theorem or an accountant, with a link to its proof.

    Examples
    --------
    >>> print(Basis("Renyi filter", "docs/theory/accounting.md"))
    Renyi filter (docs/theory/accounting.md)
    """

    name: str
    link: str = "docs/theory/"

    def __str__(self) -> str:
        return f"{self.name} ({self.link})"


@dataclass(frozen=True)
class Assumption:
    """The hard problem behind a computational guarantee: the best known attack takes 2^bits steps.

    Examples
    --------
    >>> print(Assumption("LWE with n = 1024, Q = 2^26, sigma = 6.4 is hard", 132))
    LWE with n = 1024, Q = 2^26, sigma = 6.4 is hard (the best attack known takes about 2^132 steps)
    """

    name: str
    bits: int

    def __post_init__(self) -> None:
        check_text(self.name, "name")
        check_count(self.bits, "bits", least=1)

    def __str__(self) -> str:
        return f"{self.name} (the best attack known takes about 2^{self.bits} steps)"


class _ValidatedOnUnpickling:
    """A dataclass that validates its fields when it is unpickled, because the bytes may have been changed."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(vars(type(self)(**state)))


@dataclass(frozen=True)
class FilterTerms(_ValidatedOnUnpickling):
    """The budget of a filter for adaptive mechanisms.

    With `orders` a Renyi filter; without, a Gaussian filter or, at delta 0, summed pure epsilons.
    """

    epsilon: float
    delta: float
    orders: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.epsilon >= 0 or not 0 <= self.delta < 1 or (self.orders and not self.delta):
            raise ValueError("within must have an epsilon from 0 upwards, and no orders where delta is 0")
        _store_floats(self, "epsilon", "delta")
        object.__setattr__(self, "orders", tuple(map(float, self.orders)))


@dataclass(frozen=True, kw_only=True)
class Guarantee(_ValidatedOnUnpickling):
    """A privacy guarantee: its figures, the record it protects, and its proof.

    Immutable, and validated on construction and unpickling: an accountant must confirm that the events cost at most
    (epsilon, delta) (``docs/theory/guarantee.md``). Compose guarantees with an accountant
    (:func:`nearveil.privacy.compose`), never by adding their figures. No guarantee covers the fact that a query was
    made, nor its time, frequency and origin.

    Examples
    --------
    >>> from nearveil.privacy.events import PureDp
    >>> guarantee = Guarantee(
    ...     epsilon=2.0, delta=0.0, protects="query", unit="image", relation="replace", basis=Basis("PrivUnit"),
    ...     events=(PureDp(2.0),),
    ... )
    >>> print(guarantee)
    Seeing this message changes the odds between any two images by at most a factor of 7.4.
    >>> replace(guarantee, epsilon=1.0)
    Traceback (most recent call last):
    ValueError: epsilon must be at least what the events cost: epsilon 2.0 at delta 0
    """

    epsilon: float  #: from 0 to infinity; infinity guarantees nothing
    delta: float  #: from 0 to 1
    protects: Protects  #: the owner of the protected record: "query" or "database"
    unit: str  #: one record, in words that follow "which": "image", "person with all images"
    relation: Relation  #: the difference between two inputs that must look alike: "replace" or "add-remove"
    basis: Basis  #: the theorem or accountant, with a link to its documentation
    sound: bool = True  #: whether it is proved; an unsound guarantee needs a `reason`, and its figures are not checked
    reason: str = ""  #: why it is not sound
    #: The releases, for accountants. A sound one needs any, unless epsilon is infinite, or it and delta are 0.
    events: tuple[DpEvent, ...] = ()
    #: The part of `delta` that samplers of finite precision cost; events do not include it. Proved up to epsilon 64.
    extra_delta: float = 0.0
    #: "system" or "seeded". Guarantees of seeded releases are never sound; :meth:`with_source` sets it.
    source: Randomness = "system"
    #: The filter that admitted the events, if their parameters were chosen adaptively. Its epsilon and delta are the
    #: guarantee's. Without a filter, the parameters were fixed in advance.
    within: FilterTerms | None = None
    #: The guarantee that includes these events; its figures hold for the part too. See :meth:`part`.
    whole: Guarantee | None = None
    #: The assumptions of the encryption, if a part of the message is encrypted. The guarantee is then computational: it
    #: holds only against observers who cannot solve these problems.
    assumptions: tuple[Assumption, ...] = ()

    def __post_init__(self) -> None:
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon must be a number from 0 upwards, or infinity; got {self.epsilon!r}")
        if not 0 <= self.delta <= 1:
            raise ValueError(f"delta must be a probability from 0 to 1; got {self.delta!r}")
        check_choice(self.protects, "protects", Protects)
        check_choice(self.relation, "relation", Relation)
        if not self.unit.strip():
            raise ValueError('unit must say what one record is, such as "image" or "person with all images"')
        if not isinstance(self.basis, Basis):
            raise ValueError("basis must be a Basis: the name of a theorem or accountant, and a link")
        if not all(isinstance(item, Assumption) for item in self.assumptions):
            raise ValueError("assumptions must be a tuple of Assumption")
        object.__setattr__(self, "assumptions", tuple(self.assumptions))
        self._check_soundness()
        self._check_events()
        if self.sound and not self.is_vacuous:
            self._check_cost()

    @property
    def adaptivity(self) -> Literal["fixed", "adaptive"]:
        """Whether parameters were fixed in advance, or chosen adaptively within a filter."""
        return "fixed" if self.within is None else "adaptive"

    @property
    def is_computational(self) -> bool:
        """Whether it rests on a computational assumption."""
        return bool(self.assumptions)

    @property
    def is_vacuous(self) -> bool:
        """Whether it guarantees nothing (infinite epsilon, or delta 1). It is not checked, composed or debited."""
        return math.isinf(self.epsilon) or self.delta == 1

    def with_source(self, source: Source) -> Guarantee:
        """Return the guarantee of this release with the randomness of `source`: unsound if it is seeded."""
        return self if getattr(source, "sound", False) is True else self.as_seeded()

    def as_seeded(self) -> Guarantee:
        """Return the guarantee of the same release with seeded randomness, which is unsound."""
        if self.source == "seeded":
            return self
        reason = f"{self.reason}; {_SEEDED}" if self.reason else _SEEDED
        return replace(self, sound=False, reason=reason, source="seeded")

    def part(self, event: DpEvent, count: int = 1) -> Guarantee:
        """Return the guarantee of `count` repetitions of one event; the figures of the whole cover this part."""
        events = (dp.SelfComposedDpEvent(event, check_count(count, "count", least=1)),)
        return replace(self, events=events, whole=self if self.whole is None else self.whole)

    def _check_soundness(self) -> None:
        if not isinstance(self.sound, bool) or self.sound == bool(self.reason.strip()):
            raise ValueError("sound must be True, or False with a reason that says why")
        check_choice(self.source, "source", Randomness)
        if self.source == "seeded" and self.sound:
            raise ValueError("sound must be False if the source is seeded: anyone who knows the seed can repeat it")

    def _check_events(self) -> None:
        if not 0 <= self.extra_delta <= self.delta:
            raise ValueError("extra_delta must be a part of delta")
        _store_floats(self, "epsilon", "delta", "extra_delta")
        if not all(isinstance(event, dp.DpEvent) for event in self.events):
            raise ValueError("events must be dp-accounting events, or nearveil's own")
        object.__setattr__(self, "events", tuple(map(freeze_event, self.events)))
        if self.relation == "replace" and any(needs_add_remove(event) for event in self.events):
            raise ValueError(
                'relation must be "add-remove": sampling, votes and screenings are priced for one record more or less'
            )

    def _check_cost(self) -> None:
        """Raise unless an accountant confirms the figures."""
        if self.extra_delta and self.epsilon > LARGEST_EPSILON:
            raise ValueError(
                f"epsilon must be at most {LARGEST_EPSILON:g}, or infinity, where extra_delta is above 0: beyond it "
                "the cost of samplers is not proved"
            )
        if not self.events:
            if self.epsilon == self.delta == 0:  # nothing is released
                return
            raise ValueError("events must not be empty: without them, epsilon and delta cannot be checked")
        if self.whole is not None:
            self._check_part(self.whole)
        elif self.within is not None:
            self._check_filter(self.within)
        else:
            spent, delta = count_events(self.events), self.delta - self.extra_delta
            if not costs_at_most(spent, float(self.epsilon), float(delta)):
                cost = format_rounded_up(find_epsilon(spent, delta), 4)
                raise ValueError(f"epsilon must be at least what the events cost: epsilon {cost} at delta {delta:.4g}")

    def _check_filter(self, terms: FilterTerms) -> None:
        if self.epsilon < terms.epsilon or self.delta < terms.delta + self.extra_delta:
            raise ValueError("epsilon and delta must be those of the filter, and extra_delta on top")
        if self.events == (privacy_events.Budgeted(terms.epsilon, terms.delta),):
            return
        if not passes_filter(count_events(self.events), terms.epsilon, terms.delta, terms.orders):
            raise ValueError("events must be within the filter: it would not have admitted them")

    def _check_part(self, whole: Guarantee) -> None:
        if not isinstance(whole, Guarantee):
            raise ValueError("whole must be a Guarantee")
        same = ("protects", "unit", "relation", "sound", "extra_delta", "source", "within", "assumptions")
        if any(getattr(self, field) != getattr(whole, field) for field in same):
            raise ValueError("whole must be about the same record, source and filter as its part")
        if self.epsilon < whole.epsilon or self.delta < whole.delta:
            raise ValueError("epsilon and delta must be those of the whole, which the events are a part of")
        planned = dict(count_events(whole.events))
        if any(times > planned.get(leaf, 0) for leaf, times in count_events(self.events)):
            raise ValueError("events must be a part of the whole: one of them happens more often than it may")

    def __deepcopy__(self, memo: dict[int, Any]) -> Guarantee:
        return self  # immutable

    def __add__(self, other: object) -> NoReturn:
        raise TypeError("guarantees are not added by hand: nearveil.privacy.compose([...]) asks an accountant")

    def __str__(self) -> str:
        if not self.sound:
            return f"No guarantee about {self._secret}: {self.reason}."
        if self.is_vacuous:
            return f"Nothing is guaranteed about {self._secret}."
        if not self.assumptions:
            return self._describe()
        assumptions, figures = " and ".join(map(str, self.assumptions)), self._describe()
        caution = "This is a computational guarantee, not an unconditional one."
        return f"As long as {assumptions}, {figures[0].lower()}{figures[1:]} {caution}"

    def _describe(self) -> str:
        """Explain the figures."""
        observer = "Anyone who sees the message" if self.protects == "query" else "Anyone who sees the answers"
        if self.epsilon > math.log(_FAR):
            return (
                f"{observer} may be almost certain about {self._secret}: "
                "a factor of more than a million protects nothing."
            )
        if self.epsilon == self.delta == 0 and self.protects == "query" and not self.assumptions:
            return f"Nothing is revealed about {self._secret}: no message depends on it."
        if self.epsilon == self.delta == 0:
            return f"{observer} learns nothing about {self._secret}."
        seeing = "Seeing this message" if self.protects == "query" else "Seeing the answers"
        factor = format_factor(self.epsilon)
        if self.delta == 0:
            return f"{seeing} changes the odds {self._compared} by at most a factor of {factor}."
        return (
            f"{seeing} makes any conclusion about {self._secret} at most {factor} times as likely as it would be "
            f"otherwise, plus {format_rounded_up(self.delta)}."
        )

    @property
    def _compared(self) -> str:
        """The alternatives that a pure guarantee compares."""
        if (self.protects, self.relation) != ("query", "replace"):
            return f"about {self._secret}"
        first, *rest = self.unit.split(" ", 1)
        return f"between any two {' '.join([f'{first}s', *rest])}"

    @property
    def _secret(self) -> str:
        """The fact that is protected."""
        if self.protects == "query":
            return f"which {self.unit} was queried"
        if self.relation == "replace":
            return f"which {self.unit} any one record of the database is"
        return f"whether any one {self.unit} is in the database"


def bound_epsilon(epsilon: float, extra_delta: float) -> float:
    """Return epsilon, or infinity if samplers cost something and their cost is not proved up to this epsilon."""
    return math.inf if extra_delta and epsilon > LARGEST_EPSILON else epsilon


def _store_floats(stated: Guarantee | FilterTerms, *fields: str) -> None:
    """Store figures as plain floats: a one-element array could be changed in place."""
    for field in fields:
        object.__setattr__(stated, field, float(getattr(stated, field)))


def format_factor(epsilon: float) -> str:
    """Format e^epsilon, rounded up; near 1, with two digits of the excess over 1."""
    exact = Decimal(repr(float(epsilon))).exp(_PRECISE)
    return f"{1 + Decimal(format_rounded_up(exact - 1)) if exact < 2 else Decimal(format_rounded_up(exact)):f}"


def format_rounded_up(number: float | Decimal, digits: int = 2) -> str:
    """Format a number with a few digits, rounded up."""
    exact = number if isinstance(number, Decimal) else Decimal(repr(float(number)))
    rounded = Context(prec=digits, rounding=ROUND_CEILING).plus(exact)
    return f"{rounded:f}" if exact == 0 or 1e-4 <= exact < 1e7 else f"{rounded:.{digits - 1}e}"


def needs_add_remove(event: DpEvent) -> bool:
    """Return whether an event, or one inside it, is only priced for one record added or removed."""
    votes = privacy_events.NoisyScreening | privacy_events.VoteHistogram | privacy_events.ClippedVotes
    if isinstance(event, dp.PoissonSampledDpEvent | votes):
        return True
    inside = [
        *getattr(event, "events", ()),
        *(getattr(event, field) for field in ("event", "screening") if hasattr(event, field)),
    ]
    return any(needs_add_remove(part) for part in inside)


def compose(
    guarantees: Sequence[Guarantee], *, delta: float | None = None, within: RenyiFilter | GaussianFilter | None = None
) -> Guarantee:
    """Return the guarantee of several releases about the same record together; unsound if one of them is.

    Parameters
    ----------
    guarantees : sequence of Guarantee
        They must agree in `protects`, `unit` and `relation`, have `events`, and a finite epsilon and a delta below 1.
    delta : float, optional
        The delta of the whole, if the parameters of all releases were fixed before the first; composed by privacy loss
        distributions. Parts (:meth:`Guarantee.part`) are refused: compose their wholes.
    within : RenyiFilter or GaussianFilter, optional
        The filter that admitted the releases, if parameters were chosen adaptively. Its epsilon and delta are the
        guarantee; an epsilon computed afterwards would not hold.

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
        raise ValueError("guarantees must contain at least one guarantee")
    for field in ("protects", "unit", "relation"):
        if len({getattr(guarantee, field) for guarantee in guarantees}) > 1:
            raise ValueError(f"guarantees must agree in {field}: they are not about the same record")
    if not all(guarantee.events or guarantee.epsilon == guarantee.delta == 0 for guarantee in guarantees):
        raise ValueError("every guarantee must have events: nothing else can be composed")
    if any(guarantee.is_vacuous for guarantee in guarantees):
        raise ValueError(
            "guarantees must guarantee something: with an infinite epsilon or a delta of 1, events are not checked"
        )
    if (delta is None) == (within is None):
        raise ValueError("pass exactly one of delta (parameters fixed in advance) and within (chosen adaptively)")
    merged: dict[str, Any] = {
        "events": tuple(event for guarantee in guarantees for event in guarantee.events),
        "extra_delta": sum(guarantee.extra_delta for guarantee in guarantees),
        "source": "seeded" if any(guarantee.source == "seeded" for guarantee in guarantees) else "system",
        "whole": None,
        "assumptions": tuple(dict.fromkeys(item for guarantee in guarantees for item in guarantee.assumptions)),
    }
    reasons = list(dict.fromkeys(guarantee.reason for guarantee in guarantees if not guarantee.sound))
    stated = _compose_fixed(guarantees, delta, **merged) if within is None else _compose_filtered(within, **merged)
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
    """Return the guarantee of events with fixed parameters, with the least epsilon at `delta`.

    At delta 0 only pure mechanisms have a finite epsilon. `extra_delta` is the part of `delta` that samplers cost; the
    other parameters are those of :class:`Guarantee`.

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
    frozen = tuple(map(freeze_event, events))
    return Guarantee(
        epsilon=bound_epsilon(find_epsilon(count_events(frozen), delta - extra_delta), extra_delta),
        delta=delta,
        protects=protects,
        unit=unit,
        relation=relation,
        basis=basis,
        events=frozen,
        extra_delta=extra_delta,
    )


def _compose_fixed(guarantees: Sequence[Guarantee], delta: float | None, **merged: Any) -> dict[str, Any]:
    if any(guarantee.within is not None for guarantee in guarantees):
        raise ValueError(
            "within must be given: parameters of some guarantees were chosen adaptively, and the filter of all "
            "their events is the only guarantee; an epsilon computed afterwards would not hold"
        )
    if any(guarantee.whole is not None for guarantee in guarantees):
        raise ValueError(
            "guarantees must be wholes, not parts: how many parts happened may depend on the answers, so compose the "
            "whole that was fixed in advance (guarantee.whole), once"
        )
    extra_delta = merged["extra_delta"]
    if delta is None or not 0 <= extra_delta < delta < 1:
        raise ValueError("delta must be between 0, or the cost of the samplers, and 1")
    return {
        "epsilon": bound_epsilon(find_epsilon(count_events(merged["events"]), delta - extra_delta), extra_delta),
        "delta": delta,
        "basis": Basis("PLD accountant, parameters fixed beforehand", _LINK),
    }


def _compose_filtered(within: RenyiFilter | GaussianFilter, **merged: Any) -> dict[str, Any]:
    extra_delta = merged["extra_delta"]
    if not (extra_delta >= 0 and within.delta + extra_delta < 1):
        raise ValueError("extra_delta must not be negative, nor raise delta to 1")
    if Counter(dict(count_events(merged["events"]))) != Counter(dict(within.spent)):
        raise ValueError("within must be the filter that admitted exactly these events")
    return {
        "epsilon": bound_epsilon(within.epsilon, extra_delta),
        "delta": within.delta + extra_delta,
        "basis": Basis(f"{'Renyi' if within.orders else 'Gaussian'} filter, parameters chosen adaptively", _LINK),
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
    """Return the guarantee of a release of values with `noise`, including the cost of its grid and tables.

    `relation` is that of the sensitivity. `source` is the argument of `add_noise`; an unsound source makes an unsound
    guarantee. `delta` is between ``noise.extra_delta`` and 1.

    Examples
    --------
    >>> from nearveil.privacy.noise import calibrate_gaussian, secure_source, unsafe_seeded
    >>> noise = calibrate_gaussian(1.0, 1e-5, sensitivity=2.0, size=64)
    >>> stated = {"delta": 1e-5, "protects": "query", "unit": "image", "relation": "replace"}
    >>> guarantee = noise_guarantee(noise, source=secure_source(), **stated)
    >>> f"{guarantee.epsilon:.3f}", guarantee.sound
    ('1.000', True)
    >>> print(noise_guarantee(noise, source=unsafe_seeded(7), **stated))
    No guarantee about which image was queried: the noise came from a seed, so anyone who knows the seed can
    remove it.
    """
    if not noise.extra_delta < delta < 1:
        raise ValueError(f"delta must be between {noise.extra_delta:.1g}, the cost of the sampler, and 1")
    return compose_events(
        [noise.event],
        delta=delta,
        extra_delta=noise.extra_delta,
        protects=protects,
        unit=unit,
        relation=relation,
        basis=Basis(f"{type(noise).__name__}, rounded, by its privacy loss", "docs/theory/noise.md"),
    ).with_source(source)
