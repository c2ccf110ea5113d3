"""``nearveil serve``: galleries, for clients elsewhere."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nearveil.cli._index import words

_INSTALL = 'serving needs FastAPI and uvicorn: pip install "nearveil[service]"'


def serve(
    index: Annotated[
        str | None,
        typer.Argument(
            metavar="[INDEX]", help="A folder or a PostgreSQL URL, as `nearveil index --into`: one open gallery."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(envvar="NEARVEIL_CONFIG", help="A TOML file; deploy/nearveil.toml is an example.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the gallery INDEX; that of its folder by default.")] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen; 127.0.0.1 by default.")] = None,
    port: Annotated[int | None, typer.Option(help="Where to listen; 8321 by default, 0 takes a free one.")] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_URL", help="Where tokens are kept; ~/.local/share/nearveil/tokens.db by default."
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="The certificate, in PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, in PEM.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Who must have signed the clients' certificates.")] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Listen beyond this machine without TLS: behind a proxy that does it."),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_file: Annotated[
        Path | None, typer.Option(help="Where lines of JSON go; the standard error by default.")
    ] = None,
) -> None:
    """Serve galleries to clients elsewhere, until Ctrl-C or SIGTERM.

    Clients need a token: `nearveil token create` makes one. All settings can stand in a file, and in variables
    NEARVEIL_SERVER_*; what is said here wins.

    [bold]Examples[/bold]

    nearveil serve gallery/

    nearveil serve --config nearveil.toml

    nearveil serve gallery/ --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem
    """
    with words():
        try:
            from nearveil.service import Settings
            from nearveil.service import serve as run
            from nearveil.service._settings import cleaned_name
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(_INSTALL) from missing
        told: dict[str, Any] = {
            "host": host,
            "port": port,
            "tokens": tokens,
            "tls_cert": tls_cert,
            "tls_key": tls_key,
            "tls_client_ca": tls_client_ca,
            "insecure": insecure,
            "log_level": log_level,
            "log_file": log_file,
        }
        told = {key: value for key, value in told.items() if value is not None}
        if index is not None:
            told["galleries"] = [{"name": name or cleaned_name(index), "index": index}]
        elif name is not None:
            raise ValueError("--name: it is the name of INDEX, and there is none")
        run(Settings.load(config, **told), ready=_say)


def _say(address: str) -> None:
    """Say that requests are answered from now on: for people, and for programs that wait for this line."""
    typer.echo(f"nearveil serves at {address}")
