"""The audit: choose the best attack on one half of the runs, measure it on the other."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nearveil.audit._attack_classifier import boosted, linear
from nearveil.audit._attack_density import Direction, choose_direction
from nearveil.audit._attack_low_bits import finest, patterns
from nearveil.audit._attack_one_run import Guesser, choose_guesser, one_run
from nearveil.audit._attack_threshold import Event, Score, choose_event, likelihood
from nearveil.audit._attack_values import table
from nearveil.audit._bounds import Floats, HockeyStick, event_epsilon, ladder
from nearveil.audit._experiment import Experiment, Outcomes, Pair
from nearveil.audit._report import Curve, Report
from nearveil.audit._subjects import experiment_of
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source, secure_source

Progress = Callable[[int], None]
Scoring = Callable[[Outcomes, Outcomes], Score | None]

_LEAST = 400  # runs of either input
_POINTS = 200
_MOST_CHOOSING = 40_000  # outcomes by which a learned score is judged
_WITHOUT_DENSITY: tuple[tuple[str, Scoring], ...] = (
    ("a linear classifier", linear),
    ("boosted trees", boosted),
    ("a table of outcomes", table),
)
_ALWAYS: tuple[tuple[str, Scoring], ...] = (
    ("the finest bit", finest),
    ("boosted trees on low bits", patterns),
)


@dataclass(frozen=True, eq=False)
class _Plan:
    """An attack that was chosen: nothing in it has seen the runs that will measure it."""

    pair: Pair
    name: str
    score: Score
    how: Event | Direction
    guesser: Guesser | None


def audit(
    mechanism: Any,
    *,
    confidence: float = 0.95,
    trials: int | None = None,
    promise: Guarantee | None = None,
    source: Source | None = None,
    progress: Progress | None = None,
) -> Report:
    """Attack a mechanism's promise and report the epsilon that could be shown.

    Half of the runs choose: which pair of inputs, which attack, which threshold, which direction. The other half
    measures what was chosen, so that the interval is valid (``docs/theory/audit.md``; ``tests/audit/test_audit.py``).

    Parameters
    ----------
    mechanism : Release, voting classifier, PrivatePCA, GaussianNoise, LaplaceNoise or Experiment
        What is not fitted is fitted on 200 random rows of 16 dimensions in 4 classes.
    confidence : float, default=0.95
        Of the interval.
    trials : int, optional
        Runs of either input, at least 400. By default what the experiment says, 200,000 for most.
    promise : Guarantee, optional
        A claim to be audited in place of the mechanism's own guarantee.
    source : Source, optional
        Of the mechanism's randomness: the operating system's, unless a test asks for a seed.
    progress : callable, optional
        Called with how many runs were finished since the last call.

    Returns
    -------
    Report

    Examples
    --------
    >>> from nearveil.privacy.noise import unsafe_seeded
    >>> from nearveil.release import PrivUnit
    >>> report = audit(PrivUnit(2.0), trials=20_000, source=unsafe_seeded(0))  # a seed, so that this repeats
    >>> report.verdict, report.shown_epsilon <= 2.0
    ('kept', True)
    """
    words = secure_source() if source is None else source
    experiment = experiment_of(mechanism, words)
    if promise is not None:
        experiment = replace(experiment, promise=promise)
    if not 0 < confidence < 1:
        raise ValueError("confidence must lie between 0 and 1")
    runs = experiment.trials if trials is None else trials
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < _LEAST:
        raise ValueError(f"trials must be a whole number of at least {_LEAST}")
    tick = progress or (lambda _: None)
    plan, notes = _explore(experiment, runs // 2, 1 - confidence, words, tick)
    interval, curve = _measure(experiment, plan, runs - runs // 2, 1 - confidence, words, tick)
    promised = experiment.promise
    return Report(
        mechanism=experiment.name,
        promised_epsilon=promised.epsilon,
        promised_delta=promised.delta,
        shown_epsilon=interval[0],
        interval=interval,
        attack=plan.name,
        pair=plan.pair.name,
        one_run=one_run(experiment, plan.pair, plan.score, plan.guesser, (1 - confidence) / 2, words),
        trials=runs,
        confidence=confidence,
        sound=promised.sound,
        seeded=not words.sound,
        notes=notes,
        curve=curve,
    )


def _explore(
    experiment: Experiment, runs: int, mistake: float, source: Source, tick: Progress
) -> tuple[_Plan, tuple[str, ...]]:
    """Try every attack on every pair and return the one that shows most; nothing of it is a bound."""
    each = max(_LEAST // 2, runs // len(experiment.pairs))
    best: tuple[float, _Plan] | None = None
    notes: list[str] = []
    for pair in experiment.pairs:
        seen = [experiment.seen(pair, which, each, source) for which in (0, 1)]
        tick(2 * each)
        for shown, plan in _plans(experiment, pair, seen, mistake, notes):
            if best is None or shown > best[0]:
                best = shown, plan
    assert best is not None
    return best[1], tuple(dict.fromkeys(notes))


def _plans(
    experiment: Experiment, pair: Pair, seen: list[Outcomes], mistake: float, notes: list[str]
) -> Iterator[tuple[float, _Plan]]:
    half = len(seen[0]) // 2
    train, choose = ([one.part(rows) for one in seen] for rows in (slice(0, half), slice(half, None)))
    promised = experiment.promise
    for name, score in _scores(experiment, train):
        # What was learned takes its time; the likelihood is there already, and sees rare events in all runs.
        scores = [score(one if score is likelihood else one.part(slice(0, _MOST_CHOOSING))) for one in choose]
        event = choose_event(scores[0], scores[1], promised.delta, mistake)
        yield (
            event.promising,
            _Plan(pair, f"a threshold on {name}", score, event, _guesser(experiment, scores, mistake)),
        )
    if experiment.exact:
        direction = choose_direction(seen[0], seen[1], promised.epsilon, promised.delta, mistake)
        if direction is None:
            notes.append("the stated density is not that of the runs: it was used as a score alone")
            return
        losses = [likelihood(one) for one in seen]
        guesser = _guesser(experiment, losses, mistake)
        yield direction.promising, _Plan(pair, "the hockey-stick divergence", likelihood, direction, guesser)


def _guesser(experiment: Experiment, scores: list[Floats], mistake: float) -> Guesser | None:
    return None if experiment.together is None else choose_guesser(scores[0], scores[1], mistake)


def _scores(experiment: Experiment, train: list[Outcomes]) -> Iterator[tuple[str, Score]]:
    if train[0].losses is not None:
        yield "the log-likelihood ratio", likelihood
    learned = (_ALWAYS if train[0].losses is not None else _WITHOUT_DENSITY + _ALWAYS) + experiment.scores
    for name, learn in learned:
        score = learn(train[0], train[1])
        if score is not None:
            yield name, score


def _measure(
    experiment: Experiment, plan: _Plan, runs: int, mistake: float, source: Source, tick: Progress
) -> tuple[tuple[float, float], Curve]:
    """Run anew and return the interval of the plan that was chosen."""
    promised = experiment.promise
    own, other = (1, 0) if plan.how.swapped else (0, 1)
    if isinstance(plan.how, Direction):
        # One world is enough, so it has the runs of both.
        losses = likelihood(experiment.seen(plan.pair, own, 2 * runs, source))
        tick(2 * runs)
        stick, steps = HockeyStick(-losses if plan.how.swapped else losses), ladder(promised.epsilon)
        interval = stick.interval(promised.delta, mistake, steps)
        return interval, _divergences(stick, steps, interval, promised, mistake)
    scores = [plan.score(experiment.seen(plan.pair, which, runs, source)) for which in (own, other)]
    tick(2 * runs)
    hits, false_hits = (plan.how.holds(one) for one in scores)
    low, high = event_epsilon(hits, false_hits, runs, promised.delta, mistake)
    return (float(low), float(high)), _events(scores, plan.how, (false_hits / runs, hits / runs))


def _events(scores: list[Floats], event: Event, chosen: tuple[float, float]) -> Curve:
    own, other = (np.sort(one if event.above else -one) for one in scores)
    at = np.unique(np.quantile(np.concatenate([own, other]), np.linspace(0, 1, _POINTS), method="nearest"))
    y, x = (1 - np.searchsorted(one, at, side="left" if event.above else "right") / len(one) for one in (own, other))
    return Curve("event", tuple(x.tolist()), tuple(y.tolist()), (), chosen)


def _divergences(
    stick: HockeyStick, steps: Floats, interval: tuple[float, float], promised: Guarantee, mistake: float
) -> Curve:
    widest = 1.6 * max(interval[0], promised.epsilon if math.isfinite(promised.epsilon) else 0.0, 0.1)
    drawn = steps[steps <= widest]
    drawn = drawn[:: max(1, len(drawn) // _POINTS)]
    moments = [stick.at(float(epsilon)) for epsilon in drawn]
    low = tuple(max(one.low(mistake / 2), 0.0) for one in moments)
    return Curve("divergence", tuple(drawn.tolist()), tuple(one.mean for one in moments), low, interval)
