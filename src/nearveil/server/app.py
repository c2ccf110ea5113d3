"""The HTTP interface: its paths, and what its documentation says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import Annotated, Any

from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

import nearveil
from nearveil.server.errors import FieldError, ServiceError, UnknownError
from nearveil.server.galleries import Gallery
from nearveil.server.requests import QUESTIONS, SEALED, AppState, GuardMiddleware, get_context, make_problem
from nearveil.server.settings import Settings
from nearveil.server.tokens import TokenStore
from nearveil.wire.schema import BLOCKS, FRAME, GALLERY_NAME, KEY, KEY_HEADER, Galleries, Health, Problem

_FRAME_SCHEMA = {"type": "string", "format": "binary"}
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}}
_WORDS = {
    304: "The map, or the model, is still the one whose ETag was given.",
    400: "The frame, or the Host header, cannot be read.",
    401: "The token is missing, invalid or revoked.",
    403: "The gallery does not offer that, or the token may not ask for it.",
    404: "There is no such thing, or this token may not know of it.",
    405: "The method has no place here.",
    408: "The body did not come in time.",
    409: "The map has changed (a frame), or the key was used before for another request.",
    411: "The request does not say how long its body is.",
    413: "The body, or the answer, is too large, or a sealed question is not of a length that the layout fixes.",
    415: "The body is of another media type.",
    422: "A field is missing or wrong.",
    429: "Asked too often.",
    500: "Something went wrong that nobody thought of.",
    503: "Too much is asked at once, or a database does not answer.",
}
_AS_FRAMES = frozenset((400, 403, 409, 413, 503))  # of a request that holds a frame, also as a frame

_TOKEN_EXTRA: dict[str, Any] = {"security": [{"token": []}]}
_OPEN_EXTRA: dict[str, Any] = {"security": []}
_QUERY_EXTRA: dict[str, Any] = {
    "parameters": [
        {
            "name": "gallery",
            "in": "path",
            "required": True,
            "description": "Its name.",
            "schema": {"type": "string", "pattern": GALLERY_NAME},
        },
        {
            "name": KEY_HEADER,
            "in": "header",
            "required": True,
            "description": "Random, made by the client: names this request. The same bytes may be sent again under it.",
            "schema": {"type": "string", "pattern": KEY},
        },
    ],
    "requestBody": {
        "required": True,
        "description": "The frame of a query, as docs/theory/protocol.md describes it.",
        "content": {FRAME: {"schema": _FRAME_SCHEMA}},
    },
    **_TOKEN_EXTRA,
}


def describe_replies(*statuses: int, framed: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return descriptions of replies other than success; if `framed`, some may also come as frames."""
    told: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        told[status] = {"description": _WORDS[status]}
        if status == 304:
            continue
        told[status]["model"] = Problem
        if framed and status in _AS_FRAMES:
            told[status]["content"] = {FRAME: {"schema": _FRAME_SCHEMA}}
        if status in (429, 503):
            told[status]["headers"] = _RETRY
    return told


def describe_frame(words: str, *, etag: str = "") -> dict[int | str, dict[str, Any]]:
    """Return the description of a successful reply that is a frame."""
    return describe_bytes(words, FRAME, etag=etag)


def describe_bytes(
    words: str, kind: str = "application/octet-stream", *, etag: str = ""
) -> dict[int | str, dict[str, Any]]:
    """Return the description of bytes of any kind."""
    told: dict[str, Any] = {"description": words, "content": {kind: {"schema": _FRAME_SCHEMA}}}
    if etag:
        told["headers"] = {"ETag": {"description": etag, "schema": {"type": "string"}}}
    return {200: told}


def finish_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's description with our tokens, and without its own errors, which are never sent."""
    parts = schema.setdefault("components", {})
    parts["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "nv_..., made by `nearveil token create`."}
    }
    for name in ("HTTPValidationError", "ValidationError"):
        parts.get("schemas", {}).pop(name, None)
    return schema


_POLL = 5.0  # seconds between two looks for new maps; a request looks by itself, too
BEAT = 5.0  # seconds between two signs of life
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_USUAL = (400, 401, 404, 405, 429, 500, 503)
_ASKED = (403, 408, 409, 411, 413, 415, 422)
_GALLERIES: list[str | Enum] = ["galleries"]
_SERVER: list[str | Enum] = ["server"]
_BYTES: dict[str, Any] = {"tags": _GALLERIES, "openapi_extra": _TOKEN_EXTRA, "response_class": Response}
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
    state = AppState.of(galleries, tokens, settings)
    app = FastAPI(
        title="nearveil",
        version=nearveil.__version__,
        description=_DESCRIPTION,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.nearveil = state
    _add_asked(app, state)
    _add_looked_up(app, state)
    _add_own(app, state)
    app.add_middleware(
        GuardMiddleware,  # type: ignore[arg-type, unused-ignore]
        state=state,
        questions=[route for route in app.routes if isinstance(route, APIRoute) and "POST" in (route.methods or ())],
    )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _field_error)
    describe = app.openapi
    app.openapi = lambda: app.openapi_schema or finish_schema(describe())  # type: ignore[method-assign]
    return app


