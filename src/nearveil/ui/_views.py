"""Answers, accounts, history, maps and errors as the page shows them: plain values; no error holds anything private."""

import math
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.client import Match, Nearest, QuestionError, ReplyError, UnansweredError, UnreachableError
from nearveil.client.errors import DeclinedError
from nearveil.client.results import Classified
from nearveil.features import ImageError
from nearveil.features.extractor import FeatureError
from nearveil.features.images import TOO_LARGE
from nearveil.ledger import Account, Ledger, LedgerError, OverBudgetError
from nearveil.ledger.budget import format_down, format_up
from nearveil.ledger.entries import Entry
from nearveil.ledger.views import count_affordable
from nearveil.mechanisms.covers.covers import RandomizedResponse
from nearveil.privacy import Basis, Guarantee, compose_events
from nearveil.privacy.events import PureDp
from nearveil.privacy.guarantee import format_factor
from nearveil.privatemail.manifold import SupervisedManifold
from nearveil.search.outlook import Singles, unit_prototypes
from nearveil.wire.client import PublicPart, project_rows

_NOTHING = "No message was sent, and nothing was paid."


@dataclass(eq=False)
class Trouble(Exception):  # noqa: N818
    """One thing that went wrong, as it is told."""

    status: int  # of HTTP
    code: str  # for the page's script
    words: str
    paid: bool = False  # whether the question was paid for
    again: bool = False  # whether the same question may be asked again; once paid for it costs nothing more

    def __str__(self) -> str:
        return self.words


@singledispatch
def describe_error(error: Exception) -> Trouble:
    """Return an error of a question, or of looking at a ledger, in words."""
    raise error


def describe_too_large() -> Trouble:
    """Return what is said of an image beyond the limits."""
    words = f"This image is too large: at most 64 megapixels and 64 MiB are read. Save a smaller copy. {_NOTHING}"
    return Trouble(413, "too_large", words)


def describe_failure() -> Trouble:
    """Return what is said where nobody knows more."""
    return Trouble(500, "failed", "Something went wrong here that nobody thought of. Load the page anew.")


def describe_new_listing() -> Trouble:
    """Return what is said where a gallery has changed what its images are compared by."""
    words = f"The gallery has other features than when it was listed. It is listed anew: ask again. {_NOTHING}"
    return Trouble(409, "listing", words)


def describe_spoiled() -> Trouble:
    """Return what is said of an error after the debit: whatever it says itself, something was paid."""
    words = (
        "The question is paid for, and something went wrong here before its answer could be shown. It waits "
        "below: asking it again costs nothing."
    )
    return Trouble(500, "failed", words, paid=True, again=True)


def _describe_image(error: ImageError) -> Trouble:
    if error.reason == TOO_LARGE:
        return describe_too_large()
    words = f"This file cannot be used as an image. It is {_end_sentence(error.reason)} {_NOTHING}"
    return Trouble(422, "image", words)


def _describe_declined(error: DeclinedError) -> Trouble:
    if error.status in (401, 403):
        words = f"The server refused the token. Ask its operator for a new one, and start again. {_NOTHING}"
        return Trouble(502, "token", words)
    return Trouble(502, "declined", f"The server says no: {_end_sentence(error.words)} {_NOTHING}")


def _describe_unanswered(error: UnansweredError) -> Trouble:
    if error.again:
        words = (
            f"The question is paid for, and has no answer yet: {_end_sentence(error.reason)} It waits below: asking it "
            "again sends the same message and costs nothing. A new question pays anew."
        )
        return Trouble(502, "unanswered", words, paid=True, again=True)
    words = (
        "The gallery changed its map while the question was on its way. The message was paid for and is of no "
        "more use. Asking again is a new question, about the new map, and pays anew."
    )
    return Trouble(409, "map_changed", words, paid=True)


def _describe_question(error: QuestionError) -> Trouble:
    if error.field == "extractor":
        words = f"The features of this gallery cannot be made here: {_end_sentence(error.words)} {_NOTHING}"
        return Trouble(422, "extractor", words)
    return _describe_value(error)


