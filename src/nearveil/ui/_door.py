"""Who may use the page: one browser that held the printed address. Checks every request. Plain ASGI."""

import hashlib
import hmac
import json
import logging
import secrets
import threading
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nearveil.ui._views import Trouble, describe_failure


@dataclass(frozen=True)
class Pass:
    """What lets one browser in: both are needed."""

    cookie: str = field(repr=False)  # kept by the browser. Every server at 127.0.0.1 is sent it, whatever its port
    secret: str = field(repr=False)  # kept by the page, in the storage of its origin and tab, and sent as a header


class PageEntry:
    """A token that works once, and the pass that it is exchanged for. Neither is kept on a disk."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self._lock = threading.Lock()
        self._pass: Pass | None = None

    def __repr__(self) -> str:
        return "PageEntry()"

    def exchange(self, token: str) -> Pass | None:
        """Return a new pass for the token, the first time; None for another token, and ever after."""
        with self._lock:
            if self._pass is not None or not _is_same(token, self.token):
                return None
            self._pass = Pass(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
            return self._pass

    def knows(self, cookie: str) -> bool:
        """Return whether a cookie is the one that was given out."""
        return self._pass is not None and _is_same(cookie, self._pass.cookie)

    def lets_in(self, cookie: str, secret: str) -> bool:
        """Return whether a cookie and a secret are those that were given out."""
        return self.knows(cookie) and self._pass is not None and _is_same(secret, self._pass.secret)


def _is_same(one: str, other: str) -> bool:
    """Compare in a time that tells nothing, whatever letters and lengths there are."""
    digests = (hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (one, other))
    return hmac.compare_digest(*digests)


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
]
PAGE_HEADER = "nearveil-page"
_SAFE = ("GET", "HEAD")
_HERE = ("none", "same-origin")  # who may have made a request, as the browser says
_ONCE = ("host", "origin", "cookie", "sec-fetch-site", "content-length", PAGE_HEADER)
_LOG = logging.getLogger(__name__)


class PageGuard:
    """Lets in the page's own browser, and nobody else.

    A name that was made to point here (DNS rebinding) fails by its Host, another site's request by its Origin or by
    Sec-Fetch-Site, another program by the cookie, and another server of this machine, which browsers send the cookie
    too, by the secret that the page alone holds.
    """

    def __init__(self, app: ASGIApp, entry: PageEntry, port: int) -> None:
        self._app, self._entry = app, entry
        self._hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        self._cookie = name_cookie(port)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, answer it, and add what browsers must know."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        if scope["type"] != "http":
            raise RuntimeError("the page speaks HTTP alone")
        try:
            self._check(scope)
            await self._app(scope, receive, sending)
        except Trouble as trouble:
            await _send_error(sending, trouble)
        except Exception as error:
            # Of an error its type is written down, and not its text: that may hold what is private.
            _LOG.error("a request failed: %s", type(error).__name__)
            if not begun:
                await _send_error(sending, describe_failure())

    def _check(self, scope: Scope) -> None:
        headers = _read_headers(scope["headers"])
        host = headers.get("host", "")
        if host not in self._hosts:
            raise Trouble(421, "host", "This page answers at the address that was printed, and at no other name.")
        self._check_origin(scope, headers, host)
        open_to_all = scope["path"] == "/" or scope["path"].startswith("/static/")
        # One of the cookies must be the right one; other servers of this machine set what they like.
        cookies, secret = _find_cookies(headers, self._cookie), headers.get(PAGE_HEADER, "")
        scope["state"] = {**scope.get("state", {}), "known": any(map(self._entry.knows, cookies))}
        if not (open_to_all or any(self._entry.lets_in(cookie, secret) for cookie in cookies)):
            words = "This page is not open in this tab. Use the address that `nearveil ui` printed."
            raise Trouble(401, "pass", words)

    def _check_origin(self, scope: Scope, headers: dict[str, str], host: str) -> None:
        site = headers.get("sec-fetch-site", "same-origin")
        arriving = scope["path"] == "/" and scope["method"] in _SAFE  # a link from elsewhere may lead here
        if site not in _HERE and not arriving:
            raise Trouble(403, "origin", "This request comes from another site, and is not answered.")
        if scope["method"] not in _SAFE and headers.get("origin") != f"http://{host}":
            raise Trouble(403, "origin", "This request does not come from the page, and is not answered.")


def name_cookie(port: int) -> str:
    """Return the name of the cookie: cookies do not know ports, and two pages may be open."""
    return f"nearveil-{port}"


def _read_headers(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return headers by name; what comes twice and decides something is refused."""
    found: dict[str, str] = {}
    for raw, value in headers:
        name = raw.decode("latin-1").lower()
        if name in found and name in _ONCE:
            raise Trouble(400, "http", "A header comes twice that may come once.")
        found[name] = value.decode("latin-1")
    return found


def _find_cookies(headers: dict[str, str], name: str) -> list[str]:
    """Return all values of a cookie. Those of other names may look like anything: they come along from every port."""
    crumbs = (one.strip().partition("=") for one in headers.get("cookie", "").split(";"))
    return [value for key, _, value in crumbs if key == name]


async def _send_error(send: Any, trouble: Trouble) -> None:
    body = json.dumps(make_error_dict(trouble)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": trouble.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def make_error_dict(trouble: Trouble) -> dict[str, Any]:
    """Return what went wrong, for the page."""
    return {"code": trouble.code, "words": trouble.words, "paid": trouble.paid, "again": trouble.again}
