"""``nearveil token``: who may ask a server."""

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearveil.cli._budget import Json
from nearveil.cli._budget_view import clean
from nearveil.cli._index import words

if TYPE_CHECKING:
    from nearveil.service import Token, TokenStore

app = typer.Typer(
    help="Tokens: who may ask a server, and what. Only hashes are kept.", no_args_is_help=True, rich_markup_mode="rich"
)

Where: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        envvar="NEARVEIL_SERVER_TOKENS",
        metavar="PATH_OR_URL",
        help="Where tokens are kept; ~/.local/share/nearveil/tokens.db by default.",
    ),
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
    as_json: Json = False,
) -> None:
    """Make a token, and show it once: it is not kept, so it cannot be shown again.

    [bold]Examples[/bold]

    nearveil token create ann

    nearveil token create ann --gallery birds --days 90

    nearveil token create prometheus --scope metrics --json
    """
    with words(), _store(tokens) as store:
        token, secret = store.create(label, scopes=scope or ["query"], galleries=gallery or ["*"], days=days)  # type: ignore[arg-type]
    if as_json:
        typer.echo(json.dumps({**_told(token), "token": secret}))
        return
    typer.echo(secret)
    Console(stderr=True, highlight=False).print(
        Text(clean(f"Token {token.id} for {token.label}. It is shown only now: keep it where others cannot read it.")),
        soft_wrap=True,
    )


@app.command("list")
def list_tokens(tokens: Where = None, as_json: Json = False) -> None:
    """List all tokens, also those that are good no more.

    [bold]Examples[/bold]

    nearveil token list
    """
    with words(), _store(tokens) as store:
        found = store.list()
    if as_json:
        typer.echo(json.dumps([_told(token) for token in found]))
        return
    grid = Table()
    for heading in ("id", "label", "scopes", "galleries", "created", "expires", "state"):
        grid.add_column(heading, no_wrap=heading in ("id", "created", "expires", "state"))
    for token in found:
        told = _told(token)
        cells = [told["id"], token.label, ", ".join(token.scopes), ", ".join(token.galleries)]
        cells += [told["created"][:10], (told["expires"] or "never")[:10], told["state"]]
        grid.add_row(*(Text(clean(cell), overflow="fold") for cell in cells))
    Console(highlight=False).print(grid)


@app.command()
def revoke(
    number: Annotated[str, typer.Argument(metavar="ID", help="As `nearveil token list` shows it.")],
    tokens: Where = None,
    as_json: Json = False,
) -> None:
    """Let a token be good no more. A server that runs knows it within a second.

    [bold]Examples[/bold]

    nearveil token revoke 0123456789abcdef
    """
    with words(), _store(tokens) as store:
        token = store.revoke(number)
    typer.echo(json.dumps(_told(token)) if as_json else clean(f"Token {token.id} for {token.label} is good no more."))


def _store(where: str | None) -> "TokenStore":
    try:
        from nearveil.service import TokenStore
        from nearveil.service._token_places import default_place
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError('tokens need the service: pip install "nearveil[service]"') from missing
    return TokenStore(where or default_place())


def _told(token: "Token") -> dict[str, Any]:
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
