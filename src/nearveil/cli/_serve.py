"""``nearveil serve``: galleries, for clients elsewhere."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearveil.cli._shared import report_errors
from nearveil.cli._token import command, has_any

if TYPE_CHECKING:
    from nearveil.service import Settings

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
    name: Annotated[
        str | None, typer.Option(help="Of the gallery INDEX; that of its folder or database by default.")
    ] = None,
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
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that answer; limits are divided among them. 1 by default.")
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
    with report_errors():
        told: dict[str, Any] = {
            "host": host,
            "port": port,
            "tokens": tokens,
            "tls_cert": tls_cert,
            "tls_key": tls_key,
            "tls_client_ca": tls_client_ca,
            "insecure": insecure,
            "workers": workers,
            "log_level": log_level,
            "log_file": log_file,
        }
        told = {key: value for key, value in told.items() if value is not None}
        if index is not None:
            told["galleries"] = [{"name": name or _named(index), "index": index}]
        elif name is not None:
            raise ValueError("--name: it is the name of INDEX, and there is none")
        _run(config, told)


def _run(config: Path | None, told: dict[str, Any]) -> None:
    try:
        from nearveil.service import Settings
        from nearveil.service import serve as run
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(_INSTALL) from missing
    settings = Settings.load(config, **told)
    _check_log(settings)
    if settings.galleries and not has_any(settings.tokens):
        typer.echo(f"There is no token yet, and nobody can ask without: {command(settings.tokens)}", err=True)
    run(settings, ready=_say)


def _named(index: str) -> str:
    """Return the name of a gallery: of its folder, or of its database, whose address may hold a password."""
    try:
        from nearveil.service._settings import cleaned_name
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(_INSTALL) from missing
    if "://" not in index:
        return cleaned_name(index)
    import sqlalchemy as sa

    try:
        database = sa.make_url(index).database
    except (sa.exc.ArgumentError, ValueError):
        raise ValueError("INDEX: it must be a folder, or a URL such as postgresql://user@host/database") from None
    return cleaned_name(Path("/", database or ""))


def _check_log(settings: "Settings") -> None:
    """Raise unless the log can be written: a server that runs would only count the lines that it drops."""
    if settings.log_file is None:
        return
    try:
        with settings.log_file.open("ab"):
            pass
    except OSError as error:
        raise ValueError(f"log_file: {settings.log_file} cannot be written: {error.strerror}") from None


def _say(address: str) -> None:
    """Say that requests are answered from now on: for people, and for programs that wait for this line."""
    typer.echo(f"nearveil serves at {address}")
