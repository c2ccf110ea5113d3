"""The parts of the OpenAPI description that FastAPI cannot derive."""

from typing import Any

from fastapi import Response

from nearveil.wire.schema import FRAME, Problem

BINARY = {"type": "string", "format": "binary"}
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}}
_DESCRIPTIONS = {
    304: "The content still has the given ETag.",
    400: "Malformed frame, or untrusted Host header.",
    401: "Missing, invalid or revoked token.",
    403: "Not offered by the gallery, or not allowed for this token.",
    404: "Not found, or not visible for this token.",
    405: "Method not allowed.",
    408: "The body did not arrive in time.",
    409: "The map has changed (a frame), or the key was already used for another request.",
    411: "Missing Content-Length.",
    413: "The body or the answer is too large, or a sealed question has a length that the layout does not allow.",
    415: "Unsupported media type.",
    422: "Missing or invalid field.",
    429: "Too many requests.",
    500: "Unexpected server error.",
    503: "The server is busy, or a database does not answer.",
}
_FRAMED = frozenset((400, 403, 409, 413, 503))  # statuses that a query may also answer by a frame
COMMON = (400, 401, 404, 405, 429, 500, 503)
QUESTION_ERRORS = (403, 408, 409, 411, 413, 415, 422)
TOKEN_SECURITY: dict[str, Any] = {"security": [{"token": []}]}
NO_SECURITY: dict[str, Any] = {"security": []}
BYTES: dict[str, Any] = {"tags": ["galleries"], "openapi_extra": TOKEN_SECURITY, "response_class": Response}
QUESTION: dict[str, Any] = {
    **BYTES,
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "description": "The frame of a query; see docs/theory/protocol.md.",
            "content": {FRAME: {"schema": BINARY}},
        },
        **TOKEN_SECURITY,
    },
}


def describe_errors(*statuses: int, framed: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return descriptions of error responses; if `framed`, some may also be frames."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        response = responses[status] = {"description": _DESCRIPTIONS[status]}
        if status == 304:
            continue
        response["model"] = Problem
        if framed and status in _FRAMED:
            response["content"] = {FRAME: {"schema": BINARY}}
        if status in (429, 503):
            response["headers"] = _RETRY
    return responses


def describe_bytes(
    description: str, *statuses: int, media_type: str = FRAME, etag: bool = False, framed: bool = False
) -> dict[int | str, dict[str, Any]]:
    """Return the descriptions of a successful response of bytes, and of the common errors and `statuses`."""
    response: dict[str, Any] = {"description": description, "content": {media_type: {"schema": BINARY}}}
    if etag:
        response["headers"] = {"ETag": {"description": "Of this content.", "schema": {"type": "string"}}}
    return {200: response, **describe_errors(*statuses, *((304,) if etag else ()), *COMMON, framed=framed)}


def finish_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's description with our tokens, and without its own errors, which are never sent."""
    components = schema.setdefault("components", {})
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "nv_..., made by `nearveil token create`."}
    }
    for name in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(name, None)
    return schema
