"""Questions of a client: the nearest items of an open gallery, and the class of an image by a published model.

Requests are a function of messages, nonces and public facts, never of a feature, of scores or of a choice
(``docs/theory/service.md``; tested by ``tests/service/test_client_wire.py``). All work on private values runs in a
:func:`~nearveil.client.timing.private_step`, which ends at a public deadline, on success and on error.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from nearveil.client.copies import encode_value
from nearveil.client.errors import QuestionError, UnansweredError, UnreachableError
from nearveil.client.images import FeatureMaker, Image, Images
from nearveil.client.results import Classified, Match, Nearest
from nearveil.client.session import OPEN_ACCOUNT, CachedModel, Payer, Session, Traffic, fit_protocol, read_balance
from nearveil.client.timing import choice_period, extraction_period, private_step, question_period, run_to_end
from nearveil.client.transport import read_body
from nearveil.gallery.answers import IMAGE_HEADER_BYTES, LONGEST_NAME, Answer, Extras, ItemDetails, read_details
from nearveil.gallery.codes import ID_BYTES
from nearveil.lazy import require_extra
from nearveil.mechanisms import Message, PublicMap
from nearveil.mechanisms.covers.channels import check_channel_epsilon
from nearveil.metrics import NORMALIZED, Metric
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.checks import OUT_OF_RANGE, as_rows, check_text, is_in_range, is_integer, normalize_rows
from nearveil.privacy.noise import Source
from nearveil.wire.client import (
    ClientProtocol,
    OutdatedMapError,
    ProtocolError,
    QueryRows,
    encode_queries,
    find_share,
    rank_answer,
)
from nearveil.wire.frames import Kind
from nearveil.wire.messages import PublicPart, write_query
from nearveil.wire.schema import FRAME, GalleryInfo

if TYPE_CHECKING:
    from nearveil.ledger import Debit
    from nearveil.private_knn import PublicDiscriminant

DEFAULT_K = 8
Method = Literal["auto", "message", "home", "sealed"]
Filter: TypeAlias = Mapping[str, Any] | Callable[[Match], bool]
"""Select matches: by values of their metadata, or by a function."""
NOTHING_SENT = Guarantee(
    epsilon=0.0,
    delta=0.0,
    protects="query",
    unit="record",
    relation="replace",
    basis=Basis("no request depends on the query", "docs/theory/service.md"),
)
_TEXTS: tuple[Extras, ...] = ("metadata", "names")  # extras that are text
_UTF8 = 4  # bytes of a character, at most
_PARALLEL = 4  # requests at the same time
_MOST_TOGETHER = 64  # questions that are paid, sent and ranked together
_TOGETHER_BYTES = 256 << 20  # of their answers
_CLASSIFYING = 0.1  # seconds to classify, besides the numbers of the model
_CLASSIFYING_NUMBER = 2e-8  # seconds for each number of the projection and the weights


@dataclass(frozen=True)
class NearestQuestion:
    """The arguments of a question, checked as far as that is possible without a gallery."""

    queries: Images = field(repr=False)
    k: int | None
    epsilon: float | None  # None and 0 are the same: only free ways
    candidates: float | None = None
    gallery: str | None = None
    thumbnails: bool = False
    originals: bool = False
    keys: Sequence[str] | None = None  # one for each query
    rng: Source | None = None
    by: Method = "auto"
    where: Filter | None = field(default=None, repr=False)
    label: str | None = field(default=None, repr=False)  # the class of the query, for mechanisms as published
    allow_unsound: bool = False

    def __post_init__(self) -> None:
        methods, fraction, is_free = get_args(Method), self.candidates, not self.epsilon
        is_fraction = isinstance(fraction, (int, float)) and 0 < fraction <= 1
        is_filter = self.where is None or callable(self.where) or isinstance(self.where, Mapping)
        _require(self.by in methods, "by", f"it must be one of {', '.join(methods)}")
        _require(self.by != "message" or not is_free, "by", "a message needs an epsilon above 0: it pays that much")
        words = f"{self.by} costs nothing: leave epsilon out; it is {self.epsilon}"
        _require(self.by not in ("home", "sealed") or is_free, "by", words)
        words = "it applies to messages only: leave it out, or pass an epsilon"
        _require(fraction is None or not is_free, "candidates", words)
        words = "it must be a fraction of the gallery, above 0 and at most 1"
        _require(fraction is None or is_fraction, "candidates", words)
        words = "request thumbnails or originals, not both"
        _require(not (self.thumbnails and self.originals), "originals", words)
        _require(is_filter, "where", "it must be a mapping of metadata, or a function of a match")
        has_json = callable(self.where) or None not in map(encode_value, (self.where or {}).values())
        _require(has_json, "where", "its values must be values of JSON, as metadata is: text, finite numbers, lists")
        if self.k is not None and not is_integer(self.k, 1):
            raise QuestionError("k", "it must be a whole number of at least 1")
        if self.epsilon:
            check_channel_epsilon(self.epsilon)
        for key in self.keys or ():
            check_text(key, "key")


def _require(is_valid: bool, argument: str, words: str) -> None:
    if not is_valid:
        raise QuestionError(argument, words)


async def describe_ways(info: GalleryInfo, account: "Payer | None") -> str:
    """Return how to search a gallery that has no free way now, with the price of each way."""
    balance = await asyncio.to_thread(read_balance, account)  # loads the ledger if there is one
    payer = OPEN_ACCOUNT if account is None else "from your account"
    if balance is not None:
        from nearveil.ledger.budget import format_down

        payer = f"from the account {balance.account!r}, which has {format_down(balance.left)} left"
    message = f"a message pays for an answer: epsilon=4, for example, costs 4, {payer}"
    if "codes" not in info.offers:
        return f"{info.name} offers no free way to search (no copy of its codes, no sealed queries); {message}"
    copy = "client.sync() or `nearveil sync` downloads one at no cost (on a schedule, not because of a query)"
    return f"there is no local copy of {info.name}: {copy}, and searching it is free; {message}"


class Outcome(NamedTuple):
    """The answers to the first queries of a question, and the error of the next one if there are fewer than queries."""

    results: list[Nearest]
    error: Exception | None = None


async def ask_messages(session: Session, question: NearestQuestion) -> Outcome:
    """Find the nearest items of each query with one differentially private message: prepare, pay, send, rank."""
    # The order is the guarantee: the debits are durable before the messages exist, nothing is sent after the ranking,
    # and every private step ends at a public deadline, on success and on error (docs/theory/service.md, Theorem 3).
    # A client that never pays loads no ledger and no accountant. Others load them here, not in a private step.
    from nearveil.ledger import new_key

    with require_extra("budget"):
        await asyncio.to_thread(import_module, "nearveil.privacy.accounting")
    traffic, results = Traffic(), list[Nearest]()
    failure: Exception | None
    try:
        account = await session.require_account(question.gallery) if not question.allow_unsound else session.account
        info, rows = await session.prepare_features(question.queries, question.gallery)
        check_filter(question.where, info.metadata_keys)
        public = await session.fetch_map(info, question.candidates, traffic)
    except UnreachableError as unreachable:
        raise UnreachableError(f"{unreachable}; nothing was paid", again=unreachable.again) from None
    assert question.epsilon is not None
    protocol = await _fit_protocol(public, question)
    if not protocol.guarantee.sound:
        account = UnpricedPayer()
    elif account is None:
        account = await session.require_account(question.gallery)
    k, plan = limit_count(question.k, public.map.set_size), _plan_requests(question, public)
    keys = list(question.keys or [new_key() for _ in rows])
    size, filtered, problem = count_together(public), question.where is not None, None
    try:
        for start in range(0, len(rows), size):
            cut, failure = slice(start, start + size), None
            payer = _Payer(protocol, account, question.rng, question.label)
            try:
                period = question_period(public, len(rows[cut]))
                async with private_step(session, traffic.last_reply_at, period):
                    await run_to_end(partial(payer.pay, np.stack(rows[cut]), keys[cut]))
            except Exception as unpaid:  # of the account: those that are paid are asked
                if not payer.payments:
                    return Outcome(results, problem or unpaid)
                failure = unpaid
            replies, unanswered = await _send_all(session, info, protocol, plan, payer.payments, traffic)
            texts = measure_texts(replies, None if filtered else k)
            period = choice_period(public, **texts, filtered=filtered, questions=max(1, len(replies)))
            async with private_step(session, traffic.last_reply_at, period):
                ranked = await asyncio.to_thread(_rank_all, protocol, replies, k, payer.payments, question.where)
            if problem is None:
                results += ranked.results
                problem = ranked.error
            # After an error of a filter the others are asked nevertheless: messages do not depend on answers.
            if failure := unanswered or failure:
                return Outcome(results, problem or failure)
            traffic = Traffic(last_reply_at=session.clock.now())
    except BaseException as interrupt:
        words = (
            f"key={keys[0]!r} repeats the query: it is"
            if len(keys) == 1
            else f"keys={keys!r} repeat the queries: each is"
        )
        interrupt.add_note(f"{words} paid for at most once")
        raise
    return Outcome(results, problem)


async def _fit_protocol(public: PublicPart, question: NearestQuestion) -> ClientProtocol:
    """Return the client's half for a map, and refuse a question that it cannot ask."""
    assert question.epsilon is not None
    fit = partial(fit_protocol, public, question.epsilon, allow_unsound=question.allow_unsound)
    protocol = await asyncio.to_thread(fit)
    if not protocol.guarantee.sound:
        _require(question.keys is None, "key", f"no account pays for a message by {public.mechanism}: leave it out")
        public.map.find_label(question.label)  # before anything is sent
    else:
        _require(question.label is None, "label", f"{public.mechanism} does not use it: leave it out")
    return protocol


