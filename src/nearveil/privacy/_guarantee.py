"""The promise, in figures and in one sentence."""

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Literal, NoReturn, get_args

from dp_accounting import DpEvent, PoissonSampledDpEvent

from nearveil.privacy.events import ClippedVotes, NoisyScreening, VoteHistogram

Protects = Literal["query", "database"]
Relation = Literal["replace", "add-remove"]

_DOCUMENTATION = "docs/theory/"
_PRECISE = Context(prec=40)
_FAR = 1e6  # whose odds may change by more than this may as well be certain


@dataclass(frozen=True)
class Basis:
    """Why a promise holds.

    Attributes
    ----------
    name : str
        A theorem or an accountant.
    link : str
        Where the documentation proves it.
    """

    name: str
    link: str = _DOCUMENTATION

    def __str__(self) -> str:
        return f"{self.name} ({self.link})"


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What is promised, to whom, and why it is true.

    Immutable. Guarantees compose through an accountant (:func:`nearveil.privacy.compose`), never by
    adding their figures. No guarantee covers that a query was made, when, how often and from where.

    Parameters
    ----------
    epsilon : float
        From 0 to infinity; infinity promises nothing.
    delta : float
        From 0 to 1.
    protects : {"query", "database"}
        Whose record it is.
    unit : str
        What one record is, in words that follow "which": "image", "person with all images".
    relation : {"replace", "add-remove"}
        How two inputs that shall look alike differ.
    basis : Basis
        The theorem or accountant, with a link to its documentation.
    sound : bool, default=True
        Whether the promise is proved. One that is not needs a `reason`.
    reason : str, default=""
        Why the promise is not sound.
    events : tuple of dp_accounting.DpEvent, default=()
        What happened, for accountants.
    extra_delta : float, default=0.0
        The part of `delta` that no event tells of: what samplers of finite precision cost.

    Examples
    --------
    >>> promise = Guarantee(
    ...     epsilon=2.0, delta=0.0, protects="query", unit="image", relation="replace", basis=Basis("PrivUnit")
    ... )
    >>> print(promise)
    Whoever sees the message can change their odds about which image was asked for by at most a factor of 7.4.
    """

    epsilon: float
    delta: float
    protects: Protects
    unit: str
    relation: Relation
    basis: Basis
    sound: bool = True
    reason: str = ""
    events: tuple[DpEvent, ...] = ()
    extra_delta: float = 0.0

    def __post_init__(self) -> None:
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon must be a number from 0 upwards, or infinity; got {self.epsilon!r}")
        if not 0 <= self.delta <= 1:
            raise ValueError(f"delta must be a probability from 0 to 1; got {self.delta!r}")
        if self.protects not in get_args(Protects):
            raise ValueError(f'protects must be "query" or "database"; got {self.protects!r}')
        if self.relation not in get_args(Relation):
            raise ValueError(f'relation must be "replace" or "add-remove"; got {self.relation!r}')
        if not self.unit.strip():
            raise ValueError('unit must say what one record is, such as "image" or "person with all images"')
        if not isinstance(self.basis, Basis):
            raise ValueError("basis must be a Basis: the name of a theorem or accountant, and a link")
        self._check_soundness_and_events()

    def _check_soundness_and_events(self) -> None:
        if not isinstance(self.sound, bool) or self.sound == bool(self.reason.strip()):
            raise ValueError("sound must be True, or False with a reason that says why")
        if not 0 <= self.extra_delta <= self.delta:
            raise ValueError("extra_delta must be a part of delta")
        object.__setattr__(self, "events", tuple(self.events))
        if not all(isinstance(event, DpEvent) for event in self.events):
            raise ValueError("events must be dp-accounting events, or nearveil's own")
        if self.relation == "replace" and any(_needs_add_remove(event) for event in self.events):
            raise ValueError(
                'relation must be "add-remove": sampling, votes and screenings are priced for one record more or less'
            )

    def __add__(self, other: object) -> NoReturn:
        raise TypeError("guarantees are not added by hand: nearveil.privacy.compose([...]) asks an accountant")

    def __str__(self) -> str:
        if not self.sound:
            return f"No promise about {self._secret}: {self.reason}."
        if math.isinf(self.epsilon) or self.delta == 1:
            return f"Nothing is promised about {self._secret}."
        observer = "Whoever sees the message" if self.protects == "query" else "Whoever sees the answers"
        if self.epsilon > math.log(_FAR):
            return (
                f"{observer} may be next to certain about {self._secret}: "
                "a factor of more than a million protects nothing."
            )
        if self.delta == 0:
            if self.epsilon == 0:
                return f"{observer} learns nothing about {self._secret}."
            return (
                f"{observer} can change their odds about {self._secret} by at most a factor of {factor(self.epsilon)}."
            )
        return (
            f"{observer} comes to any conclusion about {self._secret} with at most {factor(self.epsilon)} times the "
            f"probability that it would have otherwise, plus {rounded_up(self.delta)}."
        )

    @property
    def _secret(self) -> str:
        """What the observer is after."""
        if self.protects == "query":
            return f"which {self.unit} was asked for"
        if self.relation == "replace":
            return f"which {self.unit} any one record of the database is"
        return f"whether any one {self.unit} is in the database"


def factor(epsilon: float) -> str:
    """Write e^epsilon, rounded up: against the promise. Near 1, two digits of what exceeds 1."""
    exact = Decimal(repr(float(epsilon))).exp(_PRECISE)
    return f"{1 + Decimal(rounded_up(exact - 1)) if exact < 2 else Decimal(rounded_up(exact)):f}"


def rounded_up(number: float | Decimal, digits: int = 2) -> str:
    """Write a number with a few digits, rounded up."""
    exact = number if isinstance(number, Decimal) else Decimal(repr(float(number)))
    rounded = Context(prec=digits, rounding=ROUND_CEILING).plus(exact)
    return f"{rounded:f}" if exact == 0 or 1e-4 <= exact < 1e7 else f"{rounded:.{digits - 1}e}"


def _needs_add_remove(event: DpEvent) -> bool:
    """Say whether an event, or one inside it, is priced for one record more or less alone."""
    if isinstance(event, PoissonSampledDpEvent | NoisyScreening | VoteHistogram | ClippedVotes):
        return True
    inside = [
        *getattr(event, "events", ()),
        *(getattr(event, part) for part in ("event", "screening") if hasattr(event, part)),
    ]
    return any(_needs_add_remove(one) for one in inside)
