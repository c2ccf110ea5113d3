"""Membership experiments: voting estimators, students and discriminants, with and without one record."""

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from nearveil.audit._conduct import (
    ACCOUNT,
    VotingSession,
    find_private,
    make_check,
    make_frozen_check,
    make_vote_checks,
    open_ledger,
)
from nearveil.audit._experiment import (
    DIMENSION,
    Bools,
    Coin,
    Experiment,
    Floats,
    Law,
    Pair,
    compute_gaussian_uniforms,
    count_trials,
)
from nearveil.audit._readers import LARGEST_VALUE, ClassReader, Read, VoteReader, VotingRecords, make_reader, make_twin
from nearveil.privacy.noise import Source
from nearveil.private_knn import (
    Answers,
    ExhaustedError,
    PateClassifier,
    PrivateDiscriminant,
    PrivateKNeighborsRegressor,
    PublicDiscriminant,
    Student,
)
from nearveil.private_knn.discriminant_model import (
    SHRINKAGE,
    NoisyStatistics,
    PublicMoments,
    calibrate_scores,
    estimate_means,
    fit_discriminant,
)

_CLUSTER_RADIUS = 0.05
_LARGEST_CLUSTER = 128
_PUBLIC = 16  # rows for a student
_FEATURES, _PER_CLASS = 3, 4  # features and records per class, for a discriminant
_CLASSES = tuple(range(8))
_COPIES = 64  # of each record in a large database
_ROW, _COUNT = 2364, 591  # integer weights of a unit row and of a count (docs/theory/private-discriminant.md)
_FIT_TRIALS = 400  # if every run is a fit


