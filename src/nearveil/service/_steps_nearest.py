"""The nearest images: find the map, pay, ask, choose. Nothing is sent after the choice."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from nearveil.frames import DEFAULT_LIMITS, HEADER_BYTES
from nearveil.gallery.answers import IMAGE_HEADER_BYTES, LONGEST_NAME, Answer, Extras
from nearveil.gallery.codes import ID_BYTES
from nearveil.ledger import new_key
from nearveil.mechanisms.covers.channel import checked_epsilon
from nearveil.privacy.checks import check_text
from nearveil.privacy.noise import Source
from nearveil.protocol.client import ClientProtocol
from nearveil.protocol.wire import PublicPart, Query
from nearveil.service._client_errors import QuestionError, unanswered
from nearveil.service._dummies import MOST, Hidden, dummy_messages
from nearveil.service._private_image import Image, Images
from nearveil.service._replies import Steps, Tally, done, frame_of, refusal
from nearveil.service._results import Match, Nearest
from nearveil.service._steps import Asker, telling
from nearveil.service._transport import Response

USUAL = 8  # neighbours
_UTF8 = 4  # bytes of a character, at most


@dataclass(frozen=True)
class Asked:
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


def nearest(asker: Asker, asked: Asked) -> Steps[Nearest]:
    """Find the nearest images."""
    account, tally = (yield from asker.payer(asked.gallery)), Tally()
    info, rows = yield from asker.prepared([asked.image, *asked.dummies], asked.gallery)
    public = yield from asker.public(info, asked.candidates, tally)
    client = yield from done(lambda: ClientProtocol(asked.epsilon, public=public))
    count, plan = _count(asked.k, client.candidates), _plan(asked, public)
    key = new_key() if asked.key is None else asked.key

    def pay() -> Hidden:
        hidden = Hidden(account, key, dummy_messages(rows[1:], public, asked.epsilon, asked.rng), asked.rng)
        hidden.ask(client, rows[0])
        return hidden

    with telling(key):
        hidden = yield from done(pay)
        yield from asker.end_slot(tally.heard, client.question_period(len(rows)))
        try:
            replies: list[tuple[Extras, bytes]] = []
            for message in hidden.messages:
                for extras in plan:
                    body, most = Query(message, extras).to_bytes(), _most(public, extras)
                    response = yield from asker.question(info, body, hidden.nonce, most=most, tally=tally)
                    replies.append((extras, _taken(client, response, extras)))
            result = yield from done(lambda: _result(client, replies, count, hidden, key, tally))
            # Whatever the caller does next, such as hanging up, must not tell how long the choice took.
            size = sum(len(data) for _, data in replies)
            yield from asker.end_slot(tally.heard, client.choice_period(len(replies), size))
            return result
        except Exception as error:
            raise unanswered(error, key) from error


def _count(k: int | None, candidates: int) -> int:
    if k is None:
        return min(USUAL, candidates)
    if k > candidates:
        raise QuestionError("k", f"at most {candidates}, the images of an answer")
    return k


def _plan(asked: Asked, public: PublicPart) -> tuple[Extras, ...]:
    """Return what comes with all candidates; each in a request of its own."""
    wanted: list[Extras] = []
    for word, asks in (("thumbnails", asked.thumbnails), ("originals", asked.originals)):
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


def _taken(client: ClientProtocol, response: Response, extras: Extras) -> bytes:
    """Return the frame of an answer, as it came; raise if the server does not answer."""
    data = frame_of(response)
    if response.status != 200:
        client.read_answer(data, extras)  # says why
        raise refusal(response)
    return data


def _result(
    client: ClientProtocol, replies: Sequence[tuple[Extras, bytes]], k: int, hidden: Hidden, key: str, tally: Tally
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
        repeated=hidden.repeated,
        candidates=len(found.answer.ids),
        sets=tuple(int(message["sets"][0]) for message in hidden.messages),
        n_sets=client.public.map.n_sets,
        bytes_sent=tally.sent,
        bytes_received=tally.received,
        found=found,
        names=names,
    )
