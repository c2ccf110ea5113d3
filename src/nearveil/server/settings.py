"""Settings of a server, from a file, the environment and the command line. The later wins."""

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FilePath,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from sqlalchemy.engine import make_url

from nearveil.cluster import is_loopback
from nearveil.errors import NearveilError
from nearveil.server.tokens import EVERY, default_location
from nearveil.wire.frames import HEADER_BYTES, Kind
from nearveil.wire.schema import GALLERY_NAME, GalleryKind, Offer

PREFIX = "NEARVEIL_SERVER_"
CONFIG = "NEARVEIL_CONFIG"
_MAX_CONFIG_BYTES = 1 << 20
_UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104 - all addresses of this machine
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_REQUIRED = ("public", "classes", "epsilon", "delta", "ledger", "account")  # by protected galleries, and no others
_OPTIONAL = ("publications", "unit", "group", "allow_noise")
_DIVIDED = ("burst", "connections", "concurrency", "queue", "sending", "receiving", "cache")
_MESSAGES = {  # by pydantic's error type
    "extra_forbidden": "no such setting",
    "missing": "required",
    "model_type": "must be a table with issuer, audience and galleries",
    "path_not_file": "no such file",
    "tuple_type": "must be a list",
    "string_pattern_mismatch": "must have lowercase letters, digits, and . _ - between them (at most 64 characters)",
}
_NOT_A_LIST = "must be a list: write [[galleries]] before each, in double brackets, with its name below as name = ..."

Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]


class SettingsError(NearveilError, ValueError):
    """A setting is missing or invalid; the message names it."""


class GallerySettings(BaseModel):
    """The settings of a gallery."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=GALLERY_NAME)]  #: by which clients use it
    kind: GalleryKind = "open"
    #: A folder or a PostgreSQL URL, as `nearveil index` made it; of a protected gallery the private records. Of an open
    #: gallery also the URL of an uploaded folder: s3://, gs:// or https://.
    index: Annotated[str, Field(min_length=1)]
    #: What an open gallery sends with all candidates; "codes" offers all codes, for local copies; "sealed" answers
    #: sealed questions.
    offers: tuple[Offer, ...] = ("names", "thumbnails")
    #: Display name of the feature extractor. Built-in extractors need none.
    extractor: Annotated[str, Field(max_length=1000)] = ""
    #: The other fields are of a protected gallery. The index of public images, which shape its model.
    public: Annotated[str, Field(min_length=1)] | None = None
    classes: tuple[str, ...] | None = None  #: of its model
    #: With `delta`, the privacy cost of all its models together.
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    publications: Annotated[int, Field(ge=1)] | None = None  #: how many models it may ever publish, 1 by default
    #: What one record is, "record" by default. "person with all images" means that each person has one record.
    unit: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    group: Annotated[str, Field(min_length=1, max_length=200)] | None = None  #: metadata key of whole persons
    ledger: Annotated[str, Field(min_length=1)] | None = None  #: with `account`, what pays
    account: Annotated[str, Field(min_length=1)] | None = None
    #: Whether ``nearveil protect`` publishes a model that is expected to be noise alone.
    allow_noise: bool | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind == "protected":
            missing = [name for name in _REQUIRED if getattr(self, name) is None]
            if missing:
                raise ValueError(f"a protected gallery needs {', '.join(missing)}")
            if "offers" in self.model_fields_set and self.offers:
                raise ValueError("offers: a protected gallery offers none of its records")
        else:
            useless = [name for name in (*_REQUIRED, *_OPTIONAL) if getattr(self, name) is not None]
            if useless:
                raise ValueError(f"{', '.join(useless)}: for protected galleries only; kind is open")
        return self


def check_secure_url(url: str) -> str:
    """Return a URL that nobody on the network can change the answers of: https, or loopback."""
    parts = urlsplit(url)
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname))):
        raise ValueError("must be a URL that begins with https://")
    return url


SecureUrl = Annotated[str, AfterValidator(check_secure_url)]


class OidcSettings(BaseModel):
    """An identity provider (OpenID Connect), with tokens for clients of this server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    issuer: SecureUrl  #: exactly as in the claim `iss`
    audience: Annotated[str, Field(min_length=1)]  #: the name of this server in the claim `aud`
    #: Galleries that a token with a scope of the provider may query; "*" for all.
    galleries: dict[str, tuple[str, ...]]
    originals: str | None = None  #: the scope of the provider that adds `originals`
    metrics: str | None = None  #: the scope of the provider that allows `metrics`
    claim: Annotated[str, Field(min_length=1)] = "scope"  #: the claim with scopes: a text with spaces, or a list
    jwks_url: SecureUrl | None = None  #: of the keys; by default the configuration of the issuer names it
    leeway: Annotated[float, Field(ge=0, le=300)] = 30.0  #: seconds between the clocks of issuer and server
    max_age: Annotated[float, Field(gt=0, le=31 * 86_400)] = 86_400.0  #: seconds; older tokens are refused


