"""The page's addresses. Everything private comes and goes in memory, on loopback."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from anyio import from_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from nearveil.features.images import MOST_BYTES
from nearveil.ui import _budget
from nearveil.ui._audit import Auditor
from nearveil.ui._desk import Desk, Question
from nearveil.ui._edge import Edge, cookie_name, told
from nearveil.ui._entry import Entry
from nearveil.ui._errors import Trouble, failure, too_large, trouble_of

_KINDS = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
_NO_MORE = 1024  # bytes of a body where none is wanted


def create_app(desk: Desk, entry: Entry, port: int, *, auditor: Auditor | None = None) -> Edge:
    """Return the page as an ASGI application.

    Parameters
    ----------
    desk : Desk
    entry : Entry
        Its token lets one browser in, once.
    port : int
        That the page is reached at: the Host of every request must name it.
    auditor : Auditor, optional

    Returns
    -------
    Edge
        An ASGI application.
    """
    auditor = auditor or Auditor()

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(auditor.close)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=life)
    _pages(app, entry, port)
    _questions(app, desk)
    _budgets(app, desk)
    _audits(app, auditor)
    _troubles(app)
    return Edge(app, entry, port)


def assets() -> dict[str, bytes]:
    """Return the files of the page, by name."""
    return {one.name: one.read_bytes() for one in files("nearveil.ui").joinpath("static").iterdir() if one.is_file()}


def _pages(app: FastAPI, entry: Entry, port: int) -> None:
    held = assets()

    @app.get("/")
    def page(request: Request, t: str | None = None) -> Response:
        if t is not None:
            return _arrived(request, entry, port, t, held)
        known = request.state.known
        return HTMLResponse(held["index.html" if known else "closed.html"], 200 if known else 401)

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        kind = _KINDS.get(name.rpartition(".")[2])
        if name not in held or kind is None:
            raise Trouble(404, "path", "There is nothing here.")
        return Response(held[name], headers={"content-type": kind})


def _arrived(request: Request, entry: Entry, port: int, token: str, held: dict[str, bytes]) -> Response:
    if "prefetch" in request.headers.get("sec-purpose", ""):  # a browser that guesses must not use the token up
        raise Trouble(503, "prefetch", "Open the address itself.")
    if request.state.known:
        return RedirectResponse("/", 303)
    found = entry.exchange(token)
    if found is None:
        return HTMLResponse(held["used.html"], 403)
    # A page of our own, not a redirect: it takes the secret, and along a redirect from another site a browser would
    # send no strict cookie.
    reply = HTMLResponse(held["welcome.html"].replace(b"{{secret}}", found.secret.encode()))
    reply.set_cookie(cookie_name(port), found.cookie, httponly=True, samesite="strict", path="/")
    return reply


def _questions(app: FastAPI, desk: Desk) -> None:
    @app.get("/api/galleries")
    def galleries() -> dict[str, Any]:
        return _plainly(desk.galleries)

    @app.get("/api/map")
    def public_map(gallery: str, candidates: float | None = None) -> dict[str, Any]:
        return _plainly(lambda: desk.map(gallery, candidates))

    @app.get("/api/preview")
    def preview(epsilon: float) -> dict[str, Any]:
        return _plainly(lambda: desk.preview(epsilon))

    @app.get("/api/about")
    def about() -> dict[str, Any]:
        return _plainly(desk.about)

    @app.get("/api/picture")
    def picture(gallery: str, candidates: float | None = None) -> dict[str, Any]:
        return _plainly(lambda: desk.picture(gallery, candidates))

    @app.post("/api/ask")
    async def ask(
        request: Request, gallery: str, epsilon: float, candidates: float | None = None, hide: bool = False
    ) -> dict[str, Any]:
        image = await _body(request, MOST_BYTES)
        question = Question(epsilon, gallery, candidates, hide)
        return await run_in_threadpool(_plainly, lambda: desk.ask(image, question, lambda: _listens(request)))

    @app.post("/api/classify")
    async def classify(request: Request, gallery: str) -> dict[str, Any]:
        image = await _body(request, MOST_BYTES)
        return await run_in_threadpool(_plainly, lambda: desk.classify(image, gallery))

    @app.post("/api/again")
    async def again(request: Request, key: str) -> dict[str, Any]:
        await _body(request, _NO_MORE)
        return await run_in_threadpool(_plainly, lambda: desk.again(key, lambda: _listens(request)))


def _budgets(app: FastAPI, desk: Desk) -> None:
    @app.get("/api/budget")
    def budget() -> dict[str, Any]:
        paying = desk.purse.account.name
        return _plainly(lambda: {"accounts": _budget.accounts(desk.ledger, paying), "paying": paying})

    @app.get("/api/history")
    def history(account: str) -> dict[str, Any]:
        return _plainly(lambda: _budget.history(desk.ledger, account))

    @app.get("/api/plan")
    def plan(account: str, count: int, epsilon: float) -> dict[str, Any]:
        return _plainly(lambda: _budget.planned(desk.ledger.account(account), count, epsilon))

    @app.get("/api/verify")
    def verify() -> dict[str, Any]:
        return _plainly(lambda: _budget.verified(desk.ledger))


def _audits(app: FastAPI, auditor: Auditor) -> None:
    @app.get("/api/mechanisms")
    def names() -> dict[str, Any]:
        return dict(auditor.names())

    @app.get("/api/audit")
    def progress() -> dict[str, Any]:
        return auditor.told()

    @app.post("/api/audit")
    async def start(request: Request, name: str, epsilon: float) -> dict[str, Any]:
        await _body(request, _NO_MORE)
        await run_in_threadpool(auditor.start, name, epsilon)
        return auditor.told()

    @app.post("/api/audit/stop")
    async def stop(request: Request) -> dict[str, Any]:
        await _body(request, _NO_MORE)
        auditor.stop()
        return auditor.told()


def _troubles(app: FastAPI) -> None:
    @app.exception_handler(Trouble)
    def trouble(_: Request, error: Trouble) -> JSONResponse:
        return JSONResponse(told(error), error.status)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        fields = ", ".join(sorted({str(one["loc"][-1]) for one in error.errors()}))
        return JSONResponse(told(Trouble(422, "question", f"This cannot be read: {fields}.")), 422)

    @app.exception_handler(Exception)
    def failed(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse(told(failure()), 500)  # it is raised on, to the edge, which writes down what it was

    @app.exception_handler(HTTPException)
    def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(told(Trouble(error.status_code, "path", "There is nothing here.")), error.status_code)


def _plainly(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do something, and say in words why it cannot be done."""
    try:
        return work()
    except Exception as error:
        trouble = trouble_of(error)
    # Raised here, with no other error behind it: those hold what was asked.
    raise trouble


def _listens(request: Request) -> bool:
    """Return whether the browser still waits: it may have lost its patience, or loaded the page anew."""
    return not from_thread.run(request.is_disconnected)


async def _body(request: Request, most: int) -> bytes:
    """Read a body, up to a size; beyond it nothing is kept."""
    length = request.headers.get("content-length", "0")
    parts, size = [], int(length) if length.isdigit() and len(length) < 16 else most + 1
    if size > most:
        raise too_large()
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise too_large()
        parts.append(part)
    return b"".join(parts)
