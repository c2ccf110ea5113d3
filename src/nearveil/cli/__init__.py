"""The command line: words for what the library does."""

from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import nearveil


class _Command(NamedTuple):
    """Where a command is defined, and what it does in one line."""

    module: str
    summary: str


_COMMANDS = {
    "index": _Command(
        "_index",
        "Index a folder of images, or vectors of a file: add what is new, delete what is gone, publish the map.",
    ),
    "query": _Command(
        "_query", "Find the images nearest to a private one. The other side sees the name of one set, and nothing else."
    ),
    "classify": _Command(
        "_query",
        "Classify images by the model of a protected gallery. Nothing about them is sent, and nothing is paid.",
    ),
    "sync": _Command(
        "_query", "Fetch all codes of a gallery, or what changed of them, to search them here at epsilon 0."
    ),
    "plan": _Command(
        "_budget", "Weigh the ways to ask a gallery: what each finds, what the server learns, and what to type."
    ),
    "budget": _Command(
        "_budget", "Budgets that last: open accounts, see what is left, check that nobody changed the past."
    ),
    "cost": _Command("_budget", "Price a plan before it runs: by addition, by RDP and by PLD, side by side."),
    "mechanisms": _Command(
        "_budget", "List every mechanism: what it protects, whether its guarantee is proved, and how much it sends."
    ),
    "protect": _Command(
        "_server",
        "Tell what accuracy the model of a protected gallery would have; with --publish, publish it.",
    ),
    "serve": _Command("_server", "Serve galleries to clients elsewhere, until Ctrl-C or SIGTERM."),
    "token": _Command("_server", "Tokens: who may ask a server, and what. Only hashes are kept."),
    "ui": _Command("_asking", "Open a page on this machine: drop an image, see what the server saw and what you got."),
    "label": _Command("_label", "Label a public set from a private one: the nearest private records vote, with noise."),
    "train": _Command("_label", "Train features for your own images: those of one class come close to each other."),
    "audit": _Command(
        "_study",
        "Attack a guarantee, or all of them: run the mechanism many times and show as much epsilon as can be shown.",
    ),
    "study": _Command(
        "_study", "Make tables and figures: of the papers, and of this library. Each is CSV, JSON, SVG, PNG and a page."
    ),
}


class _Commands(TyperGroup):
    """Imports a command when it is called: `nearveil --help` shows all of them and imports none."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {
            name: TyperCommand(name, help=command.summary, rich_markup_mode="rich")
            for name, command in _COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command of a line, and import it."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(args[0]), rest


def load_command(name: str) -> Any:
    """Import a command: a function of its name, or a group."""
    module = import_module(f"nearveil.cli.{_COMMANDS[name].module}")
    group = typer.Typer(rich_markup_mode="rich", add_completion=False)
    if hasattr(module, name):
        group.command(name)(getattr(module, name))
    else:
        group = module.app
    command = typer.main.get_command(group)
    command.name = name
    return command


app = typer.Typer(
    help="Nearest neighbours with a privacy guarantee that you can check.",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(nearveil.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version
