"""The results of a client."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nearveil.gallery.answers import Answer
from nearveil.metrics import METRIC_NAMES, Metric
from nearveil.privacy import Guarantee

Way = Literal["message", "home", "index", "sealed"]


@dataclass(frozen=True)
class Match:
    """An item near the query."""

    id: int
    name: str  #: empty if the gallery offers no names
    #: By the gallery's metric: the cosine, the inner product, or the distance times -1; as precise as its codes.
    similarity: float
    #: The requested thumbnail or original; empty if the gallery has none. A local index returns thumbnails without a
    #: request.
    image: bytes | None = field(default=None, repr=False)
    external_id: str | None = None  #: the owner's id, if the gallery offers metadata and the item has one
    #: The owner's, if the gallery offers it; empty for a sealed question.
    metadata: Mapping[str, Any] = field(default_factory=dict)
    distance: float | None = None  #: the Euclidean distance, if that is the gallery's metric

    @property
    def value(self) -> float:
        """The gallery's metric as people read it: a distance is not negative."""
        return self.similarity if self.distance is None else self.distance


@dataclass(frozen=True)
class Nearest:
    """The nearest items, and what the question revealed."""

    matches: tuple[Match, ...]  #: best first
    #: How the items were found: by a paid message, in the local copy, in a local index itself, or by encrypted
    #: questions.
    way: Way
    guarantee: Guarantee  #: of the message; not sound if its noise came from a seed
    key: str = ""  #: the same query with the same key repeats the question at no cost; empty if it was free
    repeated: bool = False  #: whether the key was paid before
    #: The number of compared items: of an answer, a copy or an index, or of the cells of a sealed question, which
    #: depends on the image.
    n_candidates: int = 0
    set: int | None = None  #: the set that the message named; None for other ways to ask, and other mechanisms
    n_sets: int = 0  #: of the map
    bytes_sent: int = 0  #: in the bodies of this call
    bytes_received: int = 0  #: in the bodies of their replies
    #: All candidates with codes and images, which is what the server knows; None for other ways to ask.
    answer: Answer | None = field(default=None, repr=False)
    #: Names of all candidates by id, or external ids of those without one; empty if the gallery offers neither.
    names: Mapping[int, str] = field(default_factory=dict, repr=False)
    #: The sealed questions, as the server saw them: noise to anyone without the key. Empty for other ways to ask.
    sealed: tuple[bytes, ...] = field(default=(), repr=False)
    #: Whether the message named the set that suits the query. Private: it depends on the query. Never repeat it
    #: because this is false: the retry itself leaks information (``docs/theory/service.md``).
    named_best_set: bool = True
    #: The estimated share of the nearest items among the candidates, by the public map. Private as well. None for a
    #: sealed question, which uses no map.
    expected_share: float | None = None
    metric: Metric = "cosine"  #: by which "nearest" is meant
    #: The share of the 10 nearest that the gallery's codes keep, as its server measured it; None if it is not known.
    code_recall: float | None = None
    #: The rest of the account that paid, after this question; None if nothing was paid, or for a payer without a
    #: balance.
    remaining: float | None = None
    mechanism: str = ""  #: of the message; empty for other ways to ask

    @property
    def paid(self) -> float:
        """Return the epsilon that this question cost: 0 if it was free, unsound, or paid before with the same key."""
        return 0.0 if self.repeated or not self.key else self.guarantee.epsilon

    @property
    def quality_summary(self) -> str:
        """Return a one-line estimate of the quality of the answer. Private: show it to nobody else."""
        metric, count, codes = METRIC_NAMES[self.metric], f"{self.n_candidates:,}", ""
        compared = f"compared with your query by the {metric}"
        if self.way == "index":
            return f"All {count} items of the index on this machine were {compared}, exactly."
        if self.code_recall is not None:
            codes = f" The gallery's codes keep {format_share(self.code_recall)} of the 10 nearest."
        if self.sealed:
            return f"The {count} items of the cells nearest to your query were {compared}, encrypted.{codes}"
        if self.way == "message" and self.set is None:
            return (
                f"The server ranked its gallery by a message of {self.mechanism}; the {count} items that it sent were "
                f"{compared}.{codes}"
            )
        if self.set is None or self.expected_share is None:
            return f"All {count} items of the copy on this machine were {compared}.{codes}"
        share = f"about {self.expected_share:.0%} of the items nearest to your query by the {metric}"
        if self.named_best_set:
            return f"This answer comes from the set that suits your query, and holds {share}.{codes}"
        return (
            f"This answer comes from another set than the one that suits your query, and holds {share}: the noise that "
            "hides your query named it. Do not repeat the query because of that: the repetition itself leaks "
            f"information.{codes}"
        )

    @property
    def server_view(self) -> str:
        """Return in a sentence or two everything that the server has learned."""
        count = f"{self.n_candidates:,}"
        if self.sealed:
            sizes = " and ".join(f"{len(message):,}" for message in self.sealed)
            return f"The server saw that you sent a query, and when: two sealed messages of {sizes} bytes, all noise."
        if self.way != "message":
            searched = "Nothing was sent. The index" if self.way == "index" else "The server saw nothing. A copy"
            return f"{searched} of all {count} items was searched on this machine, at no cost."
        if self.set is None:
            return (
                f"The server saw a message of {self.mechanism}, ranked its gallery by it and sent {count} items; the "
                "matches were chosen on this machine."
            )
        return (
            f"The server saw: set {self.set + 1} of {self.n_sets}. It sent all {count} items of that set, and the "
            "matches were chosen on this machine. A message names the best set for its query with probability "
            f"{self.hit:.2f}, else any other."
        )

    @property
    def hit(self) -> float:
        """Return the probability that a message names the set that suits its query; 1 without sets."""
        if self.set is None:
            return 1.0
        from nearveil.mechanisms.covers.channels import RandomizedResponse

        return RandomizedResponse(self.guarantee.epsilon, self.n_sets).hit


def format_share(share: float) -> str:
    """Return a share in percent with one digit, rounded down: 100% means all."""
    return f"{math.floor(1000 * share + 1e-9) / 10:g}%"


@dataclass(frozen=True)
class Classified:
    """The class of an image by the model of a protected gallery, with both guarantees."""

    label: str  #: the most probable class
    probabilities: Mapping[str, float]  #: of all classes, by the model; their sum is 1
    query_guarantee: Guarantee  #: to the image: epsilon 0, because nothing that depends on it was sent or paid
    gallery_guarantee: Guarantee  #: to the records, as the gallery states it
    caution: str = ""  #: a warning if the model has much noise for the records of a class, by its own figures

    def __str__(self) -> str:
        lines = (self.label, self.caution, str(self.query_guarantee), str(self.gallery_guarantee))
        return "\n".join(filter(None, lines))
