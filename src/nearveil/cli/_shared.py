"""What commands share: options, tables, bars of progress, and errors in words."""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, TypeAlias

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from nearveil.errors import NearveilError

if TYPE_CHECKING:
    from nearveil.cluster import Cluster
    from nearveil.ledger import Account, Ledger

AUTO = "auto"
PATIENCE = 10.0  # seconds: a person waits
_QUIET = 10.0  # seconds between lines that say how far it is
Tick: TypeAlias = Callable[[int], None]
Bars: TypeAlias = Callable[[str, int | None], Tick]

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LedgerPlace: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        envvar="NEARVEIL_LEDGER",
        metavar="PATH_OR_URL",
        help="SQLite file or PostgreSQL URL; ~/.local/share/nearveil/ledger.db by default.",
    ),
]
Witness: TypeAlias = Annotated[
    Path | None,
    typer.Option("--witness", envvar="NEARVEIL_WITNESS", help="The ledger's witness, where it is not the default."),
]
HomeFolder: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where copies of galleries are; in your own folder by default.")
]
IndexPlace: TypeAlias = Annotated[
    str | None,
    typer.Option(
        envvar="NEARVEIL_INDEX",
        metavar="PATH_OR_URL",
        help="As `nearveil index --into`; ~/.local/share/nearveil/index by default.",
    ),
]
ExtractorName: TypeAlias = Annotated[
    str,
    typer.Option(
        "--extractor",
        metavar="NAME_OR_FILE",
        help="What makes features: efficientnet-lite0, mobilenet-v2, hog, a model of `nearveil train` (.nvm) or an "
        "ONNX file; auto takes the index's, or the best that there is.",
    ),
]
TokenFile: TypeAlias = Annotated[Path | None, typer.Option(help="A file with the token for the server.")]
TokenText: TypeAlias = Annotated[
    str | None,
    typer.Option(
        envvar="NEARVEIL_TOKEN",
        help="The token itself. On a command line others may see it: prefer the file, or the variable.",
    ),
]
Authorities: TypeAlias = Annotated[
    Path | None, typer.Option(help="Certificates that the server is known by (PEM), in place of the usual ones.")
]
OwnCertificate: TypeAlias = Annotated[
    Path | None, typer.Option(help="Your own certificate (PEM), where the server asks clients for one.")
]
OwnKey: TypeAlias = Annotated[Path | None, typer.Option(help="Its key (PEM), if that is in a file of its own.")]
Insecure: TypeAlias = Annotated[
    bool, typer.Option("--insecure", help="Allow plain HTTP to another machine: all on the way see the token.")
]

ClusterPlace: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        envvar="NEARVEIL_CLUSTER",
        metavar="URL",
        help="Work on a Dask cluster: local, local:N, or its scheduler, tls://host:port. The result is the same.",
    ),
]
ClusterAuthorities: TypeAlias = Annotated[
    Path | None, typer.Option("--ca", help="Of the cluster: certificates that its scheduler is known by (PEM).")
]
InsecureCluster: TypeAlias = Annotated[
    bool, typer.Option("--insecure", help="Allow tcp:// to another machine: all on the way see the rows.")
]
CLUSTER_OPTIONS = {
    "cluster": "--cluster",
    "insecure": "--insecure",
    "ca": "--ca",
    "cert": "--cert",
    "key": "--key",
}

_SPOKEN = {  # what errors say to programs, in the words of the command line
    "Ledger(..., read_only=True).verify() lists the problems": "`nearveil budget verify` lists the problems",
    "take a new one (new_key())": "take another, or leave it out",
    "Index.create makes one": "`nearveil index DIR --into` makes one",
}
_FIELDS = re.compile(r"[a-z_]+(, [a-z_]+)*(?=[: ])")


@contextmanager
def report_errors(**options: str) -> Iterator[None]:
    """Turn what a user can mend into a sentence and exit code 1; `options` names parameters in its words."""
    try:
        yield
    except FileExistsError as error:
        fail(f"{error.filename} exists; nothing is overwritten, give another path")
    except (NearveilError, ValueError, ModuleNotFoundError) as error:  # the last one's text says what to install
        fail(_name_options("; ".join((str(error), *getattr(error, "__notes__", ()))), options))
    except OSError as error:  # after ours, some of which are of this kind too
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}")


