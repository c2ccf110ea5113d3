"""One step of the supervised manifold learning query, and the objective it lowers."""

from typing import Any

from nearveil.graph import GaussianGraph, LabelGraph

Array = Any  # a NumPy array or a torch tensor, whichever the graph was built of


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
    Two rows of which one is drawn half-way to the other:

    >>> import numpy as np
    >>> from nearveil.graph import gaussian_graph
    >>> moved, objective = smlq_step(np.array([[0.0], [1.0]]), gaussian_graph(np.eye(2), bandwidth=1.0))
    >>> moved
    array([[0.5],
           [0.5]])
    >>> round(objective, 4)
    0.3679
    """
    gradient = graph.laplacian_matmul(Z)
    if labels is not None and label_weight:
        gradient = gradient - label_weight * labels.laplacian_matmul(Z)
    return Z - gradient / (2 * graph.degree[:, None]), float((Z * gradient).sum())
