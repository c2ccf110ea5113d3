"""The steps after the release: they use public labels and what was released, and cost nothing."""

from dataclasses import dataclass

import numpy as np
from scipy.spatial.distance import cdist

from nearveil.release._privatemail_steps import Floats, Public

_OUT_OF_REACH = 1e-9  # a row of smaller degree has no neighbour worth the name, and stays


@dataclass(frozen=True, eq=False)
class Path:
    """Where the anchors go in T public steps."""

    anchors: Floats
    factors: Floats  # what each step was rescaled by, to bring the anchors to Frobenius norm sqrt(m)


def anchor_path(public: Public, steps: int) -> Path:
    """Move the anchors by the query, its graph rebuilt once from where the private steps left them."""
    rows = [public.embeddings[-1]]
    factors: list[float] = []
    if steps:
        weights = _weights(rows[0], rows[0], public.bandwidth)
        np.fill_diagonal(weights, 0)
    for _ in range(steps):
        drawn = weights @ rows[-1]
        if (labels := public.label_graph) is not None:
            drawn = drawn + public.label_weight * labels.laplacian_matmul(rows[-1])
        moved = _moved(rows[-1], drawn, weights.sum(axis=1))
        factors.append(float(np.sqrt(len(moved)) / np.linalg.norm(moved)))
        rows.append(moved * factors[-1])
    return Path(np.stack(rows), np.array(factors))


def public_steps(public: Public, released: Floats, rows: Floats, path: Path, first: int = 0) -> Floats:
    """Move unlabelled rows along with the anchors, to the end of the path.

    They follow the anchors with weights of the embedding as it was released, and pull at nobody. Rows of
    any number of messages, or of a gallery, move at once.

    `released`: As the private steps left them: what the graph is rebuilt from.
    `rows`: Where they are now.
    `first`: Steps that they have made already.
    """
    if first == len(path.factors):
        return rows
    weights = _weights(released, public.embeddings[-1], public.bandwidth)
    for anchors, factor in zip(path.anchors[first:], path.factors[first:], strict=False):
        rows = factor * _moved(rows, weights @ anchors, weights.sum(axis=1))
    return rows


def _weights(rows: Floats, others: Floats, bandwidth: float) -> Floats:
    """Return Gaussian weights between embedded rows, which are of any norm."""
    found: Floats = np.exp(-cdist(rows, others, "sqeuclidean") / (2 * bandwidth**2))
    return found


def _moved(rows: Floats, drawn: Floats, degree: Floats) -> Floats:
    """Return eq. 4, ``z_i / 2 + (W Z + alpha L_Y Z)_i / (2 D_i)``; a row out of reach stays."""
    reached = degree[:, None] > _OUT_OF_REACH
    return np.where(reached, (rows + drawn / np.where(reached, degree[:, None], 1)) / 2, rows)
