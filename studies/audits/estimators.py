"""Membership experiments: voting estimators, students and discriminants, with and without one record."""

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from nearveil.audit._experiment import (
    DIMENSION,
    Bools,
    Coin,
    Experiment,
    Floats,
    Law,
    Pair,
    compute_losses,
    compute_uniforms,
    count_trials,
    make_check,
    make_frozen_check,
)
from nearveil.privacy.noise import Source
from nearveil.private_knn import (
    ExhaustedError,
    PrivateDiscriminant,
    PublicDiscriminant,
    Student,
)
from nearveil.private_knn.discriminant_model import (
    SHRINKAGE,
    ClassProjection,
    NoisyStatistics,
    PublicMoments,
    calibrate_scores,
    estimate_means,
    fit_discriminant,
)
from studies.audits.conduct import ACCOUNT, VotingSession, find_private, make_vote_checks, open_ledger
from studies.audits.readers import (
    LARGEST_VALUE,
    AnswerRows,
    ClassReader,
    VoteReader,
    VotingRecords,
    count_queries,
    make_reader,
    make_records_pair,
    make_twin,
)

_CLUSTER_RADIUS = 0.05
_LARGEST_CLUSTER = 128
_PUBLIC = 16  # rows for a student
_FEATURES, _PER_CLASS = 3, 4  # features and records per class, for a discriminant
_CLASSES = tuple(range(8))
_COPIES = 64  # of each record in a large database
_ROW, _COUNT = 2364, 591  # integer weights of a unit row and of a count (docs/theory/private-discriminant.md)
_MODEL_NUMBERS = ("counts", "weights", "biases")  # of a model, besides its public part
_FIT_TRIALS = 400  # if every run is a fit


