"""What the query's embeddings look like: over iterations, and before and after alignment (figures 2 and 7 of 2022)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nearveil.privacy.noise import unsafe_seeded
from nearveil.privatemail.manifold import umeyama
from nearveil.privatemail.published import EXPERIMENTS
from studies import _figures as draw
from studies import _privatemail as shared
from studies._privatemail import FIRST, PAPER, PROGRAM, Floats, Labels
from studies._report import show
from studies._study import Case, Row, Study, list_cases, select, summarise

SEEDS = (0, 1, 2)
GALLERY = 2000
STEPS = (0, 1, 2, 3, 7)
TARGETS = 3  # messages whose alignment is measured, a seed and epsilon
SHOWN_CLASSES = 8  # in colour; the others are grey
GREY = 70  # dots
DOTS = 9  # of a class in colour
ANCHOR_DOTS = 80
SHOWN = {PROGRAM: (0.01, 0.1, 1.0), FIRST: (0.023, 1.056, 10.527)}  # epsilons in pictures
VERSIONS: dict[str, tuple[Any, Any, tuple[float, ...], dict[str, float]]] = {
    PROGRAM: ("2022-code", "cars196", shared.EPSILONS, {"label_weight": 0.5}),  # as below figure 7
    PAPER: ("2022", "cars196", shared.EPSILONS, {"label_weight": 0.5}),
    FIRST: ("2021", "cub200", shared.FIRST_EPSILONS, {"delta": shared.FIRST_DELTAS[0]}),
}
PICTURES = {
    "alignment-2022": (PROGRAM, "Cars196, the authors' program of 2022"),
    "alignment-2021": (FIRST, "CUB-200-2011, as published in 2021"),
}
_ROLES = {  # of the pictures of an alignment: colour, marker, size, what it is
    "server": (draw.COLOURS["sky"], "s", 12, "public anchors, the server's embedding"),
    "client": (draw.COLOURS["red"], "x", 12, "public anchors, the client's noisy embedding"),
    "target": (draw.COLOURS["black"], "*", 130, "the private target"),
}


def cases() -> list[Case]:
    """Return a case a seed for the iterations, and one a version and seed for the alignment."""
    return list_cases(method=("iterations", *VERSIONS), seed=SEEDS)


def measure(case: Case) -> list[Row]:
    """Measure spread or alignment; the first seed keeps some of the points, for the pictures."""
    if case["method"] == "iterations":
        return _measure_iterations(case["seed"])
    return list(_measure_alignment(case["method"], case["seed"]))


def _measure_iterations(seed: int) -> list[Row]:
    drawn = shared.sample_images("cub200", seed, gallery=GALLERY)
    X, labels = shared.normalise_rows(drawn)[0], drawn.gallery_labels
    start, cosines = np.random.default_rng([seed, 2]).normal(size=(len(X), 2)), X @ X.T
    published: Any = EXPERIMENTS["cub200"]
    rows: list[Row] = []
    for method, follow in ((PROGRAM, shared.follow_program), (PAPER, shared.follow_paper)):
        for step, Z in enumerate(shared.walk(cosines, start, steps=max(STEPS), **follow(labels, **published))):
            if step not in STEPS:
                continue
            common = {"figure": "iterations", "data": "cub200", "method": method, "seed": seed, "step": step}
            within = compute_within_share(Z, labels)
            rows.append({**common, "kind": "spread", "within": within})
            if seed == SEEDS[0]:
                rows += [{**common, "kind": "point", **point} for point in _sample_dots(Z, labels)]
    return rows


def compute_within_share(Z: Floats, labels: Labels) -> float:
    """Return which part of the variance lies within classes: all of it where classes do not show."""
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    means = np.zeros((len(counts), Z.shape[1]))
    np.add.at(means, codes, Z)
    means /= counts[:, None]
    return float(((Z - means[codes]) ** 2).sum() / ((Z - Z.mean(axis=0)) ** 2).sum())


def _sample_dots(Z: Floats, labels: Labels) -> Iterator[Row]:
    classes = np.unique(labels)
    coloured = classes[np.linspace(0, len(classes) - 1, SHOWN_CLASSES).astype(int)]
    grey = np.flatnonzero(~np.isin(labels, coloured))
    grey = grey[:: max(1, len(grey) // GREY)]
    for position in np.concatenate([grey, *(np.flatnonzero(labels == label)[:DOTS] for label in coloured)]):
        seen = labels[position] in coloured
        yield {**_shorten(Z[position]), "class": int(labels[position]) if seen else None}


def _measure_alignment(method: str, seed: int) -> Iterator[Row]:
    version, data, epsilons, changes = VERSIONS[method]
    drawn = shared.sample_images(data, seed, gallery=GALLERY)
    server: Any = None
    for epsilon in epsilons:
        mail = shared.make_published(version, data, drawn, seed, epsilon=epsilon, **changes)
        if server is None:  # without noise, so the same at every epsilon
            server = mail.embed_gallery(drawn.gallery, drawn.gallery_labels).anchors
        targets = drawn.queries[:TARGETS]
        messages = mail.release(targets, labels=drawn.query_labels[:TARGETS], rng=unsafe_seeded(seed))
        clients = [message["embedding"] for message in messages]
        moved = [umeyama(client[1:], server).apply(client) for client in clients]
        common = {"figure": "alignment", "data": data, "method": method, "seed": seed, "epsilon": epsilon}
        before = float(np.mean([compute_error(client[1:], server) for client in clients]))
        after = float(np.mean([compute_error(client[1:], server) for client in moved]))
        yield {**common, "kind": "error", "before": before, "after": after}
        if seed == SEEDS[0] and epsilon in SHOWN.get(method, ()):
            for when, client in (("before", clients[0]), ("after", moved[0])):
                yield from ({**common, "kind": "point", "when": when, **dot} for dot in _sample_clouds(client, server))


def compute_error(client: Floats, server: Floats) -> float:
    """Return the root mean square distance of the anchors from where the server has them, over the server's spread."""
    return float(np.linalg.norm(client - server) / np.linalg.norm(server - server.mean(axis=0)))


