"""What PrivateMail's papers say about the manifold, computed: eigenmaps, separation, convergence, and a gamma's tail.

Proofs: ``docs/theory/manifold.md`` and ``docs/theory/sensitivity.md``.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.linalg import eigh, subspace_angles
from scipy.spatial.distance import cdist
from scipy.stats import gamma
from sklearn.datasets import load_digits

from nearveil.privatemail.graph import label_graph
from studies import _figures as draw
from studies._study import Case, Row, Study, list_cases, select
from studies.baselines.solvers import ReferenceManifold

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

DIGITS = 500
SEEDS = (0, 1, 2)
BANDWIDTHS = (0.3, 0.4, 0.6, 1.0)
COLUMNS = 2
LABEL_WEIGHT = 0.3
STEPS = 60
CLASSES, PER_CLASS, AMBIENT = 4, 1500, 3  # made-up data, on which the theorem can hold
SPREADS = (0.02, 0.05, 0.1, 0.2, 0.4)
RADII = np.geomspace(0.01, 1.0, 25)
SLACKS = np.geomspace(1e-4, 0.3, 12)  # epsilon of the theorem, as a share of gamma / sqrt(d)
ROWS, DEPTHS = 50, (1.0, 2.0, 4.0, 8.0, 16.0)  # of the sum of gamma variables, and multiples of its mean
TAILS = {
    "exact": "exact",
    "matched": "Welch-Satterthwaite",
    "printed": "the paper's bound",
    "centred": "the same, of the centred variable",
}
WITHIN, BETWEEN = "as published: pushed apart within a class", "Vural and Guillemot: between classes"
SPECTRAL, EIGENMAPS = "spectral", "eigenmaps"


class BetweenClasses:
    """The graph of Vural and Guillemot: an edge of weight one between rows of different classes."""

    def __init__(self, labels: Labels) -> None:
        self._codes = np.unique(labels, return_inverse=True)[1]
        self._counts = np.bincount(self._codes)

    def laplacian_matmul(self, Z: Floats) -> Floats:
        """Multiply the Laplacian by `Z` of shape (n, k), in O(nk)."""
        sums = np.zeros((len(self._counts), Z.shape[1]))
        np.add.at(sums, self._codes, Z)
        n = len(Z)
        return np.asarray((n - self._counts)[self._codes, None] * Z - (Z.sum(axis=0) - sums[self._codes]))


def draw_spheres(spread: float, seed: int) -> tuple[Floats, Labels]:
    """Return rows of norm one: classes are uniform balls around poles, put on the sphere."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), PER_CLASS)
    poles = np.vstack([np.eye(AMBIENT), -np.ones(AMBIENT) / math.sqrt(AMBIENT)])[:CLASSES]
    offsets = rng.normal(size=(len(labels), AMBIENT))
    offsets *= (rng.random(len(labels)) ** (1 / AMBIENT) / np.linalg.norm(offsets, axis=1))[:, None]
    rows = poles[labels] + spread * offsets
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), labels


@dataclass(frozen=True)
class Separation:
    """The quantities of the theorem for one embedding, and its bound."""

    gamma: float  # least distance between classes, embedded
    lipschitz: float  # of the interpolation that maps rows to their embedding
    radius: float  # delta, at which the bound is best
    diameter: float  # A_delta: embedded, of rows of a class within two radii
    slack: float  # epsilon
    share: float  # eta, estimated: the least share of a class within the radius of a row of it
    needed: float  # L delta + sqrt(d) epsilon + A_delta over gamma / 2: at most 1 where the theorem applies
    bound: float  # on the chance of a right answer; 0 where it does not apply


def measure_separation(X: Floats, labels: Labels, Z: Floats) -> Separation:
    """Compute every quantity of Theorem 9 of Vural and Guillemot, and its best bound over delta, epsilon and Q.

    The Lipschitz constant is the largest ratio over pairs of rows, a lower bound, and eta is the share of the sample:
    both flatter the theorem.
    """
    near, far = cdist(X, X), cdist(Z, Z)
    same = labels[:, None] == labels
    separation = float(far[~same].min())
    ratios = np.divide(far, near, out=np.zeros_like(far), where=near > 0)
    lipschitz, columns = float(ratios.max()), Z.shape[1]
    counts = np.bincount(labels)
    best: Separation | None = None
    for radius in RADII:
        diameter = float(far[same & (near <= 2 * radius)].max(initial=0.0))
        inside = ((near <= radius) & same).sum(axis=1) - 1
        share = float((inside / (counts[labels] - 1)).min())
        for slack in SLACKS * separation / math.sqrt(columns):
            needed = (lipschitz * radius + math.sqrt(columns) * slack + diameter) / max(separation / 2, 1e-300)
            bound = _bound_chance(counts.min(), share, slack, lipschitz * radius, columns) if needed <= 1 else 0.0
            found = Separation(separation, lipschitz, float(radius), diameter, float(slack), share, needed, bound)
            if best is None or (found.bound, -found.needed) > (best.bound, -best.needed):
                best = found
    assert best is not None
    return best


