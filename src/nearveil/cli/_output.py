"""Terminal output of the commands: errors, tables, JSON and progress bars."""

import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import fill, wrap
from typing import Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearveil.errors import NearveilError
from nearveil.progress import Progress, Tick, use_display

NOT_INSTALLED = 'the studies are a package of their own: pip install nearveil-studies, or, in a clone, -e ".[study]"'
_PROGRESS_INTERVAL = 5.0  # seconds between progress lines without a terminal
_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}
_BREAKS = ("(?!)", r"(?<=/)(?=.)", r"(?<=[/.])(?=[^\W\d])")  # nowhere; after a slash; also after a dot
_FIELDS = re.compile(r"[a-z_]+(, [a-z_]+)*(?=[: ])")
_COMMANDS = {  # Python calls in error messages, and the commands that do the same
    "Ledger(..., read_only=True).verify()": "`nearveil budget verify`",
    " verify() lists": " `nearveil budget verify` lists",
    "open_account() opens one, accounts() lists": "`nearveil budget create` opens one, `nearveil budget show` lists",
    "open one with open_account()": "open one with `nearveil budget create`",
    "account() returns it": "its terms never change. Use another name, or see `nearveil budget show`",
    "take a new one (new_key())": "use another key, or leave out --key",
    "Create one with Index.create()": "Create one with `nearveil index DIR --into GALLERY`, or name another",
    "has no published map: call publish(epsilon)": "has no map yet; run `nearveil index DIR` again",
    "Index.create()": "`nearveil index DIR --into GALLERY`",
    "client.sync() or `nearveil sync`": "`nearveil sync`",
    "epsilon=4,": "--epsilon 4,",
}


_verbosity: ContextVar[int] = ContextVar("verbosity", default=0)  # -1 quiet, 1 verbose


def set_verbosity(level: int) -> None:
    """Set the level of the running command: -1 quiet, 0, or 1 verbose."""
    _verbosity.set(level)


def is_verbose() -> bool:
    """Return whether details are printed."""
    return _verbosity.get() > 0


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


def _name_options(text: str, options: dict[str, str]) -> str:
    for name, option in options.items():
        text = text.replace(f"`{name}`", option)
    match = _FIELDS.match(text)
    fields = match[0].split(", ") if match else []
    if match is None or not set(fields) <= set(options):
        return text
    return ", ".join(options[field] for field in fields) + text[match.end() :]


def fail(text: str) -> NoReturn:
    """Print an error and exit with code 1."""
    for call, command in _COMMANDS.items():
        text = text.replace(call, command)
    console = Console(stderr=True, highlight=False)
    message = Text(_wrap_words(f"Error: {text}", console))
    message.stylize("bold red", 0, len("Error:"))
    console.print(message, soft_wrap=True)
    raise typer.Exit(1)


def clean(text: object) -> str:
    """Replace control characters, which could change the state of the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(text))


def print_lines(*lines: object, style: str = "", stderr: bool = False) -> None:
    """Print lines, wrapped in a terminal; with --quiet none to standard error, which are notices."""
    if stderr and _verbosity.get() < 0:
        return
    console = Console(highlight=False, stderr=stderr)
    for line in lines:
        console.print(Text(_wrap_words(line, console), style), soft_wrap=True)


def _wrap_words(line: object, console: Console) -> str:
    """Return a line without control characters; for a terminal, with breaks between words."""
    text = clean(line)
    return fill(text, console.width, **_WHOLE_WORDS) if console.is_terminal else text


def wrap_command(line: str) -> str:
    """Break a shell command into lines that fit a terminal of 80 columns and can be pasted."""
    return " \\\n      ".join(wrap(line, 70, **_WHOLE_WORDS))


def print_commands(*lines: str) -> None:
    """Print shell commands, indented."""
    for line in lines:
        print_lines(*f"  {wrap_command(line)}".splitlines())


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
    for pattern in _BREAKS:
        cells = [[_break_words(cell, pattern) for cell in row] for row in cells]
        columns = [[heading, *(row[number].plain for row in cells)] for number, heading in enumerate(headings)]
        columns = [[text.replace(" ", "_") for text in texts] if texts[0] in no_wrap else texts for texts in columns]
        widths = _fit_words(columns, console.width - 3 * len(columns) - 1)
        if None not in widths:
            break
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


def _break_words(cell: Text, pattern: str) -> Text:
    """Break long words of a cell, such as paths, where they match a pattern."""
    text = re.sub(r"\S{20,}", lambda word: re.sub(pattern, "\n", word[0]), cell.plain)
    return Text(text, cell.style, overflow="fold")


def _make_cell(cell: object) -> Text:
    if isinstance(cell, list | tuple):
        cell = ", ".join(cell)
    return cell if isinstance(cell, Text) else Text(clean(cell), overflow="fold")


@dataclass(eq=False)
class _CommandStage:
    """A stage of a command; it shows no counts, because the number of private records is private."""

    text: str
    total: int | None
    done: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def __str__(self) -> str:
        progress = f"{min(1.0, self.done / self.total):.0%}, " if self.total else ""
        return f"{self.text}: {progress}{self.seconds:.0f} s"


@contextmanager
def show_bars() -> Iterator[Progress]:
    """Show the stages of a command: a bar in a terminal, else a line every few seconds."""
    console, stage = Console(stderr=True), _CommandStage("Getting ready", None)  # while libraries are loaded
    display = _show_bar(console) if console.is_terminal and _verbosity.get() >= 0 else _print_stages()
    with display as show:
        show(stage)

        def finish() -> None:
            if is_verbose():
                print_lines(f"{stage.text}: {stage.seconds:.1f} s", stderr=True)

        def start(text: str, total: int | None) -> Tick:
            nonlocal stage
            if text != stage.text:
                finish()
            current = stage = _CommandStage(text, total)
            advance = show(current)

            def tick(count: int) -> None:
                current.done += count
                advance(count)

            return tick

        with use_display(start):
            yield start
        finish()


@contextmanager
def _show_bar(console: Console) -> Iterator[Callable[[_CommandStage], Tick]]:
    """Show a bar of the current stage. Lines printed meanwhile appear above it."""
    from rich import progress as bars

    columns = (*bars.Progress.get_default_columns()[:-1], bars.TimeElapsedColumn())
    redirect = sys.stdout.isatty()  # a file gets the lines as they are
    with bars.Progress(*columns, console=console, transient=True, redirect_stdout=redirect) as progress:

        def show(stage: _CommandStage) -> Tick:
            progress.refresh()  # shows how far the previous stage came
            for previous in progress.task_ids:
                progress.remove_task(previous)
            return partial(progress.advance, progress.add_task(stage.text, total=stage.total))

        yield show


@contextmanager
def _print_stages() -> Iterator[Callable[[_CommandStage], Tick]]:
    """Print the current stage every few seconds, also during long calls without a tick."""
    ended, stages = threading.Event(), list[_CommandStage]()

    def report() -> None:
        while not ended.wait(_PROGRESS_INTERVAL):
            print_lines(*stages, stderr=True)

    def show(stage: _CommandStage) -> Tick:
        stages[:] = [stage]
        return lambda _: None

    thread = threading.Thread(target=copy_context().run, args=(report,), name="progress", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()


def show_done(start: Progress, text: str) -> Callable[[int, int], None]:
    """Return a function that shows one bar; its arguments are the number done, and the total."""
    tick, done_before = start(text, None), 0

    def show(done: int, total: int) -> None:
        nonlocal tick, done_before
        if not 0 < done_before <= done:
            tick, done_before = start(text, total), 0
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
