"""The client's half of the protocol: pay for a message, read the answer, rank its candidates. It sends nothing."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.cluster import cut_rows
from nearveil.errors import NearveilError
from nearveil.gallery.answers import Answer, Extras
from nearveil.gallery.codes import ID_BYTES, Codes, Longs, Singles
from nearveil.lazy import require_extra
from nearveil.mechanisms.covers.channels import RandomizedResponse, check_channel_epsilon, set_guarantee
from nearveil.mechanisms.covers.maps import NEIGHBORS, PublicMap
from nearveil.mechanisms.messages import COVERS, Message, MessageError, fingerprint
from nearveil.metrics import CENTRED, NORMALIZED, scale_to_unit
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import OUT_OF_RANGE, check_numbers, is_in_range, is_integer
from nearveil.privacy.noise import Source, secure_source
from nearveil.wire.frames import HEADER_BYTES, Kind, WireError
from nearveil.wire.messages import MapChanged, PublicPart, Refusal, RefusalCode, decode_frame

if TYPE_CHECKING:
    from nearveil.mechanisms.public import PublicRelease


class ProtocolError(NearveilError, ValueError):
    """The protocol cannot continue: the server offers an unusable map, or a stored message cannot be sent."""


class OutdatedMapError(ProtocolError):
    """The server has another map now, so the message cannot be answered. Another question is another debit."""

    def __init__(self, gallery: str, revision: int) -> None:
        super().__init__(
            f"The map of {gallery!r} has changed to revision {revision}. Fetch the public part and query again with a "
            "new key; that is another debit"
        )
        self.revision = revision  #: of the server's map


class RefusedError(ProtocolError):
    """The server refused a query. Sending the same message again costs nothing."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"The server refused ({refusal.code.name.lower()}): {refusal.words}")
        self.code: RefusalCode = refusal.code


class Payment(AbstractContextManager["Payment"], Protocol):
    """A durable debit, such as :class:`nearveil.ledger.Debit`."""

    @property
    def repeated(self) -> bool:
        """Whether its key was spent before: then send `message` again."""

    @property
    def message(self) -> bytes | None:
        """The message, once it is stored."""

    def store(self, message: bytes, /) -> None:
        """Store the message durably, before it is sent."""


Paid_co = TypeVar("Paid_co", bound=Payment, covariant=True)


class Payer(Protocol[Paid_co]):
    """An account, such as :class:`nearveil.ledger.Account`."""

    def spend(self, guarantee: Guarantee, key: str, /) -> Paid_co:
        """Debit a guarantee under a key, durably, or find the debit of that key."""


