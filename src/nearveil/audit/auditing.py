"""Audits: choose attacks on half of the runs, measure them on the other half, and check the mechanism's conduct."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nearveil.audit import _scores as attacks
from nearveil.audit._experiment import Experiment, Floats, LawTest, Outcomes, Pair
from nearveil.audit._scores import Bound, Direction, Event, Guesser, Score, score_likelihood
from nearveil.audit.registry import AuditEntry, make_experiment
from nearveil.audit.report import FALSE_ALARM, Attack, Check, Report, Verdict, judge
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_integer
from nearveil.privacy.noise import Source, secure_source
from nearveil.progress import Progress, Tick

_MIN_TRIALS = 400  # runs of either input
_MAX_SCORED = 40_000  # outcomes for learned scores, and for attacks other than the best
_LIKELIHOOD = "a threshold on the log-likelihood ratio"
_DIVERGENCE = "the hockey-stick divergence"
_LAW_CHECKS = 3  # besides those of the experiment: the stated density, the stated law, repeats


@dataclass(frozen=True, eq=False)
class _Plan:
    """An attack, chosen without access to the runs that will measure it."""

    pair: Pair
    name: str
    score: Score
    method: Event | Direction
    guesser: Guesser | None


def audit(
    mechanism: Any,
    *,
    confidence: float = 0.95,
    trials: int | None = None,
    guarantee: Guarantee | None = None,
    source: Source | None = None,
    progress: Tick | None = None,
) -> Report:
    """Attack a mechanism's guarantee, check its conduct, and report the epsilon that could be shown.

    Half of the runs choose the pair of inputs, the threshold and the direction of each attack. The other half measures,
    so the intervals are valid (``docs/theory/audit.md``; ``tests/audit/test_audit.py``). All attacks and checks run,
    whatever the first of them shows. A sound mechanism is called broken with a probability of at most 5e-7.

    Parameters
    ----------
    mechanism : Release, GaussianNoise, LaplaceNoise or Experiment; with nearveil-studies also an estimator
        If it is not fitted, it is fitted on 200 random rows of 16 dimensions in 4 classes.
    confidence : float, default=0.95
        Of the interval.
    trials : int, optional
        Runs of either input, at least 400. By default the number that the experiment sets, often 200,000.
    guarantee : Guarantee, optional
        A claim to audit instead of the mechanism's own guarantee.
    source : Source, optional
        Of the mechanism's randomness. The operating system's by default.
    progress : callable, optional
        Called with the number of runs finished since the last call.

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
        raise ValueError("confidence must be between 0 and 1")
    runs = experiment.trials if trials is None else trials
    check_integer(runs, "trials", _MIN_TRIALS)
    tick, alpha, claim = progress or (lambda _: None), 1 - confidence, experiment.guarantee
    refute_alpha = min(alpha, FALSE_ALARM) / 2  # for all attacks, and again for all checks
    check_alpha = refute_alpha / (_LAW_CHECKS + len(experiment.checks))
    tests = LawTest(experiment.law), LawTest(experiment.law)
    plans, misfits = _choose_attacks(experiment, runs // 2, (alpha, check_alpha), tests[0], rng, tick)
    bounds = _measure(experiment, plans, runs - runs // 2, tests[1], rng, tick)
    # The attack that was chosen as the best has half of the error, the rest share the other half.
    rest = refute_alpha / 2 / max(1, len(plans) - 1)
    results = [
        Attack(plan.name, plan.pair.name, bound(alpha), bound(2 * share)[0] > claim.epsilon)
        for plan, bound, share in zip(plans, bounds, [refute_alpha / 2] + [rest] * (len(plans) - 1), strict=True)
    ]
    best, interval = plans[0], bounds[0](alpha)
    return Report(
        mechanism=experiment.name,
        promised_epsilon=claim.epsilon,
        promised_delta=claim.delta,
        shown_epsilon=interval[0],
        interval=interval,
        attack=best.name,
        pair=best.pair.name,
        one_run=attacks.estimate_one_run(experiment, best.pair, best.score, best.guesser, alpha / 2, rng),
        trials=runs,
        confidence=confidence,
        sound=claim.sound,
        seeded=not rng.sound,
        attacks=(*results, *_list_skipped(plans, misfits)),
        checks=(
            *_judge_law(experiment, misfits, tests, check_alpha),
            *(check(rng, check_alpha) for check in experiment.checks),
        ),
    )


def _choose_attacks(
    experiment: Experiment, runs: int, alphas: tuple[float, float], test: LawTest, rng: Source, tick: Tick
) -> tuple[list[_Plan], list[str]]:
    """Try every attack on every pair; return each on its best pair, and where the stated density is wrong."""
    each = max(_MIN_TRIALS // 2, runs // len(experiment.pairs))
    best: dict[str, _Plan] = {}
    misfits: list[str] = []
    for pair in experiment.pairs:
        worlds = [experiment.observe(pair, world, each, rng, test) for world in (0, 1)]
        tick(2 * each)
        for plan in _plan_attacks(experiment, pair, worlds, (alphas[0], alphas[1] / len(experiment.pairs)), misfits):
            if plan.name not in best or plan.method.estimate > best[plan.name].method.estimate:
                best[plan.name] = plan
    return sorted(best.values(), key=lambda plan: -plan.method.estimate), misfits


def _plan_attacks(
    experiment: Experiment, pair: Pair, worlds: list[Outcomes], alphas: tuple[float, float], misfits: list[str]
) -> Iterator[_Plan]:
    """Choose the threshold and direction of each attack on one pair; append a wrong density to `misfits`."""
    half, (alpha, check_alpha), claim = len(worlds[0]) // 2, alphas, experiment.guarantee
    train, judge = ([outcomes[rows] for outcomes in worlds] for rows in (slice(0, half), slice(half, None)))

    def choose_guesser(scores: list[Floats]) -> Guesser | None:
        return None if experiment.run_once is None else attacks.choose_guesser(scores[0], scores[1], alpha)

    scores_by_name = [(f"a threshold on {name}", learn(*train)) for name, learn in attacks.LEARNED]
    for name, score in [(_LIKELIHOOD, None if train[0].losses is None else score_likelihood), *scores_by_name]:
        if score is None:
            continue
        # Learned scores are slow. The likelihood is already computed, and all runs are needed to see rare events.
        scores = [score(part if score is score_likelihood else part[:_MAX_SCORED]) for part in judge]
        event = attacks.choose_event(scores[0], scores[1], claim.delta, alpha)
        yield _Plan(pair, name, score, event, choose_guesser(scores))
    if not experiment.exact:
        return
    slices = attacks.Slices.choose(np.concatenate([score_likelihood(part) for part in train]))
    misfit = slices.find_misfit(score_likelihood(judge[0]), score_likelihood(judge[1]), check_alpha)
    if misfit is not None:
        misfits.append(f"{pair.name}: {misfit}")
        return
    losses = [score_likelihood(outcomes) for outcomes in worlds]  # all of them: a density needs no training
    direction = attacks.choose_direction(losses[0], losses[1], claim.epsilon, claim.delta, alpha)
    yield _Plan(pair, _DIVERGENCE, score_likelihood, direction, choose_guesser(losses))


def _measure(
    experiment: Experiment, plans: list[_Plan], runs: int, test: LawTest, rng: Source, tick: Tick
) -> list[Bound]:
    """Measure all attacks on fresh runs: many on the pair of the best attack, fewer on the other pairs."""
    best, few = plans[0], min(runs, _MAX_SCORED)
    fewer = min(few, max(_MIN_TRIALS // 2, runs // len(experiment.pairs)))  # all other pairs take as long as the best
    counts = [runs, runs]
    if isinstance(best.method, Direction):  # only one world is needed, so it gets the runs of both
        counts = [few, 2 * runs] if best.method.swapped else [2 * runs, few]
    observed: dict[int, list[Outcomes]] = {}
    bounds = []
    for plan in plans:
        pair = plan.pair
        if id(pair) not in observed:
            sizes = counts if pair is best.pair else [fewer, fewer]
            observed[id(pair)] = [experiment.observe(pair, world, sizes[world], rng, test) for world in (0, 1)]
            tick(2 * runs if plan is best else 0)
        worlds = observed[id(pair)]
        if plan is not best and plan.score is not score_likelihood:
            worlds = [outcomes[:few] for outcomes in worlds]
        bounds.append(plan.method.measure(plan.score, worlds, experiment.guarantee))
    return bounds


def _list_skipped(plans: list[_Plan], misfits: list[str]) -> Iterator[Attack]:
    """Yield the attacks that were not names, and why."""
    unknown = "the stated density is not that of the runs" if misfits else "no exact density is stated"
    inapplicable = {f"a threshold on {name}": "does not apply to these outcomes" for name, _ in attacks.LEARNED}
    notes = {_LIKELIHOOD: "no density is stated", **inapplicable, _DIVERGENCE: unknown}
    names = {plan.name for plan in plans}
    return (Attack(name, note=note) for name, note in notes.items() if name not in names)


def _judge_law(
    experiment: Experiment, misfits: list[str], tests: tuple[LawTest, LawTest], alpha: float
) -> Iterator[Check]:
    """Judge the stated density and the stated law by the runs of both halves."""
    law, half = experiment.law, alpha / 2
    density = "; ".join(misfits) or None
    misfit = tests[0].find_misfit(half) or tests[1].find_misfit(half)
    repeats = tests[0].find_repeats(half) or tests[1].find_repeats(half)
    for name, statement, problem, missing in (
        ("the stated density", experiment.exact, density, "no exact density is stated"),
        ("the stated law", law.uniforms or law.coins, misfit, "no law of single outcomes is stated"),
        ("repeated outcomes", law.values, repeats, "outcomes may repeat"),
    ):
        yield judge(name, problem) if statement else Check(name, "not run", missing)
    if law.consistent:
        yield judge("labels", tests[0].find_contradictions() or tests[1].find_contradictions())


def audit_entry(entry: AuditEntry, *, confidence: float, effort: float, start: Progress) -> Report:
    """Audit an entry. If it must be kept and is undecided, audit it again with twice the runs."""
    experiment = replace(entry.make(), name=entry.name)
    runs = max(_MIN_TRIALS, int(experiment.trials * effort))
    report = audit(experiment, confidence=confidence, trials=runs, progress=start(entry.name, 2 * runs))
    if entry.expected != "kept" or report.verdict != "undecided":
        return report
    # A few of forty intervals at 0.95 start or end too high.
    again = audit(experiment, confidence=confidence, trials=2 * runs, progress=start(f"{entry.name}, again", 4 * runs))
    note = f"{report.interval[0]:.4g} to {report.interval[1]:.4g} was undecided; this is a second audit, of fresh runs"
    return replace(again, notes=(*again.notes, note))


def judge_reports(reports: Iterable[tuple[AuditEntry, Report]]) -> tuple[Verdict, list[str]]:
    """Compare verdicts with the expected ones; return the worst outcome and a message for each problem."""
    worst: Verdict = "kept"
    problems = []
    for entry, report in reports:
        message = f"{entry.name} must be {entry.expected}, and is {report.verdict}"
        if entry.expected == "kept" and report.verdict != "kept":
            problems.append("; ".join([message, *report.reasons]))
            worst = "broken" if "broken" in (worst, report.verdict) else "undecided"
        elif entry.expected == "broken" and report.verdict != "broken":
            problems.append(f"{message}: the audit is blind to it")
            worst = "broken"
    return worst, problems
