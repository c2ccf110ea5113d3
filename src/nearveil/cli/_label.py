"""``nearveil label``: private records vote on the labels of a public set."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from nearveil.cli import _budget
from nearveil.cli._budget_view import clean
from nearveil.cli._label_file import ReservedFile, check_free, encoded, reserved, table
from nearveil.cli._label_task import LEAST_SIDE, Bars, Features, Task, Tick, prepare
from nearveil.ledger import Account, Ledger
from nearveil.privacy import Guarantee
from nearveil.privacy.guarantee import format_rounded_up
from nearveil.votes import ExhaustedError, PrivateKNeighborsClassifier

_AT_ONCE = 1024  # queries: what was answered is kept if the rest fails
_NO_ACCOUNT = "No account was charged: --account NAME keeps count of what is spent."


@dataclass(frozen=True)
class Outcome:
    """What came of it, all of it public."""

    heading: str
    names: Sequence[str]
    labels: Sequence[str]  # of the first rows, or of all; empty where the votes did not agree
    guarantee: Guarantee
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        """The labels as CSV."""
        return table(self.heading, self.names[: len(self.labels)], self.labels)


def label(
    private: Annotated[
        Path, typer.Argument(metavar="PRIVATE", help=".npz, .csv, or a folder with one folder of images a class.")
    ],
    public: Annotated[Path, typer.Argument(metavar="PUBLIC", help=".npz, .csv, or a folder of images.")],
    epsilon: Annotated[float, typer.Option(help="What all labels together may cost.")],
    delta: Annotated[float, typer.Option(help="Of the promise.")] = 1e-5,
    max_answered: Annotated[
        int | None, typer.Option(min=1, help="Label at most so many; all public rows by default.")
    ] = None,
    neighbors: Annotated[int | None, typer.Option(min=1, help="How many private records vote.")] = None,
    classes: Annotated[
        str | None,
        typer.Option(metavar="LIST_OR_FILE", help="The classes: a,b,c, or a file with one a line; else PRIVATE tells."),
    ] = None,
    features: Annotated[Features, typer.Option(help="Of images: HOG (auto), or the pixels (none).")] = Features.auto,
    side: Annotated[int, typer.Option(min=LEAST_SIDE, max=1024, help="Images of folders become SIDE x SIDE.")] = 32,
    out: Annotated[Path, typer.Option(help="Where the labels go.")] = Path("labels.csv"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
    ledger: Annotated[
        str | None,
        typer.Option("--ledger", envvar="NEARVEIL_LEDGER", metavar="PATH_OR_URL", help="Where the account is kept."),
    ] = None,
    account: Annotated[str | None, typer.Option(help="The account that pays.")] = None,
    unit: Annotated[
        str,
        typer.Option(
            help='What one row of PRIVATE is; the account\'s must be the same. "person with all images" only if each '
            "person has one row."
        ),
    ] = "record",
    witness: _budget.Watch = None,
    as_json: _budget.Json = False,
) -> None:
    """Label a public set from a private one: the nearest private records vote, with noise.

    Rows on which the votes do not agree are left without a label. Everything is read and checked first, then
    paid, then answered.

    [bold]Examples[/bold]

    nearveil label patients.npz public.npz --epsilon 0.5

    nearveil label photos/ downloads/ --epsilon 1 --classes cat,dog,fox --out labels.csv

    nearveil label patients.csv public.csv --epsilon 0.5 --account archive --ledger budget.db
    """
    _check_promise(epsilon, delta)
    with _budget._words():
        _check_out(out, (private, public), force=force)
        with _bars() as bar, _paying(ledger, account, witness) as payer:
            task = prepare(private, public, classes, features, side, bar)
            most = min(max_answered or task.rows, task.rows)
            bar("planning", None)
            model = PrivateKNeighborsClassifier(
                epsilon,
                delta,
                most,
                n_neighbors=neighbors,
                max_screened=task.rows if 2 * most >= task.rows else None,  # no row is screened twice
                classes=np.arange(len(task.classes)) if classes else None,  # else the promise says so
                unit=unit,
                account=payer,
            ).fit(task.records, task.codes)
            _check_budget(payer, model.guarantee)
            largest = table(
                task.heading, task.names, [max(task.classes, key=lambda name: len(encoded(name)))] * task.rows
            )
            with reserved(out, largest, force=force) as file:
                labels, stopped = _ask(model, task, bar("asking", task.rows))
                notes = task.notes if payer else (*task.notes, _NO_ACCOUNT)
                outcome = Outcome(task.heading, task.names, labels, model.guarantee, notes)
                lost = _write(file, outcome)
    _report(outcome, None if lost else out, as_json=as_json)
    if lost:
        _budget._fail(f"{out}: {lost}; the labels are paid for and stand above instead: keep them")
    if stopped:
        _budget._fail(
            f"{stopped} after {len(labels)} of {task.rows} rows: all is paid for, and {out} holds their labels"
        )


def _check_promise(epsilon: float, delta: float) -> None:
    if not 0 < epsilon < math.inf:
        raise typer.BadParameter("must be a positive number, such as 0.5", param_hint="--epsilon")
    if not 0 < delta < 1:
        raise typer.BadParameter("must lie between 0 and 1", param_hint="--delta")


def _check_out(out: Path, inputs: tuple[Path, Path], *, force: bool) -> None:
    check_free(out, force=force)
    where = out.resolve()
    if any(where.is_relative_to(one.resolve()) for one in inputs):
        raise ValueError("--out: it lies where PRIVATE or PUBLIC is; give another path")


@contextmanager
def _bars() -> Iterator[Bars]:
    """Yield what starts a bar, without numbers: how many records there are is private."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:

        def start(text: str, total: int | None) -> Tick:
            for before in progress.task_ids:  # one after the other, and some had no total
                progress.update(before, total=1, completed=1)
            task = progress.add_task(text, total=total)
            return lambda count: progress.advance(task, count)

        yield start


