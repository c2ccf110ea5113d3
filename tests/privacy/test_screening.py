"""Screenings: the test vectors, all strategies of tiny cases, fixed strategies of large ones."""

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from dp_accounting import PoissonSampledDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import binom

from nearveil.privacy.accounting import PldAccountant, screening_curve
from nearveil.privacy.accounting.binary import (
    Moves,
    PrivacyCurve,
    _find_hull,
    _Kernel,
    _make_moves,
    _thin,
    compose_binary,
    compute_binary_rdp,
    compute_screening_rdp,
    log_pairs,
)
from nearveil.privacy.events import NoisyScreening, PureDp
from studies.screening import compute_fixed_pair_epsilon

MNIST = NoisyScreening(noise=75, threshold=180, n_neighbors=300)
STREET = NoisyScreening(noise=85, threshold=210, n_neighbors=300)
EPSILONS = [0.0, 0.01, 0.05, 0.1, 0.3, 0.7, 1.2, 2.0, 3.0]


def pairs_of(screening: NoisyScreening, rate: float) -> NDArray[np.float64]:
    """All (P(pass), Q(pass)), without and with the record, straight from the definition."""
    passes = ndtr((np.arange(screening.n_neighbors + 1) - screening.threshold) / screening.noise)
    steps = [(t, t + 1) for t in range(screening.n_neighbors)] + [(t + 1, t) for t in range(screening.n_neighbors)]
    return np.array([(passes[t], (1 - rate) * passes[t] + rate * passes[other]) for t, other in steps])


