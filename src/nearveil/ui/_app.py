"""The page's addresses and its audits, and the server on a port of loopback. Everything private stays in memory."""

import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib.resources import files
from typing import Any

import uvicorn
from anyio import from_thread
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from nearveil.audit import Report, audit, list_mechanisms, list_specimens
from nearveil.audit.registry import AuditEntry
from nearveil.errors import NearveilError
from nearveil.features.images import MOST_BYTES
from nearveil.server.connections import Connection, Slots
from nearveil.server.listener import Server
from nearveil.ui._door import PageEntry, PageGuard, make_error_dict, name_cookie
from nearveil.ui._views import (
    Trouble,
    describe_error,
    describe_failure,
    describe_too_large,
    list_accounts,
    list_history,
    plan_questions,
    verify_ledger,
)
from nearveil.ui.session import PageSession, Question

SECONDS = 30.0  # for all looks together
_FIRST = 2_000  # runs of the first look
_GROWTH = 2
_MOST = 512_000
# Some guarantee nothing, so there is nothing to attack; some wait for real clocks, or are fitted anew, for minutes.
_LEFT_OUT = ("raw", "plain-", "covers: clock", "a question sent as soon as it is made", "student")


class _Stopped(Exception):  # noqa: N818
    """Somebody pressed the button, or the time is up."""


@dataclass
class Job:
    """One audit, as far as it has come."""

    name: str
    epsilon: float
    reports: list[Report] = field(default_factory=list)  # one for each look, each of fresh runs; the last one counts
    state: str = "running"
    runs: int = 0  # that were made in the look under way
    wanted: int = _FIRST


