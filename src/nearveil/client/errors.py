"""Errors of a client. None of them holds a private value or a token."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nearveil.errors import NearveilError

if TYPE_CHECKING:
    from nearveil.client.results import Nearest


class QuestionError(NearveilError, ValueError):
    """An argument of a question is invalid. Nothing was paid.

    Parameters
    ----------
    field : str
        The argument to change.
    words : str

    Examples
    --------
    >>> str(QuestionError("k", "at most 8, the items of an answer"))
    'k: at most 8, the items of an answer'
    """

    def __init__(self, field: str, words: str) -> None:
        super().__init__(f"{field}: {words}")
        self.field, self.words = field, words

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling."""
        return QuestionError, (self.field, self.words)


class UnreachableError(NearveilError, ValueError):
    """No reply: no connection, a broken one, or a timeout.

    Parameters
    ----------
    words : str
    again : bool, default=True
        Whether a retry may help.
    """

    def __init__(self, words: str, *, again: bool = True) -> None:
        super().__init__(words)
        self.again = again


class ReplyError(NearveilError, ValueError):
    """A reply is not that of a nearveil server."""


class DeclinedError(ReplyError):
    """The server declined, with a reason: `code` is for programs, such as "not_offered"."""

    def __init__(self, status: int, code: str, words: str) -> None:
        super().__init__(f"The server declined ({status} {code}): {words}")
        self.status, self.code, self.words = status, code, words

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling."""
        return DeclinedError, (self.status, self.code, self.words)


class UnansweredError(NearveilError, ValueError):
    """A question was paid for and has no answer. If `again` is true, the same key repeats it at no cost.

    Attributes
    ----------
    reason : str
    key : str
    again : bool
        Whether repeating it can help: not if the map of the message has changed.
    """

    def __init__(self, reason: str, key: str, *, again: bool = True) -> None:
        super().__init__(f"{reason}. {retry_hint(key, again=again)}")
        self.reason, self.key, self.again = reason, key, again

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling."""
        return _unanswered, (self.reason, self.key, self.again)


def _unanswered(reason: str, key: str, again: bool) -> UnansweredError:
    return UnansweredError(reason, key, again=again)


class UnfinishedError(NearveilError, ValueError):
    """One of many questions failed; those before it were answered. Continue with the same keys; none is paid twice.

    Attributes
    ----------
    results : tuple of Nearest
        The answers to the rows before.
    keys : tuple of str
        Of all rows.
    """

    def __init__(self, reason: str, results: Sequence["Nearest"], keys: Sequence[str]) -> None:
        super().__init__(
            f"rows[{len(results)}]: {reason}. nearest_many(rows, keys=error.keys) goes on, and pays for no key twice"
        )
        self.reason, self.results, self.keys = reason, tuple(results), tuple(keys)

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling."""
        return UnfinishedError, (self.reason, self.results, self.keys)


def make_unanswered(error: Exception, key: str) -> UnansweredError:
    """Return an error after a debit as one that names the key to retry."""
    from nearveil.wire.client import OutdatedMapError  # imported late: importing the client stays fast

    return UnansweredError(str(error).rstrip("."), key, again=not isinstance(error, OutdatedMapError))


def retry_hint(key: str, *, again: bool = True) -> str:
    """Return how to retry a question that was paid for."""
    if again:
        return f"It is paid for: key={key!r} asks the same again, for nothing"
    return (
        f"It was paid for (key {key!r}), and its message is of no more use: a new question, with a new key, pays anew"
    )
