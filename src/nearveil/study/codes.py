"""``python -m nearveil.study.codes``: what compact codes lose on real features, and what a code must know."""

import sys

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from nearveil.release import Covers
from nearveil.release._base import candidate_count
from nearveil.retrieval._codes import Codes, Singles, make_codes
from nearveil.retrieval._evaluate import popularity, true_neighbors
from nearveil.retrieval.ceiling import popular_floor
from nearveil.study.releases import SETS, Trial, split

K = 8


def rows(trial: Trial) -> tuple[Singles, Singles]:
    """Return gallery and queries: centred by the mean of the public rows, of norm one."""
    mechanism = Covers(1.0).fit(trial.public)
    return mechanism.features(trial.gallery).astype(np.float32), mechanism.features(trial.queries).astype(np.float32)


def loss(gallery: Singles, queries: Singles, codes: Codes, fraction: float) -> float:
    """Return the part of the true neighbours that re-ranking by codes misses, among the nearest of the gallery.

    The candidates are the floor(f N) items that are nearest in truth: all true neighbours, and the hardest others.
    """
    count = candidate_count(fraction, len(gallery))
    truth = true_neighbors(queries, gallery, K)
    written = codes.encode(gallery)
    found = 0
    for start in range(0, len(queries), 200):
        block = queries[start : start + 200]
        scores = codes.scores(block, written)
        if count < len(gallery):
            far = np.argpartition(-(block @ gallery.T), count, axis=1)[:, count:]
            np.put_along_axis(scores, far, -np.inf, axis=1)
        chosen: NDArray[np.intp] = np.argpartition(-scores, K, axis=1)[:, :K]
        found += int((truth[start : start + 200, :, None] == chosen[:, None, :]).any(axis=2).sum())
    return 1 - found / (len(queries) * K)


def needed(gallery: Singles, queries: Singles, most: float = 0.01) -> tuple[float, float]:
    """Return the noise of scores that loses `most`, and the bytes that a Gaussian source needs for so little.

    The source has independent coordinates with the gallery's variances along its principal directions. An error along
    a direction counts as much as queries vary there. Shannon's rate, by reverse water-filling.
    """
    truth, scores = true_neighbors(queries, gallery, K), queries @ gallery.T
    drawn = np.random.default_rng(0).standard_normal(scores.shape, dtype=np.float32)

    def excess(log_noise: float) -> float:
        chosen = np.argpartition(-(scores + np.float32(np.exp(log_noise)) * drawn), K, axis=1)[:, :K]
        return 1 - float((truth[:, :, None] == chosen[:, None, :]).any(axis=2).mean()) - most

    noise = float(np.exp(brentq(excess, np.log(1e-5), np.log(1e-2), xtol=0.02)))
    mean = gallery.mean(axis=0)
    variances, directions = np.linalg.eigh(np.cov((gallery - mean).T))
    variances = np.maximum(variances, 1e-12)
    weights = np.mean(((queries - mean) @ directions) ** 2, axis=0, dtype=np.float64)

    def distortions(log_level: float) -> NDArray[np.float64]:
        return np.asarray(np.minimum(variances, np.exp(log_level) / weights))

    level = brentq(lambda log_level: np.sqrt(weights @ distortions(log_level)) - noise, -60, 0)
    return noise, float(0.5 * np.log2(variances / distortions(level)).sum() / 8)


def main() -> None:
    """Print popularity, what a loss of 0.01 takes, and the loss for sizes of a candidate."""
    out = sys.stdout
    for name in SETS:
        for seed in (0, 1):
            gallery, queries = rows(split(name, seed))
            counts = popularity(gallery, K)
            top = np.argsort(-counts, kind="stable")[: candidate_count(0.2, len(gallery))]
            truth = true_neighbors(queries, gallery, K)
            asked = np.bincount(truth.ravel(), minlength=len(gallery))
            out.write(
                f"{name} seed {seed}: top 20% hold {popular_floor(0.2, counts):.3f} (gallery, itself left out), "
                f"{popular_floor(0.2, asked):.3f} (queries), {asked[top].sum() / asked.sum():.3f} (chosen by gallery, "
                "measured on queries)\n"
            )
            if seed == 0:
                noise, rate = needed(gallery, queries)
                out.write(f"  loss 0.01: noise of scores {noise:.5f}; a Gaussian source needs {rate:.0f} bytes\n")
            for size in (None, 128, 256, 512) if seed == 0 else (128,):
                codes = make_codes(gallery, size)
                losses = " ".join(f"f {f:g}: {loss(gallery, queries, codes, f):.4f}" for f in (0.1, 0.2, 1.0))
                out.write(f"  {size or 4 + codes.width} bytes, table {codes.nbytes / 1e6:.1f} MB: {losses}\n")
                out.flush()


if __name__ == "__main__":
    main()