def _add_own(app: FastAPI, state: AppState) -> None:
    """Add what is asked about the server itself."""

    @app.get(
        "/health",
        tags=_SERVER,
        openapi_extra=_OPEN_EXTRA,
        responses={**describe_replies(400, 405, 429), 503: {"description": "It cannot.", "model": Health}},
    )
    async def health(response: Response) -> Health:
        """Say whether the process can still work. If it cannot, restart it."""
        return _health(response, state.is_alive())

    @app.get(
        "/ready",
        tags=_SERVER,
        openapi_extra=_OPEN_EXTRA,
        responses={**describe_replies(400, 405, 429), 503: {"description": "It is not.", "model": Health}},
    )
    async def ready(response: Response) -> Health:
        """Say whether tokens and galleries can be read, and every gallery has a map, or a model."""
        return _health(response, await state.is_ready())

    @app.get(
        "/metrics",
        tags=_SERVER,
        openapi_extra=_TOKEN_EXTRA,
        response_class=Response,
        responses={
            200: {"description": "For Prometheus.", "content": {"text/plain": {"schema": {"type": "string"}}}},
            **describe_replies(400, 401, 403, 405, 429, 500, 503),
        },
    )
    async def metrics(request: Request) -> Response:
        """Give figures to Prometheus: of the server, and of the galleries of the token. Needs the scope "metrics"."""
        context = get_context(request)
        token = context.require("metrics")
        held = [gallery for name, gallery in state.galleries.items() if token.may_use(name)]
        figures = await asyncio.gather(*(state.read_figures(gallery) for gallery in held))
        return state.respond(context, state.metrics.exposition(figures, state.lines.dropped), _PROMETHEUS)


def _health(response: Response, good: bool) -> Health:
    response.status_code = 200 if good else 503
    return Health(status="ok" if good else "unavailable")


def _add_asked(app: FastAPI, state: AppState) -> None:
    """Add what clients ask in private. `GuardMiddleware` finds these by itself, and calls them with a request alone."""

    async def query(request: Request) -> Response:
        """Answer a private query of an open gallery by all items of the set that it names."""
        gallery, data = await state.read_question(request)
        return await state.answer(get_context(request), gallery, data)

    app.router.add_api_route(
        f"{QUESTIONS}query",
        query,
        methods=["POST"],
        openapi_extra=_QUERY_EXTRA,
        tags=_GALLERIES,
        response_class=Response,
        responses={
            **describe_frame("The frame of an answer: all candidates."),
            **describe_replies(*_USUAL, *_ASKED, framed=True),
        },
    )

    async def ask_sealed(request: Request) -> Response:
        """Answer a sealed question, which tells nothing: one pass over all codes, or over all records."""
        gallery, data = await state.read_question(request, SEALED)
        context = get_context(request)
        state.charge(context, gallery.sealed_pass_bytes + len(data))
        answer = await state.run(context, gallery, lambda: gallery.ask_sealed(data), "sealed")
        return state.respond(context, answer, FRAME)

    app.router.add_api_route(
        f"{QUESTIONS}{SEALED}",
        ask_sealed,
        methods=["POST"],
        openapi_extra=_QUERY_EXTRA,
        tags=_GALLERIES,
        response_class=Response,
        responses={
            **describe_frame("The frame of an answer: encrypted scores, or records."),
            **describe_replies(*_USUAL, *_ASKED),
        },
    )