def _describe_value(error: Exception) -> Trouble:
    return Trouble(422, "question", f"{_end_sentence(str(error))} {_NOTHING}")


def _end_sentence(text: object) -> str:
    return f"{str(text).rstrip('.')}."


_DESCRIBED: dict[type[Exception], Callable[[Any], Trouble]] = {
    Trouble: lambda error: error,
    ValueError: _describe_value,
    ImageError: _describe_image,
    FeatureError: lambda _: Trouble(
        422,
        "image",
        f"Nothing can be recognised in this image: it looks like a blank page. Take another. {_NOTHING}",
    ),
    OverBudgetError: lambda error: Trouble(
        409,
        "spent",
        f"The budget does not allow this: it would cost {format_up(error.cost)}, and {format_down(error.left)} of "
        f"{error.epsilon:g} is left. Ask with a smaller epsilon, or end here: what is spent cannot be taken back. "
        f"{_NOTHING}",
    ),
    UnreachableError: lambda _: Trouble(
        502, "unreachable", f"The server does not answer. Is it running, and reachable from here? {_NOTHING}"
    ),
    DeclinedError: _describe_declined,
    ReplyError: lambda _: Trouble(
        502, "reply", f"What answers at the server's address does not speak as a nearveil server does. {_NOTHING}"
    ),
    UnansweredError: _describe_unanswered,
    QuestionError: _describe_question,
    LedgerError: lambda error: Trouble(503, "ledger", f"The ledger says: {_end_sentence(error)} No message was sent."),
    ModuleNotFoundError: lambda error: Trouble(
        503, "missing", f"Something is not installed here: {_end_sentence(error)} {_NOTHING}"
    ),
}
for _kind, _describe in _DESCRIBED.items():
    describe_error.register(_kind)(_describe)


MOST_SHOWN = 240  # candidates in the server's pane
MOST_CLASSES = 50  # with their probabilities, the most probable first
_HEX = 24  # bytes of a message at either end
_SIDE, _LARGEST = 512, 1 << 17  # pixels and bytes of a thumbnail that is shown


def view_nearest(nearest: Nearest, message: bytes, balance: dict[str, Any], *, images: bool) -> dict[str, Any]:
    """Return what the server saw, what was chosen, and what it cost; thumbnails come with `images`."""
    answer = nearest.found.answer
    pictures = answer.images if images else [b""] * len(answer.ids)
    shown = list(zip(answer.ids.tolist(), pictures, strict=True))[:MOST_SHOWN]  # by id: the same for every image
    return {
        "kind": "nearest",
        "worth": nearest.quality_summary,
        "missed": not nearest.named_best_set,
        "saw": {
            "messages": [{"bytes": len(message), "hex": shorten_hex(message)}],
            "set": nearest.set,
            "n_sets": nearest.n_sets,
            "candidates": [
                {"id": number, "name": nearest.names.get(number, ""), "image": make_image_address(image)}
                for number, image in shown
            ],
            "total": nearest.n_candidates,
            "bytes_sent": nearest.bytes_sent,
            "bytes_received": nearest.bytes_received,
        },
        "got": [_view_match(match) for match in nearest.matches],
        **_view_cost(nearest.guarantee, nearest.n_sets, balance, repeated=nearest.repeated),
    }


def view_free(nearest: Nearest, balance: dict[str, Any]) -> dict[str, Any]:
    """Return what was found at epsilon 0, and what the server saw: nothing, or sealed questions."""
    return {
        "kind": "free",
        "way": "sealed" if nearest.sealed else "home",
        "saw": {
            "messages": [{"bytes": len(one), "hex": shorten_hex(one)} for one in nearest.sealed],
            "total": nearest.n_candidates,
        },
        "got": [_view_match(match) for match in nearest.matches],
        "promise": str(nearest.guarantee),
        "balance": balance,
        "cost": "0",
    }


def _view_match(match: Match) -> dict[str, Any]:
    return {
        "id": match.id,
        "name": match.name or match.external_id or "",
        "similarity": round(match.similarity, 4),
        "image": make_image_address(match.image or b""),
    }


