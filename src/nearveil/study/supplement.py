"""``python -m nearveil.study.supplement``: figures 1 to 3 of the Private-kNN supplement, with the true maximisers.

The supplement looks for the worst case of a noisy screening at the threshold and at the ends, and from k / c votes
upwards. Here every max-vote from 0 to k is tried at every order, and the cost of many screenings is put between
Bellman's equation, from above, and one fixed pair of databases asked again and again, from below.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from nearveil.study._supplement_curves import (
    DELTA,
    SAMPLING_RATE,
    SCREENING,
    Costs,
    Surface,
    WorstCases,
    rdp_by_votes,
    screening_costs,
    surface,
    worst_cases,
    worst_fixed_pair,
)

__all__ = [
    "Costs",
    "Surface",
    "WorstCases",
    "plot_costs",
    "plot_surface",
    "plot_worst_cases",
    "rdp_by_votes",
    "screening_costs",
    "surface",
    "worst_cases",
    "worst_fixed_pair",
]

SHOWN = (2, 20, 50, 80, 100, 150, 200, 300)
# Okabe and Ito's colours, which colour-blind readers can tell apart; dashes and thirds of grey do the rest.
_STYLES = (
    ("#D55E00", "-"),
    ("#0072B2", "--"),
    ("#009E73", "-."),
    ("#CC79A7", ":"),
    ("#E69F00", (0, (6, 2, 1, 2, 1, 2))),
)


def plot_surface(axes: Axes, result: Surface, threshold: float = SCREENING.threshold) -> None:
    """Draw figure 1: divergences as a share of the worst at their order, and where the worst is.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
    result : Surface
    threshold : float
        Where the supplement says that the worst is.
    """
    share = (result.rdp / result.worst_rdp[:, None]).T
    image = axes.pcolormesh(result.orders, result.votes, share, cmap="cividis", vmin=0, vmax=1, rasterized=True)
    axes.figure.colorbar(image, ax=axes, label="RDP, as a share of the worst at this order")
    labels = ("the true worst (one on either side)", None)
    for pairs, label in zip((result.most_worst, result.least_worst), labels, strict=True):
        axes.plot(result.orders, pairs[:, 0], color="black", linewidth=2.2, label=label)
    axes.axhline(threshold, color="#D55E00", linestyle="--", linewidth=1.6, label=f"published: T = {threshold:g}")
    axes.set(xlabel=r"order $\alpha$", ylabel="max-vote t", xlim=(result.orders[0], result.orders[-1]))
    axes.legend(loc="lower right", framealpha=0.9)


def plot_worst_cases(
    axes: Axes, result: WorstCases, *, relative: bool = False, marked: Sequence[int] = (20, 80, 100, 150, 300)
) -> None:
    """Draw figure 2.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        Gets no legend; ``axes.legend()`` adds one.
    result : WorstCases
    relative : bool, default=False
        As a share of the Gaussian mechanism's divergence, which makes small differences visible.
    marked : sequence of int
        Orders at which the true maximiser is written.
    """
    unit = result.orders / (2 * result.noise**2) if relative else np.ones_like(result.orders)
    top = result.worst_rdp / unit
    axes.plot(result.orders, top, color="0.75", linewidth=7, solid_capstyle="butt", label="true maximum, and its t")
    for curve, votes, (color, dashes) in zip(result.fixed_rdp.T, result.fixed_votes, _STYLES, strict=False):
        axes.plot(result.orders, curve / unit, color=color, linestyle=dashes, linewidth=1.8, label=_name(votes))
    for order in marked:
        at = int(np.argmin(np.abs(result.orders - order)))
        point = (float(result.orders[at]), float(top[at]))
        axes.plot(*point, "ko", markersize=5)
        axes.annotate(f"{result.worst_pairs[at, 0]}", point, (-2, 8), textcoords="offset points", ha="right")
    axes.set(xlabel=r"order $\alpha$", ylabel="RDP, as a share of the Gaussian's" if relative else "RDP")
    axes.set_ylim(0, 1.12 * float(np.max(top)))


def plot_costs(axes: Axes, result: Costs, *, relative: bool = False) -> None:
    """Draw figure 3.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        Gets no legend; ``axes.legend()`` adds one.
    result : Costs
    relative : bool, default=False
        In units of the exact cost, that is, of Bellman's equation.
    """
    unit = result.bellman if relative else np.ones_like(result.bellman)
    axes.plot(result.counts, result.bellman / unit, color="0.75", linewidth=7, label="Bellman: exact, rounded up")
    axes.plot(result.counts, result.lower / unit, color="black", linewidth=1.2, label="fixed pair: a lower bound")
    for curve, votes, (color, dashes) in zip(result.fixed.T, result.fixed_votes, _STYLES, strict=False):
        axes.plot(
            result.counts,
            curve / unit,
            color=color,
            linestyle=dashes,
            linewidth=1.6,
            label=f"published: {_name(votes)}",
        )
    axes.plot(result.counts, result.classic / unit, "k^", markersize=5, label="RDP maximum, classic")
    axes.plot(result.counts, result.tight / unit, "ks", markersize=5, fillstyle="none", label="RDP maximum, tight")
    axes.set(xscale="log", xlabel="screenings")
    if relative:
        axes.set_ylabel(r"$\varepsilon$ divided by the exact one (below 1: too low)")
    else:
        axes.set(yscale="log", ylabel=rf"$\varepsilon$ at $\delta$ = {DELTA:g}")


def _name(votes: int) -> str:
    known = {int(SCREENING.threshold): " (T)", SCREENING.n_neighbors: " (k)", 30: " (k/10)"}
    return f"t = {votes}{known.get(int(votes), '')}"


def _published(fixed_votes: NDArray[np.int64]) -> list[int]:
    """Return which of the fixed max-votes are those at which the supplement looks for the worst case."""
    return [i for i, votes in enumerate(fixed_votes) if votes in (SCREENING.threshold, SCREENING.n_neighbors)]


def table_of_worst(result: WorstCases, shown: Sequence[int] = SHOWN) -> Table:
    """Lay out where the worst case is, and what the supplement's choices miss.

    Parameters
    ----------
    result : WorstCases
    shown : sequence of int
        Orders.

    Returns
    -------
    rich.table.Table
    """
    table = Table(title="Renyi divergence of one screening (k 300, T 210, noise 85)")
    published = _published(result.fixed_votes)
    for heading in ("order", "worst pair", "maximum", *(_name(result.fixed_votes[i]) for i in published)):
        table.add_column(heading, justify="right")
    for order in shown:
        at = int(np.argmin(np.abs(result.orders - order)))
        pair = "{}, {}".format(*result.worst_pairs[at])
        values = (result.worst_rdp[at], *result.fixed_rdp[at, published])
        table.add_row(f"{order}", pair, *(f"{value:.6e}" for value in values))
    return table


def table_of_costs(result: Costs) -> Table:
    """Lay out what screenings cost.

    Parameters
    ----------
    result : Costs

    Returns
    -------
    rich.table.Table
    """
    table = Table(title=f"epsilon at delta {DELTA:g}, sampling rate {SAMPLING_RATE:g}")
    published = _published(result.fixed_votes)
    fixed = (_name(result.fixed_votes[i]) for i in published)
    for heading in ("count", *fixed, "classic", "tight", "Bellman", "fixed pair"):
        table.add_column(heading, justify="right")
    for at, count in enumerate(result.counts):
        values = (result.classic[at], result.tight[at], result.bellman[at], result.lower[at])
        table.add_row(f"{count}", *(f"{value:.6f}" for value in (*result.fixed[at, published], *values)))
    return table


def draw(out: Path, first: Surface, second: WorstCases, third: Costs) -> list[Path]:
    """Write the figures as PNG.

    Parameters
    ----------
    out : Path
    first : Surface
    second : WorstCases
    third : Costs

    Returns
    -------
    list of Path
    """
    figures = [Figure(figsize=size, layout="constrained") for size in ((7, 4.6), (12, 4.8), (12, 4.8))]
    plot_surface(figures[0].subplots(), first)
    panels = [figure.subplots(1, 2) for figure in figures[1:]]
    for column, relative in enumerate((False, True)):
        plot_worst_cases(panels[0][column], second, relative=relative)
        plot_costs(panels[1][column], third, relative=relative)
    panels[0][0].legend(loc="upper left")
    panels[1][0].legend(loc="lower right", fontsize="small")
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"supplement-{number}.png" for number in (1, 2, 3)]
    for figure, path in zip(figures, paths, strict=True):
        figure.savefig(path, dpi=110)
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute, print and draw the three figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures")
    out = parser.parse_args(arguments).out
    console = Console()
    first, second = surface(), worst_cases()
    console.print(table_of_worst(second))
    third = screening_costs()
    console.print(table_of_costs(third))
    for path in draw(out, first, second, third):
        console.print(f"picture: {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
