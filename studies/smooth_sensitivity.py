"""Smooth sensitivity of the manifold query for one target: what it could save at most, and what it costs.

Proofs: ``docs/theory/sensitivity.md``, "Smooth sensitivity".
"""

import functools
import math
from typing import Any

import numpy as np
import pandas as pd
from dp_accounting import rdp as dp_rdp
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.spatial.distance import cdist
from sklearn.datasets import load_digits

from nearveil.privacy.noise import analytic_gaussian_scale
from nearveil.privatemail.sensitivity import target_only
from studies import _figures as draw
from studies._study import Case, Row, Study, list_cases, select
from studies.data_dependent import compute_smooth_price

Floats = NDArray[np.float64]

ANCHORS, TARGETS = 500, 1000
BANDWIDTHS = (0.5, 1.0, 6.0)
EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
DELTA = 1e-5
ORDERS = np.array([1.25, 1.5, 1.75, *np.arange(2.0, 65.0), *np.geomspace(70, 2000, 40)])
BETAS = np.geomspace(1e-5, 1.0, 60)
STEPS = 40  # of the search for the farthest target
ANALYTIC, RENYI, LEAST = "analytic Gaussian", "Gaussian, by Rényi divergences", "smooth, where its noise is least"


@functools.cache
def load_rows() -> tuple[Floats, Floats]:
    """Return anchors and targets: digits of scikit-learn, centred by the anchors' mean, of norm one."""
    X = load_digits(return_X_y=True)[0]
    X = X[np.random.default_rng(0).permutation(len(X))] - X[:ANCHORS].mean(axis=0)
    X = X / np.linalg.norm(X, axis=1, keepdims=True)
    return X[:ANCHORS], X[ANCHORS : ANCHORS + TARGETS]


def place(targets: Floats, anchors: Floats, start: Floats, bandwidth: float) -> Floats:
    """Return the targets' rows of the first step, but the part that no target changes."""
    weights = np.exp((targets @ anchors.T - 1) / bandwidth**2)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True) @ start / 2)


def find_local_sensitivities(bandwidth: float) -> tuple[Floats, float]:
    """Return a lower bound on the local sensitivity at every target, and the proved global one.

    The farthest place of any target is searched by gradient steps, from real targets and in many directions.
    """
    anchors, targets = load_rows()
    start = np.random.default_rng(1).normal(size=(ANCHORS, 2))
    angles = np.arange(64) * math.pi / 32
    extremes = np.vstack(
        [
            _climb(direction, anchors, start, bandwidth)
            for direction in np.stack([np.cos(angles), np.sin(angles)], axis=1)
        ]
    )
    places = place(np.vstack([extremes, targets]), anchors, start, bandwidth)
    local = cdist(places[len(extremes) :], places).max(axis=1)
    proved = target_only(anchors, np.vstack([np.zeros((1, 2)), start]), bandwidth=bandwidth)
    return local, proved


def _climb(direction: Floats, anchors: Floats, start: Floats, bandwidth: float) -> Floats:
    """Return the target that moves farthest in a direction, by fixed-point steps on the sphere."""
    values = start @ direction
    x = anchors.T @ (values - values.mean())
    x = x / np.linalg.norm(x)
    for _ in range(STEPS):
        weights = np.exp((anchors @ x - 1) / bandwidth**2)
        weights = weights / weights.sum()
        gradient = anchors.T @ (weights * (values - weights @ values))
        x = gradient / np.linalg.norm(gradient)
    return np.asarray(x[None])


def compute_plain_scale(epsilon: float) -> float:
    """Return the noise of the Gaussian mechanism over its sensitivity, by Rényi divergences like the smooth one."""

    def excess(log_scale: float) -> float:
        return float(dp_rdp.compute_epsilon(ORDERS, ORDERS / (2 * math.exp(2 * log_scale)), DELTA)[0]) - epsilon

    return math.exp(brentq(excess, -3, 8, xtol=1e-10))