def view_classified(found: Classified, balance: dict[str, Any]) -> dict[str, Any]:
    """Return what the model of a protected gallery says, and both guarantees. Nothing was paid."""
    return {
        "kind": "classified",
        "label": found.label,
        "probabilities": sorted(found.probabilities.items(), key=lambda one: -one[1])[:MOST_CLASSES],
        "classes": len(found.probabilities),
        "caution": found.caution,
        "gallery_guarantee": str(found.gallery_guarantee),
        "promise": str(found.query_guarantee),
        "balance": balance,
    }


def make_image_address(content: bytes) -> str:
    """Return a WebP thumbnail as a data URL; empty if it is missing, damaged or too large.

    A few bytes of WebP can hold a gigabyte of pixels, and a browser would make room for all of them.
    """
    if not 0 < max(_read_size(content)) <= _SIDE or len(content) > _LARGEST:
        return ""
    return f"data:image/webp;base64,{b64encode(content).decode()}"


def shorten_hex(content: bytes) -> str:
    """Return bytes in hexadecimal, their middle left out.

    Examples
    --------
    >>> shorten_hex(bytes(60))[-11:], shorten_hex(b"NVM")
    ('00 00 00 00', '4e 56 4d')
    """
    if len(content) <= 2 * _HEX:
        return content.hex(" ")
    return f"{content[:_HEX].hex(' ')} … {content[-_HEX:].hex(' ')}"


