"""Why a question was not asked, or has no answer. None of these errors holds anything private, or a token."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nearveil.errors import NearveilError

if TYPE_CHECKING:
    from nearveil.client.results import Nearest


class QuestionError(NearveilError, ValueError):
    """A question cannot be asked like this. Nothing was paid.

    Parameters
    ----------
    field : str
        Which argument to change.
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
    """No reply came: no connection, a broken one, or too slow.

    Parameters
    ----------
    words : str
    again : bool, default=True
        Whether it may be different a moment later.
    """

    def __init__(self, words: str, *, again: bool = True) -> None:
        super().__init__(words)
        self.again = again


class ReplyError(NearveilError, ValueError):
    """A reply is not what a server sends."""


class DeclinedError(ReplyError):
    """The server says no, and why: `code` is for programs, such as "not_offered"."""

    def __init__(self, status: int, code: str, words: str) -> None:
        super().__init__(f"The server declined ({status} {code}): {words}")
        self.status, self.code, self.words = status, code, words

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling."""
        return DeclinedError, (self.status, self.code, self.words)


class UnansweredError(NearveilError, ValueError):
    """A question was paid for and has no answer. Where `again` is true, the same key asks the same again, for nothing.

    Attributes
    ----------
    reason : str
    key : str
    again : bool
        Whether asking again can help: not where the map has changed, which the message was made for.
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
    """One of many questions failed; those before it were answered. The same keys go on, and pay nothing twice.

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
    from nearveil.wire.client import OutdatedMapError  # a program that imports the client waits for no protocol

    return UnansweredError(str(error).rstrip("."), key, again=not isinstance(error, OutdatedMapError))


def retry_hint(key: str, *, again: bool = True) -> str:
    """Say how to retry a question that was paid for."""
    if again:
        return f"It is paid for: key={key!r} asks the same again, for nothing"
    return (
        f"It was paid for (key {key!r}), and its message is of no more use: a new question, with a new key, pays anew"
    )