@contextmanager
def name_extra(extras: str) -> Iterator[None]:
    """Say what to install where an import fails."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f'this needs FastAPI and uvicorn: pip install "nearveil[{extras}]"') from missing


def _name_options(text: str, options: dict[str, str]) -> str:
    for field, option in options.items():
        text = text.replace(f"`{field}`", option)
    found = _FIELDS.match(text)
    fields = found[0].split(", ") if found else []
    if found is None or not set(fields) <= set(options):
        return text
    return ", ".join(options[field] for field in fields) + text[found.end() :]


def fail(text: str) -> NoReturn:
    """Print an error and end with exit code 1."""
    for python, spoken in _SPOKEN.items():
        text = text.replace(python, spoken)
    message = Text.assemble(("Error: ", "bold red"), clean(text))
    Console(stderr=True, highlight=False).print(message, soft_wrap=True)
    raise typer.Exit(1)


def clean(text: object) -> str:
    """Return a text without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(text))


def print_lines(*lines: object, style: str = "", stderr: bool = False) -> None:
    """Print lines as they are, cleaned, without breaks of our own."""
    console = Console(highlight=False, stderr=stderr)
    for line in lines:
        console.print(Text(clean(line), style), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print JSON on one line."""
    typer.echo(json.dumps(value, allow_nan=False))


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> None:
    """Print a table, without headings where all are empty: `right` are of numbers, `whole` never break."""
    grid = Table(title=title, show_header=any(headings))
    for heading in headings:
        justify = "right" if heading in right else "left"
        grid.add_column(heading, justify=justify, overflow="fold", no_wrap=heading in whole)  # type: ignore[arg-type]
    for row in rows:
        grid.add_row(*(_make_cell(cell) for cell in row))
    Console(highlight=False).print(grid)


def _make_cell(cell: object) -> RenderableType:
    return cell if isinstance(cell, Text) else Text(clean(cell), overflow="fold")


@contextmanager
def show_bars() -> Iterator[Bars]:
    """Yield a function that starts progress bars. They show no counts: how many records there are is private."""
    from rich.progress import Progress

    from nearveil.progress import hide_spinners

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _make_lines()
        return
    with hide_spinners(), Progress(console=console, transient=True) as progress:

        def start(text: str, total: int | None) -> Tick:
            for before in progress.task_ids:  # one after the other, and some had no total
                progress.update(before, total=1, completed=1)
            task = progress.add_task(text, total=total)
            return lambda count: progress.advance(task, count)

        start("Getting ready", None)  # libraries are loaded and files are read before there is anything to count
        yield start


def _make_lines() -> Bars:
    """Return a function that reports progress in lines, at most one every ten seconds."""
    said = time.monotonic()

    def start(text: str, total: int | None) -> Tick:
        done = 0

        def tick(count: int) -> None:
            nonlocal done, said
            done += count
            if time.monotonic() - said >= _QUIET:
                said = time.monotonic()
                print_lines(f"{text}: {done / total:.0%}" if total else text, stderr=True)

        tick(0)
        return tick

    return start


class ClusterOptions(NamedTuple):
    """Where a command works, and how that place is known."""

    url: str | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    insecure: bool = False


@contextmanager
def connect_cluster(options: ClusterOptions) -> "Iterator[Cluster]":
    """Connect to a cluster, and tell where its dashboard is."""
    from nearveil.cluster import connect

    if not (options.url or "").startswith("tls:") and any((options.ca, options.cert, options.key)):
        raise ValueError("ca, cert, key: they are for a --cluster at tls://host:port: leave them out")
    with connect(options.url, ca=options.ca, cert=options.cert, key=options.key, insecure=options.insecure) as cluster:
        if cluster.dashboard is not None:
            print_lines(f"Dask's dashboard, where the scheduler has one: {cluster.dashboard}", stderr=True)
        yield cluster


def make_folder(folder: Path | None, option: str) -> None:
    """Make a folder for what a command writes in the end, and say now if nothing can be written there."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be written: {error.strerror}", param_hint=option) from None


def place_ledger(ledger: str | None) -> str:
    """Return where the ledger is: as given, or the default of all commands."""
    from nearveil.storage import data_folder

    return str(data_folder() / "ledger.db") if ledger is None else ledger


def find_ledger(ledger: str | None, *, make: bool = False) -> str:
    """Return where the ledger is; it must be there, unless it may be made: then its default folder is made."""
    from nearveil.ledger import LedgerError
    from nearveil.storage import make_data_folder, parse_url

    where = place_ledger(ledger)
    if make:
        if ledger is None:
            make_data_folder()
        return where
    url = parse_url(where, "url")
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
        raise LedgerError(
            f"there is no ledger at {url.database}: `nearveil budget create` makes one; --ledger or "
            "NEARVEIL_LEDGER names another"
        )
    return where


def find_account(ledger: "Ledger", name: str) -> "Account":
    """Return an account by its name."""
    from nearveil.ledger import AccountError, LedgerError

    try:
        return ledger.account(name)
    except AccountError:
        raise LedgerError(f"there is no account {name!r} here: `nearveil budget show` lists them") from None
