"""The promise, in figures and in one sentence."""

import math
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from dp_accounting import DpEvent

Protects = Literal["query", "database"]
Relation = Literal["replace", "add-remove"]

_DOCUMENTATION = "docs/theory/"
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
        if self.sound == bool(self.reason):
            raise ValueError("reason must say why the guarantee is not sound, and only then")

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
        if self.epsilon == 0:
            sentence = f"{observer} learns nothing about {self._secret}"
        else:
            factor = (
                1 + _rounded_up(math.expm1(self.epsilon))
                if self.epsilon < math.log(2)
                else _rounded_up(math.exp(self.epsilon))
            )
            sentence = f"{observer} can change their odds about {self._secret} by at most a factor of {factor:.7g}"
        return sentence + (
            f", except with a probability of at most {_rounded_up(self.delta):.2g}." if self.delta else "."
        )

    @property
    def _secret(self) -> str:
        """What the observer is after."""
        if self.protects == "query":
            return f"which {self.unit} was asked for"
        if self.relation == "replace":
            return f"which {self.unit} any one record of the database is"
        return f"whether any one {self.unit} is in the database"


def _rounded_up(number: float) -> float:
    """Keep two digits of a positive number, rounded up: against the promise."""
    exponent = math.floor(math.log10(number)) - 1
    return float(f"{math.ceil(round(number / 10.0**exponent, 6)) * 10.0**exponent:.2g}")
