"""Convert answers, accounts, history and errors to plain values for the page. No error holds a private value."""

import math
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nearveil.client import Match, Nearest, QuestionError, ReplyError, UnansweredError, UnreachableError
from nearveil.client.errors import DeclinedError
from nearveil.client.results import Classified
from nearveil.features import ImageError
from nearveil.features.extractor import FeatureError
from nearveil.features.images import TOO_LARGE
from nearveil.gallery.items import StoredItem
from nearveil.ledger import Account, LedgerError, OverBudgetError
from nearveil.ledger.budget import format_down, format_up
from nearveil.ledger.store import Entry
from nearveil.mechanisms.covers.channels import RandomizedResponse
from nearveil.metrics import METRIC_NAMES
from nearveil.privacy import Guarantee
from nearveil.privacy.events import PureDp
from nearveil.privacy.guarantee import format_factor

NOTHING = "No message was sent, and nothing was paid."


@dataclass(eq=False)
class PageError(Exception):
    """An error that the page shows to its user."""

    status: int  # HTTP status code
    code: str  # read by the page's script
    words: str
    paid: bool = False  # whether the query was paid for
    again: bool = False  # whether the query can be retried; a retry of a paid query is free

    def __str__(self) -> str:
        return self.words

    def to_response(self) -> JSONResponse:
        """Return the reply with this error."""
        body = {"code": self.code, "words": self.words, "paid": self.paid, "again": self.again}
        return JSONResponse(body, self.status)


def describe_too_large() -> PageError:
    """Return the error for an image above the size limits."""
    words = f"This image is too large: the limits are 64 megapixels and 64 MiB. Save a smaller copy. {NOTHING}"
    return PageError(413, "too_large", words)


def describe_failure() -> PageError:
    """Return the error for an unexpected exception."""
    return PageError(500, "failed", "Unexpected error. Reload the page.")


def _describe_image(error: ImageError) -> PageError:
    if error.reason == TOO_LARGE:
        return describe_too_large()
    words = f"This file cannot be used as an image: {_end_sentence(error.reason)} {NOTHING}"
    return PageError(422, "image", words)


def _describe_declined(error: DeclinedError) -> PageError:
    if error.status in (401, 403):
        words = f"The server rejected the token. Ask its operator for a new one, and restart nearveil ui. {NOTHING}"
        return PageError(502, "token", words)
    return PageError(502, "declined", f"The server refused: {_end_sentence(error.words)} {NOTHING}")


def _describe_unanswered(error: UnansweredError) -> PageError:
    if error.again:
        words = (
            f"The query is paid for, and has no answer yet: {_end_sentence(error.reason)} It is listed below; "
            "repeating it sends the same message and is free. A new query is charged."
        )
        return PageError(502, "unanswered", words, paid=True, again=True)
    words = (
        "The gallery changed its map while the query was in flight. The message is paid for, but can no longer be "
        "used. A new query uses the new map, and is charged."
    )
    return PageError(409, "map_changed", words, paid=True)


def _describe_value(error: Exception) -> PageError:
    if isinstance(error, QuestionError) and error.field == "extractor":
        words = f"This gallery's extractor is not available here: {_end_sentence(error.words)} {NOTHING}"
        return PageError(422, "extractor", words)
    return PageError(422, "question", f"{_end_sentence(error)} {NOTHING}")


def _end_sentence(text: object) -> str:
    return f"{str(text).rstrip('.')}."


