"""What a plan costs: never less than any strategy can show, also in tiny cases where all can be tried."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from scipy.special import ndtr

from nearveil.privacy.accounting import PldAccountant
from nearveil.privacy.events import VoteHistogram
from nearveil.privacy.guarantee import count_events
from nearveil.privacy.noise import secure_source
from nearveil.private_knn.plan import (
    Ballot,
    GaussianSums,
    NoisySums,
    PlanRequest,
    PoissonSample,
    Screening,
    VotePlan,
    make_plan,
)
from nearveil.progress import no_progress, use_display

CLASSES = Ballot(VoteHistogram, 10)
Pair = tuple[tuple[float, ...], tuple[float, ...]]


def tiny(rate: float, screened: int, answered: int) -> VotePlan:
    sample = PoissonSample(rate)
    return VotePlan(
        n_neighbors=2,
        screening=Screening(sample, 1.5, 1.0, 2),
        max_screened=screened,
        votes=NoisySums(sample, Ballot(VoteHistogram, 2), 2.0, 2),
        max_answered=answered,
    )


def screening_pairs(plan: VotePlan) -> list[Pair]:
    """All pairs of a yes's and a no's probability, without the record and with it."""
    assert plan.screening is not None
    passes = ndtr((np.arange(3) - plan.screening.threshold) / plan.screening.noise)
    pairs: list[Pair] = []
    for t, other in ((0, 1), (1, 0), (1, 2), (2, 1)):
        moved = passes[t] + plan.sampling_rate * (passes[other] - passes[t])
        pairs.append(((float(passes[t]), float(1 - passes[t])), (float(moved), float(1 - moved))))
    return pairs


def vote_pair(plan: VotePlan, cells: int) -> Pair:
    """The worst pair of noisy votes, seen through cells: what is seen so is no more than what is released."""
    shift = math.sqrt(2) / plan.vote_noise
    edges = np.array([-np.inf, *np.linspace(-3, 3 + shift, cells - 1), np.inf])
    without = np.diff(ndtr(edges))
    moved = (1 - plan.sampling_rate) * without + plan.sampling_rate * np.diff(ndtr(edges - shift))
    return tuple(map(float, without)), tuple(map(float, moved))


def best_attack(plan: VotePlan, epsilon: float, *, add: bool, cells: int) -> float:
    """Return the largest delta over all strategies: any order, each step chosen after seeing all answers."""
    screenings, vote = screening_pairs(plan), vote_pair(plan, cells)

    @cache
    def value(screened: int, answered: int, a: float) -> float:
        steps = [(pair, screened - 1, answered) for pair in screenings if screened]
        steps += [(vote, screened, answered - 1)] if answered else []
        best = max(1 - a, 0.0)  # or stop here
        for (without, moved), s, v in steps:
            first, second = (without, moved) if add else (moved, without)
            best = max(best, sum(p * value(s, v, a * q / p) for p, q in zip(first, second, strict=True)))
        return best

    return value(plan.max_screened, plan.max_answered, math.exp(epsilon))


@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize(("screened", "answered", "cells"), [(1, 1, 40), (2, 1, 24), (1, 2, 16), (3, 0, 2), (2, 2, 8)])
def test_no_strategy_in_any_order_beats_the_price(rate: float, screened: int, answered: int, cells: int) -> None:
    plan = tiny(rate, screened, answered)
    accountant = PldAccountant(count_events(SelfComposedDpEvent(event, count) for event, count in plan.events))
    for epsilon in (0.0, 0.1, 0.3, 0.8):
        price = accountant.delta(epsilon)
        shown = max(best_attack(plan, epsilon, add=add, cells=cells) for add in (True, False))
        assert shown <= price * (1 + 1e-9)
        if cells >= 24:  # fine cells lose little: the price is no more than what can be shown, and a little
            assert price <= 1.06 * shown + 1e-4


def test_what_samplers_cost_is_part_of_the_price() -> None:
    sample = PoissonSample(0.5)
    plan = VotePlan(
        n_neighbors=20,
        screening=Screening(sample, 60.0, 12.0, 20),
        max_screened=100,
        votes=NoisySums(sample, Ballot(VoteHistogram, 2), 30.0, 20),
        max_answered=5,
    )
    accountant = PldAccountant(count_events(SelfComposedDpEvent(event, count) for event, count in plan.events))
    extra = plan.extra_delta(1.0)  # the same up to an epsilon of 3
    assert 0.1 < plan.epsilon(2 * extra) < 3
    assert plan.epsilon(2 * extra) == accountant.epsilon(extra) > accountant.epsilon(2 * extra) * 1.01
    assert plan.epsilon(0.99 * extra) == math.inf


def test_published_parameters_cost_what_accounting_says() -> None:
    mnist = PlanRequest(
        CLASSES, epsilon=None, delta=1e-5, max_answered=735, n_neighbors=300, sampling_rate=0.15, screening_noise=75.0,
        threshold=180.0, max_screened=1000, vote_noise=25.0,
    )  # fmt: skip
    assert make_plan(mnist).epsilon(1e-5) == pytest.approx(0.871049, abs=1e-4)


def test_calibrated_plans_use_their_budget_and_no_more() -> None:
    for request in (
        PlanRequest(CLASSES, epsilon=0.5, delta=1e-5, max_answered=50, max_screened=0),
        PlanRequest(CLASSES, epsilon=2.0, delta=1e-6, max_answered=20),
        PlanRequest(CLASSES, epsilon=1.0, delta=1e-5, max_answered=20, sampling_rate=0.2, n_neighbors=30),
        PlanRequest(
            CLASSES, epsilon=1.0, delta=1e-5, max_answered=20, max_screened=40, screening_noise=100.0, threshold=30.0
        ),
    ):
        plan = make_plan(request)
        assert request.epsilon is not None
        assert 0.998 * request.epsilon <= plan.epsilon(request.delta) <= request.epsilon


def test_noise_that_is_a_little_too_small_is_refused() -> None:
    plan = make_plan(PlanRequest(CLASSES, epsilon=1.1, delta=1e-5, max_answered=50, max_screened=0))
    with pytest.raises(ValueError, match="vote_noise is too small"):
        make_plan(
            PlanRequest(CLASSES, epsilon=1.0, delta=1e-5, max_answered=50, max_screened=0, vote_noise=plan.vote_noise)
        )


def test_defaults_follow_the_noise() -> None:
    plan = make_plan(PlanRequest(CLASSES, epsilon=1.0, delta=1e-5, max_answered=10))
    assert plan.n_neighbors == math.ceil(8 * plan.vote_noise)
    assert plan.threshold == pytest.approx(0.6 * plan.n_neighbors)
    assert plan.screening_noise == pytest.approx(2 * plan.vote_noise)
    assert (plan.max_screened, plan.sampling_rate) == (15, 1.0)


def test_sampling_buys_nothing() -> None:
    """At equal cost, the noise for each listed neighbour does not fall with the sampling rate."""
    requests = [
        PlanRequest(CLASSES, epsilon=0.5, delta=1e-5, max_answered=200, sampling_rate=rate, max_screened=0)
        for rate in (1.0, 0.15, 0.05)
    ]
    noises = [make_plan(request).vote_noise / request.sampling_rate for request in requests]
    assert noises[0] <= noises[1] * 1.002 <= noises[2] * 1.004


def test_parameters_that_contradict_each_other_are_refused() -> None:
    known = {"delta": 1e-5, "max_answered": 10}
    with pytest.raises(ValueError, match="vote_noise is too small"):
        make_plan(PlanRequest(CLASSES, epsilon=0.1, vote_noise=2.0, **known))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threshold must not be given"):
        make_plan(PlanRequest(CLASSES, epsilon=1.0, threshold=5.0, max_screened=0, **known))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threshold must be given"):
        make_plan(PlanRequest(CLASSES, epsilon=None, vote_noise=2.0, screening_noise=3.0, **known))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no largest one to screen"):
        make_plan(PlanRequest(Ballot(GaussianSums(1.0), 1, can_screen=False), epsilon=1.0, max_screened=5, **known))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="screening_noise is too small"):
        make_plan(PlanRequest(CLASSES, epsilon=0.01, screening_noise=1.0, max_screened=50, **known))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epsilon must be at most 12 if queries are screened"):
        make_plan(PlanRequest(CLASSES, epsilon=13.0, **known))  # type: ignore[arg-type]
    assert GaussianSums(2.0)(3.0) == GaussianDpEvent(1.5)


@pytest.mark.parametrize("epsilon", [12.0, 60.0])
def test_large_budgets_are_used_too(epsilon: float) -> None:
    plan = make_plan(
        PlanRequest(CLASSES, epsilon=epsilon, delta=1e-5, max_answered=30, max_screened=0 if epsilon > 12 else None)
    )
    assert 0.99 * epsilon <= plan.epsilon(1e-5) <= epsilon


@pytest.mark.parametrize(
    ("field", "value"),
    [("epsilon", 0.0), ("epsilon", math.inf), ("epsilon", 65.0), ("delta", 0.0), ("delta", 1.0), ("max_answered", 0),
     ("n_neighbors", 0), ("sampling_rate", 0.0), ("screening_noise", -1.0), ("threshold", math.nan),
     ("max_screened", -1), ("vote_noise", math.inf)],
)  # fmt: skip
def test_numbers_that_mean_nothing_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        PlanRequest(CLASSES, **{"epsilon": 1.0, "delta": 1e-5, "max_answered": 10, field: value})  # type: ignore[arg-type]


def test_what_cannot_be_computed_or_sampled_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="delta must be at least"):
        PlanRequest(CLASSES, epsilon=1.0, delta=1e-14, max_answered=10)
    for noise in (1e20, 1e-300):
        with pytest.raises(ValueError, match="vote_noise cannot be sampled"):
            make_plan(PlanRequest(CLASSES, epsilon=None, delta=1e-5, max_answered=10, vote_noise=noise))


def test_very_many_screenings_are_charged_as_gaussian_mechanisms() -> None:
    request = PlanRequest(CLASSES, epsilon=1.0, delta=1e-5, max_answered=10**6)
    plan = make_plan(request)
    assert plan.screening is not None
    assert not plan.screening.whole
    assert 0.99 <= plan.epsilon(1e-5) <= 1.0


def test_a_plan_with_hardly_any_noise_promises_nothing() -> None:
    plan = make_plan(PlanRequest(CLASSES, epsilon=None, delta=1e-5, max_answered=1000, vote_noise=0.01))
    assert plan.epsilon(1e-5) == math.inf
    assert "Nothing is guaranteed" in str(plan.guarantee(1e-5, unit="record", source=secure_source()))


def test_a_calibration_that_takes_seconds_is_shown_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures in the log are public: the parameters."""
    shown: list[str] = []
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setattr("rich.console.Console.status", lambda _, text: nullcontext(shown.append(text)))  # type: ignore[func-returns-value]
    request = PlanRequest(CLASSES, epsilon=3.0, delta=1e-4, max_answered=3, max_screened=4)
    with caplog.at_level("INFO", logger="nearveil.private_knn.plan"):
        make_plan(request)
        lines = [record.getMessage() for record in caplog.records]
        make_plan(request)
    assert lines == shown == ["Calibrating the noise of 4 screenings and 3 votes, once"]
    assert len(caplog.records) == 1
    with use_display(no_progress):
        make_plan(replace(request, max_screened=5))
    assert len(shown) == 1
