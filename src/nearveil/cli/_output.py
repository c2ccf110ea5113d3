"""Terminal output of the commands: errors, tables, JSON and progress bars."""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearveil.errors import NearveilError
from nearveil.progress import Progress, Tick, hide_spinners

NOT_INSTALLED = 'the studies are a package of their own: pip install nearveil-studies, or, in a clone, -e ".[study]"'
_PROGRESS_INTERVAL = 10.0  # seconds between progress lines without a terminal
_FIELDS = re.compile(r"[a-z_]+(, [a-z_]+)*(?=[: ])")
_COMMANDS = {  # Python calls in error messages, and the commands that do the same
    "Ledger(..., read_only=True).verify()": "`nearveil budget verify`",
    " verify() lists": " `nearveil budget verify` lists",
    "open_account() opens one, accounts() lists": "`nearveil budget create` opens one, `nearveil budget show` lists",
    "account() returns it": "its terms never change. Use another name, or see `nearveil budget show`",
    "take a new one (new_key())": "use another key, or leave out --key",
    "Create one with Index.create()": "Create one with `nearveil index DIR --into GALLERY`, or name another",
    "has no published map: call publish(epsilon)": "has no map yet; run `nearveil index DIR` again",
    "Index.create()": "`nearveil index DIR --into GALLERY`",
    "client.sync() or `nearveil sync`": "`nearveil sync`",
    "epsilon=4,": "--epsilon 4,",
}


@contextmanager
def report_errors(**options: str) -> Iterator[None]:
    """Print a user error and exit with code 1. `options` maps parameter names in messages to option names."""
    try:
        yield
    except FileExistsError as error:
        fail(f"{error.filename} exists and is not overwritten; use another path")
    except (NearveilError, ValueError, ModuleNotFoundError) as error:  # the last names the extra to install
        fail(_name_options("; ".join((str(error), *getattr(error, "__notes__", ()))), options))
    except OSError as error:  # last: some errors of this library are OSErrors too
        path = f"{error.filename}: " if error.filename else ""
        fail(f"{path}{error.strerror or error}")


@contextmanager
def require_extra(extras: str) -> Iterator[None]:
    """Name the extra to install if an import fails."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f'this needs FastAPI and uvicorn: pip install "nearveil[{extras}]"') from missing


def _name_options(text: str, options: dict[str, str]) -> str:
    for field, option in options.items():
        text = text.replace(f"`{field}`", option)
    match = _FIELDS.match(text)
    fields = match[0].split(", ") if match else []
    if match is None or not set(fields) <= set(options):
        return text
    return ", ".join(options[field] for field in fields) + text[match.end() :]


def fail(text: str) -> NoReturn:
    """Print an error and exit with code 1."""
    for call, command in _COMMANDS.items():
        text = text.replace(call, command)
    message = Text.assemble(("Error: ", "bold red"), clean(text))
    Console(stderr=True, highlight=False).print(message, soft_wrap=True)
    raise typer.Exit(1)


def clean(text: object) -> str:
    """Replace control characters, which could change the state of the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(text))


def print_lines(*lines: object, style: str = "", stderr: bool = False) -> None:
    """Print lines, without control characters and without line breaks at the width of the terminal."""
    console = Console(highlight=False, stderr=stderr)
    for line in lines:
        console.print(Text(clean(line), style), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print JSON on one line; infinity is null."""
    typer.echo(json.dumps(_replace_infinity(value), allow_nan=False))


def _replace_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_infinity(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_replace_infinity, value))
    return None if value == math.inf else value


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    right: Sequence[str] = (),
    no_wrap: Sequence[str] = (),
) -> None:
    """Print a table. The columns in `right` are aligned right; no heading is printed if all are empty."""
    grid, console = Table(title=title, show_header=any(headings)), Console(highlight=False)
    cells = [[_make_cell(cell) for cell in row] for row in rows]
    columns = [[heading, *(row[number].plain for row in cells)] for number, heading in enumerate(headings)]
    widths = _fit_words(columns, console.width - 3 * len(columns) - 1)
    for heading, width in zip(headings, widths, strict=True):
        settings: Any = {"justify": "right" if heading in right else "left", "no_wrap": heading in no_wrap}
        grid.add_column(heading, overflow="fold", width=width, **settings)
    for cell_row in cells:
        grid.add_row(*cell_row)
    console.print(grid)


def _fit_words(columns: Sequence[Sequence[str]], room: int) -> list[int] | list[None]:
    """Return the widths of columns in which no word breaks; None for each column if there is no room for that."""
    least = [max(cell_len(word) for text in column for word in (text.split() or [""])) for column in columns]
    widths = [max(cell_len(line) for text in column for line in text.split("\n")) for column in columns]
    if sum(least) > room:
        return [None] * len(columns)
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda number: (widths[number] > least[number], widths[number]))
        widths[widest] -= 1
    return widths


def _make_cell(cell: object) -> Text:
    if isinstance(cell, list | tuple):
        cell = ", ".join(cell)
    return cell if isinstance(cell, Text) else Text(clean(cell), overflow="fold")


@contextmanager
def show_bars() -> Iterator[Progress]:
    """Yield a function that starts a progress bar. Bars show no counts: the number of private records is private."""
    from rich import progress as bars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _make_line_reporter()
        return
    with hide_spinners(), bars.Progress(console=console, transient=True) as progress:

        def start(text: str, total: int | None) -> Tick:
            for previous in progress.task_ids:  # steps run one after the other, and some have no total
                progress.update(previous, total=1, completed=1)
            task = progress.add_task(text, total=total)
            return lambda count: progress.advance(task, count)

        start("Getting ready", None)  # while libraries are loaded and files are read
        yield start


def _make_line_reporter() -> Progress:
    """Return a function that reports progress in lines, at most one every ten seconds."""
    printed_at = time.monotonic()

    def start(text: str, total: int | None) -> Tick:
        done = 0

        def tick(count: int) -> None:
            nonlocal done, printed_at
            done += count
            if time.monotonic() - printed_at >= _PROGRESS_INTERVAL:
                printed_at = time.monotonic()
                print_lines(f"{text}: {done / total:.0%}" if total else text, stderr=True)

        tick(0)
        return tick

    return start


def show_done(start: Progress, text: str) -> Callable[[int, int], None]:
    """Return a function that shows one bar; its arguments are the number done, and the total."""
    tick, done_before = start(text, None), 0
    total_before: int | None = None

    def show(done: int, total: int) -> None:
        nonlocal tick, done_before, total_before
        if total != total_before or done < done_before:
            tick, done_before, total_before = start(text, total), 0, total
        tick(done - done_before)
        done_before = done

    return show


def has_studies() -> bool:
    """Return whether the studies are installed."""
    return find_spec("studies") is not None


def check(is_valid: bool, message: str, name: str) -> None:
    """Raise a usage error about an option or an argument unless it is valid."""
    if not is_valid:
        raise typer.BadParameter(message, param_hint=name)


def make_folder(folder: Path | None, option: str) -> None:
    """Create the output folder of a long command, and fail now if it is not writable."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{folder} is not writable: {error.strerror}", param_hint=option) from None