def _bound_chance(count: int, share: float, slack: float, reach: float, columns: int) -> float:
    """Return the best bound of the theorem over its Q."""
    inside = np.arange(1, max(math.ceil(count * share), 1))
    if not len(inside):
        return 0.0
    few = np.exp(-2 * (count * share - inside) ** 2 / count)
    off = 2 * columns * np.exp(-inside * slack**2 / (2 * reach**2))
    return float(max((1 - few - off).max(), 0.0))


def classify_new(X: Floats, labels: Labels, Z: Floats, new: Floats, new_labels: Labels) -> float:
    """Return the share of new rows, interpolated between their three nearest, whose nearest row has their class."""
    distances = cdist(new, X)
    nearest = np.argsort(distances, axis=1)[:, :3]
    weights = 1 / np.maximum(np.take_along_axis(distances, nearest, axis=1), 1e-12)
    placed = (Z[nearest] * (weights / weights.sum(axis=1, keepdims=True))[:, :, None]).sum(axis=1)
    return float(np.mean(labels[cdist(placed, Z).argmin(axis=1)] == new_labels))


def embed_spectrally(X: Floats, bandwidth: float, weight: float, repel: Any) -> Floats:
    """Return the least generalised eigenvectors of L_X - weight L, but the constant, for any graph L."""
    weights = np.exp((X @ X.T - 1) / bandwidth**2)
    np.fill_diagonal(weights, 0)
    degree = weights.sum(axis=1)
    matrix = np.diag(degree) - weights
    if weight:
        repulsion = repel.laplacian_matmul(np.eye(len(X)))
        matrix = matrix - weight * degree.sum() / np.trace(repulsion) * repulsion
    # The constant is an eigenvector of value 0: moved beyond all others.
    shift = np.outer(degree, degree) / degree.sum()
    Z = eigh(matrix + (3 + 2 * weight * len(X)) * shift, np.diag(degree), subset_by_index=(0, COLUMNS - 1))[1]
    return np.asarray(Z * math.sqrt(len(Z)) / np.linalg.norm(Z))


def find_rates(weights: Floats, label_weight: float, repulsion: Floats) -> tuple[float, float, float]:
    """Return the two largest eigenvalues of a step of eq. 7, and the largest of eq. 6; constants are left out."""
    degree = weights.sum(axis=1)
    laplacian, root = np.diag(degree) - weights, np.sqrt(degree)
    values = 1 - np.linalg.eigvalsh((laplacian - label_weight * repulsion) / np.outer(root, root)) / 2
    values = np.delete(values, int(np.argmin(np.abs(values - 1))))  # of the constant
    inverse = np.linalg.pinv(laplacian, hermitian=True)
    radius = float(np.abs(np.linalg.eigvals(label_weight * inverse @ repulsion)).max())
    return float(values[0]), float(values[1]), radius


def compute_tails(largest: float, rest: float, at: float) -> dict[str, float]:
    """Return the tail of a sum of exponential variables, one of mean `largest` and ROWS - 1 of mean `rest`.

    Exactly; by Welch and Satterthwaite; by the paper's bound on that; and by the same bound, of the centred variable.
    """
    mean, squares = largest + (ROWS - 1) * rest, largest**2 + (ROWS - 1) * rest**2
    shape, scale = mean**2 / squares, squares / mean

    def weigh(x: float) -> float:
        return float(gamma.pdf(x, ROWS - 1, scale=rest) * math.exp(-(at - x) / largest))

    exact = (
        gamma.sf(at, ROWS - 1, scale=rest) + quad(weigh, 0, at, points=[(ROWS - 1) * rest], epsrel=1e-10, epsabs=0)[0]
    )

    def bound(t: float) -> float:
        ratio = max(t, 0.0) / (shape * scale)
        return math.exp(-shape * (1 + ratio - math.sqrt(1 + 2 * ratio)))

    return {
        "exact": float(exact),
        "matched": float(gamma.sf(at, shape, scale=scale)),
        "printed": bound(at),
        "centred": bound(at - mean),
    }


