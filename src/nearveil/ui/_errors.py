"""What went wrong, in the words of the page. Nothing private is in them, and no token."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from nearveil.features import ImageError
from nearveil.features.extractor import FeatureError
from nearveil.features.images import TOO_LARGE
from nearveil.ledger import LedgerError, OverBudgetError
from nearveil.ledger.budget import format_down, format_up
from nearveil.service import QuestionError, ReplyError, UnansweredError, UnreachableError
from nearveil.service.client.errors import DeclinedError

_NOTHING = "No message was sent, and nothing was paid."


@dataclass(eq=False)
class Trouble(Exception):  # noqa: N818
    """One thing that went wrong, as it is told."""

    status: int  # of HTTP
    code: str  # for the page's script
    words: str
    paid: bool = False  # whether the question was paid for
    again: bool = False  # whether the same question may be asked again; once paid for it costs nothing more

    def __str__(self) -> str:
        return self.words


@singledispatch
def describe_error(error: Exception) -> Trouble:
    """Return an error of a question, or of looking at a ledger, in words."""
    raise error


def describe_too_large() -> Trouble:
    """Return what is said of an image beyond the limits."""
    words = f"This image is too large: at most 64 megapixels and 64 MiB are read. Save a smaller copy. {_NOTHING}"
    return Trouble(413, "too_large", words)


def describe_failure() -> Trouble:
    """Return what is said where nobody knows more."""
    return Trouble(500, "failed", "Something went wrong here that nobody thought of. Load the page anew.")


def describe_new_listing() -> Trouble:
    """Return what is said where a gallery has changed what its images are compared by."""
    words = f"The gallery has other features than when it was listed. It is listed anew: ask again. {_NOTHING}"
    return Trouble(409, "listing", words)


def describe_spoiled() -> Trouble:
    """Return what is said of an error after the debit: whatever it says itself, something was paid."""
    words = (
        "The question is paid for, and something went wrong here before its answer could be shown. It waits "
        "below: asking it again costs nothing."
    )
    return Trouble(500, "failed", words, paid=True, again=True)


def _describe_image(error: ImageError) -> Trouble:
    if error.reason == TOO_LARGE:
        return describe_too_large()
    words = f"This file cannot be used as an image. It is {_end_sentence(error.reason)} {_NOTHING}"
    return Trouble(422, "image", words)


def _describe_declined(error: DeclinedError) -> Trouble:
    if error.status in (401, 403):
        words = f"The server refused the token. Ask its operator for a new one, and start again. {_NOTHING}"
        return Trouble(502, "token", words)
    return Trouble(502, "declined", f"The server says no: {_end_sentence(error.words)} {_NOTHING}")


def _describe_unanswered(error: UnansweredError) -> Trouble:
    if error.again:
        words = (
            f"The question is paid for, and has no answer yet: {_end_sentence(error.reason)} It waits below: asking it "
            "again sends the same message and costs nothing. A new question pays anew."
        )
        return Trouble(502, "unanswered", words, paid=True, again=True)
    words = (
        "The gallery changed its map while the question was on its way. The message was paid for and is of no "
        "more use. Asking again is a new question, about the new map, and pays anew."
    )
    return Trouble(409, "map_changed", words, paid=True)


def _describe_question(error: QuestionError) -> Trouble:
    if error.field == "extractor":
        words = f"The features of this gallery cannot be made here: {_end_sentence(error.words)} {_NOTHING}"
        return Trouble(422, "extractor", words)
    return _describe_value(error)


def _describe_value(error: Exception) -> Trouble:
    return Trouble(422, "question", f"{_end_sentence(str(error))} {_NOTHING}")


def _end_sentence(text: object) -> str:
    return f"{str(text).rstrip('.')}."


_DESCRIBED: dict[type[Exception], Callable[[Any], Trouble]] = {
    Trouble: lambda error: error,
    ValueError: _describe_value,
    ImageError: _describe_image,
    FeatureError: lambda _: Trouble(
        422,
        "image",
        f"Nothing can be recognised in this image: it looks like a blank page. Take another. {_NOTHING}",
    ),
    OverBudgetError: lambda error: Trouble(
        409,
        "spent",
        f"The budget does not allow this: it would cost {format_up(error.cost)}, and {format_down(error.left)} of "
        f"{error.epsilon:g} is left. Ask with a smaller epsilon, or end here: what is spent cannot be taken back. "
        f"{_NOTHING}",
    ),
    UnreachableError: lambda _: Trouble(
        502, "unreachable", f"The server does not answer. Is it running, and reachable from here? {_NOTHING}"
    ),
    DeclinedError: _describe_declined,
    ReplyError: lambda _: Trouble(
        502, "reply", f"What answers at the server's address does not speak as a nearveil server does. {_NOTHING}"
    ),
    UnansweredError: _describe_unanswered,
    QuestionError: _describe_question,
    LedgerError: lambda error: Trouble(503, "ledger", f"The ledger says: {_end_sentence(error)} No message was sent."),
    ModuleNotFoundError: lambda error: Trouble(
        503, "missing", f"Something is not installed here: {_end_sentence(error)} {_NOTHING}"
    ),
}
for _kind, _describe in _DESCRIBED.items():
    describe_error.register(_kind)(_describe)
