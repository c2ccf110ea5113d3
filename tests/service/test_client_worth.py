"""What an answer is worth, and that asking more often never depends on it. Attacks ``docs/theory/service.md``."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nearveil.ledger import KeyConflictError, OverBudgetError
from nearveil.protocol.client import ClientProtocol
from nearveil.service import QuestionError
from tests.service.asking import QUERIES, SETS, Scene, public_of, scene, seeded

PRIVATE = QUERIES[0]


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Iterator[Scene]:
    with scene(made, tmp_path, epsilon=500.0) as found:
        yield found


def best_set(here: Scene) -> int:
    client = ClientProtocol(4.0, public=public_of(here.gallery))
    return int(client._public.map.choose(client._release.features(PRIVATE[None]))[0])


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
    assert hit.worth.startswith("This answer comes from the set that suits your query, and holds about ")
    assert "another set than the one that suits" in miss.worth
    assert "Do not ask again because of that" in miss.worth
    (first,) = (match.id for match in client.nearest(PRIVATE, 1, 40.0).matches)
    assert first in {match.id for match in hit.matches}


def test_the_number_of_requests_does_not_depend_on_hits(here: Scene) -> None:
    """All hit, none hit, or all name one set: as many requests, and each message is sent."""
    counts, hits = set(), set()
    for seed in range(25):
        client, wire = here.client()
        found = client.nearest(PRIVATE, 3, 1.0, repeat=3, rng=seeded(seed))
        counts.add((len(wire.requests), len(wire.posts)))
        hits.add(sum(one == best_set(here) for one in found.sets))
        assert len(found.sets) == 3
    assert len(counts) == 1
    assert {0, 1, 2} <= hits


def test_repeated_messages_are_paid_together_beforehand_and_merged(here: Scene) -> None:
    client, wire = here.client()
    wire.before = lambda request: request.method != "POST" or spent.append(here.account.balance().spent)  # type: ignore[func-returns-value]
    spent: list[float] = []
    found = client.nearest(PRIVATE, 5, 1.5, repeat=4, key="four")
    assert spent == [6.0] * 4  # all of it before the first message is sent
    assert found.guarantee.epsilon == pytest.approx(6.0)
    assert found.guarantee.sound
    assert here.paid == 1
    assert found.set is None
    assert found.n_candidates == len(np.unique(found.found.answer.ids))
    sizes = {len(set(found.sets)): found.n_candidates}
    assert all(size >= public_of(here.gallery).map.set_size for size in sizes.values())
    again = client.nearest(PRIVATE, 5, 1.5, repeat=4, key="four")
    assert (again.repeated, again.matches, again.sets) == (True, found.matches, found.sets)
    assert here.account.balance().spent == 6.0
    with pytest.raises(KeyConflictError):
        client.nearest(PRIVATE, 5, 1.5, repeat=2, key="four")


def test_repeated_among_dummies(here: Scene) -> None:
    client, wire = here.client()
    found = client.nearest(PRIVATE, 3, 1.0, repeat=2, dummies=QUERIES[1:4])
    assert (len(found.sets), found.repeat, len(wire.posts)) == (5, 2, 5)
    assert max(found.sets) < SETS


def test_nothing_is_asked_where_the_repeated_messages_cannot_be_paid(made: Path, tmp_path: Path) -> None:
    with scene(made, tmp_path, epsilon=4.0) as poor:
        client, wire = poor.client()
        with pytest.raises(OverBudgetError):
            client.nearest(PRIVATE, 3, 1.5, repeat=3)
        assert wire.posts == []
        assert poor.account.balance().spent == 0


@pytest.mark.parametrize(
    ("repeat", "words"), [(0, "from 1 to 64"), (65, "from 1 to 64"), (True, "from 1"), (1.5, "from")]
)
def test_absurd_repeats(here: Scene, repeat: int, words: str) -> None:
    client, wire = here.client()
    with pytest.raises(QuestionError, match=words):
        client.nearest(PRIVATE, 3, 1.0, repeat=repeat)
    assert wire.requests == []


def test_nothing_is_repeated_at_epsilon_0(here: Scene) -> None:
    client, _ = here.client()
    with pytest.raises(QuestionError, match="repeat"):
        client.nearest(PRIVATE, 3, 0.0, repeat=2)