class Auditor:
    """Runs one audit at a time, for at most so many seconds."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._job: Job | None = None

    def names(self) -> dict[str, list[str]]:
        """Return what can be audited: what keeps its guarantee, and what is broken on purpose."""
        return {
            kind: [one.name for one in entries if not one.name.startswith(_LEFT_OUT)]
            for kind, entries in (("mechanisms", list_mechanisms()), ("specimens", list_specimens()))
        }

    def start(self, name: str, epsilon: float) -> None:
        """Begin an audit at an epsilon from 0.01 to 12; one that runs must be stopped first."""
        if not 0.01 <= epsilon <= 12:
            raise Trouble(422, "question", "An audit takes an epsilon from 0.01 to 12.")
        entry = next((one for one in (*list_mechanisms(epsilon), *list_specimens()) if one.name == name), None)
        if entry is None:
            raise Trouble(404, "question", "There is no mechanism of this name.")
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                raise Trouble(409, "busy", "An audit is running. Stop it first.")
            self._stop = threading.Event()
            self._job = job = Job(name, epsilon)
            self._thread = threading.Thread(target=self._run, args=(job, entry, self._stop), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the audit that runs, at its next chance."""
        self._stop.set()

    def close(self, timeout: float = 5.0) -> None:
        """End it, and wait for that a while."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout)

    def status(self) -> dict[str, Any]:
        """Return how far the audit has come, as plain values."""
        job = self._job
        if job is None:
            return {"state": "none"}
        reports = list(job.reports)
        return {
            "name": job.name,
            "state": job.state,
            "runs": job.runs,
            "wanted": job.wanted,
            "looks": [
                {"trials": one.trials, "shown": one.as_dict()["shown_epsilon"], "verdict": one.verdict}
                for one in reports
            ],
            "report": None if not reports else _report_dict(reports[-1]),
        }

    def _run(self, job: Job, entry: AuditEntry, stop: threading.Event) -> None:
        ends = time.monotonic() + self._seconds
        try:
            self._look(job, entry, stop, ends)
            job.state = "done"
        except _Stopped:
            job.state = "stopped" if stop.is_set() else "done"
        except Exception:  # told as such: there is nobody to raise it to
            job.state = "failed"

    def _look(self, job: Job, entry: AuditEntry, stop: threading.Event, ends: float) -> None:
        experiment = replace(entry.make(), name=entry.name)
        runs, took = _FIRST, 0.0
        # The next look takes about as many times longer as it has more runs: one that would be cut off is not begun.
        while runs <= _MOST and time.monotonic() + _GROWTH * took < ends:
            began = time.monotonic()
            job.runs, job.wanted = 0, 2 * runs
            job.reports.append(audit(experiment, trials=runs, progress=_make_tick(job, stop, ends)))
            took, runs = time.monotonic() - began, runs * _GROWTH


def _make_tick(job: Job, stop: threading.Event, ends: float) -> Callable[[int], None]:
    def tick(runs: int) -> None:
        job.runs += runs
        if stop.is_set() or time.monotonic() > ends:
            raise _Stopped

    return tick


def _report_dict(report: Report) -> dict[str, Any]:
    plain = report.as_dict()
    return {**plain, "words": _describe(report), "verdict_words": report.verdict_words}


def _describe(report: Report) -> str:
    shown, promised = f"{report.shown_epsilon:.3g}", f"{report.promised_epsilon:.3g}"
    if report.verdict == "broken":
        return f"Broken: it promises epsilon {promised}, and {'; '.join(report.reasons)}."
    if report.verdict == "kept":
        return (
            f"Kept, as far as this short look goes: of the promised epsilon {promised}, {shown} could be shown "
            f"({report.share:.0%}). No attack found more and no check failed; that is no proof."
        )
    return (
        f"Undecided: at least {shown} of the promised {promised} was shown, and the attack may show more than "
        f"{report.limit:.3g}. More runs decide."
    )


_KINDS = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
_NO_MORE = 1024  # bytes of a body where none is wanted


def create_app(session: PageSession, entry: PageEntry, port: int, *, auditor: Auditor | None = None) -> PageGuard:
    """Return the page as an ASGI application; the Host of every request must name `port`."""
    auditor = auditor or Auditor()

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(auditor.close)

    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=life,
        dependencies=[Depends(_refuse_unknown_parameters)],
    )
    _add_pages(app, entry, port)
    _add_questions(app, session)
    _add_budgets(app, session)
    _add_audits(app, auditor)
    _add_error_handlers(app)
    return PageGuard(app, entry, port)


async def _refuse_unknown_parameters(request: Request) -> None:
    """Refuse parameters that a route does not have: an epsilon that is misspelt would silently not count."""
    names = {parameter.alias for parameter in request.scope["route"].dependant.query_params}
    if unknown := sorted(request.query_params.keys() - names):
        raise Trouble(422, "question", f"Unknown parameter: {', '.join(unknown)}.")


def read_assets() -> dict[str, bytes]:
    """Return the files of the page, by name."""
    return {one.name: one.read_bytes() for one in files("nearveil.ui").joinpath("static").iterdir() if one.is_file()}


def _add_pages(app: FastAPI, entry: PageEntry, port: int) -> None:
    held = read_assets()

    @app.get("/")
    def page(request: Request, t: str | None = None) -> Response:
        if t is not None:
            return _let_in(request, entry, port, t, held)
        known = request.state.known
        return HTMLResponse(held["index.html" if known else "closed.html"], 200 if known else 401)

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        kind = _KINDS.get(name.rpartition(".")[2])
        if name not in held or kind is None:
            raise Trouble(404, "path", "There is nothing here.")
        return Response(held[name], headers={"content-type": kind})


def _let_in(request: Request, entry: PageEntry, port: int, token: str, held: dict[str, bytes]) -> Response:
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
    reply.set_cookie(name_cookie(port), found.cookie, httponly=True, samesite="strict", path="/")
    return reply


def _add_questions(app: FastAPI, session: PageSession) -> None:
    for work in (session.galleries, session.map, session.preview, session.about, session.picture):
        app.get(f"/api/{work.__name__}")(_explain(work))

    @app.post("/api/ask")
    async def ask(request: Request, gallery: str, epsilon: float, candidates: float | None = None) -> dict[str, Any]:
        image = await _read_body(request, MOST_BYTES)
        question = Question(epsilon, gallery, candidates)
        return await run_in_threadpool(
            _run_plainly, lambda: session.ask(image, question, lambda: _is_listening(request))
        )

    @app.post("/api/classify")
    async def classify(request: Request, gallery: str) -> dict[str, Any]:
        image = await _read_body(request, MOST_BYTES)
        return await run_in_threadpool(_run_plainly, lambda: session.classify(image, gallery))

    @app.post("/api/sync")
    async def sync(request: Request, gallery: str) -> dict[str, Any]:
        await _read_body(request, _NO_MORE)
        return await run_in_threadpool(_run_plainly, lambda: session.sync(gallery))

    @app.post("/api/again")
    async def again(request: Request, key: str) -> dict[str, Any]:
        await _read_body(request, _NO_MORE)
        return await run_in_threadpool(_run_plainly, lambda: session.again(key, lambda: _is_listening(request)))


def _add_budgets(app: FastAPI, session: PageSession) -> None:
    @app.get("/api/budget")
    def budget() -> dict[str, Any]:
        paying = session.purse.account.name
        return _run_plainly(lambda: {"accounts": list_accounts(session.ledger, paying), "paying": paying})

    @app.get("/api/history")
    def history(account: str) -> dict[str, Any]:
        return _run_plainly(lambda: list_history(session.ledger, account))

    @app.get("/api/plan")
    def plan(account: str, count: int, epsilon: float) -> dict[str, Any]:
        return _run_plainly(lambda: plan_questions(session.ledger.account(account), count, epsilon))

    @app.get("/api/verify")
    def verify() -> dict[str, Any]:
        return _run_plainly(lambda: verify_ledger(session.ledger))


def _add_audits(app: FastAPI, auditor: Auditor) -> None:
    @app.get("/api/mechanisms")
    def names() -> dict[str, Any]:
        return dict(auditor.names())

    @app.get("/api/audit")
    def progress() -> dict[str, Any]:
        return auditor.status()

    @app.post("/api/audit")
    async def start(request: Request, name: str, epsilon: float) -> dict[str, Any]:
        await _read_body(request, _NO_MORE)
        await run_in_threadpool(auditor.start, name, epsilon)
        return auditor.status()

    @app.post("/api/audit/stop")
    async def stop(request: Request) -> dict[str, Any]:
        await _read_body(request, _NO_MORE)
        auditor.stop()
        return auditor.status()


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(Trouble)
    def trouble(_: Request, error: Trouble) -> JSONResponse:
        return JSONResponse(make_error_dict(error), error.status)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        fields = ", ".join(sorted({str(one["loc"][-1]) for one in error.errors()}))
        return JSONResponse(make_error_dict(Trouble(422, "question", f"This cannot be read: {fields}.")), 422)

    @app.exception_handler(Exception)
    def failed(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse(
            make_error_dict(describe_failure()), 500
        )  # it is raised on, to the edge, which writes down what it was

    @app.exception_handler(HTTPException)
    def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(
            make_error_dict(Trouble(error.status_code, "path", "There is nothing here.")), error.status_code
        )


def _run_plainly(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do something, and say in words why it cannot be done."""
    try:
        return work()
    except Exception as error:
        trouble = describe_error(error)
    # Raised here, with no other error behind it: those hold what was asked.
    raise trouble