def compute_least_scale(epsilon: float) -> tuple[float, float, float]:
    """Return the least noise of a smooth mechanism over the global sensitivity, with its beta and order.

    S is at least exp(-beta) of the global sensitivity everywhere, so the noise is at least exp(-beta) sigma of it.
    """
    best = (math.inf, 0.0, 0.0)
    for beta in BETAS:
        for order in ORDERS[ORDERS * -np.expm1(-2 * beta) < 1]:
            budget = epsilon - math.log1p(-1 / order) + math.log(order * DELTA) / (order - 1)
            fixed = float(compute_smooth_price(order, beta, np.array([np.inf]))[0])
            if budget <= fixed:
                continue
            # The price is fixed + c / sigma^2.
            shifted = float(compute_smooth_price(order, beta, np.array([1.0]))[0]) - fixed
            scale = math.sqrt(shifted / (budget - fixed))
            best = min(best, (math.exp(-beta) * scale, float(beta), float(order)))
    return best


def cases() -> list[Case]:
    """Return every bandwidth, and every epsilon."""
    return [*list_cases(part=["local"], bandwidth=BANDWIDTHS), *list_cases(part=["noise"], epsilon=EPSILONS)]


def measure(case: Case) -> list[Row]:
    """Measure local sensitivities, or the noise at an epsilon."""
    if case["part"] == "local":
        local, proved = find_local_sensitivities(case["bandwidth"])
        shares = {f"q{level}": float(np.quantile(local, level / 100)) for level in (0, 10, 50, 90, 100)}
        return [{**case, "proved": proved, **shares}]
    least, beta, order = compute_least_scale(case["epsilon"])
    scales = {
        ANALYTIC: analytic_gaussian_scale(1.0, case["epsilon"], DELTA),
        RENYI: compute_plain_scale(case["epsilon"]),
        LEAST: least,
    }
    return [{**case, "way": way, "scale": scale, "beta": beta, "order": order} for way, scale in scales.items()]


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw the noise of each way, over that of the analytic Gaussian mechanism."""
    figure, ((axes,),) = draw.make_panels(1, 1, (6.8, 4.2))
    scales = select(rows, part="noise").pivot(index="epsilon", columns="way", values="scale")
    for position, way in enumerate((ANALYTIC, RENYI, LEAST)):
        draw.curve(axes, way, draw.without_interval(scales[way] / scales[ANALYTIC]), index=position)
    axes.set(ylim=(0, None))
    draw.epsilon_axis(axes, scales.index)
    draw.finish(figure, axes, "noise, over that of the analytic mechanism", ncols=2)
    return {"noise": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what local sensitivities could save, and the noise of each way."""
    local, noise = select(rows, part="local"), select(rows, part="noise")
    scales = noise.pivot(index="epsilon", columns="way", values="scale")[[ANALYTIC, RENYI, LEAST]]
    about = noise.groupby("epsilon")[["beta", "order"]].first()
    shares = local[["q0", "q50", "q100"]].div(local["proved"], axis=0)
    lines = shares.map("{:.3f}".format).set_axis(["least", "median", "largest"], axis=1)
    lines.insert(0, "bandwidth", local["bandwidth"].map("{:g}".format))
    lines.insert(1, "proved", local["proved"].map("{:.3g}".format))
    return {
        "local": lines,
        "least": float(shares["q0"].min()),
        "noise": scales.map("{:.3f}".format)
        .assign(beta=about["beta"].map("{:.2g}".format), order=about["order"].map("{:g}".format))
        .rename(index="{:g}".format)
        .reset_index(),
        "best": float((scales[LEAST] / scales[ANALYTIC]).min()),
        "same": float((scales[LEAST] / scales[RENYI]).min()),
    }


PARAMETERS = {"anchors": ANCHORS, "targets": TARGETS, "bandwidths": BANDWIDTHS, "columns": 2, "delta": DELTA}
STUDY = Study(
    "smooth-sensitivity", cases, measure, figures, facts, ("digits of scikit-learn",), PARAMETERS, ()
)  # fmt: skip
