"""What the query's embeddings look like: over iterations, and before and after alignment (figures 2 and 7 of 2022)."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nearveil.graph import label_graph
from nearveil.manifold import umeyama
from nearveil.privacy.noise import unsafe_seeded
from nearveil.release import PrivateMail
from studies._privatemail import (
    ANCHORS,
    EPSILONS,
    Floats,
    Labels,
    PartlyLabelled,
    averaged,
    files,
    images,
    shown,
    table_2,
    unit_rows,
    walk,
)
from studies._privatemail_methods import FIRST, FIRST_DELTAS, FIRST_EPSILONS, PAPER, PROGRAM
from studies._privatemail_pictures import alignment, errors, iterations
from studies._report import table
from studies._study import Case, Row, Study, grouped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    PROGRAM: ("2022-code", "cars196", EPSILONS, {"label_weight": 0.5}),  # as below figure 7
    PAPER: ("2022", "cars196", EPSILONS, {"label_weight": 0.5}),
    FIRST: ("2021", "cub200", FIRST_EPSILONS, {"delta": FIRST_DELTAS[0]}),
}


def cases() -> list[Case]:
    """Return a case a seed for the iterations, and one a version and seed for the alignment."""
    return [{"method": method, "seed": seed} for method in ("iterations", *VERSIONS) for seed in SEEDS]


def measure(case: Case) -> list[Row]:
    """Measure spread or alignment; the first seed keeps some of the points, for the pictures."""
    if case["method"] == "iterations":
        return _iterations(case["seed"])
    return list(_alignment(case["method"], case["seed"]))


def _iterations(seed: int) -> list[Row]:
    drawn = images("cub200", seed, gallery=GALLERY)
    X, labels, setting = unit_rows(drawn)[0], drawn.gallery_labels, table_2("cub200")
    start = np.random.default_rng([seed, 2]).normal(size=(len(X), 2))
    cosines = X @ X.T
    program = {**setting, "bandwidth": setting["bandwidth"] / np.sqrt(2)}  # it divides by sigma^2
    walks = {
        PROGRAM: walk(cosines, PartlyLabelled(labels), start, steps=max(STEPS), **program),
        PAPER: walk(cosines, label_graph(labels, setting["bandwidth"], "integer"), start, steps=max(STEPS), **setting),
    }
    rows: list[Row] = []
    for method, places in walks.items():
        for step, Z in enumerate(places):
            if step not in STEPS:
                continue
            common = {"figure": "iterations", "data": "cub200", "method": method, "seed": seed, "step": step}
            within = within_share(Z, labels)
            rows.append({**common, "kind": "spread", "within": within})
            if seed == SEEDS[0]:
                rows += [{**common, "kind": "point", **point} for point in _dots(Z, labels)]
    return rows


def within_share(Z: Floats, labels: Labels) -> float:
    """Return which part of the variance lies within classes: all of it where classes do not show."""
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    means = np.zeros((len(counts), Z.shape[1]))
    np.add.at(means, codes, Z)
    means /= counts[:, None]
    return float(((Z - means[codes]) ** 2).sum() / ((Z - Z.mean(axis=0)) ** 2).sum())


def _dots(Z: Floats, labels: Labels) -> Iterator[Row]:
    classes = np.unique(labels)
    coloured = classes[np.linspace(0, len(classes) - 1, SHOWN_CLASSES).astype(int)]
    grey = np.flatnonzero(~np.isin(labels, coloured))
    grey = grey[:: max(1, len(grey) // GREY)]
    for place in np.concatenate([grey, *(np.flatnonzero(labels == label)[:DOTS] for label in coloured)]):
        known = labels[place] in coloured
        yield {"x": _short(Z[place, 0]), "y": _short(Z[place, 1]), "class": int(labels[place]) if known else None}


def _alignment(method: str, seed: int) -> Iterator[Row]:
    version, data, epsilons, changes = VERSIONS[method]
    drawn = images(data, seed, gallery=GALLERY)
    server: Any = None
    for epsilon in epsilons:
        mail = PrivateMail.published(
            version, data, epsilon=epsilon, public_seed=seed, allow_unsound=True, **changes
        ).fit(drawn.anchors, drawn.anchor_labels)
        if server is None:  # without noise, so the same at every epsilon
            server = mail.embed_gallery(drawn.gallery, drawn.gallery_labels).anchors
        targets = drawn.queries[:TARGETS]
        messages = mail.release(targets, labels=drawn.query_labels[:TARGETS], rng=unsafe_seeded(seed))
        clients = [message["embedding"] for message in messages]
        moved = [umeyama(client[1:], server).apply(client) for client in clients]
        common = {"figure": "alignment", "data": data, "method": method, "seed": seed, "epsilon": epsilon}
        before = float(np.mean([apart(client[1:], server) for client in clients]))
        after = float(np.mean([apart(client[1:], server) for client in moved]))
        yield {**common, "kind": "error", "before": before, "after": after}
        if seed == SEEDS[0] and epsilon in SHOWN.get(method, ()):
            for when, client in (("before", clients[0]), ("after", moved[0])):
                yield from ({**common, "kind": "point", "when": when, **dot} for dot in _clouds(client, server))


def apart(client: Floats, server: Floats) -> float:
    """Return the root mean square distance of the anchors from where the server has them, over the server's spread."""
    return float(np.linalg.norm(client - server) / np.linalg.norm(server - server.mean(axis=0)))


