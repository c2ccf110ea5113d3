"""Measure two-sided classification: accuracy over the epsilon of a query and the epsilon of the gallery.

Birds (CUB-200-2011) by family and cars (Cars196) by body. A part of the images is public and unlabelled, a part is the
private records, the rest are queries, as many of each class. Everything goes the real way: two indexes, a published
map, a protected gallery with its ledger, messages from the release. At query epsilon 0 a client fetches the answers of
all sets and picks its own, so that the server learns nothing. Ceiling: Theorem C with one class. Floor: the best
constant answer. The split for choosing parameters (--split development) shares no image with the one that is reported.
"""

import argparse
import json
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLASSES = {
    "cub200_cropped_lite0": (
        "Auklet", "Blackbird", "Flycatcher", "Grebe", "Grosbeak", "Gull", "Kingfisher", "Oriole", "Sparrow", "Swallow",
        "Tern", "Vireo", "Warbler", "Woodpecker", "Wren",
    ),
    "cars196_cropped_lite0": ("Cab", "Convertible", "Coupe", "Hatchback", "Minivan", "SUV", "Sedan", "Van", "Wagon"),
}  # fmt: skip
TITLES = {"cub200_cropped_lite0": "birds, 15 families", "cars196_cropped_lite0": "cars, 9 bodies"}
QUERY_EPSILONS = (0.0, 1.0, 2.0, 4.0, 6.0)
GALLERY_EPSILONS = (0.5, 2.0, 8.0)
DELTA = 1e-5
SETS_PER_CLASS = (1, 2, 4)
CANDIDATES = 0.05
MAP_EPSILON = 4.0
PUBLIC, DEVELOPMENT = 0.3, 0.4  # shares of the images
QUERIES = 30  # of each class
REPEATS = 5  # galleries with noise of their own, and messages of their own
NEIGHBORS = 10  # of the classifier without any privacy
Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Trial:
    """Public images, private records and queries, with norm one."""

    data: str
    classes: tuple[str, ...]
    public: Rows
    private: Rows
    private_y: NDArray[np.str_]
    queries: Rows
    query_y: NDArray[np.str_]


def labels_of(name: str) -> NDArray[np.str_]:
    """Return the family of every bird, or the body of every car: a word of the name of its class."""
    from studies.data import find

    with np.load(find(f"{name}/{name}.npz")) as arrays:
        names, numbers = arrays["class_names"], arrays["labels"]
    words = [one.split("_")[-1].split(".")[-1] if name.startswith("cub") else one.split()[-2] for one in names]
    found: NDArray[np.str_] = np.array(words)[numbers]
    return found


def split(name: str, part: str, seed: int = 0) -> Trial:
    """Return the images of one part, cut into public, private and queries."""
    from studies.data import load_features

    rng, labels, rows = np.random.default_rng(seed), labels_of(name), load_features(name).features.astype(np.float32)
    once = np.unique(rows, axis=0, return_index=True)[1]  # some photographs of cars are there twice
    order = rng.permutation(once[np.isin(labels[once], CLASSES[name])])
    cut = round(DEVELOPMENT * len(order))
    here = order[:cut] if part == "development" else order[cut:]
    queries = np.concatenate([here[labels[here] == one][:QUERIES] for one in CLASSES[name]])
    rest = rng.permutation(np.setdiff1d(here, queries))
    public, private = np.split(rest, [round(PUBLIC * len(rest))])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return Trial(name, CLASSES[name], rows[public], rows[private], labels[private], rows[queries], labels[queries])


def accuracy_without_privacy(trial: Trial) -> float:
    """Return what the nearest private records say, seen as they are."""
    from sklearn.neighbors import KNeighborsClassifier

    middle = trial.public.mean(axis=0)
    nearest = KNeighborsClassifier(NEIGHBORS, metric="cosine").fit(trial.private - middle, trial.private_y)
    return float((nearest.predict(trial.queries - middle) == trial.query_y).mean())


def ceiling(epsilon: float, n_classes: int) -> float:
    """Return Theorem C's bound for an answer of one class."""
    return math.exp(epsilon) / (math.exp(epsilon) + n_classes - 1)


