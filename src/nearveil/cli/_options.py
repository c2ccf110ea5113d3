"""Options that commands share: the ledger that pays, the gallery to search, and the cluster to compute on."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from nearveil.cli._output import check, print_lines, report_errors, set_verbosity, wrap_command
from nearveil.lazy import require_extra

if TYPE_CHECKING:
    from nearveil.client.clients import Client
    from nearveil.cluster import Cluster
    from nearveil.features import Extractor
    from nearveil.ledger import Ledger

AUTO = "auto"
DATA = "~/.local/share/nearveil"  # of most users; see nearveil.storage.data_folder
DATABASE_TIMEOUT = 10.0  # seconds that a command waits for a lock or a connection
_LONGEST_TOKEN = 8200  # bytes read from a token file
_METAVARS = {int: "INT", float: "NUMBER", str: "TEXT", Path: "FILE"}


def option(text: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """Declare an option; without a default, a bool is false, and another type is required unless it includes None."""
    return field(default=default, metadata={"make": typer.Option, "names": names, "help": text, **settings})


def argument(text: str, metavar: str | None = None, *, default: Any = None) -> Any:
    """Declare an argument; see :func:`option`."""
    return field(default=default, metadata={"make": typer.Argument, "names": (), "help": text, "metavar": metavar})


# Options of several commands; every command has the last two.
JSON = option("Print JSON.", "--json")
FORCE = option("Overwrite the file if it exists.")
HOME = option(f"Folder of local copies, or its URL; {DATA}/home by default.", metavar="DIR_OR_URL")
EXTRACTOR = option(
    "Feature extractor: efficientnet-lite0, mobilenet-v2, hog, or a file: .nvm, .onnx or .pth (ResNet-50). By default "
    "the extractor of the index, else the best installed.",
    default=AUTO,
    metavar="NAME",
)
_VERBOSITY = {
    "quiet": option("Print the result and errors only: no progress, no notices.", "-q", "--quiet"),
    "verbose": option("Print details of the result, and the seconds of each stage.", "-v", "--verbose"),
}


class _PlainHelp:
    """Help without types of flags and arguments, and usage without braces."""

    def get_params(self, ctx: Any) -> Any:
        params: Any = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.param_type_name == "argument" or param.is_flag:
                param.display_type_rich = lambda ctx: None  # noqa: ARG005
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "") for piece in pieces]


class Command(_PlainHelp, TyperCommand):
    """A command with plain help."""


class _Group(_PlainHelp, TyperGroup):
    """A group of commands with plain help."""


def make_app(text: str, *, add_completion: bool = False) -> typer.Typer:
    """Return a group of commands with this help."""
    return typer.Typer(
        cls=_Group,
        help=text,
        no_args_is_help=True,
        add_completion=add_completion,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def command(
    app: typer.Typer | None = None, name: str | None = None, *, extra: str = "", rename: bool = True, **names: str
) -> Callable[[Any], Any]:
    """Turn a function into a command, and add it to `app`; each field of a dataclass parameter is an option."""
    # Errors that a user can fix are printed, if `rename` with the names of options in place of parameters; `names` adds
    # some. The lines of the docstring after "For example:" become examples.

    def make(function: Callable[..., None]) -> Callable[..., None]:
        groups, parameters, option_names = _expand_options(function)

        @wraps(function)
        def run(*, quiet: bool, verbose: bool, **values: Any) -> None:
            check(not (quiet and verbose), "not together with --verbose", "--quiet")
            set_verbosity(verbose - quiet)
            with report_errors(**(option_names if rename else {}) | names), require_extra(extra):
                for key, group in groups.items():
                    values[key] = group(**{item.name: values.pop(item.name) for item in fields(group)})
                function(**values)

        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        text, _, examples = cleandoc(function.__doc__ or "").partition("For example:\n")
        paragraphs = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
        lines = [wrap_command(line.strip()) for line in examples.splitlines()]
        run.__doc__ = "\n\n".join([*paragraphs, "\n  ".join(["[bold]Examples[/bold]", *lines])])
        return run if app is None else app.command(name, cls=Command)(run)

    return make


def _expand_options(function: Callable[..., None]) -> tuple[dict[str, type], list[Parameter], dict[str, str]]:
    """Return the option groups by parameter, the parameters with groups expanded, and the names of their options."""
    groups: dict[str, type] = {}
    parameters: list[Parameter] = []
    option_names: dict[str, str] = {}

    def add(name: str, hint: Any, declaration: "Field[Any]", panel: str | None) -> None:
        settings, default = dict(declaration.metadata), declaration.default
        make, names = settings.pop("make"), settings.pop("names")
        low, high = settings.pop("min", None), settings.pop("max", None)
        if low is not None:
            words = f"at least {low}" if high is None else f"from {low:g} to {high:,}".replace("e-0", "e-")
            settings["help"] += f" {words.capitalize()}."
            settings["callback"] = _make_range_check(low, math.inf if high is None else high, words)
        if default is None and type(None) not in get_args(hint):
            default = False if hint is bool else Parameter.empty  # required
        if settings.get("metavar") is None:
            settings["metavar"] = _name_type(hint)
        if make is typer.Option:
            names = names or (f"--{name.replace('_', '-')}",)
            settings.setdefault("rich_help_panel", panel)
        option_names[name] = names[0] if names else (settings["metavar"] or name.upper()).strip("[].")
        annotation = Annotated[hint, make(*names, **settings)]
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

    hints = get_type_hints(function)
    for parameter in signature(function).parameters.values():
        hint = hints[parameter.name]
        if isinstance(hint, type) and is_dataclass(hint):
            groups[parameter.name] = hint
            field_hints = get_type_hints(hint)
            for item in fields(hint):
                add(item.name, field_hints[item.name], item, getattr(hint, "panel", None))
        else:
            add(parameter.name, hint, parameter.default, None)
    for name, declaration in _VERBOSITY.items():
        add(name, bool, declaration, None)
    return groups, parameters, option_names


def _name_type(hint: Any) -> str | None:
    """Return the placeholder of a value in help; None for a flag."""
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    return _METAVARS.get(hint) or next(filter(None, map(_name_type, get_args(hint))), None)


def _make_range_check(low: float, high: float, words: str) -> Callable[[Any], Any]:
    def check_range(value: Any) -> Any:
        if value is not None and not low <= value <= high:
            raise typer.BadParameter(f"must be {words}")
        return value

    return check_range


def load_extractor(name: str) -> "Extractor | None":
    """Return the feature extractor of an option; None for the one of the index."""
    from nearveil.features.backbones import make_extractor

    return None if name == AUTO else make_extractor(name)


@dataclass(frozen=True)
class LedgerOptions:
    """The ledger of a command."""

    panel: ClassVar = "Ledger"
    ledger: str | None = option(
        f"SQLite file or PostgreSQL URL; {DATA}/ledger.db by default.", envvar="NEARVEIL_LEDGER", metavar="PATH_OR_URL"
    )
    witness: Path | None = option("Witness file of the ledger, if not in the default place.", envvar="NEARVEIL_WITNESS")

    @property
    def location(self) -> str:
        """The ledger's path or URL."""
        from nearveil.storage import data_folder

        return str(data_folder() / "ledger.db") if self.ledger is None else self.ledger

    @contextmanager
    def open(self, *, create: bool = False, read_only: bool = False) -> "Iterator[Ledger]":
        """Open the ledger. Only `create` makes a new one."""
        from nearveil.ledger import Ledger, LedgerError
        from nearveil.storage import find_file, make_data_folder, parse_url

        file = find_file(parse_url(self.location, "ledger"))
        if create and self.ledger is None:
            make_data_folder()
        elif not create and file is not None and not file.exists():
            raise LedgerError(
                f"No ledger at {file}. Create one with `nearveil budget create`, or name another with --ledger "
                "or NEARVEIL_LEDGER."
            )
        with Ledger(self.location, witness=self.witness, timeout=DATABASE_TIMEOUT, read_only=read_only) as ledger:
            yield ledger


