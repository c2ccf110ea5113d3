"""The audit: choose attacks on one half of the runs, measure all of them on the other, and check the conduct."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nearveil.audit._bounds import Floats, HockeyStick, event_epsilon, ladder
from nearveil.audit._experiment import Experiment, Outcomes, Pair
from nearveil.audit._law import Watch
from nearveil.audit._report import FALSE_ALARM, Attack, Check, Curve, Report
from nearveil.audit._subjects import experiment_of
from nearveil.audit.attacks._classifier import boosted, linear
from nearveil.audit.attacks._density import Direction, Slices, choose_direction
from nearveil.audit.attacks._low_bits import finest, patterns
from nearveil.audit.attacks._one_run import Guesser, choose_guesser, one_run
from nearveil.audit.attacks._threshold import Event, Score, choose_event, likelihood
from nearveil.audit.attacks._values import table
from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source, secure_source

Progress = Callable[[int], None]
Scoring = Callable[[Outcomes, Outcomes], Score | None]

_LEAST = 400  # runs of either input
_POINTS = 200
_MOST_LEARNED = 40_000  # outcomes by which a learned score is judged, and runs that measure what did not show most
_LIKELIHOOD = "a threshold on the log-likelihood ratio"
_DIVERGENCE = "the hockey-stick divergence"
_SCORES: tuple[tuple[str, Scoring], ...] = (
    ("a linear classifier", linear),
    ("boosted trees", boosted),
    ("a table of outcomes", table),
    ("the finest bit", finest),
    ("boosted trees on low bits", patterns),
)
_WATCHED = 3  # checks besides those of the experiment: the stated density, the stated law, repeats


@dataclass(frozen=True, eq=False)
class _Plan:
    """An attack that was chosen: nothing in it has seen the runs that will measure it."""

    pair: Pair
    name: str
    score: Score
    how: Event | Direction
    guesser: Guesser | None


@dataclass(frozen=True, eq=False)
class _Measured:
    """An attack with the runs that measure it."""

    plan: _Plan
    interval: Callable[[float], tuple[float, float]]  # from a mistake to the interval
    curve: Callable[[float, tuple[float, float]], Curve]  # from the mistake and the interval to what is drawn

    def told(self, mistake: float, alarm: float, promised: Guarantee) -> Attack:
        """Return what is reported: each end of `alarm` is wrong with that probability."""
        refutes = self.interval(2 * alarm)[0] > promised.epsilon
        return Attack(self.plan.name, self.plan.pair.name, self.interval(mistake), refutes)


def audit(
    mechanism: Any,
    *,
    confidence: float = 0.95,
    trials: int | None = None,
    promise: Guarantee | None = None,
    source: Source | None = None,
    progress: Progress | None = None,
) -> Report:
    """Attack a mechanism's guarantee, check its conduct, and report the epsilon that could be shown.

    Half of the runs choose: which pair of inputs, which threshold, which direction for each attack. The other half
    measures, so that intervals are valid (``docs/theory/audit.md``; ``tests/audit/test_audit.py``). All attacks and all
    checks are run, whatever the first of them finds. A sound mechanism is called broken with a probability of at most
    5e-7.

    Parameters
    ----------
    mechanism : Release, voting estimator, Student, PrivatePCA, GaussianNoise, LaplaceNoise or Experiment
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
    >>> from nearveil.mechanisms import PrivUnit
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
    tick, mistake, promised = progress or (lambda _: None), 1 - confidence, experiment.promise
    alarm = min(mistake, FALSE_ALARM) / 2  # for attacks, and as much for checks
    share = alarm / (_WATCHED + len(experiment.checks))
    watches = Watch(experiment.law), Watch(experiment.law)
    plans, missing, density = _explore(experiment, runs // 2, (mistake, share), watches[0], words, tick)
    measured = _measure(experiment, plans, runs - runs // 2, watches[1], words, tick)
    # The attack that showed most has half of the error, the others divide the rest.
    rest = alarm / 2 / max(1, len(measured) - 1)
    attacks = [one.told(mistake, rest if place else alarm / 2, promised) for place, one in enumerate(measured)]
    best, interval = plans[0], attacks[0].interval
    assert interval is not None
    return Report(
        mechanism=experiment.name,
        promised_epsilon=promised.epsilon,
        promised_delta=promised.delta,
        shown_epsilon=interval[0],
        interval=interval,
        attack=best.name,
        pair=best.pair.name,
        one_run=one_run(experiment, best.pair, best.score, best.guesser, mistake / 2, words),
        trials=runs,
        confidence=confidence,
        sound=promised.sound,
        seeded=not words.sound,
        attacks=(*attacks, *missing),
        checks=(density, *_watched(watches, share), *_conduct(experiment, share, words, tick)),
        curve=measured[0].curve(mistake, interval),
    )


def _conduct(experiment: Experiment, share: float, source: Source, tick: Progress) -> Iterator[Check]:
    for check in experiment.checks:
        tick(0)  # whoever waits may stop here
        yield check(source, share)


def _watched(watches: tuple[Watch, Watch], share: float) -> Iterator[Check]:
    """Judge what was looked at while the mechanism ran, to choose and to measure."""
    law, half = watches[0].law, share / 2
    stated = law.uniforms or law.coins
    yield _judged("the stated law", stated, (one.misfit(half) for one in watches), "none is stated of single outcomes")
    yield _judged("repeated outcomes", law.values, (one.repeated(half) for one in watches), "outcomes may come twice")
    if law.consistent is not None:
        yield _judged("labels", law.consistent, (one.inconsistent() for one in watches), "")


def _judged(name: str, stated: object, found: Iterator[str | None], missing: str) -> Check:
    if stated is None:
        return Check(name, "not run", missing)
    wrong = next((one for one in found if one is not None), None)
    return Check(name, "passed") if wrong is None else Check(name, "failed", wrong)


def _explore(
    experiment: Experiment,
    runs: int,
    mistakes: tuple[float, float],
    watch: Watch,
    source: Source,
    tick: Progress,
) -> tuple[list[_Plan], list[Attack], Check]:
    """Try every attack on every pair.

    Returns each attack on the pair where it shows most, the best attack first, nothing of it a bound; the attacks that
    do not apply; and whether the stated density is that of the runs.
    """
    each = max(_LEAST // 2, runs // len(experiment.pairs))
    best: dict[str, _Plan] = {}
    misfits: list[str] = []
    for pair in experiment.pairs:
        seen = [experiment.seen(pair, which, each, source, watch) for which in (0, 1)]
        tick(2 * each)
        for plan in _plans(experiment, pair, seen, (mistakes[0], mistakes[1] / len(experiment.pairs)), misfits):
            if plan.name not in best or plan.how.promising > best[plan.name].how.promising:
                best[plan.name] = plan
    plans = sorted(best.values(), key=lambda plan: -plan.how.promising)
    missing = [Attack(name, note=why) for name, why in _names(experiment, misfits).items() if name not in best]
    if not experiment.exact:
        return plans, missing, Check("the stated density", "not run", "no exact density is stated")
    return plans, missing, Check("the stated density", "failed" if misfits else "passed", "; ".join(misfits))


def _names(experiment: Experiment, misfits: list[str]) -> dict[str, str]:
    """Return the names of all attacks, with the reason why each may be missing."""
    learned = {_threshold(name): "does not apply to these outcomes" for name, _ in (*_SCORES, *experiment.scores)}
    unknown = "the stated density is not that of the runs" if misfits else "no exact density is stated"
    return {_LIKELIHOOD: "no density is stated", **learned, _DIVERGENCE: unknown}


def _threshold(name: str) -> str:
    return f"a threshold on {name}"


def _plans(
    experiment: Experiment, pair: Pair, seen: list[Outcomes], mistakes: tuple[float, float], misfits: list[str]
) -> Iterator[_Plan]:
    half, (mistake, share) = len(seen[0]) // 2, mistakes
    train, choose = ([one.part(rows) for one in seen] for rows in (slice(0, half), slice(half, None)))
    promised = experiment.promise
    for name, score in _scores(experiment, train):
        # What was learned takes its time; the likelihood is there already, and sees rare events in all runs.
        scores = [score(one if score is likelihood else one.part(slice(0, _MOST_LEARNED))) for one in choose]
        event = choose_event(scores[0], scores[1], promised.delta, mistake)
        yield _Plan(pair, name, score, event, _guesser(experiment, scores, mistake))
    if not experiment.exact:
        return
    slices = Slices.choose(np.concatenate([likelihood(one) for one in train]))
    misfit = slices.misfit(likelihood(choose[0]), likelihood(choose[1]), share)
    if misfit is not None:
        misfits.append(f"{pair.name}: {misfit}")
        return
    losses = [likelihood(one) for one in seen]
    direction = choose_direction(losses[0], losses[1], promised.epsilon, promised.delta, mistake)
    yield _Plan(pair, _DIVERGENCE, likelihood, direction, _guesser(experiment, losses, mistake))


def _guesser(experiment: Experiment, scores: list[Floats], mistake: float) -> Guesser | None:
    return None if experiment.together is None else choose_guesser(scores[0], scores[1], mistake)


def _scores(experiment: Experiment, train: list[Outcomes]) -> Iterator[tuple[str, Score]]:
    if train[0].losses is not None:
        yield _LIKELIHOOD, likelihood
    for name, learn in (*_SCORES, *experiment.scores):
        score = learn(train[0], train[1])
        if score is not None:
            yield _threshold(name), score


def _measure(
    experiment: Experiment, plans: list[_Plan], runs: int, watch: Watch, source: Source, tick: Progress
) -> list[_Measured]:
    """Run anew: often on the pair of the best attack, less often on those of the others."""
    best, few = plans[0], min(runs, _MOST_LEARNED)
    fewer = min(few, max(_LEAST // 2, runs // len(experiment.pairs)))  # so that all pairs take as long as the best one
    wanted = [runs, runs]
    if isinstance(best.how, Direction):  # one world is enough, so it has the runs of both
        wanted = [few, 2 * runs] if best.how.swapped else [2 * runs, few]
    pairs: dict[int, list[Outcomes]] = {}
    found = []
    for plan in plans:
        counts = wanted if plan.pair is best.pair else [fewer, fewer]
        if id(plan.pair) not in pairs:
            pairs[id(plan.pair)] = [
                experiment.seen(plan.pair, which, count, source, watch) for which, count in enumerate(counts)
            ]
            tick(2 * runs if plan is best else 0)
        seen = pairs[id(plan.pair)]
        if plan is not best and plan.score is not likelihood:
            seen = [one.part(slice(0, few)) for one in seen]
        found.append(_measured(plan, seen, experiment.promise))
    return found


def _measured(plan: _Plan, seen: list[Outcomes], promised: Guarantee) -> _Measured:
    own, other = seen[::-1] if plan.how.swapped else seen
    if isinstance(plan.how, Direction):
        losses, steps = likelihood(own), ladder(promised.epsilon)
        stick = HockeyStick(-losses if plan.how.swapped else losses)
        return _Measured(
            plan,
            lambda mistake: stick.interval(promised.delta, mistake, steps),
            lambda mistake, interval: _divergences(stick, steps, interval, promised, mistake),
        )
    event, runs = plan.how, min(len(own), len(other))
    scores = [plan.score(one.part(slice(0, runs))) for one in (own, other)]
    hits, false_hits = (event.holds(one) for one in scores)

    def interval(mistake: float) -> tuple[float, float]:
        low, high = event_epsilon(hits, false_hits, runs, promised.delta, mistake)
        return float(low), float(high)

    return _Measured(plan, interval, lambda _, __: _events(scores, event, (false_hits / runs, hits / runs)))


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
