"""The application: what is asked at which address."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import Annotated

from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

import nearveil
from nearveil.service import _openapi as words
from nearveil.service._desk import Desk, visit_of
from nearveil.service._edge import ASKED, Edge, problem
from nearveil.service._errors import FieldError, ServiceError, UnknownError
from nearveil.service._galleries import Gallery
from nearveil.service._settings import Settings
from nearveil.service._tokens import TokenStore
from nearveil.service.schema import FRAME, GALLERY_NAME, Galleries, Health

_POLL = 5.0  # seconds between two looks for new maps; a request looks by itself, too
BEAT = 5.0  # seconds between two signs of life
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_USUAL = (400, 401, 404, 405, 429, 500, 503)
_ASKED = (403, 408, 409, 411, 413, 415, 422)
_GALLERIES: list[str | Enum] = ["galleries"]
_SERVER: list[str | Enum] = ["server"]
_DESCRIPTION = """Private retrieval. An open gallery takes a message, which names one of many sets and hides the query,
and gives candidates, all of one size. A protected gallery gives a model, which is used at home. All of /v1 needs a
token."""

Name = Annotated[str, Path(pattern=GALLERY_NAME, description="Of the gallery.")]


class MethodError(ServiceError):
    """The method has no place there."""

    status, code = 405, "method"


def create_app(galleries: Sequence[Gallery], tokens: TokenStore, settings: Settings) -> FastAPI:
    """Return the application of a server.

    Parameters
    ----------
    galleries : sequence of Gallery
        They stay the caller's, who closes them.
    tokens : TokenStore
        Likewise.
    settings : Settings
        Limits and names of hosts are taken from it; where to listen is the affair of who runs the application.

    Returns
    -------
    FastAPI
    """
    desk = Desk.of(galleries, tokens, settings)
    app = FastAPI(
        title="nearveil",
        version=nearveil.__version__,
        description=_DESCRIPTION,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.desk = desk
    _add_asked(app, desk)
    _add_looked_up(app, desk)
    _add_own(app, desk)
    app.add_middleware(
        Edge,  # type: ignore[arg-type, unused-ignore]
        tokens=tokens,
        look=desk.look_at_tokens,
        hosts=settings.hosts,
        buckets=desk.buckets,
        under_way=desk.under_way,
        sending=desk.sending,
        metrics=desk.metrics,
        lines=desk.lines,
        asked=[route for route in app.routes if isinstance(route, APIRoute) and "POST" in (route.methods or ())],
    )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _field_error)
    describe = app.openapi
    app.openapi = lambda: app.openapi_schema or words.finished(describe())  # type: ignore[method-assign]
    return app


def _add_own(app: FastAPI, desk: Desk) -> None:
    """Add what is asked about the server itself."""

    @app.get(
        "/health",
        tags=_SERVER,
        openapi_extra=words.NO_TOKEN,
        responses={**words.replies(400, 405, 429), 503: {"description": "It cannot.", "model": Health}},
    )
    async def health(response: Response) -> Health:
        """Say whether the process can still work. If it cannot, restart it."""
        return _health(response, desk.alive())

    @app.get(
        "/ready",
        tags=_SERVER,
        openapi_extra=words.NO_TOKEN,
        responses={**words.replies(400, 405, 429), 503: {"description": "It is not.", "model": Health}},
    )
    async def ready(response: Response) -> Health:
        """Say whether tokens and galleries can be read, and every gallery has a map, or a model."""
        return _health(response, await desk.ready())

    @app.get(
        "/metrics",
        tags=_SERVER,
        openapi_extra=words.TOKEN,
        response_class=Response,
        responses={
            200: {"description": "For Prometheus.", "content": {"text/plain": {"schema": {"type": "string"}}}},
            **words.replies(400, 401, 403, 405, 429, 500, 503),
        },
    )
    async def metrics(request: Request) -> Response:
        """Give figures to Prometheus: of the server, and of the galleries of the token. Needs the scope "metrics"."""
        visit = visit_of(request)
        token = visit.may("metrics")
        held = [gallery for name, gallery in desk.galleries.items() if token.may_use(name)]
        figures = await asyncio.gather(*(desk.figures(gallery) for gallery in held))
        return desk.reply(visit, desk.metrics.exposition(figures, desk.lines.dropped), _PROMETHEUS)


def _health(response: Response, good: bool) -> Health:
    response.status_code = 200 if good else 503
    return Health(status="ok" if good else "unavailable")


def _add_asked(app: FastAPI, desk: Desk) -> None:
    """Add what clients ask in private. `Edge` finds these by itself, and calls them with a request alone."""

    async def query(request: Request) -> Response:
        """Answer a private query of an open gallery by all items of the set that it names."""
        gallery, data = await desk.question(request)
        return await desk.query(visit_of(request), gallery, data)

    app.router.add_api_route(
        f"{ASKED}query",
        query,
        methods=["POST"],
        openapi_extra=words.ASKED,
        tags=_GALLERIES,
        response_class=Response,
        responses={
            **words.frame_reply("The frame of an answer: all candidates."),
            **words.replies(*_USUAL, *_ASKED, framed=True),
        },
    )


def _add_looked_up(app: FastAPI, desk: Desk) -> None:
    """Add what clients look up in galleries."""

    @app.get(
        "/v1/galleries",
        tags=_GALLERIES,
        openapi_extra=words.TOKEN,
        responses=words.replies(400, 401, 403, 405, 429, 500, 503),
    )
    async def galleries(request: Request) -> Galleries:
        """List the galleries that the token may use."""
        return Galleries(galleries=tuple(await desk.infos(visit_of(request))))

    @app.get(
        "/v1/galleries/{gallery}/map",
        tags=_GALLERIES,
        openapi_extra=words.TOKEN,
        response_class=Response,
        responses={
            **words.frame_reply("The frame of a public part.", etag="Of this map."),
            **words.replies(304, 403, 422, *_USUAL),
        },
    )
    async def public_map(
        request: Request,
        gallery: Name,
        candidates: Annotated[
            float | None,
            Query(gt=0, le=1, allow_inf_nan=False, description="The fraction of the gallery that an answer holds."),
        ] = None,
        if_none_match: Annotated[str | None, Header(description="The ETag of the map that the client has.")] = None,
    ) -> Response:
        """Give what a client must know in order to ask: the newest map, or the newest for a fraction."""
        visit = visit_of(request)
        frame, etag = await desk.map(visit, desk.gallery(visit, gallery), candidates)
        if if_none_match is not None and _matches(if_none_match, etag):
            return Response(status_code=304, headers={"etag": etag})
        return desk.reply(visit, frame, FRAME, headers={"etag": etag})

    @app.get(
        "/v1/galleries/{gallery}/model",
        tags=_GALLERIES,
        openapi_extra=words.TOKEN,
        response_class=Response,
        responses={
            **words.bytes_reply("The model, as PublicDiscriminant.to_bytes writes it.", etag="Of this model."),
            **words.replies(304, 403, 422, *_USUAL),
        },
    )
    async def model(
        request: Request,
        gallery: Name,
        if_none_match: Annotated[str | None, Header(description="The ETag of the model that the client has.")] = None,
    ) -> Response:
        """Give the model that a protected gallery has published of its records: the same bytes to everybody."""
        visit = visit_of(request)
        chosen = desk.gallery(visit, gallery)
        content = await desk.run(visit, chosen, chosen.model)
        etag = desk.etag(chosen, content)
        if if_none_match is not None and _matches(if_none_match, etag):
            return Response(status_code=304, headers={"etag": etag})
        return desk.reply(visit, content, "application/octet-stream", headers={"etag": etag})

    @app.get(
        "/v1/galleries/{gallery}/items/{number}/original",
        tags=_GALLERIES,
        openapi_extra=words.TOKEN,
        response_class=Response,
        responses={**words.bytes_reply("The file, as it was added."), **words.replies(403, 422, *_USUAL)},
    )
    async def original(request: Request, gallery: Name, number: Annotated[int, Path(ge=0, lt=1 << 32)]) -> Response:
        """Give one original. NOT PRIVATE: the server learns which one. Needs the scopes "query" and "originals"."""
        visit = visit_of(request)
        chosen = desk.gallery(visit, gallery)
        visit.may("originals")
        content = await desk.run(visit, chosen, lambda: chosen.original(number), files=True)
        return desk.reply(visit, content, "application/octet-stream")


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    desk: Desk = app.state.desk
    tasks = [asyncio.create_task(_look(desk)), asyncio.create_task(_tell_alive(desk))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        desk.close()


async def _look(desk: Desk) -> None:
    """Read what was published, before somebody asks for it."""
    while True:
        await desk.refresh()
        await asyncio.sleep(_POLL)


async def _tell_alive(desk: Desk) -> None:
    """Give signs of life while `/health` would say so."""
    while True:
        if desk.alive():
            desk.tell_alive()
        await asyncio.sleep(BEAT)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        found = problem(MethodError("this method has no place here"))
        found.headers["allow"] = (error.headers or {}).get("Allow", "")
        return found
    return problem(UnknownError("there is nothing at this address"))


async def _field_error(_: Request, error: Exception) -> Response:
    """Name the fields that are wrong, and not what stood in them."""
    assert isinstance(error, RequestValidationError)
    told = [f"{one['loc'][-1]}: {one['msg']}" for one in error.errors()]
    return problem(FieldError("; ".join(told)))


def _matches(header: str, etag: str) -> bool:
    """Return whether a header If-None-Match names an ETag."""
    return any(one.strip().removeprefix("W/") in (etag, "*") for one in header.split(","))
