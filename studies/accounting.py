"""What the settings published for Private-kNN really cost, by every accountant; and what messages and answers cost."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import privacy_loss_distribution as pld
from matplotlib.figure import Figure
from scipy.optimize import brentq
from scipy.stats import binom, norm

from nearveil.privacy.accounting import Accountant, GaussianFilter, PldAccountant, RdpAccountant, RenyiFilter
from nearveil.privacy.checks import check_count, check_delta, check_positive, check_rate
from nearveil.privacy.events import NamedSets, NoisyScreening, VoteHistogram
from studies import _figures as draw
from studies._study import Case, Row, Study, list_cases, select
from studies.screening import DIRECTIONS, compute_fixed_pair_epsilon

DELTA = 1e-5
WHOLE_ORDERS = tuple(map(float, range(2, 257)))
BELOW = "lower bound"
CLAIMED = "claimed"
MESSAGES, MESSAGE_DELTA = 100, 1e-6  # about one image
BUDGET = 40.0  # epsilon, at the same delta
SETS = (2, 20, 60)  # the first costs as much as any pure release
NOISE = 100.0  # of Gaussian answers, times the sensitivity
_MOST = 10_000  # releases of a budget
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
    compute = partial(compute_fixed_pair_epsilon, plan.screened, plan.screening)
    middle, common = round(plan.screening.threshold), {"sampling_rate": plan.sampling_rate, "delta": DELTA}
    alone, without = max(
        (compute((t, t + 1), direction=direction, **common), t)
        for t in range(middle - _NEAR, middle + _NEAR + 1)
        for direction in DIRECTIONS
    )
    if not (votes and plan.answered):
        return alone
    return float(_compose_screenings(plan, without).compose(_compose_votes(plan)).get_epsilon_for_delta(DELTA + _FFT))


def compute_votes_lower_bound(plan: Plan) -> float:
    """Return what the votes alone cost at least, for one record of another class than all others."""
    return float(_compose_votes(plan).get_epsilon_for_delta(DELTA + _FFT))


def _compose_votes(plan: Plan) -> pld.PrivacyLossDistribution:
    """Return the loss of all votes in which one record moves two counts by one, rounded down."""
    down: Any = {"pessimistic_estimate": False, "value_discretization_interval": _INTERVAL, "use_connect_dots": False}
    deviation = plan.vote_noise / math.sqrt(2)
    vote = pld.from_gaussian_mechanism(deviation, sampling_prob=plan.sampling_rate, **down)
    return vote.self_compose(plan.answered)


def _compose_screenings(plan: Plan, votes: int) -> pld.PrivacyLossDistribution:
    """Return the loss of all screenings of a max-vote that one record raises by one, rounded down once for all."""
    at = norm.sf((plan.screening.threshold - np.array([votes, votes + 1])) / plan.screening.noise)
    without, sampled = float(at[0]), float(at[0] + plan.sampling_rate * (at[1] - at[0]))
    passed = np.arange(plan.screened + 1)
    log_p, log_q = (dict(enumerate(binom.logpmf(passed, plan.screened, rate))) for rate in (without, sampled))
    down: Any = {"pessimistic_estimate": False, "value_discretization_interval": _INTERVAL, "symmetric": False}
    return pld.from_two_probability_mass_functions(log_p, log_q, **down)


def find_noise(plan: Plan, accounting: str) -> float:
    """Return the vote noise with which a plan would cost what is claimed for it."""
    claimed = plan.claimed
    if claimed is None:
        raise ValueError("plan must have a claim")

    def excess(noise: float) -> float:
        return math.log(compute_cost(replace(plan, vote_noise=noise), accounting) / claimed)

    return float(brentq(excess, plan.vote_noise, 40 * plan.vote_noise, rtol=1e-3))


class AsymptoticCost(NamedTuple):
    """An epsilon of the supplement's Theorem 2, for comparison."""

    epsilon: float
    applies: bool  # whether the theorem's assumptions hold; without them the value is meaningless


def compute_private_knn_asymptotic(
    n_screened: int,
    n_answered: int,
    *,
    sampling_rate: float,
    noise: float,
    vote_noise: float,
    delta: float,
    as_published: bool = False,
) -> AsymptoticCost:
    """Return Theorem 2 of the Private-kNN supplement, for comparison: 15 to 25 times looser than exact accounting.

    `as_published` takes the printed constant 20; the proof gives ``4 sqrt(12) = 13.86``.
    """
    m, answered = check_count(n_screened, "n_screened"), check_count(n_answered, "n_answered")
    rate, log_delta = check_rate(sampling_rate), -math.log(check_delta(delta))
    s1, s2 = check_positive(noise, "noise"), check_positive(vote_noise, "vote_noise")
    constant = 20.0 if as_published else 4 * math.sqrt(12)
    epsilon = constant * rate * math.sqrt(log_delta) * (math.sqrt(m) / s1 + math.sqrt(answered) / s2)
    room = min(s1, s2) ** 2 * math.log(rate) ** 2 - 2
    applies = (
        rate < 0.1
        and s1 >= math.sqrt(5)
        and s2 >= 2 * math.sqrt(5)
        and room > 0
        and 4 * log_delta * s1**2 / (rate**2 * room) <= m <= s1**2 * log_delta / (3 * rate**2)
        and answered <= s2**2 * log_delta / (6 * rate**2)
    )
    return AsymptoticCost(epsilon, applies)


def cases() -> list[Case]:
    """Return each plan by each accountant, and what noise the claims would need."""
    return [
        *list_cases(plan=PLANS, accounting=(*ACCOUNTANTS, BELOW)),
        *list_cases(**{"plan": ("MNIST", "SVHN"), "noise for the claim by": (PUBLISHED, BEST)}),
        {"theorem": 2},
        *list_cases(messages=(1.0, 2.0), sets=SETS),
        *list_cases(answers=(1.0, 2.0, 4.0)),
    ]


