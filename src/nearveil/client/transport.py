"""Requests of a client, their replies, and the two transports: HTTP, and a gallery in this process."""

import asyncio
import hashlib
import os
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote

from pydantic import ValidationError

from nearveil.client.errors import DeclinedError, QuestionError, ReplyError, UnreachableError
from nearveil.cluster import is_loopback
from nearveil.gallery.answers import LARGEST_ORIGINAL
from nearveil.lazy import require_extra
from nearveil.wire.frames import Kind
from nearveil.wire.schema import FRAME, KEY_HEADER, MOST_MODEL, Galleries, GalleryInfo, Problem

if TYPE_CHECKING:
    import httpx

    from nearveil.gallery import Index
    from nearveil.server.galleries import Gallery

Endpoint = Literal[
    "galleries", "map", "query", "model", "original", "codes", "group", "layout", "tokens", "token", "sealed"
]
_JSON, _BYTES = "application/json", "application/octet-stream"


class _Form(NamedTuple):
    path: str
    media_type: str  # of a reply
    most: int  # bytes of a reply


ENDPOINTS: dict[Endpoint, _Form] = {
    "galleries": _Form("", _JSON, 1 << 20),
    "map": _Form("/map", FRAME, Kind.PUBLIC_PART.frame_limit),
    "query": _Form("/query", FRAME, Kind.ANSWER.frame_limit),
    "model": _Form("/model", _BYTES, MOST_MODEL),
    "original": _Form("/items/{}/original", _BYTES, LARGEST_ORIGINAL),
    "codes": _Form("/codes", FRAME, Kind.CODES_MANIFEST.frame_limit),
    "group": _Form("/codes/{}", FRAME, Kind.CODES_GROUP.frame_limit),
    "layout": _Form("/sealed", FRAME, Kind.SEALED_PUBLIC.frame_limit),
    "tokens": _Form("/sealed/tokens", FRAME, Kind.SEALED_TOKENS.frame_limit),
    "token": _Form("/sealed/tokens", FRAME, Kind.SEALED_TOKEN.frame_limit),
    "sealed": _Form("/sealed", FRAME, Kind.SEALED_ANSWER.frame_limit),
}


@dataclass(frozen=True)
class Request:
    """A request. It is a function of messages and public facts alone (``docs/theory/service.md``)."""

    endpoint: Endpoint
    gallery: str = ""
    body: bytes = field(default=b"", repr=False)  # the frame of a query, or of a request for tokens
    key: str = ""  # its idempotency key
    candidates: float | None = None  # of a map
    etag: str = ""  # of the cached map
    number: int = 0  # of an item, or of a group of codes
    blocks: tuple[int, ...] | None = None  # of a group; None for all
    most: int | None = None  # bytes of the reply; None for the limit of the endpoint


@dataclass(frozen=True)
class Response:
    """A reply. Nothing in it is trusted."""

    status: int  # as of HTTP
    media_type: str
    body: bytes = field(repr=False)
    etag: str = ""
    retry_after: float | None = None  # seconds


_TOKEN = re.compile(r"[\x21-\x7e]{1,8192}")  # a JWT may be long
_HOST = re.compile(rb"[a-z0-9._-]{1,253}|[0-9a-f:.]{2,45}")  # a name, or an address
_NUMBER = re.compile(r"[0-9]{1,9}")


def _make_tls_context(
    ca: str | Path | None, certificate: str | Path | tuple[str | Path, str | Path] | None
) -> ssl.SSLContext | bool:
    """Return the TLS context; True for the default."""
    if ca is None and certificate is None:
        return True
    try:
        if ca is None:
            import certifi

            ca = certifi.where()
        context = ssl.create_default_context(cafile=str(ca))
    except OSError:  # also ssl.SSLError
        raise QuestionError("ca", "the file of certificates must be there, in PEM") from None
    if certificate is not None:
        pair = certificate if isinstance(certificate, tuple) else (certificate,)
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
    if parsed.scheme == "http" and not (insecure or is_loopback(parsed.host)):
        raise QuestionError(
            "url", "it must begin with https: plain HTTP shows the token to the network, unless `insecure` allows it"
        )
    return str(parsed).rstrip("/")