def _read_size(content: bytes) -> tuple[int, int]:
    """Return width and height as the head of a WebP file tells them (RFC 9649); zeros where there is none."""
    kind, body = content[12:16], content[20:30]
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP" or len(body) < 10:
        return 0, 0
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L":
        both = int.from_bytes(body[1:5], "little")
        return 1 + (both & 0x3FFF), 1 + (both >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    return 0, 0


def _view_cost(promise: Guarantee, n_sets: int, balance: dict[str, Any], *, repeated: bool) -> dict[str, Any]:
    epsilon = promise.epsilon
    return {
        "epsilon": epsilon,
        "promise": str(promise),
        "odds": format_odds(epsilon),
        "right": round(RandomizedResponse(epsilon, n_sets).hit, 4),
        "repeated": repeated,
        "balance": balance,
    }


LAST = 100  # entries that are listed
_MOST_QUESTIONS = 10**6
_FAR = 14  # an epsilon whose odds are beyond a million


def format_odds(epsilon: float) -> str:
    """Return by which factor odds can change at most, rounded up.

    Examples
    --------
    >>> format_odds(4.0), format_odds(40.0)
    ('55', 'more than a million')
    """
    return format_factor(epsilon) if epsilon < _FAR else "more than a million"


def describe_balance(account: Account) -> dict[str, Any]:
    """Return what is spent and what is left of an account, as figures and in words."""
    held = account.balance()
    return {
        "account": held.account,
        "epsilon": held.epsilon,
        "delta": held.delta,
        "spent": held.spent if math.isfinite(held.spent) else held.epsilon,
        "left": held.left,
        "odds": format_odds(held.spent) if held.delta == 0 and held.spent > 0 else None,  # a delta has no such factor
        "spent_words": format_up(held.spent),
        "left_words": format_down(held.left),
    }


def preview_cost(account: Account, guarantee: Guarantee, count: int = 1) -> dict[str, Any]:
    """Return what a release would cost an account, so many times, spending nothing."""
    found = account.preview([(guarantee, count)])
    return {
        "allowed": found.allowed,
        "cost": format_up(found.cost),
        "before": format_down(found.before.left),
        "after": format_down(found.left) if found.allowed else format_down(found.before.left),
        "words": found.reason if not found.allowed else str(found),
    }


def list_accounts(ledger: Ledger, paying: str) -> list[dict[str, Any]]:
    """Return all accounts, the one that pays for questions first."""
    found = [
        {
            **describe_balance(one),
            "owner": one.owner,
            "protects": one.protects,
            "unit": one.unit,
            "kind": one.kind,
            "pays": one.name == paying,
        }
        for one in ledger.accounts()
    ]
    return sorted(found, key=lambda one: (not one["pays"], one["account"]))


def list_history(ledger: Ledger, name: str) -> dict[str, Any]:
    """Return the last entries of an account, the newest first."""
    entries = ledger.account(name).history()
    return {
        "account": name,
        "total": len(entries),
        "entries": [_describe_entry(entry) for entry in reversed(entries[-LAST:])],
    }


def verify_ledger(ledger: Ledger) -> dict[str, Any]:
    """Recompute everything, and return what was found."""
    found = ledger.verify()
    return {"ok": found.ok, "words": str(found)}


def plan_questions(account: Account, count: int, epsilon: float) -> dict[str, Any]:
    """Return whether so many questions fit into an account, and how many would."""
    if not 1 <= count <= _MOST_QUESTIONS or not 1e-6 <= epsilon <= 40:
        raise Trouble(422, "question", "A plan has 1 to a million questions, each at an epsilon from 0.000001 to 40.")
    about: Any = {"protects": account.protects, "unit": account.unit, "relation": account.relation}
    question = compose_events([PureDp(epsilon)], delta=0.0, basis=Basis("a question", "docs/theory/covers.md"), **about)
    found, fits = preview_cost(account, question, count), count_affordable(account, question, count)
    asks = f"{count:,} question{'s' * (count != 1)} at epsilon {epsilon:g}"
    if found["allowed"]:
        words = f"{asks} fit: they cost {found['cost']}, and {found['after']} would be left."
    else:
        words = f"{asks} do not fit: they cost {found['cost']}, and {found['before']} is left. {fits:,} would fit."
    return {**found, "fits": fits, "words": words}


def _describe_entry(entry: Entry) -> dict[str, Any]:
    what = {
        "opened": "Account opened",
        "quota": "Quota given",
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
        "what": what.get(entry.kind, entry.kind),
        "time": entry.time,
        "key": entry.key or "",
        "detail": paid or size,
    }


def _describe_event(event: Any) -> str:
    return f"epsilon {event.epsilon:g}" if isinstance(event, PureDp) else type(event).__name__


MOST_POINTS = 600
_LEAST_POINTS = 3
_STEPS = 3  # from the principal plane: it stays recognisable, and neighbours gather
_BANDWIDTH = 0.4
_LABEL_WEIGHT = 0.1
_NONE = -1  # the set of what no set covers
_HALF = 128  # of a coverage of 255: what a set covers mostly is in it


@dataclass(frozen=True, eq=False)
class Candidate:
    """One image that an answer held."""

    name: str
    image: bytes = field(repr=False)  # its thumbnail; may be empty
    row: Singles = field(repr=False)  # where it lies among the map's prototypes, as precise as its code
    sets: frozenset[int | None] = frozenset()  # sets of the answers that had it


def place_codes(public: PublicPart, codes: NDArray[np.uint8]) -> Singles:
    """Return where candidates lie among the map's prototypes: their codes, compared with the map's directions."""
    directions = np.ascontiguousarray(public.map.components.astype(np.float32).T)
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.asarray(public.table.scores(directions, codes), dtype=np.float32).T)