def measure(case: Case) -> list[Row]:
    """Price a plan."""
    if "theorem" in case:
        return _apply_theorem()
    if "messages" in case:
        return [price_messages(case["messages"], case["sets"])]
    if "answers" in case:
        return [count_answers(case["answers"])]
    plan = PLANS[case["plan"]]
    if "accounting" not in case:
        name = case["noise for the claim by"]
        return [{"kind": "noise", "plan": case["plan"], "accounting": name, "noise": find_noise(plan, name)}]
    name, parts = case["accounting"], {"screenings": False, "all": True}
    compute = compute_lower_bound if name == BELOW else partial(compute_cost, accounting=name)
    costs = {part: compute(plan, votes=votes) for part, votes in parts.items()}
    if name == BELOW and plan.answered:
        costs["votes"] = compute_votes_lower_bound(plan)
    kind = "lower" if name == BELOW else "upper"
    return [{"kind": kind, **case, "part": part, "epsilon": epsilon} for part, epsilon in costs.items()]


def price_messages(epsilon: float, n_sets: int) -> Row:
    """Return what messages that name one of some sets cost together, and how many a budget buys."""
    message, gate = NamedSets(epsilon, n_sets), RenyiFilter(BUDGET, MESSAGE_DELTA)

    def cost(count: int) -> float:
        return PldAccountant().compose(message, count).epsilon(MESSAGE_DELTA)

    return {
        "kind": "messages",
        "epsilon": epsilon,
        "sets": n_sets,
        "cost": cost(MESSAGES),
        "filter": bisect_left(range(1, _MOST), True, key=lambda count: not gate.may_spend(message, count)),
        "planned": bisect_left(range(1, _MOST), True, key=lambda count: cost(count) > BUDGET),
    }


def count_answers(epsilon: float) -> Row:
    """Return how many Gaussian answers, chosen adaptively, a budget buys by each filter."""
    counts = {
        name: bisect_left(range(1, _MOST), True, key=lambda count: not gate.may_spend(GaussianDpEvent(NOISE), count))
        for name, gate in (
            ("Gaussian filter", GaussianFilter(epsilon, MESSAGE_DELTA)),
            ("Renyi filter", RenyiFilter(epsilon, MESSAGE_DELTA)),
        )
    }
    return {"kind": "answers", "epsilon": epsilon, **counts}


def _apply_theorem() -> list[Row]:
    plan, rows = PLANS["SVHN"], []
    common: Any = {"sampling_rate": plan.sampling_rate, "noise": plan.screening.noise, "vote_noise": plan.vote_noise}
    for constant, as_published in (("20 as printed", True), ("13.86", False)):
        cost = compute_private_knn_asymptotic(
            plan.screened, plan.answered, delta=DELTA, as_published=as_published, **common
        )
        name = f"Theorem 2, constant {constant}"
        rows.append({"kind": "theorem", "plan": "SVHN", "part": "all", "accounting": name, **cost._asdict()})
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
            blue = draw.COLOURS["blue"]
            dot: Any = {"markersize": 6, "markerfacecolor": "0.95", "label": "other accountants"}
            if name == BEST:
                label = "the tightest accountant: the honest epsilon"
                dot = {"markersize": 8, "markerfacecolor": blue, "label": label}
            axes.plot(results[name], position, color=blue, marker="o", linestyle="", **dot)
            axes.annotate(f"{results[name]:.3f}", (results[name], position), (8, -3), textcoords="offset points")
        if about.claimed is not None:
            red = draw.COLOURS["red"]
            axes.axvline(about.claimed, color=red, linestyle=":", linewidth=2, label="claimed (unsound)")
            axes.annotate(f" {about.claimed:g}", (about.claimed, 0), color=red, va="center")
        axes.set(title=plan, xlabel=f"epsilon at delta {DELTA:g}")
        axes.set(xlim=(0, 1.3 * results[names].max()), ylim=(len(names) - 0.5, -0.7))
        axes.set_yticks(range(len(names)), names)
        axes.grid(visible=False, axis="y")
    draw.finish(figure, panels[0], ncols=2)
    return {"claims": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what the page says; every number is one of the rows."""
    results = rows[rows["part"].notna()].set_index(["plan", "part", "accounting"])["epsilon"].astype(float).sort_index()
    columns = {"MNIST, screenings": results["MNIST", "screenings"], **{plan: results[plan, "all"] for plan in PLANS}}
    whole = pd.DataFrame(columns).loc[[*ACCOUNTANTS, BELOW]]
    costs = whole.map("{:.6f}".format).rename_axis("accounting").reset_index()
    costs[costs["accounting"] == BEST] = costs[costs["accounting"] == BEST].map("**{}**".format)
    claims = {plan: f"{PLANS[plan].claimed:g}" for plan in ("MNIST", "SVHN")}
    theorems = select(rows, kind="theorem")
    messages = select(rows, kind="messages")
    answers = select(rows, kind="answers")
    return {
        "messages": pd.DataFrame(
            {
                "epsilon of each": messages["epsilon"].map("{:g}".format),
                "sets": messages["sets"].map("{:.0f}".format),
                f"{MESSAGES} cost": messages["cost"].map("{:.1f}".format),
                f"{BUDGET:g} buys, Renyi filter": messages["filter"].map("{:,.0f}".format),
                "planned": messages["planned"].map("{:,.0f}".format),
            }
        ),
        "answers": pd.DataFrame(
            {
                "epsilon": answers["epsilon"].map("{:g}".format),
                **{name: answers[name].map("{:,.0f}".format) for name in ("Gaussian filter", "Renyi filter")},
            }
        ),
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