def all_answers(gallery: Any) -> NDArray[np.str_]:
    """Ask a gallery for all sets of its newest map and return their labels, as a client with epsilon 0 does."""
    from nearveil.release import Message
    from nearveil.retrieval import Query

    sets = next(iter(gallery._sets.values()))
    frames = [Message("covers", sets.public_id, {"sets": np.array([n], np.int32)}) for n in range(sets.count)]
    return np.array([gallery.classify(Query(message).to_bytes(), "bench").label for message in frames])


def named(trial: Trial, published: Any, epsilon: float) -> NDArray[np.int64]:
    """Return the set that each query's message names; at epsilon 0 its own, which nobody is told."""
    from nearveil.release import Covers

    release = Covers(epsilon or MAP_EPSILON, published.release.candidates)
    release.fit_mean(published.mean, published.public_digest).use_map(published.map)
    if epsilon == 0:
        own: NDArray[np.int64] = published.map.choose(release.features(trial.queries))
        return own
    return np.array([int(message["sets"][0]) for message in release.release(trial.queries)])


def without_noise(gallery: Any) -> NDArray[np.str_]:
    """Return the labels that the votes on all sets of the newest map have before noise: what the sets alone lose."""
    sets = next(iter(gallery._sets.values()))
    voter = gallery._voters.on(sets)
    counts = np.concatenate([tally.sums for tally in voter._poll.tallies(sets.prototypes, None)])
    found: NDArray[np.str_] = voter.classes_[counts.argmax(axis=1)]
    return found


def measure(trial: Trial, per_class: int, candidates: float, folder: Path) -> list[dict[str, Any]]:
    """Serve one trial with so many sets for each class; return a record for each pair of epsilons."""
    from nearveil.retrieval import Index, Item
    from nearveil.service import ProtectedGallery

    n_sets, dimension = per_class * len(trial.classes), trial.public.shape[1]
    public = Index.create(folder / "public", dimension=dimension)
    public.add(Item(row) for row in trial.public)
    published = public.publish(MAP_EPSILON, candidates or 1 / n_sets, n_sets=n_sets)
    records = []
    for epsilon in GALLERY_EPSILONS:
        answers = []
        start = time.perf_counter()
        for repeat in range(REPEATS):
            # An index of its own for each: records answer from one account alone.
            private = Index.create(folder / f"private {epsilon} {repeat}", dimension=dimension)
            pairs = zip(trial.private, trial.private_y, strict=True)
            private.add((Item(row, f"{y}/record") for row, y in pairs), row_exact=True)
            gallery = ProtectedGallery(
                private, public, "bench", classes=trial.classes, epsilon=epsilon, delta=DELTA,
                answers=n_sets, ledger=folder / "ledger.db", account=f"epsilon {epsilon}, {repeat}",
            )  # fmt: skip
            answers.append(all_answers(gallery))
        seconds = (time.perf_counter() - start) / REPEATS
        plan = gallery._voters.on(next(iter(gallery._sets.values()))).plan_
        told = {"gallery_epsilon": epsilon, "noise": plan.vote_noise, "voters": plan.n_neighbors, "seconds": seconds}
        records += scored(trial, published, answers, told)
    plain = {"gallery_epsilon": None, "noise": 0.0, "voters": plan.n_neighbors, "seconds": None}
    records += scored(trial, published, [without_noise(gallery)] * REPEATS, plain)
    gallery.close()
    return records


def scored(trial: Trial, published: Any, answers: list[NDArray[np.str_]], told: dict[str, Any]) -> list[dict[str, Any]]:
    """Return how often the answers of galleries are right, for each epsilon of a query."""
    records = []
    for epsilon in QUERY_EPSILONS:
        right = [answer[named(trial, published, epsilon)] == trial.query_y for answer in answers]
        mean = float(np.mean(right))
        error = 1.96 * math.sqrt(mean * (1 - mean) / len(trial.query_y))
        known = {"data": trial.data, "sets": published.map.n_sets, "candidates": published.release.candidates}
        records.append({**known, **told, "query_epsilon": epsilon, "accuracy": mean, "error": error})
    return records


def about(trial: Trial, part: str) -> dict[str, Any]:
    """Return what is known of a trial without a gallery."""
    return {
        "data": trial.data,
        "split": part,
        "classes": len(trial.classes),
        "public": len(trial.public),
        "private": len(trial.private),
        "queries": len(trial.queries),
        "without_privacy": accuracy_without_privacy(trial),
        "floor": 1 / len(trial.classes),
        "ceilings": {f"{one:g}": ceiling(one, len(trial.classes)) for one in QUERY_EPSILONS if one},
    }


