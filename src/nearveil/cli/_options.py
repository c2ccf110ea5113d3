"""Options that commands share: the ledger that pays, the server to ask, and the cluster to compute on."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

import typer

from nearveil.cli._output import print_lines

if TYPE_CHECKING:
    from nearveil.client.clients import Client
    from nearveil.cluster import Cluster
    from nearveil.gallery import Index
    from nearveil.ledger import Ledger

AUTO = "auto"
DATABASE_TIMEOUT = 10.0  # seconds that a command waits for a lock or a connection
_LONGEST_TOKEN = 1000  # bytes read from a token file

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")]
HomeFolder: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of local copies; below ~/.local/share/nearveil by default.")
]
IndexLocation: TypeAlias = Annotated[
    str | None,
    typer.Option(
        envvar="NEARVEIL_INDEX",
        metavar="PATH_OR_URL",
        help="Index on this machine, as in `nearveil index --into`; ~/.local/share/nearveil/index by default.",
    ),
]
ServerUrl: TypeAlias = Annotated[
    str | None, typer.Option(metavar="URL", help="Query a server (https://host:8321) instead of a local index.")
]
ExtractorName: TypeAlias = Annotated[
    str,
    typer.Option(
        "--extractor",
        metavar="NAME_OR_FILE",
        help="Feature extractor: efficientnet-lite0, mobilenet-v2, hog, a model from `nearveil train` (.nvm) or an "
        "ONNX file. auto: the extractor of the index, else the best installed.",
    ),
]


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter with a dataclass type by one option for each field of the dataclass."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    parameters = []
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint) and isinstance(hint, type):
            groups[parameter.name] = hint
            field_hints = get_type_hints(hint, include_extras=True)
            parameters += [
                Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field_hints[field.name])
                for field in fields(hint)
            ]
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint))

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@dataclass(frozen=True)
class LedgerOptions:
    """The ledger of a command."""

    ledger: Annotated[
        str | None,
        typer.Option(
            "--ledger",
            envvar="NEARVEIL_LEDGER",
            metavar="PATH_OR_URL",
            help="SQLite file or PostgreSQL URL; ~/.local/share/nearveil/ledger.db by default.",
            rich_help_panel="Ledger",
        ),
    ] = None
    witness: Annotated[
        Path | None,
        typer.Option(
            "--witness",
            envvar="NEARVEIL_WITNESS",
            help="Witness file of the ledger, if not in the default place.",
            rich_help_panel="Ledger",
        ),
    ] = None

    @property
    def location(self) -> str:
        """The ledger's path or URL."""
        from nearveil.storage import data_folder

        return str(data_folder() / "ledger.db") if self.ledger is None else self.ledger

    @contextmanager
    def open(self, *, create: bool = False, read_only: bool = False) -> "Iterator[Ledger]":
        """Open the ledger. Only `create` makes a new one."""
        from nearveil.ledger import Ledger, LedgerError
        from nearveil.storage import make_data_folder, parse_url

        url = parse_url(self.location, "url")
        if create and self.ledger is None:
            make_data_folder()
        elif not create and url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
            raise LedgerError(
                f"No ledger at {url.database}. Create one with `nearveil budget create`, or name another with --ledger "
                "or NEARVEIL_LEDGER."
            )
        with Ledger(self.location, witness=self.witness, timeout=DATABASE_TIMEOUT, read_only=read_only) as ledger:
            yield ledger


