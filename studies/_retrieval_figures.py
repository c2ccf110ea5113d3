"""The figures of the study of retrieval."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from studies import _style
from studies._retrieval_budget import BUDGET, DELTA
from studies._study import Mean, Row, grouped, mean, of
from studies._trial import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEST = (
    "covers",
    "k-means cells",
    "balanced cells, subset",
    "PrivUnit",
    "PrivUnit, all dimensions",
    "unary, symmetric",
    "LATENT",
)
OTHERS = (
    "unary, optimised",
    "analytic Gaussian",
    "von Mises-Fisher",
    "PrivateMail, Gaussian",
    "PrivateMail, Laplace",
    "DP-dSNE",
    "random projection",
    "OME",
)
BY_CLASS = ("covers", "k-means cells", "PrivUnit", "LATENT", "PrivateMail, Gaussian", "OME")
LACKS = ("the public rows", "the public rows and the gallery")
BUDGET_FRACTION = 0.1
LEAST_GAINING = 0.5  # epsilon below which what one query gains is lost in chance
SMALL = f"{DELTA:.0e}".replace("e-0", "e-")
WAYS = {"pure": "delta 0", "plan": f"delta {SMALL}"}
_PAID = (
    ("a pure message", "pure", "pure, delta 0"),
    ("a pure message", "plan", f"pure, delta {SMALL}"),
    ("analytic Gaussian", "plan", f"Gaussian, delta {SMALL}"),
)


def means(rows: Sequence[Row], value: str, over: str = "epsilon") -> tuple[list[float], list[Mean]]:
    """Return the values of a column over another, rising, each a mean over seeds."""
    groups = grouped(rows, over)
    x = sorted(key for (key,) in groups)
    return x, [mean(row[value] for row in groups[one,]) for one in x]


def neighbours(rows: Sequence[Row], methods: Sequence[str]) -> "Figure":
    """Draw NN-recall over epsilon: a row of panels for each set, a column for each f."""

    def panel(axes: "Axes", here: list[Row]) -> None:
        ceiling = {row["epsilon"]: row["pure_ceiling"] for row in here}
        edge = sorted(ceiling)
        _style.ceiling(axes, edge, [ceiling[epsilon] for epsilon in edge])
        _style.floor(axes, mean(row["floor"] for row in of(here, method=here[0]["method"])).value)
        for method in methods:
            _method(axes, here, method, "nn_recall")

    return _grid(rows, panel, "NN-recall@8")


def same_class(rows: Sequence[Row]) -> "Figure":
    """Draw Recall@8 over epsilon, in the same panels."""

    def panel(axes: "Axes", here: list[Row]) -> None:
        _style.floor(axes, mean(row["recall_floor"] for row in here).value)
        top = mean(row["recall_unprotected"] for row in here).value
        look = _style.look("no privacy")
        axes.axhline(top, color=look.colour, linestyle=look.dashes, linewidth=1.2, label="no privacy")
        for method in BY_CLASS:
            _method(axes, here, method, "recall")

    return _grid(rows, panel, "Recall@8 (same class)")


def _method(axes: "Axes", here: list[Row], method: str, value: str) -> None:
    """Draw a method, if it was measured."""
    some = of(here, method=method)
    if some:
        _style.curve(axes, method, *means(some, value))


def _grid(rows: Sequence[Row], panel: "Callable[[Axes, list[Row]], None]", label: str) -> "Figure":
    from matplotlib.figure import Figure

    found = of(rows, part="recall")
    sets, fractions = (sorted({row[name] for row in found}, reverse=name == "data") for name in ("data", "f"))
    figure = Figure(figsize=(10.5, 0.9 + 2.75 * len(sets)), layout="constrained")
    panels = figure.subplots(len(sets), len(fractions), squeeze=False, sharey=True, sharex=True)
    for line, data in zip(panels, sets, strict=True):
        below = "epsilon of one query" if data == sets[-1] else ""
        for axes, fraction in zip(line, fractions, strict=True):
            here = of(found, data=data, f=fraction)
            panel(axes, here)
            axes.set_title(f"{NAMES.get(data, data)}, answers of {fraction:.0%}")
            axes.set_ylim(0, 1.005)
            epsilons = sorted({row["epsilon"] for row in here})
            _style.epsilon_axis(axes, epsilons, label=below)
        line[0].set_ylabel(label)
    _style.legend_below(figure, list(panels.ravel()), ncols=5)
    return figure


def classes(rows: Sequence[Row]) -> "Figure":
    """Draw what queries of classes that are lacking find less, as a difference for each seed."""
    from matplotlib.figure import Figure

    found = differences(rows)
    sets = sorted({row["data"] for row in found}, reverse=True)
    figure = Figure(figsize=(9.0, 0.8 + 2.7 * len(sets)), layout="constrained")
    panels = figure.subplots(len(sets), len(LACKS), squeeze=False, sharey=True, sharex=True)
    for line, data in zip(panels, sets, strict=True):
        below = "epsilon of one query" if data == sets[-1] else ""
        for axes, lacks in zip(line, LACKS, strict=True):
            here = of(found, data=data, lacks=lacks)
            axes.axhline(0, color="black", linewidth=1.0)
            for (method,), some in grouped(here, "method").items():
                _style.curve(axes, method, *means(some, "difference"))
            axes.set_title(f"{NAMES.get(data, data)}: {lacks} lack the class")
            epsilons = sorted({row["epsilon"] for row in here})
            _style.epsilon_axis(axes, epsilons, label=below)
        line[0].set_ylabel("NN-recall@8, lacking less known")
    _style.legend_below(figure, list(panels.ravel()), ncols=5)
    return figure


def differences(rows: Sequence[Row]) -> list[Row]:
    """Return, for each seed, what queries of lacking classes find, less what those of known classes find.

    Both kinds are made of the same queries: those of one half of the classes are known where the other is lacking.
    """
    found = []
    keys = ("data", "lacks", "method", "epsilon", "seed")
    for key, group in grouped(of(rows, part="classes"), *keys).items():
        sides = {}
        for known in (True, False):
            some = of(group, known=known)
            total = sum(row["queries"] for row in some)
            sides[known] = {
                name: sum(row["queries"] * row[name] for row in some) / total
                for name in ("nn_recall", "ceiling", "floor")
            }
        found.append(
            {
                **dict(zip(keys, key, strict=True)),
                "known": sides[True]["nn_recall"],
                "lacking": sides[False]["nn_recall"],
                "difference": sides[False]["nn_recall"] - sides[True]["nn_recall"],
                **{f"known_{name}": sides[True][name] for name in ("ceiling", "floor")},
                **{f"lacking_{name}": sides[False][name] for name in ("ceiling", "floor")},
            }
        )
    return found


def gains(rows: Sequence[Row]) -> list[Row]:
    """Return, for each seed, how many true neighbours a budget finds beyond what asking nothing finds."""
    paid = {(row["method"], row["epsilon"]): row for row in of(rows, part="budget")}
    found = []
    for row in of(rows, part="recall", f=BUDGET_FRACTION):
        kind = "analytic Gaussian" if row["method"] == "analytic Gaussian" else "a pure message"
        known = row["method"] in ("covers", "k-means cells", "analytic Gaussian")
        if not known or (kind, row["epsilon"]) not in paid:
            continue
        for way in ("pure", "plan"):
            count = paid[kind, row["epsilon"]][way]
            common = {"data": row["data"], "epsilon": row["epsilon"], "seed": row["seed"], "way": way, "queries": count}
            gain = 8 * count * (row["nn_recall"] - row["floor"])
            found.append({**common, "method": row["method"], "gain": gain})
            if row["method"] == "covers":
                bound = 8 * count * (row["pure_ceiling"] - row["floor"])
                found.append({**common, "method": "ceiling", "gain": bound})
    return found


def budget(rows: Sequence[Row]) -> "Figure":
    """Draw how many queries a budget pays for, and what they find beyond the floor."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    left, *others = figure.subplots(1, 3)
    paid = of(rows, part="budget")
    epsilons = sorted({row["epsilon"] for row in paid})
    for place, (kind, way, name) in enumerate(_PAID):
        count = {row["epsilon"]: row[way] for row in of(paid, method=kind)}
        points = [Mean(count[epsilon], count[epsilon], count[epsilon]) for epsilon in epsilons]
        _style.curve(left, name, epsilons, points, place=place)
    left.set_yscale("log")
    left.set_title(f"Queries that epsilon {BUDGET:g} pays for")
    left.set_ylabel("queries")
    left.legend(loc="upper right")
    _style.epsilon_axis(left, epsilons)
    data = max(row["data"] for row in of(rows, part="recall"))
    found = [row for row in gains(rows) if row["data"] == data and row["epsilon"] >= LEAST_GAINING]
    top = 1.3 * max(row["gain"] for row in found if row["method"] == "covers")
    for axes, (way, title) in zip(others, WAYS.items(), strict=True):
        here = of(found, way=way)
        x, bound = means(of(here, method="ceiling"), "gain")
        _style.ceiling(axes, x, [point.value for point in bound], top=2 * top)
        _style.floor(axes, 0.0)
        for (method,), some in grouped([row for row in here if row["method"] != "ceiling"], "method").items():
            if any(row["queries"] for row in some):
                _style.curve(axes, method, *means(some, "gain"))
        axes.set_title(f"Found beyond the floor, {title}")
        axes.set_ylabel("true neighbours, in all")
        axes.set_ylim(-0.6 * top, top)
        _style.epsilon_axis(axes, x)
    _style.legend_below(figure, others, ncols=5)
    return figure
