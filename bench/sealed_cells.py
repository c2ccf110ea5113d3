"""Cells for sealed search: balanced k-means beside the sets of a learned map, of the same size.

The gallery is CUB-200. A question looks into the B cells whose means are nearest; of learned sets, which overlap, it
looks into the B sets whose means are nearest. Found is the part of the true eight nearest inside::

    python bench/sealed_cells.py
"""

import argparse
import os
from pathlib import Path

import faiss
import numpy as np
from sealed import unit

from nearveil.mechanisms import Covers
from nearveil.metrics import ScoreSpace
from nearveil.sealed.cells import make_cells

PROBES = (1, 2, 4, 8)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, nargs="+", default=[20, 60])
    given = parser.parse_args()
    folder = Path(os.environ.get("NEARVEIL_DATA", "../shared/data")) / "cub200_cropped_lite0"
    with np.load(next(folder.glob("*.npz"))) as stored:
        features = stored["features"].astype(np.float32)
    rows = unit(features - features.mean(axis=0))[np.random.default_rng(1).permutation(len(features))]
    queries, rows = rows[:500], rows[500:]
    space = ScoreSpace("cosine", np.zeros(rows.shape[1]))
    nearest = faiss.knn(queries, rows, 8, metric=faiss.METRIC_INNER_PRODUCT)[1]
    print("| cells | of | " + " | ".join(f"{count} looked into" for count in PROBES) + " |\n|---|---|---|---|---|---|")
    for n_cells in given.cells:
        size = -(-len(rows) // n_cells)
        made = make_cells(rows, n_cells, 1, int(1.06 * size))
        sets = Covers(4.0, size / len(rows), n_sets=n_cells).fit_space(space).index(rows).members_
        inside = {
            f"{n_cells} of k-means": np.eye(n_cells, dtype=bool)[:, made.cells],
            f"{sets.shape[0]} learned sets": sets.toarray() > 0,
        }
        for name, members in inside.items():
            means = np.stack([rows[one].mean(axis=0) for one in members])
            order = np.argsort(-(queries @ means.T - (means**2).sum(axis=1) / 2), axis=1)
            found = []
            for count in PROBES:
                held = np.stack(
                    [members[chosen].any(axis=0)[own] for chosen, own in zip(order[:, :count], nearest, strict=True)]
                )
                found.append(f"{held.mean():.3f}")
            print(f"| {name} | {members.sum(axis=1).mean():.0f} items | " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main()
