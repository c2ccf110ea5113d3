"""Tokens: what they allow, and the store that keeps them, a file for its owner alone or PostgreSQL."""

import base64
import hashlib
import hmac
import math
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import sqlalchemy as sa
from sqlalchemy.engine import URL

from nearveil.errors import NearveilError
from nearveil.storage import (
    Database,
    FileWatch,
    Mark,
    create_tables,
    data_folder,
    describe_url,
    find_error,
    is_transient,
    make_private_file,
    make_private_folder,
    parse_url,
    prepare_durable,
)
from nearveil.wire.schema import GALLERY_NAME

_RESERVE = 256 << 10  # bytes: a write-ahead log of a few pages, and its index


class TokenError(NearveilError, ValueError):
    """The store of tokens could not do what was asked."""


class TokenStoreError(TokenError):
    """The store of tokens does not answer."""


def default_place() -> Path:
    """Return where tokens are kept where nothing else is said."""
    return data_folder() / "tokens.db"


def store_url(where: str | Path) -> URL:
    """Return the address of a store."""
    try:
        return parse_url(where, "tokens")
    except ValueError as error:
        raise TokenError(str(error)) from None


def make_file(path: Path) -> None:
    """Make the file for its owner alone, before SQLite would make it for all."""
    try:
        make_private_folder(path.parent)
        make_private_file(path)
        if path.stat().st_mode & 0o077:
            raise TokenError(f"tokens {path}: others may read it: chmod 600 it")
    except OSError as error:
        raise TokenStoreError(f"tokens {path}: the file cannot be made: {error.strerror}") from None


