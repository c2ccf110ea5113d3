"""What an audit found."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Verdict = Literal["kept", "broken", "undecided"]

FALSE_ALARM = 5e-7
"""The probability with which one audit may call a sound mechanism broken, all attacks and checks together."""

_TOLERANCE = (0.1, 0.05)  # of the promise, and at least: how far an interval may reach beyond it and still be "kept"


@dataclass(frozen=True)
class Attack:
    """What one attack showed.

    Attributes
    ----------
    name : str
    pair : str
        The inputs that it told apart best on the choosing half; empty where it was not measured.
    interval : (float, float) or None
        Of its epsilon, at the report's confidence. None where the attack was not measured.
    refutes : bool
        Whether it shows more than was promised, at its share of `FALSE_ALARM`.
    note : str
        Why it was not measured.
    """

    name: str
    pair: str = ""
    interval: tuple[float, float] | None = None
    refutes: bool = False
    note: str = ""


@dataclass(frozen=True)
class Check:
    """What one check of the mechanism's conduct found.

    Attributes
    ----------
    name : str
        What was checked: "the stated law", "caps".
    result : {"passed", "failed", "not run"}
        "failed" breaks the guarantee.
    detail : str
        What was found, or why the check was not run.
    """

    name: str
    result: Literal["passed", "failed", "not run"]
    detail: str = ""


@dataclass(frozen=True)
class Curve:
    """What the measured runs looked like, in a few hundred points.

    `kind`: Of events: how often a score passed each threshold, in either world. Of divergences: the hockey-stick
    divergence at each epsilon, and the bound from below.
    """

    kind: Literal["event", "divergence"]
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    chosen: tuple[float, float]  # the point that decided


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was promised, what could be shown, and how.

    Attributes
    ----------
    mechanism : str
    promised_epsilon, promised_delta : float
    shown_epsilon : float
        The lower end of the interval: no smaller epsilon can be true, at this confidence.
    interval : (float, float)
        Of the epsilon of this attack on this pair, not of the mechanism: another attack may show more.
    verdict : {"kept", "broken", "undecided"}
        "broken" if an attack shows more than was promised or a check failed, which happens to a sound mechanism with a
        probability of at most 5e-7. "kept" if not, and the interval neither begins above the promise nor ends beyond
        `limit`. Else "undecided": more trials would decide.
    limit : float
        How far the interval of a promise that is "kept" may reach: a tenth beyond it, and at least 0.05.
    attack : str
        The one that showed most on the choosing half.
    pair : str
        The inputs that it told apart.
    one_run : float or None
        What a single run with many records shows.
    trials : int
        Runs of either input, both halves.
    confidence : float
    sound : bool
        Whether the mechanism's own guarantee calls itself proved.
    seeded : bool
        Whether the runs came from a seed.
    attacks : tuple of Attack
        All of them, the one that decided first.
    checks : tuple of Check
    notes : tuple of str
    curve : Curve

    Examples
    --------
    >>> from nearveil.audit import audit
    >>> from nearveil.privacy.noise import unsafe_seeded
    >>> from nearveil.mechanisms import Cells
    >>> report = audit(Cells(1.0), trials=20_000, source=unsafe_seeded(0))  # a seed, so that this repeats
    >>> report.verdict, report.promised_epsilon, 0.8 < report.shown_epsilon <= 1.0
    ('kept', 1.0, True)
    """

    mechanism: str
    promised_epsilon: float
    promised_delta: float
    shown_epsilon: float
    interval: tuple[float, float]
    attack: str
    pair: str
    one_run: float | None
    trials: int
    confidence: float
    sound: bool
    seeded: bool
    attacks: tuple[Attack, ...] = ()
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    curve: Curve = field(repr=False)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the guarantee is broken; empty where it is not."""
        shown = [
            f"{one.name} shows epsilon {one.interval[0]:.4g} on {one.pair}"
            for one in self.attacks
            if one.refutes and one.interval is not None
        ]
        return (*shown, *(f"{one.name}: {one.detail}" for one in self.checks if one.result == "failed"))

    @property
    def passed(self) -> str:
        """How many checks passed, of those that were run; empty where none was."""
        run = [one for one in self.checks if one.result != "not run"]
        return f"{sum(one.result == 'passed' for one in run)}/{len(run)}" if run else ""

    @property
    def limit(self) -> float:
        """How far the interval of a promise that is "kept" may reach."""
        return self.promised_epsilon + max(_TOLERANCE[0] * self.promised_epsilon, _TOLERANCE[1])

    @property
    def verdict(self) -> Verdict:
        """What attacks and checks say about the promise."""
        if self.reasons:
            return "broken"
        low, high = self.interval
        return "kept" if low <= self.promised_epsilon and high <= self.limit else "undecided"

    @property
    def verdict_words(self) -> str:
        """The verdict, and whether the promise is marked unsound: then "kept" means that no attack here saw why."""
        doubtful = not self.sound and math.isfinite(self.promised_epsilon)
        return f"{self.verdict}, unsound" if doubtful else self.verdict

    @property
    def share(self) -> float:
        """The shown part of the promise: how sharp the audit was. Above 1 the promise is broken."""
        if math.isinf(self.promised_epsilon):
            return 0.0
        return self.shown_epsilon / self.promised_epsilon if self.promised_epsilon > 0 else math.inf

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values; infinite ones as text."""
        return dict(_plain({**asdict(self), "verdict": self.verdict, "reasons": self.reasons, "limit": self.limit}))

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(self.as_dict(), allow_nan=False)

    def plot(self, ax: "Axes | None" = None) -> "Figure":
        """Draw what was measured, and what the promise allows.

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Figure
        """
        from nearveil.audit._plots import draw

        return draw(self, ax)

    def __str__(self) -> str:
        return (
            f"{self.mechanism}: {self.verdict_words}. Promised epsilon {self.promised_epsilon:.4g}"
            f" (delta {self.promised_delta:.2g}), shown {self.shown_epsilon:.4g} by {self.attack} on {self.pair}."
            + "".join(f" {reason}." for reason in self.reasons)
        )


def _plain(value: Any) -> Any:
    """Turn what JSON does not know into what it does."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else str(float(value))
    return value