@dataclass(frozen=True, eq=False)
class ClientProtocol:
    """The client's half for one public map and one epsilon: checked and fitted once, immutable, for any number of uses.

    A question is :meth:`pay`, then one or more queries with the stored message (:func:`write_query`), then
    :meth:`read_answer`, then :func:`rank_answer`. Send nothing that depends on a ranking. ``docs/howto/protocol.md``
    uses both halves. The constructor raises ProtocolError if answers would be of no use.
    """

    public: PublicPart  #: nothing in it is trusted
    epsilon: float  #: of each message: the client's choice, whatever the map was learned for (by covers)
    allow_unsound: bool = False  #: whether messages of mechanisms as published may be made; no account pays for them
    public_id: str = field(init=False, repr=False)  #: of its messages
    _channel: RandomizedResponse = field(init=False, repr=False)
    guarantee: Guarantee = field(init=False, repr=False)  #: of one message with noise from the operating system

    def __post_init__(self) -> None:
        public, epsilon = self.public, check_channel_epsilon(self.epsilon)
        size = Answer.header_bytes - HEADER_BYTES + public.map.set_size * (ID_BYTES + public.table.width)
        if size > Kind.ANSWER.limit:
            raise ProtocolError(f"An answer would have {size} bytes, and the limit is {Kind.ANSWER.limit}")
        if isinstance(public.map, PublicMap):  # the messages of `Covers`, without its learner and its server's half
            object.__setattr__(self, "_channel", channel := RandomizedResponse(epsilon, public.map.n_sets))
            with require_extra("budget"):
                guarantee = set_guarantee(channel.event)
            public_id = fingerprint(COVERS, public.public_digest, public.map.map_id)
        else:
            self._check_release(public.map)
            guarantee, public_id = public.map.release.guarantee, public.map.public_id
        object.__setattr__(self, "public_id", public_id)
        object.__setattr__(self, "guarantee", guarantee)

    def _check_release(self, shared: "PublicRelease") -> None:
        """Raise unless the messages of a gallery without covers may be sent."""
        if self.epsilon != shared.epsilon:
            raise ProtocolError(f"This gallery takes {shared.mechanism} at epsilon {shared.epsilon:g}: pay that")
        if not (shared.is_sound or self.allow_unsound):
            raise ProtocolError(
                f"Messages by {shared.mechanism} reveal the query: {shared.release.guarantee.reason}. To send one "
                "nevertheless, for comparison, pass allow_unsound=True (--allow-unsound); no account pays for it"
            )

    def pay(self, feature: ArrayLike, account: Payer[Paid_co], key: str, rng: Source | None = None) -> Paid_co:
        """Debit an account, then make the message and store it with the debit. A key that was spent finds its message.

        The order is the guarantee: the debit is durable before the message exists, and one key has one message. Send
        the `message` of the debit, as often as the transport must.

        `feature`, shape (d,), is private; `account` may be any object with `spend`. `rng` is for tests and studies: see
        :meth:`nearveil.mechanisms.Release.release`. Accounts refuse to pay for a seed.

        Raises
        ------
        OutdatedMapError
            The key was spent, on a message for another map.
        ProtocolError
            The key was spent, and no message for a gallery is stored with it.
        """
        row = check_numbers(feature, "feature")
        if row.shape != (self.public.dimension,):
            raise ValueError(f"feature must be one row of {self.public.dimension} numbers")
        return self.pay_query(encode_queries(self.public, row, "feature"), account, key, rng)[0]

    def pay_query(
        self, query: "QueryRows", account: Payer[Paid_co], key: str, rng: Source | None = None, label: str | None = None
    ) -> tuple[Paid_co, Message]:
        """Pay for one row of :func:`encode_queries`, as :meth:`pay`; return the debit and its message."""
        source = secure_source() if rng is None else rng
        # numpy may be set to raise: an underflow for some features would mean silence after the debit.
        with np.errstate(all="ignore"):
            debit = account.spend(self.guarantee.with_source(source), key)
            with debit:
                if not debit.repeated:
                    message = self._make_message(query, source, label)
                    debit.store(message.to_bytes())
                    return debit, message
        try:
            stored = Message.from_bytes(debit.message or b"")
        except MessageError:
            raise ProtocolError(
                "The key was spent on something else, or its message was never stored and so never sent; use a new key"
            ) from None
        if stored.public_id != self.public_id:
            raise OutdatedMapError(self.public.gallery, self.public.revision)
        return debit, stored

    def _make_message(self, query: "QueryRows", source: Source, label: str | None) -> Message:
        public_map = self.public.map
        if not isinstance(public_map, PublicMap):
            message: Message = public_map.make_message(query.rows[0], label, source)
            return message
        sets = self._channel.sample(public_map.choose(query.directions), source).astype(np.int32)
        return Message(COVERS, self.public_id, {"sets": sets}, seeded=not source.sound)

    def read_answer(self, data: bytes, extras: Extras = "none") -> Answer:
        """Read the reply to a query with `extras`. Whether it is refused depends on the reply, never on the feature.

        After a WireError or a RefusedError the same message may be sent again; after an OutdatedMapError it can no
        longer be answered.
        """
        answer: Answer | MapChanged | Refusal = decode_frame(data, Answer, MapChanged, Refusal)
        if isinstance(answer, Refusal):
            raise RefusedError(answer)
        if isinstance(answer, MapChanged):
            raise OutdatedMapError(answer.gallery, answer.revision)
        if answer.extras != extras:
            raise WireError(f"answer must have {extras} as extras; it has {answer.extras}")
        if len(answer.ids) != self.public.map.set_size:
            raise WireError(f"answer must hold {self.public.map.set_size} candidates; it holds {len(answer.ids)}")
        if answer.codes.shape[1] != self.public.table.width:
            raise WireError(f"answer must have codes of {self.public.table.width} bytes, as the public table has")
        return answer

    def rank(self, feature: ArrayLike, answer: Answer, k: int = 8) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return ids and values of the metric, shape (k,), of the best candidates of an answer, best first.

        Values are computed from the codes, and finite for any table. Send nothing afterwards that depends on them.
        """
        rows = encode_queries(self.public, feature)
        ids, scores = rank_answer(self.public.table, rows.queries, answer, k)
        return ids[0], self.public.space.measure(rows.encoded, scores)[0]


class QueryRows(NamedTuple):
    """Private queries as a gallery encodes them, one row each."""

    rows: NDArray[np.float64]  #: as an index stores them
    encoded: NDArray[np.float64]  #: as if they were items
    queries: NDArray[np.float64]  #: their inner products with item rows are scores
    directions: NDArray[np.float64]  #: by which sets are chosen


def encode_queries(public: PublicPart, rows: ArrayLike, name: str = "rows") -> QueryRows:
    """Encode features for scores and for the choice of a set, as the gallery encodes its own."""
    features, space = np.atleast_2d(np.asarray(rows, np.float64)), public.space
    if features.ndim != 2 or features.shape[1] != public.dimension or not len(features):
        raise ValueError(f"{name} must be of shape (q, {public.dimension})")
    if not is_in_range(features):
        raise ValueError(f"{name} {OUT_OF_RANGE}")
    if space.metric != "euclidean" and not features.any(axis=1).all():
        raise ValueError(f"{name} must not be all zeros: it has no direction")
    with np.errstate(all="ignore"):  # numpy may be set to raise on underflow
        stored = scale_to_unit(features.copy()) if space.metric in NORMALIZED else features
        encoded = space.encode(stored if space.metric == CENTRED else features)
        return QueryRows(stored, encoded, space.make_queries(encoded), space.make_directions(encoded))


_BLOCK = 1 << 19  # numbers of candidates that are scored at once: they fit in a cache


def rank_answer(codes: Codes, queries: NDArray[np.float64], answer: Answer, k: int) -> tuple[Longs, Singles]:
    """Return ids and scores, shape (q, k), of the best candidates of an answer. All scores are finite."""
    if answer.codes.shape[1] != codes.width:
        raise WireError(f"answer must have codes of {codes.width} bytes: fetch the public part again")
    if not is_integer(k, 1):
        raise ValueError("k must be a whole number of at least 1")
    if len(answer.ids) < k:
        raise WireError(f"answer must hold at least k = {k} candidates; it holds {len(answer.ids)}")
    # A hostile table may make scores overflow for some queries and not for others. An error would reveal which.
    with np.errstate(all="ignore"):
        blocks = cut_rows(len(answer.ids), max(1, _BLOCK // codes.columns))
        projected = codes.project(queries)
        parts = [codes.compare(projected, answer.codes[block]) for block in blocks]
        scores = np.nan_to_num(np.concatenate(parts, axis=1), nan=float(np.finfo(np.float32).min))
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return answer.ids[order].astype(np.int64), np.take_along_axis(scores, order, axis=1)


def rank_candidates(
    codes: Codes, queries: NDArray[np.float64], answers: Sequence[Answer], k: int
) -> tuple[NDArray[np.int64], Singles]:
    """Return ids and scores of the k best candidates in each query's answer, best first. All scores are finite."""
    # In 64 bits: a hostile table of tiny numbers would take some queries where 32-bit arithmetic is slow.
    if len(answers) != len(queries):
        raise ValueError(f"answers must be {len(queries)}, one for each query")
    ids, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
    groups: dict[int, list[int]] = {}
    for row, answer in enumerate(answers):
        groups.setdefault(id(answer), []).append(row)
    for rows in groups.values():
        ids[rows], scores[rows] = rank_answer(codes, queries[rows], answers[rows[0]], k)
    return ids, scores


