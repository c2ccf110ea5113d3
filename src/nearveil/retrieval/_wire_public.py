"""The public part on the wire: all that a client must know in order to ask."""

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms import PublicMap
from nearveil.mechanisms.base import candidate_count
from nearveil.mechanisms.covers.map import MOST_FEATURES
from nearveil.retrieval._answer import EXTRAS, Extras
from nearveil.retrieval._codes import Codes
from nearveil.retrieval._wire import Kind, Reader, WireError, Writer, checked_text, checked_whole, frame
from nearveil.retrieval._wire_codes import code_dimension, codes_from_bytes, codes_to_bytes

_DIGEST = re.compile(r"[0-9a-f]{32}")
LARGEST_FEATURE = 1e6  # of a number in a feature or a mean: differences are then finite, and not lost in rounding
OUT_OF_RANGE = f"must be finite, with no number beyond {LARGEST_FEATURE:g}"
_OFFERS = 1 << (len(EXTRAS) - 1)  # choices of what a gallery may offer, one bit each


def in_range(row: NDArray[Any]) -> bool:
    """Return whether a feature or a mean holds finite numbers alone, none too large to compare."""
    with np.errstate(all="ignore"):  # in 64 bits: the limit itself is infinite in 16
        return bool((np.abs(row.astype(np.float64)) <= LARGEST_FEATURE).all())


@dataclass(frozen=True, eq=False)
class PublicPart:
    """All that a client must know in order to ask. Nothing in it is private, and nothing in it is trusted.

    Parameters
    ----------
    gallery : str
        Its name.
    revision : int
        Grows whenever the gallery changes.
    mechanism : str
        The name of the release.
    epsilon : float
        What the map was learned for: advice. Which epsilon a message has is the client's choice.
    candidates : float
        The fraction of the gallery that an answer holds.
    public_digest : str
        The fingerprint of the public rows.
    mean : ndarray of shape (d,)
        The public mean.
    map : PublicMap
    table : Codes
        What codes are read by.
    extractor, fingerprint : str
        Name and fingerprint of what makes the features; empty where they are not known.
    offers : tuple of {"thumbnails", "originals", "names"}, default=()
        What a query may ask for besides ids and codes.
    """

    kind: ClassVar[Kind] = Kind.PUBLIC_PART

    gallery: str
    revision: int
    mechanism: str
    epsilon: float
    candidates: float
    public_digest: str
    mean: NDArray[np.float64] = field(repr=False)
    map: PublicMap = field(repr=False)
    table: Codes = field(repr=False)
    extractor: str
    fingerprint: str
    offers: tuple[Extras, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("gallery", 1), ("mechanism", 1), ("extractor", 0), ("fingerprint", 0)):
            checked_text(getattr(self, name), name, least=least)
        checked_whole(self.revision, "revision")
        if not 0 < self.epsilon < np.inf:
            raise WireError("epsilon must be a positive number")
        if not _DIGEST.fullmatch(self.public_digest):
            raise WireError("public_digest must be 32 hexadecimal digits")
        mean = np.array(self.mean, dtype=np.float64)
        if mean.ndim != 1 or not len(mean) or not in_range(mean):
            raise WireError(f"mean must be a row of finite numbers, none beyond {LARGEST_FEATURE:g}")
        mean.setflags(write=False)
        object.__setattr__(self, "mean", mean)
        if tuple(self.offers) != tuple(word for word in EXTRAS[1:] if word in self.offers):
            raise WireError(f"offers must be of {', '.join(EXTRAS[1:])}, in this order")
        self._check_fit()

    def _check_fit(self) -> None:
        """Check that mean, map and table are of one gallery."""
        if not len(self.mean) == len(self.map.components) == code_dimension(self.table):
            raise WireError("mean, map and table must be for features of one dimension")
        try:
            size = candidate_count(self.candidates, self.map.n_items)
        except ValueError as error:
            raise WireError(str(error)) from None
        if self.map.set_size != size:
            raise WireError("map must have sets of as many items as candidates says")

    def to_bytes(self) -> bytes:
        """Return the public part as bytes."""
        out = Writer()
        out.text(self.gallery)
        out.whole(self.revision)
        out.text(self.mechanism)
        out.real(self.epsilon)
        out.real(self.candidates)
        for text in (self.public_digest, self.extractor, self.fingerprint):
            out.text(text)
        for part in (self.mean.astype("<f8").tobytes(), self.map.to_bytes(), codes_to_bytes(self.table)):
            out.blob(part)
        return frame(self.kind, out.done(), sum(1 << EXTRAS.index(word) >> 1 for word in self.offers))

    @classmethod
    def from_body(cls, flags: int, body: bytes) -> Self:
        """Read what stands in its frame."""
        if flags >= _OFFERS:
            raise WireError(f"data has flags {flags}, which are not known")
        taken = Reader(body)
        gallery, revision, mechanism = taken.text(), taken.whole(), taken.text()
        epsilon, candidates = taken.real(), taken.real()
        digest, extractor, fingerprint = taken.text(), taken.text(), taken.text()
        mean, public_map, table = taken.blob(), taken.blob(), taken.blob()
        taken.end()
        if len(mean) % 8 or len(mean) > 8 * MOST_FEATURES:
            raise WireError(f"mean must be a row of at most {MOST_FEATURES} finite numbers of 64 bits")
        return cls(
            gallery=gallery,
            revision=revision,
            mechanism=mechanism,
            epsilon=epsilon,
            candidates=candidates,
            public_digest=digest,
            mean=np.frombuffer(mean, "<f8"),
            map=read_part(PublicMap, public_map, "the map"),
            table=codes_from_bytes(table),
            extractor=extractor,
            fingerprint=fingerprint,
            offers=tuple(word for place, word in enumerate(EXTRAS[1:]) if flags >> place & 1),
        )


class _Serial(Protocol):
    @classmethod
    def from_bytes(cls, data: bytes) -> Any: ...

    def to_bytes(self) -> bytes: ...


_Form = TypeVar("_Form", bound=_Serial)


def read_part(form: type[_Form], data: bytes, name: str) -> _Form:
    """Read a part that has a form of its own; there is one way to write it, and no other is read."""
    try:
        found = cast("_Form", form.from_bytes(data))
    except ValueError as error:
        raise WireError(f"{name} cannot be read: {error}") from None
    if found.to_bytes() != data:
        raise WireError(f"{name} is not written as it must be")
    return found
