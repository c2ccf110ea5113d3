"""The dial: sealed search inside one named part of a gallery. Epsilon buys server work.

The gallery (CUB-200 and Cars-196) is cut into parts by k-means. A message names the part whose centre is nearest, by
randomised response at epsilon, and the sealed question is asked inside it. Found is the expected share of the true
eight nearest in the named part, before what sealed search itself loses::

    python bench/sealed_dial.py
"""

import os
from pathlib import Path

import faiss
import numpy as np
from sealed import load_photos


def main() -> None:
    """Print a table."""
    rows, _, queries = load_photos(Path(os.environ.get("NEARVEIL_DATA", "../shared/data")), 500)
    nearest = faiss.knn(queries, rows, 8, metric=faiss.METRIC_INNER_PRODUCT)[1]
    print("| parts | passed over | epsilon 2 | epsilon 4 | epsilon 6 |\n|---|---|---|---|---|")
    for parts in (2, 5, 10):
        means = faiss.Kmeans(rows.shape[1], parts, niter=10, seed=1)
        means.train(rows)
        own, good = (means.index.search(given, 1)[1][:, 0] for given in (rows, queries))
        share = np.stack([(own[nearest] == part).mean(axis=1) for part in range(parts)], axis=1)
        best, rest = share[np.arange(len(good)), good], 1 - share[np.arange(len(good)), good]
        work, found = np.mean(np.bincount(own, minlength=parts)[good]) / len(rows), []
        for epsilon in (2.0, 4.0, 6.0):
            true = np.exp(epsilon) / (np.exp(epsilon) + parts - 1)
            found.append(float(np.mean(true * best + (1 - true) / (parts - 1) * rest)))
        print(f"| {parts} | {work:.2f} | " + " | ".join(f"{one:.2f}" for one in found) + " |")


if __name__ == "__main__":
    main()