def _clouds(client: Floats, server: Floats) -> Iterator[Row]:
    for role, Z in (("client", client[1 : ANCHOR_DOTS + 1]), ("server", server[:ANCHOR_DOTS]), ("target", client[:1])):
        for x, y in Z:
            yield {"role": role, "x": _short(x), "y": _short(y)}


def _short(value: Any) -> float:
    return float(f"{value:.4g}")


def figures(rows: Sequence[Row]) -> "dict[str, Figure]":
    """Draw all pictures and the error of the alignment."""
    points = [row for row in rows if row["kind"] == "point"]
    shapes = [row for row in points if row["figure"] == "iterations"]
    clouds = grouped([row for row in points if row["figure"] == "alignment"], "method")
    found = {"iterations": iterations(shapes, [row for row in rows if row["kind"] == "spread"])}
    for name, (method, title) in _PICTURES.items():
        if (method,) in clouds:
            found[name] = alignment(clouds[method,], title)
    found["alignment-error"] = errors([row for row in rows if row["kind"] == "error"])
    return found


_PICTURES = {
    "alignment-2022": (PROGRAM, "Cars196, the authors' program of 2022"),
    "alignment-2021": (FIRST, "CUB-200-2011, as published in 2021"),
}


def tell(rows: Sequence[Row]) -> str:
    """Show the pictures, and the numbers that belong to them."""
    spread = [row for row in rows if row["kind"] == "spread"]
    error = [row for row in rows if row["kind"] == "error"]
    drawn = {row["method"] for row in rows if row["kind"] == "point" and row["figure"] == "alignment"}
    parts = [
        "## Over iterations (figure 2 of 2022)",
        "![Embeddings of CUB over iterations, eight classes in colours and markers. By the program, classes fall into "
        "an order along a line; by the paper's equation they do not.](privatemail-embeddings-iterations.svg)",
        "The part of the variance that lies within classes. Where it is one, classes do not show. All rows are "
        "labelled, so an embedding that shows classes shows its input.",
        table(
            ["method", *(f"iteration {step}" for step in STEPS)],
            [
                [method, *(shown(averaged(part, "within")) for part in grouped(group, "step").values())]
                for (method,), group in grouped(spread, "method").items()
            ],
        ),
        "## Before and after alignment (figure 7 of 2022, figure 4 a to f of 2021)",
    ]
    for name, (method, title) in _PICTURES.items():
        if method in drawn:
            text = f"{title}: the client's and the server's anchors before and after alignment, at three epsilons."
            parts.append(f"![{text}](privatemail-embeddings-{name}.svg)")
    parts += [
        "![The error of the alignment over epsilon.](privatemail-embeddings-alignment-error.svg)",
        "The distance of the client's anchors from the server's after alignment, in units of the server's spread. "
        "One is what a client gets that sends noise alone: the best that alignment can do is to shrink it to a point. "
        "Anchors are public: the noise on them protects nobody. In the sound version they are not sent, and "
        "this error is zero at every epsilon.",
        table(
            ["data", "method", "epsilon", "before", "after"],
            [
                [data, method, f"{epsilon:g}", f"{averaged(group, 'before').value:.3g}", shown_wide(group)]
                for (data, method, epsilon), group in grouped(error, "data", "method", "epsilon").items()
            ],
        ),
        "Means over seeds, with 95% intervals.",
    ]
    return "\n\n".join(parts)


def shown_wide(group: Sequence[Row]) -> str:
    """Return the mean error after alignment and its interval."""
    found = averaged(group, "after")
    return f"{found.value:.3f} ({max(found.low, 0):.3f} to {found.high:.3f})"


STUDY = Study(
    name="privatemail-embeddings",
    title="PrivateMail's embeddings: over iterations, and before and after alignment",
    about=(
        "The pictures of the papers, with what they show as numbers. *Over iterations*: the query on the searched "
        "classes of CUB, all rows with their labels, without noise, from one random start; *program* is the authors' "
        "code, *as published* is the paper's equation 4. *Alignment*: the client embeds one target and 1,000 anchors "
        "with noise, the server its gallery and the same anchors without; Umeyama's transform brings the client's "
        "anchors to the server's. Label weight 0.5 on Cars196, as below figure 7; for 2021 two noisy iterations at "
        "delta 0.99, as on the axis of its figure 4. None of these versions keeps its promise.\n\n"
        "Features are those of EfficientNet-Lite0, not of CGD. Pictures are of the first seed."
    ),
    cases=cases,
    measure=measure,
    figures=figures,
    tell=tell,
    data=files("cub200", "cars196"),
    parameters={
        "gallery": GALLERY,
        "anchors": ANCHORS,
        "targets": TARGETS,
        "others": "Table 2 of the 2022 paper",
    },
    seeds=SEEDS,
)
