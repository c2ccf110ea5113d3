"""Authenticate the one browser that opened the printed address, and check every request to the page."""

import hashlib
import hmac
import logging
import secrets
import threading

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nearveil.ui._views import PageError, describe_failure


class PageEntry:
    """A token for one browser, and the cookie and the secret that it is exchanged for. They end with this process."""

    # Browsers send the cookie to every server at 127.0.0.1, on any port. The secret is in the local storage of the
    # page's origin, and sent as a header. Every request needs both.

    def __init__(self) -> None:
        self.token, self.cookie, self.secret = (secrets.token_urlsafe(32) for _ in range(3))
        self._lock, self._is_used = threading.Lock(), False

    def use_token(self, token: str, *, has_cookie: bool = False) -> bool:
        """Return whether a browser gets cookie and secret: the first one with the right token, and that one again."""
        with self._lock:
            if not _is_same(token, self.token) or (self._is_used and not has_cookie):
                return False
            self._is_used = True
            return True

    def has_cookie(self, cookie: str) -> bool:
        """Return whether the cookie is right."""
        return _is_same(cookie, self.cookie)

    def authenticates(self, cookie: str, secret: str) -> bool:
        """Return whether the cookie and the secret are right."""
        return self.has_cookie(cookie) and _is_same(secret, self.secret)


def _is_same(left: str, right: str) -> bool:
    """Compare in constant time, for any characters and lengths."""
    digests = (hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (left, right))
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
_SAFE_METHODS = ("GET", "HEAD")
_ALLOWED_SITES = ("none", "same-origin")  # values of Sec-Fetch-Site
_UNIQUE_HEADERS = ("host", "origin", "cookie", "sec-fetch-site", "content-length", PAGE_HEADER)
_LOG = logging.getLogger(__name__)


class PageGuard:
    """ASGI middleware that admits only the page's own browser."""

    # Host stops DNS rebinding, Origin and Sec-Fetch-Site stop other sites, and the cookie stops other programs. The
    # secret stops other servers on this machine: browsers send them the cookie too, but only the page has the secret.

    def __init__(self, app: ASGIApp, entry: PageEntry, port: int) -> None:
        self._app, self._entry = app, entry
        self._hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        self._cookie = name_cookie(port)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, answer it, and add the security headers."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        if scope["type"] != "http":
            raise RuntimeError("the page supports HTTP only")
        try:
            self._check(scope)
            await self._app(scope, receive, send_with_headers)
        except PageError as error:
            await error.to_response()(scope, receive, send_with_headers)
        except Exception as error:
            # Log the type only: the text may hold a private value.
            _LOG.error("a request failed: %s", type(error).__name__)
            if not started:
                await describe_failure().to_response()(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        for name in _UNIQUE_HEADERS:
            if len(headers.getlist(name)) > 1:
                raise PageError(400, "http", f"Duplicate header {name}.")
        host = headers.get("host", "")
        if host not in self._hosts:
            raise PageError(421, "host", "Open the page at the printed address. Other host names are refused.")
        self._check_origin(scope, headers, host)
        is_public = scope["path"] == "/" or scope["path"].startswith("/static/")
        # Other servers on this machine may set cookies of the same name: one of them must match.
        cookies, secret = _find_cookies(headers, self._cookie), headers.get(PAGE_HEADER, "")
        scope["state"] = {**scope.get("state", {}), "has_cookie": any(map(self._entry.has_cookie, cookies))}
        if not (is_public or any(self._entry.authenticates(cookie, secret) for cookie in cookies)):
            words = "This page is not open in this tab. Open the address that `nearveil ui` printed."
            raise PageError(401, "pass", words)

    def _check_origin(self, scope: Scope, headers: Headers, host: str) -> None:
        site = headers.get("sec-fetch-site", "same-origin")
        is_navigation = scope["path"] == "/" and scope["method"] in _SAFE_METHODS  # another site may link here
        if site not in _ALLOWED_SITES and not is_navigation:
            raise PageError(403, "origin", "Cross-site request refused.")
        if scope["method"] not in _SAFE_METHODS and headers.get("origin") != f"http://{host}":
            raise PageError(403, "origin", "Only the page itself may send this request.")


def name_cookie(port: int) -> str:
    """Return the name of the cookie. It has the port, because browsers send cookies to every port."""
    return f"nearveil-{port}"


def _find_cookies(headers: Headers, name: str) -> list[str]:
    """Return all values of a cookie. Cookies of other servers on this machine may be malformed."""
    pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
    return [value for key, _, value in pairs if key == name]
