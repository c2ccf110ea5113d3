"""The questions of a client: the nearest images of an open gallery, and the class of an image by a published model."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from dp_accounting import NoOpDpEvent
from numpy.typing import NDArray

from nearveil.frames import DEFAULT_LIMITS, HEADER_BYTES
from nearveil.gallery.answers import IMAGE_HEADER_BYTES, LONGEST_NAME, Answer, Extras
from nearveil.gallery.codes import ID_BYTES
from nearveil.mechanisms.covers.channel import checked_epsilon
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.checks import check_text
from nearveil.privacy.noise import Source
from nearveil.protocol.client import ClientProtocol
from nearveil.protocol.wire import PublicPart, Query
from nearveil.service.client.errors import QuestionError, ReplyError, unanswered
from nearveil.service.client.images import Image, Images, decode_images
from nearveil.service.client.payment import MOST, PaidMessages, make_dummy_messages
from nearveil.service.client.results import Classified, Match, Nearest
from nearveil.service.client.session import EXTRACTION_PERIOD, Session, finish_in_thread
from nearveil.service.client.transport import Response, Tally, make_refusal, read_frame

if TYPE_CHECKING:
    from nearveil.votes import PublicDiscriminant

CLASSIFYING_PERIOD = 0.1  # seconds: a matrix of at most 16 MiB and a row
_NOTHING_TOLD = Guarantee(
    epsilon=0.0,
    delta=0.0,
    protects="query",
    unit="record",
    relation="replace",
    basis=Basis("no request depends on the image", "docs/theory/service.md"),
    events=(NoOpDpEvent(),),
)
USUAL = 8  # neighbours
_UTF8 = 4  # bytes of a character, at most


@dataclass(frozen=True)
class NearestQuestion:
    """A question as the user puts it, checked as far as that is possible without a gallery."""

    image: Image = field(repr=False)
    k: int | None
    epsilon: float
    candidates: float | None
    gallery: str | None
    thumbnails: bool
    originals: bool
    dummies: Images = field(repr=False)
    key: str | None
    rng: Source | None

    def __post_init__(self) -> None:
        checked_epsilon(self.epsilon)
        if self.k is not None and (isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1):
            raise QuestionError("k", "it must be a whole number of at least 1")
        fraction = self.candidates
        if fraction is not None and not (isinstance(fraction, (int, float)) and 0 < fraction <= 1):
            raise QuestionError("candidates", "it must be a fraction of the gallery, above 0 and at most 1")
        if self.thumbnails and self.originals:
            raise QuestionError("originals", "ask for thumbnails or for originals, not for both")
        if len(self.dummies) > MOST:
            raise QuestionError("dummies", f"at most {MOST}")
        if self.key is not None:
            check_text(self.key, "key")


async def ask_nearest(session: Session, question: NearestQuestion) -> Nearest:
    """Find the nearest images: find the map, pay, ask, choose. Nothing is sent after the choice."""
    account, tally = await session.find_payer(question.gallery), Tally()
    info, rows = await session.prepare_features([question.image, *question.dummies], question.gallery)
    public = await session.fetch_map(info, question.candidates, tally)
    client = await asyncio.to_thread(ClientProtocol, question.epsilon, public=public)
    count, plan = _count(question.k, client.candidates), _plan_extras(question, public)
    key = make_key(question.key)

    def pay() -> PaidMessages:
        dummies = make_dummy_messages(rows[1:], public, question.epsilon, question.rng)
        paid = PaidMessages(account, key, dummies, question.rng)
        paid.ask(client, rows[0])
        return paid

    with _noting(key):
        paid = await finish_in_thread(pay)
        await session.end_slot(tally.heard, client.question_period(len(rows)))
        try:
            replies: list[tuple[Extras, bytes]] = []
            for message in paid.messages:
                for extras in plan:
                    body, most = Query(message, extras).to_bytes(), _most(public, extras)
                    response = await session.send_query(info, body, paid.nonce, most=most, tally=tally)
                    replies.append((extras, _read_reply(client, response, extras)))
            result = await asyncio.to_thread(_choose, client, replies, count, paid, key, tally)
            # Whatever the caller does next, such as hanging up, must not tell how long the choice took.
            size = sum(len(data) for _, data in replies)
            await session.end_slot(tally.heard, client.choice_period(len(replies), size))
            return result
        except Exception as error:
            raise unanswered(error, key) from error


async def classify_image(session: Session, image: Image, gallery: str | None) -> Classified:
    """Classify an image at home. All requests are sent before the image is looked at; most calls send none."""
    kept = await session.fetch_model(gallery)
    since = session.clock.now()
    given = await asyncio.to_thread(decode_images, [image])
    (row,) = await asyncio.to_thread(session.features.extract, given, kept.info)
    session.features.check(given, [row], kept.info)
    chances = await asyncio.to_thread(_find_probabilities, kept.model, row)
    # Whatever the caller does next, such as hanging up, must not tell how long this took.
    await session.end_slot(since, EXTRACTION_PERIOD if given[0].ndim > 1 else CLASSIFYING_PERIOD)
    found = dict(zip(kept.model.classes.tolist(), chances, strict=True))
    label = max(found, key=found.__getitem__)
    return Classified(label, found, _NOTHING_TOLD, kept.model.guarantee, _caution(kept.model))


def _caution(model: "PublicDiscriminant") -> str:
    """Return a warning of much noise, or nothing. It depends on the model alone."""
    noisy = len(model.noisy_classes)
    if not noisy:
        return ""
    return (
        f"The model has much noise: {noisy} of its {len(model.classes)} classes have fewer than five times as many "
        f"records as there is noise on their count (± {model.noise_per_class:.2g}). Expect wrong answers."
    )


def _find_probabilities(model: "PublicDiscriminant", row: NDArray[Any]) -> list[float]:
    with np.errstate(all="ignore"):  # a model of bad will may hold numbers of any size
        try:
            found = model.predict_proba(row[None])[0]
        except ValueError:
            found = np.array([np.nan])
    if not np.isfinite(found).all():
        raise ReplyError("the model gives no probabilities: its numbers are beyond all bounds")
    chances: list[float] = found.tolist()
    return chances


@contextmanager
def _noting(key: str) -> Iterator[None]:
    """Tell whoever interrupts or cancels a question that may be paid for how to go on."""
    try:
        yield
    except Exception:
        raise
    except BaseException as stopped:
        stopped.add_note(note_key(key))
        raise


def note_key(key: str) -> str:
    """Return how to go on with a question that was stopped."""
    return f"key={key!r} asks the same again: it is paid for at most once"


def make_key(key: str | None) -> str:
    """Return the key that was given, or a new one."""
    if key is not None:
        return key
    from nearveil.ledger import new_key  # a client that never pays loads no ledger

    return new_key()


def _count(k: int | None, candidates: int) -> int:
    if k is None:
        return min(USUAL, candidates)
    if k > candidates:
        raise QuestionError("k", f"at most {candidates}, the images of an answer")
    return k


def _plan_extras(question: NearestQuestion, public: PublicPart) -> tuple[Extras, ...]:
    """Return what comes with all candidates; each in a request of its own."""
    wanted: list[Extras] = []
    for word, asks in (("thumbnails", question.thumbnails), ("originals", question.originals)):
        if asks and word not in public.offers:
            raise QuestionError(word, f"this gallery does not offer {word}")
        if asks:
            wanted.append(word)  # type: ignore[arg-type]
    if "names" in public.offers:
        wanted.append("names")
    return tuple(wanted) or ("none",)


def _most(public: PublicPart, extras: Extras) -> int:
    """Return how many bytes an answer may have."""
    whole = HEADER_BYTES + DEFAULT_LIMITS.answer
    if extras not in ("none", "names"):
        return whole
    name = IMAGE_HEADER_BYTES + _UTF8 * LONGEST_NAME if extras == "names" else 0
    return min(whole, Answer.header_bytes + public.map.set_size * (ID_BYTES + public.table.width + name))


def _read_reply(client: ClientProtocol, response: Response, extras: Extras) -> bytes:
    """Return the frame of an answer, as it came; raise if the server does not answer."""
    data = read_frame(response)
    if response.status != 200:
        client.read_answer(data, extras)  # says why
        raise make_refusal(response)
    return data


def _choose(
    client: ClientProtocol, replies: Sequence[tuple[Extras, bytes]], k: int, paid: PaidMessages, key: str, tally: Tally
) -> Nearest:
    answers = [client.read_answer(data, extras) for extras, data in replies]
    first = answers[0].extras
    names: dict[int, str] = {}
    for answer in answers:
        if answer.extras == "names":
            for number, name in zip(answer.ids.tolist(), answer.images, strict=True):
                names.setdefault(number, name.decode())
    found = client.choose([answer for answer in answers if answer.extras == first], k)
    images: Sequence[bytes | None] = found.images if first in ("thumbnails", "originals") else [None] * k
    scores = found.scores.tolist()
    matches = tuple(
        Match(number, names.get(number, ""), min(score, 1.0), image)  # codes and rounding may take it beyond
        for number, score, image in zip(found.ids.tolist(), scores, images, strict=True)
    )
    return Nearest(
        matches=matches,
        guarantee=client.guarantee,
        key=key,
        repeated=paid.repeated,
        candidates=len(found.answer.ids),
        sets=tuple(int(message["sets"][0]) for message in paid.messages),
        n_sets=client.public.map.n_sets,
        bytes_sent=tally.sent,
        bytes_received=tally.received,
        found=found,
        names=names,
    )
