"""The dial: sealed search inside one named set. Epsilon buys server work: what part is passed over, what is found.

A message names a set of a fraction of the gallery (covers, learned for that epsilon), and the sealed question is asked
inside it. The client is taken to know which set holds most of what it wants; real maps choose nearly as well. Found is the
expected part of the true eight nearest inside the named set, before what sealed search itself loses::

    python bench/sealed_dial.py
"""

import argparse
import os
from pathlib import Path

import faiss
import numpy as np
from sealed import load_photos

from nearveil.mechanisms.covers import learning


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=5000)
    given = parser.parse_args()
    rows, _, queries = load_photos(Path(os.environ.get("NEARVEIL_DATA", "../shared/data")), 300)
    rows = rows[: given.items]
    nearest = faiss.knn(queries, rows, 8, metric=faiss.METRIC_INNER_PRODUCT)[1]
    print("epsilon 0: all is passed over, found 1.00")
    for epsilon in (2.0, 4.0, 6.0):
        for fraction in (0.1, 0.2, 0.5):
            size = int(fraction * len(rows))
            count = learning.usual_number(len(rows), size, epsilon, 200)
            sets = learning.learn_sets(rows, size, epsilon, count).toarray().astype(np.float32)
            coverage = sets[:, nearest].mean(axis=2).T
            found = np.einsum("ij,ij->i", learning.naming(coverage, epsilon), coverage).mean()
            print(f"epsilon {epsilon:g}: {fraction:g} is passed over, found {found:.2f} ({count} sets)", flush=True)


if __name__ == "__main__":
    main()
