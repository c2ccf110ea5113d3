"""Requests of a client, their replies, and the two transports: HTTP, and a gallery in this process."""

import asyncio
import hashlib
import ipaddress
import os
import re
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from nearveil.client.errors import DeclinedError, QuestionError, ReplyError, UnreachableError
from nearveil.wire.schema import FRAME, KEY_HEADER, Galleries, Model, Problem

if TYPE_CHECKING:
    import httpx

    from nearveil.gallery import Index
    from nearveil.server.galleries import Gallery

Endpoint = Literal["galleries", "map", "query", "model", "original", "codes", "group", "layout", "hint", "sealed"]
JSON, BYTES = "application/json", "application/octet-stream"


@dataclass(frozen=True)
class Request:
    """A request. It is a function of messages and public facts alone (``docs/theory/service.md``)."""

    endpoint: Endpoint
    gallery: str = ""
    body: bytes = field(default=b"", repr=False)  # the frame of a query
    key: str = ""  # idempotency key of a query
    candidates: float | None = None  # of a map
    etag: str = ""  # of the cached map
    number: int = 0  # of an item, of a group of codes, or of a part of hints
    blocks: tuple[int, ...] | None = None  # of a group; None for all
    since: int = 0  # the version of the cached layout; 0 for none
    most: int = 1 << 20  # bytes of the reply


@dataclass(frozen=True)
class Response:
    """A reply. Nothing in it is trusted."""

    status: int  # as of HTTP
    media_type: str
    body: bytes = field(repr=False)
    etag: str = ""
    retry_after: float | None = None  # seconds


class Transport(Protocol):
    """Send requests. UnreachableError if no reply comes."""

    async def send(self, request: Request) -> Response:
        """Send one request and return its reply."""
        ...

    async def close(self) -> None:
        """Close connections and files."""
        ...


_TOKEN = re.compile(r"[\x21-\x7e]{1,500}")
_HOST = re.compile(rb"[a-z0-9._-]{1,253}|[0-9a-f:.]{2,45}")  # a name, or an address
_SECONDS = re.compile(r"[0-9]{1,9}")
_MEDIA_TYPES = {"galleries": JSON, "model": BYTES, "original": BYTES}  # all else is a frame
_PATHS = {
    "map": "/map",
    "query": "/query",
    "model": "/model",
    "original": "/items/{}/original",
    "codes": "/codes",
    "group": "/codes/{}",
    "layout": "/sealed",
    "hint": "/sealed/{}",
    "sealed": "/sealed",
}


@dataclass(frozen=True)
class ServerAddress:
    """The URL of a server, with connection options. Its representation hides the token.

    `insecure` allows plain HTTP to other machines: anyone on the network path can then read token and messages.
    `certificate` is the client's own: one file with certificate and key, or two. `transport` replaces the network in
    tests.
    """

    url: str  # ``https://host:port``, with an optional path before ``/v1``
    token: str = field(repr=False)
    insecure: bool = False
    timeout: float = 60.0  # seconds for one request with its reply
    ca: str | Path | None = None  # certificates to trust in place of the system's
    certificate: str | Path | tuple[str | Path, str | Path] | None = None
    proxies: bool = False  # whether the proxies of the environment are used
    transport: "httpx.AsyncBaseTransport | None" = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.token, str) or not _TOKEN.fullmatch(self.token):
            raise QuestionError("token", "it must be the text that `nearveil token create` printed, without spaces")
        if not self.timeout > 0:
            raise QuestionError("timeout", "it must be a positive number of seconds")
        object.__setattr__(self, "url", _check_url(self.url, insecure=self.insecure))

    def make_context(self) -> ssl.SSLContext | bool:
        """Return the TLS context; True for the default."""
        if self.ca is None and self.certificate is None:
            return True
        try:
            if self.ca is None:
                import certifi

                context = ssl.create_default_context(cafile=certifi.where())
            else:
                context = ssl.create_default_context(cafile=str(self.ca))
        except OSError:  # also ssl.SSLError
            raise QuestionError("ca", "the file of certificates must be there, in PEM") from None
        if self.certificate is not None:
            pair = self.certificate if isinstance(self.certificate, tuple) else (self.certificate,)
            try:
                context.load_cert_chain(*map(str, pair))
            except OSError:
                words = "the files of certificate and key must be there, in PEM, and the key must fit"
                raise QuestionError("certificate", words) from None
        return context