@dataclass(frozen=True)
class ServerOptions:
    """Credentials and TLS settings for a server."""

    token_file: Annotated[
        Path | None, typer.Option(help="File with the token for the server.", rich_help_panel="Server")
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            envvar="NEARVEIL_TOKEN",
            help="The token. Other users can see it on a command line: prefer the file or the variable.",
            rich_help_panel="Server",
        ),
    ] = None
    gallery: Annotated[
        str | None,
        typer.Option(help="Gallery of the server; required if it has more than one.", rich_help_panel="Server"),
    ] = None
    ca: Annotated[
        Path | None,
        typer.Option(help="CA certificates to trust (PEM), instead of the system's.", rich_help_panel="Server"),
    ] = None
    certificate: Annotated[
        Path | None,
        typer.Option(help="Client certificate (PEM), if the server requires one.", rich_help_panel="Server"),
    ] = None
    certificate_key: Annotated[
        Path | None, typer.Option(help="Private key (PEM), if separate.", rich_help_panel="Server")
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Allow plain HTTP to another machine: anyone on the network path can read the token.",
            rich_help_panel="Server",
        ),
    ] = False

    def connect(self, server: str, **settings: Any) -> "Client":
        """Return a client of `server`."""
        from nearveil import Client

        if "://" not in server:
            raise ValueError("--server: must be a URL such as https://host:8321")
        if self.certificate is None and self.certificate_key is not None:
            raise ValueError("--certificate-key: requires --certificate")
        has_key = self.certificate is not None and self.certificate_key is not None
        return Client(
            server,
            self._read_token(),
            ca=self.ca,
            certificate=(self.certificate, self.certificate_key) if has_key else self.certificate,  # type: ignore[arg-type]
            insecure=self.insecure,
            **settings,
        )

    @contextmanager
    def open(
        self, server: str | None, index: str | None, *, server_settings: dict[str, Any] | None = None, **settings: Any
    ) -> "Iterator[tuple[Client, Index | None]]":
        """Yield a client of `server`, or of a local index, and that index."""
        from nearveil import Client

        if server is not None:
            with self.connect(server, **settings, **(server_settings or {})) as client:
                yield client, None
        elif self.gallery is not None:
            raise ValueError("--gallery: a local index has one gallery; leave it out, or use --server")
        else:
            with _open_index(index) as local_index, Client(local_index, **settings) as client:
                yield client, local_index

    def _read_token(self) -> str | None:
        if self.token_file is None:
            return self.token
        if os.name == "posix" and self.token_file.stat().st_mode & 0o077:
            print_lines(f"Warning: other users can read the token in {self.token_file}; chmod 600 it.", stderr=True)
        with self.token_file.open("rb") as content:
            return content.read(_LONGEST_TOKEN).decode("ascii", "replace").strip()


# Parameter names in errors of the client, and the options that set them.
CLIENT_FIELDS = {
    "k": "-k",
    "url": "--server",
    "image": "IMAGE",
    **{
        name: f"--{name}"
        for name in (
            *(
                "account",
                "by",
                "ca",
                "candidates",
                "certificate",
                "epsilon",
                "extractor",
                "gallery",
                "home",
                "insecure",
            ),
            *("key", "most", "token"),
        )
    },
}


@contextmanager
def _open_index(index: str | None) -> "Iterator[Index]":
    from nearveil.gallery.errors import NotAnIndexError, NotPublishedError
    from nearveil.gallery.index import Index
    from nearveil.gallery.sync import describe_location, find_index

    location = find_index(index)
    try:
        local_index = Index.open(location)
    except NotAnIndexError:
        raise NotAnIndexError(
            f"No index at {describe_location(location)}. Create one with `nearveil index DIR`, or name another with "
            "--index or NEARVEIL_INDEX."
        ) from None
    with local_index:
        try:
            local_index.current()
        except NotPublishedError:
            raise NotPublishedError(
                f"The index at {describe_location(location)} has no map yet; run `nearveil index DIR` again."
            ) from None
        yield local_index


@dataclass(frozen=True)
class ClusterOptions:
    """The Dask cluster of a command."""

    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            envvar="NEARVEIL_CLUSTER",
            metavar="URL",
            help="Compute on a Dask cluster: local, local:N, or a scheduler at tls://host:port. Same results.",
            rich_help_panel="Cluster",
        ),
    ] = None
    ca: Annotated[
        Path | None, typer.Option("--ca", help="CA certificates of the scheduler (PEM).", rich_help_panel="Cluster")
    ] = None
    cert: Annotated[Path | None, typer.Option(help="Client certificate (PEM).", rich_help_panel="Cluster")] = None
    key: Annotated[Path | None, typer.Option(help="Private key (PEM), if separate.", rich_help_panel="Cluster")] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Allow tcp:// to another machine: anyone on the network path can read the rows.",
            rich_help_panel="Cluster",
        ),
    ] = False

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


CLUSTER_FIELDS = {field.name: f"--{field.name}" for field in fields(ClusterOptions)}
