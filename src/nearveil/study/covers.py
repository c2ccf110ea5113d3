"""``python -m nearveil.study.covers``: what the number of sets, learning and the client's rule are worth.

Recalls are expectations over the channel, for queries that no gallery holds, as shares of Theorem D's
ceiling. No noise is drawn, so differences of a percent can be seen.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nearveil.release import Cells, Covers
from nearveil.release._mapped import MappedRelease
from nearveil.retrieval._evaluate import popularity, true_neighbors
from nearveil.retrieval.ceiling import neighbor_ceiling
from nearveil.study.data import DataMissingError
from nearveil.study.releases import EPSILONS, FRACTIONS, SETS, Trial, split

K = 8


@dataclass(frozen=True)
class Compared:
    """Shares of the ceiling.

    Attributes
    ----------
    data : str
    candidates, epsilon : float
    n_sets : int
        That the map chose by itself.
    share : float
        Of covers as they are.
    knowing : float
        With the good set chosen by the true neighbours, which no client knows.
    usual_number : float
        With as many sets as hold the whole gallery once.
    kmeans : float
        k-means cells.
    codes : float
        NN-recall itself, not a share, of a client that was sent 64 bytes of every item with its id and asks nothing.
    """

    data: str
    candidates: float
    epsilon: float
    n_sets: int
    share: float
    knowing: float
    usual_number: float
    kmeans: float
    codes: float


def expected(release: MappedRelease, trial: Trial, *, knowing: bool = False) -> float:
    """Return the expected NN-recall@8.

    Parameters
    ----------
    release : MappedRelease
        With the trial's gallery.
    trial : Trial
    knowing : bool, default=False
        Whether good sets are chosen by the true neighbours.

    Returns
    -------
    float
    """
    rows = release.features(trial.queries)
    gallery = release.features(trial.gallery)
    top = true_neighbors(rows.astype(np.float32), gallery.astype(np.float32), K)
    coverage: NDArray[np.float64] = release.members_.toarray()[:, top].mean(axis=2).T
    good = coverage.argmax(axis=1) if knowing else release.map_.choose(rows)
    own = coverage[np.arange(len(rows)), good]
    channel = release._channel(release.map_)
    other = (coverage.sum(axis=1) - own) / (channel.n_sets - 1)
    return float(np.mean(channel.hit * own + (1 - channel.hit) * other))


def by_codes(release: MappedRelease, trial: Trial) -> float:
    """Return the NN-recall@8 of a search among 64 dimensions of every item, in 8 bits: no message, epsilon 0.

    Parameters
    ----------
    release : MappedRelease
        With the trial's gallery, for the projection of its map.
    trial : Trial

    Returns
    -------
    float
    """
    rows = release.features(trial.queries).astype(np.float32)
    gallery = release.features(trial.gallery).astype(np.float32)
    components = release.map_.components.astype(np.float32)
    placed = gallery @ components
    scale = np.abs(placed).max(axis=1, keepdims=True) / 127
    found = true_neighbors(rows @ components, np.rint(placed / scale) * scale, K)
    truth = true_neighbors(rows, gallery, K)
    return float((truth[:, :, None] == found[:, None, :]).any(axis=2).mean())


def compare(name: str, trial: Trial, candidates: float, epsilon: float) -> Compared:
    """Measure one set, fraction and epsilon.

    Parameters
    ----------
    name : str
    trial : Trial
    candidates, epsilon : float

    Returns
    -------
    Compared
    """
    covers = Covers(epsilon, candidates).fit(trial.public).index(trial.gallery)
    usual = Covers(epsilon, candidates, n_sets=round(1 / candidates)).fit(trial.public).index(trial.gallery)
    cells = Cells(epsilon, candidates).fit(trial.public).index(trial.gallery)
    counts = popularity(covers.features(trial.gallery).astype(np.float32), K)
    ceiling = neighbor_ceiling(epsilon, candidates, counts)
    return Compared(
        data=name,
        candidates=candidates,
        epsilon=epsilon,
        n_sets=covers.map_.n_sets,
        share=expected(covers, trial) / ceiling,
        knowing=expected(covers, trial, knowing=True) / ceiling,
        usual_number=expected(usual, trial) / ceiling,
        kmeans=expected(cells, trial) / ceiling,
        codes=by_codes(covers, trial),
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description="What the number of sets, learning and the client's rule are worth.")
    parser.add_argument("--out", type=Path, default=Path("out/covers"))
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    console = Console()
    try:
        trials = {name: split(name, chosen.seed) for name in SETS}
    except DataMissingError as missing:
        console.print(f"[red]{missing}")
        raise SystemExit(1) from None
    cases = [(name, fraction, epsilon) for name in SETS for fraction in FRACTIONS for epsilon in EPSILONS]
    results = [compare(name, trials[name], *rest) for name, *rest in track(cases, "covers")]
    shown = Table(title="Expected NN-recall@8 as a share of the ceiling")
    for column in (
        "data",
        "f",
        "epsilon",
        "sets",
        "covers",
        "true good set",
        "1/f sets",
        "k-means cells",
        "codes of all, eps 0",
    ):
        shown.add_column(column)
    for one in results:
        shares = (one.share, one.knowing, one.usual_number, one.kmeans)
        head = (one.data.split("_")[0], f"{one.candidates:g}", f"{one.epsilon:g}", str(one.n_sets))
        shown.add_row(*head, *(f"{share:.3f}" for share in (*shares, one.codes)))
    console.print(shown)
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "covers.json").write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
