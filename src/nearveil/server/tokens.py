"""Tokens: their permissions, and their store, a private file or PostgreSQL."""

import base64
import hashlib
import hmac
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import sqlalchemy as sa
from sqlalchemy.engine import URL

from nearveil import storage
from nearveil.errors import NearveilError
from nearveil.storage import Database
from nearveil.wire.schema import GALLERY_NAME

Scope = Literal["query", "originals", "metrics"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
EVERY = "*"
_MAX_LABEL = 200  # characters
_MAX_DAYS = 36_500
_DAY = 86_400  # seconds
PREFIX = "nv_"  # of every token
_TEXT = re.compile(PREFIX + r"([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_ID = re.compile(r"[0-9a-f]{16}")
_NO_DIGEST = hashlib.sha256(secrets.token_bytes(32)).digest()  # compared with tokens of unknown ids


class TokenError(NearveilError, ValueError):
    """Invalid argument, or the token store does not answer."""


class TokenStoreError(TokenError):
    """The token store does not answer."""


_FULL = (sqlite3.SQLITE_FULL, "53100")  # error codes of both databases


def default_location() -> Path:
    """Return the default file of tokens."""
    return storage.data_folder() / "tokens.db"


def parse_store_url(location: str | Path) -> URL:
    """Return the URL of a store."""
    try:
        return storage.parse_url(location, "tokens")
    except ValueError as error:
        raise TokenError(str(error)) from None


def create_file(path: Path) -> None:
    """Create the file readable only by its owner, before SQLite would create it for all."""
    try:
        storage.make_private_folder(path.parent)
        storage.make_private_file(path)
        if path.stat().st_mode & 0o077:
            raise TokenError(f"tokens {path}: other users can read it: chmod 600 it")
    except OSError as error:
        raise TokenStoreError(f"tokens {path}: cannot create the file: {error.strerror}") from None


def open_store(
    url: URL,
    timeout: float,
    metadata: sa.MetaData,
    *,
    prepare_sqlite: Callable[[sqlite3.Connection], None] = storage.prepare_durable,
    explain: Callable[[BaseException, URL, bool], NearveilError] | None = None,
) -> Database:
    """Return the database of a store, with its tables."""

    def prepare(connection: Any) -> None:
        if storage.find_file(url):
            prepare_sqlite(connection)
        else:
            connection.execute(f"SET statement_timeout = {round(1000 * timeout)}")
            connection.commit()

    database = Database(url, timeout, prepare=prepare, explain=explain)
    try:
        with database.begin_write() as connection:
            storage.create_tables(connection, metadata)
    except BaseException:
        database.close()
        raise
    return database


def _explain(error: BaseException, url: URL, _: bool = True) -> TokenError:
    """Return an error of a store without the text of the driver, which may quote values."""
    if isinstance(error, ModuleNotFoundError):
        return TokenError('tokens: PostgreSQL needs psycopg: pip install "nearveil[postgres]"')
    text = "the disk is full. Nothing was changed; free some space and retry"
    if storage.find_error_code(error) not in _FULL:
        text = (
            f"the database does not answer ({storage.name_error(error)}): check that it exists, is a token store, "
            "and that this user may write to it"
        )
    return TokenStoreError(f"tokens {storage.describe_url(url)}: {text}")


@dataclass(frozen=True)
class Token:
    """A token without its secret. Times are seconds since 1970."""

    id: str
    label: str
    scopes: tuple[Scope, ...]
    galleries: tuple[str, ...]
    created: int
    expires: int | None = None
    revoked: int | None = None
    digest: bytes = field(default=b"", repr=False, compare=False)

    def may_use(self, gallery: str) -> bool:
        """Return whether it may use a gallery."""
        return EVERY in self.galleries or gallery in self.galleries

    def is_valid(self, now: float) -> bool:
        """Return whether it is neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or now < self.expires)


def _check_terms(label: str, scopes: Sequence[Scope], galleries: Sequence[str], days: float | None) -> None:
    if not isinstance(label, str) or not 1 <= len(label) <= _MAX_LABEL or not label.isprintable():
        raise TokenError(f"label must be 1 to {_MAX_LABEL} printable characters")
    if isinstance(scopes, str) or not scopes or any(scope not in SCOPES for scope in scopes):
        raise TokenError(f"scopes must be of {', '.join(SCOPES)}, at least one")
    is_list = not isinstance(galleries, str) and len(galleries) > 0
    if not is_list or any(name != EVERY and not re.fullmatch(GALLERY_NAME, name) for name in galleries):
        raise TokenError('galleries must be names of galleries, at least one, or "*" for all')
    is_number = isinstance(days, (int, float)) and not isinstance(days, bool)
    if days is not None and not (is_number and 0 < days <= _MAX_DAYS):
        raise TokenError(f"days must be above 0 and at most {_MAX_DAYS}")


_metadata = sa.MetaData()
_tokens = sa.Table(
    "nearveil_token",
    _metadata,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("digest", sa.LargeBinary(32), nullable=False),
    sa.Column("label", sa.Text, nullable=False),
    sa.Column("scopes", sa.Text, nullable=False),
    sa.Column("galleries", sa.Text, nullable=False),
    sa.Column("created", sa.BigInteger, nullable=False),
    sa.Column("expires", sa.BigInteger),
    sa.Column("revoked", sa.BigInteger),
)


class TokenStore(AbstractContextManager["TokenStore"]):
    """Tokens in a SQLite file, or in PostgreSQL.

    A token is ``nv_<id>_<secret>``. The secret has 256 random bits, so nobody can guess it from its SHA-256: a slow
    hash, as for passwords, would only slow down every request.

    If another process creates or revokes a token, that takes effect at once. While the store does not answer, no token
    is valid.

    Parameters
    ----------
    location : str or Path
        A file, which is created readable only by its owner if it is missing; or a URL such as
        ``postgresql://user@host/database``.
    clock, timeout : callable, float
        Returns seconds since 1970; seconds to wait for the database.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with TokenStore(Path(folder.name) / "tokens.db") as store:
    ...     token, secret = store.create("ann", galleries=["birds"], days=30)
    ...     print(len(secret), store.verify(secret) == token, token.may_use("cars"))
    ...     _ = store.revoke(token.id)
    ...     print(store.verify(secret))
    63 True False
    None
    >>> folder.cleanup()
    """

    def __init__(self, location: str | Path, *, clock: Callable[[], float] = time.time, timeout: float = 5.0) -> None:
        self._clock, self._url = clock, parse_store_url(location)
        self._latest = 0.0  # the latest time that the clock has shown
        if file := storage.find_file(self._url):
            create_file(file)
        self._database = open_store(self._url, timeout, _metadata, explain=_explain)

    def create(
        self,
        label: str,
        *,
        scopes: Sequence[Scope] = ("query",),
        galleries: Sequence[str] = (EVERY,),
        days: float | None = None,
    ) -> tuple[Token, str]:
        """Create a token; return it, and the text that the client sends.

        That text is not stored, so it cannot be shown again. The label says who the token is for. It expires after so
        many `days`, or never; `galleries` are names, or "*" for all.
        """
        _check_terms(label, scopes, galleries, days)
        now, number = int(self._clock()), secrets.token_hex(8)
        secret = base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode()
        token = Token(
            id=number,
            label=label,
            scopes=tuple(scope for scope in SCOPES if scope in scopes),
            galleries=(EVERY,) if EVERY in galleries else tuple(dict.fromkeys(galleries)),
            created=now,
            expires=None if days is None else now + round(days * _DAY),
            digest=_digest(secret),
        )
        row = {**vars(token), "scopes": ",".join(token.scopes), "galleries": ",".join(token.galleries)}
        with self._database.begin_write() as connection:
            connection.execute(sa.insert(_tokens).values(row))
        return token, f"{PREFIX}{number}_{secret}"

    def list(self) -> list[Token]:
        """Return all tokens, including revoked and expired ones, the oldest first."""
        return sorted(self._load(), key=lambda token: (token.created, token.id))

    def revoke(self, token_id: str) -> Token:
        """Revoke the token with an id, and return it."""
        if not isinstance(token_id, str) or not _ID.fullmatch(token_id):
            raise TokenError("id must be 16 hexadecimal digits: the part of a token between nv_ and the second _")
        change = sa.update(_tokens).where(_tokens.c.id == token_id, _tokens.c.revoked.is_(None))
        with self._database.begin_write() as connection:
            connection.execute(change.values(revoked=int(self._clock())))
        for token in self._load(_tokens.c.id == token_id):
            return token
        raise TokenError("id: no such token")

    def verify(self, text: str) -> Token | None:
        """Return the token that a client sent, or None if it is not valid.

        The comparison takes a time that does not depend on which part is invalid.
        """
        parts = _TEXT.fullmatch(text)
        number, secret = parts.groups() if parts else ("", "")
        token = next(iter(self._load(_tokens.c.id == number)), None)
        same = hmac.compare_digest(_digest(secret), _NO_DIGEST if token is None else token.digest)
        self._latest = max(self._latest, self._clock())
        return token if same and token is not None and token.is_valid(self._latest) else None

    def close(self) -> None:
        """Close all connections."""
        self._database.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TokenStore({storage.describe_url(self._url)!r})"

    def _load(self, *conditions: sa.ColumnElement[bool]) -> Sequence[Token]:
        """Load tokens, and revoke the expired ones, so that a clock that is set back does not make them valid again."""
        try:
            self._database.reopen_if_replaced()
        except OSError as error:
            raise _explain(error, self._url) from None
        with self._database.begin_read() as connection:
            rows = connection.execute(sa.select(_tokens).where(*conditions)).all()
        lists = ((tuple(row.scopes.split(",")), tuple(row.galleries.split(","))) for row in rows)
        tokens = [
            Token(row.id, row.label, scopes, galleries, row.created, row.expires, row.revoked, bytes(row.digest))
            for row, (scopes, galleries) in zip(rows, lists, strict=True)
        ]
        now = int(self._clock())
        if any(token.revoked is None and not token.is_valid(now) for token in tokens):
            expired = _tokens.c.revoked.is_(None) & (_tokens.c.expires <= now)
            # Do not wait for other writers: the next call tries again, and until then `_latest` protects.
            with suppress(TokenStoreError), self._database.begin_write(times=0.0) as connection:
                connection.execute(sa.update(_tokens).where(expired).values(revoked=now))
        return tokens


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
