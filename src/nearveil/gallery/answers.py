"""What comes back: every candidate with its code and, if asked for, its image; and nothing left to ask for."""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self, cast, get_args

import numpy as np
from numpy.typing import NDArray

from nearveil.frames import DEFAULT_LIMITS, HEADER_BYTES, Kind, Limits, WireError, frame, read_flag, unframe
from nearveil.gallery.codes import Bytes

Extras = Literal["none", "thumbnails", "originals", "names"]
EXTRAS: tuple[Extras, ...] = get_args(Extras)  # a flag is the place of its word

_SIZES = struct.Struct("<II")  # candidates, bytes of a code
IMAGE_HEADER_BYTES = 4  # of an image: its length
LONGEST_NAME = 4096  # characters, as an index holds them
# What breaks a line, steers a terminal, or turns the direction of the text round it.
_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Answer:
    """The server's answer: ids and codes of all candidates, and the images or names of all where the query asked so.

    A client chooses among them by itself. There is no second request, because which candidates it
    would ask about is what the message hid.

    `images`: One for each candidate, empty where the gallery has none; no tuple at all for "none". A thumbnail is
    WebP, a name is text in UTF-8 without control characters.

    Examples
    --------
    >>> answer = Answer(np.array([3, 7], np.uint32), np.zeros((2, 5), np.uint8))
    >>> answer.nbytes, Answer.from_bytes(answer.to_bytes()).ids.tolist()
    (40, [3, 7])
    """

    kind: ClassVar[Kind] = Kind.ANSWER
    header_bytes: ClassVar[int] = HEADER_BYTES + _SIZES.size

    ids: NDArray[np.uint32]  # the gallery's numbers of the candidates, rising: their order tells nothing
    codes: Bytes = field(repr=False)  # what to re-rank by
    extras: Extras = "none"  # what else the answer holds
    images: tuple[bytes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.uint32 or not len(self.ids):
            raise WireError("ids must be at least one number of 32 bits")
        if self.codes.dtype != np.uint8 or self.codes.ndim != 2 or len(self.codes) != len(self.ids):
            raise WireError("codes must hold a row of bytes for each id")
        if not self.codes.shape[1]:
            raise WireError("codes must be of at least one byte")
        _check_rising(self.ids)
        self._check_images()

    def _check_images(self) -> None:
        if self.extras not in EXTRAS:
            raise WireError(f"extras must be one of {', '.join(EXTRAS)}")
        if len(self.images) != (0 if self.extras == "none" else len(self.ids)):
            raise WireError("images must be one for each id, or none at all")
        # The whole answer is refused, whichever of them will be chosen.
        if self.extras == "thumbnails" and not all(map(is_thumbnail, self.images)):
            raise WireError("images must be WebP, or empty, as thumbnails")
        if self.extras == "names" and not all(map(_is_name, self.images)):
            raise WireError(
                f"images must be text in UTF-8, of at most {LONGEST_NAME} characters and without control characters, "
                "as names"
            )

    @property
    def nbytes(self) -> int:
        """How many bytes go over the wire."""
        images = sum(IMAGE_HEADER_BYTES + len(image) for image in self.images)
        return self.header_bytes + 4 * len(self.ids) + self.codes.size + images

    def to_bytes(self) -> bytes:
        """Return the answer as bytes, the same on every machine."""
        lengths = np.array([len(image) for image in self.images], dtype="<u4")
        parts = [_SIZES.pack(*self.codes.shape), self.ids.astype("<u4").tobytes(), self.codes.tobytes()]
        return frame(Kind.ANSWER, b"".join([*parts, lengths.tobytes(), *self.images]), EXTRAS.index(self.extras))

    @classmethod
    def from_bytes(cls, data: bytes, limits: Limits = DEFAULT_LIMITS) -> Self:
        """Read an answer. Nothing in it is trusted."""
        kind, flags, body = unframe(data, limits)
        if kind != Kind.ANSWER:
            raise WireError(f"data is no answer but of kind {kind.name}")
        return cls.from_body(flags, body)

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Read what stands in the frame of an answer."""
        extras = cast("Extras", read_flag(flags, EXTRAS))
        if len(body) < _SIZES.size:
            raise WireError("data is truncated")
        count, width = _SIZES.unpack_from(body)
        if not count or not width:
            raise WireError("ids must be at least one, with codes of at least one byte")
        middle = _SIZES.size + 4 * count
        end = middle + count * width
        lengths = 0 if extras == "none" else IMAGE_HEADER_BYTES * count
        if len(body) < end + lengths or (extras == "none" and len(body) != end):
            raise WireError("data is truncated, or has bytes after its end")
        ids = np.frombuffer(body, "<u4", count, _SIZES.size).astype(np.uint32)
        _check_rising(ids)  # before anything is cut
        codes = np.frombuffer(body, np.uint8, count * width, middle).reshape(count, width)
        sizes = np.frombuffer(body, "<u4", lengths // IMAGE_HEADER_BYTES, end)
        return cls(ids, codes, extras, _cut(body, end + lengths, sizes))


def _cut(body: bytes, start: int, sizes: NDArray[np.uint32]) -> tuple[bytes, ...]:
    """Return the images at the end of an answer; they must fill it to its last byte."""
    if len(sizes) and start + int(sizes.sum(dtype=np.int64)) != len(body):
        raise WireError("data is truncated, or has bytes after its end")
    images = []
    for size in map(int, sizes):  # one by one: lists of numbers would be many times what was sent
        images.append(body[start : start + size])
        start += size
    return tuple(images)


def _check_rising(ids: NDArray[np.uint32]) -> None:
    if (ids[1:] <= ids[:-1]).any():
        raise WireError("ids must rise, each once")


def encode_name(name: str) -> bytes:
    """Return a name as an answer holds it; what would steer a terminal is replaced.

    Examples
    --------
    >>> encode_name("a tab" + chr(9) + ".png").decode()
    'a tab�.png'
    """
    return _STEERING.sub("\N{REPLACEMENT CHARACTER}", name[:LONGEST_NAME]).encode()


def merge_answers(answers: Sequence[Answer]) -> Answer:
    """Return one answer that holds the candidates of several, each once; of several copies the first.

    `answers`: At least one. All with the same extras, and with codes of one width.

    Examples
    --------
    >>> one, two = (Answer(np.array(ids, np.uint32), np.zeros((2, 5), np.uint8)) for ids in ([3, 7], [1, 3]))
    >>> merge_answers([one, two]).ids.tolist()
    [1, 3, 7]
    """
    ids, places = np.unique(np.concatenate([answer.ids for answer in answers]), return_index=True)
    codes = np.concatenate([answer.codes for answer in answers])[places]
    images = [image for answer in answers for image in answer.images]
    return Answer(ids, codes, answers[0].extras, tuple(images[place] for place in places) if images else ())


def _is_name(data: bytes) -> bool:
    try:
        name = data.decode()
    except UnicodeDecodeError:
        return False
    return len(name) <= LONGEST_NAME and not _STEERING.search(name)


def is_thumbnail(image: object) -> bool:
    """Return whether bytes may stand as a thumbnail: WebP, or nothing at all."""
    return isinstance(image, bytes) and (not image or (image[:4] == b"RIFF" and image[8:12] == b"WEBP"))
