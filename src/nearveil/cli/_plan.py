"""How a person writes releases, COUNTxEPSILON, and what events that means."""

import re
from enum import StrEnum

import typer
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent

from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import analytic_gaussian_scale

METAVAR = "COUNTxEPSILON"
MECHANISM_HELP = "What each release is: any pure epsilon-private one, Laplace noise, or Gaussian noise."


class Mechanism(StrEnum):
    """What each release of a plan is known to be."""

    pure = "pure"
    laplace = "laplace"
    gaussian = "gaussian"


def part(text: str) -> tuple[int, float]:
    """Read COUNTxEPSILON.

    Examples
    --------
    >>> part("500x0.5")
    (500, 0.5)
    """
    match = re.fullmatch(r"(\d+)x(\d*\.?\d+(?:e-?\d+)?)", text.strip().lower())
    count, epsilon = (int(match[1]), float(match[2])) if match else (0, 0.0)
    if not (1 <= count <= 10**9 and 1e-6 <= epsilon <= 50):
        raise typer.BadParameter(
            f"{text!r} is not COUNTxEPSILON with a count from 1 to a thousand million and an epsilon from 1e-6 to "
            "50, such as 500x0.5",
            param_hint="PLAN",
        )
    return count, epsilon


def event(mechanism: Mechanism, epsilon: float, delta: float) -> DpEvent:
    """Return one release; Gaussian noise is scaled for this epsilon at `delta`."""
    if mechanism == Mechanism.laplace:
        return LaplaceDpEvent(1 / epsilon)
    if mechanism == Mechanism.gaussian:
        return GaussianDpEvent(analytic_gaussian_scale(1.0, epsilon, delta))
    return PureDp(epsilon)