@dataclass(frozen=True, eq=False)
class PlanRuns:
    """Answers of many runs of the whole plan."""

    passed: Bools  # whether a query would be answered without a cap
    sent: Bools  # whether a query is sent: none is after the cap on answers
    values: Floats  # released numbers
    labels: NDArray[Any]

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Whether a query was answered."""
        return self.passed & self.sent

    @property
    def numbers(self) -> Floats:
        """Number of answers, sums of released numbers, and sums of labels."""
        mask = self.answered
        labels = np.where(mask.reshape(*mask.shape, *[1] * (self.labels.ndim - 2)), self.labels, 0)
        label_sums = labels.sum(axis=1).reshape(len(mask), -1)
        return np.column_stack([mask.sum(axis=1), np.where(mask[:, :, None], self.values, 0.0).sum(axis=1), label_sums])


def make_membership_experiment(voter: Any) -> Experiment:
    """Return the experiment of a voting estimator: the whole plan is asked at the target record."""
    reader = make_reader(voter)

    def run(records: VotingRecords, runs: int, source: Source) -> PlanRuns:
        queries = np.tile(reader.query, (runs * reader.queries, 1))
        return _split_runs(reader, make_twin(reader, source).fit(records.X, records.y).answer(queries), reader.queries)

    return Experiment(
        name=_name(reader),
        guarantee=reader.guarantee,
        pairs=reader.pairs,
        run=run,
        log_ratio=(lambda runs, pair: _compute_losses(reader, runs, pair)) if reader.has_exact_law else None,
        exact=reader.has_exact_law,
        numbers=lambda runs: runs.numbers,
        run_once=_make_run_once(reader),
        law=_state_law(reader),
        checks=make_vote_checks(reader),
        trials=count_trials(reader.guarantee.delta),
    )


def _split_runs(reader: VoteReader, answers: Any, queries: int) -> PlanRuns:
    """Split answers into runs of the plan, each of which stops at the cap."""
    read = reader.read(answers)
    passed = read.answered.reshape(-1, queries)
    sent = np.asarray(np.cumsum(passed, axis=1) - passed < reader.plan.max_answered)
    values, labels = (array.reshape(*passed.shape, *array.shape[1:]) for array in (read.values, read.labels))
    return PlanRuns(passed, sent, values, labels)


def _name(reader: VoteReader) -> str:
    voter = reader.voter
    if isinstance(voter, PateClassifier):
        return f"pate ({voter.mechanism})"
    sampled = "" if voter.sampling_rate == 1 else f", rate {voter.sampling_rate:g}"
    if isinstance(voter, PrivateKNeighborsRegressor):
        return f"private-knn ({voter.method}{sampled})"
    kind = "" if voter.votes == "classes" else f"{voter.votes} "
    return f"private-knn ({'' if reader.plan.screening is None else 'screened '}{kind}votes{sampled})"


def _state_law(reader: VoteReader) -> Law:
    """Return the law of screenings and votes. It ignores caps, because queries are independent."""

    def released(runs: PlanRuns) -> Floats:
        return runs.values[runs.passed]

    def coins(runs: PlanRuns, records: VotingRecords) -> list[Coin]:
        unscreened = reader.plan.screening is None
        screened = [] if unscreened else [(runs.passed.ravel(), reader.compute_passing(records))]
        return [*screened, *reader.list_coins(released(runs), records)]

    def consistent(runs: PlanRuns) -> NDArray[np.bool_]:
        count = runs.passed.size
        values, labels = (array.reshape(count, *array.shape[2:]) for array in (runs.values, runs.labels))
        return reader.are_consistent(Read(runs.passed.ravel(), values, labels))

    records = reader.pairs[0].second
    return Law(
        uniforms=(lambda runs, at: reader.compute_uniforms(released(runs), at)) if reader.has_exact_law else None,
        coins=coins if reader.has_exact_law else None,
        values=released if reader.compute_uniforms(records.sums[None], records) else None,
        largest_value=LARGEST_VALUE,
        largest_row=LARGEST_VALUE ** len(records.sums),
        consistent=consistent if reader.labelled else None,
    )


def _compute_losses(reader: VoteReader, runs: PlanRuns, pair: Pair) -> Floats:
    """Return the exact log-likelihood ratio; the target is in each independent sample with the sampling rate."""
    total = np.where(runs.answered, reader.compute_losses(runs.values, pair), 0.0)
    if reader.plan.screening is not None:
        first, second = (reader.compute_passing(records) for records in (pair.first, pair.second))
        passed, declined = np.log(first / second), np.log1p(-first) - np.log1p(-second)
        total = total + np.where(runs.sent, np.where(runs.passed, passed, declined), 0.0)
    return np.asarray(total.sum(axis=1))


def _make_run_once(reader: VoteReader) -> Any:
    """Return one run with many canaries in separate clusters, so that each affects only one answer."""
    plan = reader.plan
    if isinstance(reader.voter, PateClassifier) or not isinstance(reader, ClassReader):
        return None
    if plan.n_neighbors > _LARGEST_CLUSTER or reader.queries > 1 or plan.sampling_rate < 1:
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
        votes = np.stack([reader.vote(0), reader.vote(1)])
        y = np.concatenate([votes[np.ones(int(coins.sum()), dtype=np.int64)], votes[kinds.ravel()]])
        return _split_runs(reader, make_twin(reader, source).fit(rows, y).answer(canaries), 1)

    return run


@dataclass(frozen=True, eq=False)
class StudentRuns:
    """Answers of all rounds, and predictions, of many students."""

    answers: tuple[Read, ...]  # of each run
    predicted: NDArray[Any]


def make_student_experiment(student: Student) -> Experiment:
    """Return the experiment of a student, with so few records that all vote on every row."""
    if student.voter is None:
        raise ValueError("student must have a voter, with an epsilon")
    game = _StudentGame(student, ClassReader(student.voter))
    # Labels and predictions follow from the votes and from public coins.
    exact = game.has_exact_law and game.reader.plan.screening is None
    return Experiment(
        name="student",
        guarantee=game.fit(game.pair.second, game.reader.voter).guarantee,
        pairs=(game.pair,),
        run=game.run,
        log_ratio=game.compute_losses if exact else None,
        exact=exact,
        numbers=lambda runs: np.column_stack([[read.values.sum(axis=0) for read in runs.answers], runs.predicted]),
        law=game.law,
        checks=(
            make_check("the account", lambda _, __: game.find_unpaid()),
            make_check("the export", lambda _, __: game.find_exported()),
        ),
        trials=_FIT_TRIALS,
    )


class _StudentGame:
    """A student, its voter, and public rows."""

    def __init__(self, student: Student, reader: ClassReader) -> None:
        self.student, self.reader = student, reader
        self.public = np.random.default_rng(5).standard_normal((_PUBLIC, DIMENSION))
        # The largest number of voters, all against the target; and one record less.
        opposing = reader.plan.n_neighbors - 1
        rows = np.random.default_rng(6).standard_normal((opposing + 1, DIMENSION))
        y = np.stack([reader.vote(1), *[reader.vote(0)] * opposing])
        sums = opposing * reader.weigh(0)
        more = VotingRecords(rows, y, sums + reader.weigh(1), sums)
        self.pair = Pair("one record more, against all others", more, VotingRecords(rows[1:], y[1:], sums, sums))
        # All records vote on every row.
        self.has_exact_law = not isinstance(reader.voter, PateClassifier) and reader.plan.sampling_rate == 1

    def fit(self, records: VotingRecords, voter: Any) -> Any:
        """Fit a student to records."""
        return clone(self.student).set_params(voter=voter).fit(records.X, records.y, public=self.public)

    def run(self, records: VotingRecords, runs: int, source: Source) -> StudentRuns:
        """Fit students, and return their answers and predictions."""
        students = [self.fit(records, clone(self.reader.voter).set_params(source=source)) for _ in range(runs)]
        return StudentRuns(
            tuple(self.reader.read(_join(student.answers_)) for student in students),
            np.stack([student.export().predict(self.public) for student in students]),
        )

    def compute_losses(self, runs: StudentRuns, pair: Pair) -> Floats:
        """Return the log-likelihood ratio of all votes of a run."""
        return np.array([self.reader.compute_losses(read.values[read.answered], pair).sum() for read in runs.answers])

    @property
    def law(self) -> Law:
        """The law of votes, labels and caps."""

        def released(runs: StudentRuns) -> Floats:
            return np.concatenate([read.values[read.answered] for read in runs.answers])

        return Law(
            uniforms=(lambda runs, at: self.reader.compute_uniforms(released(runs), at))
            if self.has_exact_law
            else None,
            values=released,
            largest_value=LARGEST_VALUE,
            largest_row=LARGEST_VALUE**2,
            consistent=lambda runs: np.array([self._is_within_plan(read) for read in runs.answers]),
        )

    def find_unpaid(self) -> str | None:
        """Describe answers of all rounds that were not paid for."""
        with open_ledger() as ledger:
            voter = clone(self.reader.voter).set_params(ledger=ledger, account=ACCOUNT)
            student = self.fit(self.pair.first, voter)
            session = VotingSession(self.reader, student.plan_, voter.delta)
            session.count(self.reader.read(answers) for answers in student.answers_)
            return session.complaint or session.find_unpaid(ledger)

    def find_exported(self) -> str | None:
        """Describe private data in an export."""
        with open_ledger() as ledger:
            voter = clone(self.reader.voter).set_params(ledger=ledger, account=ACCOUNT)
            return find_private(pickle.dumps(self.fit(self.pair.first, voter).export()), self.pair.first.X)

    def _is_within_plan(self, read: Read) -> bool:
        """Return whether one run observes the caps, and its labels follow from its votes."""
        plan = self.reader.plan
        fits = plan.screening is None or len(read.answered) <= plan.max_screened
        return bool(fits and read.answered.sum() <= plan.max_answered and self.reader.are_consistent(read).all())


def _join(rounds: tuple[Answers, ...]) -> Answers:
    """Concatenate the answers of all rounds."""
    return Answers(
        *(np.concatenate([getattr(answers, name) for answers in rounds]) for name in ("labels", "answered", "votes"))
    )


@dataclass(frozen=True, eq=False)
class DiscriminantExports:
    """Noisy sums of many fits, and the arrays of their exports."""

    sums: Floats  # of shape (runs, classes, directions)
    counts: Floats  # as they are exported
    weights: Floats
    biases: Floats
    reach: Floats

    @property
    def released(self) -> Floats:
        """The numbers with independent noise: all sums, then all counts."""
        return np.column_stack([self.sums.reshape(len(self.sums), -1), self.counts])

    @property
    def numbers(self) -> Floats:
        """All numbers of the target's class and of another one, and the bound on values."""
        parts = (self.sums[:, :2], self.counts[:, :2], self.weights[:, :2], self.biases[:, :2], self.reach)
        return np.column_stack([part.reshape(len(part), -1) for part in parts])


