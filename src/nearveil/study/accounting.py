"""``python -m nearveil.study.accounting``: what the settings published for Private-kNN really cost.

The published table claims epsilon 0.47 (MNIST) and 0.49 (SVHN). The same parameters are priced by every accountant,
and from below by asking the worst fixed pair of databases again and again.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dp_accounting import DpEvent, PoissonSampledDpEvent
from rich.console import Console
from rich.table import Table

from nearveil.privacy.accounting import (
    Accountant,
    PldAccountant,
    RdpAccountant,
    fixed_pair_epsilon,
    private_knn_asymptotic,
    screening_epsilon,
)
from nearveil.privacy.events import NoisyScreening, VoteHistogram

DELTA = 1e-5
WHOLE_ORDERS = tuple(map(float, range(2, 257)))


@dataclass(frozen=True)
class Plan:
    """Parameters of Private-kNN as published."""

    sampling_rate: float
    screening: NoisyScreening
    screened: int
    vote_noise: float
    answered: int
    claimed: float | None


PLANS = {
    "MNIST": Plan(0.15, NoisyScreening(75.0, 180.0, 300), 1000, 25.0, 735, 0.47),
    "SVHN": Plan(0.05, NoisyScreening(85.0, 210.0, 300), 4000, 5.0, 2939, 0.49),
    "8192 screenings": Plan(0.25, NoisyScreening(85.0, 210.0, 300), 8192, 25.0, 0, None),
}
ACCOUNTANTS: dict[str, tuple[Callable[[], Accountant], bool]] = {
    "RDP as published (Gaussian, classic conversion)": (
        lambda: RdpAccountant(orders=WHOLE_ORDERS, conversion="classic"),
        False,
    ),
    "RDP (Gaussian), tight conversion": (RdpAccountant, False),
    "RDP (screening exact), tight conversion": (RdpAccountant, True),
    "PLD, Gaussian": (PldAccountant, False),
    "Bellman for screening + PLD for votes": (PldAccountant, True),
}


def cost(plan: Plan, make: Callable[[], Accountant], exact: bool, *, votes: bool = True) -> float:
    """Return the epsilon of a plan; `exact` screenings, or the Gaussian mechanism that they come from."""
    screening: DpEvent = plan.screening if exact else plan.screening.gaussian
    accountant = make().compose(PoissonSampledDpEvent(plan.sampling_rate, screening), plan.screened)
    if votes:
        accountant.compose(PoissonSampledDpEvent(plan.sampling_rate, VoteHistogram(plan.vote_noise)), plan.answered)
    return accountant.epsilon(DELTA)


def lower_bound(plan: Plan) -> float:
    """Return the exact epsilon of the screenings for the worst of some fixed pairs near the threshold."""
    middle = round(plan.screening.threshold)
    return max(
        fixed_pair_epsilon(
            plan.screened,
            plan.screening,
            (t, t + 1),
            sampling_rate=plan.sampling_rate,
            delta=DELTA,
            direction=direction,
        )
        for t in range(middle - 5, middle + 6)
        for direction in ("add", "remove")
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(arguments)
    console = Console()
    table = Table(title=f"epsilon at delta {DELTA:g}")
    columns = [("MNIST", False), ("MNIST", True), ("SVHN", True), ("8192 screenings", True)]
    for heading in ("accounting", *(f"{name}{'' if votes else ' screening'}" for name, votes in columns)):
        table.add_column(heading, justify="left" if heading == "accounting" else "right")
    claims = [PLANS[name].claimed if votes else None for name, votes in columns]
    table.add_row("claimed", *("" if claim is None else f"{claim:g}" for claim in claims))
    for name, (make, exact) in ACCOUNTANTS.items():
        table.add_row(name, *(f"{cost(PLANS[plan], make, exact, votes=votes):.6f}" for plan, votes in columns))
    lowest = [f"{lower_bound(PLANS[name]):.6f}" for name in ("MNIST", "8192 screenings")]
    table.add_row("lower bound (worst fixed pair, screenings alone)", lowest[0], "", "", lowest[1])
    console.print(table)
    plan = PLANS["SVHN"]
    for as_published in (True, False):
        theorem = private_knn_asymptotic(
            plan.screened,
            plan.answered,
            sampling_rate=plan.sampling_rate,
            noise=plan.screening.noise,
            vote_noise=plan.vote_noise,
            delta=DELTA,
            as_published=as_published,
        )
        constant = "20 (published)" if as_published else "13.86"
        console.print(f"Theorem 2 with constant {constant}, SVHN: {theorem.epsilon:.1f} (applies: {theorem.applies})")
    plan, start = PLANS["8192 screenings"], time.perf_counter()
    screening_epsilon(
        plan.screened - 1,  # one less: the table's value is remembered
        sampling_rate=plan.sampling_rate,
        noise=plan.screening.noise,
        threshold=plan.screening.threshold,
        n_neighbors=plan.screening.n_neighbors,
        delta=DELTA,
    )
    console.print(f"8191 screenings by Bellman's equation: {time.perf_counter() - start:.1f} s on one core")


if __name__ == "__main__":
    main()