@contextmanager
def _paying(ledger: str | None, account: str | None, witness: Path | None) -> Iterator[Account | None]:
    """Yield who pays; nobody if no account is named."""
    if account is None:
        if ledger is not None:
            raise ValueError("--account must name who pays, because --ledger (or NEARVEIL_LEDGER) is given")
        yield None
        return
    where = _budget.place(ledger)
    _budget._must_exist(where)
    with Ledger(where, witness=witness, timeout=_budget._PATIENCE) as book:
        yield _budget._account(book, account)


def _check_budget(payer: Account | None, promise: Guarantee) -> None:
    """Raise unless everything can be paid: the first screenings must not be bought for answers that cannot be."""
    preview = None if payer is None else payer.preview(promise)
    if preview is not None and not preview.allowed:
        raise ValueError(f"--account: {preview.reason}; lower --epsilon, or name another")


def _ask(model: PrivateKNeighborsClassifier, task: Task, tick: Tick) -> tuple[list[str], str]:
    """Return labels, and why there are fewer than rows if so."""
    labels: list[str] = []
    while len(labels) < len(task.queries):
        some = task.queries[len(labels) : len(labels) + _AT_ONCE]
        try:
            answers = model.answer(some, progress=tick)
        except ExhaustedError:  # the rest is declined
            return labels + [""] * (len(task.queries) - len(labels)), ""
        except KeyboardInterrupt:
            if labels:
                return labels, "stopped"
            raise ValueError("stopped before there were answers; what they cost may be spent") from None
        except Exception as error:
            if labels:
                return labels, f"failed ({type(error).__name__})"
            raise
        names = zip(answers.labels, answers.answered, strict=True)
        labels += [task.classes[code] if answered else "" for code, answered in names]
    return labels, ""


def _write(file: ReservedFile, outcome: Outcome) -> str:
    """Write the labels; return what went wrong, if so, because they must not be lost."""
    try:
        file.write(outcome.text)
    except OSError as error:
        return error.strerror or "it could not be written"
    except ValueError as error:
        return str(error)
    return ""


def _report(outcome: Outcome, out: Path | None, *, as_json: bool) -> None:
    promise, answered = outcome.guarantee, sum(map(bool, outcome.labels))
    figures = {
        "public_rows": len(outcome.names),
        "answered": answered,
        "declined": len(outcome.labels) - answered,
        "epsilon": promise.epsilon,
        "delta": promise.delta,
    }
    if as_json:
        rest = {"promise": str(promise), "out": None if out is None else str(out), "notes": outcome.notes}
        kept = {} if out is not None else {"labels": dict(zip(outcome.names, outcome.labels, strict=False))}
        typer.echo(json.dumps({**figures, **rest, **kept}, allow_nan=False))
        return
    if out is None:
        typer.echo(encoded(outcome.text), nl=False)
        return
    grid = Table(show_header=False)
    for name in ("public_rows", "answered", "declined"):
        grid.add_row(name.replace("_", " "), f"{figures[name]:,}")
    grid.add_row("epsilon", format_rounded_up(promise.epsilon, 4))
    grid.add_row("delta", format_rounded_up(promise.delta))
    grid.add_row("labels", Text(clean(out)))
    console = Console(highlight=False)
    console.print(grid)
    for line in (str(promise), *outcome.notes):
        console.print(Text(clean(line)), soft_wrap=True)