def _sample_clouds(client: Floats, server: Floats) -> Iterator[Row]:
    for role, Z in (("client", client[1 : ANCHOR_DOTS + 1]), ("server", server[:ANCHOR_DOTS]), ("target", client[:1])):
        for point in Z:
            yield {"role": role, **_shorten(point)}


def _shorten(point: Floats) -> Row:
    """Return a point with four digits, which are enough for a picture."""
    x, y = (float(f"{value:.4g}") for value in point)
    return {"x": x, "y": y}


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw all pictures and the error of the alignment."""
    points = select(rows, kind="point")
    clouds = select(points, figure="alignment")
    results = {"iterations": _draw_iterations(select(points, figure="iterations"), select(rows, kind="spread"))}
    for name, (method, title) in PICTURES.items():
        if method in set(clouds["method"]):
            results[name] = _draw_alignment(select(clouds, method=method), title)
    results["alignment-error"] = _draw_errors(select(rows, kind="error"))
    return results


def _draw_iterations(points: pd.DataFrame, spread: pd.DataFrame) -> Figure:
    """Draw a line of panels a method and a column an iteration."""
    within = spread.groupby(["method", "step"])["within"].mean()
    size = (10.8, 2.35 * points["method"].nunique() + 0.7)
    figure, panels, cells = draw.make_grid(points, size, line="method", column="step")
    for axes, (method, step), group in cells:
        _draw_classes(axes, group)
        axes.set_title(f"iteration {step}", fontsize=9.5)
        axes.set_xlabel(f"within classes: {within[method, step]:.0%}", fontsize=8.5)
        if axes in panels[:, 0]:
            axes.set_ylabel("the authors' program" if method == PROGRAM else "as published, eq. 4")
    draw.finish(figure, panels, ncols=9)
    return figure


def _draw_classes(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw a few classes in colour and the others in grey."""
    rest = rows[rows["class"].isna()]
    axes.scatter(rest["x"], rest["y"], s=7, color="0.8", linewidths=0, label="other classes", rasterized=True)
    for position, (label, group) in enumerate(rows.dropna(subset=["class"]).groupby("class")):
        style = draw.look("", position)
        dot: Any = {"s": 16, "color": style.colour, "marker": style.marker, "linewidths": 0.4, "edgecolors": "white"}
        axes.scatter(group["x"], group["y"], label=f"class {label:.0f}", rasterized=True, **dot)
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("0.8")