def make_discriminant_experiment(discriminant: PrivateDiscriminant) -> Experiment:
    """Return the experiment of a discriminant: one record more, near the others or far outside.

    Runs are fitted without public rows, which take most of the time of a fit. An export that was fitted with public
    rows is checked number by number.
    """
    game = _DiscriminantGame(discriminant)
    fitted = game.fit(game.pairs[0].first)
    return Experiment(
        name="discriminant",
        guarantee=fitted.guarantee,
        pairs=game.pairs,
        run=game.run,
        log_ratio=game.compute_losses,
        exact=True,
        numbers=lambda runs: runs.numbers,
        law=Law(
            uniforms=game.compute_uniforms,
            values=lambda runs: runs.released,
            largest_value=LARGEST_VALUE,
            largest_row=LARGEST_VALUE**2,
        ),
        checks=(
            make_check("the account", lambda _, __: game.find_unpaid()),
            make_check("the export", lambda _, __: game.find_exported()),
            make_frozen_check(fitted),
        ),
        trials=_FIT_TRIALS,
    )


class _DiscriminantGame:
    """A discriminant, and records with and without the target."""

    def __init__(self, discriminant: PrivateDiscriminant) -> None:
        rng = np.random.default_rng(5)
        self.discriminant = clone(discriminant).set_params(classes=_CLASSES, ledger=None, account=None, source=None)
        y = np.repeat(_CLASSES, _PER_CLASS)
        X = rng.standard_normal((len(y), _FEATURES))
        fitted = self.discriminant.fit(X, y)
        self.projection = fitted.export().projection
        # The noise that the guarantee states for one record more or less, in units of a record.
        multiplier = fitted.guarantee.events[0].event.noise_multiplier
        n_classes = len(_CLASSES)
        values = n_classes * self.projection.n_directions
        self.noise = multiplier * math.hypot(_ROW, _COUNT) / np.repeat([_ROW, _COUNT], [values, n_classes])
        self.pairs = tuple(
            Pair(name, self._sum([row, *X], [0, *y]), self._sum(X, y))
            for name, row in (("one record more", X[0]), ("one record more, far outside", 1e6 * X[1]))
        )

    def fit(self, records: VotingRecords, **more: Any) -> Any:
        """Fit a discriminant to records."""
        return clone(self.discriminant).set_params(**more).fit(records.X, records.y)

    def run(self, records: VotingRecords, runs: int, source: Source) -> DiscriminantExports:
        """Fit discriminants, and return their publications."""
        fits = [self.fit(records, source=source) for _ in range(runs)]
        models = [fitted.export() for fitted in fits]
        return DiscriminantExports(
            sums=np.array([fitted.statistics_.sums for fitted in fits]),
            counts=np.array([model.counts for model in models], dtype=np.float64),
            weights=np.array([model.weights for model in models]),
            biases=np.array([model.biases for model in models]),
            reach=np.array([model.projection.reach for model in models]),
        )

    def compute_uniforms(self, runs: DiscriminantExports, records: VotingRecords) -> list[Floats]:
        """Return the stated distribution function at all sums, and at all counts."""
        uniforms = compute_gaussian_uniforms((runs.released - records.sums) / self.noise)
        return [part.ravel() for part in np.split(uniforms, [-len(_CLASSES)], axis=1)]

    def compute_losses(self, runs: DiscriminantExports, pair: Pair) -> Floats:
        """Return the log-likelihood ratio of all numbers of a run."""
        first, second = (((runs.released - records.sums) / self.noise) ** 2 for records in (pair.first, pair.second))
        return np.asarray((second - first).sum(axis=1) / 2)

    def find_unpaid(self) -> str | None:
        """Describe publications that were not paid for."""
        with open_ledger() as ledger:
            publications = self.discriminant.publications
            for _ in range(publications):
                self.fit(self.pairs[0].first, ledger=ledger, account=ACCOUNT)
            account = {account.name: account for account in ledger.accounts()}.get(ACCOUNT)
            if account is None or account.remaining():
                return f"{publications} publications were not paid for"
            try:
                self.fit(self.pairs[0].first, ledger=ledger, account=ACCOUNT)
            except ExhaustedError:
                return None
            return f"more than {publications} publications were made"

    def find_exported(self) -> str | None:
        """Describe data in exports that do not follow from released numbers and public rows."""
        with open_ledger() as ledger:
            data = self.fit(self.pairs[0].first, ledger=ledger, account=ACCOUNT).export().to_bytes()
        problems = [find_private(data, self.pairs[0].first.X)]
        public, public_parts = np.random.default_rng(7).standard_normal((2 * len(_CLASSES), DIMENSION)), set()
        for X, y in _draw_databases():
            fitted = clone(self.discriminant).fit(X, y, public=public)
            model = fitted.export()
            zeros = {name: np.zeros_like(getattr(model, name)) for name in ("weights", "biases", "counts")}
            public_parts.add(replace(model, **zeros).to_bytes())
            problems.append(find_private(model.to_bytes(), X))
            if len(public_parts) > 1:
                problems.append("its public part depends on private records")
            if not self._follows(model, fitted.statistics_, public):
                problems.append("its numbers do not follow from the released ones and public rows")
        return "; ".join(sorted({problem for problem in problems if problem is not None})) or None

    def _follows(self, model: PublicDiscriminant, statistics: NoisyStatistics, public: Floats) -> bool:
        """Return whether a model is computed from released numbers and public rows alone."""
        images = model.projection.transform(public)
        means = estimate_means(statistics, PublicMoments.measure(images))
        shrinkage = SHRINKAGE if self.discriminant.shrinkage == "auto" else float(self.discriminant.shrinkage)
        scores = calibrate_scores(fit_discriminant(means, shrinkage), means, images)
        pairs = (
            (model.weights, scores.weights),
            (model.biases, scores.biases),
            (model.counts, statistics.counts),
        )
        return all(np.array_equal(exported, values.astype(np.float32)) for exported, values in pairs)

    def _sum(self, rows: Any, labels: Any) -> VotingRecords:
        X, y = np.array(rows), np.array(labels)
        rounded = self.projection.round(X) / _ROW
        members = [y == label for label in _CLASSES]
        sums = np.concatenate([*(rounded[mask].sum(axis=0) for mask in members), [mask.sum() for mask in members]])
        return VotingRecords(X, y, sums, sums)


def _draw_databases() -> Iterator[tuple[Floats, NDArray[np.int64]]]:
    """Yield private databases: a plain one, with an outlier, with a single class, with few and with many records."""
    y = np.repeat(_CLASSES, _PER_CLASS)
    X = np.random.default_rng(6).standard_normal((len(y), DIMENSION))
    yield X, y
    yield np.vstack([X, 1e6 * X[:1]]), np.append(y, 0)
    yield X, np.zeros_like(y)
    yield X[:2], y[:2]
    yield np.tile(X, (_COPIES, 1)), np.tile(y, _COPIES)
