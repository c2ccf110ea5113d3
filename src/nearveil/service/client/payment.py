"""A paid message, alone or among messages about public images; stored as it is sent."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike

from nearveil.frames import Reader, WireError, Writer
from nearveil.mechanisms import Message
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source, secure_source
from nearveil.protocol.client import ClientProtocol
from nearveil.protocol.wire import ProtocolError, PublicPart, Query, decode_frame
from nearveil.service.client.errors import QuestionError, UnansweredError

if TYPE_CHECKING:
    from nearveil.ledger import Debit

MOST = 4096  # dummies of one question
_MESSAGE = b"NVM"  # what the bytes of one message begin with


class Payer(Protocol):
    """Who pays: an account, or what opens one when there is something to pay."""

    def spend(self, promise: Guarantee, key: str, /) -> "Debit":
        """Debit a promise under a key, durably, or find the debit of that key."""
        ...


@dataclass
class _Free:
    """Pays nothing: a public image has no promise to keep."""

    repeated: bool = False
    message: bytes | None = None

    def store(self, message: bytes, /) -> None:
        """Keep nothing."""


def make_dummy_messages(
    rows: Sequence[ArrayLike], public: PublicPart, epsilon: float, rng: Source | None
) -> tuple[Message, ...]:
    """Return the messages of public images, each through the channel that the private one goes through."""
    return tuple(_make_dummy(row, number, public, epsilon, rng) for number, row in enumerate(rows))


def _make_dummy(row: ArrayLike, number: int, public: PublicPart, epsilon: float, rng: Source | None) -> Message:
    client = ClientProtocol(epsilon, public=public)
    try:
        question = client.ask(row, spend=lambda _: nullcontext(_Free()), rng=rng)
    except ValueError as error:
        raise QuestionError(f"dummies[{number}]", str(error)) from None
    found: Query = decode_frame(question, Query)
    return found.message


class PaidMessages:
    """Spends once for a message and puts it at a random place among others. What is stored is what is sent.

    Were the dummies drawn anew for a retry, the one message that comes twice would be the paid one. Which of them it
    is, is nowhere kept: the client looks at the candidates of all.
    """

    def __init__(self, account: Payer, key: str, dummies: Sequence[Message], rng: Source | None) -> None:
        self._account, self._key, self._dummies = account, key, dummies
        self._rng = secure_source() if rng is None else rng
        self.messages: tuple[Message, ...] = ()

    def ask(self, client: ClientProtocol, row: ArrayLike) -> bytes:
        """Pay for a message, or take the one that this key was paid for, and return the question that sends it.

        Raises UnansweredError: The key was paid for when the gallery had another map.
        """
        try:
            return client.ask(row, spend=self.spend, rng=self._rng)
        except ProtocolError:
            if not self.messages:
                raise
        raise UnansweredError("the gallery has another map than when this key was paid for", self._key, again=False)

    def spend(self, promise: Guarantee) -> AbstractContextManager["PaidMessages"]:
        """Debit the account, or find the debit of this key."""
        self._debit = self._account.spend(promise, self._key)
        if self.repeated:
            assert self._debit.message is not None
            self.messages = unpack_messages(self._debit.message)
        return self

    @property
    def repeated(self) -> bool:
        """Whether the key was spent before."""
        return self._debit.repeated

    @property
    def nonce(self) -> str:
        """What the keys of this question's requests are made from. It is not sent."""
        return self._debit.nonce

    @property
    def message(self) -> bytes | None:
        """One of those that were stored: all are for one map."""
        return self.messages[0].to_bytes() if self.messages else None

    def store(self, message: bytes, /) -> None:
        """Keep all messages, in the order in which they will be sent."""
        found = [Message.from_bytes(message), *self._dummies]
        self.messages = tuple(found[place] for place in _shuffle(len(found), self._rng))
        self._debit.store(_pack(self.messages))

    def __enter__(self) -> "PaidMessages":
        self._debit.__enter__()
        return self

    def __exit__(self, *told: object) -> None:
        self._debit.__exit__(None, None, None)


def _shuffle(count: int, source: Source) -> list[int]:
    """Return a uniformly random order: by random words, drawn anew should two be equal."""
    while True:
        words = source.words(count)
        if len(np.unique(words)) == count:
            return [int(place) for place in np.argsort(words)]


def _pack(messages: Sequence[Message]) -> bytes:
    if len(messages) == 1:
        return messages[0].to_bytes()
    out = Writer()
    out.write_int(len(messages))
    for message in messages:
        out.write_bytes(message.to_bytes())
    return out.to_bytes()


def unpack_messages(data: bytes) -> tuple[Message, ...]:
    """Return the messages that were stored with a debit."""
    try:
        if data.startswith(_MESSAGE):
            return (Message.from_bytes(data),)
        taken = Reader(data)
        messages = tuple(Message.from_bytes(taken.read_bytes()) for _ in range(min(taken.read_int(), MOST + 1)))
        taken.check_end()
    except (WireError, ValueError):
        messages = ()
    if not messages:
        raise QuestionError("key", "it was paid for something else than a question: take another")
    return messages
