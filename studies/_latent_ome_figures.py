"""The figures of the study of LATENT and OME."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from studies import _style
from studies._retrieval_figures import means
from studies._study import Mean, Row, grouped, mean, of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT = "OME, its paper's code"
NEGATIVE = "correction is negative"
_LATENT_ALPHAS = (1.0, 7.0, 100.0)
_OME_PANELS = (("OME", 1.0), ("OME", 7.0), ("OME", 100.0), (DEFAULT, 100.0))
_LINES = (
    ("claimed", "claimed", 3),
    ("correction", "corrected in print: no LDP bound", 1),
    ("exact", "exact", 0),
    ("at_delta", "exact, at delta 1e-5", 4),
)


def latent(rows: Sequence[Row]) -> "Figure":
    """Draw LATENT's budgets over the claimed epsilon, a panel for each alpha."""
    return _budgets(rows, tuple(("LATENT", alpha) for alpha in _LATENT_ALPHAS), (9.5, 3.9))


def ome(rows: Sequence[Row]) -> "Figure":
    """Draw OME's budgets over the claimed epsilon."""
    return _budgets(rows, _OME_PANELS, (10.8, 3.9))


def _budgets(rows: Sequence[Row], panels: tuple[tuple[str, float], ...], size: tuple[float, float]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    line = figure.subplots(1, len(panels), sharey=True)
    shown = [row for name, alpha in panels for row in of(rows, part="budget", mechanism=name, alpha=alpha)]
    least = min(row[column] for row in shown for column, *_ in _LINES if row[column] > 0)
    for axes, (name, alpha) in zip(line, panels, strict=True):
        here = sorted(of(shown, mechanism=name, alpha=alpha), key=lambda row: row["claimed"])
        for column, words, place in _LINES:
            sound = column in ("exact", "at_delta") or all(row[column] >= row["exact"] for row in here)
            _line(axes, here, column, words, place, sound)
        lost = [row["claimed"] for row in here if row["correction"] <= 0]
        if lost:
            axes.plot(lost, [least / 2] * len(lost), "v", color="black", markerfacecolor="white", label=NEGATIVE)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"{name}\n{here[0]['bits']} bits, alpha {alpha:g}", fontsize=9.5)
        axes.set_xlabel("claimed epsilon of a vector")
    line[0].set_ylabel("epsilon of a vector")
    _style.legend_below(figure, list(line), ncols=3)
    return figure


def _line(axes: "Axes", here: Sequence[Row], column: str, words: str, place: int, sound: bool) -> None:
    points = [(row["claimed"], row[column]) for row in here if row[column] > 0]
    if points:
        found = [Mean(value, value, value) for _, value in points]
        _style.curve(axes, words, [x for x, _ in points], found, sound=sound, place=place)


def recall(rows: Sequence[Row]) -> "Figure":
    """Draw NN-recall at equal exact epsilon, and what OME finds at the epsilon that it claims."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 5.2), layout="constrained")
    axes = figure.subplots()
    found = of(rows, part="recall")
    ceiling = {row["epsilon"]: row["pure_ceiling"] for row in found}
    epsilons = sorted(ceiling)
    _style.ceiling(axes, epsilons, [ceiling[epsilon] for epsilon in epsilons])
    _style.floor(axes, mean(row["floor"] for row in of(found, method=found[0]["method"])).value)
    for (method,), some in grouped(found, "method").items():
        _style.curve(axes, method, *means(some, "nn_recall"))
    claimed = means(of(rows, part="claimed"), "nn_recall")
    _style.curve(axes, "OME", *claimed, sound=False, label="OME at the epsilon it claims")
    _style.epsilon_axis(axes, epsilons, label="epsilon of one query (exact, but for the dotted curve)")
    axes.set_ylim(0, 1.005)
    axes.set_ylabel("NN-recall@8")
    _style.legend_below(figure, [axes], ncols=3)
    return figure
