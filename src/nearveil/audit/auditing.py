"""The audit: choose attacks on one half of the runs, measure all of them on the other, and check the conduct."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nearveil.audit._experiment import Experiment, Outcomes, Pair, Watch
from nearveil.audit.attacks import _scores as attacks
from nearveil.audit.attacks._scores import (
    Direction,
    Event,
    Floats,
    Guesser,
    HockeyStick,
    Score,
    bound_event_epsilon,
    list_epsilons,
    score_likelihood,
)
from nearveil.audit.registry import AuditEntry, make_experiment
from nearveil.audit.report import FALSE_ALARM, Attack, Check, Curve, Report, Verdict
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import is_integer
from nearveil.privacy.noise import Source, secure_source

Progress = Callable[[int], None]

_LEAST = 400  # runs of either input
_POINTS = 200
_MOST_LEARNED = 40_000  # outcomes by which a learned score is judged, and runs that measure what did not show most
_LIKELIHOOD = "a threshold on the log-likelihood ratio"
_DIVERGENCE = "the hockey-stick divergence"
_WATCHED = 3  # checks besides those of the experiment: the stated density, the stated law, repeats


@dataclass(frozen=True, eq=False)
class _Chosen:
    """An attack that was chosen: nothing in it has seen the runs that will measure it."""

    pair: Pair
    name: str
    score: Score
    how: Event | Direction
    guesser: Guesser | None


@dataclass(frozen=True, eq=False)
class _Measured:
    """An attack with the runs that measure it."""

    chosen: _Chosen
    interval: Callable[[float], tuple[float, float]]  # from a mistake to the interval
    curve: Callable[[float, tuple[float, float]], Curve]  # from the mistake and the interval to what is drawn

    def judge(self, mistake: float, alarm: float, guarantee: Guarantee) -> Attack:
        """Return what is reported: each end of `alarm` is wrong with that probability."""
        refutes = self.interval(2 * alarm)[0] > guarantee.epsilon
        return Attack(self.chosen.name, self.chosen.pair.name, self.interval(mistake), refutes)


def audit(
    mechanism: Any,
    *,
    confidence: float = 0.95,
    trials: int | None = None,
    guarantee: Guarantee | None = None,
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
    guarantee : Guarantee, optional
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
    rng = secure_source() if source is None else source
    experiment = make_experiment(mechanism, rng)
    if guarantee is not None:
        experiment = replace(experiment, guarantee=guarantee)
    if not 0 < confidence < 1:
        raise ValueError("confidence must lie between 0 and 1")
    runs = experiment.trials if trials is None else trials
    if not is_integer(runs, _LEAST):
        raise ValueError(f"trials must be a whole number of at least {_LEAST}")
    tick, mistake, stated = progress or (lambda _: None), 1 - confidence, experiment.guarantee
    alarm = min(mistake, FALSE_ALARM) / 2  # for attacks, and as much for checks
    share = alarm / (_WATCHED + len(experiment.checks))
    watches = Watch(experiment.law), Watch(experiment.law)
    chosen, missing, density = _explore(experiment, runs // 2, (mistake, share), watches[0], rng, tick)
    measured = _measure(experiment, chosen, runs - runs // 2, watches[1], rng, tick)
    # The attack that showed most has half of the error, the others divide the rest.
    rest = alarm / 2 / max(1, len(measured) - 1)
    shown = [one.judge(mistake, rest if place else alarm / 2, stated) for place, one in enumerate(measured)]
    best, interval = chosen[0], shown[0].interval
    assert interval is not None
    return Report(
        mechanism=experiment.name,
        promised_epsilon=stated.epsilon,
        promised_delta=stated.delta,
        shown_epsilon=interval[0],
        interval=interval,
        attack=best.name,
        pair=best.pair.name,
        one_run=attacks.run_once(experiment, best.pair, best.score, best.guesser, mistake / 2, rng),
        trials=runs,
        confidence=confidence,
        sound=stated.sound,
        seeded=not rng.sound,
        attacks=(*shown, *missing),
        checks=(density, *_judge_watches(watches, share), *_check_conduct(experiment, share, rng, tick)),
        curve=measured[0].curve(mistake, interval),
    )


def audit_entry(
    entry: AuditEntry, *, confidence: float, effort: float, start: Callable[[str, int], Progress]
) -> Report:
    """Audit an entry; one that must be kept and is undecided is audited again, with twice the runs."""
    experiment = replace(entry.make(), name=entry.name)
    runs = max(_LEAST, int(experiment.trials * effort))
    report = audit(experiment, confidence=confidence, trials=runs, progress=start(entry.name, 2 * runs))
    if entry.expected != "kept" or report.verdict != "undecided":
        return report
    # Of forty intervals at 0.95 some begin too high or end too high.
    again = audit(experiment, confidence=confidence, trials=2 * runs, progress=start(f"{entry.name}, again", 4 * runs))
    note = f"{report.interval[0]:.4g} to {report.interval[1]:.4g} was undecided; this is a second audit, of fresh runs"
    return replace(again, notes=(*again.notes, note))


def judge_reports(found: Iterable[tuple[AuditEntry, Report]]) -> tuple[Verdict, list[str]]:
    """Compare what was found with what must be found: broken wins over undecided, and that over kept."""
    outcomes: list[tuple[Verdict, str]] = []
    for entry, report in found:
        says = f"{entry.name} must be {entry.expected}, and is {report.verdict}"
        if entry.expected == "kept" and report.verdict != "kept":
            outcomes.append((report.verdict, "; ".join([says, *report.reasons])))
        elif entry.expected == "broken" and report.verdict != "broken":
            outcomes.append(("broken", f"{says}: the audit is blind to it"))
    worst: Verdict = max((one for one, _ in outcomes), key=["kept", "undecided", "broken"].index, default="kept")
    return worst, [words for _, words in outcomes]


def _check_conduct(experiment: Experiment, share: float, rng: Source, tick: Progress) -> Iterator[Check]:
    for check in experiment.checks:
        tick(0)  # whoever waits may stop here
        yield check(rng, share)


def _judge_watches(watches: tuple[Watch, Watch], share: float) -> Iterator[Check]:
    """Judge what was looked at while the mechanism ran, to choose and to measure."""

    def judge(name: str, stated: object, found: Iterable[str | None], missing: str = "") -> Check:
        if stated is None:
            return Check(name, "not run", missing)
        wrong = next((one for one in found if one is not None), None)
        return Check(name, "passed") if wrong is None else Check(name, "failed", wrong)

    law, half = watches[0].law, share / 2
    single = law.uniforms or law.coins
    yield judge(
        "the stated law", single, (one.find_misfit(half) for one in watches), "none is stated of single outcomes"
    )
    yield judge("repeated outcomes", law.values, (one.find_repeats(half) for one in watches), "outcomes may come twice")
    if law.consistent is not None:
        yield judge("labels", law.consistent, (one.find_contradictions() for one in watches))


def _explore(
    experiment: Experiment,
    runs: int,
    mistakes: tuple[float, float],
    watch: Watch,
    rng: Source,
    tick: Progress,
) -> tuple[list[_Chosen], list[Attack], Check]:
    """Try every attack on every pair; return each where it shows most, and those that do not apply."""
    each = max(_LEAST // 2, runs // len(experiment.pairs))
    best: dict[str, _Chosen] = {}
    misfits: list[str] = []
    for pair in experiment.pairs:
        seen = [experiment.observe(pair, which, each, rng, watch) for which in (0, 1)]
        tick(2 * each)
        for one in _choose(experiment, pair, seen, (mistakes[0], mistakes[1] / len(experiment.pairs)), misfits):
            if one.name not in best or one.how.promising > best[one.name].how.promising:
                best[one.name] = one
    chosen = sorted(best.values(), key=lambda one: -one.how.promising)
    missing = [Attack(name, note=why) for name, why in _list_reasons(experiment, misfits).items() if name not in best]
    if not experiment.exact:
        return chosen, missing, Check("the stated density", "not run", "no exact density is stated")
    return chosen, missing, Check("the stated density", "failed" if misfits else "passed", "; ".join(misfits))


def _list_reasons(experiment: Experiment, misfits: list[str]) -> dict[str, str]:
    """Return the names of all attacks, with the reason why each may be missing."""
    learned = {f"a threshold on {name}": "does not apply to these outcomes" for name, _ in _list_learned(experiment)}
    unknown = "the stated density is not that of the runs" if misfits else "no exact density is stated"
    return {_LIKELIHOOD: "no density is stated", **learned, _DIVERGENCE: unknown}


def _list_learned(experiment: Experiment) -> tuple[tuple[str, attacks.Learn], ...]:
    return (*attacks.LEARNED, *experiment.scores)


def _choose(
    experiment: Experiment, pair: Pair, seen: list[Outcomes], mistakes: tuple[float, float], misfits: list[str]
) -> Iterator[_Chosen]:
    """Choose how each attack is made on one pair."""
    half, (mistake, share), stated = len(seen[0]) // 2, mistakes, experiment.guarantee
    train, judge = ([one[rows] for one in seen] for rows in (slice(0, half), slice(half, None)))

    def guesser(scores: list[Floats]) -> Guesser | None:
        return None if experiment.together is None else attacks.choose_guesser(scores[0], scores[1], mistake)

    for name, score in _learn_scores(experiment, train):
        # What was learned takes its time; the likelihood is there already, and sees rare events in all runs.
        scores = [score(one if score is score_likelihood else one[:_MOST_LEARNED]) for one in judge]
        event = attacks.choose_event(scores[0], scores[1], stated.delta, mistake)
        yield _Chosen(pair, name, score, event, guesser(scores))
    if not experiment.exact:
        return
    slices = attacks.Slices.choose(np.concatenate([score_likelihood(one) for one in train]))
    misfit = slices.find_misfit(score_likelihood(judge[0]), score_likelihood(judge[1]), share)
    if misfit is not None:
        misfits.append(f"{pair.name}: {misfit}")
        return
    losses = [score_likelihood(one) for one in seen]  # all of them: a density is not trained
    direction = attacks.choose_direction(losses[0], losses[1], stated.epsilon, stated.delta, mistake)
    yield _Chosen(pair, _DIVERGENCE, score_likelihood, direction, guesser(losses))


def _learn_scores(experiment: Experiment, train: list[Outcomes]) -> Iterator[tuple[str, Score]]:
    if train[0].losses is not None:
        yield _LIKELIHOOD, score_likelihood
    for name, learn in _list_learned(experiment):
        score = learn(train[0], train[1])
        if score is not None:
            yield f"a threshold on {name}", score


def _measure(
    experiment: Experiment, every: list[_Chosen], runs: int, watch: Watch, rng: Source, tick: Progress
) -> list[_Measured]:
    """Run anew: often on the pair of the best attack, less often on those of the others."""
    best, few = every[0], min(runs, _MOST_LEARNED)
    fewer = min(few, max(_LEAST // 2, runs // len(experiment.pairs)))  # so that all pairs take as long as the best one
    wanted = [runs, runs]
    if isinstance(best.how, Direction):  # one world is enough, so it has the runs of both
        wanted = [few, 2 * runs] if best.how.swapped else [2 * runs, few]
    pairs: dict[int, list[Outcomes]] = {}
    found = []
    for chosen in every:
        pair = chosen.pair
        if id(pair) not in pairs:
            counts = enumerate(wanted if pair is best.pair else [fewer, fewer])
            pairs[id(pair)] = [experiment.observe(pair, which, count, rng, watch) for which, count in counts]
            tick(2 * runs if chosen is best else 0)
        seen = pairs[id(pair)]
        if chosen is not best and chosen.score is not score_likelihood:
            seen = [one[:few] for one in seen]
        found.append(_measure_one(chosen, seen, experiment.guarantee))
    return found


def _measure_one(chosen: _Chosen, seen: list[Outcomes], guarantee: Guarantee) -> _Measured:
    own, other = seen[::-1] if chosen.how.swapped else seen
    if isinstance(chosen.how, Direction):
        losses, steps = score_likelihood(own), list_epsilons(guarantee.epsilon)
        stick = HockeyStick(-losses if chosen.how.swapped else losses)
        return _Measured(
            chosen,
            lambda mistake: stick.interval(guarantee.delta, mistake, steps),
            lambda mistake, interval: _draw_divergences(stick, steps, interval, guarantee, mistake),
        )
    event, runs = chosen.how, min(len(own), len(other))
    scores = [chosen.score(one[:runs]) for one in (own, other)]
    hits, false_hits = (event.count(one) for one in scores)

    def interval(mistake: float) -> tuple[float, float]:
        low, high = bound_event_epsilon(hits, false_hits, runs, guarantee.delta, mistake)
        return float(low), float(high)

    return _Measured(chosen, interval, lambda _, __: _draw_events(scores, event, (false_hits / runs, hits / runs)))


def _draw_events(scores: list[Floats], event: Event, chosen: tuple[float, float]) -> Curve:
    own, other = (np.sort(one if event.above else -one) for one in scores)
    at = np.unique(np.quantile(np.concatenate([own, other]), np.linspace(0, 1, _POINTS), method="nearest"))
    y, x = (1 - np.searchsorted(one, at, side="left" if event.above else "right") / len(one) for one in (own, other))
    return Curve("event", tuple(x.tolist()), tuple(y.tolist()), (), chosen)


def _draw_divergences(
    stick: HockeyStick, steps: Floats, interval: tuple[float, float], guarantee: Guarantee, mistake: float
) -> Curve:
    widest = 1.6 * max(interval[0], guarantee.epsilon if math.isfinite(guarantee.epsilon) else 0.0, 0.1)
    drawn = steps[steps <= widest]
    drawn = drawn[:: max(1, len(drawn) // _POINTS)]
    moments = [stick.at(float(epsilon)) for epsilon in drawn]
    low = tuple(max(one.low(mistake / 2), 0.0) for one in moments)
    return Curve("divergence", tuple(drawn.tolist()), tuple(one.mean for one in moments), low, interval)
