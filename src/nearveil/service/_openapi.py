"""What the service's description says beyond what FastAPI finds out by itself."""

from typing import Any

from nearveil.service.schema import FRAME, GALLERY_NAME, KEY, KEY_HEADER, Problem

_FRAME_SCHEMA = {"type": "string", "format": "binary"}
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}}
_WORDS = {
    304: "The map, or the model, is still the one whose ETag was given.",
    400: "The frame, or the Host header, cannot be read.",
    401: "There is no token, or none that is good.",
    403: "The gallery does not offer that, or the token may not ask for it.",
    404: "There is no such thing, or this token may not know of it.",
    405: "The method has no place here.",
    408: "The body did not come in time.",
    409: "The map has changed (a frame), or the key was used before for another request.",
    411: "The request does not say how long its body is.",
    413: "The body, or the answer, is too large.",
    415: "The body is of another media type.",
    422: "A field is missing or wrong.",
    429: "Asked too often.",
    500: "Something went wrong that nobody thought of.",
    503: "Too much is asked at once, or a database does not answer.",
}
_AS_FRAMES = frozenset((400, 403, 409, 413, 503))  # of a request that holds a frame, also as a frame

TOKEN: dict[str, Any] = {"security": [{"token": []}]}
NO_TOKEN: dict[str, Any] = {"security": []}
ASKED: dict[str, Any] = {
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
    **TOKEN,
}


def replies(*statuses: int, framed: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return descriptions of the answers that are not what was hoped for.

    `framed`: Whether some of them may also come as frames.
    """
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


def frame_reply(words: str, *, etag: str = "") -> dict[int | str, dict[str, Any]]:
    """Return the description of a frame that is what was hoped for."""
    return bytes_reply(words, FRAME, etag=etag)


def bytes_reply(
    words: str, kind: str = "application/octet-stream", *, etag: str = ""
) -> dict[int | str, dict[str, Any]]:
    """Return the description of bytes of any kind."""
    told: dict[str, Any] = {"description": words, "content": {kind: {"schema": _FRAME_SCHEMA}}}
    if etag:
        told["headers"] = {"ETag": {"description": etag, "schema": {"type": "string"}}}
    return {200: told}


def finished(schema: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's description with our tokens, and without its own errors, which are never sent."""
    parts = schema.setdefault("components", {})
    parts["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "nv_..., made by `nearveil token create`."}
    }
    for name in ("HTTPValidationError", "ValidationError"):
        parts.get("schemas", {}).pop(name, None)
    return schema