def all_strategies(pairs: NDArray[np.float64], rounds: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """P and Q over all transcripts, for every way to pick a pair after every history: (n_strategies, 2^rounds)."""
    if rounds == 0:
        return np.ones((1, 1)), np.ones((1, 1))
    rest_p, rest_q = all_strategies(pairs, rounds - 1)
    every_p, every_q = [], []
    for (p, q), first, second in itertools.product(pairs, range(len(rest_p)), range(len(rest_p))):
        every_p.append(np.concatenate([p * rest_p[first], (1 - p) * rest_p[second]]))
        every_q.append(np.concatenate([q * rest_q[first], (1 - q) * rest_q[second]]))
    return np.array(every_p), np.array(every_q)


def outcomes(pairs: NDArray[np.float64]) -> NDArray[np.float64]:
    """The probabilities of pass and fail under P and under Q, of shape (2, n_pairs, 2)."""
    return np.stack([pairs, 1 - pairs], axis=-1).swapaxes(0, 1)


def hockey_stick(p: NDArray[np.float64], q: NDArray[np.float64], epsilon: float) -> float:
    return float(np.max(np.sum(np.maximum(p - math.exp(epsilon) * q, 0), axis=-1)))


@pytest.mark.parametrize(
    ("order", "least", "value", "pair"),
    [
        (20, 30, 8.81961642761911e-4, (221, 222)),
        (100, 30, 4.51813516879525e-3, (270, 271)),
        (300, 30, 1.56058334169423e-2, (31, 30)),
        (300, 0, 1.62456745210433e-2, (1, 0)),
    ],
)
def test_vector_4_the_divergence_of_a_screening_and_where_it_is_worst(
    order: float, least: int, value: float, pair: tuple[int, int]
) -> None:
    worst, pairs = find_worst(order, least)
    assert worst == pytest.approx(value, rel=1e-12)
    assert pair in pairs
    if least == 0:
        assert worst == compute_screening_rdp(order, STREET)


def find_worst(order: float, least: int) -> tuple[float, set[tuple[int, ...]]]:
    """Return the largest divergence among max-votes of at least `least`, and the pairs that attain it."""
    base, moved, votes = log_pairs(STREET, 1.0)
    values = np.where(votes.min(axis=1) >= least, compute_binary_rdp(order, base, moved), 0)
    return float(values.max()), set(map(tuple, votes[values >= values.max() * (1 - 1e-12)].tolist()))


def test_the_worst_pair_is_neither_at_the_threshold_nor_at_the_ends() -> None:
    pairs = {order: find_worst(order, 30)[1] for order in (20, 80, 100, 150)}
    assert all(any(t in pair for pair in pairs[order]) for order, t in ((20, 221), (80, 257), (100, 270), (150, 113)))


def test_vector_5_a_sampled_screening() -> None:
    cost = compute_screening_rdp(24, STREET, sampling_rate=0.25)
    assert cost == pytest.approx(6.61152575517683e-5, rel=1e-12)
    assert 8192 * cost + math.log(1e5) / 23 == pytest.approx(1.04217816660192, rel=1e-13)


def test_vector_6_the_hockey_stick_of_one_screening() -> None:
    exact = 1.75761364941855e-3
    p, q = outcomes(pairs_of(MNIST, 1.0))
    assert hockey_stick(p, q, 0.01) == pytest.approx(exact, rel=1e-12)
    assert 0 <= screening_curve(1, MNIST).delta(0.01) - exact < 1e-3 * exact


def test_vector_7_one_sampled_screening() -> None:
    epsilon = screening_curve(1, MNIST, sampling_rate=0.15).epsilon(1e-5, "remove")
    assert 0 <= epsilon - 0.00444926011236524 < 1e-12
    p, q = outcomes(pairs_of(MNIST, 0.15))
    assert hockey_stick(q, p, 0.00444926011236524) == pytest.approx(1e-5, rel=1e-9)


@pytest.mark.parametrize(("direction", "value"), [("remove", 0.161457766), ("add", 0.161520090)])
def test_vector_8_the_same_pair_a_thousand_times(direction: Any, value: float) -> None:
    epsilon = compute_fixed_pair_epsilon(1000, MNIST, (180, 181), sampling_rate=0.15, delta=1e-5, direction=direction)
    assert epsilon == pytest.approx(value, abs=1e-9)


def test_a_thousand_screenings() -> None:
    epsilon = screening_curve(1000, MNIST, sampling_rate=0.15).epsilon(1e-5)
    assert 0.161520090 < epsilon <= 0.1625
    assert epsilon == pytest.approx(0.161940, abs=1e-4)


def test_thousands_of_screenings_cost_hardly_more_than_those_of_one_pair() -> None:
    def one_pair(n: int, votes: int, direction: Any) -> float:
        return compute_fixed_pair_epsilon(
            n, STREET, (votes, votes + 1), sampling_rate=0.25, delta=1e-5, direction=direction
        )

    assert one_pair(8192, 210, "add") == pytest.approx(0.774764, abs=1e-6)
    epsilon = screening_curve(2048, STREET, sampling_rate=0.25).epsilon(1e-5)
    lower = max(one_pair(2048, votes, direction) for votes, direction in ((205, "remove"), (213, "add")))
    assert lower < epsilon < 1.001 * lower


@pytest.mark.parametrize(("rounds", "neighbors"), [(1, 1), (2, 3), (3, 1), (3, 2)])
@pytest.mark.parametrize(("rate", "noise", "threshold"), [(1.0, 1.0, 1.0), (0.3, 0.7, 2.0), (0.8, 3.0, -1.0)])
def test_no_strategy_beats_the_curve_and_some_reach_it(
    rounds: int, neighbors: int, rate: float, noise: float, threshold: float
) -> None:
    screening = NoisyScreening(noise, threshold, neighbors)
    p, q = all_strategies(pairs_of(screening, rate), rounds)
    curve = screening_curve(rounds, screening, sampling_rate=rate)
    for epsilon in EPSILONS:
        for bound, best in (
            (curve.forward(np.array([epsilon]))[0], hockey_stick(p, q, epsilon)),
            (curve.reversed().forward(np.array([epsilon]))[0], hockey_stick(q, p, epsilon)),
        ):
            assert best <= bound * (1 + 1e-12) + 1e-15
            assert bound <= best + 2e-5
        assert curve.delta(epsilon) == max(
            curve.forward(np.array([epsilon]))[0], curve.reversed().forward(np.array([epsilon]))[0]
        )


@given(
    rate=st.floats(0.01, 1),
    noise=st.floats(0.3, 100),
    neighbors=st.integers(1, 40),
    place=st.floats(-0.5, 1.5),
    rounds=st.integers(1, 40),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_no_repeated_pair_costs_more(
    rate: float, noise: float, neighbors: int, place: float, rounds: int, data: Any
) -> None:
    screening = NoisyScreening(noise, place * neighbors, neighbors)
    t = data.draw(st.integers(0, neighbors - 1))
    pair = data.draw(st.sampled_from([(t, t + 1), (t + 1, t)]))
    bound = screening_curve(rounds, screening, sampling_rate=rate)
    for direction in ("add", "remove"):
        low = compute_fixed_pair_epsilon(rounds, screening, pair, sampling_rate=rate, delta=1e-4, direction=direction)
        assert low <= bound.epsilon(1e-4, direction) * (1 + 1e-9) + 1e-12


@given(rate=st.floats(0.01, 1), noise=st.floats(0.3, 200), neighbors=st.integers(1, 400), place=st.floats(-0.5, 1.5))
@settings(max_examples=60, deadline=None)
def test_hull_and_thinned_moves_cover_every_move(rate: float, noise: float, neighbors: int, place: float) -> None:
    moves = _make_moves(NoisyScreening(noise, place * neighbors, neighbors), rate)
    hull = _find_hull(moves, 1e-17)
    for fewer in (hull, _thin(hull) if len(hull.gain) else hull):
        common = (moves.rising + moves.gain > 1e-17) & (moves.falling > 1e-5)  # np.interp has few digits near 1
        if np.any(common):
            roof = np.interp(moves.rising[common], fewer.rising, fewer.gain)
            assert np.all(moves.gain[common] <= roof * (1 + 1e-9) + 1e-18)


def test_thinning_saves_work_and_costs_little() -> None:
    moves = _make_moves(MNIST, 0.15)
    assert len(_thin(_find_hull(moves, 1e-18)).gain) < 60
    assert len(_find_hull(moves, 1e-18).gain) > 300
    exact = compose_binary(moves, 256).epsilon(1e-5)  # up to 256 rounds nothing is thinned
    thinned = compose_binary(_thin(_find_hull(moves, 1e-18)), 256).epsilon(1e-5)
    assert exact <= thinned < exact * 1.001


@pytest.mark.parametrize("rounds", [1, 7, 500])
def test_randomised_response_is_exact(rounds: int) -> None:
    yes = 1 / (1 + math.exp(-0.5))
    curve = compose_binary(Moves.between(np.array([1 - yes]), np.array([yes])), rounds)
    k = np.arange(rounds + 1)
    log_p, log_q = binom.logpmf(k, rounds, yes), binom.logpmf(k, rounds, 1 - yes)

    def surplus(epsilon: float) -> float:
        return float(np.sum(np.maximum(np.exp(log_p) - np.exp(epsilon + log_q), 0))) - 1e-5

    exact = brentq(surplus, 0, rounds * 0.5 + 1, xtol=1e-12)
    assert exact - 1e-9 <= curve.epsilon(1e-5) < exact * (1 + 1e-5)


@pytest.mark.parametrize(
    ("length", "epsilon", "alpha", "pure", "composed"),
    [(160, 8, 1, 4.049995, 1.191876), (160, 1, 7, 0.875341, 0.085968)],
)
def test_vectors_10_and_13_bits_of_a_string(
    length: int, epsilon: float, alpha: float, pure: float, composed: float
) -> None:
    x = epsilon / length
    p, q = alpha * math.exp(x) / (1 + alpha * math.exp(x)), alpha / (1 + alpha)
    assert length * max(math.log(p / q), math.log((1 - q) / (1 - p))) == pytest.approx(pure, abs=1e-6)

    def fixed(ups: int) -> float:
        """The exact epsilon if `ups` bits go from 0 to 1 and the others from 1 to 0."""
        log_p, log_q = (
            np.add.outer(
                binom.logpmf(np.arange(ups + 1), ups, up),
                binom.logpmf(np.arange(length - ups + 1), length - ups, down),
            )
            for up, down in ((p, q), (q, p))
        )
        return float(brentq(lambda e: np.sum(np.maximum(np.exp(log_p) - np.exp(e + log_q), 0)) - 1e-5, 0, pure))

    best = max(fixed(ups) for ups in range(length + 1))
    assert best == pytest.approx(composed, abs=2e-6)
    adaptive = compose_binary(Moves.between(np.array([p, q]), np.array([q, p])), length).epsilon(1e-5)
    assert best <= adaptive <= best * 1.01


def exact_value(order: str, a: float, pairs: NDArray[np.float64], vote: tuple[float, float]) -> float:
    """Bellman's equation without a grid; `order` says when a screening (s) and when a vote (v) is asked."""
    if not order:
        return max(1 - a, 0.0)
    choices = pairs if order[0] == "s" else np.array([vote, (1 - vote[0], 1 - vote[1])])
    return max(
        float(p) * exact_value(order[1:], a * q / p, pairs, vote)
        + float(1 - p) * exact_value(order[1:], a * (1 - q) / (1 - p), pairs, vote)
        for p, q in choices
    )


@pytest.mark.parametrize("order", ["ssv", "svs", "vss", "vsvs", "svvs"])
def test_screenings_and_votes_in_any_order_cost_no_more_than_their_convolution(order: str) -> None:
    screening, rate, vote = NoisyScreening(1.0, 1.0, 2), 0.6, (1 / (1 + math.exp(0.4)), 1 / (1 + math.exp(-0.4)))
    accountant = PldAccountant()
    accountant.compose(PoissonSampledDpEvent(rate, screening), order.count("s")).compose(PureDp(0.4), order.count("v"))
    pairs = pairs_of(screening, rate)
    for epsilon in (0.1, 0.4, 0.8, 1.2):
        worst = max(exact_value(order, math.exp(epsilon), both, vote) for both in (pairs, pairs[:, ::-1]))
        assert worst <= accountant.delta(epsilon) <= worst * 1.2 + 1e-3


def test_interpolation_in_the_logarithm_would_undershoot() -> None:
    # Why the weights are linear in a: a chord in log(a) lies below a convex function of a.
    kernel = _Kernel.of(0.4, 0.6, 0.1, 0.05)
    mean = sum(w * math.exp(0.05 * s) for w, s in zip(kernel.weights, kernel.shifts, strict=True))
    assert mean == pytest.approx(1.0, rel=1e-12)  # sum_o P(o) Q(o)/P(o) = 1 is kept; log-weights give less


def test_the_curve_is_rounded_up() -> None:
    """Rounds in which an outcome gives the record away, in fractions: without a margin some curves are below."""
    for rounds, exponent in itertools.product((1, 10, 50, 200, 1000), (3, 5, 7, 10)):
        share = 2.0**-exponent
        curve = compose_binary(Moves(np.array([1 - share]), np.array([share]), np.array([share])), rounds)
        exact = 1 - (1 - Fraction(share)) ** rounds
        assert exact <= Fraction(float(curve.excess[-curve.first])) <= exact * (1 + Fraction(1, 10**11))


def test_more_rounds_more_noise_less_noise() -> None:
    def cost(n: int, noise: float = 20.0, rate: float = 0.5) -> float:
        return screening_curve(n, NoisyScreening(noise, 30, 50), sampling_rate=rate).epsilon(1e-6)

    assert cost(0) == 0
    assert 0 < cost(1) < cost(10) < cost(300) < 300 * cost(1)
    assert cost(10, noise=40.0) < cost(10) < cost(10, noise=10.0)
    assert cost(10, rate=0.1) < cost(10) < cost(10, rate=1.0)


def test_a_screening_without_noise_to_speak_of_is_not_private() -> None:
    loud = NoisyScreening(noise=0.01, threshold=1.5, n_neighbors=3)
    assert screening_curve(3, loud, sampling_rate=0.2).epsilon(1e-5) == math.inf
    assert screening_curve(1, loud, sampling_rate=0.2).delta(1.0) == pytest.approx(0.2, rel=1e-9)
    assert compute_screening_rdp(5, loud, sampling_rate=0.2) > 100


def test_a_threshold_out_of_reach_costs_nothing() -> None:
    assert screening_curve(100, NoisyScreening(5, 1000, 30)).epsilon(1e-9) == 0


def test_a_curve_that_is_not_convex_is_refused() -> None:
    with pytest.raises(ArithmeticError, match="not convex"):
        PrivacyCurve(0.1, -1, np.array([0.0, 0.1, 0.1, 0.0])).assert_convex(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", -1),
        ("n", 1.5),
        ("n", math.nan),
        ("sampling_rate", 0.0),
        ("sampling_rate", 1.01),
        ("sampling_rate", math.nan),
        ("noise", 0.0),
        ("noise", -1.0),
        ("noise", math.inf),
        ("threshold", math.nan),
        ("n_neighbors", 0),
        ("delta", 0.0),
        ("delta", 1.0),
        ("delta", math.nan),
        ("delta", "tiny"),
    ],
)
def test_bad_input_is_named(field: str, value: Any) -> None:
    screening: dict[str, Any] = {"noise": 5.0, "threshold": 3.0, "n_neighbors": 5}
    arguments: dict[str, Any] = {"n": 3, "sampling_rate": 0.1, "delta": 1e-5}
    (screening if field in screening else arguments)[field] = value
    delta = arguments.pop("delta")
    with pytest.raises(ValueError, match=rf"^{field} must"):
        screening_curve(screening=NoisyScreening(**screening), **arguments).epsilon(delta)


def test_other_bad_input_is_named() -> None:
    for order in (1.0, 0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="order must"):
            compute_screening_rdp(order, MNIST)
    for epsilon in (-1.0, 1e9, math.nan):
        with pytest.raises(ValueError, match="epsilon must"):
            screening_curve(1, MNIST).delta(epsilon)
    with pytest.raises(ValueError, match="direction must"):
        screening_curve(1, MNIST).epsilon(1e-5, "both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="direction must"):
        compute_fixed_pair_epsilon(1, MNIST, (1, 2), sampling_rate=1, delta=0.1, direction="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gain must"):
        Moves(np.array([0.5]), np.array([0.5]), np.array([0.6]))
    with pytest.raises(ValueError, match="sum to 1"):
        Moves(np.array([0.5]), np.array([0.6]), np.array([0.1]))
    with pytest.raises(ValueError, match="one length"):
        Moves(np.array([0.5]), np.array([0.5]), np.array([0.1, 0.1]))