def _check_url(url: str, *, insecure: bool) -> str:
    """Return the base URL, or raise an error that shows no password."""
    import httpx

    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        raise QuestionError("url", "it must look like https://host:8321") from None
    if parsed.scheme not in ("http", "https") or not _HOST.fullmatch(parsed.raw_host):
        raise QuestionError("url", "it must look like https://host:8321")
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise QuestionError("url", "it must have no user, password, query or fragment; pass the token as token=")
    if parsed.scheme == "http" and not (insecure or _is_loopback(parsed.host)):
        raise QuestionError(
            "url", "it must begin with https: plain HTTP shows the token to the network, unless `insecure` allows it"
        )
    return str(parsed).rstrip("/")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


class HttpTransport:
    """Send requests to a server, on an event loop."""

    def __init__(self, address: ServerAddress) -> None:
        import httpx

        import nearveil

        self._address = address
        self._client = httpx.AsyncClient(
            headers={
                "Accept-Encoding": "identity",  # a compressed reply could grow
                "Authorization": f"Bearer {address.token}",
                "User-Agent": f"nearveil/{nearveil.__version__}",
            },
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # none is accepted or sent
            verify=address.make_context(),
            follow_redirects=False,
            timeout=httpx.Timeout(address.timeout),
            trust_env=address.proxies,
            transport=address.transport,
        )

    async def send(self, request: Request) -> Response:
        """Send a request and return its reply, within the timeout."""
        import httpx

        url = self._address.url
        try:
            async with asyncio.timeout(self._address.timeout):
                return await self._exchange(request)
        except (TimeoutError, httpx.TimeoutException):
            words, again = (
                f"Timeout: no complete reply from {url} within {self._address.timeout:g} s",
                True,
            )
        except httpx.InvalidURL:
            words, again = f"{url} is not a valid URL", False
        except (httpx.HTTPError, OSError) as error:
            trusted = "CERTIFICATE_VERIFY_FAILED" not in str(error)
            words, again = (
                f"Cannot reach {url}, or it disconnected: {make_printable(str(error))}{self._hint(error)}",
                trusted,
            )
        # Raised here, without a cause: errors of httpx hold the request, and it holds the token.
        raise UnreachableError(words, again=again)

    def _hint(self, error: Exception) -> str:
        """Return a hint if one side seems to use TLS and the other does not."""
        import httpx

        if self._address.url.startswith("https"):
            return "; does it speak plain http?" if "WRONG_VERSION_NUMBER" in str(error) else ""
        return "; does it speak https?" if isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError)) else ""

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _exchange(self, request: Request) -> Response:
        async with self._client.stream(**self._to_http(request)) as reply:
            headers = reply.headers
            if headers.get("content-encoding", "identity") != "identity":
                raise ReplyError("The reply is compressed, but the request did not allow that")
            declared = headers.get("content-length", "")
            if _SECONDS.fullmatch(declared) and int(declared) > request.most:
                raise ReplyError(f"The reply is larger than {request.most} bytes")
            parts, size = [], 0
            async for part in reply.aiter_raw():
                size += len(part)
                if size > request.most:
                    raise ReplyError(f"The reply is larger than {request.most} bytes")
                parts.append(part)
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            pause = headers.get("retry-after", "")
            return Response(
                reply.status_code,
                kind,
                b"".join(parts),
                headers.get("etag", ""),
                float(pause) if _SECONDS.fullmatch(pause) else None,
            )

    def _to_http(self, request: Request) -> dict[str, Any]:
        """Return method, URL, headers and body of a request."""
        headers, params, path = (
            {"Accept": _MEDIA_TYPES.get(request.endpoint, FRAME)},
            {},
            f"{self._address.url}/v1/galleries",
        )
        if request.endpoint != "galleries":
            path += f"/{quote(request.gallery, safe='')}{_PATHS[request.endpoint].format(request.number)}"
        if request.endpoint in ("query", "sealed"):
            headers |= {"Content-Type": FRAME, KEY_HEADER: request.key}
            return {"method": "POST", "url": path, "headers": headers, "content": request.body}
        if request.etag:
            headers["If-None-Match"] = request.etag
        if request.candidates is not None:
            params["candidates"] = repr(float(request.candidates))
        if request.blocks is not None:
            params["blocks"] = write_blocks(request.blocks)
        if request.since:
            params["since"] = str(request.since)
        return {"method": "GET", "url": path, "headers": headers, "params": params}


def write_blocks(blocks: tuple[int, ...]) -> str:
    """Return the blocks of a group as the parameter of a URL."""
    return ",".join(map(str, blocks)) or "none"


M = TypeVar("M", bound=Model)

_SEALED_BUILD = 600.0  # seconds to build the index for sealed questions of a local gallery
LONGEST_WORDS = 500  # characters of a server's words
_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]{1,200}"')


def read_frame(response: Response) -> bytes:
    """Return the frame of a reply, of any status: its kind tells replies apart."""
    if response.media_type != FRAME or 300 <= response.status < 400:
        raise make_refusal(response)
    return response.body