def make_reserve(path: Path) -> None:
    """Keep some room on the disk, so that a token can be revoked when the disk is full."""
    reserve = _reserve_of(path)
    with suppress(OSError):
        if not has_reserve(path):
            place = os.open(reserve, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            with os.fdopen(place, "wb") as file:
                file.write(bytes(_RESERVE))


def has_reserve(path: Path) -> bool:
    """Return whether the room is there."""
    with suppress(OSError):
        return _reserve_of(path).stat().st_size == _RESERVE
    return False


def free_reserve(path: Path) -> bool:
    """Give the room free; return whether there was any."""
    with suppress(OSError):
        _reserve_of(path).unlink()
        return True
    return False


def _reserve_of(path: Path) -> Path:
    return path.with_name(path.name + ".reserve")


def open_store(
    url: URL, timeout: float, prepare_sqlite: Callable[[sqlite3.Connection], None] = prepare_durable
) -> Database:
    """Return the database of a store."""

    def prepare(connection: Any) -> None:
        if url.get_backend_name() == "sqlite":
            prepare_sqlite(connection)
        else:
            connection.execute(f"SET statement_timeout = {round(1000 * timeout)}")
            connection.commit()

    try:
        return Database(url, timeout, prepare=prepare)
    except ModuleNotFoundError:
        raise TokenError("tokens: PostgreSQL needs psycopg: pip install nearveil[postgres]") from None


Scope = Literal["query", "originals", "metrics"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
EVERY = "*"
_LONGEST_LABEL = 200
_LONGEST_LIFE = 36_500  # days


@dataclass(frozen=True)
class Token:
    """What is kept of a token. Times are seconds since 1970.

    `id` is what logs and ledgers call the client, `label` is for people, and "*" in `galleries` stands for all.
    """

    id: str
    label: str
    scopes: tuple[Scope, ...]
    galleries: tuple[str, ...]
    created: int
    expires: int | None = None
    revoked: int | None = None
    digest: bytes = field(default=b"", repr=False, compare=False)

    def may(self, scope: Scope) -> bool:
        """Return whether it is good for a scope."""
        return scope in self.scopes

    def may_use(self, gallery: str) -> bool:
        """Return whether it is good for a gallery."""
        return EVERY in self.galleries or gallery in self.galleries

    def is_valid(self, now: float) -> bool:
        """Return whether it is neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or now < self.expires)


def check_label(label: str) -> None:
    """Refuse a label that does not print."""
    if not isinstance(label, str) or not 1 <= len(label) <= _LONGEST_LABEL or not label.isprintable():
        raise TokenError(f"label must be 1 to {_LONGEST_LABEL} characters of text that prints")


def checked_days(days: float) -> float:
    """Return the days that a token is good for."""
    if isinstance(days, bool) or not isinstance(days, (int, float)) or not 0 < days <= _LONGEST_LIFE:
        raise TokenError(f"days must be above 0 and at most {_LONGEST_LIFE}")
    return days


def checked_scopes(scopes: Sequence[Scope]) -> tuple[Scope, ...]:
    """Return scopes in their order."""
    if isinstance(scopes, str) or not scopes or any(scope not in SCOPES for scope in scopes):
        raise TokenError(f"scopes must be of {', '.join(SCOPES)}, at least one")
    return tuple(scope for scope in SCOPES if scope in scopes)


def checked_galleries(galleries: Sequence[str]) -> tuple[str, ...]:
    """Return names of galleries, or the sign for all."""
    wrong = isinstance(galleries, str) or not galleries
    if wrong or any(name != EVERY and not re.fullmatch(GALLERY_NAME, name) for name in galleries):
        raise TokenError('galleries must be names of galleries, at least one, or "*" for all')
    return (EVERY,) if EVERY in galleries else tuple(dict.fromkeys(galleries))


_TEXT = re.compile(r"nv_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_ID = re.compile(r"[0-9a-f]{16}")
_FILE_MAX_AGE, _SERVER_MAX_AGE = 0.05, 0.5  # seconds
_DAY = 86_400
_FULL: dict[int | str, tuple[type[TokenStoreError], str]] = dict.fromkeys(
    (sqlite3.SQLITE_FULL, "53100"), (TokenStoreError, "the disk is full; nothing was changed: make room, and try again")
)
_NOBODY = hashlib.sha256(secrets.token_bytes(32)).digest()  # what a token of an unknown id is compared with

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


class TokenStore:
    """Tokens in a SQLite file, or in PostgreSQL.

    A token is ``nv_<id>_<secret>``. The secret has 256 random bits, so its SHA-256 tells nothing that could be guessed:
    a slow hash protects secrets that people choose, and would only slow down every request here.

    A token that another process made or revoked counts within a tenth of a second where the store is a file, and within
    one second where it is PostgreSQL. A store that does not answer lets nobody in.

    Parameters
    ----------
    where : str or Path
        A file, made if it is not there, readable for its owner alone; or a URL such as
        ``postgresql://user@host/database``.
    clock : callable, optional
        Returns seconds since 1970.
    timeout : float, default=5.0
        Seconds to wait for the database.

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

    def __init__(self, where: str | Path, *, clock: Callable[[], float] = time.time, timeout: float = 5.0) -> None:
        self._clock, self._url = clock, store_url(where)
        self._lock = threading.Lock()
        self._known: dict[str, Token] = {}
        self._mark: Mark | None = None
        self._expiring = math.inf  # when the next of them expires
        self._latest = -math.inf  # of the clock, which does not go back here
        self._watch: FileWatch | None = None
        if self._is_file:
            make_file(self._path)
            make_reserve(self._path)
            self._watch = FileWatch(self._path)
        self._database = open_store(self._url, timeout)
        try:
            with self._in_words(), self._database.begin_write() as connection:
                create_tables(connection, _metadata)
        except BaseException:
            self._database.close()
            raise

    def create(
        self,
        label: str,
        *,
        scopes: Sequence[Scope] = ("query",),
        galleries: Sequence[str] = (EVERY,),
        days: float | None = None,
    ) -> tuple[Token, str]:
        """Make a token.

        Parameters
        ----------
        label : str
            Who it is for.
        scopes : sequence of {"query", "originals", "metrics"}, default=("query",)
        galleries : sequence of str, default=("*",)
        days : float, optional
            After which it expires; never by default.

        Returns
        -------
        token : Token
        secret : str
            What the client sends. It is not kept, so it cannot be shown again.
        """
        check_label(label)
        now, number = int(self._clock()), secrets.token_hex(8)
        secret = base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode()
        expires = None if days is None else now + round(checked_days(days) * _DAY)
        token = Token(
            number, label, checked_scopes(scopes), checked_galleries(galleries), now, expires, None, _digest(secret)
        )
        row = {**vars(token), "scopes": ",".join(token.scopes), "galleries": ",".join(token.galleries)}
        with self._in_words(), self._database.begin_write() as connection:
            connection.execute(sa.insert(_tokens).values(row))
        self.refresh()
        return token, f"nv_{number}_{secret}"

    def list(self) -> list[Token]:
        """Return all tokens, also those that are good no more, the oldest first.

        Returns
        -------
        list of Token
        """
        self.refresh()
        return sorted(self._known.values(), key=lambda token: (token.created, token.id))

    def revoke(self, number: str) -> Token:
        """Let a token be good no more.

        Parameters
        ----------
        number : str
            Its id.

        Returns
        -------
        Token
        """
        if not isinstance(number, str) or not _ID.fullmatch(number):
            raise TokenError("id must be 16 hexadecimal digits: the part of a token between nv_ and the second _")
        change = sa.update(_tokens).where(_tokens.c.id == number, _tokens.c.revoked.is_(None))
        with self._in_words():
            self._write(change.values(revoked=int(self._clock())))
        self.refresh()
        if number not in self._known:
            raise TokenError("id: there is no such token")
        return self._known[number]

    def _write(self, change: sa.Update, *, wait: bool = True) -> None:
        """Write a change; where the disk is full, with the room that was kept for that."""
        try:
            with self._database.begin_write(times=float(wait)) as connection:
                connection.execute(change)
        except sa.exc.OperationalError as error:
            if is_transient(error) or not (self._is_file and free_reserve(self._path)):
                raise
            with self._database.begin_write() as connection:
                connection.execute(change)

    def has_room(self) -> bool:
        """Return whether the disk has room for new tokens and revocations; always so for PostgreSQL.

        Room that was used is taken again where the disk has some: whoever made it need not start the server anew.
        """
        if not self._is_file:
            return True
        make_reserve(self._path)
        return has_reserve(self._path)

    def verify(self, text: str) -> Token | None:
        """Return the token that a client sent, or None if it is not good, for whatever reason.

        Parameters
        ----------
        text : str

        Returns
        -------
        Token or None
        """
        self.refresh()
        return self.verify_cached(text)

    @property
    def max_age(self) -> float:
        """Seconds that a server may reuse the tokens that it read last: half of the documented delay."""
        return _FILE_MAX_AGE if self._is_file else _SERVER_MAX_AGE

    def refresh(self) -> None:
        """Read all tokens, unless they lie in a file that has not changed, and note which have expired."""
        with self._lock, self._in_words():
            # Before it is read: what is committed meanwhile is read the next time.
            mark = None if self._watch is None else self._watch.mark()
            if mark is None or mark != self._mark:
                self._read(mark)
            self._end_expired()

    def _read(self, mark: Mark | None) -> None:
        if self._watch is not None and (mark is None or self._mark is None or mark.opening != self._mark.opening):
            self._database.close()  # another file may lie there now: its connections would read the old one
        with self._database.begin_read() as connection:
            rows = connection.execute(sa.select(_tokens)).all()
        self._known = {row.id: _token(row) for row in rows}
        living = (one for one in self._known.values() if one.revoked is None)
        self._expiring = min((one.expires for one in living if one.expires is not None), default=math.inf)
        self._mark = mark

    def _end_expired(self) -> None:
        """Revoke what has expired, so that a clock that is set back does not revive it."""
        now = int(self._clock())
        if self._expiring <= now:
            expired = [one.id for one in self._known.values() if one.revoked is None and not one.is_valid(now)]
            # Whoever else writes is not waited for. It is tried again at the next look; until then `_latest` holds.
            with suppress(sa.exc.SQLAlchemyError):
                self._write(sa.update(_tokens).where(_tokens.c.id.in_(expired)).values(revoked=now), wait=False)

    def verify_cached(self, text: str) -> Token | None:
        """Return the token that a client sent, by what was read last. It takes as long whatever is wrong."""
        parts = _TEXT.fullmatch(text)
        number, secret = parts.groups() if parts else ("", "")
        token = self._known.get(number)
        same = hmac.compare_digest(_digest(secret), _NOBODY if token is None else token.digest)
        self._latest = max(self._latest, self._clock())
        return token if same and token is not None and token.is_valid(self._latest) else None

    def close(self) -> None:
        """Close all connections."""
        if self._watch is not None:
            self._watch.close()
        self._database.close()

    def __enter__(self) -> "TokenStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TokenStore({describe_url(self._url)!r})"

    @property
    def _path(self) -> Path:
        return Path(str(self._url.database))

    @property
    def _is_file(self) -> bool:
        return self._url.get_backend_name() == "sqlite"

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (sa.exc.SQLAlchemyError, OSError) as error:
            # Not `from error`: a driver may quote what it could not write.
            kind = type(getattr(error, "orig", None) or error).__name__
            full = find_error(error, _FULL)
            if full is not None:
                raise full[0](f"tokens {describe_url(self._url)}: {full[1]}") from None
            raise TokenStoreError(
                f"tokens {describe_url(self._url)}: the database does not answer ({kind}): check that it is there, is "
                "a store of tokens, and that this user may write to it"
            ) from None


def _token(row: Any) -> Token:
    scopes, galleries = tuple(row.scopes.split(",")), tuple(row.galleries.split(","))
    return Token(row.id, row.label, scopes, galleries, row.created, row.expires, row.revoked, bytes(row.digest))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
