"""The attack on the clock: it sees what is planted, and nothing where a client keeps its deadlines. No time passes."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("httpx")

from nearveil.audit import audit
from nearveil.audit._experiment import Experiment
from nearveil.client import session
from nearveil.client.timing import question_period
from nearveil.mechanisms import PublicMap
from nearveil.mechanisms.covers.maps import NEIGHBORS
from nearveil.privacy.noise import unsafe_seeded
from nearveil.wire.messages import PublicPart
from studies.audits import clock as _clock
from studies.audits.clock import TimedQuestion, ask_through_client, make_clock_experiment, make_hostile_parts
from studies.audits.specimens import HeapMap, make_hasty_question, make_heap_search, open_hasty_client, use_heap
from tests.audit.mechanisms import SURE
from tests.clocks import SetClock

FAMILIES = list(make_hostile_parts())


def heap_updates(public: PublicPart, feature: Any) -> int:
    """Return how often a heap of the nearest so far changes after it is full."""
    scores = public.map.prototypes.astype(np.float32) @ (feature @ public.map.components.astype(np.float64))
    nearest: list[float] = sorted(scores[:NEIGHBORS])
    changes = 0
    for score in scores[NEIGHBORS:]:
        if score > nearest[0]:
            nearest = sorted([*nearest[1:], score])
            changes += 1
    return changes


def ends(experiment: Experiment, family: str) -> tuple[TimedQuestion, TimedQuestion]:
    pair = next(pair for pair in experiment.pairs if pair.name == family)
    return pair.first, pair.second


def test_a_heap_works_for_one_end_of_an_arc_and_not_for_the_other() -> None:
    near, far = ends(make_clock_experiment(), "prototypes sorted along an arc")
    assert heap_updates(far.public, far.feature) > 10 * heap_updates(near.public, near.feature)
    (pair,) = make_hasty_question().pairs
    assert heap_updates(_some(pair.first.public), pair.first.feature) > 4_000
    assert heap_updates(_some(pair.second.public), pair.second.feature) == 0


def _some(public: PublicPart) -> PublicPart:
    """Return a public part with every 200th prototype."""
    held = public.map
    few = HeapMap(held.components, held.prototypes[::200], held.coverage[::200], held.n_items, held.set_size)
    return replace(public, map=few)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Return a clock on which the choice for one end takes longer, as a heap would."""
    found = SetClock()

    def slow(kind: type[PublicMap]) -> None:
        real = kind.choose

        def choose(self: PublicMap, features: Any) -> Any:
            found.time += 0.001 if features[0, 0] > 0 else 0.009
            return real(self, features)

        monkeypatch.setattr(kind, "choose", choose)

    slow(PublicMap)
    slow(HeapMap)
    monkeypatch.setattr(session, "Clock", lambda: found)
    monkeypatch.setattr(_clock, "perf_counter", found.now)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("clock")
def test_a_client_that_keeps_its_slots_shows_one_moment(family: str) -> None:
    near, far = ends(make_clock_experiment(), family)
    with ask_through_client(near.public) as ask:
        seen = {round(ask(feature), 9) for feature in (near.feature, far.feature, far.reference, far.feature)}
    assert seen == {round(question_period(near.public), 9)}


@pytest.mark.usefixtures("clock")
def test_a_client_that_does_not_shows_its_work() -> None:
    near, far = ends(make_clock_experiment(), FAMILIES[0])
    with open_hasty_client(use_heap(near.public)) as ask:
        assert [round(ask(feature), 9) for feature in (near.feature, far.feature)] == [0.001, 0.009]


def noisy(gap: float) -> Experiment:
    """Return the experiment of a client whose time has a planted gap, with the noise and the drift of a machine."""
    generator, moment = np.random.default_rng(0), [0.0]

    def ask(feature: Any) -> float:
        moment[0] += 1e-4  # slower and slower
        return 0.1 + moment[0] + (gap if feature[0] < 0 else 0.0) + 1e-4 * float(generator.gamma(1.0))

    return make_clock_experiment(lambda _: nullcontext(ask), at_once=1)


def test_a_planted_gap_is_found_and_drift_is_none() -> None:
    found = audit(noisy(1e-3), trials=400, confidence=SURE, source=unsafe_seeded(0))
    assert found.verdict == "broken"
    kept = audit(noisy(0.0), trials=1600, confidence=SURE, source=unsafe_seeded(0))
    assert kept.verdict == "kept"
    assert kept.shown_epsilon < 0.2


def test_a_run_asks_about_the_feature_and_about_the_reference_in_random_order() -> None:
    asked: list[float] = []

    def ask(feature: Any) -> float:
        asked.append(float(feature[0]))
        return float(len(asked))

    experiment = make_clock_experiment(lambda _: nullcontext(ask), at_once=1)
    _, far = ends(experiment, FAMILIES[0])
    found = experiment.run(far, 200, unsafe_seeded(1))
    assert asked[0] == far.reference[0]
    assert sorted(set(found.tolist())) == [-1e6, 1e6]
    assert 60 < (found > 0).sum() < 140


def test_specimens_are_experiments_of_their_own() -> None:
    assert make_heap_search().name == "a search with a heap"
    assert len(make_heap_search().pairs) == len(FAMILIES)
    assert make_heap_search().guarantee.epsilon == make_hasty_question().guarantee.epsilon == 1.0