def show(told: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Print one table of a data set."""
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{TITLES[told['data']]}: {told['private']:,} private, {told['public']:,} public, {told['queries']} queries "
        f"({told['split']}); no privacy {told['without_privacy']:.3f}, floor {told['floor']:.3f}"
    )
    grid = Table(title=title)
    headings = ("sets", "gallery eps", "noise", "voters", *(f"query eps {one:g}" for one in QUERY_EPSILONS), "s")
    for heading in headings:
        grid.add_column(heading, justify="right")
    for n_sets in dict.fromkeys(record["sets"] for record in records):
        for epsilon in (*GALLERY_EPSILONS, None):
            mine = [r for r in records if (r["sets"], r["gallery_epsilon"]) == (n_sets, epsilon)]
            first, shown = mine[0], "none" if epsilon is None else f"{epsilon:g}"
            took = "" if first["seconds"] is None else f"{first['seconds']:.1f}"
            cells = [f"{record['accuracy']:.3f}" for record in mine]
            grid.add_row(str(n_sets), shown, f"{first['noise']:.1f}", str(first["voters"]), *cells, took)
    bounds = [f"{told['ceilings'][f'{one:g}']:.3f}" for one in QUERY_EPSILONS if one]
    grid.add_row("ceiling", "", "", "", "", *bounds, "")
    Console(width=120).print(grid)


def picture(tables: list[tuple[dict[str, Any], list[dict[str, Any]]]], path: Path) -> None:
    """Draw accuracy over the epsilon of a query, one line for each gallery epsilon, between floor and ceiling."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(tables), 5.2), layout="constrained")
    for axes, (told, records) in zip(np.atleast_1d(figure.subplots(1, len(tables))), tables, strict=True):
        curve = np.linspace(0, max(QUERY_EPSILONS), 100)
        axes.plot(curve, [ceiling(one, told["classes"]) for one in curve], "k-", label="ceiling of a message")
        axes.axhline(told["without_privacy"], color="0.4", linestyle="--", label="no privacy")
        axes.axhline(told["floor"], color="0.4", linestyle=":", label="floor")
        styles = dict(zip(dict.fromkeys(r["sets"] for r in records), ("o-", "s--", "^:"), strict=False))
        for color, epsilon in enumerate(GALLERY_EPSILONS):
            for n_sets, style in styles.items():
                mine = [r for r in records if (r["sets"], r["gallery_epsilon"]) == (n_sets, epsilon)]
                points = [(r["query_epsilon"], r["accuracy"]) for r in mine if r["query_epsilon"] > 0]
                label = f"gallery epsilon {epsilon:g}, {n_sets} sets"
                axes.plot(*zip(*points, strict=True), style, ms=4, color=f"C{color}", label=label)
                axes.plot(0, mine[0]["accuracy"], style[0], ms=7, mfc="none", color=f"C{color}")
        axes.set(xlabel="epsilon of a query (0: all sets are fetched)", ylabel="accuracy", ylim=(0, 1))
        axes.set_title(TITLES[told["data"]])
        axes.grid(alpha=0.25)
        axes.legend(fontsize=6.5, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, draw and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON and the picture")
    parser.add_argument("--split", choices=("reported", "development"), default="reported")
    parser.add_argument("--sets", type=int, nargs="+", default=SETS_PER_CLASS, help="sets for each class")
    parser.add_argument("--candidates", type=float, default=CANDIDATES, help="share of a set; 0: one over their number")
    options = parser.parse_args()
    from studies.data import DataMissingError

    tables = []
    for name in CLASSES:
        try:
            trial = split(name, options.split)
        except DataMissingError as missing:
            print(f"no accuracy was measured: {missing}")
            continue
        records = []
        for per_class in options.sets:
            with tempfile.TemporaryDirectory() as folder:
                records += measure(trial, per_class, options.candidates, Path(folder))
        tables.append((about(trial, options.split), records))
        show(*tables[-1])
    if tables:
        options.out.mkdir(parents=True, exist_ok=True)
        kept = [{"about": told, "records": records} for told, records in tables]
        (options.out / "classify.json").write_text(json.dumps(kept, indent=1) + "\n")
        picture(tables, options.out / "classify.png")
        print(f"kept in {options.out / 'classify.json'} and classify.png")


if __name__ == "__main__":
    main()