@dataclass(frozen=True)
class ServerOptions:
    """Credentials and TLS settings for a server."""

    panel: ClassVar = "Server"
    token_file: Path | None = option("File with the token for the server.")
    token: str | None = option(
        "The token. Other users can see it on a command line: prefer the file or the variable.", envvar="NEARVEIL_TOKEN"
    )
    gallery: str | None = option("Gallery of the server; required if it has more than one.")
    ca: Path | None = option("CA certificates to trust (PEM), instead of the system's.")
    certificate: Path | None = option("Client certificate (PEM), if the server requires one.", "--cert")
    certificate_key: Path | None = option("Private key (PEM), if separate.", "--cert-key")
    insecure: bool = option("Allow plain HTTP to another machine: anyone on the network path can read the token.")

    def connect(self, server: str, **settings: Any) -> "Client":
        """Return a client of `server`."""
        from nearveil import Client

        if "://" not in server:
            raise ValueError("--server: must be a URL such as https://host:8321")
        certificate: Any = self.certificate
        if self.certificate_key is not None:
            if certificate is None:
                raise ValueError("--cert-key: requires --cert")
            certificate = certificate, self.certificate_key
        token = self._read_token()
        return Client(server, token, ca=self.ca, certificate=certificate, insecure=self.insecure, **settings)

    def _read_token(self) -> str | None:
        if self.token_file is None:
            return self.token
        if os.name == "posix" and self.token_file.stat().st_mode & 0o077:
            print_lines(f"Warning: other users can read the token in {self.token_file}; chmod 600 it.", stderr=True)
        with self.token_file.open("rb") as content:
            return content.read(_LONGEST_TOKEN).decode("ascii", "replace").strip()


