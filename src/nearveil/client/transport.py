"""Requests of a client, replies to them, and what carries them: HTTP, or a gallery in this process."""

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

What = Literal["galleries", "map", "query", "model", "original", "codes", "group", "layout", "hint", "sealed"]
JSON, BYTES = "application/json", "application/octet-stream"


@dataclass(frozen=True)
class Request:
    """One request. It is made of messages and of public things alone (``docs/theory/service.md``)."""

    what: What
    gallery: str = ""
    body: bytes = field(default=b"", repr=False)  # the frame of a query
    key: str = ""  # names a query; a retry has the same
    candidates: float | None = None  # of a map
    etag: str = ""  # of the map that the client holds
    number: int = 0  # of an item, of a group of codes, or of a part of hints
    blocks: tuple[int, ...] | None = None  # of a group; None for all
    since: int = 0  # the version of a layout that the client holds; 0 for none
    most: int = 1 << 20  # bytes of a reply that are read


@dataclass(frozen=True)
class Response:
    """One reply. Nothing in it is trusted."""

    status: int  # as of HTTP
    kind: str  # the media type
    body: bytes = field(repr=False)
    etag: str = ""
    retry_after: float | None = None  # seconds


class Transport(Protocol):
    """Carries requests. `UnreachableError` where no reply came."""

    async def send(self, request: Request) -> Response:
        """Send one request and return its reply."""
        ...

    async def close(self) -> None:
        """Close what it holds open."""
        ...


_TOKEN = re.compile(r"[\x21-\x7e]{1,500}")
_HOST = re.compile(rb"[a-z0-9._-]{1,253}|[0-9a-f:.]{2,45}")  # a name, or an address
_SECONDS = re.compile(r"[0-9]{1,9}")
_ACCEPTS = {"galleries": JSON, "model": BYTES, "original": BYTES}  # all else is a frame
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
    """Where the server is, and how it is talked to. The token is in no representation of it.

    `insecure` allows plain HTTP beyond this machine: everybody on the way then sees token and messages. `certificate`
    is the client's own: one file with certificate and key, or two. `transport` replaces the network in tests.
    """

    url: str  # ``https://host:port``, perhaps with a path before ``/v1``
    token: str = field(repr=False)
    insecure: bool = False
    timeout: float = 60.0  # seconds that one request and its reply may take in all
    ca: str | Path | None = None  # A file of certificates to trust, in place of the usual ones
    certificate: str | Path | tuple[str | Path, str | Path] | None = None
    proxies: bool = False  # whether the proxies of the environment are used
    transport: "httpx.AsyncBaseTransport | None" = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.token, str) or not _TOKEN.fullmatch(self.token):
            raise QuestionError("token", "it must be the text that `nearveil token create` printed, without spaces")
        if not self.timeout > 0:
            raise QuestionError("timeout", "it must be a positive number of seconds")
        object.__setattr__(self, "url", _checked_url(self.url, insecure=self.insecure))

    def make_context(self) -> ssl.SSLContext | bool:
        """Return what TLS trusts."""
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


def _checked_url(url: str, *, insecure: bool) -> str:
    """Return the beginning of all addresses, or say what is wrong. A password in it is never shown."""
    import httpx

    try:
        found = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        raise QuestionError("url", "it must look like https://host:8321") from None
    if found.scheme not in ("http", "https") or not _HOST.fullmatch(found.raw_host):
        raise QuestionError("url", "it must look like https://host:8321")
    if found.userinfo or found.query or found.fragment:
        raise QuestionError("url", "it must have no user, password, query or fragment: the token is given apart")
    if found.scheme == "http" and not (insecure or _is_loopback(found.host)):
        raise QuestionError(
            "url", "it must begin with https: plain HTTP shows the token to all on the way, unless `insecure` allows it"
        )
    return str(found).rstrip("/")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


