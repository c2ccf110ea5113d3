"""Traffic attacks: the server sees all that a client sends, before and after the answer."""

import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.audit._experiment import DIMENSION, Experiment, Floats, Pair, draw_gallery
from nearveil.gallery import Index, Item
from nearveil.metrics import Metric
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source
from nearveil.wire import ClientProtocol, ServerProtocol
from nearveil.wire.client import encode_queries, rank_answer
from nearveil.wire.messages import PublicPart, write_query
from nearveil.wire.server import serve_maps

Send = Callable[[bytes], bytes]
Talk = Callable[[PublicPart, Floats, Send, Source], object]

_EPSILON = 2.0
_TAIL = 24  # last bytes of the question, which hold the arrays of the message
_TRIALS = 8_000


@dataclass
class FreeDebit:
    """A debit without a ledger: an audit spends nothing, and a disk would add noise to timings."""

    key: str = "key"
    repeated: bool = False
    message: bytes | None = None
    nonce: str = "0" * 32

    def store(self, message: bytes, /) -> None:
        self.message = message

    def __enter__(self) -> "FreeDebit":
        return self

    def __exit__(self, *error: object) -> None:
        pass


class FreeAccount:
    """An account that debits nothing."""

    def spend(self, guarantee: Guarantee, key: str, /) -> Any:  # noqa: ARG002
        """Return a debit."""
        return FreeDebit()


def ask_question(public: PublicPart, feature: Floats, send: Send, source: Source) -> NDArray[np.int64]:
    """Ask one question and return the nearest ids; `send` sends bytes and returns the reply."""
    client = ClientProtocol(public, _EPSILON)
    debit = client.pay(feature, FreeAccount(), "key", source)
    assert debit.message is not None
    answer = client.read_answer(send(write_query(debit.message)))
    return np.asarray(rank_answer(public.table, encode_queries(public, feature).queries, answer, 3)[0][0])


def make_wire_experiment(
    talk: Talk = ask_question, *, name: str = "covers: on the wire", metric: Metric = "cosine"
) -> Experiment:
    """Return the experiment of all traffic with a server.

    ``talk(public, feature, send, source)`` acts as the client. The observer sees all calls of `send`.
    """
    public, server = _serve_gallery(metric)

    def run(feature: Floats, runs: int, source: Source) -> list[list[bytes]]:
        conversations: list[list[bytes]] = []
        for _ in range(runs):
            conversations.append([])

            def send(data: bytes) -> bytes:
                conversations[-1].append(data)
                return server.answer(data)

            talk(public, feature, send, source)
        return conversations

    return Experiment(
        name=name,
        guarantee=ClientProtocol(public, _EPSILON).guarantee,
        pairs=_find_pairs(public),
        run=run,
        numbers=lambda conversations: np.array([_flatten(sent) for sent in conversations]),
        trials=_TRIALS,
    )


def _flatten(sent: list[bytes]) -> NDArray[np.float64]:
    """Return traffic as numbers: the last bytes of the question, sizes, and a checksum of the rest."""
    tail = b"".join(sent[1:])
    end = np.frombuffer(sent[0][-_TAIL:].rjust(_TAIL, b"\0"), dtype=np.uint8)
    # The checksum shows whether the rest is equal, even if its bytes mean nothing to a classifier.
    return np.concatenate([end, [len(sent), sum(map(len, sent)), zlib.crc32(tail)]]).astype(np.float64)


def _find_pairs(public: PublicPart) -> tuple[Pair, ...]:
    """Return opposite rows, and two rows with different good sets."""
    space, axes = public.space, 10 * np.concatenate([np.eye(DIMENSION), -np.eye(DIMENSION)])
    rows = space.scale * (space.mean + axes)
    good = public.map.choose(encode_queries(public, rows).directions)
    other = int(np.flatnonzero(good != good[0])[0])
    return (
        Pair("opposite rows", rows[0], rows[DIMENSION]),
        Pair("rows of different sets", rows[0], rows[other]),
    )


@lru_cache(maxsize=4)
def _serve_gallery(metric: Metric) -> tuple[PublicPart, ServerProtocol]:
    """Return a server of the default gallery by a metric, and its public part."""
    rows = draw_gallery().astype(np.float32)
    with (
        tempfile.TemporaryDirectory() as folder,
        Index.create(folder, dimension=DIMENSION, extractor="random rows", metric=metric) as index,
    ):
        index.add(Item(row) for row in rows)
        index.publish(epsilon=_EPSILON, candidates=0.1)
        newest = serve_maps(index, "audit", offers=())[0]
        # The list of live items is loaded, so the index can be closed.
        server = ServerProtocol(replace(newest, alive=index.alive(newest.published)))
        return newest.make_public_part(), server
