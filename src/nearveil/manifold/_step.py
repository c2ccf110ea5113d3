"""One step of the supervised manifold learning query, and the objective it lowers."""

from dataclasses import dataclass
from typing import Any

from nearveil.graph import GaussianGraph, LabelGraph

Array = Any  # a NumPy array or a torch tensor, whichever the graph was built of


@dataclass(frozen=True)
class Query:
    """The two graphs and the weight between them: all that the objective depends on."""

    graph: GaussianGraph
    labels: LabelGraph | None
    label_weight: float

    def gradient(self, Z: Array) -> Array:
        """Return ``(L_X - alpha L_Y) Z``, half the gradient of the objective."""
        attraction = self.graph.laplacian_matmul(Z)
        if self.labels is None or self.label_weight == 0:
            return attraction
        return attraction - self.label_weight * self.labels.laplacian_matmul(Z)

    def objective(self, Z: Array) -> float:
        """Return ``v(Z) = Tr(Z' L_X Z) - alpha Tr(Z' L_Y Z)``."""
        return float((Z * self.gradient(Z)).sum())

    def step(self, Z: Array) -> tuple[Array, float]:
        """Return where eq. 4 moves `Z`, and v(Z) before it."""
        gradient = self.gradient(Z)
        return Z - gradient / (2 * self.graph.degree[:, None]), float((Z * gradient).sum())

    def mean(self, Z: Array) -> Array:
        """Return the mean of the rows weighted by their degree, which a step leaves unchanged."""
        degree = self.graph.degree
        return (degree[:, None] * Z).sum(axis=0) / degree.sum()


def smlq_step(
    Z: Array, graph: GaussianGraph, labels: LabelGraph | None = None, label_weight: float = 1.0
) -> tuple[Array, float]:
    """Take one step of the supervised manifold learning query.

    In matrices, eq. 4 of the 2022 paper: ``Z + 1/2 Diag(L_X)^-1 (alpha L_Y - L_X) Z``. It never
    raises ``v(Z) = Tr(Z' L_X Z) - alpha Tr(Z' L_Y Z)``, and it leaves the mean of the rows, weighted
    by their degree, where it is (both proved in ``docs/theory/manifold.md``).

    Parameters
    ----------
    Z : array of shape (n, k)
        Where the rows are.
    graph : GaussianGraph
        Who attracts whom: the weights w.
    labels : LabelGraph, optional
        Who repels whom: the weights v. None means no labels.
    label_weight : float, default=1.0
        The alpha of the paper, at least 0.

    Returns
    -------
    moved : array of shape (n, k)
        Where the rows are after the step.
    objective : float
        v(Z), before the step.

    Examples
    --------
    Two rows that attract each other meet half-way:

    >>> import numpy as np
    >>> from nearveil.graph import gaussian_graph
    >>> moved, objective = smlq_step(np.array([[0.0], [1.0]]), gaussian_graph(np.eye(2), bandwidth=1.0))
    >>> moved
    array([[0.5],
           [0.5]])
    >>> round(objective, 4)
    0.3679
    """
    if not label_weight >= 0:
        raise ValueError(f"label_weight must be at least 0; got {label_weight!r}")
    return Query(graph, labels, label_weight).step(Z)
