"""Routes of the page, and its server on loopback. Private values stay in memory."""

import json
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.resources import files
from typing import Any

import uvicorn
from anyio import from_thread
from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from nearveil.client.questions import Method
from nearveil.errors import NearveilError
from nearveil.features.images import MOST_BYTES
from nearveil.server.listener import MAX_HEADER_BYTES, Connection, Server, Slots
from nearveil.ui._views import ERRORS, PageError, describe_too_large
from nearveil.ui.auth import PageEntry, PageGuard, name_cookie
from nearveil.ui.session import PageSession

_CONTENT_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
_MAX_IGNORED_BODY = 1024  # bytes
_MAX_AGE = 86_400  # seconds that a browser keeps the cookie, which ends with this process: it is sent to every port


def create_app(session: PageSession, entry: PageEntry, port: int) -> PageGuard:
    """Return the page as an ASGI application; the Host of every request must name `port`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(_refuse_unknown_parameters)])
    _add_pages(app, entry, port)
    _add_queries(app, session)
    for kind, describe in ERRORS.items():
        # The error itself is never raised again: it may hold private values.
        app.add_exception_handler(kind, lambda _, error, describe=describe: describe(error).to_response())
    return PageGuard(app, entry, port)


async def _refuse_unknown_parameters(request: Request) -> None:
    """Refuse unknown parameters: a misspelt epsilon must not be ignored."""
    names = {parameter.alias for parameter in request.scope["route"].dependant.query_params}
    if unknown := sorted(request.query_params.keys() - names):
        raise PageError(422, "question", f"Unknown parameter: {', '.join(unknown)}.")


def read_assets() -> dict[str, bytes]:
    """Return the static files of the page by name."""
    folder = files("nearveil.ui").joinpath("static")
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def _add_pages(app: FastAPI, entry: PageEntry, port: int) -> None:
    assets = read_assets()

    @app.get("/")
    def page(request: Request, t: str | None = None) -> Response:
        if t is not None:
            return _log_in(request, entry, port, t, assets)
        if not request.state.has_cookie:
            return HTMLResponse(assets["closed.html"], 401)
        return HTMLResponse(assets["index.html"])

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        content_type = _CONTENT_TYPES.get(name.rpartition(".")[2])
        if name not in assets or content_type is None:
            raise PageError(404, "path", "Not found.")
        return Response(assets[name], headers={"content-type": content_type})


def _log_in(request: Request, entry: PageEntry, port: int, token: str, assets: dict[str, bytes]) -> Response:
    if "prefetch" in request.headers.get("sec-purpose", ""):  # prefetching must not use up the token
        raise PageError(503, "prefetch", "Open the address in a tab.")
    has_cookie = request.state.has_cookie
    if not entry.use_token(token, has_cookie=has_cookie):
        return RedirectResponse("/", 303) if has_cookie else HTMLResponse(assets["used.html"], 403)
    # Not a redirect: this page stores the secret, and after a redirect from another site a browser would not send a
    # strict cookie.
    reply = HTMLResponse(assets["welcome.html"].replace(b"{{secret}}", entry.secret.encode()))
    reply.set_cookie(name_cookie(port), entry.cookie, max_age=_MAX_AGE, httponly=True, samesite="strict", path="/")
    return reply


def _add_queries(app: FastAPI, session: PageSession) -> None:
    reading = (session.galleries, session.map, session.preview, session.about, session.examples)
    for method in (*reading, session.budget, session.history, session.plan, session.verify):
        app.get(f"/api/{method.__name__}")(method)

    @app.get("/api/picture")
    def picture(item: int, side: int) -> Response:
        return Response(session.picture(item, side), headers={"content-type": "image/webp"})

    @app.post("/api/ask")
    async def ask(
        request: Request,
        gallery: str,
        epsilon: float | None = None,
        candidates: float | None = None,
        by: Method = "auto",
    ) -> dict[str, Any]:
        body = await _read_body(request, MOST_BYTES)
        query = json.loads(body) if request.headers.get("content-type") == "application/json" else body  # an id
        send = partial(session.ask, query, gallery, epsilon, candidates, by)
        return await run_in_threadpool(send, lambda: _is_connected(request))

    @app.post("/api/classify")
    async def classify(request: Request, gallery: str) -> dict[str, Any]:
        image = await _read_body(request, MOST_BYTES)
        return await run_in_threadpool(session.classify, image, gallery)

    @app.post("/api/sync")
    async def sync(request: Request, gallery: str) -> dict[str, Any]:
        await _read_body(request, _MAX_IGNORED_BODY)
        return await run_in_threadpool(session.sync, gallery)

    @app.post("/api/again")
    async def again(request: Request, key: str) -> dict[str, Any]:
        await _read_body(request, _MAX_IGNORED_BODY)
        return await run_in_threadpool(session.again, key, lambda: _is_connected(request))


def _is_connected(request: Request) -> bool:
    """Return whether the browser still waits for the reply."""
    return not from_thread.run(request.is_disconnected)


async def _read_body(request: Request, limit: int) -> bytes:
    """Read a body of at most `limit` bytes."""
    length = request.headers.get("content-length", "0")
    parts, size = [], int(length) if length.isdigit() and len(length) < 16 else limit + 1
    if size > limit:
        raise describe_too_large()
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise describe_too_large()
        parts.append(part)
    return b"".join(parts)


HOST = "127.0.0.1"  # never another one: the page shows private values
PORT = 8322
_MAX_CONNECTIONS = 200
_GRACE = 6  # seconds for requests in flight at shutdown; `nearveil ui` exits earlier


class _Limited(Connection):
    """Limit headers and connections: every program on this machine can connect."""

    body_timeout = 300.0  # long enough for a slow tunnel


class PortError(NearveilError, ValueError):
    """The page cannot listen on the port."""


def serve_page(
    session: PageSession, *, port: int = PORT, ready: Callable[[str], None], stopping: Callable[[], None] = lambda: None
) -> None:
    """Show the page at 127.0.0.1 until SIGINT or SIGTERM; port 0 is a free one.

    When the page answers, `ready` is called with its address, which has a token for one browser. `stopping` is called
    at the signal, before the server waits for a query in flight.
    """
    with ExitStack() as stack:
        listening = bind_port(port)
        stack.callback(listening.close)
        number = int(listening.getsockname()[1])
        entry = PageEntry()
        address = f"http://{HOST}:{number}/?t={entry.token}"
        server = Server(make_config(session, entry, number), lambda: ready(address), stopping)
        threading.Thread(target=session.warm_up, name="warm-up", daemon=True).start()
        stack.enter_context(server.signals())
        server.run(sockets=[listening])


def bind_port(port: int) -> socket.socket:
    """Return a listening socket on loopback."""
    try:
        return socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "invalid port"
        raise PortError(f"--port: cannot listen at {HOST}:{port}: {reason}; use --port 0 for a free port") from None


def make_config(session: PageSession, entry: PageEntry, port: int) -> uvicorn.Config:
    """Return the configuration of uvicorn: no access log, no server header."""
    return uvicorn.Config(
        create_app(session, entry, port),
        http=type("LimitedConnection", (_Limited,), {"slots": Slots(_MAX_CONNECTIONS)}),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE,
    )