def _explain(work: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return the same work, with the same parameters, that says in words why it cannot be done."""

    @wraps(work)
    def run(**given: Any) -> dict[str, Any]:
        return _run_plainly(lambda: work(**given))

    return run


def _is_listening(request: Request) -> bool:
    """Return whether the browser still waits: it may have lost its patience, or loaded the page anew."""
    return not from_thread.run(request.is_disconnected)


async def _read_body(request: Request, most: int) -> bytes:
    """Read a body, up to a size; beyond it nothing is kept."""
    length = request.headers.get("content-length", "0")
    parts, size = [], int(length) if length.isdigit() and len(length) < 16 else most + 1
    if size > most:
        raise describe_too_large()
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise describe_too_large()
        parts.append(part)
    return b"".join(parts)


HOST = "127.0.0.1"  # and no other: the page shows what is private
PORT = 8322
_CONNECTIONS = 200
_GRACE = 6  # seconds for what is under way when it is stopped; `nearveil ui` ends before that


class _Limited(Connection):
    """Everybody on the machine can connect: nobody may send headers without end, or hold connections for ever."""

    body_seconds = 300.0  # the way may be a tunnel
    largest_body = MOST_BYTES + (1 << 16)  # beyond MOST_BYTES the page itself says why


class PortError(NearveilError, ValueError):
    """The page cannot listen there."""


def serve_page(
    session: PageSession, *, port: int = PORT, ready: Callable[[str], None], stopping: Callable[[], None] = lambda: None
) -> None:
    """Show the page at 127.0.0.1 until SIGINT or SIGTERM.

    Parameters
    ----------
    session : PageSession
    port : int, default=8322
        0 takes a free one.
    ready : callable
        Called with the address once the page answers. The address holds a token that works once.
    stopping : callable, optional
        Called at the signal. A question under way is waited for, as long as its server takes.

    Examples
    --------
    >>> serve_page(session, ready=print)  # doctest: +SKIP
    """
    with ExitStack() as stack:
        listening = bind_port(port)
        stack.callback(listening.close)
        number = int(listening.getsockname()[1])
        entry = PageEntry()
        address = f"http://{HOST}:{number}/?t={entry.token}"
        server = Server(make_config(session, entry, number), lambda: ready(address), stopping)
        stack.enter_context(server.signals())
        server.run(sockets=[listening])


def bind_port(port: int) -> socket.socket:
    """Return a socket of loopback."""
    try:
        return socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        words = getattr(error, "strerror", None) or "there is no such port"
        raise PortError(f"--port: cannot listen at {HOST}:{port}: {words}; --port 0 takes a free one") from None


def make_config(session: PageSession, entry: PageEntry, port: int) -> uvicorn.Config:
    """Return how uvicorn serves the page: no log of requests, no words about itself."""
    return uvicorn.Config(
        create_app(session, entry, port),
        http=type("LimitedConnection", (_Limited,), {"slots": Slots(_CONNECTIONS)}),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE,
    )
