"""Answers as the page shows them: plain values, nothing that a browser would have to fetch."""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from nearveil.mechanisms import Message
from nearveil.mechanisms.covers.channel import RandomizedResponse
from nearveil.privacy import Guarantee
from nearveil.service import Classified, Nearest
from nearveil.ui._budget import odds

MOST_SHOWN = 240  # candidates in the server's pane
MOST_CLASSES = 50  # with their probabilities, the most probable first
_HEX = 24  # bytes of a message at either end
_SIDE, _LARGEST = 512, 1 << 17  # pixels and bytes of a thumbnail that is shown


def nearest_view(
    nearest: Nearest, messages: Sequence[Message], balance: dict[str, Any], *, images: bool
) -> dict[str, Any]:
    """Return what the server saw, what was chosen, and what it cost.

    `messages`: As they were sent.
    `balance`: Of the account, afterwards.
    `images`: Whether the candidates came with thumbnails.
    """
    answer = nearest.found.answer
    pictures = answer.images if images else [b""] * len(answer.ids)
    shown = list(zip(answer.ids.tolist(), pictures, strict=True))[:MOST_SHOWN]  # by id: the same for every image
    return {
        "kind": "nearest",
        "saw": {
            **_message_view(messages, nearest.sets, nearest.n_sets),
            "candidates": [
                {"id": number, "name": nearest.names.get(number, ""), "image": shown_image(image)}
                for number, image in shown
            ],
            "total": nearest.candidates,
            "bytes_sent": nearest.bytes_sent,
            "bytes_received": nearest.bytes_received,
        },
        "got": [
            {
                "id": match.id,
                "name": match.name,
                "similarity": round(match.similarity, 4),
                "image": shown_image(match.image or b""),
            }
            for match in nearest.matches
        ],
        **_paid_view(nearest.guarantee, nearest.n_sets, balance, repeated=nearest.repeated),
    }


def classified_view(found: Classified, balance: dict[str, Any]) -> dict[str, Any]:
    """Return what the model of a protected gallery says, and both guarantees.

    `balance`: Of the account, which has not paid.
    """
    return {
        "kind": "classified",
        "label": found.label,
        "probabilities": sorted(found.probabilities.items(), key=lambda one: -one[1])[:MOST_CLASSES],
        "classes": len(found.probabilities),
        "gallery_guarantee": str(found.gallery_guarantee),
        "promise": str(found.query_guarantee),
        "balance": balance,
    }


def shown_image(content: bytes) -> str:
    """Return a thumbnail as an address that needs no request; empty if there is none, or one that is none.

    A few bytes of WebP can hold a gigabyte of pixels, and a browser would make room for all of them.
    """
    if not 0 < max(_size(content)) <= _SIDE or len(content) > _LARGEST:
        return ""
    return f"data:image/webp;base64,{b64encode(content).decode()}"


def shortened(content: bytes) -> str:
    """Return bytes in hexadecimal, their middle left out.

    Examples
    --------
    >>> shortened(bytes(60))[-11:], shortened(b"NVM")
    ('00 00 00 00', '4e 56 4d')
    """
    if len(content) <= 2 * _HEX:
        return content.hex(" ")
    return f"{content[:_HEX].hex(' ')} … {content[-_HEX:].hex(' ')}"


def _size(content: bytes) -> tuple[int, int]:
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


def _message_view(messages: Sequence[Message], sets: tuple[int, ...], n_sets: int) -> dict[str, Any]:
    sent = [message.to_bytes() for message in messages]
    return {
        "messages": [{"bytes": len(one), "hex": shortened(one)} for one in sent],
        "sets": list(sets),
        "n_sets": n_sets,
    }


def _paid_view(promise: Guarantee, n_sets: int, balance: dict[str, Any], *, repeated: bool) -> dict[str, Any]:
    epsilon = promise.epsilon
    return {
        "epsilon": epsilon,
        "promise": str(promise),
        "odds": odds(epsilon),
        "right": round(RandomizedResponse(epsilon, n_sets).hit, 4),
        "repeated": repeated,
        "balance": balance,
    }
