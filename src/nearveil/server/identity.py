"""Tokens of an identity provider (OpenID Connect): JWTs, verified with the keys that it publishes."""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any

import httpx
import jwt
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric import ec

from nearveil.server.errors import ServiceError
from nearveil.server.settings import OidcSettings, check_secure_url
from nearveil.server.tokens import Scope, Token, open_store, parse_store_url
from nearveil.server.workers import Poller, Workers

_ALGORITHMS = frozenset(f"{kind}{bits}" for kind in ("RS", "PS", "ES") for bits in (256, 384, 512)) | {"EdDSA"}
_CLAIMS = ("iss", "aud", "sub", "exp", "iat")
_INTERVAL, _SHORTEST_INTERVAL = 300.0, 10.0  # seconds between two fetches of keys, and if one is missing
_TIMEOUT = 2.0  # seconds of a request to the provider
_MAX_BYTES = 1 << 20  # of its response
_DISCOVERY = "/.well-known/openid-configuration"

_metadata = sa.MetaData()
_account_key = sa.Table(
    "nearveil_account_key",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("key", sa.LargeBinary(32), nullable=False),
)
_INSERT = sa.text("INSERT INTO nearveil_account_key (id, key) VALUES (1, :key) ON CONFLICT (id) DO NOTHING")


def load_account_key(tokens: str, timeout: float) -> bytes:
    """Load the secret from which the ids of subjects derive; the token store has it, for all processes and hosts."""
    store = open_store(parse_store_url(tokens), timeout, _metadata)
    with closing(store), store.begin_write() as connection:
        connection.execute(_INSERT, {"key": secrets.token_bytes(32)})
        return bytes(connection.execute(sa.select(_account_key.c.key)).scalar_one())


class IdentityProvider:
    """Verifies tokens of one issuer. Keys are fetched in a thread; while that fails, the previous keys are used."""

    def __init__(self, settings: OidcSettings, account_key: bytes, timeout: float) -> None:
        self._settings, self._account_key = settings, account_key
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._poller = Poller("identity provider", self._fetch, timeout)
        self._fetching: asyncio.Future[None] | None = None
        self._fetched_at = -_INTERVAL
        # A signed text without claims, which is verified in place of a malformed one or one of an unknown key: a
        # refusal takes as long as an acceptance.
        pair = ec.generate_private_key(ec.SECP256R1())
        public = jwt.algorithms.ECAlgorithm.to_jwk(pair.public_key(), as_dict=True)
        self._decoy = jwt.encode({}, pair, "ES256"), jwt.PyJWK(public)

    async def authenticate(self, text: str, workers: Workers) -> Token | None:
        """Return the token of a client, or None if it is not valid; ServiceError if no key could be fetched yet."""
        keys = self._keys
        token, key_id = await workers.run(partial(self.verify, text))
        if key_id is not None and key_id not in keys:
            await self.refresh(_SHORTEST_INTERVAL)
            if self._keys is not keys:
                token, _ = await workers.run(partial(self.verify, text))
        if not self._keys:
            raise ServiceError("unavailable", "Tokens cannot be checked now. Try again later.")
        return token

    async def poll(self) -> None:
        """Fetch the keys every few minutes."""
        await self.refresh(_INTERVAL if self._keys else _SHORTEST_INTERVAL)

    async def refresh(self, interval: float) -> None:
        """Fetch the keys, unless that was tried within `interval` seconds; wait for a fetch in progress."""
        if (self._fetching is None or self._fetching.done()) and time.monotonic() - self._fetched_at >= interval:
            self._fetched_at = time.monotonic()
            self._fetching = asyncio.ensure_future(self._poller.poll())
        if self._fetching is not None:
            with suppress(Exception):  # logged by the poller
                await asyncio.shield(self._fetching)

    def verify(self, text: str) -> tuple[Token | None, str | None]:
        """Return the token, or None if it is not valid, and the id of the key that it names."""
        key_id, (signed, key) = None, self._decoy
        # Clients may send anything: whatever fails, the token is not valid.
        with suppress(Exception):
            header = jwt.get_unverified_header(text)
            key_id = header["kid"]
            if header["alg"] == self._keys[key_id].algorithm_name:
                signed, key = text, self._keys[key_id]
        with suppress(Exception):
            return self._make_token(self._decode(signed, key)), key_id
        return None, key_id

    def _decode(self, text: str, key: jwt.PyJWK) -> dict[str, Any]:
        """Verify signature and claims; raise an error of any type if they are not valid."""
        claims: dict[str, Any] = jwt.decode(
            text,
            key,
            algorithms=[key.algorithm_name],
            audience=self._settings.audience,
            issuer=self._settings.issuer,
            leeway=self._settings.leeway,
            options={"require": [*_CLAIMS], "enforce_minimum_key_length": True},
        )
        if not claims["sub"] or time.time() - claims["iat"] > self._settings.max_age + self._settings.leeway:
            raise ValueError
        return claims

    def _make_token(self, claims: Mapping[str, Any]) -> Token:
        """Return the permissions of claims. The id is that of the subject, without its name."""
        settings, value = self._settings, claims.get(self._settings.claim, "")
        granted = set(value.split() if isinstance(value, str) else value)
        galleries = [name for scope, names in settings.galleries.items() if scope in granted for name in names]
        scopes: list[Scope] = ["query"] if galleries else []
        scopes += [scope for scope in ("originals", "metrics") if getattr(settings, scope) in granted]
        subject = f"{settings.issuer}\0{claims['sub']}".encode()
        return Token(
            id=hmac.new(self._account_key, subject, "sha256").hexdigest()[:16],
            label="",
            scopes=tuple(scopes),
            galleries=tuple(dict.fromkeys(galleries)),
            created=int(claims["iat"]),
            expires=int(claims["exp"]),
        )

    def _fetch(self) -> None:
        """Replace the keys by those of the provider."""
        url = self._settings.jwks_url
        if url is None:
            document = _get_json(self._settings.issuer.rstrip("/") + _DISCOVERY)
            if document["issuer"] != self._settings.issuer:
                raise ValueError("another issuer")
            url = check_secure_url(document["jwks_uri"])
        keys = {
            key.key_id: key
            for key in jwt.PyJWKSet.from_dict(_get_json(url))
            if key.key_id and key.algorithm_name in _ALGORITHMS and key.public_key_use in (None, "sig")
        }
        if not keys:
            raise ValueError("no usable key")
        self._keys = keys


def _get_json(url: str) -> Any:
    """Fetch a document, without following redirects."""
    body = b""
    with httpx.stream("GET", url, timeout=_TIMEOUT) as response:
        response.raise_for_status()
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > _MAX_BYTES:
                raise ValueError("too large")
    return json.loads(body)