class UnpricedPayer:
    """Pays nothing: no budget covers a message without a guarantee, and no ledger keeps it."""

    def spend(self, guarantee: Guarantee, key: str, /) -> "Debit":
        """Return a debit of nothing, in memory."""
        del guarantee, key
        return cast("Debit", _NoDebit())


class _NoDebit(nullcontext[None]):
    """The debit of an :class:`UnpricedPayer`."""

    key, repeated, message = "", False, b""

    def __init__(self) -> None:
        super().__init__()
        self.nonce = secrets.token_hex(16)

    def store(self, message: bytes) -> None:
        """Keep the message until it is sent."""
        self.message = message


class _Payment(NamedTuple):
    """A durable debit, its stored message, the encoded query, and the remaining budget if the account says so."""

    debit: "Debit"
    message: Message
    query: QueryRows
    remaining: float | None


@dataclass
class _Payer:
    """Pays for queries one by one, and keeps the payments if one fails."""

    protocol: ClientProtocol
    account: Payer
    rng: Source | None
    label: str | None = None
    payments: list[_Payment] = field(default_factory=list)

    def pay(self, rows: NDArray[Any], keys: Sequence[str]) -> None:
        """Debit the account and store a message for each row; translate errors of a key that was spent."""
        encoded = encode_queries(self.protocol.public, rows, "query:")
        for number, key in enumerate(keys):
            query = QueryRows(*(part[number : number + 1] for part in encoded))
            try:
                debit, message = self.protocol.pay_query(query, self.account, key, self.rng, self.label)
            except OutdatedMapError:
                words = "the gallery has another map than when this key was paid for"
                raise UnansweredError(words, key, again=False) from None
            except ProtocolError as error:
                raise QuestionError("key", str(error)) from None
            remaining = None
            with suppress(Exception):  # the message is paid for: it must be sent
                remaining = debit.balance().left
            self.payments.append(_Payment(debit, message, query, remaining))


