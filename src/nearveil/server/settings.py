"""What a server is told: by a file, by the environment, by the command line. The later wins."""

import ipaddress
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from nearveil.errors import NearveilError
from nearveil.server.tokens import default_place, store_url
from nearveil.wire.frames import DEFAULT_LIMITS, HEADER_BYTES
from nearveil.wire.schema import GALLERY_NAME, GalleryKind, Offer

PREFIX = "NEARVEIL_SERVER_"
CONFIG = "NEARVEIL_CONFIG"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_NEEDED = ("public", "classes", "epsilon", "delta", "ledger", "account")  # by protected galleries, and by no others
_MORE = ("publications", "unit", "allow_noise")
_SPOKEN = {  # by what pydantic calls it
    "extra_forbidden": "there is no such setting",
    "missing": "it must be given",
    "tuple_type": "it must be a list",
    "string_pattern_mismatch": "it must have small letters, digits, and between them . _ - (at most 64 in all)",
}
_NO_LIST = "it must be a list: write [[galleries]] before each, in double brackets, with its name below as name = ..."

Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]


class SettingsError(NearveilError, ValueError):
    """A setting is missing or wrong; the text names it."""


class GallerySettings(BaseModel):
    """One gallery.

    Attributes
    ----------
    name : str
        As clients call it.
    kind : {"open", "protected"}
    index : str
        A folder or a PostgreSQL URL, as `nearveil index` made it. Of a protected gallery: the private records.
    offers : tuple of {"names", "thumbnails", "originals", "codes", "metadata", "sealed"}
        What an open gallery sends with all candidates; "codes" hands out all codes, for search at home; "sealed"
        answers sealed questions.
    extractor : str
        The name of what makes the features, for people. Those that come with nearveil are named without it.
    public : str
        Of a protected gallery: the index of public images, which shape its model.
    classes : tuple of str
        Of a protected gallery: what its model tells apart.
    epsilon, delta : float
        Of a protected gallery: what all its models together may cost its records.
    publications : int
        Of a protected gallery: how many models it may ever publish, 1 by default.
    unit : str
        Of a protected gallery: what one record is, "record" by default. "person with all images" says that each person
        has one record.
    ledger, account : str
        Of a protected gallery: who pays.
    allow_noise : bool
        Of a protected gallery: whether ``nearveil protect`` publishes also where noise alone is to be expected.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=GALLERY_NAME)]
    kind: GalleryKind = "open"
    index: Annotated[str, Field(min_length=1)]
    offers: tuple[Offer, ...] = ("names", "thumbnails")
    extractor: Annotated[str, Field(max_length=1000)] = ""
    public: Annotated[str, Field(min_length=1)] | None = None
    classes: tuple[str, ...] | None = None
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    publications: Annotated[int, Field(ge=1)] | None = None
    unit: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    ledger: Annotated[str, Field(min_length=1)] | None = None
    account: Annotated[str, Field(min_length=1)] | None = None
    allow_noise: bool | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind == "protected":
            missing = [name for name in _NEEDED if getattr(self, name) is None]
            if missing:
                raise ValueError(f"a protected gallery needs {', '.join(missing)}")
            if "offers" in self.model_fields_set and self.offers:
                raise ValueError("offers: a protected gallery offers none of its records")
        else:
            useless = [name for name in (*_NEEDED, *_MORE) if getattr(self, name) is not None]
            if useless:
                raise ValueError(f"{', '.join(useless)}: for protected galleries only; kind is open")
        return self


_LARGEST_CONFIG = 1 << 20  # bytes
_DIVIDED = ("burst", "connections", "concurrency", "queue", "sending", "receiving", "cache")


class Settings(BaseSettings):
    """All that a server can be told. ``Settings.load`` reads them from a file, too.

    Every field is also an environment variable: ``NEARVEIL_SERVER_PORT``, ``NEARVEIL_SERVER_GALLERIES`` (JSON).

    Attributes
    ----------
    host, port
        Where it listens; port 0 takes a free one.
    tls_cert, tls_key : Path
        In PEM. Beyond loopback they must be given, or `insecure` must be said.
    tls_client_ca : Path
        Clients must show a certificate that this authority signed.
    insecure : bool
        Listen beyond loopback without TLS: behind a proxy that does it.
    management_host, management_port
        Where /health, /ready and /metrics are answered, and nowhere else: without TLS, whatever the Host header says,
        at no rate. No port, the default, leaves them at `port`.
    tokens : str
        A file, or a PostgreSQL URL.
    max_body : int
        Bytes of a request.
    max_sealed : int
        Bytes of a sealed question; only lengths that the layout of a gallery fixes are accepted.
    rate, burst
        Requests a minute that a token may make, none is no limit; and how many at once after a pause.
    per_token : int
        Requests of one token that may be under way: that are worked on, or whose large answers are not read yet.
    sending : int
        Bytes of large answers that clients may still have to read, all together; of one token at most half.
    receiving : int
        Bytes of the bodies of requests in flight, all together: of messages, and as many of sealed questions; of one
        token at most half.
    concurrency, queue : int
        Requests that are worked on at the same time by threads, and those that may wait for that.
    connections : int
        That may be open at the same time.
    workers : int
        Processes that answer. Rate, burst, connections, threads and memory are divided among them.
    header_timeout, body_timeout, send_timeout, idle_timeout, work_timeout : float
        Seconds until a client must have sent its headers, its body, read its answer, asked again; and until a request
        that is worked on is given up.
    shutdown_delay : float
        Seconds after SIGTERM in which all requests are still answered: /ready says 503, and every answer closes its
        connection, so that proxies and clients go elsewhere.
    shutdown_grace : float
        Seconds that requests in flight have after that.
    log_level, log_file
        Lines of JSON, to a file or to the standard error.
    trusted_hosts : tuple of str
        What the Host header may say, `*` for anything. By default the names of loopback, and `host`; anything where
        `host` is the address of no interface in particular.
    cache : int
        Bytes of answers that each open gallery keeps.
    database_timeout : float
        Seconds to wait for a database.
    galleries : tuple of GallerySettings
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, validate_default=False)

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8321
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    insecure: bool = False
    management_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    management_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    tokens: Annotated[str, Field(min_length=1)] = Field(default_factory=lambda: str(default_place()))
    max_body: Annotated[int, Field(ge=HEADER_BYTES, le=1 << 30)] = DEFAULT_LIMITS.query + HEADER_BYTES
    max_sealed: Annotated[int, Field(ge=HEADER_BYTES, le=1 << 30)] = DEFAULT_LIMITS.sealed_question + HEADER_BYTES
    rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1200.0
    burst: Annotated[int, Field(ge=1)] = 120
    per_token: Annotated[int, Field(ge=1)] = 16
    sending: Annotated[int, Field(ge=1)] = 256 << 20
    receiving: Annotated[int, Field(ge=1)] = 64 << 20
    concurrency: Annotated[int, Field(ge=1, le=1000)] = 16
    queue: Annotated[int, Field(ge=0, le=100_000)] = 128
    connections: Annotated[int, Field(ge=1, le=100_000)] = 1000
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    header_timeout: Seconds = 10.0
    body_timeout: Seconds = 10.0
    send_timeout: Seconds = 60.0
    idle_timeout: Seconds = 30.0
    work_timeout: Seconds = 30.0
    shutdown_delay: Annotated[float, Field(ge=0, le=3600)] = 3.0
    shutdown_grace: Annotated[float, Field(ge=0, le=3600)] = 10.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_file: Path | None = None
    trusted_hosts: tuple[str, ...] = ()
    cache: Annotated[int, Field(ge=0)] = 256 << 20
    database_timeout: Seconds = 5.0
    galleries: tuple[GallerySettings, ...] = ()

    @field_validator("trusted_hosts")
    @classmethod
    def _small_letters(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(host.lower() for host in hosts)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key: give both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca: needs tls_cert and tls_key")
        for name in ("tls_cert", "tls_key", "tls_client_ca"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"{name}: there is no such file")
        if not self.tls_cert and not self.insecure and not is_loopback(self.host):
            raise ValueError(
                "host: beyond loopback, give tls_cert and tls_key; or say insecure = true, where a proxy before this "
                "server does TLS"
            )
        names = [gallery.name for gallery in self.galleries]
        if len(set(names)) != len(names):
            raise ValueError("galleries: two have the same name")
        return self

    @property
    def shared(self) -> bool:
        """Whether other hosts may answer requests with the same tokens: they are in PostgreSQL."""
        return store_url(self.tokens).get_backend_name() == "postgresql"

    def of_one_worker(self) -> Self:
        """Return the settings of one process: its part of all limits."""
        part = {name: max(1, getattr(self, name) // self.workers) for name in _DIVIDED}
        return self.model_copy(update={**part, "rate": None if self.rate is None else self.rate / self.workers})

    @property
    def hosts(self) -> frozenset[str]:
        """What the Host header may say, without a port; ``*`` stands for anything."""
        if self.trusted_hosts:
            return frozenset(self.trusted_hosts)
        if is_loopback(self.host):
            return frozenset((*_LOOPBACK_NAMES, self.host.lower()))
        return frozenset("*" if _is_any(self.host) else (*_LOOPBACK_NAMES, self.host.lower()))

    @classmethod
    def load(cls, config: str | Path | None = None, **told: Any) -> "Settings":
        """Read settings: what is told wins over the environment, that over the file.

        Parameters
        ----------
        config : str or Path, optional
            A TOML file; the one that ``NEARVEIL_CONFIG`` names by default, or none.
        **told
            Fields, as the command line gives them.

        Returns
        -------
        Settings

        Raises
        ------
        SettingsError
            With the name of the field that is wrong.
        """
        place = config or os.environ.get(CONFIG) or None
        held = {} if place is None else read_settings(Path(place))
        _check_environment(cls)

        class Loaded(cls):  # type: ignore[valid-type, misc]
            @classmethod
            def settings_customise_sources(
                cls, settings_cls: type[BaseSettings], **sources: PydanticBaseSettingsSource
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                return sources["init_settings"], sources["env_settings"], InitSettingsSource(settings_cls, held)

        try:
            return cls.model_construct(**dict(Loaded(**told)))
        except ValidationError as error:
            raise SettingsError(_words(error)) from None
        except ValueError as error:  # of a variable that is no JSON
            raise SettingsError(_no_json(str(error))) from None


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address.

    Examples
    --------
    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def cleaned_name(folder: str | Path) -> str:
    """Return the name of a gallery for a folder.

    Examples
    --------
    >>> cleaned_name("My Photos (2024)/"), cleaned_name("/"), cleaned_name("./index")
    ('my-photos-2024', 'gallery', 'index')
    """
    name = re.sub(r"[^a-z0-9_.-]+", "-", Path(folder).expanduser().resolve().name.lower())
    return name.strip("-_.")[:64].strip("-_.") or "gallery"


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def read_settings(path: Path) -> dict[str, Any]:
    """Return what a TOML file holds, unchecked."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_CONFIG + 1)
        if len(data) > _LARGEST_CONFIG:
            raise SettingsError(f"{path}: it must be at most {_LARGEST_CONFIG} bytes")
        return tomllib.loads(data.decode())
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: this is not TOML: {error}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: this is not TOML: it is not UTF-8") from None
    except OSError as error:
        raise SettingsError(f"{path}: it cannot be read: {error.strerror}") from None


def _check_environment(settings: type[BaseSettings]) -> None:
    """Refuse a variable that means nothing: a limit that is misspelt would silently not hold."""
    for name in os.environ:  # their case does not count
        if name.upper().startswith(PREFIX) and name[len(PREFIX) :].lower() not in settings.model_fields:
            raise SettingsError(f"{name}: there is no such setting")


def _no_json(text: str) -> str:
    """Return which variable is no JSON, from what pydantic says of it."""
    found = re.search(r'field "(\w+)"', text)
    field = found[1] if found else "it"
    example = '[{"name": "birds", "index": "gallery/"}]' if field == "galleries" else '["a", "b"]'
    return f"{PREFIX}{field.upper() if found else '*'}: {field} must be JSON in a variable, such as {example}"


def _words(error: ValidationError) -> str:
    """Return what is wrong, each with its field, and never with its value: an address may hold a password."""
    told = []
    for one in error.errors(include_input=False, include_url=False, include_context=False):
        place = ".".join(str(part) for part in one["loc"])
        text = _SPOKEN.get(one["type"], one["msg"].removeprefix("Value error, "))
        text = _NO_LIST if place == "galleries" and one["type"] == "tuple_type" else text
        told.append(f"{place}: {text}" if place else text)
    return "; ".join(told)
