"""A search for the two data sets whose first steps are farthest apart.

It moves records on the sphere by their gradient, from many starts, to change the first step as much as it can. What it
finds is a lower bound of the sensitivity; a sound bound must never be below.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from nearveil.graph import Encoding
from nearveil.privacy.sensitivity.bounds import Norm

Floats = NDArray[np.float64]

STARTS = 4


def normalise(rows: Floats) -> Floats:
    """Divide each row by its norm."""
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


@dataclass(frozen=True)
class Neighbours:
    """Two data sets that differ in one record."""

    X: Floats
    other: Floats
    V: Floats
    V_other: Floats
    record: int


def label_weights(labels: Sequence[int] | NDArray[np.int64], bandwidth: float, encoding: Encoding) -> Floats:
    """Return the dense label weights; -1 means unlabelled."""
    y = np.asarray(labels, dtype=np.float64)
    gaps = np.subtract.outer(y, y) ** 2 if encoding == "integer" else 2.0 * np.not_equal.outer(y, y)
    weights = np.exp(-gaps / (2 * bandwidth**2))
    weights[y == -1, :] = weights[:, y == -1] = 0
    np.fill_diagonal(weights, 0)
    return np.asarray(weights)


def step(X: Floats, V: Floats, start: Floats, bandwidth: float, label_weight: float) -> tuple[Floats, Floats, Floats]:
    """Take one dense step; return it with the weights and the degrees."""
    W = np.exp((X @ X.T - 1) / bandwidth**2)
    np.fill_diagonal(W, 0)
    degree = W.sum(axis=1)
    pull = label_weight * V - W
    return start + (pull.sum(axis=1)[:, None] * start - pull @ start) / (2 * degree[:, None]), W, degree


def change(pair: Neighbours, start: Floats, bandwidth: float, label_weight: float) -> Floats:
    """Return the difference of the steps of two neighbours, shape (n, k)."""
    X_other = pair.X.copy()
    X_other[pair.record] = pair.other
    before, *_ = step(pair.X, pair.V, start, bandwidth, label_weight)
    after, *_ = step(X_other, pair.V_other, start, bandwidth, label_weight)
    return before - after


def _gradient(
    slope: Floats, X: Floats, moved: tuple[Floats, Floats, Floats], start: Floats, bandwidth: float
) -> Floats:
    """Carry the derivative with respect to the step back to the rows."""
    F, W, degree = moved
    along = ((slope * start).sum(axis=1)[:, None] - slope @ start.T) / 2
    through_degree = (slope * (F - start)).sum(axis=1)
    H = -(along + through_degree[:, None]) / degree[:, None]
    return np.asarray((((H + H.T) * W) @ X) / bandwidth**2)


def climb(
    pair: Neighbours,
    start: Floats,
    *,
    bandwidth: float,
    label_weight: float,
    free: bool,
    norm: Norm = "l2",
    rows: slice | NDArray[np.int64] = slice(None),
    iterations: int = 60,
) -> float:
    """Move the record before and after, and with `free` all other rows too, to change `rows` the most."""
    n, d = pair.X.shape
    released = np.zeros((n, 1))
    released[rows] = 1
    best = [0.0]

    def objective(flat: Floats) -> tuple[float, Floats]:
        Z = flat.reshape(-1, d)
        size = np.linalg.norm(Z, axis=1, keepdims=True)
        X = pair.X.copy()
        X_other = pair.X.copy()
        if free:
            X[:] = X_other[:] = (Z / size)[:n]
        X[pair.record] = Z[-2] / size[-2]
        X_other[pair.record] = Z[-1] / size[-1]
        before = step(X, pair.V, start, bandwidth, label_weight)
        after = step(X_other, pair.V_other, start, bandwidth, label_weight)
        gap = released * (before[0] - after[0])
        value = float(np.abs(gap).sum() if norm == "l1" else np.linalg.norm(gap))
        best[0] = max(best[0], value)
        slope = np.sign(gap) if norm == "l1" else gap / max(value, 1e-300)
        gradient = _gradient(slope, X, before, start, bandwidth)
        gradient_other = _gradient(-slope, X_other, after, start, bandwidth)
        own, own_other = gradient[pair.record].copy(), gradient_other[pair.record].copy()
        rise = np.zeros_like(Z)
        if free:
            rise[:n] = gradient + gradient_other
            rise[pair.record] = 0
        rise[-2], rise[-1] = own, own_other
        here = Z / size
        rise = (rise - here * (rise * here).sum(axis=1, keepdims=True)) / size
        return -value, -rise.ravel()

    ends = np.stack([pair.X[pair.record], pair.other])
    begin = np.concatenate([pair.X, ends]) if free else ends
    minimize(objective, begin.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": iterations})
    return best[0]


def climb_target(anchors: Floats, others: Floats, bandwidth: float, ends: Floats, iterations: int = 80) -> float:
    """Move two targets apart, from `ends` of shape (2, d): the row of the target alone, in O(m d) a step."""
    u = bandwidth**-2
    best = [0.0]

    def place(z: Floats) -> tuple[Floats, Floats, Floats, float]:
        size = float(np.linalg.norm(z))
        x = z / size
        exponents = u * (anchors @ x)
        p = np.exp(exponents - exponents.max())
        p /= p.sum()
        return p, p @ others, x, size

    def rise(slope: Floats, at: tuple[Floats, Floats, Floats, float]) -> Floats:
        p, mean, x, size = at
        gradient = u / 2 * (anchors.T @ (p * ((others - mean) @ slope)))
        return np.asarray((gradient - x * (x @ gradient)) / size)

    def objective(flat: Floats) -> tuple[float, Floats]:
        first, second = (place(z) for z in flat.reshape(2, -1))
        gap = (first[1] - second[1]) / 2
        value = float(np.linalg.norm(gap))
        best[0] = max(best[0], value)
        slope = gap / max(value, 1e-300)
        return -value, -np.concatenate([rise(slope, first), -rise(slope, second)])

    minimize(objective, ends.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": iterations})
    return best[0]


def search_target(
    anchors: Floats, others: Floats, *, bandwidth: float, rng: np.random.Generator, starts: int = STARTS
) -> float:
    """Search for the two targets whose rows are farthest apart.

    Half of the starts lie along the directions in which anchors and starts vary together, the others
    are random or near anchors.
    """
    d = anchors.shape[1]
    together = np.linalg.svd((anchors - anchors.mean(axis=0)).T @ (others - others.mean(axis=0)), full_matrices=False)
    best = 0.0
    for number in range(starts):
        if number < min(starts // 2, together[0].shape[1]):
            axis = together[0][:, number]
            ends = np.stack([axis, -axis])
        elif number % 2 or len(anchors) < 2:
            ends = rng.normal(size=(2, d))
        else:
            ends = anchors[rng.choice(len(anchors), 2, replace=False)] + 0.01 * rng.normal(size=(2, d))
        best = max(best, climb_target(anchors, others, bandwidth, normalise(ends)))
    return best


def make_opposed(
    start: Floats,
    record: int,
    direction: Floats,
    rng: np.random.Generator,
    *,
    n_classes: int,
    label_bandwidth: float,
    encoding: Encoding = "integer",
    private_labels: bool = True,
    jitter: float = 0.3,
    shift: float = 0.0,
) -> Neighbours:
    """Return the data set that Theorem B' fears, shaken: two opposite clusters, two extreme labels.

    Rows on one side of `record` along `direction` lie at one pole and have one label, the rest at the other;
    the record jumps from pole to pole and, where labels are private, from label to label.
    """
    side = np.where(direction @ (start[record] - start).T + shift > 0, 1, -1)
    pole = np.array([1.0, 0.0, 0.0])
    X = normalise(-side[:, None] * pole + jitter * rng.normal(size=(len(start), 3)))
    X[record] = normalise(pole + jitter * rng.normal(size=3))
    other = normalise(-pole + jitter * rng.normal(size=3))
    y = np.where(side > 0, 0, n_classes - 1)
    y[record] = 0
    y_other = y.copy()
    if private_labels:
        y_other[record] = n_classes - 1
    V = label_weights(y, label_bandwidth, encoding)
    return Neighbours(X, other, V, label_weights(y_other, label_bandwidth, encoding), record)


def search_replace(
    start: Floats,
    *,
    bandwidth: float,
    label_weight: float,
    n_classes: int,
    rng: np.random.Generator,
    encoding: Encoding = "integer",
    private_labels: bool = True,
    starts: int = STARTS,
    norm: Norm = "l2",
    iterations: int = 60,
) -> float:
    """Search for the two data sets whose steps are farthest apart: the outermost records, both ways."""
    outward = start - start.mean(axis=0)
    outermost = np.argsort(-np.linalg.norm(outward, axis=1))
    best = 0.0
    for number in range(starts):
        record = int(outermost[(number // 2) % len(start)])
        direction = outward[record] / max(float(np.linalg.norm(outward[record])), 1e-12)
        turned = direction + 0.2 * (number % 2) * rng.normal(size=direction.shape)
        pair = make_opposed(
            start,
            record,
            turned,
            rng,
            n_classes=n_classes,
            label_bandwidth=bandwidth,
            encoding=encoding,
            private_labels=private_labels,
            shift=0.0 if number % 2 else float(rng.normal()) * 0.1,
        )
        for sharp in (pair, _move_to_poles(pair)):
            best = max(
                best,
                climb(
                    sharp,
                    start,
                    bandwidth=bandwidth,
                    label_weight=label_weight,
                    free=True,
                    norm=norm,
                    iterations=iterations,
                ),
            )
    return best


def _move_to_poles(pair: Neighbours) -> Neighbours:
    """Return the same data set with every row at its nearest pole."""
    pole = np.array([1.0, 0.0, 0.0])
    X = np.where(pair.X[:, :1] > 0, 1.0, -1.0) * pole
    return Neighbours(X, -X[pair.record], pair.V, pair.V_other, pair.record)
