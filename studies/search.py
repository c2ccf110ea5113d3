"""``make demo``: a private search among the digits that scikit-learn carries.

A client asks a server's gallery for the nearest matches of a private image. Its budget is debited first, the
server sees the name of one set, the client re-ranks the answer at home. Then the same for many queries: what is
found, between the floor, which asks nothing, and the ceiling, which nothing private can pass.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from sklearn.datasets import load_digits

from nearveil.ledger import Ledger, OverBudgetError, new_key
from nearveil.mechanisms import default
from nearveil.search import Retriever, evaluate
from nearveil.search.evaluation import Copies, Evaluation, true_neighbors

EPSILON, CANDIDATES, BUDGET = 4.0, 0.1, 18.0
EPSILONS = (1.0, 2.0, 4.0, 6.0)
PUBLIC, QUERIES = 300, 200
SHOWN = 4


@dataclass(frozen=True)
class Digits:
    """The handwritten digits of scikit-learn: public rows, a gallery, and private queries."""

    public: NDArray[np.float64]
    gallery: NDArray[np.float64]
    gallery_y: NDArray[np.int64]
    queries: NDArray[np.float64]
    query_y: NDArray[np.int64]


class Answer(NamedTuple):
    """A private query, the items that it found, and those that a search without privacy finds."""

    query: NDArray[np.float64]
    items: NDArray[np.int64]
    truth: NDArray[np.int64]


def split_digits() -> Digits:
    """Split the digits by a fixed shuffle."""
    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order], y[order].astype(np.int64)
    end = len(X) - QUERIES
    return Digits(X[:PUBLIC], X[PUBLIC:end], y[PUBLIC:end], X[end:], y[end:])


def ask(data: Digits, retriever: Retriever, console: Console) -> list[Answer]:
    """Ask until the budget is spent; every debit stands before its message exists."""
    answers: list[Answer] = []
    rows = retriever.space.make_queries(retriever.space.encode(data.queries)).astype(np.float32)
    truth = true_neighbors(rows, retriever.features, 8)
    copies = Copies(retriever.features)
    with tempfile.TemporaryDirectory() as folder, Ledger(Path(folder) / "budget.db") as ledger:
        account = ledger.open_account(
            "demo", owner="client", protects="query", unit="record", relation="replace", epsilon=BUDGET, delta=0.0
        )
        console.print(f"[bold]The guarantee of one query.[/bold] {retriever.guarantee}")
        for number, query in enumerate(data.queries):
            try:
                with account.spend(retriever.guarantee, key=new_key()):
                    results = retriever.nearest(query, k=8)
            except OverBudgetError as refused:
                console.print(f"query {number + 1} refused: {refused}")
                break
            answers.append(Answer(query, results, truth[number]))
            hits = round(8 * copies.recall(truth[[number]], results)[0])
            console.print(f"query {number + 1}: {hits} of the true 8 found; {account.balance()}")
        console.print(str(ledger.verify()))
    return answers


def evaluate_epsilons(data: Digits) -> dict[float, Evaluation]:
    """Evaluate the default release at several epsilons."""
    results = {}
    for epsilon in track(EPSILONS, "epsilons"):
        retriever = Retriever(default(epsilon, CANDIDATES)).fit(data.public).index(data.gallery, data.gallery_y)
        results[epsilon] = evaluate(retriever, data.queries, data.query_y, repeats=5)
    return results


def make_table(results: dict[float, Evaluation]) -> Table:
    """Return what was found at each epsilon."""
    headings = ("epsilon", "found", "ceiling", "floor", "share of the ceiling", "bytes out", "bytes back")
    title = f"NN-recall@8 of {QUERIES} private digits; each answer holds {CANDIDATES:.0%} of the gallery"
    shown = Table(*(Column(heading, justify="right") for heading in headings), title=title)
    for epsilon, entry in results.items():
        shares = (entry.nn_recall.value, entry.ceiling.value, entry.floor.value, entry.share.value)
        sizes = (f"{entry.message_bytes:,}", f"{entry.answer_bytes:,}")
        shown.add_row(f"{epsilon:g}", *(f"{share:.3f}" for share in shares), *sizes)
    return shown


def draw_picture(data: Digits, answers: list[Answer], results: dict[float, Evaluation], path: Path) -> None:
    """Draw the first queries with what they found, and the curve under the ceiling."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.5, 1), squeeze=False)[0]
    grid = left.subplots(min(SHOWN, len(answers)), 9, squeeze=False)
    for panels, entry in zip(grid, answers, strict=False):
        _draw_digit(panels[0], entry.query, "black")
        for panel, item in zip(panels[1:], entry.items, strict=True):
            _draw_digit(panel, data.gallery[item], "tab:blue" if item in entry.truth else "0.8")
    left.suptitle("private image, then the eight found at epsilon 4 (blue frame: one of the true eight)", fontsize=9)
    _draw_curve(right.subplots(), results)
    figure.savefig(path, dpi=130)


def _draw_digit(panel: Any, row: NDArray[np.float64], frame: str) -> None:
    panel.imshow(row.reshape(8, 8), cmap="gray_r")
    panel.set(xticks=[], yticks=[])
    for side in panel.spines.values():
        side.set(color=frame, linewidth=2.5)


def _draw_curve(panel: Any, results: dict[float, Evaluation]) -> None:
    ceiling = [entry.ceiling.value for entry in results.values()]
    recall = [entry.nn_recall for entry in results.values()]
    panel.fill_between(list(results), ceiling, 1, color="0.85", label="impossible: above the ceiling")
    spread = [[r.value - r.low for r in recall], [r.high - r.value for r in recall]]
    panel.errorbar(list(results), [r.value for r in recall], yerr=spread, fmt="o-", capsize=2, label="found")
    floor = results[EPSILONS[0]].floor.value
    panel.axhline(floor, color="black", linewidth=1, linestyle=(0, (1, 3)), label="floor: no query")
    panel.set(xlabel="epsilon of one query", ylabel="NN-recall@8", ylim=(0, 1), xticks=list(results))
    panel.legend(loc="lower right", bbox_to_anchor=(1, 0.22), fontsize=8)


def main(arguments: list[str] | None = None) -> None:
    """Search, measure, print, and draw."""
    parser = argparse.ArgumentParser(description="A private search among scikit-learn's digits.")
    parser.add_argument("--out", type=Path, default=Path("out"))
    chosen = parser.parse_args(arguments)
    console = Console()
    data = split_digits()
    retriever = Retriever(default(EPSILON, CANDIDATES)).fit(data.public).index(data.gallery, data.gallery_y)
    answers = ask(data, retriever, console)
    results = evaluate_epsilons(data)
    console.print(make_table(results))
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "search.png"
    draw_picture(data, answers, results, path)
    console.print(f"picture: {path}")


if __name__ == "__main__":
    main()
