"""Noisy screening charged by its own votes, the price of publishing that charge, and the sparse vector technique.

Proofs: ``docs/theory/private-knn.md``, section 14.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from dp_accounting import rdp as dp_rdp
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import norm

from nearveil.privacy.accounting import PldAccountant, RdpAccountant, screening_curve
from nearveil.privacy.events import NoisyScreening, PureDp
from nearveil.private_knn.neighbors import NeighborSearch
from nearveil.private_knn.student_model import HalfWhitening
from studies import _figures as draw
from studies._study import Case, Row, Study, list_cases, select
from studies.data import FOLDERS, Digits, DigitSet, load_digit_images
from studies.screening import compute_rdp

Floats = NDArray[np.float64]
Votes = NDArray[np.int64]

NEIGHBOURS, THRESHOLD = 300, 180.0  # as published for MNIST, without sampling, which data-dependent bounds exclude
NOISES = (75.0, 50.0, 30.0, 15.0)
COUNT = 1000  # queries
DELTA = 1e-5
AGREED = "voters who all agree"  # made up: the best case of both techniques
DATA: tuple[str, ...] = ("mnist", "svhn", AGREED)
TITLES = {"mnist": "MNIST", "svhn": "SVHN", AGREED: AGREED}
COMPONENTS = 64
ORDERS = np.array([1.25, 1.5, 1.75, *np.arange(2.0, 129.0)])
BETAS = np.geomspace(1e-4, 0.3, 40)
SCALES = np.geomspace(1.0, 400.0, 50)  # of the noise, in units of the smooth sensitivity
LOG_SCALES = np.geomspace(0.003, 1.0, 20)  # of the noise on the logarithm of the smooth sensitivity
LIKELY = 1.645  # a normal variable is below it with probability 0.95
WORST, EXACT, FREE, PAID, SVT = (
    "worst case, Rényi",
    "worst case, exact",
    "own votes, price unpaid",
    "own votes, published",
    "sparse vector technique",
)


@functools.cache
def load_votes(data: str) -> Votes:
    """Return the max-vote of every query: private neighbours in half-whitened features, as students have them."""
    if data == AGREED:
        return np.full(COUNT, NEIGHBOURS)
    name: DigitSet = "mnist" if data == "mnist" else "svhn"
    return count_max_votes(load_digit_images(name), COUNT)


def count_max_votes(digits: Digits, count: int) -> Votes:
    """Return the largest count of the votes on some test images."""
    private, public = (digits.features(images).astype(np.float64) for images in (digits.private, digits.test))
    space = HalfWhitening.learn(public, COMPONENTS)
    rows, queries = space.transform(private), space.transform(public[:count])
    search = NeighborSearch(rows, engine="numpy")
    near = search.nearest(queries, min(NEIGHBOURS, len(rows)))
    return np.array([np.bincount(digits.private_y[voters]).max() for voters in near])


def sum_divergences(votes: Votes, each: Floats) -> Floats:
    """Return the data-dependent divergence of all screenings at every order; `each` has a column for each max-vote."""
    return np.asarray(each[:, votes].sum(axis=1))


def find_smooth_sensitivities(votes: Votes, divergences: Floats, betas: Floats) -> Floats:
    """Bound the smooth sensitivity of the summed divergences at one order, for every beta.

    One record may change every max-vote by one, so the local sensitivity is a sum over queries, and at distance d each
    max-vote may have moved by d.
    """
    steps = np.abs(np.diff(divergences))
    most = np.maximum(np.append(steps, 0), np.append(0, steps))
    counts = np.bincount(votes, minlength=len(divergences))
    sums = []
    for _ in range(len(divergences)):
        sums.append(float(counts @ most))
        wide = np.maximum(most, np.append(most[1:], 0))
        most = np.maximum(wide, np.append(0, most[:-1]))
    return np.asarray((np.exp(-np.outer(betas, np.arange(len(sums)))) * sums).max(axis=1))


def compute_smooth_price(order: float, beta: float, scale: Floats) -> Floats:
    """Return the Rényi divergence of a number plus normal noise of `scale` times its beta-smooth sensitivity.

    The standard deviations of two neighbours differ by a factor of e^beta at most; infinite if the order is too high.
    """
    spread = 1 - order * -math.expm1(-2 * beta)
    if spread <= 0:
        return np.full_like(scale, np.inf)
    shifted = order * math.exp(-2 * beta) / (2 * scale**2 * spread)
    widths = [(math.log(1 - order + order * math.exp(2 * b)) / 2 - order * b) / (1 - order) for b in (-beta, beta)]
    return np.asarray(shifted + max(widths))


@dataclass(frozen=True)
class Publication:
    """The least epsilon at which a test of the data-dependent divergence passes with probability 0.9."""

    epsilon: float
    order: float
    beta: float
    scale: float
    log_scale: float
    budget: float  # of the divergence, fixed before
    price: float  # divergence of the test


def publish(votes: Votes, each: Floats, delta: float) -> Publication:
    """Search for the best parameters, on the votes themselves, which flatters the result."""
    far = float(norm.isf(delta / 4))  # two noises, and half of delta
    best: Publication | None = None
    for order, divergences in zip(ORDERS, each, strict=True):
        total = float(divergences[votes].sum())
        penalty = math.log1p(-1 / order) - math.log(order * delta / 2) / (order - 1)
        for beta, smooth in zip(BETAS, find_smooth_sensitivities(votes, divergences, BETAS), strict=True):
            price = compute_smooth_price(order, beta, SCALES)[:, None] + order * (beta / LOG_SCALES) ** 2 / 2
            margin = far * np.exp((far + LIKELY) * LOG_SCALES) + LIKELY
            budget = total + smooth * SCALES[:, None] * margin
            i, j = np.unravel_index(np.argmin(price + budget), price.shape)
            if best is None or price[i, j] + budget[i, j] + penalty < best.epsilon:
                spent, allowed = float(price[i, j]), float(budget[i, j])
                epsilon = spent + allowed + penalty
                best = Publication(
                    epsilon, float(order), float(beta), float(SCALES[i]), float(LOG_SCALES[j]), allowed, spent
                )
    assert best is not None
    return best


def compute_sparse_vector_epsilon(rare: int, noise: float, delta: float) -> float:
    """Return the epsilon of a sparse vector technique that stops after `rare` outcomes of the rarer kind.

    Each stretch up to such an outcome has its own Laplace noise on the threshold, and is pure: 1/b + 2/c for scales b
    of the threshold and c of the queries, whose variances together are `noise` squared. Composed by Rényi divergences
    or loss distributions, whichever is less.
    """
    share = 2 ** (1 / 3)  # of c to b: the least epsilon at a given variance
    threshold = noise / math.sqrt(2 * (1 + share**2))
    each = 1 / threshold + 2 / (share * threshold)
    accountants = (RdpAccountant(), PldAccountant())
    return min(accountant.compose(PureDp(each), max(rare, 1)).epsilon(delta) for accountant in accountants)


def cases() -> list[Case]:
    """Return every set of votes."""
    return list_cases(data=DATA)


def measure(case: Case) -> list[Row]:
    """Price the screenings of one set at every noise."""
    votes = load_votes(case["data"])
    return [{**case, **row} for noise in NOISES for row in price_screenings(votes, noise)]


def price_screenings(votes: Votes, noise: float) -> Iterator[Row]:
    """Yield what the screenings of some votes cost, each way."""
    screening = NoisyScreening(noise, THRESHOLD, NEIGHBOURS)
    each, count = compute_rdp(ORDERS, screening), len(votes)
    passes = ndtr((votes - THRESHOLD) / noise)
    rare = round(min(passes.sum(), count - passes.sum()))
    common = {"noise": noise, "queries": count, "right": decide_rightly(votes, noise), "rare": rare}
    published = publish(votes, each, DELTA)
    smooth = {name: getattr(published, name) for name in ("order", "beta", "scale", "log_scale", "price", "budget")}
    results = {
        WORST: bound_worst_case(count, noise),
        EXACT: screening_curve(count, screening).epsilon(DELTA),
        FREE: float(dp_rdp.compute_epsilon(ORDERS, sum_divergences(votes, each), DELTA)[0]),
        SVT: compute_sparse_vector_epsilon(rare, noise, DELTA),
    }
    yield from ({**common, "way": way, "epsilon": epsilon} for way, epsilon in results.items())
    same = find_noise(count, noise, published.epsilon / results[EXACT])
    yield {
        **common,
        "way": PAID,
        "epsilon": published.epsilon,
        **smooth,
        "same_noise": same,
        "same_right": decide_rightly(votes, same),
    }


def decide_rightly(votes: Votes, noise: float) -> float:
    """Return the expected share of queries that pass if and only if their max-vote reaches the threshold."""
    return float(ndtr(np.abs(votes - THRESHOLD) / noise).mean())


def bound_worst_case(count: int, noise: float) -> float:
    """Return the epsilon of all screenings by the largest Rényi divergence at every order."""
    each = compute_rdp(ORDERS, NoisyScreening(noise, THRESHOLD, NEIGHBOURS))
    return float(dp_rdp.compute_epsilon(ORDERS, count * each.max(axis=1), DELTA)[0])


def find_noise(count: int, noise: float, factor: float) -> float:
    """Return the noise at which the worst case costs `factor` times as much as at `noise`, by Rényi divergences."""
    target = factor * bound_worst_case(count, noise)

    def excess(log_noise: float) -> float:
        return math.log(bound_worst_case(count, math.exp(log_noise)) / target)

    middle = math.log(noise)
    return math.exp(brentq(excess, middle - 3, middle + 3, xtol=1e-3))


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw epsilon over the noise, a panel for each set."""
    figure, panels, cells = draw.make_grid(rows, (10.5, 4.4), column="data", sharey=True)
    for axes, data, group in cells:
        for position, way in enumerate((WORST, EXACT, FREE, PAID, SVT)):
            points = select(group, way=way).set_index("noise")["epsilon"].sort_index()
            curve = draw.without_interval(points)
            draw.curve(axes, way, curve, sound=way != FREE, index=position)
        axes.set(title=TITLES[data], xlabel="noise of a screening, votes", xscale="log", yscale="log")
        draw.set_ticks(
            axes, sorted(group["noise"].unique()), [f"{noise:g}" for noise in sorted(group["noise"].unique())]
        )
    draw.finish(figure, panels, f"epsilon of {COUNT:,} screenings")
    return {"epsilon": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return all epsilons, and where the publication pays."""
    results = rows.pivot(index=["data", "noise"], columns="way", values="epsilon").loc[list(rows["data"].unique())]
    about = select(rows, way=PAID).set_index(["data", "noise"])
    lines = results[[WORST, EXACT, FREE, PAID, SVT]].map("{:.3f}".format)
    lines.insert(0, "right decisions", about["right"].map("{:.1%}".format))
    lines.insert(1, "rarer outcomes", about["rare"])
    lines["right decisions, worst case at the published epsilon"] = about["same_right"].map("{:.1%}".format)
    lines = lines.sort_index(level="noise", ascending=False, sort_remaining=False).sort_index(
        level="data", sort_remaining=False
    )
    lines = lines.reset_index()
    real = about.drop(AGREED, errors="ignore")
    cheaper = results[PAID] < results[EXACT]
    return {
        "lines": lines.assign(data=lines["data"].map(TITLES), noise=lines["noise"].map("{:g}".format)),
        "cheaper": _name_settings(results.index[cheaper]),
        "dearer": _name_settings(results.index[~cheaper]),
        "svt_wins": _name_settings(results.index[results[SVT] < results[[EXACT, PAID]].min(axis=1)]),
        "gain": (real["right"] - real["same_right"]).max(),
        "about": about.loc[about.index[0]],
    }


def _name_settings(keys: pd.Index) -> str:
    """Return settings in words, the noises of each set together."""
    groups: dict[str, list[str]] = {}
    for data, noise in keys:
        groups.setdefault(TITLES[data], []).append(f"{noise:g}")
    return "; ".join(f"{name} at noise {', '.join(noises)}" for name, noises in groups.items()) or "nowhere"


PARAMETERS = {
    "neighbours": NEIGHBOURS, "threshold": THRESHOLD, "queries": COUNT, "noises": NOISES, "delta": DELTA,
    "components": COMPONENTS,
}  # fmt: skip
FILES = tuple(f"{FOLDERS[name]}/{FOLDERS[name]}.npz" for name in ("mnist", "svhn"))
STUDY = Study("data-dependent", cases, measure, figures, facts, FILES, PARAMETERS, ())