@functools.cache
def load_rows(seed: int) -> tuple[Floats, Labels]:
    """Return some digits of scikit-learn, centred, of norm one."""
    X, y = load_digits(return_X_y=True)
    chosen = np.random.default_rng(seed).permutation(len(X))[:DIGITS]
    rows = X[chosen] - X.mean(axis=0)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), y[chosen]


def cases() -> list[Case]:
    """Return every part."""
    return [
        *list_cases(part=["eigenmaps"], seed=SEEDS),
        *list_cases(part=["separation"], spread=SPREADS),
        *list_cases(part=["rate"], seed=SEEDS[:1]),
        {"part": "tail"},
    ]


def measure(case: Case) -> list[Row]:
    """Measure one part."""
    parts: dict[str, Any] = {
        "eigenmaps": _compare_solvers, "separation": _separate, "rate": _follow_rate, "tail": _compare_tails
    }  # fmt: skip
    return [{**case, **row} for row in parts[case["part"]](case)]


def _compare_solvers(case: Case) -> list[Row]:
    X, _ = load_rows(case["seed"])
    rows: list[Row] = []
    for bandwidth in BANDWIDTHS:
        options: Any = {"bandwidth": bandwidth, "label_weight": 0.0, "graph": "exact"}
        plain, weighted = (
            ReferenceManifold(COLUMNS, solver=solver, **options).fit(X).embedding_ for solver in (SPECTRAL, EIGENMAPS)
        )
        cosines = np.sort(np.cos(subspace_angles(plain, weighted)))[::-1]
        rows.append({"bandwidth": bandwidth, "first": float(cosines[0]), "last": float(cosines[-1])})
    return rows


def _separate(case: Case) -> list[Row]:
    X, labels = draw_spheres(case["spread"], 0)
    new, new_labels = draw_spheres(case["spread"], 1)
    some = np.random.default_rng(0).permutation(len(new))[:1000]
    thin = slice(None, None, 5)  # of the rows that are embedded
    X, labels = X[thin], labels[thin]
    rows = []
    graphs = {WITHIN: label_graph(labels, BANDWIDTHS[1], "one-hot"), BETWEEN: BetweenClasses(labels)}
    for name, graph in graphs.items():
        for weight in (0.0, LABEL_WEIGHT):
            Z = embed_spectrally(X, BANDWIDTHS[1], weight, graph)
            results = measure_separation(X, labels, Z)
            accuracy = classify_new(X, labels, Z, new[some], new_labels[some])
            row = {"graph": name if weight else "no labels", "weight": weight, "accuracy": accuracy, **vars(results)}
            rows += [row] if weight or name == WITHIN else []
    return rows


def _follow_rate(case: Case) -> list[Row]:
    X, labels = load_rows(case["seed"])
    rows: list[Row] = []
    for bandwidth in BANDWIDTHS:
        weights = np.exp((X @ X.T - 1) / bandwidth**2)
        np.fill_diagonal(weights, 0)
        repulsion = label_graph(labels, bandwidth, "one-hot").laplacian_matmul(np.eye(len(X)))
        first, second, radius = find_rates(weights, LABEL_WEIGHT, repulsion)
        start = np.random.default_rng(case["seed"]).normal(size=(len(X), COLUMNS))
        sines = _follow_angle(weights, repulsion, start)
        common = {"bandwidth": bandwidth, "ratio": second / first, "fitted": (sines[-1] / sines[-11]) ** 0.1}
        common |= {"radius": radius, "measured": _measure_first_pass(weights, repulsion, start)}
        rows += [{**common, "step": step, "sine": sine} for step, sine in enumerate(sines)]
    return rows


def _follow_angle(weights: Floats, repulsion: Floats, start: Floats) -> list[float]:
    """Return the sine of the angle between both columns, weighted by degree, over the steps of eq. 7."""
    degree = weights.sum(axis=1)[:, None]
    Z = start - (degree * start).sum(axis=0) / degree.sum()
    sines = []
    for _ in range(STEPS):
        first, second = (np.sqrt(degree) * Z).T
        cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
        sines.append(math.sqrt(max(1 - cosine**2, 0.0)))
        Z = Z - (degree * Z - weights @ Z - LABEL_WEIGHT * repulsion @ Z) / (2 * degree)
        Z = Z / np.linalg.norm(Z)
    return sines


