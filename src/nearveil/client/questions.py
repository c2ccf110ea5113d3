"""Questions of a client: the nearest items of an open gallery, and the class of an image by a published model.

Requests are a function of messages, nonces and public facts, never of a feature, of scores or of a choice
(``docs/theory/service.md``; tested by ``tests/service/test_client_wire.py``). All work on private values runs in a
:func:`~nearveil.client.timing.private_step`, which ends at a public deadline, on success and on error.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from dp_accounting import NoOpDpEvent
from numpy.typing import NDArray

from nearveil.client.copies import encode_value
from nearveil.client.errors import QuestionError, UnansweredError, UnreachableError
from nearveil.client.images import FeatureMaker, Image
from nearveil.client.results import Classified, Match, Nearest
from nearveil.client.session import OPEN_ACCOUNT, CachedModel, Payer, Session, Traffic, fit_protocol, read_balance
from nearveil.client.timing import choice_period, extraction_period, private_step, question_period, run_to_end
from nearveil.client.transport import read_body
from nearveil.gallery.answers import IMAGE_HEADER_BYTES, LONGEST_NAME, Answer, Extras, ItemDetails, read_details
from nearveil.gallery.codes import ID_BYTES
from nearveil.mechanisms import Message
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
"""Select matches: those whose metadata has these values, or those for which a function is true."""
NOTHING_SENT = Guarantee(
    epsilon=0.0,
    delta=0.0,
    protects="query",
    unit="record",
    relation="replace",
    basis=Basis("no request depends on the query", "docs/theory/service.md"),
    events=(NoOpDpEvent(),),
)
_TEXTS: tuple[Extras, ...] = ("metadata", "names")  # extras that are text
_UTF8 = 4  # bytes of a character, at most
_CLASSIFYING = 0.1  # seconds to classify, besides the numbers of the model
_CLASSIFYING_NUMBER = 2e-8  # seconds for each number of the projection and the weights


@dataclass(frozen=True)
class NearestQuestion:
    """The arguments of a question, checked as far as that is possible without a gallery."""

    query: Image = field(repr=False)
    k: int | None
    epsilon: float | None  # None and 0 are the same: only free ways
    candidates: float | None
    gallery: str | None
    thumbnails: bool
    originals: bool
    key: str | None
    rng: Source | None
    by: Method = "auto"
    where: Filter | None = field(default=None, repr=False)

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
        if self.key is not None:
            check_text(self.key, "key")


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


async def ask_nearest(session: Session, question: NearestQuestion) -> Nearest:
    """Find the nearest items with one differentially private message: prepare, pay, send, rank."""
    # The order is the guarantee: the debit is durable before the message exists, nothing is sent after the ranking, and
    # every private step ends at a public deadline, on success and on error (docs/theory/service.md, Theorem 3).
    from nearveil.ledger import new_key  # a client that never pays loads no ledger

    traffic, payment = Traffic(), None
    try:
        account = await session.require_account(question.gallery)
        info, (row,) = await session.prepare_features([question.query], question.gallery)
        check_filter(question.where, info)
        public = await session.fetch_map(info, question.candidates, traffic)
    except UnreachableError as error:
        raise UnreachableError(f"{error}; nothing was paid", again=error.again) from None
    assert question.epsilon is not None
    protocol = await asyncio.to_thread(fit_protocol, public, question.epsilon)
    k, plan = limit_count(question.k, public.map.set_size), _plan_requests(question, public)
    key = question.key or new_key()
    try:
        async with private_step(session, traffic.last_reply_at, question_period(public)):
            payment = await run_to_end(lambda: _pay(protocol, row, account, key, question.rng))
        assert payment.debit.message is not None
        replies: list[tuple[Extras, bytes]] = []
        for extras, most in plan:
            frame = write_query(payment.debit.message, extras)
            response = await session.send_query(info, frame, payment.debit.nonce, most, traffic)
            if response.status >= 400 and response.media_type == FRAME:
                protocol.read_answer(response.body, extras)  # raises the reason
            replies.append((extras, read_body(response)))
        size = sum(len(data) for _, data in replies)
        text_bytes = sum(len(data) for extras, data in replies if extras in _TEXTS)
        filtered = question.where is not None
        period = choice_period(public, len(replies), size, text_bytes=text_bytes, filtered=filtered)
        async with private_step(session, traffic.last_reply_at, period):
            return await asyncio.to_thread(_rank, protocol, replies, k, payment, traffic, question.where)
    except Exception as error:
        if payment is None:
            raise
        again = not isinstance(error, OutdatedMapError)
        raise UnansweredError(str(error).rstrip("."), key, again=again) from error
    except BaseException as interrupt:
        interrupt.add_note(f"key={key!r} repeats the query: it is paid for at most once")
        raise


class _Payment(NamedTuple):
    """A durable debit, its stored message, the encoded query, and what is left in the account if it says so."""

    debit: "Debit"
    message: Message
    query: QueryRows
    remaining: float | None


def _pay(protocol: ClientProtocol, row: NDArray[Any], account: Payer, key: str, rng: Source | None) -> _Payment:
    """Debit the account and store the message; translate errors of a key that was spent."""
    query = encode_queries(protocol.public, row, "query:")
    try:
        debit, message = protocol.pay_direction(query.directions, account, key, rng)
    except OutdatedMapError:
        words = "the gallery has another map than when this key was paid for"
        raise UnansweredError(words, key, again=False) from None
    except ProtocolError as error:
        raise QuestionError("key", str(error)) from None
    remaining = None
    with suppress(Exception):  # the message is paid for: it must be sent
        remaining = debit.balance().left
    return _Payment(debit, message, query, remaining)


def check_filter(where: Filter | None, info: GalleryInfo) -> None:
    """Refuse a filter by a key that no item has. Nothing is sent for it: a filter is private."""
    keys = info.metadata_keys
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


def _rank(
    protocol: ClientProtocol,
    replies: Sequence[tuple[Extras, bytes]],
    k: int,
    payment: _Payment,
    traffic: Traffic,
    where: Filter | None,
) -> Nearest:
    """Rank the candidates of an answer that came in several replies, and filter them."""
    public, query, message = protocol.public, payment.query, payment.message
    answers = [protocol.read_answer(data, extras) for extras, data in replies]
    answer, named_set = answers[0], int(message.arrays["sets"][0])
    details: dict[int, ItemDetails] = {}
    for part in answers:
        if part.extras in _TEXTS:
            decode = read_details if part.extras == "metadata" else lambda data: ItemDetails(data.decode())
            details |= {number: decode(data) for number, data in zip(part.ids.tolist(), part.contents, strict=True)}
    has_images = answer.extras in ("thumbnails", "originals")
    ids, scores = rank_answer(public.table, query.queries, answer, k if where is None else len(answer.ids))
    (ids,), (values,) = ids, public.space.measure(query.encoded, scores)
    texts = [details.get(number, ItemDetails()) for number in ids.tolist()]
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
        set=named_set,
        n_sets=public.map.n_sets,
        bytes_sent=traffic.sent,
        bytes_received=traffic.received,
        answer=answer,
        names={number: item.name for number, item in details.items()},
        named_best_set=int(public.map.choose(query.directions)[0]) == named_set,
        expected_share=find_share(public, query.directions, named_set),
        remaining=payment.remaining,
    )


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


def check_many(
    rows: Any, keys: Sequence[str] | None, metric: Metric = "euclidean"
) -> tuple[NDArray[np.float32], list[str]]:
    """Return checked rows and a key for each, before the first is asked about."""
    from nearveil.ledger import new_key

    features = as_rows(rows)
    if not is_in_range(features):
        raise QuestionError("rows", OUT_OF_RANGE)
    if metric != "euclidean" and not features.any(axis=1).all():
        raise QuestionError(
            "rows", f"number {features.any(axis=1).argmin()} must not be all zeros: it has no direction"
        )
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