class Settings(BaseSettings):
    """All settings of a server. ``Settings.load`` also reads a file.

    Every field is also an environment variable: ``NEARVEIL_SERVER_PORT``, ``NEARVEIL_SERVER_GALLERIES`` (JSON).
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, validate_default=False)

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8321  #: 0 takes a free port
    tls_cert: FilePath | None = None  #: in PEM, with `tls_key`; required beyond loopback, unless `insecure` is set
    tls_key: FilePath | None = None
    tls_client_ca: FilePath | None = None  #: clients must present a certificate that this authority signed
    insecure: bool = False  #: listen beyond loopback without TLS: for a reverse proxy that terminates TLS
    management_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    #: The only port of /health, /ready and /metrics: without TLS, rate limit or check of the Host header. By default,
    #: without a management port, they are at `port`.
    management_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    #: A file, or a PostgreSQL URL.
    tokens: Annotated[str, Field(min_length=1)] = Field(default_factory=lambda: str(default_location()))
    #: Maximum size of a message, in bytes. Of sealed questions only lengths that the layout fixes are accepted.
    max_body: Annotated[int, Field(ge=HEADER_BYTES, le=1 << 30)] = Kind.QUERY.frame_limit
    #: Requests per minute per token; None is unlimited.
    rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1200.0
    burst: Annotated[int, Field(ge=1)] = 120  #: after a pause
    #: Maximum of requests in flight of one token, with large answers that are not read yet.
    per_token: Annotated[int, Field(ge=1)] = 16
    #: Maximum bytes of large answers that clients have not read yet; of one token at most half.
    sending: Annotated[int, Field(ge=1)] = 256 << 20
    #: Maximum bytes of bodies of requests in flight, of messages and as many of sealed questions; of one token half.
    receiving: Annotated[int, Field(ge=1)] = 64 << 20
    concurrency: Annotated[int, Field(ge=1, le=1000)] = 16  #: threads for requests
    queue: Annotated[int, Field(ge=0, le=100_000)] = 128  #: requests that may wait for a thread
    connections: Annotated[int, Field(ge=1, le=100_000)] = 1000  #: maximum of open connections
    #: Processes; rate, burst, connections, threads and memory are divided among them.
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    header_timeout: Seconds = 10.0  #: seconds for a client to send its headers
    body_timeout: Seconds = 10.0  #: to send its body
    send_timeout: Seconds = 60.0  #: to read its answer
    idle_timeout: Seconds = 30.0  #: to send its next request
    work_timeout: Seconds = 30.0  #: seconds for the server to answer a request
    #: Seconds after SIGTERM in which all requests are still answered: /ready returns 503, and every answer closes its
    #: connection, so that proxies and clients go elsewhere.
    shutdown_delay: Annotated[float, Field(ge=0, le=3600)] = 3.0
    shutdown_grace: Annotated[float, Field(ge=0, le=3600)] = 10.0  #: seconds for requests in flight after that
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_file: Path | None = None  #: for lines of JSON; by default standard error
    telemetry: bool = False  #: export spans and durations by OpenTelemetry, to the collector of OTEL_EXPORTER_OTLP_*
    #: Allowed Host headers, `*` for any. By default the names of loopback, and `host`; any if `host` is the unspecified
    #: address.
    trusted_hosts: tuple[Annotated[str, StringConstraints(to_lower=True)], ...] = ()
    cache: Annotated[int, Field(ge=0)] = 256 << 20  #: bytes of cached answers of each open gallery
    database_timeout: Seconds = 5.0  #: seconds to wait for a database
    galleries: tuple[GallerySettings, ...] = ()
    oidc: OidcSettings | None = None  #: accept tokens of an identity provider, beside those of `tokens`

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key: set both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca: needs tls_cert and tls_key")
        if not self.tls_cert and not self.insecure and not is_loopback(self.host):
            raise ValueError(
                "host: beyond loopback, set tls_cert and tls_key; or set insecure = true if a reverse proxy terminates "
                "TLS"
            )
        _check_galleries(self.galleries)
        granted = {name for names in self.oidc.galleries.values() for name in names} if self.oidc else set()
        if unknown := granted - {EVERY, *(gallery.name for gallery in self.galleries)}:
            raise ValueError(f"oidc.galleries: no gallery is named {min(unknown)}")
        return self

    def for_one_worker(self) -> Self:
        """Return the settings of one process: its part of all limits."""
        part = {name: max(1, getattr(self, name) // self.workers) for name in _DIVIDED}
        return self.model_copy(update={**part, "rate": None if self.rate is None else self.rate / self.workers})

    @property
    def hosts(self) -> frozenset[str]:
        """Allowed Host headers, without a port; ``*`` for any."""
        if self.trusted_hosts:
            return frozenset(self.trusted_hosts)
        return frozenset("*" if self.host in _UNSPECIFIED else (*_LOOPBACK_NAMES, self.host.lower()))

    @classmethod
    def load(cls, config: str | Path | None = None, **overrides: Any) -> "Settings":
        """Read settings: `overrides` win over the environment, which wins over the file.

        The file is in TOML; by default the environment variable ``NEARVEIL_CONFIG`` names it. SettingsError names an
        invalid field.
        """
        path = config or os.environ.get(CONFIG) or None
        content = {} if path is None else read_settings(Path(path))
        for name in os.environ:  # in upper or lower case; a misspelt limit would have no effect
            if name.upper().startswith(PREFIX) and name[len(PREFIX) :].lower() not in cls.model_fields:
                raise SettingsError(f"{name}: no such setting")

        class Loaded(cls):  # type: ignore[valid-type, misc]
            @classmethod
            def settings_customise_sources(
                cls, settings_cls: type[BaseSettings], **sources: PydanticBaseSettingsSource
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                return sources["init_settings"], sources["env_settings"], InitSettingsSource(settings_cls, content)

        try:
            return cls.model_construct(**dict(Loaded(**overrides)))
        except ValidationError as error:
            raise SettingsError(_describe(error)) from None
        except ValueError as error:  # a variable is not JSON
            raise SettingsError(_describe_invalid_json(str(error))) from None


def make_gallery_name(folder: str | Path) -> str:
    """Return the name of a gallery for a folder."""
    name = re.sub(r"[^a-z0-9_.-]+", "-", Path(folder).expanduser().resolve().name.lower())
    return name.strip("-_.")[:64].strip("-_.") or "gallery"


def read_settings(path: Path) -> dict[str, Any]:
    """Read a TOML file, without checking its fields."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CONFIG_BYTES + 1)
        if len(data) > _MAX_CONFIG_BYTES:
            raise SettingsError(f"{path}: must have at most {_MAX_CONFIG_BYTES} bytes")
        return tomllib.loads(data.decode())
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: not valid TOML: not UTF-8") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None


