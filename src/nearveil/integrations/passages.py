"""Matches as retrieval libraries want them: a text, its id, and metadata with scores."""

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from nearveil.client import Match
    from nearveil.metrics import Metric


class Passage(NamedTuple):
    """The text of a match."""

    text: str
    id: str | None  # the owner's
    metadata: dict[str, Any]  # the owner's, with "similarity", "relevance" and, if the metric is one, "distance"


def make_passage(match: "Match", metric: "Metric", text_key: str) -> Passage:
    """Return the text of a match, or its name if it has none, with its scores."""
    metadata = {name: value for name, value in match.metadata.items() if name != text_key}
    scores = {"similarity": match.similarity, "relevance": find_relevance(match, metric)}
    if match.distance is not None:
        scores["distance"] = match.distance
    text = match.metadata.get(text_key, match.name)
    if not match.name and match.metadata and not isinstance(match.metadata.get(text_key), str):
        warnings.warn(f"items have no text in metadata[{text_key!r}]: set text_key to the entry with it", stacklevel=2)
    return Passage(text if isinstance(text, str) else match.name, match.external_id, metadata | scores)


def find_relevance(match: "Match", metric: "Metric") -> float:
    """Return a score from 0 to 1 in the order of the metric, for thresholds and rerankers that expect one.

    It is (1 + cosine) / 2, 1 / (1 + distance), or the logistic function of the dot product.
    """
    if match.distance is not None:
        return 1 / (1 + match.distance)
    if metric == "dot":
        return (1 + math.tanh(match.similarity / 2)) / 2
    return min(max((1 + match.similarity) / 2, 0.0), 1.0)