class HttpTransport:
    """Carries requests to a server, on an event loop."""

    def __init__(self, address: ServerAddress) -> None:
        import httpx

        import nearveil

        self._address = address
        self._client = httpx.AsyncClient(
            headers={
                "Accept-Encoding": "identity",  # nothing is unpacked, so nothing can grow
                "Authorization": f"Bearer {address.token}",
                "User-Agent": f"nearveil/{nearveil.__version__}",
            },
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # none is taken, none is sent
            verify=address.make_context(),
            follow_redirects=False,
            timeout=httpx.Timeout(address.timeout),
            trust_env=address.proxies,
            transport=address.transport,
        )

    async def send(self, request: Request) -> Response:
        """Send one request and return its reply, both within the time that there is."""
        import httpx

        try:
            async with asyncio.timeout(self._address.timeout):
                return await self._exchange(request)
        except (TimeoutError, httpx.TimeoutException):
            words, again = f"no whole reply came within {self._address.timeout:g} s from {self._address.url}", True
        except httpx.InvalidURL:
            words, again = f"{self._address.url} is no address that can be asked", False
        except (httpx.HTTPError, OSError) as error:
            trusted = "CERTIFICATE_VERIFY_FAILED" not in str(error)
            words, again = (
                f"{self._address.url} cannot be reached, or broke off: {make_printable(str(error))}{self._hint(error)}",
                trusted,
            )
        # Raised here, with no other error behind it: those of httpx hold the request, and that the token.
        raise UnreachableError(words, again=again)

    def _hint(self, error: Exception) -> str:
        """Return what to look at where the other side seems to speak TLS, or not to speak it, against expectation."""
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
                raise ReplyError("the reply is packed, which was not asked for")
            declared = headers.get("content-length", "")
            if _SECONDS.fullmatch(declared) and int(declared) > request.most:
                raise ReplyError(f"the reply is larger than {request.most} bytes")
            parts, size = [], 0
            async for part in reply.aiter_raw():
                size += len(part)
                if size > request.most:
                    raise ReplyError(f"the reply is larger than {request.most} bytes")
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
        """Return the method, the address, the headers and the body of a request."""
        headers, params, path = {"Accept": _ACCEPTS.get(request.what, FRAME)}, {}, f"{self._address.url}/v1/galleries"
        if request.what != "galleries":
            path += f"/{quote(request.gallery, safe='')}{_PATHS[request.what].format(request.number)}"
        if request.what in ("query", "sealed"):
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
    """Return which blocks of a group are asked for, as an address says it."""
    return ",".join(map(str, blocks)) or "none"


M = TypeVar("M", bound=Model)

AGAIN = (429, 502, 503, 504)
_MAKING = 600.0  # seconds that a gallery here may take to make the index for sealed questions
LONGEST_WORDS = 500  # characters of a server's words
_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]{1,200}"')


@dataclass(frozen=True)
class Patience:
    """How often a request is sent again, and when. Nothing private plays a part."""

    retries: int
    first: float = 0.5  # seconds before the first retry; twice as long before each further one
    longest: float = 20.0  # seconds, also where the server asks for more

    def pause(self, attempt: int, retry_after: float | None) -> float:
        """Return the seconds to wait after an attempt, counted from 0."""
        wanted = self.first * 2**attempt if retry_after is None else retry_after
        return min(max(wanted, 0.0), self.longest)


@dataclass
class Tally:
    """Bytes of bodies, and when the last reply came."""

    sent: int = 0
    received: int = 0
    heard: float = 0.0


def read_frame(response: Response) -> bytes:
    """Return the frame that a reply holds, of whatever status: it says by itself what it is."""
    if response.kind != FRAME or 300 <= response.status < 400:
        raise make_refusal(response)
    return response.body


def read_json(response: Response, form: type[M]) -> M:
    """Return the JSON of a reply, checked."""
    if response.status != 200 or response.kind != JSON:
        raise make_refusal(response)
    try:
        found = form.model_validate_json(response.body)
    except ValidationError:
        raise ReplyError("the server's reply is not what a nearveil server sends") from None
    _check_text(found.model_dump())
    return found


def read_bytes(response: Response) -> bytes:
    """Return the bytes of a reply."""
    if response.status != 200 or response.kind != BYTES:
        raise make_refusal(response)
    return response.body