# The page error for each type of error, and for types derived from it.
ERRORS: dict[type[Exception], Callable[[Any], PageError]] = {
    PageError: lambda error: error,
    Exception: lambda _: describe_failure(),
    HTTPException: lambda error: PageError(error.status_code, "path", "Not found."),
    RequestValidationError: lambda error: PageError(
        422, "question", f"Invalid: {', '.join(sorted({str(problem['loc'][-1]) for problem in error.errors()}))}."
    ),
    ValueError: _describe_value,
    ImageError: _describe_image,
    FeatureError: lambda _: PageError(
        422, "image", f"The extractor finds no features in this image; it looks blank. Choose another one. {NOTHING}"
    ),
    OverBudgetError: lambda error: PageError(
        409,
        "spent",
        f"This account has delta 0, and the message needs a delta: use another account. {NOTHING}"
        if math.isinf(error.cost)
        else f"Over budget: it would cost {format_up(error.cost)}, and {format_down(error.left)} of {error.epsilon:g} "
        f"is left. Choose a smaller epsilon, or use another account. {NOTHING}",
    ),
    UnreachableError: lambda _: PageError(
        502, "unreachable", f"The server does not answer. Is it running, and reachable from here? {NOTHING}"
    ),
    DeclinedError: _describe_declined,
    ReplyError: lambda _: PageError(
        502, "reply", f"The reply does not come from a nearveil server. Check the address. {NOTHING}"
    ),
    UnansweredError: _describe_unanswered,
    LedgerError: lambda error: PageError(503, "ledger", f"Ledger error: {_end_sentence(error)} No message was sent."),
    ModuleNotFoundError: lambda error: PageError(503, "missing", f"Missing package: {_end_sentence(error)} {NOTHING}"),
}


MAX_CANDIDATES = 240  # in the server's pane
MAX_CLASSES = 50  # the most probable first
_HEX_BYTES = 24  # of a message, at either end
_MAX_TEXT = 10_000  # characters of a value of metadata
_MAX_PIXELS, _MAX_BYTES = 512, 1 << 17  # side and size of a thumbnail


def view_nearest(
    nearest: Nearest, balance: dict[str, Any], message: bytes = b"", *, images: bool = False
) -> dict[str, Any]:
    """Return the matches, the cost and the server's view, with the candidates of a paid message."""
    view: dict[str, Any] = {
        "kind": "free",
        "way": nearest.way,
        "worth": nearest.quality_summary,
        "metric": METRIC_NAMES[nearest.metric],
        "saw": {
            "messages": [
                {"bytes": len(data), "hex": shorten_hex(data)} for data in (nearest.sealed or [message]) if data
            ],
            "total": nearest.n_candidates,
        },
        "got": [{**view_item(match, match.image or b""), "value": round(match.value, 4)} for match in nearest.matches],
        "promise": str(nearest.guarantee),
        "balance": balance,
        "cost": "0",
    }
    if (answer := nearest.answer) is None:
        return view
    # Ordered by id, the same for every image.
    shown = list(zip(answer.ids.tolist(), answer.contents if images else [b""] * len(answer.ids), strict=True))
    view["saw"] |= {
        "mechanism": nearest.mechanism,
        "set": nearest.set,
        "n_sets": nearest.n_sets,
        "candidates": [
            {"id": number, "name": nearest.names.get(number, ""), "image": make_image_address(image)}
            for number, image in shown[:MAX_CANDIDATES]
        ],
    }
    epsilon, is_pure = nearest.guarantee.epsilon, nearest.guarantee.delta == 0
    return view | {
        "kind": "nearest",
        "missed": not nearest.named_best_set,
        "epsilon": epsilon,
        "odds": format_odds(epsilon) if is_pure else None,
        "right": None if nearest.set is None else round(RandomizedResponse(epsilon, nearest.n_sets).hit, 4),
        "repeated": nearest.repeated,
    }


def view_item(item: Match | StoredItem, image: bytes) -> dict[str, Any]:
    """Return an item with its texts; the owner's key `text` stands apart from other metadata."""
    texts = {name: str(value)[:_MAX_TEXT] for name, value in item.metadata.items()}
    return {
        "id": item.id,
        "name": item.name or item.external_id or "",
        "external_id": item.external_id,
        "text": texts.pop("text", ""),
        "metadata": texts,
        "image": make_image_address(image),
    }


