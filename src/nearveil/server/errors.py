"""Errors of the service: an HTTP status, a code for programs and a message for people."""

from typing import ClassVar

from nearveil.errors import NearveilError


class ServiceError(NearveilError, ValueError):
    """A request cannot be answered. Clients see the message, so it must not contain private values.

    Parameters
    ----------
    message : str

    Attributes
    ----------
    status : int
        HTTP status.
    code : str
        For programs.
    retry_after : int or None
        Seconds after which to try again, if that may help.

    Examples
    --------
    >>> error = UnknownError("No such gallery.")
    >>> error.status, error.code, str(error)
    (404, 'unknown', 'No such gallery.')
    """

    status: ClassVar[int] = 400
    code: ClassVar[str] = "refused"
    retry_after: int | None = None


class FrameError(ServiceError):
    """Malformed frame."""

    code = "frame"


class UnauthorizedError(ServiceError):
    """Missing, invalid or revoked token."""

    status, code = 401, "unauthorized"


class NotOfferedError(ServiceError):
    """Not offered by the gallery, or not allowed for the token."""

    status, code = 403, "not_offered"


class UnknownError(ServiceError):
    """Not found, or not visible for the token."""

    status, code = 404, "unknown"


class ConflictError(ServiceError):
    """The request does not fit the current state."""

    status, code = 409, "conflict"


class ReplayedError(ConflictError):
    """The key was already used for another request, or by another token."""

    code = "replayed"


class LengthError(ServiceError):
    """Missing Content-Length."""

    status, code = 411, "length_required"


class TooLargeError(ServiceError):
    """The body is too large."""

    status, code = 413, "too_large"


class MediaError(ServiceError):
    """Unsupported media type."""

    status, code = 415, "media_type"


class FieldError(ServiceError):
    """Missing or invalid field."""

    status, code = 422, "invalid"


class SlowError(ServiceError):
    """The body did not arrive in time."""

    status, code = 408, "timeout"


class RateError(ServiceError):
    """Too many requests."""

    status, code = 429, "rate_limited"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BusyError(ServiceError):
    """Too many requests in flight, or a resource does not answer; try again later."""

    status, code = 503, "busy"
    retry_after = 1


class UnavailableError(BusyError):
    """An index or a database does not answer."""

    code = "unavailable"
    retry_after = 2


class BuildingError(BusyError):
    """The sealed index of the newest map is not built yet."""

    retry_after = 5