@dataclass(eq=False)
class _Replies:
    """The replies to the message of a key, the answers in them, and their bytes."""

    key: str
    traffic: Traffic
    parts: list[tuple[Extras, bytes]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    @property
    def texts(self) -> Answer | None:
        """The answer with names or metadata, if there is one."""
        return next((answer for answer in self.answers if answer.extras in _TEXTS), None)


async def _send_all(
    session: Session,
    info: GalleryInfo,
    protocol: ClientProtocol,
    plan: Sequence[tuple[Extras, int]],
    payments: Sequence[_Payment],
    traffic: Traffic,
) -> tuple[list[_Replies], Exception | None]:
    """Send messages, a few at a time; return the replies to the first of them, and the error of the next."""
    # `traffic` counts the bytes sent before, for the first message, and notes the time of the last reply.
    replies = [_Replies(payment.debit.key, Traffic()) for payment in payments]
    replies[0].traffic = Traffic(traffic.sent, traffic.received)
    pending, errors = iter(list(enumerate(zip(payments, replies, strict=True)))), dict[int, Exception]()

    async def send_next() -> None:
        for number, (payment, reply) in pending:  # each is taken by one task
            if errors:
                return
            try:
                await _send(session, info, protocol, plan, payment, reply)
            except Exception as error:
                errors[number] = _to_unanswered(error, reply.key)
            finally:
                traffic.last_reply_at = max(traffic.last_reply_at, reply.traffic.last_reply_at)

    tasks = [asyncio.ensure_future(send_next()) for _ in range(min(_PARALLEL, len(payments)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    first = min(errors, default=len(replies))
    invalid = await asyncio.to_thread(_read_all, protocol, replies[:first])
    return [reply for reply in replies[:first] if reply.answers], invalid or errors.get(first)


async def _send(
    session: Session,
    info: GalleryInfo,
    protocol: ClientProtocol,
    plan: Sequence[tuple[Extras, int]],
    payment: _Payment,
    reply: _Replies,
) -> None:
    """Send all requests of one message."""
    assert payment.debit.message is not None
    for extras, most in plan:
        frame = write_query(payment.debit.message, extras)
        response = await session.send_query(info, frame, payment.debit.nonce, most, reply.traffic)
        if response.status >= 400 and response.media_type == FRAME:
            protocol.read_answer(response.body, extras)  # raises the reason
        reply.parts.append((extras, read_body(response)))


def _to_unanswered(error: Exception, key: str) -> UnansweredError:
    """Return the error of a question that is paid for."""
    unanswered = UnansweredError(str(error).rstrip("."), key, again=not isinstance(error, OutdatedMapError))
    unanswered.__cause__ = error
    return unanswered


def check_filter(where: Filter | None, keys: Sequence[str] | None) -> None:
    """Refuse a filter by a key that no item has. Nothing is sent for it: a filter is private."""
    if isinstance(where, Mapping) and keys is not None and (unknown := where.keys() - set(keys)):
        listing = ", ".join(keys) or "none"
        words = f"no item has {min(unknown)!r} in its metadata; the keys are: {listing}"
        raise QuestionError("where", f"{words} (client.galleries() updates them)")


def limit_count(k: int | None, candidates: int, of: str = "an answer") -> int:
    """Return the number of matches, or raise if an answer, a copy or an index has fewer candidates."""
    if k is None:
        return min(DEFAULT_K, candidates)
    if k > candidates:
        raise QuestionError("k", f"at most {candidates}, the items of {of}")
    return k


def _plan_requests(question: NearestQuestion, public: PublicPart) -> list[tuple[Extras, int]]:
    """Return the extras of each request, and the largest reply to read."""
    requested: dict[Extras, bool] = {"thumbnails": question.thumbnails, "originals": question.originals}
    plan = [extras for extras, is_requested in requested.items() if is_requested]
    for extras in plan:
        _require(extras in public.offers, extras, f"this gallery does not offer {extras}")
    has_metadata = "metadata" in public.offers or not isinstance(question.where, Mapping)
    _require(has_metadata, "where", "this gallery does not offer metadata")
    plan += [extras for extras in _TEXTS if extras in public.offers][:1]  # metadata includes the names
    item, most = ID_BYTES + public.table.width, Kind.ANSWER.frame_limit
    sizes: dict[Extras, int] = {"none": item, "names": item + IMAGE_HEADER_BYTES + _UTF8 * LONGEST_NAME}
    return [
        (extras, min(most, Answer.header_bytes + public.map.set_size * sizes.get(extras, most)))
        for extras in plan or ["none"]
    ]


def count_together(public: PublicPart) -> int:
    """Return how many messages are paid, sent and ranked together: as many as have small answers."""
    answer: int = public.map.set_size * (ID_BYTES + public.table.width)
    return max(1, min(_MOST_TOGETHER, _TOGETHER_BYTES // answer))


def _read_all(protocol: ClientProtocol, replies: Sequence[_Replies]) -> Exception | None:
    """Read answers up to the first invalid one, and return its error. All of this depends on replies alone."""
    for reply in replies:
        try:
            reply.answers = [protocol.read_answer(data, extras) for extras, data in reply.parts]
        except Exception as error:
            return _to_unanswered(error, reply.key)
    return None


def measure_texts(replies: Sequence[_Replies], count: int | None) -> dict[str, int]:
    """Return how many texts of an answer are read, at most `count`, and the most bytes that they have."""
    texts = (reply.texts for reply in replies)
    lengths = [sorted(map(len, answer.contents)) if answer is not None else [] for answer in texts] or [[]]
    longest = [sizes[-(len(sizes) if count is None else count) :] for sizes in lengths]
    return {"texts": max(map(len, longest)), "text_bytes": max(map(sum, longest))}


def _rank_all(
    protocol: ClientProtocol, replies: Sequence[_Replies], k: int, payments: Sequence[_Payment], where: Filter | None
) -> Outcome:
    """Rank the candidates of each answer; stop at the first error, such as one of a filter."""
    results: list[Nearest] = []
    for reply, payment in zip(replies, payments, strict=False):
        try:
            results.append(_rank(protocol, reply, k, payment, where))
        except Exception as error:
            return Outcome(results, _to_unanswered(error, reply.key))
    return Outcome(results)


class _Names(Mapping[int, str]):
    """The names of all candidates by id, or else their external ids, read on demand."""

    def __init__(self, answer: Answer | None) -> None:
        self._ids, self._contents = (np.empty(0, np.uint32), ()) if answer is None else (answer.ids, answer.contents)
        self._has_details = answer is not None and answer.extras == "metadata"

    def find(self, number: int) -> ItemDetails:
        """Return the details of an item; none if the answer has no texts, or not of this item."""
        position = int(np.searchsorted(self._ids, number))
        if self._ids[position : position + 1].tolist() != [number]:
            return ItemDetails()
        content = self._contents[position]
        return read_details(content) if self._has_details else ItemDetails(content.decode())

    def __getitem__(self, number: int) -> str:
        if number not in self._ids:
            raise KeyError(number)
        details = self.find(number)
        return details.name or details.external_id or ""

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __len__(self) -> int:
        return len(self._ids)


def _rank(protocol: ClientProtocol, reply: _Replies, k: int, payment: _Payment, where: Filter | None) -> Nearest:
    """Rank the candidates of an answer that came in several parts, and filter them."""
    public, query, message, traffic = protocol.public, payment.query, payment.message, reply.traffic
    answer, names = reply.answers[0], _Names(reply.texts)
    has_images = answer.extras in ("thumbnails", "originals")
    ids, scores = rank_answer(public.table, query.queries, answer, k if where is None else len(answer.ids))
    (ids,), (values,) = ids, public.space.measure(query.encoded, scores)
    texts = [names.find(number) for number in ids.tolist()]
    images = [answer.contents[row] for row in np.searchsorted(answer.ids, ids)] if has_images else None
    return Nearest(
        matches=make_matches(ids, values, texts, images, metric=public.space.metric, where=where, k=k),
        way="message",
        metric=public.space.metric,
        code_recall=public.code_recall,
        guarantee=protocol.guarantee.as_seeded() if message.seeded else protocol.guarantee,
        key=payment.debit.key,
        repeated=payment.debit.repeated,
        n_candidates=len(answer.ids),
        mechanism=public.mechanism,
        bytes_sent=traffic.sent,
        bytes_received=traffic.received,
        answer=answer,
        names=names,
        remaining=payment.remaining,
        **_describe_set(public, query, message),
    )


def _describe_set(public: PublicPart, query: QueryRows, message: Message) -> dict[str, Any]:
    """Return the set that a message names, and how it suits the query; nothing for other mechanisms than covers."""
    if not isinstance(public.map, PublicMap):
        return {}
    named_set = int(message.arrays["sets"][0])
    return {
        "set": named_set,
        "n_sets": public.map.n_sets,
        "named_best_set": int(public.map.choose(query.directions)[0]) == named_set,
        "expected_share": find_share(public, query.directions, named_set),
    }


def make_matches(
    ids: NDArray[np.integer],
    values: NDArray[np.floating],
    details: Sequence[ItemDetails],
    images: Sequence[bytes | None] | None = None,
    *,
    metric: Metric,
    where: Filter | None = None,
    k: int | None = None,
) -> tuple[Match, ...]:
    """Return the first k ranked items that pass a filter, or all. It reads all of them: their number is public."""
    is_distance, most = metric == "euclidean", 1.0 if metric in NORMALIZED else np.inf  # rounding may exceed 1
    rows = zip(ids.tolist(), values.tolist(), details, images or [None] * len(ids), strict=True)
    matches = [
        Match(number, item.name, -value, image, item.external_id, item.metadata, value)
        if is_distance
        else Match(number, item.name, min(value, most), image, item.external_id, item.metadata)
        for number, value, item, image in rows
    ]
    if where is None:
        return tuple(matches[:k])
    if isinstance(where, Mapping):
        wanted = {name: encode_value(value) for name, value in where.items()}
        items = [match.metadata for match in matches]
        passes = [wanted == {name: encode_value(item[name]) for name in wanted if name in item} for item in items]
    else:
        passes = [bool(where(match)) for match in matches]
    return tuple(match for match, passed in zip(matches, passes, strict=True) if passed)[:k]


def check_many(rows: Any, keys: Sequence[str] | None) -> tuple[NDArray[np.float32], list[str]]:
    """Return checked rows and a key for each, before the first is asked about."""
    from nearveil.ledger import new_key

    features = as_rows(rows)
    if not is_in_range(features):
        raise QuestionError("rows", OUT_OF_RANGE)
    names = [new_key() for _ in features] if keys is None else list(keys)
    for key in names:
        check_text(key, "keys")
    if len(names) != len(features) or len(set(names)) != len(names):
        raise QuestionError("keys", f"there must be {len(features):,}, one for each row, and no two the same")
    return features, names


async def classify_image(session: Session, query: Image, gallery: str | None) -> Classified:
    """Classify an image locally. All requests are sent before the image is read; most calls send none."""
    cached = await session.fetch_model(gallery)
    since, period = session.clock.now(), extraction_period([query]) + classification_period(cached.model)
    async with private_step(session, since, period):
        return await asyncio.to_thread(_classify, session.features, cached, query)


def classification_period(model: "PublicDiscriminant") -> float:
    """Return the seconds to classify a row, from the sizes of the model."""
    directions = model.projection.n_directions
    return _CLASSIFYING + _CLASSIFYING_NUMBER * directions * (model.n_features + len(model.classes))


def _classify(features: FeatureMaker, cached: CachedModel, query: Image) -> Classified:
    """Extract the feature of an image and classify it. Probabilities are finite for any model."""
    (row,) = features.rows([query], cached.info.fingerprint, cached.info.dimension)
    model = cached.model
    with np.errstate(all="ignore"):  # numpy may be set to raise: an underflow for some features would be an error
        rows = normalize_rows(row[None], "query:")  # as records are
        probabilities = dict(zip(model.classes.tolist(), model.predict_proba(rows)[0].tolist(), strict=True))
    caution = ""  # depends on the model alone
    if n_noisy := len(model.noisy_classes):
        caution = (
            f"The model has much noise: {n_noisy} of its {len(model.classes)} classes have fewer than five times as "
            f"many records as there is noise on their count (± {model.noise_per_class:.2g}). Expect wrong answers."
        )
    label = max(probabilities, key=probabilities.__getitem__)
    return Classified(label, probabilities, NOTHING_SENT, model.guarantee, caution)
