"""The parts of the OpenAPI description that FastAPI cannot derive."""

from collections.abc import Mapping
from typing import Any

from fastapi import Response

from nearveil.server.middleware import GUARDED
from nearveil.wire.schema import FRAME, Problem

_BINARY = {"type": "string", "format": "binary"}
ERRORS = {
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
    413: "The body or the answer is too large, or a sealed question has a length that the layout does not allow.",
    415: "Unsupported media type.",
}
_FRAMED = frozenset((400, 403, 409, 413, 503))  # statuses that a message may also get as a frame
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}}
_ETAG = {"ETag": {"description": "Of this content, for If-None-Match.", "schema": {"type": "string"}}}


def describe_errors(errors: Mapping[int, str] = ERRORS, *, framed: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return descriptions of error responses; if `framed`, some may also be frames."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status, description in errors.items():
        response = responses[status] = {"description": description, "model": Problem}
        if framed and status in _FRAMED:
            response["content"] = {FRAME: {"schema": _BINARY}}
        if status in (429, 503):
            response["headers"] = _RETRY
    return responses


def describe_bytes(description: str, *, media_type: str = FRAME, cacheable: bool = False) -> dict[str, Any]:
    """Return the options of a route that returns bytes, as a gallery makes them."""
    response: dict[str, Any] = {"description": description, "content": {media_type: {"schema": _BINARY}}}
    responses: dict[int | str, dict[str, Any]] = {200: response}
    if cacheable:
        response["headers"] = _ETAG
        responses[304] = {"description": "The content still has the ETag of the header If-None-Match."}
    return {"response_class": Response, "responses": responses}


def describe_question(description: str, *, framed: bool = False) -> dict[str, Any]:
    """Return the options of a route that answers private questions."""
    options = describe_bytes(description)
    options["responses"] |= describe_errors(ERRORS | _QUESTION_ERRORS, framed=framed)
    body = {
        "description": "The frame of a query; see docs/theory/protocol.md.",
        "content": {FRAME: {"schema": _BINARY}},
    }
    options["openapi_extra"] = {"requestBody": {"required": True, **body}}
    return options


def finish_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's description with the tokens that our middleware requires."""
    schema["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "nv_..., made by `nearveil token create`."}
    }
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["security"] = [{"token": []}] if path.startswith(GUARDED) else []
    return schema
