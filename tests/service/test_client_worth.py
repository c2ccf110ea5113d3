"""What an answer is worth, and that asking more often never depends on it. Attacks ``docs/theory/service.md``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nearveil.wire.client import encode_queries
from tests.service.asking import QUERIES, Scene, public_of, scene, seeded

PRIVATE = QUERIES[0]


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Iterator[Scene]:
    with scene(made, tmp_path, epsilon=500.0) as found:
        yield found


def best_set(here: Scene) -> int:
    public = public_of(here.gallery)
    return int(public.map.choose(encode_queries(public, PRIVATE).directions)[0])


def test_an_answer_says_whether_it_is_of_the_best_set_and_what_it_holds(here: Scene) -> None:
    client, _ = here.client()
    best, seen, shares = best_set(here), {}, {}
    for seed in range(12):
        found = client.nearest(PRIVATE, 3, 1.0, rng=seeded(seed))
        assert found.named_best_set == (found.set == best)
        assert found.expected_share is not None
        assert 0 <= found.expected_share <= 1
        shares[found.named_best_set] = found.expected_share
        seen[found.named_best_set] = found
    hit, miss = seen[True], seen[False]  # both happen among these seeds
    assert shares[True] > shares[False]
    assert hit.quality_summary.startswith("This answer comes from the set that suits your query, and holds about ")
    assert "another set than the one that suits" in miss.quality_summary
    assert "Do not repeat the query because of that" in miss.quality_summary
    (first,) = (match.id for match in client.nearest(PRIVATE, 1, 40.0).matches)
    assert first in {match.id for match in hit.matches}


def test_the_number_of_requests_does_not_depend_on_hits(here: Scene) -> None:
    counts, hits = set(), set()
    for seed in range(12):
        client, wire = here.client()
        answer = client.nearest(PRIVATE, 3, 1.0, rng=seeded(seed))
        counts.add((len(wire.requests), len(wire.posts)))
        hits.add(answer.named_best_set)
    assert len(counts) == 1
    assert hits == {True, False}


@pytest.mark.parametrize("option", ["repeat", "dummies"])
def test_options_that_add_nothing_are_gone(here: Scene, option: str) -> None:
    client, wire = here.client()
    options: dict[str, Any] = {option: 2}
    with pytest.raises(TypeError, match=option):
        client.nearest(PRIVATE, 3, 1.0, **options)
    assert wire.requests == []