def _draw_alignment(points: pd.DataFrame, title: str) -> Figure:
    """Draw the client's and the server's anchors, before alignment above, after it below, a column an epsilon."""
    epsilons = points["epsilon"].unique()
    figure, panels = draw.make_panels(2, len(epsilons), (10.2, 6.4))
    figure.suptitle(title, fontsize=11)
    for column, epsilon in zip(panels.T, epsilons, strict=True):
        for axes, when in zip(column, ("before", "after"), strict=True):
            for role, (colour, marker, size, name) in _ROLES.items():
                here = select(points, epsilon=epsilon, when=when, role=role)
                dot: Any = {"s": size, "color": colour, "marker": marker, "linewidths": 0.9}
                axes.scatter(here["x"], here["y"], label=name, rasterized=True, **dot)
            axes.set_title(f"epsilon {epsilon:g}, {when} alignment", pad=15)  # room for the axis's factor
            axes.locator_params(nbins=4)
            axes.ticklabel_format(style="sci", scilimits=(-2, 3))
    draw.finish(figure, panels)
    return figure


def _draw_errors(rows: pd.DataFrame) -> Figure:
    """Draw the error after alignment over epsilon, a curve a version."""
    figure, ((axes,),) = draw.make_panels(1, 1, (7.4, 4.2))
    labels = {name: f"{name}, {'CUB-200-2011' if name == FIRST else 'Cars196'}" for name in VERSIONS}
    draw.curves(axes, rows, "after", "epsilon", labels=labels, unsound=list(VERSIONS))
    draw.floor(axes, 1, label="noise alone")
    axes.axhline(0, color=draw.COLOURS["blue"], linewidth=1.6, label="PrivateMail made sound: anchors are public")
    draw.epsilon_axis(axes, (0.01, 0.1, 1, 4, 16), label="nominal epsilon of one query")
    axes.set(ylim=(-0.05, 1.1))
    draw.finish(figure, axes, "anchors' error after alignment,\nin units of the server's spread", ncols=1)
    return figure


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the numbers that belong to the pictures."""
    error, keys = select(rows, kind="error"), ["data", "method", "epsilon"]
    drawn = set(select(rows, kind="point", figure="alignment")["method"])
    within = shared.show(select(rows, kind="spread"), "within", "method", "step").unstack(sort=False)
    errors = {
        "before": summarise(error, "before", *keys)["value"].map("{:.3g}".format),
        "after": show(error, "after", *keys, least=0),
    }
    lines = pd.DataFrame(errors).reset_index()
    return {
        "within": within.rename(columns="iteration {}".format).reset_index(),
        "pictures": {name: title for name, (method, title) in PICTURES.items() if method in drawn},
        "errors": lines.assign(epsilon=lines["epsilon"].map("{:g}".format)),
    }


PARAMETERS = {"gallery": GALLERY, "anchors": shared.ANCHORS, "targets": TARGETS, "others": "Table 2 of the 2022 paper"}
DATA = shared.list_files("cub200", "cars196")
STUDY = Study("privatemail-embeddings", cases, measure, figures, facts, DATA, PARAMETERS, SEEDS)
