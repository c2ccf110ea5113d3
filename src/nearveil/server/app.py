"""The HTTP interface: one route for each path."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import nearveil
from nearveil.server.errors import ServiceError
from nearveil.server.galleries import Gallery
from nearveil.server.middleware import CONTEXT, GUARDED, GuardMiddleware, RequestContext, make_problem
from nearveil.server.requests import MESSAGE, SEALED, TOKENS, AppState
from nearveil.server.settings import Settings
from nearveil.server.tokens import TokenStore
from nearveil.wire.schema import BLOCKS, FRAME, GALLERY_NAME, KEY, KEY_HEADER, Galleries, Health, Problem

_POLL_INTERVAL = 2.0  # seconds between two polls of tokens and galleries; requests see new maps at once
HEARTBEAT_INTERVAL = 5.0  # seconds
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_OCTETS = "application/octet-stream"
_GALLERY = "/v1/galleries/{gallery}"
_DESCRIPTION = """Private retrieval. An open gallery takes a message, which names one of many sets and hides the query,
and returns candidates, all of one size. A protected gallery publishes a model, which clients use locally. All of /v1
needs a token."""

_BEARER = "nv_..., made by `nearveil token create`, or a JWT of the identity provider (setting oidc)."
Name = Annotated[str, Path(pattern=GALLERY_NAME, description="Name of the gallery.")]
Number = Annotated[int, Path(ge=0, lt=1 << 32)]
Candidates = Annotated[
    float | None,
    Query(gt=0, le=1, allow_inf_nan=False, description="The fraction of the gallery that an answer holds."),
]
_WHICH = "Numbers of blocks, such as 0,3; or none. Default: all."
Blocks = Annotated[str | None, Query(pattern=BLOCKS, max_length=300, description=_WHICH)]
Key = Annotated[
    str,
    Header(
        alias=KEY_HEADER,
        pattern=KEY,
        description="Idempotency key, random, made by the client. The same bytes may be sent again under it.",
    ),
]
_BINARY = {"type": "string", "format": "binary"}
_ERRORS = {
    400: "Malformed frame, or untrusted Host header.",
    401: "Missing, invalid or revoked token.",
    403: "Not offered by the gallery, or not allowed for this token.",
    404: "Not found, or not visible for this token.",
    405: "Method not allowed.",
    422: "Missing or invalid field.",
    429: "Too many requests.",
    500: "Unexpected server error.",
    503: "The server is busy, or a database does not answer.",
}
_QUESTION_ERRORS = {
    408: "The body did not arrive in time.",
    409: "The map has changed (a frame), or the key was already used for another request.",
    411: "Missing Content-Length.",
    413: "The body or the answer is too large, or a sealed query has a length that the layout does not allow.",
    415: "Unsupported media type.",
}
_FRAMED = frozenset((400, 403, 409, 413, 503))  # statuses that a message may also get as a frame
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}}
_ETAG = {"ETag": {"description": "Of this content, for If-None-Match.", "schema": {"type": "string"}}}


def create_app(galleries: Sequence[Gallery], tokens: TokenStore, settings: Settings) -> FastAPI:
    """Return the ASGI application of a server. The caller closes the galleries and the tokens.

    Of the settings it uses limits and trusted hosts. Addresses and TLS are up to the ASGI server.
    """
    state = AppState(galleries, tokens, settings)
    app = FastAPI(
        title="nearveil",
        version=nearveil.__version__,
        description=_DESCRIPTION,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_describe_errors(),
    )
    app.state.nearveil = state
    galleries_router, server_router = APIRouter(tags=["galleries"]), APIRouter(tags=["server"])
    _add_question_routes(galleries_router, state)
    _add_gallery_routes(galleries_router, state)
    _add_server_routes(server_router, state)
    app.include_router(galleries_router)
    app.include_router(server_router)
    app.add_middleware(GuardMiddleware, state=state)  # type: ignore[arg-type, unused-ignore]
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(RequestValidationError, _handle_field_error)
    describe = app.openapi
    app.openapi = lambda: app.openapi_schema or _finish_schema(describe())  # type: ignore[method-assign]
    return app


def _add_question_routes(router: APIRouter, state: AppState) -> None:
    """Add the routes of private questions."""

    @router.post(f"{_GALLERY}/query", **_describe_question("The frame of an answer: all candidates.", framed=True))
    async def query(request: Request, gallery: Name, key: Key) -> Response:
        """Return all items of the set that a private query of an open gallery names."""
        return await state.answer_question(request, gallery, key, MESSAGE)

    @router.post(f"{_GALLERY}/sealed", **_describe_question("The frame of an answer: encrypted scores, or records."))
    async def ask_sealed(request: Request, gallery: Name, key: Key) -> Response:
        """Answer a sealed question, which reveals nothing, by one pass over all codes or all records."""
        return await state.answer_question(request, gallery, key, SEALED)

    @router.post(f"{_GALLERY}/sealed/tokens", **_describe_question("The frame of a token: encrypted masks."))
    async def make_token(request: Request, gallery: Name, key: Key) -> Response:
        """Return a token, with which a client prepares a sealed question. The request depends on no query."""
        return await state.answer_question(request, gallery, key, TOKENS)


def _add_gallery_routes(router: APIRouter, state: AppState) -> None:
    """Add the routes of public contents of galleries."""

    # Clients of 0.2 refuse unknown fields.
    @router.get("/v1/galleries", response_model_exclude_none=True)
    async def galleries(request: Request) -> Galleries:
        """List the galleries that the token may use."""
        return Galleries(galleries=tuple(await state.load_infos(request.scope[CONTEXT])))

    @router.get(f"{_GALLERY}/map", **_describe_bytes("The frame of a public part.", cacheable=True))
    async def public_map(request: Request, gallery: Name, candidates: Candidates = None) -> Response:
        """Return the newest map, or the newest for a fraction. Clients need it to make messages."""
        return await state.send(request, gallery, lambda source: source.map(candidates), pool="answers", cacheable=True)

    @router.get(
        f"{_GALLERY}/model",
        **_describe_bytes("The model, as PublicDiscriminant.to_bytes writes it.", media_type=_OCTETS, cacheable=True),
    )
    async def model(request: Request, gallery: Name) -> Response:
        """Return the model that a protected gallery has published: the same bytes for all clients."""
        options: Any = {"media_type": _OCTETS, "pool": "answers", "cacheable": True}
        return await state.send(request, gallery, lambda source: source.model(), **options)

    @router.get(f"{_GALLERY}/items/{{number}}/original", **_describe_bytes("The file as added.", media_type=_OCTETS))
    async def original(request: Request, gallery: Name, number: Number) -> Response:
        """Return one original. NOT PRIVATE: the server learns which one. Needs the scopes "query" and "originals"."""
        context: RequestContext = request.scope[CONTEXT]
        context.get_gallery(gallery)  # 404 before 403: other tokens' galleries do not exist
        context.require("originals")
        return await state.send(request, gallery, lambda source: source.original(number), media_type=_OCTETS)

    # Local copies, and what sealed questions need: the same for all clients.

    @router.get(f"{_GALLERY}/codes", **_describe_bytes("The frame of a manifest: the digests of all groups of codes."))
    async def codes(request: Request, gallery: Name) -> Response:
        """List all codes of an open gallery that offers them, for a local copy."""
        return await state.send(request, gallery, lambda source: source.codes())

    @router.get(f"{_GALLERY}/codes/{{number}}", **_describe_bytes("The frame of a group: ids, codes and names."))
    async def codes_group(request: Request, gallery: Name, number: Number, blocks: Blocks = None) -> Response:
        """Return a group of codes, or some blocks of it."""
        numbers = None if blocks is None else tuple(map(int, filter(str.isdigit, blocks.split(","))))
        return await state.send(request, gallery, lambda source: source.codes_group(number, numbers))

    @router.get(f"{_GALLERY}/sealed", **_describe_bytes("The frame of a layout: cells and sizes.", cacheable=True))
    async def sealed(request: Request, gallery: Name) -> Response:
        """Return the layout of an open gallery that answers sealed questions."""
        return await state.send(request, gallery, lambda source: source.sealed(), pool="sealed", cacheable=True)

    @router.get(f"{_GALLERY}/sealed/tokens", **_describe_bytes("The frame of tokens' public parts.", cacheable=True))
    async def sealed_tokens(request: Request, gallery: Name) -> Response:
        """Return the public parts of tokens, which clients need to read them: once for each layout."""
        return await state.send(request, gallery, lambda source: source.sealed_tokens(), pool="sealed", cacheable=True)


def _add_server_routes(router: APIRouter, state: AppState) -> None:
    """Add the routes of health checks and metrics."""
    unhealthy: dict[int | str, dict[str, Any]] = {503: {**_describe_errors()[503], "model": Health}}

    @router.get("/health", responses=unhealthy)
    async def health(response: Response) -> Health:
        """Report whether the process can work. If it cannot, restart it."""
        return _report_health(response, state.is_alive())

    @router.get("/ready", responses=unhealthy)
    async def ready(response: Response) -> Health:
        """Report whether tokens and galleries can be read, and every gallery has a map or a model."""
        return _report_health(response, state.is_ready())

    @router.get("/metrics", **_describe_bytes("For Prometheus.", media_type="text/plain"))
    async def metrics(request: Request) -> Response:
        """Return metrics of the server and of the token's galleries for Prometheus. Needs the scope "metrics"."""
        context: RequestContext = request.scope[CONTEXT]
        token = context.require("metrics")
        visible = {name: gallery for name, gallery in state.galleries.items() if token.may_use(name)}
        values = await asyncio.gather(*map(state.load_metrics, visible.values()))
        metrics = state.metrics.exposition(dict(zip(visible, values, strict=True)), state.log.dropped)
        return state.respond(context, metrics, _PROMETHEUS)