@dataclass(frozen=True)
class GalleryOptions(ServerOptions):
    """A gallery on this machine or of a server."""

    server: str | None = option(
        "Query a server (https://host:8321) instead of a local index.", metavar="URL", rich_help_panel="Options"
    )
    index: str | None = option(
        f"Index on this machine; {DATA}/index by default.",
        envvar="NEARVEIL_INDEX",
        metavar="PATH_OR_URL",
        rich_help_panel="Options",
    )

    @contextmanager
    def open(
        self, *, timeouts: dict[str, Any] | None = None, **settings: Any
    ) -> "Iterator[tuple[Client, Callable[[], bool]]]":
        """Yield a client, and a function that returns whether a local index has changed since its map was learned."""
        from nearveil import Client

        if self.server is not None:
            with self.connect(self.server, **settings, **(timeouts or {})) as client:
                yield client, lambda: False
        elif self.gallery is not None:
            raise ValueError("--gallery: a local index has one gallery; leave it out, or use --server")
        else:
            with require_extra("gallery"):
                from nearveil.gallery.index import Index
                from nearveil.gallery.sync import find_index

            with Index.open(find_index(self.index)) as index, Client(index, **settings) as client:
                yield client, lambda: index.current().stale


@dataclass(frozen=True)
class ClusterOptions:
    """The Dask cluster of a command."""

    panel: ClassVar = "Cluster"
    cluster: str | None = option(
        "Compute on Dask: local, local:N, or a scheduler at tls://host:port.", envvar="NEARVEIL_CLUSTER", metavar="URL"
    )
    ca: Path | None = option("CA certificates of the scheduler (PEM).")
    cert: Path | None = option("Client certificate (PEM).")
    key: Path | None = option("Private key (PEM), if separate.", "--cert-key")
    insecure: bool = option("Allow tcp:// to another machine: anyone on the network path can read the rows.")

    @contextmanager
    def connect(self) -> "Iterator[Cluster]":
        """Connect to the cluster, and print the address of its dashboard."""
        from nearveil.cluster import connect

        if not (self.cluster or "").startswith("tls:") and any((self.ca, self.cert, self.key)):
            raise ValueError("ca, cert, key: only for a --cluster at tls://host:port; leave them out")
        with connect(self.cluster, ca=self.ca, cert=self.cert, key=self.key, insecure=self.insecure) as cluster:
            if cluster.dashboard is not None:
                print_lines(f"Dask dashboard (if the scheduler has one): {cluster.dashboard}", stderr=True)
            yield cluster
