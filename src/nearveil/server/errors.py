"""Why the service does not do what was asked: a status, a word for programs and a sentence for people."""

from typing import ClassVar

from nearveil.errors import NearveilError


class ServiceError(NearveilError, ValueError):
    """What was asked cannot be done. The text goes to the client, so nothing private stands in it.

    Parameters
    ----------
    message : str

    Attributes
    ----------
    status : int
        Of the HTTP answer.
    code : str
        For programs.
    retry_after : int or None
        Seconds after which it is worth while to ask again; None where it is not, or not known.

    Examples
    --------
    >>> error = UnknownError("there is no such gallery")
    >>> error.status, error.code, str(error)
    (404, 'unknown', 'there is no such gallery')
    """

    status: ClassVar[int] = 400
    code: ClassVar[str] = "refused"
    retry_after: int | None = None


class FrameError(ServiceError):
    """A frame cannot be read."""

    code = "frame"


class UnauthorizedError(ServiceError):
    """The token is missing, invalid or revoked."""

    status, code = 401, "unauthorized"


class NotOfferedError(ServiceError):
    """The gallery does not do that, or the token may not ask for it."""

    status, code = 403, "not_offered"


class UnknownError(ServiceError):
    """There is no such thing, or this client may not know of it."""

    status, code = 404, "unknown"


class ConflictError(ServiceError):
    """It does not fit what is there now."""

    status, code = 409, "conflict"


class ReplayedError(ConflictError):
    """A key was used before, for something else or by somebody else."""

    code = "replayed"


class LengthError(ServiceError):
    """A body came without its length."""

    status, code = 411, "length_required"


class TooLargeError(ServiceError):
    """A body is larger than what is read."""

    status, code = 413, "too_large"


class MediaError(ServiceError):
    """A body is not of the kind that is read here."""

    status, code = 415, "media_type"


class FieldError(ServiceError):
    """A field of the request is missing or wrong."""

    status, code = 422, "invalid"


class SlowError(ServiceError):
    """A body did not come in time."""

    status, code = 408, "timeout"


class RateError(ServiceError):
    """A token asks too often."""

    status, code = 429, "rate_limited"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BusyError(ServiceError):
    """Too much is under way, or what is needed does not answer; later it may."""

    status, code = 503, "busy"
    retry_after = 1


class UnavailableError(BusyError):
    """An index or a database does not answer."""

    code = "unavailable"
    retry_after = 2


class BuildingError(BusyError):
    """The sealed index of the newest map is not built yet."""

    retry_after = 5
