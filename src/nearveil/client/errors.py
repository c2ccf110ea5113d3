"""Errors of a client. None of them holds a private value or a token."""

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from nearveil.errors import NearveilError

if TYPE_CHECKING:
    from nearveil.client.results import Nearest


@dataclass(eq=False, repr=False)
class QuestionError(NearveilError, ValueError):
    """An argument of a question is invalid. Nothing was paid.

    Examples
    --------
    >>> str(QuestionError("k", "at most 8, the items of an answer"))
    'k: at most 8, the items of an answer'
    """

    field: str  #: the argument to change
    words: str

    def __str__(self) -> str:
        return f"{self.field}: {self.words}"


@dataclass(eq=False, repr=False)
class UnreachableError(NearveilError, ValueError):
    """No reply: no connection, a broken one, or a timeout."""

    words: str
    _: KW_ONLY
    again: bool = True  #: whether a retry may help

    def __str__(self) -> str:
        return self.words


class ReplyError(NearveilError, ValueError):
    """A reply is not that of a nearveil server."""


@dataclass(eq=False, repr=False)
class DeclinedError(ReplyError):
    """The server declined, with a reason: `code` is for programs, such as "not_offered"."""

    status: int
    code: str
    words: str

    def __str__(self) -> str:
        return f"The server declined ({self.status} {self.code}): {self.words}"


@dataclass(eq=False, repr=False)
class UnansweredError(NearveilError, ValueError):
    """A question was paid for and has no answer. If `again` is true, the same key repeats it at no cost."""

    reason: str
    key: str
    _: KW_ONLY
    again: bool = True  #: whether repeating it can help: not if the map of the message has changed

    def __str__(self) -> str:
        if self.again:
            return f"{self.reason}. It is paid for: key={self.key!r} repeats it at no cost"
        return (
            f"{self.reason}. It was paid for (key {self.key!r}), and its message can no longer be answered: a new "
            "query, with a new key, costs again"
        )


@dataclass(eq=False, repr=False)
class UnfinishedError(NearveilError, ValueError):
    """One of many questions failed; those before it were answered. Continue with the same keys; none is paid twice."""

    reason: str
    results: "tuple[Nearest, ...]"  #: the answers to the rows before
    keys: tuple[str, ...]  #: of all rows

    def __str__(self) -> str:
        return (
            f"rows[{len(self.results)}]: {self.reason}. nearest_many(rows, keys=error.keys) goes on, and pays for no "
            "key twice"
        )
