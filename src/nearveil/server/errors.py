"""Errors of the service: a code for programs, its HTTP status, and a message for people."""

from nearveil.errors import NearveilError

STATUSES = {
    "frame": 400,  # malformed frame
    "host": 400,  # the Host header names another machine
    "unauthorized": 401,  # missing, invalid or revoked token
    "not_offered": 403,  # not offered by the gallery, or not allowed for the token
    "unknown": 404,  # not found, or not visible for the token
    "method": 405,
    "timeout": 408,  # the body did not arrive in time
    "conflict": 409,  # the request does not fit the current state
    "replayed": 409,  # the key was already used for another request, or by another token
    "length_required": 411,
    "too_large": 413,
    "media_type": 415,
    "invalid": 422,  # missing or invalid field
    "rate_limited": 429,
    "failed": 500,  # unexpected error
    "busy": 503,  # too many requests in flight, or something takes too long
    "unavailable": 503,  # an index or a database does not answer
}
_RETRY_AFTER = {"busy": 1, "unavailable": 2}  # seconds


class ServiceError(NearveilError, ValueError):
    """A request cannot be answered. Clients see the message, so it must not contain private values."""

    def __init__(self, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code, self.status = code, STATUSES[code]
        self.retry_after = _RETRY_AFTER.get(code) if retry_after is None else retry_after
