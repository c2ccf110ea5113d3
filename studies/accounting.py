"""What the settings published for Private-kNN really cost: claimed, priced by every accountant, and from below."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from dp_accounting import DpEvent, PoissonSampledDpEvent
from dp_accounting.pld import privacy_loss_distribution as pld
from matplotlib.figure import Figure
from scipy.optimize import brentq
from scipy.stats import binom, norm

from nearveil.privacy.accounting import Accountant, PldAccountant, RdpAccountant
from nearveil.privacy.events import NoisyScreening, VoteHistogram
from studies import _figures as draw
from studies._screening_bounds import compute_fixed_pair_epsilon, compute_private_knn_asymptotic
from studies._study import Case, Row, Study, select

DELTA = 1e-5
WHOLE_ORDERS = tuple(map(float, range(2, 257)))
BELOW = "lower bound"
CLAIMED = "claimed"
_INTERVAL = 1e-5  # of the lower bound's privacy loss
_NEAR = 5  # votes from the threshold at which a pair is tried
_FFT = 1e-12  # more than the rounding of a convolution


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
    "8,192 screenings": Plan(0.25, NoisyScreening(85.0, 210.0, 300), 8192, 25.0, 0, None),
}
PUBLISHED = "RDP as published (Gaussian, classic conversion)"
BEST = "Bellman for screening + PLD for votes"
ACCOUNTANTS: dict[str, tuple[Callable[[], Accountant], bool]] = {
    PUBLISHED: (lambda: RdpAccountant(orders=WHOLE_ORDERS, conversion="classic"), False),
    "RDP (Gaussian), tight conversion": (RdpAccountant, False),
    "RDP (screening exact), tight conversion": (RdpAccountant, True),
    "PLD, Gaussian": (PldAccountant, False),
    BEST: (PldAccountant, True),
}


def compute_cost(plan: Plan, accounting: str, *, votes: bool = True) -> float:
    """Return the epsilon of a plan by one of the accountants, with its votes or for its screenings alone."""
    make, exact = ACCOUNTANTS[accounting]
    screening: DpEvent = plan.screening if exact else plan.screening.gaussian
    accountant = make().compose(PoissonSampledDpEvent(plan.sampling_rate, screening), plan.screened)
    if votes and plan.answered:
        accountant.compose(PoissonSampledDpEvent(plan.sampling_rate, VoteHistogram(plan.vote_noise)), plan.answered)
    return accountant.epsilon(DELTA)


def compute_lower_bound(plan: Plan, *, votes: bool = True) -> float:
    """Return what the worst of some fixed pairs costs, losses rounded down: no accountant sound for them is below.

    Every screening changes the max-vote by one, near the threshold; every vote moves one count up and another down.
    """
    alone, without = max(
        (
            compute_fixed_pair_epsilon(
                plan.screened,
                plan.screening,
                (t, t + 1),
                sampling_rate=plan.sampling_rate,
                delta=DELTA,
                direction=direction,
            ),
            t,
        )
        for t in range(round(plan.screening.threshold) - _NEAR, round(plan.screening.threshold) + _NEAR + 1)
        for direction in ("add", "remove")
    )
    if not (votes and plan.answered):
        return alone
    return float(_compose_screenings(plan, without).compose(_compose_votes(plan)).get_epsilon_for_delta(DELTA + _FFT))


def compute_votes_lower_bound(plan: Plan) -> float:
    """Return what the votes alone cost at least, for one record of another class than all others."""
    return float(_compose_votes(plan).get_epsilon_for_delta(DELTA + _FFT))


def _compose_votes(plan: Plan) -> pld.PrivacyLossDistribution:
    """Return the loss of all votes in which one record moves two counts by one, rounded down."""
    return pld.from_gaussian_mechanism(
        plan.vote_noise / math.sqrt(2),
        pessimistic_estimate=False,
        value_discretization_interval=_INTERVAL,
        sampling_prob=plan.sampling_rate,
        use_connect_dots=False,
    ).self_compose(plan.answered)


def _compose_screenings(plan: Plan, votes: int) -> pld.PrivacyLossDistribution:
    """Return the loss of all screenings of a max-vote that one record raises by one, rounded down once for all."""
    at = norm.sf((plan.screening.threshold - np.array([votes, votes + 1])) / plan.screening.noise)
    without, sampled = float(at[0]), float(at[0] + plan.sampling_rate * (at[1] - at[0]))
    passed = np.arange(plan.screened + 1)
    return pld.from_two_probability_mass_functions(
        dict(enumerate(binom.logpmf(passed, plan.screened, without))),
        dict(enumerate(binom.logpmf(passed, plan.screened, sampled))),
        pessimistic_estimate=False,
        value_discretization_interval=_INTERVAL,
        symmetric=False,
    )


def find_noise(plan: Plan, accounting: str) -> float:
    """Return the vote noise with which a plan would cost what is claimed for it."""
    claimed = plan.claimed
    if claimed is None:
        raise ValueError("plan must have a claim")

    def excess(noise: float) -> float:
        return math.log(compute_cost(replace(plan, vote_noise=noise), accounting) / claimed)

    return float(brentq(excess, plan.vote_noise, 40 * plan.vote_noise, rtol=1e-3))


def cases() -> list[Case]:
    """Return each plan by each accountant, and what noise the claims would need."""
    plans = [{"plan": plan, "accounting": name} for plan in PLANS for name in (*ACCOUNTANTS, BELOW)]
    wishes = [
        {"plan": plan, "noise for the claim by": name} for plan in ("MNIST", "SVHN") for name in (PUBLISHED, BEST)
    ]
    return [*plans, *wishes, {"theorem": 2}]


def measure(case: Case) -> list[Row]:
    """Price a plan."""
    if "theorem" in case:
        return _apply_theorem()
    plan = PLANS[case["plan"]]
    if "accounting" not in case:
        name = case["noise for the claim by"]
        return [{"kind": "noise", "plan": case["plan"], "accounting": name, "noise": find_noise(plan, name)}]
    rows = []
    for part, votes in (("screenings", False), ("all", True)):
        name, at = case["accounting"], {"plan": case["plan"], "part": part}
        if name == BELOW:
            rows.append({"kind": "lower", **at, "accounting": name, "epsilon": compute_lower_bound(plan, votes=votes)})
        else:
            rows.append({"kind": "upper", **at, "accounting": name, "epsilon": compute_cost(plan, name, votes=votes)})
    if case["accounting"] == BELOW and plan.answered:
        at = {"plan": case["plan"], "part": "votes", "accounting": BELOW}
        rows.append({"kind": "lower", **at, "epsilon": compute_votes_lower_bound(plan)})
    return rows


def _apply_theorem() -> list[Row]:
    plan, rows = PLANS["SVHN"], []
    for as_published in (True, False):
        results = compute_private_knn_asymptotic(
            plan.screened,
            plan.answered,
            sampling_rate=plan.sampling_rate,
            noise=plan.screening.noise,
            vote_noise=plan.vote_noise,
            delta=DELTA,
            as_published=as_published,
        )
        name = f"Theorem 2, constant {'20 as printed' if as_published else '13.86'}"
        row = {"kind": "theorem", "plan": "SVHN", "part": "all", "accounting": name, "epsilon": results.epsilon}
        rows.append({**row, "applies": results.applies})
    return rows


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw what is claimed, what it costs, and what it costs at least."""
    figure, panels = draw.make_panels(1, len(PLANS), (10.5, 3.6), sharey=True)
    names = list(ACCOUNTANTS)
    for axes, (plan, about) in zip(panels[0], PLANS.items(), strict=True):
        results = select(rows, part="all", plan=plan).set_index("accounting")["epsilon"]
        axes.axvspan(0, results[BELOW], color="0.86", linewidth=0, label="below the lower bound: no accountant can be")
        axes.axvline(results[BELOW], color="0.45", linewidth=1.0)
        for position, name in enumerate(names):
            best = name == BEST
            axes.plot(
                results[name],
                position,
                color=draw.COLOURS["blue"],
                marker="o",
                markersize=8 if best else 6,
                markerfacecolor=draw.COLOURS["blue"] if best else "0.95",
                linestyle="",
                label="the tightest accountant: the honest epsilon" if best else "other accountants",
            )
            axes.annotate(f"{results[name]:.3f}", (results[name], position), (8, -3), textcoords="offset points")
        if about.claimed is not None:
            axes.axvline(
                about.claimed, color=draw.COLOURS["red"], linestyle=":", linewidth=2, label="claimed (unsound)"
            )
            axes.annotate(f" {about.claimed:g}", (about.claimed, 0), color=draw.COLOURS["red"], va="center")
        widest = results[names].max()
        axes.set(
            title=plan, xlabel=f"epsilon at delta {DELTA:g}", xlim=(0, 1.3 * widest), ylim=(len(names) - 0.5, -0.7)
        )
        axes.set_yticks(range(len(names)), names)
        axes.grid(visible=False, axis="y")
    draw.finish(figure, panels[0], ncols=2)
    return {"claims": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what the page says; every number is one of the rows."""
    results = rows[rows["part"].notna()].set_index(["plan", "part", "accounting"])["epsilon"].astype(float).sort_index()
    columns = {
        "MNIST, screenings": ("MNIST", "screenings"),
        "MNIST": ("MNIST", "all"),
        "SVHN": ("SVHN", "all"),
        "8,192 screenings": ("8,192 screenings", "all"),
    }
    whole = pd.DataFrame({name: results[key] for name, key in columns.items()}).loc[[*ACCOUNTANTS, BELOW]]
    costs = whole.map("{:.6f}".format).rename_axis("accounting").reset_index()
    costs[costs["accounting"] == BEST] = costs[costs["accounting"] == BEST].map("**{}**".format)
    claims = {plan: f"{PLANS[plan].claimed:g}" for plan in ("MNIST", "SVHN")}
    theorems = select(rows, kind="theorem")
    return {
        "costs": pd.concat([pd.DataFrame([{"accounting": CLAIMED, **claims}]).reindex(columns=costs.columns), costs]),
        "times": {plan: results[plan, "all", BEST] / (PLANS[plan].claimed or math.nan) for plan in claims},
        "gap": (whole.loc[BEST] / whole.loc[BELOW] - 1).max(),
        "least_by_votes": {plan: results[plan, "votes", BELOW] for plan in claims},
        "published_noise": select(rows, kind="noise", accounting=PUBLISHED).set_index("plan")["noise"],
        "least_noise": select(rows, kind="noise", accounting=BEST).set_index("plan")["noise"],
        "theorems": theorems.to_dict("records"),
        "applies": bool(theorems["applies"].all()),
    }


def _describe(plan: Plan) -> str:
    about = plan.screening
    votes = f", vote noise {plan.vote_noise:g}, {plan.answered:,} answered" if plan.answered else ""
    return (
        f"sampling rate {plan.sampling_rate:g}, {about.n_neighbors} neighbours, screening noise {about.noise:g}, "
        f"threshold {about.threshold:g}, {plan.screened:,} screened{votes}"
    )


PARAMETERS = {"delta": DELTA, **{name: _describe(plan) for name, plan in PLANS.items()}}
STUDY = Study("accounting", cases, measure, figures, facts, ("none: all figures are computed",), PARAMETERS, ())