class HttpTransport:
    """Send requests to a server, on an event loop."""

    index: "Index | None" = None

    def __init__(
        self,
        url: str,  # ``https://host:port``, with an optional path before ``/v1``
        token: str | None,
        *,
        insecure: bool = False,
        timeout: float = 60.0,  # seconds for one request with its reply
        ca: str | Path | None = None,  # certificates to trust in place of the system's
        certificate: str | Path | tuple[str | Path, str | Path] | None = None,
        proxies: bool = False,  # whether the proxies of the environment are used
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        import httpx

        import nearveil

        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise QuestionError("token", "a server needs the text that `nearveil token create` printed there, or a JWT")
        if not timeout > 0:
            raise QuestionError("timeout", "it must be a positive number of seconds")
        self.url, self._timeout = _check_url(url, insecure=insecure), timeout
        self._client = httpx.AsyncClient(
            headers={
                "Accept-Encoding": "identity",  # a compressed reply could grow
                "Authorization": f"Bearer {token}",
                "User-Agent": f"nearveil/{nearveil.__version__}",
            },
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # none is accepted or sent
            verify=_make_tls_context(ca, certificate),
            follow_redirects=False,
            timeout=httpx.Timeout(timeout),
            trust_env=proxies,
            transport=transport,
        )

    async def send(self, request: Request) -> Response:
        """Send a request and return its reply, within the timeout; UnreachableError if none comes."""
        import httpx

        try:
            async with asyncio.timeout(self._timeout):
                return await self._exchange(request)
        except (TimeoutError, httpx.TimeoutException):
            words, again = f"Timeout: no complete reply from {self.url} within {self._timeout:g} s", True
        except httpx.InvalidURL:
            words, again = f"{self.url} is not a valid URL", False
        except (httpx.HTTPError, OSError) as error:
            reason, hint = str(error), "; check its address, and that the server runs"
            if self.url.startswith("https"):
                hint = "; does it speak plain http?" if "WRONG_VERSION_NUMBER" in reason else hint
            elif isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError)):
                hint = "; does it speak https?"
            words = f"Cannot reach {self.url}, or it disconnected: {make_printable(reason)}{hint}"
            again = "CERTIFICATE_VERIFY_FAILED" not in reason
        # Raised here, without a cause: errors of httpx hold the request, and it holds the token.
        raise UnreachableError(words, again=again)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _exchange(self, request: Request) -> Response:
        async with self._client.stream(**self._to_http(request)) as reply:
            headers = reply.headers
            if headers.get("content-encoding", "identity") != "identity":
                raise ReplyError("The reply is compressed, but the request did not allow that")
            declared = headers.get("content-length", "0")
            size, parts = int(declared) if _NUMBER.fullmatch(declared) else 0, []
            most = ENDPOINTS[request.endpoint].most if request.most is None else request.most
            if size <= most:
                size = 0
                async for part in reply.aiter_raw():
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        break
            if size > most:
                raise ReplyError(f"The reply is larger than {most} bytes")
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            pause = headers.get("retry-after", "")
            return Response(
                reply.status_code,
                kind,
                b"".join(parts),
                headers.get("etag", ""),
                float(pause) if _NUMBER.fullmatch(pause) else None,
            )

    def _to_http(self, request: Request) -> dict[str, Any]:
        """Return method, URL, headers and body of a request."""
        path, form = f"{self.url}/v1/galleries", ENDPOINTS[request.endpoint]
        if request.endpoint != "galleries":
            path += f"/{quote(request.gallery, safe='')}{form.path.format(request.number)}"
        headers = {"Accept": form.media_type}
        if request.endpoint in ("query", "sealed", "token"):
            headers |= {"Content-Type": FRAME, KEY_HEADER: request.key}
            return {"method": "POST", "url": path, "headers": headers, "content": request.body}
        if request.etag:
            headers["If-None-Match"] = request.etag
        params = {}
        if request.candidates is not None:
            params["candidates"] = repr(float(request.candidates))
        if request.blocks is not None:
            params["blocks"] = ",".join(map(str, request.blocks)) or "none"
        return {"method": "GET", "url": path, "headers": headers, "params": params}