def _check_galleries(galleries: Sequence[GallerySettings]) -> None:
    """Refuse galleries of one server that would break each other's guarantee."""
    names = [gallery.name for gallery in galleries]
    if len(set(names)) != len(names):
        raise ValueError("galleries: two have the same name")
    private = [_normalize(gallery.index) for gallery in galleries if gallery.kind == "protected"]
    shown = {_normalize(gallery.index) for gallery in galleries if gallery.kind == "open"}
    shown |= {_normalize(gallery.public) for gallery in galleries if gallery.public is not None}
    if len(set(private)) < len(private) or shown & set(private):
        raise ValueError("galleries: the private index of a protected gallery must not be served by another gallery")
    accounts = [(_normalize(gallery.ledger), gallery.account) for gallery in galleries if gallery.ledger is not None]
    if len(set(accounts)) < len(accounts):
        raise ValueError("galleries: two protected galleries must not publish from one account: records differ")


def _normalize(location: str) -> str:
    """Return one spelling of a path or URL, as far as possible without opening it."""
    if "://" not in location:
        return str(Path(location).expanduser().resolve())
    url = make_url(location)
    return f"{url.host}:{url.port or 5432}/{url.database}?{sorted(url.query.items())}"


def _describe_invalid_json(text: str) -> str:
    """Return which variable is not JSON, from pydantic's message."""
    match = re.search(r'field "(\w+)"', text)
    field = match[1] if match else "it"
    example = '[{"name": "birds", "index": "gallery/"}]' if field == "galleries" else '["a", "b"]'
    return f"{PREFIX}{field.upper() if match else '*'}: {field} must be JSON in a variable, such as {example}"


def _describe(error: ValidationError) -> str:
    """Return the invalid fields, without their values: a URL may hold a password."""
    messages = []
    for item in error.errors(include_input=False, include_url=False, include_context=False):
        field = ".".join(str(part) for part in item["loc"])
        text = _MESSAGES.get(item["type"], item["msg"].removeprefix("Value error, "))
        text = _NOT_A_LIST if field == "galleries" and item["type"] == "tuple_type" else text
        messages.append(f"{field}: {text}" if field else text)
    return "; ".join(messages)