class Picture:
    """The prototypes of a map in two dimensions, by the supervised manifold; sets that cover them are the labels."""

    def __init__(self, public: PublicPart) -> None:
        self._public = public
        rows = unit_prototypes(public.map).astype(np.float64)
        standing = np.flatnonzero(np.abs(rows).max(axis=1) > 0)
        some = standing[np.linspace(0, len(standing) - 1, min(MOST_POINTS, len(standing))).astype(int)]
        if len(some) < _LEAST_POINTS:
            raise Trouble(422, "picture", "This map has too few points to be drawn.")
        self._coverage = coverage = public.map.coverage[some]
        labels = np.where(coverage.max(axis=1) > 0, coverage.argmax(axis=1), _NONE)
        several = len(np.unique(labels[labels != _NONE])) > 1
        manifold = SupervisedManifold(
            bandwidth=_BANDWIDTH,
            label_weight=_LABEL_WEIGHT,
            label_encoding="one-hot",
            n_iter=_STEPS,
            init=_find_plane(rows[some]),
        )
        try:
            self._manifold = manifold.fit(rows[some], labels if several else None)
        except ValueError:
            raise Trouble(
                422, "picture", "The points of this map lie in one place, so there is nothing to draw."
            ) from None
        # As new rows are place_codes, so that an image lies where its own prototype does.
        found = np.asarray(manifold.transform(rows[some]))
        self._low, self._span = found.min(axis=0), np.maximum(np.ptp(found, axis=0), 1e-12)
        self.points = self._scale(found)

    def place(self, rows: Singles) -> NDArray[np.float64]:
        """Return where rows of `project_rows` lie in the picture, from 0 to 1 in both directions."""
        wide = rows.astype(np.float64)
        wide[np.abs(wide).max(axis=1) == 0, 0] = 1.0  # a row of zeros has no direction: any will do
        return self._scale(np.asarray(self._manifold.transform(wide)))

    def inside(self, named_set: int | None) -> NDArray[np.bool_]:
        """Return which points a set covers."""
        if named_set is None:
            return np.zeros(len(self._coverage), np.bool_)
        return np.asarray(self._coverage[:, named_set] >= _HALF)

    def draw(
        self, seen: Mapping[int, Candidate], feature: Singles | None, named_set: int | None, image: Any
    ) -> dict[str, Any]:
        """Return all that the page draws, as plain values: `image` makes of a thumbnail what the page shows.

        Where the last query's `feature` lies is for the page alone.
        """
        shown = list(seen.items())
        where = self.place(np.stack([one.row for _, one in shown])) if shown else ()
        inside = self.inside(named_set)
        middle = self.points[inside].mean(axis=0) if inside.any() else None
        you = None if feature is None else _round_pair(self.place(project_rows(self._public, feature[None]))[0])
        return {
            "points": [[*_round_pair(place), int(within)] for place, within in zip(self.points, inside, strict=True)],
            "items": self._public.map.n_items,
            "seen": [
                {
                    "id": number,
                    "name": one.name,
                    "image": image(one.image),
                    "place": _round_pair(place),
                    "named": named_set in one.sets,
                }
                for (number, one), place in zip(shown, where, strict=True)
            ],
            "you": you,
            "reported": None if middle is None else _round_pair(middle),
            "set": named_set,
            "n_sets": self._public.map.n_sets,
        }

    def _scale(self, places: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.clip((places - self._low) / self._span, 0.0, 1.0))


def _find_plane(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rows in their principal plane, each direction with a spread of one."""
    centred = rows - rows.mean(axis=0)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:2]
    found = np.zeros((len(rows), 2))
    found[:, : len(directions)] = centred @ directions.T
    return np.asarray(found / np.maximum(found.std(axis=0), 1e-12))


def _round_pair(place: NDArray[np.float64]) -> list[float]:
    return [round(float(one), 4) for one in place]


_MOST = 2000  # candidates that are kept


@dataclass(frozen=True)
class Last:
    """The last question, and all that the answers on its map have shown."""

    feature: Singles | None = field(default=None, repr=False)  # private
    named_set: int | None = None  # by its message
    seen: dict[int, Candidate] = field(default_factory=dict, repr=False)  # by id, the latest last
    map_id: str = ""  # of the map that all this is about

    def update(self, nearest: Nearest, public: PublicPart, row: Singles, *, images: bool) -> "Last":
        """Return what is known after one more answer; of another map than before, nothing else has a place."""
        answer, name = nearest.found.answer, public.map.map_id
        seen = dict(self.seen) if self.map_id == name else {}
        where = place_codes(public, answer.codes[:_MOST])
        for place, number in enumerate(answer.ids[:_MOST].tolist()):
            before = seen.pop(number, None)
            sets = frozenset({nearest.set}) | (before.sets if before else frozenset())
            image = answer.images[place] if images else b""
            seen[number] = Candidate(nearest.names.get(number, ""), image, where[place], sets)
        kept = dict(list(seen.items())[-_MOST:])
        return Last(np.asarray(row, np.float32), nearest.set, kept, name)