def read_json(response: Response, form: type[M]) -> M:
    """Return the validated JSON of a reply."""
    if response.status != 200 or response.media_type != JSON:
        raise make_refusal(response)
    try:
        model = form.model_validate_json(response.body)
    except ValidationError:
        raise ReplyError("The server's reply is not that of a nearveil server") from None
    _check_text(model.model_dump())
    return model


def read_bytes(response: Response) -> bytes:
    """Return the bytes of a reply."""
    if response.status != 200 or response.media_type != BYTES:
        raise make_refusal(response)
    return response.body


def read_etag(response: Response) -> str:
    """Return the ETag of a reply if it is valid in a header, else nothing."""
    return response.etag if _ETAG.fullmatch(response.etag) else ""


def make_refusal(response: Response) -> ReplyError:
    """Return the error of an unusable reply, in printable text."""
    status = response.status
    if status >= 400 and response.media_type == JSON:
        try:
            problem = Problem.model_validate_json(response.body)
        except ValidationError:
            return ReplyError(f"The server declined ({status}) without the reason that a nearveil server sends")
        return DeclinedError(status, make_printable(problem.code), make_printable(problem.message).rstrip("."))
    if 300 <= status < 400:
        return ReplyError(f"The server redirects ({status}); redirects are not followed")
    return ReplyError(f"The reply ({status}) is not that of a nearveil server: is the URL correct?")


def make_printable(text: str) -> str:
    """Replace characters that control a terminal in text of a server."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:LONGEST_WORDS])


def _check_text(value: Any) -> None:
    """Refuse unprintable text at any depth."""
    if isinstance(value, str):
        if not value.isprintable():
            raise ReplyError("The server's reply holds unprintable text")
    elif isinstance(value, dict):
        for item in value.items():
            _check_text(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_text(item)


class LocalTransport:
    """Send requests to a gallery in this process, in threads. Close the gallery if it is `owned`."""

    def __init__(self, gallery: "Gallery", *, owned: bool, index: "Index | None" = None) -> None:
        self._gallery, self._owned = gallery, owned
        self.index = index  # of a folder, opened by its owner: searching it sends nothing to anybody

    @classmethod
    def open(cls, source: "str | os.PathLike[str] | Index | Gallery") -> "LocalTransport":
        """Open an index by its folder or URL; the caller keeps an open index or gallery."""
        from nearveil.gallery import Index
        from nearveil.server.galleries import OFFERS, OpenGallery

        owned = isinstance(source, (str, os.PathLike))
        if isinstance(source, (str, os.PathLike)):
            source = Index.open(os.fspath(source))
        index = None
        if isinstance(source, Index):
            if source.sealed_file is not None:  # not in PostgreSQL, whose server would see what is searched
                index = source
            source = OpenGallery(source, "local", offers=OFFERS)  # all of them: its owner asks
        return cls(source, owned=owned, index=index)

    async def send(self, request: Request) -> Response:
        """Ask the gallery, and return the reply that a server would send."""
        return await asyncio.to_thread(self._reply, request)

    async def close(self) -> None:
        """Close the gallery if it is owned."""
        if self._owned:
            await asyncio.to_thread(self._gallery.close)

    def _reply(self, request: Request) -> Response:
        from nearveil.server.errors import ServiceError
        from nearveil.server.galleries import OpenGallery
        from nearveil.wire.messages import frame_status

        gallery, number = self._gallery, request.number
        if request.endpoint == "layout" and isinstance(gallery, OpenGallery):
            gallery.prepare(_SEALED_BUILD)  # no other client waits
        calls: dict[Endpoint, Callable[[], bytes]] = {
            "galleries": lambda: Galleries(galleries=(gallery.info(),)).model_dump_json().encode(),
            "map": lambda: gallery.map(request.candidates),
            "query": lambda: gallery.query(request.body),
            "model": gallery.model,
            "original": lambda: gallery.original(number),
            "codes": gallery.codes,
            "group": lambda: gallery.codes_group(number, request.blocks),
            "layout": gallery.sealed,
            "hint": lambda: gallery.sealed(number, request.since),
            "sealed": lambda: gallery.ask_sealed(request.body),
        }
        try:
            data = calls[request.endpoint]()
        except ServiceError as error:
            problem = Problem(code=error.code, message=str(error))
            return Response(error.status, JSON, problem.model_dump_json().encode(), retry_after=error.retry_after)
        status = frame_status(data) if request.endpoint == "query" else 200
        etag = f'"{hashlib.sha256(data).hexdigest()}"' if request.endpoint in ("map", "layout") else ""
        if etag and etag == request.etag:
            return Response(304, FRAME, b"", etag)
        return Response(status, _MEDIA_TYPES.get(request.endpoint, FRAME), data, etag)