def _report_health(response: Response, is_healthy: bool) -> Health:
    response.status_code = 200 if is_healthy else 503
    return Health(status="ok" if is_healthy else "unavailable")


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: AppState = app.state.nearveil
    tasks = [asyncio.create_task(_poll(state)), asyncio.create_task(_send_heartbeats(state))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        state.close()


async def _poll(state: AppState) -> None:
    """Load new maps before a client asks for them."""
    while True:
        await state.refresh()
        await asyncio.sleep(_POLL_INTERVAL)


async def _send_heartbeats(state: AppState) -> None:
    while True:
        if state.is_alive():
            state.send_heartbeat()
        await asyncio.sleep(HEARTBEAT_INTERVAL)


async def _handle_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = make_problem(ServiceError("method", "Method not allowed."))
        response.headers["allow"] = (error.headers or {}).get("Allow", "")
        return response
    raise ServiceError("unknown", "Not found.") from None


async def _handle_field_error(_: Request, error: Exception) -> Response:
    """Name the invalid fields without their values."""
    assert isinstance(error, RequestValidationError)
    raise ServiceError("invalid", "; ".join(f"{item['loc'][-1]}: {item['msg']}" for item in error.errors())) from None


def _describe_errors(errors: Mapping[int, str] = _ERRORS, *, framed: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return descriptions of error responses; if `framed`, some may also be frames."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status, description in errors.items():
        response = responses[status] = {"description": description, "model": Problem}
        if framed and status in _FRAMED:
            response["content"] = {FRAME: {"schema": _BINARY}}
        if status in (429, 503):
            response["headers"] = _RETRY
    return responses


def _describe_bytes(description: str, *, media_type: str = FRAME, cacheable: bool = False) -> dict[str, Any]:
    """Return the options of a route that returns bytes, as a gallery makes them."""
    response: dict[str, Any] = {"description": description, "content": {media_type: {"schema": _BINARY}}}
    responses: dict[int | str, dict[str, Any]] = {200: response}
    if cacheable:
        response["headers"] = _ETAG
        responses[304] = {"description": "The content still has the ETag of the header If-None-Match."}
    return {"response_class": Response, "responses": responses}


def _describe_question(description: str, *, framed: bool = False) -> dict[str, Any]:
    """Return the options of a route that answers private questions."""
    options = _describe_bytes(description)
    options["responses"] |= _describe_errors(_ERRORS | _QUESTION_ERRORS, framed=framed)
    content = {FRAME: {"schema": _BINARY}}
    body = {"description": "The frame of a query; see docs/theory/protocol.md.", "content": content}
    options["openapi_extra"] = {"requestBody": {"required": True, **body}}
    return options


def _finish_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's description with the tokens that our middleware requires."""
    schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer", "description": _BEARER}}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["security"] = [{"token": []}] if path.startswith(GUARDED) else []
    return schema