def view_classified(result: Classified, balance: dict[str, Any]) -> dict[str, Any]:
    """Return the classes of an image by the model of a protected gallery, and both guarantees."""
    return {
        "kind": "classified",
        "label": result.label,
        "probabilities": sorted(result.probabilities.items(), key=lambda pair: -pair[1])[:MAX_CLASSES],
        "classes": len(result.probabilities),
        "caution": result.caution,
        "gallery_guarantee": str(result.gallery_guarantee),
        "promise": str(result.query_guarantee),
        "balance": balance,
    }


def make_image_address(content: bytes) -> str:
    """Return a WebP thumbnail as a data URL; empty if it is missing, invalid or too large."""
    # A few bytes of WebP can hold a gigabyte of pixels, and a browser would allocate them all.
    if not 0 < max(_read_size(content)) <= _MAX_PIXELS or len(content) > _MAX_BYTES:
        return ""
    return f"data:image/webp;base64,{b64encode(content).decode()}"


def shorten_hex(content: bytes) -> str:
    """Return bytes in hexadecimal, without the middle if there are many."""
    if len(content) <= 2 * _HEX_BYTES:
        return content.hex(" ")
    return f"{content[:_HEX_BYTES].hex(' ')} … {content[-_HEX_BYTES:].hex(' ')}"


def _read_size(content: bytes) -> tuple[int, int]:
    """Return width and height from the header of a WebP file (RFC 9649), or zeros if it is invalid."""
    kind, body = content[12:16], content[20:30]
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP" or len(body) < 10:
        return 0, 0
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L":
        packed = int.from_bytes(body[1:5], "little")
        return 1 + (packed & 0x3FFF), 1 + (packed >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    return 0, 0


def format_odds(epsilon: float) -> str:
    """Return the largest factor by which odds can change, rounded up."""
    return format_factor(epsilon) if epsilon < 14 else "more than a million"


def describe_balance(account: Account) -> dict[str, Any]:
    """Return the balance of an account, as numbers and as text."""
    balance = account.balance()
    has_odds = balance.delta == 0 and balance.spent > 0  # a delta has no such factor
    return {
        "account": balance.account,
        "epsilon": balance.epsilon,
        "delta": balance.delta,
        "spent": balance.spent if math.isfinite(balance.spent) else balance.epsilon,
        "left": balance.left,
        "odds": format_odds(balance.spent) if has_odds else None,
        "spent_words": format_up(balance.spent),
        "left_words": format_down(balance.left),
    }


def preview_cost(account: Account, guarantee: Guarantee, count: int = 1) -> dict[str, Any]:
    """Return the cost of `count` equal releases. Nothing is spent."""
    preview = account.preview([(guarantee, count)])
    return {
        "allowed": preview.allowed,
        "cost": format_up(preview.cost),
        "before": format_down(preview.before.left),
        "after": format_down(preview.left) if preview.allowed else format_down(preview.before.left),
        "words": preview.reason if not preview.allowed else str(preview),
    }


def view_entry(entry: Entry) -> dict[str, Any]:
    """Return an entry of an account's history; of a stored message, only the length."""
    titles = {
        "opened": "Account opened",
        "quota": "Quota set",
        "cap": "Cap opened",
        "debit": "Paid",
        "take": "Counted in a cap",
        "message": "Message stored",
    }
    paid = ", ".join(
        f"{count} times {_describe_event(event)}" if count > 1 else _describe_event(event)
        for event, count in entry.events
    )
    size = "" if entry.message is None else f"{len(entry.message):,} bytes"
    return {
        "sequence": entry.sequence,
        "what": titles.get(entry.kind, entry.kind),
        "time": entry.time,
        "key": entry.key or "",
        "detail": paid or size,
    }


def _describe_event(event: Any) -> str:
    return f"epsilon {event.epsilon:g}" if isinstance(event, PureDp) else type(event).__name__
