"""What a protected gallery says of an image: the query protected by a release, the records by their votes."""

import math
import secrets

from dp_accounting import NoOpDpEvent

from nearveil.ledger import new_key
from nearveil.ledger._core import check_text
from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.noise import Source
from nearveil.release._channel import checked_epsilon
from nearveil.retrieval._protocol_client import ClientProtocol
from nearveil.retrieval._protocol_errors import OutdatedMapError, RefusedError
from nearveil.retrieval._wire_schema import MapChanged, Refusal, read
from nearveil.service._client_errors import ReplyError, unanswered
from nearveil.service._dummies import Hidden
from nearveil.service._model import FRAME, Classification, GalleryInfo
from nearveil.service._private_image import Image
from nearveil.service._replies import Steps, Tally, done, json_of
from nearveil.service._results import Classified
from nearveil.service._steps import Asker, telling
from nearveil.service._transport import Response

_MOST = 1 << 20  # bytes of votes
_ANY = 1.0  # an epsilon, where none plays a part
_NOTHING_TOLD = Guarantee(
    epsilon=0.0,
    delta=0.0,
    protects="query",
    unit="record",
    relation="replace",
    basis=Basis("every set is asked for, in order", "docs/theory/service.md"),
    events=(NoOpDpEvent(),),
)


def classify(
    asker: Asker, image: Image, epsilon: float, gallery: str | None, key: str | None, rng: Source | None
) -> Steps[Classified]:
    """Ask a protected gallery for the class of an image.

    Parameters
    ----------
    asker : Asker
    image : Image
    epsilon : float
        0 asks for every set: the requests are the same for every image, nothing is told and nothing is paid.
    gallery : str or None
    key : str or None
    rng : Source or None

    Returns
    -------
    Classified
    """
    nothing = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool) and epsilon == 0
    if not nothing:
        checked_epsilon(epsilon)
        asker.payer()
    key = new_key() if key is None else check_text(key, "key")
    info, (row,) = yield from asker.prepared([image], gallery, "protected")
    tally = Tally()
    public = yield from asker.public(info, None, tally)
    client = yield from done(lambda: ClientProtocol(_ANY if nothing else epsilon, public=public))
    if nothing:
        own = yield from done(lambda: client.good_set(row))
        yield from asker.end_slot(tally.heard, client.question_period())
        every = yield from _every(asker, info, client)
        return _result(every[own], _NOTHING_TOLD, key, repeated=False)
    account = asker.payer()
    with telling(key):
        hidden = Hidden(account, key, (), rng)
        question = yield from done(lambda: hidden.ask(client, row))
        yield from asker.end_slot(tally.heard, client.question_period())
        try:
            found = yield from _votes(asker, info, question, hidden.nonce)
        except Exception as error:
            raise unanswered(error, key) from error
        return _result(found, client.guarantee, key, repeated=hidden.repeated)


def _every(asker: Asker, info: GalleryInfo, client: ClientProtocol) -> Steps[list[Classification]]:
    """Ask for all sets. One that is not answered is the end of it, whichever set was wanted."""
    found: list[Classification] = []
    nonce = secrets.token_hex(16)  # nothing is paid, so no ledger has one
    for question in client.every_question():
        found += [(yield from _votes(asker, info, question, nonce))]
    return found


def _votes(asker: Asker, info: GalleryInfo, question: bytes, nonce: str) -> Steps[Classification]:
    response = yield from asker.question("classify", info, question, nonce, most=_MOST, tally=Tally())
    return _read(response)


def _read(response: Response) -> Classification:
    if response.kind == FRAME:
        found: MapChanged | Refusal = read(response.body, MapChanged, Refusal)
        raise OutdatedMapError(found) if isinstance(found, MapChanged) else RefusedError(found)
    votes = json_of(response, Classification)
    if votes.label not in votes.votes or not all(map(math.isfinite, votes.votes.values())):
        raise ReplyError("the server's reply has votes that are no numbers, or a label without votes")
    if votes.promise.protects != "database":
        raise ReplyError("the server's reply has a promise that is not to its records")
    return votes


def _result(votes: Classification, told: Guarantee, key: str, *, repeated: bool) -> Classified:
    return Classified(votes.label, votes.votes, told, votes.promise, key, repeated)
