"""A small gallery, published, and a purse, to test the protocol with."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.gallery.answers import Answer, Extras, ItemDetails, encode_details
from nearveil.gallery.codes import make_codes
from nearveil.gallery.publishing import MapTerms, Published
from nearveil.mechanisms import PublicMap
from nearveil.mechanisms.messages import candidate_count
from nearveil.metrics import Metric, ScoreSpace
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source
from nearveil.wire.client import ClientProtocol, encode_queries, rank_answer
from nearveil.wire.messages import PublicPart, write_query
from nearveil.wire.server import ServedMap
from tests.search.standins import clustered

DIMENSION, EPSILON, FRACTION = 6, 2.0, 0.2
PUBLIC, _ = clustered(1, 60, DIMENSION)
GALLERY, _ = clustered(2, 200, DIMENSION)
QUERIES, _ = clustered(3, 30, DIMENSION)
THUMBNAIL = b"RIFF\x04\0\0\0WEBP"


@dataclass(frozen=True, eq=False)
class Shelf(ServedMap):
    """A map that is served without an index."""

    def read_extras(self, ids: NDArray[np.uint32], kind: Extras, most: int) -> Sequence[bytes]:  # noqa: ARG002
        if kind == "thumbnails":
            return [THUMBNAIL + int(one).to_bytes(4, "little") for one in ids]
        if kind == "names":
            return [b"bird %d.png" % one for one in ids]
        if kind == "metadata":
            return [encode_details(ItemDetails(f"bird {one}.png", f"b-{one}")) for one in ids.tolist()]
        return [b"original of %d" % one if one % 3 else b"" for one in ids]


@lru_cache(maxsize=8)
def published(code_bytes: int | None = None, n_sets: int = 6, metric: Metric = "cosine") -> Shelf:
    """Return a gallery whose ids neither start at 0 nor stand in the order of its rows."""
    terms = MapTerms(EPSILON, FRACTION, n_sets, 0.0, code_bytes)
    space = ScoreSpace.fit(metric, PUBLIC)
    release = terms.make_release().fit_space(space).index(GALLERY)
    features = release.gallery_features(GALLERY)
    table = make_codes(features, code_bytes, space)
    ids = np.random.default_rng(4).permutation(1000)[: len(GALLERY)].astype(np.uint32) + np.uint32(50)
    index: Any = SimpleNamespace(extractor="model-1", alive=lambda shown: np.ones(len(shown.ids), np.bool_))
    return Shelf(
        index,
        Published(3, release, table, table.encode(features), ids, terms),
        "birds",
        "a model",
        ("thumbnails", "originals", "names", "metadata"),
    )


@lru_cache(maxsize=4)
def part(metric: Metric = "cosine") -> PublicPart:
    return published(metric=metric).make_public_part()


def crafted(**changed: Any) -> PublicPart:
    """Return a public part with some of its fields, or of its map's, replaced by a server of bad will."""
    honest = part()
    fields: dict[str, Any] = {
        name: getattr(honest.map, name) for name in ("components", "prototypes", "coverage", "n_items")
    }
    fields |= {name: changed.pop(name) for name in [*fields, "set_size"] if name in changed}
    fields.setdefault("set_size", candidate_count(changed.get("candidates", honest.candidates), fields["n_items"]))
    return replace(honest, map=PublicMap(**fields), **changed)


@dataclass
class PaidDebit:
    repeated: bool = False
    message: bytes | None = None

    def store(self, message: bytes, /) -> None:
        self.message = message

    def __enter__(self) -> "PaidDebit":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class Purse:
    """Counts what is paid."""

    paid: list[Guarantee] = field(default_factory=list)

    def spend(self, guarantee: Guarantee, key: str, /) -> PaidDebit:  # noqa: ARG002
        self.paid.append(guarantee)
        return PaidDebit()


def ready(epsilon: float = EPSILON, public: PublicPart | None = None) -> ClientProtocol:
    return ClientProtocol(part() if public is None else public, epsilon)


def ask(
    client: ClientProtocol, feature: Any, account: Any = None, extras: Extras = "none", rng: Source | None = None
) -> bytes:
    """Pay from a new purse, or from an account, and return the query."""
    debit = client.pay(feature, account or Purse(), "key", rng)
    assert debit.message is not None
    return write_query(debit.message, extras)


def choose(
    client: ClientProtocol, feature: Any, reply: bytes, k: int = 8, extras: Extras = "none"
) -> tuple[NDArray[np.int64], NDArray[np.float32], Answer]:
    """Read an answer and rank it: the ids and scores of the best, and all candidates."""
    answer = client.read_answer(reply, extras)
    ids, scores = rank_answer(client.public.table, encode_queries(client.public, feature).queries, answer, k)
    return ids[0], scores[0], answer