def _measure_first_pass(weights: Floats, repulsion: Floats, start: Floats) -> float:
    """Return by how much a late step of eq. 6 is longer than the one before."""
    inverse = np.linalg.pinv(np.diag(weights.sum(axis=1)) - weights, hermitian=True)
    change, length = start - start.mean(axis=0), 0.0
    for _ in range(STEPS):
        change = change / np.linalg.norm(change)  # only its direction matters: the iteration is affine
        change = LABEL_WEIGHT * inverse @ (repulsion @ change)
        length = float(np.linalg.norm(change))
    return length


def _compare_tails(_: Case) -> list[Row]:
    profiles = {"all rows change alike": 1.0, "one row changes most": 1 / ROWS}
    return [
        {"profile": name, "depth": depth, **compute_tails(1.0, rest, depth * (1 + (ROWS - 1) * rest))}
        for name, rest in profiles.items()
        for depth in DEPTHS
    ]


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw the rate of convergence, and the tails."""
    rate, ((left,),) = draw.make_panels(1, 1, (6.4, 4.2))
    for position, (bandwidth, group) in enumerate(select(rows, part="rate").groupby("bandwidth")):
        steps = group.set_index("step")
        label = f"bandwidth {bandwidth:g}: ratio {group['ratio'].iloc[0]:.3f}"
        draw.curve(left, label, draw.without_interval(steps["sine"].clip(lower=1e-12)), index=position, label=label)
    left.set(yscale="log", xlabel="step", ylabel="sine of the angle between both columns", ylim=(1e-4, 2))
    draw.finish(rate, left, ncols=2)
    tails, (panels,), cells = draw.make_grid(select(rows, part="tail"), (9, 4.2), column="profile", sharey=True)
    for axes, profile, group in cells:
        points = group.set_index("depth")
        for position, (column, name) in enumerate(TAILS.items()):
            curve = draw.without_interval(points[column].where(points[column] >= 1e-16))
            draw.curve(axes, name, curve, sound=column == "exact", index=position)
        axes.set(title=profile, xscale="log", yscale="log", xlabel="threshold over the mean", ylim=(1e-16, 1))
        draw.set_ticks(axes, list(DEPTHS), [f"{depth:g}" for depth in DEPTHS])
    draw.finish(tails, panels, "probability of a larger change")
    return {"rate": rate, "tails": tails}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the tables."""
    cosines = select(rows, part="eigenmaps").groupby("bandwidth")[["first", "last"]].mean()
    separation = select(rows, part="separation")
    columns = {"spread": "spread", "graph": "label graph", "gamma": "gamma", "lipschitz": "L", "radius": "delta",
               "diameter": "A_delta", "needed": "left side over gamma/2", "bound": "bound on the chance",
               "accuracy": "measured accuracy"}  # fmt: skip
    lines = separation[list(columns)].rename(columns=columns)
    shown = lines.assign(
        **{name: lines[name].map("{:.3g}".format) for name in columns.values() if name != "label graph"}
    )
    rates = select(rows, part="rate").groupby("bandwidth")[["ratio", "fitted", "radius", "measured"]].first()
    names = ["eq. 7: second eigenvalue over first", "eq. 7, measured", "eq. 6: spectral radius", "eq. 6, measured"]
    tails = select(rows, part="tail")
    broken = {
        column: tails[tails[column] < tails["exact"]].groupby("profile", sort=False)["depth"].min().to_dict()
        for column in ("printed", "centred")
    }
    return {
        "cosines": cosines.map("{:.3f}".format).rename(index="{:g}".format).reset_index(),
        "separation": shown,
        "holds": int((separation["bound"] > 0).sum()),
        "total": len(separation),
        "rates": rates.set_axis(names, axis=1).map("{:.4f}".format).rename(index="{:g}".format).reset_index(),
        "tails": tails.assign(**{name: tails[name].map("{:.2e}".format) for name in TAILS})[
            ["profile", "depth", *TAILS]
        ].rename(columns=TAILS),
        "broken": broken,
    }


PARAMETERS = {
    "digits": DIGITS,
    "columns": COLUMNS,
    "label weight": LABEL_WEIGHT,
    "steps": STEPS,
    "bandwidths": BANDWIDTHS,
}
STUDY = Study(
    "manifold-theorems", cases, measure, figures, facts, ("digits of scikit-learn", "made-up balls"), PARAMETERS, SEEDS
)