@dataclass(frozen=True, eq=False)
class PlanRuns:
    """Answers of many runs of the whole plan."""

    rows: AnswerRows  # of all queries of all runs, without a cap
    starts: NDArray[np.int64]  # the first query of each run
    sent: Bools  # which queries are sent: none after the cap on answers
    predicted: NDArray[Any] | None = None  # other published labels, shape (runs, k)

    @property
    def answered(self) -> Bools:
        """Whether each query of all runs was answered."""
        return self.rows.answered & self.sent

    @property
    def released(self) -> Floats:
        """The released numbers of all queries that pass their screening."""
        return self.rows.values[self.rows.answered]

    @property
    def numbers(self) -> Floats:
        """Number of answers, sums of released numbers, sums of labels, and predictions, by run."""
        columns = np.column_stack([self.answered, self.rows.values, self.rows.labels])
        sums = self.add(np.where(self.answered[:, None], columns, 0.0))
        return sums if self.predicted is None else np.column_stack([sums, self.predicted])

    def add(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over the queries of each run."""
        return np.add.reduceat(values, self.starts)


def make_membership_experiment(voter: Any) -> Experiment:
    """Return the experiment of a voting estimator: the whole plan is asked at the target record."""
    reader = make_reader(voter)
    queries = count_queries(reader.plan)

    def run(records: VotingRecords, runs: int, source: Source) -> PlanRuns:
        fitted = make_twin(reader, source).fit(records.X, records.y)
        return _split_runs(reader, fitted.answer(np.tile(reader.query, (runs * queries, 1))), queries)

    return Experiment(
        name=type(reader.voter).__name__,
        guarantee=reader.guarantee,
        pairs=reader.pairs,
        run=run,
        log_ratio=partial(_compute_losses, reader) if reader.has_exact_law else None,
        exact=reader.has_exact_law,
        numbers=lambda runs: runs.numbers,
        run_once=_make_run_once(reader),
        law=_state_law(reader),
        checks=make_vote_checks(reader),
        trials=count_trials(reader.guarantee.delta),
    )


def _split_runs(reader: VoteReader, answers: Any, queries: int) -> PlanRuns:
    """Split answers into runs of the plan, each of which stops at the cap."""
    rows = reader.read(answers)
    passed = rows.answered.reshape(-1, queries)
    sent = np.asarray(np.cumsum(passed, axis=1) - passed < reader.plan.max_answered)
    return PlanRuns(rows, np.arange(0, passed.size, queries), sent.ravel())


def _state_law(reader: VoteReader) -> Law:
    """Return the law of screenings and votes. It ignores caps, because queries are independent."""

    def list_coins(runs: PlanRuns, records: VotingRecords) -> list[Coin]:
        screenings = [(runs.rows.answered, reader.compute_passing(records))] if reader.plan.screening else []
        return [*screenings, *reader.list_coins(runs.released, records)]

    def follow_plan(runs: PlanRuns) -> Bools:
        problems = runs.add((~reader.are_consistent(runs.rows)).astype(np.int64))
        answered, sent = runs.add(runs.answered.astype(np.int64)), runs.add(runs.sent.astype(np.int64))
        limits = reader.plan.max_answered, count_queries(reader.plan)
        return np.asarray((problems == 0) & (answered <= limits[0]) & (sent <= limits[1]))

    def list_uniforms(runs: PlanRuns, records: VotingRecords) -> list[Floats]:
        return reader.compute_uniforms(runs.released, records)

    records = reader.pairs[0].second
    return Law(
        uniforms=list_uniforms if reader.has_exact_law else None,
        coins=list_coins if reader.has_exact_law else None,
        values=(lambda runs: runs.released) if reader.compute_uniforms(records.sums[None], records) else None,
        largest_value=LARGEST_VALUE,
        largest_row=LARGEST_VALUE ** len(records.sums),
        consistent=follow_plan if reader.labelled else None,
    )


def _compute_losses(reader: VoteReader, runs: PlanRuns, pair: Pair) -> Floats:
    """Return the exact log-likelihood ratio; the target is in each independent sample with the sampling rate."""
    total = np.where(runs.answered, reader.compute_losses(runs.rows.values, pair), 0.0)
    if reader.plan.screening is not None:
        first, second = (reader.compute_passing(records) for records in (pair.first, pair.second))
        passed, declined = np.log(first / second), np.log1p(-first) - np.log1p(-second)
        total += np.where(runs.sent, np.where(runs.rows.answered, passed, declined), 0.0)
    return runs.add(total)


def _make_run_once(reader: VoteReader) -> Any:
    """Return one run with many canaries in separate clusters, so that each affects only one answer."""
    plan = reader.plan
    if not isinstance(reader, ClassReader) or reader.is_pate:
        return None
    if plan.n_neighbors > _LARGEST_CLUSTER or count_queries(plan) > 1 or plan.sampling_rate < 1:
        return None

    def run(coins: Bools, pair: Pair, source: Source) -> PlanRuns:
        against = round(float(pair.second.sums[1]))
        k, count = plan.n_neighbors, len(coins)
        generator = np.random.default_rng(4)
        canaries = generator.standard_normal((count, DIMENSION))
        canaries *= reader.length / np.linalg.norm(canaries, axis=1, keepdims=True)
        around = generator.standard_normal((count, k, DIMENSION))
        near = reader.length * _CLUSTER_RADIUS * np.arange(1, k + 1) / k
        around *= near[:, None] / np.linalg.norm(around, axis=2, keepdims=True)
        rows = np.concatenate([canaries[coins], (canaries[:, None] + around).reshape(-1, DIMENSION)])
        kinds = np.zeros((count, k), dtype=np.int64)
        kinds[:, : k - against] = 1
        y = reader.votes[np.append(np.ones(coins.sum(), dtype=np.int64), kinds)]
        return _split_runs(reader, make_twin(reader, source).fit(rows, y).answer(canaries), 1)

    return run


def make_student_experiment(student: Student) -> Experiment:
    """Return the experiment of a student, with so few records that all vote on every row."""
    if student.voter is None:
        raise ValueError("student must have a voter, with an epsilon")
    reader, public = ClassReader(student.voter), np.random.default_rng(5).standard_normal((_PUBLIC, DIMENSION))
    pair, law = _make_student_pair(reader), _state_law(reader)
    is_exact = not reader.is_pate and reader.plan.sampling_rate == 1
    has_density = is_exact and reader.plan.screening is None

    def fit(records: VotingRecords, **parameters: Any) -> Any:
        voter = clone(reader.voter).set_params(**parameters)
        return clone(student).set_params(voter=voter).fit(records.X, records.y, public=public)

    def run(records: VotingRecords, runs: int, source: Source) -> PlanRuns:
        students = [fit(records, source=source) for _ in range(runs)]
        predicted = np.stack([fitted.export().predict(public) for fitted in students])
        parts = [reader.read(step.answers) for fitted in students for step in fitted.rounds_]
        names = "answered", "values", "labels"
        rows = AnswerRows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
        counts = [sum(len(step.answers.answered) for step in fitted.rounds_) for fitted in students]
        return PlanRuns(rows, np.cumsum([0, *counts[:-1]]), np.ones_like(rows.answered), predicted)

    def find_unpaid() -> str | None:
        with open_ledger() as ledger:
            fitted = fit(pair.first, ledger=ledger, account=ACCOUNT)
            session = VotingSession(reader, fitted.plan_)
            session.count(reader.read(step.answers) for step in fitted.rounds_)
            return session.complaint or session.find_unpaid(ledger)

    def find_exported() -> str | None:
        with open_ledger() as ledger:
            return find_private(pickle.dumps(fit(pair.first, ledger=ledger, account=ACCOUNT).export()), pair.first.X)

    return Experiment(
        name="student",
        guarantee=fit(pair.second).guarantee,
        pairs=(pair,),
        run=run,
        # Labels and predictions follow from the votes and from public coins.
        log_ratio=partial(_compute_losses, reader) if has_density else None,
        exact=has_density,
        numbers=lambda runs: runs.numbers,
        law=replace(law, uniforms=law.uniforms if is_exact else None, coins=None),
        checks=(
            make_check("the account", lambda *_: find_unpaid()),
            make_check("the export", lambda *_: find_exported()),
        ),
        trials=_FIT_TRIALS,
    )


def _make_student_pair(reader: ClassReader) -> Pair:
    """Return the largest number of records that all vote, one of them against all others; and one record less."""
    opposing = reader.plan.n_neighbors - 1
    rows = np.random.default_rng(6).standard_normal((opposing + 1, DIMENSION))
    y = reader.votes[[1, *[0] * opposing]]
    sums = opposing * reader.weights[0]
    return make_records_pair("one record more, against all others", rows, y, sums + reader.weights[1], sums)


@dataclass(frozen=True, eq=False)
class DiscriminantRuns:
    """Publications of many fits."""

    released: Floats  # the numbers with independent noise: all sums, then all counts
    numbers: Floats  # all numbers of the target's class and of another one, and the bound on values


def make_discriminant_experiment(discriminant: PrivateDiscriminant) -> Experiment:
    """Return the experiment of a discriminant: one record more, near the others or far outside."""
    # Runs are fitted without public rows, which take most of the time of a fit; the check of the export uses them.
    template = clone(discriminant).set_params(classes=_CLASSES, ledger=None, account=None, source=None)
    y = np.repeat(_CLASSES, _PER_CLASS)
    X = np.random.default_rng(5).standard_normal((len(y), _FEATURES))
    fitted = clone(template).fit(X, y)
    projection, n_classes = fitted.export().projection, len(_CLASSES)
    # The noise that the guarantee states for one record more or less, in units of a record.
    spread = fitted.guarantee.events[0].event.noise_multiplier * math.hypot(_ROW, _COUNT)
    noise = spread / np.repeat([_ROW, _COUNT], [n_classes * projection.n_directions, n_classes])
    pairs = tuple(
        Pair(name, _sum_records(projection, [row, *X], [0, *y]), _sum_records(projection, X, y))
        for name, row in (("one record more", X[0]), ("one record more, far outside", 1e6 * X[1]))
    )

    def run(records: VotingRecords, runs: int, source: Source) -> DiscriminantRuns:
        fits = [clone(template).set_params(source=source).fit(records.X, records.y) for _ in range(runs)]
        models = [fitted.export() for fitted in fits]
        sums = np.array([fitted.statistics_.sums for fitted in fits])
        counts, weights, biases = (np.array([getattr(m, name) for m in models]) for name in _MODEL_NUMBERS)
        bounds = np.array([model.projection.reach for model in models])
        parts = (sums[:, :2], counts[:, :2], weights[:, :2], biases[:, :2], bounds)
        numbers = np.column_stack([part.reshape(runs, -1) for part in parts])
        return DiscriminantRuns(np.column_stack([sums.reshape(runs, -1), counts]), numbers)

    def list_uniforms(runs: DiscriminantRuns, records: VotingRecords) -> list[Floats]:
        uniforms = compute_uniforms((runs.released - records.sums) / noise)
        return [part.ravel() for part in np.split(uniforms, [-n_classes], axis=1)]

    return Experiment(
        name="discriminant",
        guarantee=fitted.guarantee,
        pairs=pairs,
        run=run,
        log_ratio=lambda runs, pair: compute_losses(runs.released, pair.first.sums, pair.second.sums, noise),
        exact=True,
        numbers=lambda runs: runs.numbers,
        law=Law(
            uniforms=list_uniforms,
            values=lambda runs: runs.released,
            largest_value=LARGEST_VALUE,
            largest_row=LARGEST_VALUE**2,
        ),
        checks=(
            make_check("the account", lambda *_: _find_unpaid(template, pairs[0].first)),
            make_check("the export", lambda *_: _find_exported(template, pairs[0].first)),
            make_frozen_check(fitted),
        ),
        trials=_FIT_TRIALS,
    )


def _sum_records(projection: ClassProjection, rows: Any, labels: Any) -> VotingRecords:
    X, y = np.array(rows), np.array(labels)
    rounded = projection.round(X) / _ROW
    members = [y == label for label in _CLASSES]
    sums = np.concatenate([*(rounded[mask].sum(axis=0) for mask in members), [mask.sum() for mask in members]])
    return VotingRecords(X, y, sums, sums)


def _find_unpaid(template: PrivateDiscriminant, records: VotingRecords) -> str | None:
    """Describe publications that were not paid for."""
    with open_ledger() as ledger:
        payer = clone(template).set_params(ledger=ledger, account=ACCOUNT)
        for _ in range(payer.publications):
            clone(payer).fit(records.X, records.y)
        accounts = [account for account in ledger.accounts() if account.name == ACCOUNT]
        if not accounts or accounts[0].remaining():
            return f"{payer.publications} publications were not paid for"
        try:
            clone(payer).fit(records.X, records.y)
        except ExhaustedError:
            return None
        return f"more than {payer.publications} publications were made"


def _find_exported(template: PrivateDiscriminant, records: VotingRecords) -> str | None:
    """Describe data in exports that do not follow from released numbers and public rows."""
    with open_ledger() as ledger:
        payer = clone(template).set_params(ledger=ledger, account=ACCOUNT)
        problems = [find_private(payer.fit(records.X, records.y).export().to_bytes(), records.X)]
    public, public_parts = np.random.default_rng(7).standard_normal((2 * len(_CLASSES), DIMENSION)), set()
    for X, y in _draw_databases():
        fitted = clone(template).fit(X, y, public=public)
        model = fitted.export()
        zeros = {name: np.zeros_like(getattr(model, name)) for name in _MODEL_NUMBERS}
        public_parts.add(replace(model, **zeros).to_bytes())
        problems.append(find_private(model.to_bytes(), X))
        if len(public_parts) > 1:
            problems.append("its public part depends on private records")
        if not _follows(model, fitted.statistics_, public, template.shrinkage):
            problems.append("its numbers do not follow from the released ones and public rows")
    return "; ".join(sorted({problem for problem in problems if problem is not None})) or None


def _follows(model: PublicDiscriminant, statistics: NoisyStatistics, public: Floats, shrinkage: float | str) -> bool:
    """Return whether a model is computed from released numbers and public rows alone."""
    images = model.projection.transform(public)
    means = estimate_means(statistics, PublicMoments.measure(images))
    discriminant = fit_discriminant(means, SHRINKAGE if shrinkage == "auto" else float(shrinkage))
    scores = calibrate_scores(discriminant, means, images)
    pairs = ((model.weights, scores.weights), (model.biases, scores.biases), (model.counts, statistics.counts))
    return all(np.array_equal(exported, values.astype(np.float32)) for exported, values in pairs)


def _draw_databases() -> Iterator[tuple[Floats, NDArray[np.int64]]]:
    """Yield private databases: a plain one, with an outlier, with a single class, with few and with many records."""
    y = np.repeat(_CLASSES, _PER_CLASS)
    X = np.random.default_rng(6).standard_normal((len(y), DIMENSION))
    yield X, y
    yield np.vstack([X, 1e6 * X[:1]]), np.append(y, 0)
    yield X, np.zeros_like(y)
    yield X[:2], y[:2]
    yield np.tile(X, (_COPIES, 1)), np.tile(y, _COPIES)
