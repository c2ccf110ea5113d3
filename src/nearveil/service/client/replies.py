"""Replies of a server: when a request is sent again, and how a reply is read. Nothing in it is trusted."""

import re
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from nearveil.service.client.errors import DeclinedError, ReplyError
from nearveil.service.client.transport import BYTES, JSON, Response
from nearveil.service.schema import FRAME, Model, Problem

M = TypeVar("M", bound=Model)

AGAIN = (429, 502, 503, 504)
_LONGEST = 500  # characters of a server's words
_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]{1,200}"')


@dataclass(frozen=True)
class Patience:
    """How often a request is sent again, and when. Nothing private plays a part."""

    retries: int
    first: float = 0.5  # seconds before the first retry; twice as long before each further one
    longest: float = 20.0  # seconds, also where the server asks for more

    def pause(self, attempt: int, retry_after: float | None) -> float:
        """Return the seconds to wait after an attempt, counted from 0."""
        wanted = self.first * 2**attempt if retry_after is None else retry_after
        return min(max(wanted, 0.0), self.longest)


@dataclass
class Tally:
    """Bytes of bodies, and when the last reply came."""

    sent: int = 0
    received: int = 0
    heard: float = 0.0


def read_frame(response: Response) -> bytes:
    """Return the frame that a reply holds, of whatever status: it says by itself what it is."""
    if response.kind != FRAME or 300 <= response.status < 400:
        raise make_refusal(response)
    return response.body


def read_json(response: Response, form: type[M]) -> M:
    """Return the JSON of a reply, checked."""
    if response.status != 200 or response.kind != JSON:
        raise make_refusal(response)
    try:
        found = form.model_validate_json(response.body)
    except ValidationError:
        raise ReplyError("the server's reply is not what a nearveil server sends") from None
    _check_text(found.model_dump())
    return found


def read_bytes(response: Response) -> bytes:
    """Return the bytes of a reply."""
    if response.status != 200 or response.kind != BYTES:
        raise make_refusal(response)
    return response.body


def read_etag(response: Response) -> str:
    """Return the tag of a reply if it can stand in a header, else nothing."""
    return response.etag if _ETAG.fullmatch(response.etag) else ""


def make_refusal(response: Response) -> ReplyError:
    """Return why a reply is of no use, in words that print."""
    if response.status >= 400 and response.kind == JSON:
        try:
            said = Problem.model_validate_json(response.body)
        except ValidationError:
            return ReplyError(
                f"the server declined ({response.status}), and does not say why as a nearveil server does"
            )
        return DeclinedError(response.status, make_printable(said.code), make_printable(said.message).rstrip("."))
    if 300 <= response.status < 400:
        return ReplyError(f"the server sends the client elsewhere ({response.status}), where it does not go")
    return ReplyError(f"the reply ({response.status}) is not what a nearveil server sends: is this the right address?")


def make_printable(text: str) -> str:
    """Return text of the other side without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_LONGEST])


def _check_text(found: Any) -> None:
    """Refuse text that does not print, however deep it lies."""
    if isinstance(found, str):
        if not found.isprintable():
            raise ReplyError("the server's reply holds text that does not print")
    elif isinstance(found, dict):
        for key, value in found.items():
            _check_text(key)
            _check_text(value)
    elif isinstance(found, (list, tuple)):
        for value in found:
            _check_text(value)