K = 8  # neighbours that are counted to estimate the quality of an answer
FULL = 255.0  # of a coverage


def find_share(public: PublicPart, features: NDArray[np.float64], named_set: int) -> float:
    """Return the share of the prototypes nearest to a direction, shape (1, d), in a set. Never send it."""
    near = find_prototypes(public.map, project_rows(public, features), None)[0, :K]
    return float(public.map.coverage[near, named_set].mean() / FULL)


def project_rows(public: PublicPart, features: NDArray[np.float64]) -> Singles:
    """Project directions, shape (n, d), to the space of a map's prototypes, shape (n, r)."""
    with np.errstate(all="ignore"):
        components: NDArray[np.float16] = public.map.components
        return np.nan_to_num(features @ components.astype(np.float64)).astype(np.float32)


def find_prototypes(public_map: PublicMap, rows: Singles, excluded: NDArray[np.intp] | None) -> NDArray[np.int64]:
    """Return the prototypes nearest to projected rows, as many as a client compares, without the `excluded` of each."""
    count = min(NEIGHBORS + (excluded is not None), len(public_map.prototypes))
    nearest = public_map.nearest(rows.astype(np.float64), count)
    if excluded is None:
        return nearest
    # Among equal rows another may come first; then the last one is dropped instead.
    keep = nearest != excluded[:, None]
    keep[keep.all(axis=1), -1] = False
    return np.asarray(nearest[keep].reshape(len(rows), count - 1))