_SEALED_BUILD = 600.0  # seconds to build the index for sealed questions of a local gallery
LONGEST_WORDS = 500  # characters of a server's words
_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]{1,200}"')


def read_body(response: Response, media_type: str = FRAME) -> bytes:
    """Return the body of a successful reply; raise the reason of any other."""
    if response.status != 200 or response.media_type != media_type:
        raise make_refusal(response)
    return response.body


def read_galleries(response: Response) -> tuple[GalleryInfo, ...]:
    """Return the validated galleries of a reply."""
    try:
        listing = Galleries.model_validate_json(read_body(response, _JSON))
    except ValidationError:
        raise ReplyError("The server's reply is not that of a nearveil server") from None
    if not _is_printable(listing.model_dump()):
        raise ReplyError("The server's reply holds unprintable text")
    return listing.galleries


def read_etag(response: Response) -> str:
    """Return the ETag of a reply if it is valid in a header, else nothing."""
    return response.etag if _ETAG.fullmatch(response.etag) else ""


def make_refusal(response: Response) -> ReplyError:
    """Return the error of an unusable reply, in printable text."""
    status = response.status
    if status >= 400 and response.media_type == _JSON:
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


def _is_printable(value: Any) -> bool:
    """Return whether all text of a value of JSON is printable, at any depth."""
    if isinstance(value, str):
        return value.isprintable()
    if isinstance(value, dict):
        return all(map(_is_printable, value.items()))
    return not isinstance(value, (list, tuple)) or all(map(_is_printable, value))


class LocalTransport:
    """Send requests to a gallery in this process, in threads; close an index only if it is opened here."""

    def __init__(self, source: "str | os.PathLike[str] | Index | Gallery") -> None:
        with require_extra("gallery"):
            from nearveil.gallery import Index
            from nearveil.server.galleries import OFFERS, OpenGallery

        self._owned = isinstance(source, (str, os.PathLike))
        if isinstance(source, (str, os.PathLike)):
            source = Index.open(os.fspath(source))
        self.index: Index | None = None  # of a folder, opened by its owner: searching it sends nothing to anybody
        if isinstance(source, Index):
            if source.sealed_file is not None:  # not in PostgreSQL: its server would see the query
                self.index = source
            source = OpenGallery(source, "local", offers=OFFERS)  # all of them: its owner asks
        self._gallery = source

    async def send(self, request: Request) -> Response:
        """Ask the gallery, and return the reply that a server would send."""
        return await asyncio.to_thread(self._reply, request)

    async def close(self) -> None:
        """Close the gallery if it was opened here."""
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
            "tokens": gallery.sealed_tokens,
            "token": lambda: gallery.ask_sealed(request.body),
            "sealed": lambda: gallery.ask_sealed(request.body),
        }
        try:
            data = calls[request.endpoint]()
        except ServiceError as error:
            problem = Problem(code=error.code, message=str(error))
            return Response(error.status, _JSON, problem.model_dump_json().encode(), retry_after=error.retry_after)
        status = frame_status(data) if request.endpoint == "query" else 200
        etag = f'"{hashlib.sha256(data).hexdigest()}"' if request.endpoint in ("map", "layout") else ""
        if etag and etag == request.etag:
            return Response(304, FRAME, b"", etag)
        return Response(status, ENDPOINTS[request.endpoint].media_type, data, etag)
