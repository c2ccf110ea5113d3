"""What the number of sets, learning and the client's rule are worth to covers.

Recalls are expectations over the channel, for queries that no gallery holds, as shares of Theorem D's ceiling. No
noise is drawn, so differences of a percent can be seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearveil.release import Cells, Covers
from nearveil.release._learning import projection
from nearveil.release._mapped import MappedRelease
from nearveil.retrieval._truth import Copies, popularity, true_neighbors
from nearveil.retrieval.ceiling import neighbor_ceiling
from studies import _style
from studies._report import table
from studies._study import Case, Row, Study, grouped, mean
from studies._trial import FILES, NAMES, QUERIES, SETS, Rows, Trial, split

if TYPE_CHECKING:
    from matplotlib.figure import Figure

K = 8
EPSILONS = (1.0, 2.0, 4.0, 6.0)
FRACTIONS = (0.1, 0.2)
SEEDS = (0, 1, 2)
CODE_BYTES = 64
NEAR = 0.9  # of the ceiling: "within 10%"
COLUMNS = {
    "share": "covers",
    "knowing": "covers, true good set",
    "usual_number": "covers, 1/f sets",
    "kmeans": "k-means cells",
}


@dataclass(frozen=True, eq=False)
class Known:
    """A trial whose rows are centred and compared once, for all mechanisms."""

    trial: Trial
    queries: Rows  # of norm one, as the gallery
    gallery: Rows
    truth: NDArray[np.intp]  # the eight nearest items of each query
    counts: NDArray[np.int64]  # how often an item is among the eight nearest of another item

    @classmethod
    def of(cls, trial: Trial) -> "Known":
        """Compare all queries with all items."""
        centred = Cells(1.0).fit(trial.public)  # any release: all centre alike
        queries, gallery = (centred.features(rows).astype(np.float32) for rows in (trial.queries, trial.gallery))
        return cls(trial, queries, gallery, true_neighbors(queries, gallery, K), popularity(gallery, K))


def expected(release: MappedRelease, known: Known, *, knowing: bool = False) -> float:
    """Return the expected NN-recall@8."""
    copies, members = Copies(known.gallery), release.members_
    sets = np.split(members.indices, members.indptr[1:-1])
    coverage = np.stack([copies.recall(known.truth, items) for items in sets], axis=1)
    good = coverage.argmax(axis=1) if knowing else release.map_.choose(known.queries.astype(np.float64))
    own = coverage[np.arange(len(coverage)), good]
    channel = release._channel(release.map_)
    other = (coverage.sum(axis=1) - own) / (channel.n_sets - 1)
    return float(np.mean(channel.hit * own + (1 - channel.hit) * other))


def by_codes(known: Known) -> float:
    """Return the NN-recall@8 of a search among 64 dimensions of every item, in 8 bits: no message, epsilon 0."""
    components = projection(known.gallery, CODE_BYTES)
    placed = known.gallery @ components
    scale = np.abs(placed).max(axis=1, keepdims=True) / 127
    found = true_neighbors(known.queries @ components, np.rint(placed / scale) * scale, K)
    return float(Copies(known.gallery).recall(known.truth, found).mean())


def compare(known: Known, candidates: float, epsilons: Sequence[float]) -> list[dict[str, Any]]:
    """Measure one gallery and fraction."""
    public, gallery = known.trial.public, known.trial.gallery
    cells = Cells(epsilons[0], candidates).fit(public).index(gallery)
    codes = by_codes(known)
    found = []
    for epsilon in epsilons:
        covers = Covers(epsilon, candidates).fit(public).index(gallery)
        usual = Covers(epsilon, candidates, n_sets=round(1 / candidates)).fit(public).index(gallery)
        cells = cells.with_epsilon(epsilon)  # cells are the same at every epsilon
        ceiling = neighbor_ceiling(epsilon, candidates, known.counts)
        found.append(
            {
                "epsilon": epsilon,
                "items": len(gallery),
                "n_sets": covers.map_.n_sets,
                "ceiling": ceiling,
                "share": expected(covers, known) / ceiling,
                "knowing": expected(covers, known, knowing=True) / ceiling,
                "usual_number": expected(usual, known) / ceiling,
                "kmeans": expected(cells, known) / ceiling,
                "codes": codes,
            }
        )
    return found


def cases() -> list[Case]:
    """Return every set, split and fraction."""
    return [
        {"data": data, "seed": seed, "f": fraction, "epsilons": list(EPSILONS)}
        for data in SETS
        for seed in SEEDS
        for fraction in FRACTIONS
    ]


@lru_cache(maxsize=1)
def _known(data: str, seed: int) -> Known:
    return Known.of(split(data, seed))


def measure(case: Case) -> list[Row]:
    """Measure one case."""
    common = {name: case[name] for name in ("data", "f", "seed")}
    found = compare(_known(case["data"], case["seed"]), case["f"], case["epsilons"])
    return [{**common, **one} for one in found]


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Draw shares of the ceiling over epsilon."""
    from matplotlib.figure import Figure

    groups = grouped(rows, "data", "f")
    figure = Figure(figsize=(10.5, 3.7), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for axes, ((data, fraction), some) in zip(panels, groups.items(), strict=True):
        epsilons = sorted({row["epsilon"] for row in some})
        _style.ceiling(axes, epsilons, [1.0] * len(epsilons), top=1.05)
        axes.axhline(NEAR, color="0.45", linewidth=1.0, linestyle="--", label="within 10% of the ceiling")
        for place, (column, name) in enumerate(COLUMNS.items()):
            found = [mean(row[column] for row in some if row["epsilon"] == epsilon) for epsilon in epsilons]
            _style.curve(axes, name, epsilons, found, place=place + 3)
        _style.epsilon_axis(axes, epsilons)
        axes.set_title(f"{NAMES.get(data, data)}, answers of {fraction:.0%}")
        axes.set_ylim(0.5, 1.03)
    panels[0].set_ylabel("expected NN-recall@8,\nshare of the ceiling")
    _style.legend_below(figure, panels, ncols=6)
    return {"shares": figure}


def tell(rows: Sequence[Row]) -> str:
    """Return the page's text."""
    lines, near = [], 0
    groups = grouped(rows, "data", "f", "epsilon")
    gains = []
    for (data, fraction, epsilon), some in groups.items():
        shares = {column: mean(row[column] for row in some) for column in COLUMNS}
        own = shares["share"]
        near += own.value >= NEAR
        gains.append((own.value / shares["usual_number"].value - 1, fraction, epsilon, NAMES.get(data, data)))
        sets = " ".join(dict.fromkeys(str(row["n_sets"]) for row in some))
        cells = [f"{shares[column].value:.3f}" for column in ("knowing", "usual_number", "kmeans")]
        first = f"{own.value:.3f} ({own.low:.3f} to {own.high:.3f})"
        lines.append([NAMES.get(data, data), f"{fraction:g}", f"{epsilon:g}", sets, first, *cells])
    rule = max(row["knowing"] - row["share"] for row in rows)
    most = max(gains)
    codes = [
        f"{mean(row['codes'] for row in some).value:.3f} of the true eight on {NAMES.get(data, data)}, for "
        f"{(CODE_BYTES + 4) * some[0]['items'] / 1000:,.0f} kB"
        for (data,), some in grouped(rows, "data").items()
    ]
    head = ["data", "f", "epsilon", "sets", "covers (95% over seeds)", "true good set", "1/f sets", "k-means cells"]
    return "\n\n".join(
        [
            "![Shares of the ceiling over epsilon: covers, covers with the true good set, covers with 1/f sets, "
            "and k-means cells](covers-shares.svg)",
            f"Covers come within 10% of the ceiling in {near} of {len(groups)} settings. A client that knew which "
            f"of its sets is best would gain {rule:.3f} of the ceiling at most, "
            "so the rule by which it chooses is not what stops the others: [neighbourhoods "
            "overlap](../../theory/covers.md).",
            f"The number of sets matters most where it gains {most[0]:.0%} over 1/f sets: {most[3]}, f "
            f"{most[1]:g}, epsilon {most[2]:g}.",
            table(head, lines),
            "## Galleries this small need no release",
            f"A client that was sent {CODE_BYTES} bytes of every item, with its id, and asks nothing at all "
            f"finds, at epsilon 0: {'; '.join(codes)}. "
            "Covers are for galleries whose codes are too many to send; these two are here because their true "
            "neighbours are known.",
        ]
    )


ABOUT = f"""
[Covers](../../theory/covers.md) name one of a few overlapping sets of the gallery. What are their parts worth? *True
good set*: the client knows which set is best, which no client does. *1/f sets*: as many sets as hold the gallery
once, where the map would choose their number by itself. *k-means cells*: 1/f sets that are not learned.

NN-recall@8 is the expectation over the channel, computed and not sampled, as a share of Theorem D's ceiling (a
bound). A seed splits anew: it draws {QUERIES:,} queries, and the gallery is the rest of the half of the classes that
is not public. So intervals are about galleries as well as queries.
"""

STUDY = Study(
    name="covers",
    title="What makes covers good",
    about=ABOUT,
    cases=cases,
    measure=measure,
    figures=figures,
    tell=tell,
    data=FILES,
    parameters={"epsilons": EPSILONS, "f": FRACTIONS, "k": K, "held-out queries": QUERIES},
    seeds=SEEDS,
)
