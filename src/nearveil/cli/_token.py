"""``nearveil token``: who may ask a server."""

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from nearveil.cli._shared import Json, clean, print_json, print_lines, print_table, report_errors

if TYPE_CHECKING:
    from nearveil.service import Token, TokenStore

app = typer.Typer(
    help="Tokens: who may ask a server, and what. Only hashes are kept.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
_INSTALL = 'tokens need the service: pip install "nearveil[service]"'

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
        list[str] | None, typer.Option(help="query, originals or metrics; may be said again. query by default.")
    ] = None,
    gallery: Annotated[
        list[str] | None, typer.Option(help="Which gallery it is good for; may be said again. All by default.")
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
    with report_errors(), _store(_place(tokens, config)) as store:
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
    """List all tokens, also those that are good no more.

    [bold]Examples[/bold]

    nearveil token list
    """
    with report_errors(), _known(_place(tokens, config)) as store:
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
    """Let a token be good no more. A server that runs knows it within a second.

    [bold]Examples[/bold]

    nearveil token revoke 0123456789abcdef
    """
    with report_errors(), _known(_place(tokens, config)) as store:
        token = store.revoke(number)
    typer.echo(
        json.dumps(_as_dict(token)) if as_json else clean(f"Token {token.id} for {token.label} is good no more.")
    )


def has_any(where: str) -> bool:
    """Return whether there is a token, whatever it is good for; nothing is made. A store that is wrong has some."""
    from nearveil.service._token_places import TokenError

    if _missing(where):
        return False
    try:
        with _store(where) as store:
            return bool(store.list())
    except TokenError:
        return True  # whoever opens it to use it says what is wrong


def command(where: str) -> str:
    """Return the command that makes a token, in words for a terminal."""
    from nearveil.service._token_places import default_place, store_url
    from nearveil.storage import describe_url

    more = "" if where == str(default_place()) else f" --tokens {shlex.quote(describe_url(store_url(where)))}"
    return f"make one with `nearveil token create LABEL{more}`"


def _place(tokens: str | None, config: Path | None) -> str:
    """Return where tokens are: as given, as the file says that the server reads, or the default."""
    try:
        from nearveil.service._settings import Settings, SettingsError, _read
        from nearveil.service._token_places import default_place
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(_INSTALL) from missing
    if tokens is not None:
        return tokens
    # Only this one setting: who makes tokens need not be able to read the keys that the others name.
    told = {} if config is None else _read(config)
    if unknown := sorted(set(told) - set(Settings.model_fields)):
        raise SettingsError(f"{config}: {unknown[0]}: there is no such setting")
    where = told.get("tokens", str(default_place()))
    if not isinstance(where, str):
        raise SettingsError(f"{config}: tokens: it must be text, a file or a URL")
    return where


def _known(where: str) -> "TokenStore":
    """Open a store that is there: to look at tokens makes none."""
    if _missing(where):
        raise ValueError(f"there are no tokens at {Path(where).expanduser().absolute()}: {command(where)}")
    return _store(where)


def _missing(where: str) -> bool:
    from nearveil.service._token_places import store_url

    url = store_url(where)
    return url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists()


def _store(where: str) -> "TokenStore":
    from nearveil.service import TokenStore

    return TokenStore(where)


def _as_dict(token: "Token") -> dict[str, Any]:
    now = datetime.now(UTC).timestamp()
    state = "revoked" if token.revoked is not None else "good" if token.good(now) else "expired"
    return {
        "id": token.id,
        "label": token.label,
        "scopes": token.scopes,
        "galleries": token.galleries,
        "created": _day(token.created),
        "expires": _day(token.expires),
        "revoked": _day(token.revoked),
        "state": state,
    }


def _day(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
