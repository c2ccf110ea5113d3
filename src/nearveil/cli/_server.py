"""``nearveil serve``, ``nearveil token`` and ``nearveil protect``: the side of those who hold galleries."""

import shlex
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from nearveil.cli._shared import Json, name_extra, print_json, print_lines, print_table, report_errors

if TYPE_CHECKING:
    from nearveil.private_knn.discriminant import Forecast
    from nearveil.server import Settings, TokenStore
    from nearveil.server.settings import GallerySettings
    from nearveil.server.tokens import Token

app = typer.Typer(
    help="Tokens: who may ask a server, and what. Only hashes are kept.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)

Where: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        envvar="NEARVEIL_SERVER_TOKENS",
        metavar="PATH_OR_URL",
        help="Where tokens are kept; as the file of --config says, or ~/.local/share/nearveil/tokens.db, by default.",
    ),
]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", envvar="NEARVEIL_CONFIG", help="The file of `nearveil serve --config`: it says where."),
]


@app.command()
def create(
    label: Annotated[str, typer.Argument(metavar="LABEL", help="Who it is for.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="query, originals or metrics; may be repeated. query by default.")
    ] = None,
    gallery: Annotated[
        list[str] | None, typer.Option(help="Gallery that it is valid for; may be repeated. All by default.")
    ] = None,
    days: Annotated[float | None, typer.Option(help="After which it expires; never by default.")] = None,
    tokens: Where = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Make a token, and show it once: it is not kept, so it cannot be shown again.

    [bold]Examples[/bold]

    nearveil token create ann

    nearveil token create ann --gallery birds --days 90

    nearveil token create prometheus --scope metrics --config /etc/nearveil/nearveil.toml
    """
    with report_errors(), _open_store(_find_tokens(tokens, config)) as store:
        token, secret = store.create(label, scopes=scope or ["query"], galleries=gallery or ["*"], days=days)  # type: ignore[arg-type]
    if as_json:
        print_json({**_as_dict(token), "token": secret})
        return
    typer.echo(secret)
    print_lines(
        f"Token {token.id} for {token.label}. It is shown only now: keep it where others cannot read it.", stderr=True
    )


@app.command("list")
def list_tokens(tokens: Where = None, config: Config = None, as_json: Json = False) -> None:
    """List all tokens, also expired and revoked ones.

    [bold]Examples[/bold]

    nearveil token list
    """
    with report_errors(), _open_tokens(_find_tokens(tokens, config)) as store:
        found = store.list()
    if as_json:
        print_json([_as_dict(token) for token in found])
        return
    print_table(
        ["id", "label", "scopes", "galleries", "expires", "state"],  # as many as fit 80 columns
        [
            (
                one["id"],
                one["label"],
                ", ".join(one["scopes"]),
                ", ".join(one["galleries"]),
                (one["expires"] or "never")[:10],
                one["state"],
            )
            for one in map(_as_dict, found)
        ],
        whole=("id", "expires", "state"),
    )


@app.command()
def revoke(
    number: Annotated[str, typer.Argument(metavar="ID", help="As `nearveil token list` shows it.")],
    tokens: Where = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Revoke a token. A server that runs notices within a second.

    [bold]Examples[/bold]

    nearveil token revoke 0123456789abcdef
    """
    with report_errors(), _open_tokens(_find_tokens(tokens, config)) as store:
        token = store.revoke(number)
    if as_json:
        print_json(_as_dict(token))
    else:
        print_lines(f"Token {token.id} for {token.label} is revoked.")


def has_tokens(where: str) -> bool:
    """Return whether there is a token, whatever its state; nothing is made. A damaged store counts as having some."""
    from nearveil.server.tokens import TokenError

    if _is_missing(where):
        return False
    try:
        with _open_store(where) as store:
            return bool(store.list())
    except TokenError:
        return True  # whoever opens it to use it says what is wrong


def suggest_token(where: str) -> str:
    """Return the command that makes a token, in words for a terminal."""
    from nearveil.server.tokens import default_location, parse_store_url
    from nearveil.storage import describe_url

    more = "" if where == str(default_location()) else f" --tokens {shlex.quote(describe_url(parse_store_url(where)))}"
    return f"make one with `nearveil token create LABEL{more}`"


def _find_tokens(tokens: str | None, config: Path | None) -> str:
    """Return where tokens are: as given, as the file says that the server reads, or the default."""
    with name_extra("service"):
        from nearveil.server.settings import Settings, SettingsError, read_settings
        from nearveil.server.tokens import default_location
    if tokens is not None:
        return tokens
    # Only this one setting: who makes tokens need not be able to read the keys that the others name.
    held = {} if config is None else read_settings(config)
    if unknown := sorted(set(held) - set(Settings.model_fields)):
        raise SettingsError(f"{config}: {unknown[0]}: no such setting")
    where = held.get("tokens", str(default_location()))
    if not isinstance(where, str):
        raise SettingsError(f"{config}: tokens: it must be text, a file or a URL")
    return where


def _open_tokens(where: str) -> "TokenStore":
    """Open a store that is there: to look at tokens makes none."""
    if _is_missing(where):
        raise ValueError(f"there are no tokens at {Path(where).expanduser().absolute()}: {suggest_token(where)}")
    return _open_store(where)


def _is_missing(where: str) -> bool:
    from nearveil.server.tokens import parse_store_url

    url = parse_store_url(where)
    return url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists()


def _open_store(where: str) -> "TokenStore":
    from nearveil.server import TokenStore

    return TokenStore(where)


def _as_dict(token: "Token") -> dict[str, Any]:
    now = datetime.now(UTC).timestamp()
    state = "revoked" if token.revoked is not None else "good" if token.is_valid(now) else "expired"
    return {
        "id": token.id,
        "label": token.label,
        "scopes": token.scopes,
        "galleries": token.galleries,
        "created": _format_time(token.created),
        "expires": _format_time(token.expires),
        "revoked": _format_time(token.revoked),
        "state": state,
    }


def _format_time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


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
    offer: Annotated[
        list[str] | None,
        typer.Option(
            help="What clients of INDEX get besides names and thumbnails: originals, metadata, codes (all of them, for "
            "search at home), sealed (answers to encrypted questions). Repeat it."
        ),
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
    NEARVEIL_SERVER_*; options given here win.

    [bold]Examples[/bold]

    nearveil serve gallery/

    nearveil serve gallery/ --offer codes --offer sealed

    nearveil serve --config nearveil.toml

    nearveil serve gallery/ --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem
    """
    with report_errors():
        given: dict[str, Any] = {
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
        given = {key: value for key, value in given.items() if value is not None}
        if index is not None:
            offers = ("names", "thumbnails", *(offer or ()))
            given["galleries"] = [{"name": name or _name_gallery(index), "index": index, "offers": offers}]
        elif name is not None or offer:
            raise ValueError("--name, --offer: they are about INDEX, and there is none")
        _run(config, given)


def _run(config: Path | None, given: dict[str, Any]) -> None:
    with name_extra("service"):
        from nearveil.server import Settings
        from nearveil.server import serve as run
    settings = Settings.load(config, **given)
    _check_log(settings)
    if settings.galleries and not has_tokens(settings.tokens):
        typer.echo(f"There is no token yet, and nobody can ask without: {suggest_token(settings.tokens)}", err=True)
    for gallery in settings.galleries:
        if "codes" in gallery.offers:
            typer.echo(f"{gallery.name} hands out the codes of all its items: every client sees every code.", err=True)
    run(settings, ready=_say)


def _name_gallery(index: str) -> str:
    """Return the name of a gallery: of its folder, or of its database, whose address may hold a password."""
    with name_extra("service"):
        from nearveil.server.settings import make_gallery_name
    if "://" not in index:
        return make_gallery_name(index)
    import sqlalchemy as sa

    try:
        database = sa.make_url(index).database
    except (sa.exc.ArgumentError, ValueError):
        raise ValueError("INDEX: it must be a folder, or a URL such as postgresql://user@host/database") from None
    return make_gallery_name(Path("/", database or ""))


def _check_log(settings: "Settings") -> None:
    """Raise unless the log can be written: a server that runs would only count the lines that it drops."""
    if settings.log_file is None:
        return
    from nearveil.storage import open_private

    try:
        with open(settings.log_file, "ab", opener=open_private):
            pass
    except OSError as error:
        raise ValueError(f"log_file: {settings.log_file} cannot be written: {error.strerror}") from None


def _say(address: str) -> None:
    """Say that requests are answered from now on: for people, and for programs that wait for this line."""
    typer.echo(f"nearveil serves at {address}")


def protect(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Of a protected gallery in the file.")] = None,
    config: Annotated[
        Path | None, typer.Option(envvar="NEARVEIL_CONFIG", help="The TOML file of `nearveil serve`.")
    ] = None,
    publish: Annotated[bool, typer.Option("--publish", help="Pay for a publication, and publish the model.")] = False,
    allow_noise: Annotated[
        bool, typer.Option("--allow-noise", help="Publish also where noise alone is to be expected.")
    ] = False,
) -> None:
    """Tell what accuracy the model of a protected gallery would have; with --publish, publish it.

    The figures are computed from the private records without any noise of their own. They are for you alone: do not
    show them, and do not write them to a log. Without --publish nothing is paid and nothing changes. Each publication
    takes one of those that the gallery was opened for. A server that runs takes up the new model by itself.

    [bold]Examples[/bold]

    nearveil protect --config nearveil.toml

    nearveil protect scans --config nearveil.toml --publish
    """
    with report_errors():
        with name_extra("service"):
            from nearveil.server import Settings
            from nearveil.server.serving import open_protected
        settings = Settings.load(config)
        chosen = _choose_gallery(settings.galleries, name)
        with closing(open_protected(chosen, settings.database_timeout)) as found:
            _show_forecast(found.forecast(), chosen)
            if publish:
                done = found.publish(allow_noise=allow_noise or bool(chosen.allow_noise))
                typer.echo(f"Published: model {done.number} of {chosen.name}, version {done.version[:16]}.")
            typer.echo(f"Publications left: {found.publications_left}.")


def _choose_gallery(galleries: "tuple[GallerySettings, ...]", name: str | None) -> "GallerySettings":
    protected = [one for one in galleries if one.kind == "protected" and name in (None, one.name)]
    if len(protected) != 1:
        there = ", ".join(one.name for one in galleries if one.kind == "protected") or "none"
        raise ValueError(f"NAME: it must be that of a protected gallery in the file; there are: {there}")
    return protected[0]


def _show_forecast(forecast: "Forecast", settings: "GallerySettings") -> None:
    """Say what to expect, and why, on the terminal."""
    noise = f"± {forecast.noise_per_class:,.1f}"
    rights = {label: f"{right:.2f}" for label, right in forecast.class_accuracy.items()}
    print_table(
        ["class", "records", "noise on the count", "accuracy"],
        [(label, f"{count:,}", noise, rights.get(label, "")) for label, count in forecast.records_per_class.items()],
        title="For you alone: computed from the records, without protection",
        right=("records", "noise on the count", "accuracy"),
    )
    together = f"All models together: epsilon {settings.epsilon:g}, delta {settings.delta:g}."
    print_lines(*_describe_forecast(forecast), together)


def _describe_forecast(forecast: "Forecast") -> Iterator[str]:
    low, high = forecast.accuracy_range
    yield (
        f"Expected accuracy: {forecast.accuracy:.2f}, and between {low:.2f} and {high:.2f} in 8 of 10 draws of the "
        f"noise; without noise {forecast.without_noise:.2f}; by guessing {forecast.floor:.2f}. Each class counts the "
        "same."
    )
    if forecast.is_noise:
        yield "This would be noise alone: the noise hides the records of each class."
    elif small := len(forecast.small_classes):
        yield (
            f"{small} of {len(forecast.records_per_class)} classes have fewer than five times as many records as there "
            "is noise on their count. That is too few to rely on: gather more, join classes, or open the gallery with "
            "a larger epsilon or fewer publications."
        )