def read_etag(response: Response) -> str:
    """Return the tag of a reply if it can stand in a header, else nothing."""
    return response.etag if _ETAG.fullmatch(response.etag) else ""


def make_refusal(response: Response) -> ReplyError:
    """Return why a reply is of no use, in words that print."""
    if response.status >= 400 and response.kind == JSON:
        try:
            said = Problem.model_validate_json(response.body)
        except ValidationError:
            return ReplyError(
                f"the server declined ({response.status}), and does not say why as a nearveil server does"
            )
        return DeclinedError(response.status, make_printable(said.code), make_printable(said.message).rstrip("."))
    if 300 <= response.status < 400:
        return ReplyError(f"the server sends the client elsewhere ({response.status}), where it does not go")
    return ReplyError(f"the reply ({response.status}) is not what a nearveil server sends: is this the right address?")


def make_printable(text: str) -> str:
    """Return text of the other side without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:LONGEST_WORDS])


def _check_text(found: Any) -> None:
    """Refuse text that does not print, however deep it lies."""
    if isinstance(found, str):
        if not found.isprintable():
            raise ReplyError("the server's reply holds text that does not print")
    elif isinstance(found, dict):
        for key, value in found.items():
            _check_text(key)
            _check_text(value)
    elif isinstance(found, (list, tuple)):
        for value in found:
            _check_text(value)


class LocalTransport:
    """Carries requests to a gallery in this process, in threads. Closing closes the gallery if it is `owned`."""

    def __init__(self, gallery: "Gallery", *, owned: bool) -> None:
        self._gallery, self._owned = gallery, owned

    @classmethod
    def open(cls, where: "str | os.PathLike[str] | Index | Gallery") -> "LocalTransport":
        """Open an index by its folder or URL; an index or a gallery that is open stays its owner's."""
        from nearveil.gallery import Index
        from nearveil.server.galleries import OFFERS, OpenGallery

        owned = isinstance(where, (str, os.PathLike))
        if isinstance(where, (str, os.PathLike)):
            where = Index.open(os.fspath(where))
        if isinstance(where, Index):
            where = OpenGallery(where, "local", offers=OFFERS)  # all of them: its owner asks
        return cls(where, owned=owned)

    async def send(self, request: Request) -> Response:
        """Ask the gallery, and return what a server would."""
        return await asyncio.to_thread(self._reply, request)

    async def close(self) -> None:
        """Close the gallery if it is the transport's own."""
        if self._owned:
            await asyncio.to_thread(self._gallery.close)

    def _reply(self, request: Request) -> Response:
        from nearveil.server.errors import ServiceError

        try:
            return self._answer(request)
        except ServiceError as error:
            said = Problem(code=error.code, message=str(error))
            return Response(error.status, JSON, said.model_dump_json().encode(), retry_after=error.retry_after)

    def _answer(self, request: Request) -> Response:
        from nearveil.server.galleries import OpenGallery, frame_status

        if request.what == "layout" and isinstance(self._gallery, OpenGallery):
            self._gallery.prepare(_MAKING)  # nobody else is kept waiting
        if request.what == "galleries":
            return Response(200, JSON, Galleries(galleries=(self._gallery.info(),)).model_dump_json().encode())
        if request.what in ("map", "layout"):
            data = self._gallery.map(request.candidates) if request.what == "map" else self._gallery.sealed()
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            return Response(304, FRAME, b"", etag) if etag == request.etag else Response(200, FRAME, data, etag)
        if request.what == "query":
            data = self._gallery.query(request.body)
            return Response(frame_status(data), FRAME, data)
        gallery, number = self._gallery, request.number
        made: dict[str, Callable[[], bytes]] = {
            "model": gallery.model,
            "original": lambda: gallery.original(number),
            "codes": gallery.codes,
            "group": lambda: gallery.codes_group(number, request.blocks),
            "hint": lambda: gallery.sealed(number, request.since),
            "sealed": lambda: gallery.ask_sealed(request.body),
        }
        return Response(200, _ACCEPTS.get(request.what, FRAME), made[request.what]())