def _add_looked_up(app: FastAPI, state: AppState) -> None:
    """Add what clients look up in galleries."""

    @app.get(
        "/v1/galleries",
        tags=_GALLERIES,
        openapi_extra=_TOKEN_EXTRA,
        response_model_exclude_none=True,  # clients of 0.2 refuse what they do not know
        responses=describe_replies(400, 401, 403, 405, 429, 500, 503),
    )
    async def galleries(request: Request) -> Galleries:
        """List the galleries that the token may use."""
        return Galleries(galleries=tuple(await state.read_infos(get_context(request))))

    @app.get(
        "/v1/galleries/{gallery}/map",
        **_BYTES,
        responses={
            **describe_frame("The frame of a public part.", etag="Of this map."),
            **describe_replies(304, 403, 422, *_USUAL),
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
        context = get_context(request)
        frame, etag = await state.read_map(context, state.get_gallery(context, gallery), candidates)
        return state.respond_once(context, frame, FRAME, etag, if_none_match)

    @app.get(
        "/v1/galleries/{gallery}/model",
        **_BYTES,
        responses={
            **describe_bytes("The model, as PublicDiscriminant.to_bytes writes it.", etag="Of this model."),
            **describe_replies(304, 403, 422, *_USUAL),
        },
    )
    async def model(
        request: Request,
        gallery: Name,
        if_none_match: Annotated[str | None, Header(description="The ETag of the model that the client has.")] = None,
    ) -> Response:
        """Give the model that a protected gallery has published of its records: the same bytes to everybody."""
        context = get_context(request)
        chosen = state.get_gallery(context, gallery)
        content = await state.run(context, chosen, chosen.model)
        etag = state.get_etag(chosen, content)
        return state.respond_once(context, content, "application/octet-stream", etag, if_none_match)

    _add_codes(app, state)
    _add_sealed(app, state)

    @app.get(
        "/v1/galleries/{gallery}/items/{number}/original",
        **_BYTES,
        responses={**describe_bytes("The file, as it was added."), **describe_replies(403, 422, *_USUAL)},
    )
    async def original(request: Request, gallery: Name, number: Annotated[int, Path(ge=0, lt=1 << 32)]) -> Response:
        """Give one original. NOT PRIVATE: the server learns which one. Needs the scopes "query" and "originals"."""
        context = get_context(request)
        chosen = state.get_gallery(context, gallery)
        context.require("originals")
        content = await state.run(context, chosen, lambda: chosen.original(number), "files")
        return state.respond(context, content, "application/octet-stream")


def _add_codes(app: FastAPI, state: AppState) -> None:
    """Add what those fetch who search at home: the same for everybody."""

    @app.get(
        "/v1/galleries/{gallery}/codes",
        **_BYTES,
        responses={
            **describe_frame("The frame of a manifest: the digests of all groups of codes."),
            **describe_replies(403, 422, *_USUAL),
        },
    )
    async def codes(request: Request, gallery: Name) -> Response:
        """List all codes of an open gallery that hands them out, for search at home."""
        context = get_context(request)
        chosen = state.get_gallery(context, gallery)
        return state.respond(context, await state.run(context, chosen, chosen.codes, "files"), FRAME)

    @app.get(
        "/v1/galleries/{gallery}/codes/{number}",
        **_BYTES,
        responses={
            **describe_frame("The frame of a group: ids, codes and names."),
            **describe_replies(403, 422, *_USUAL),
        },
    )
    async def codes_group(
        request: Request,
        gallery: Name,
        number: Annotated[int, Path(ge=0, lt=1 << 32)],
        blocks: Annotated[
            str | None,
            Query(pattern=BLOCKS, max_length=300, description="Which blocks, such as 0,3; or none. All by default."),
        ] = None,
    ) -> Response:
        """Give a group of codes, or some blocks of it."""
        context = get_context(request)
        chosen = state.get_gallery(context, gallery)
        wanted = None if blocks is None else tuple(map(int, filter(str.isdigit, blocks.split(","))))
        found = await state.run(context, chosen, lambda: chosen.codes_group(number, wanted), "files")
        return state.respond(context, found, FRAME)


def _add_sealed(app: FastAPI, state: AppState) -> None:
    """Add what those fetch who ask sealed questions: the same for everybody."""

    @app.get(
        "/v1/galleries/{gallery}/sealed",
        responses={
            **describe_frame("The frame of a layout: cells and sizes.", etag="Of this layout."),
            **describe_replies(304, 403, 422, *_USUAL),
        },
        **_BYTES,
    )
    async def sealed(
        request: Request,
        gallery: Name,
        if_none_match: Annotated[str | None, Header(description="The ETag of the layout that the client has.")] = None,
    ) -> Response:
        """Give the layout of an open gallery that answers sealed questions."""
        context = get_context(request)
        chosen = state.get_gallery(context, gallery)
        content = await state.run(context, chosen, chosen.sealed, "sealed")
        etag = state.get_etag(chosen, content)
        return state.respond_once(context, content, FRAME, etag, if_none_match)

    @app.get(
        "/v1/galleries/{gallery}/sealed/{part}",
        responses={
            **describe_frame("The frame of a hint: of scores (0), or of records (1)."),
            **describe_replies(403, 422, *_USUAL),
        },
        **_BYTES,
    )
    async def sealed_hint(
        request: Request,
        gallery: Name,
        part: Annotated[int, Path(ge=0, lt=2)],
        since: Annotated[
            int, Query(ge=0, lt=1 << 49, description="The version of the layout that the client has.")
        ] = 0,
    ) -> Response:
        """Give a part of the hints that answers to sealed questions are read with: all, or what changed."""
        context = get_context(request)
        chosen = state.get_gallery(context, gallery)
        content = await state.run(context, chosen, lambda: chosen.sealed(part, since), "sealed")
        return state.respond(context, content, FRAME)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: AppState = app.state.nearveil
    tasks = [asyncio.create_task(_look(state)), asyncio.create_task(_tell_alive(state))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        state.close()


async def _look(state: AppState) -> None:
    """Read what was published, before somebody asks for it."""
    while True:
        await state.refresh()
        await asyncio.sleep(_POLL)


async def _tell_alive(state: AppState) -> None:
    """Give signs of life while `/health` would say so."""
    while True:
        if state.is_alive():
            state.tell_alive()
        await asyncio.sleep(BEAT)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        found = make_problem(MethodError("this method has no place here"))
        found.headers["allow"] = (error.headers or {}).get("Allow", "")
        return found
    return make_problem(UnknownError("there is nothing at this address"))


async def _field_error(_: Request, error: Exception) -> Response:
    """Name the fields that are wrong, and not what stood in them."""
    assert isinstance(error, RequestValidationError)
    told = [f"{one['loc'][-1]}: {one['msg']}" for one in error.errors()]
    return make_problem(FieldError("; ".join(told)))
