"""``nearveil token``: create, list and revoke tokens of a server."""

import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nearveil.cli._options import JSON, argument, command, make_app, option
from nearveil.cli._output import print_json, print_lines, print_table

if TYPE_CHECKING:
    from nearveil.server import TokenStore
    from nearveil.server.tokens import Token

app = make_app("Tokens of a server: who may query it, and which galleries. Only hashes are stored.")


@dataclass(frozen=True)
class TokenOptions:
    """Where tokens are stored."""

    tokens: str | None = option(
        "Token store; by default that of --config.", envvar="NEARVEIL_SERVER_TOKENS", metavar="PATH_OR_URL"
    )
    config: Path | None = option("Configuration of `nearveil serve`.", envvar="NEARVEIL_CONFIG")

    @property
    def location(self) -> str:
        """The path or URL of the token store."""
        from nearveil.server.settings import Settings, SettingsError, read_settings
        from nearveil.server.tokens import default_location

        if self.tokens is not None:
            return self.tokens
        # Read this setting only: an operator of tokens need not be able to read the keys that others name.
        settings = {} if self.config is None else read_settings(self.config)
        if unknown := sorted(set(settings) - set(Settings.model_fields)):
            raise SettingsError(f"{self.config}: {unknown[0]}: no such setting")
        location = settings.get("tokens", str(default_location()))
        if not isinstance(location, str):
            raise SettingsError(f"{self.config}: tokens: must be text, a path or a URL")
        return location

    def open(self) -> "TokenStore":
        """Open an existing token store."""
        from nearveil.server import TokenStore

        if _is_missing(self.location):
            path = Path(self.location).expanduser().absolute()
            raise ValueError(f"No tokens at {path}: {suggest_token(self.location)}")
        return TokenStore(self.location)


@command(app, extra="service")
def create(
    options: TokenOptions,
    label: str = argument("Who the token is for.", metavar="LABEL"),
    scope: list[str] | None = option("query, originals or metrics; may be repeated. query by default."),
    gallery: list[str] | None = option("A gallery that the token is valid for; may be repeated. All by default."),
    days: float | None = option("Days until the token expires; never by default."),
    as_json: bool = JSON,
) -> None:
    """Create a token and print it once. It is not stored, so it cannot be printed again.

    For example:
        nearveil token create ann --gallery birds --days 90
        nearveil token create prometheus --scope metrics --config /etc/nearveil/nearveil.toml
    """
    location = options.location
    from nearveil.server import TokenStore

    with TokenStore(location) as store:
        token, secret = store.create(label, scopes=scope or ["query"], galleries=gallery or ["*"], days=days)  # type: ignore[arg-type]
    if as_json:
        print_json({**_describe_token(token), "token": secret})
        return
    typer.echo(secret)
    print_lines(
        f"Token {token.id} for {token.label}. It is printed only now: store it where nobody else can read it.",
        stderr=True,
    )


@command(app, "list", extra="service")
def list_tokens(options: TokenOptions, as_json: bool = JSON) -> None:
    """List all tokens, including expired and revoked ones.

    For example:
        nearveil token list
    """
    with options.open() as store:
        tokens = [_describe_token(token) for token in store.list()]
    if as_json:
        print_json(tokens)
        return
    headings = ("id", "label", "scopes", "galleries", "expires", "state")  # as many as fit in 80 columns
    rows = [token | {"expires": (token["expires"] or "never")[:10]} for token in tokens]
    print_table(headings, [[row[name] for name in headings] for row in rows], no_wrap=("id", "expires", "state"))


@command(app, extra="service")
def revoke(
    options: TokenOptions,
    token_id: str = argument("Id from `nearveil token list`.", metavar="ID"),
    as_json: bool = JSON,
) -> None:
    """Revoke a token. A running server stops accepting it within a second.

    For example:
        nearveil token revoke 0123456789abcdef
    """
    with options.open() as store:
        token = store.revoke(token_id)
    if as_json:
        print_json(_describe_token(token))
    else:
        print_lines(f"Revoked token {token.id} for {token.label}.")


def has_tokens(location: str) -> bool:
    """Return whether a token exists, valid or not. Creates nothing. A corrupted store counts as having some."""
    from nearveil.server import TokenStore
    from nearveil.server.tokens import TokenError

    if _is_missing(location):
        return False
    try:
        with TokenStore(location) as store:
            return bool(store.list())
    except TokenError:
        return True  # the server reports the problem when it opens the store


def suggest_token(location: str) -> str:
    """Return the command that creates a token in this store."""
    from nearveil.server.tokens import default_location, parse_store_url
    from nearveil.storage import describe_url

    if location == str(default_location()):
        return "create one with `nearveil token create LABEL`"
    tokens = shlex.quote(describe_url(parse_store_url(location)))
    return f"create one with `nearveil token create LABEL --tokens {tokens}`"


def _is_missing(location: str) -> bool:
    from nearveil.server.tokens import parse_store_url
    from nearveil.storage import find_file

    file = find_file(parse_store_url(location))
    return file is not None and not file.exists()


def _describe_token(token: "Token") -> dict[str, Any]:
    now = datetime.now(UTC).timestamp()
    times = {
        name: None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
        for name, seconds in (("created", token.created), ("expires", token.expires), ("revoked", token.revoked))
    }
    state = "revoked" if token.revoked is not None else "active" if token.is_valid(now) else "expired"
    public = {"id": token.id, "label": token.label, "scopes": token.scopes, "galleries": token.galleries}
    return {**public, **times, "state": state}
