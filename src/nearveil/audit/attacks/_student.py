"""Students: a record that votes in every round, seen in all that a fitted student shows."""

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from nearveil.audit._conduct import ACCOUNT, LEDGER, Session, named_check, open_ledger
from nearveil.audit._experiment import Experiment, Floats, Pair
from nearveil.audit._law import Law
from nearveil.audit.ballots import DIMENSION, LARGEST_VALUE, ClassVotes, Database, Read
from nearveil.privacy.noise import Source
from nearveil.votes import Answers, PateClassifier, PrivateKNeighborsClassifier, Student

_PUBLIC = 16  # rows
_TRIALS = 400  # every run is a fit


@dataclass(frozen=True, eq=False)
class Taught:
    """What students show: the answers of all rounds, one after the other, and what they predict."""

    answers: tuple[Read, ...]  # of each run
    predicted: NDArray[Any]


def student_experiment(student: Student) -> Experiment:
    """Return the experiment of a student: one record more among so few that all of them vote on every row.

    `student`: Its parameters count; what it was fitted on does not.
    """
    voter = PrivateKNeighborsClassifier(max_answered=500, max_screened=0) if student.voter is None else student.voter
    lesson = _Lesson(student, ClassVotes(voter))
    # Labels and predictions follow from the votes and from public coins.
    exact = lesson.known and lesson.ballot.plan.screening is None
    return Experiment(
        name="student",
        promise=lesson.fit(lesson.pair.second, lesson.ballot.own).guarantee,
        pairs=(lesson.pair,),
        run=lesson.run,
        log_ratio=lesson.losses if exact else None,
        exact=exact,
        numbers=lambda seen: np.column_stack([[one.values.sum(axis=0) for one in seen.answers], seen.predicted]),
        law=lesson.law,
        checks=(
            named_check("the account", lambda _, __: lesson.unpaid()),
            named_check("the export", lambda _, __: lesson.exported()),
        ),
        trials=_TRIALS,
    )


class _Lesson:
    """A student, its voter, and public rows to learn from."""

    def __init__(self, student: Student, ballot: ClassVotes) -> None:
        self.student, self.ballot = student, ballot
        self.public = np.random.default_rng(5).standard_normal((_PUBLIC, DIMENSION))
        self.pair = self._pair()
        # Then all records vote on every row, wherever it lies.
        self.known = not isinstance(ballot.own, PateClassifier) and ballot.plan.sampling_rate == 1

    def fit(self, database: Database, voter: Any) -> Any:
        """Fit a student to a database."""
        return clone(self.student).set_params(voter=voter).fit(database.X, database.y, public=self.public)

    def run(self, database: Database, runs: int, source: Source) -> Taught:
        """Fit so many students, and keep what they show."""
        taught = [self.fit(database, clone(self.ballot.own).set_params(source=source)) for _ in range(runs)]
        return Taught(
            tuple(self.ballot.read(_joined(one.answers_)) for one in taught),
            np.stack([one.export().predict(self.public) for one in taught]),
        )

    def losses(self, seen: Taught, pair: Pair) -> Floats:
        """Return the log-likelihood ratio of all votes of a run."""
        return np.array([self.ballot.losses(one.values[one.answered], pair).sum() for one in seen.answers])

    @property
    def law(self) -> Law:
        """What is stated about votes, labels and caps."""
        ballot = self.ballot

        def votes(seen: Taught) -> Floats:
            return np.concatenate([one.values[one.answered] for one in seen.answers])

        return Law(
            uniforms=(lambda seen, database: ballot.uniforms(votes(seen), database)) if self.known else None,
            values=votes,
            largest_value=LARGEST_VALUE,
            largest_row=LARGEST_VALUE**2,
            consistent=lambda seen: np.array([self._within(one) for one in seen.answers]),
        )

    def unpaid(self) -> str | None:
        """Say what all rounds together did and did not pay for."""
        with open_ledger() as ledger:
            voter = clone(self.ballot.own).set_params(ledger=ledger, account=ACCOUNT)
            taught = self.fit(self.pair.first, voter)
            session = Session(self.ballot, taught.plan_, voter.delta)
            session.take(self.ballot.read(one) for one in taught.answers_)
            return session.complaint or session.unpaid(ledger)

    def exported(self) -> str | None:
        """Say what an export holds that must not leave."""
        with open_ledger() as ledger:
            voter = clone(self.ballot.own).set_params(ledger=ledger, account=ACCOUNT)
            held = pickle.dumps(self.fit(self.pair.first, voter).export())
            if any(row.tobytes() in held for row in self.pair.first.X):
                return "it holds a private row"
            return "it holds the address of the ledger" if LEDGER.encode() in held else None

    def _within(self, read: Read) -> bool:
        """Say whether one run keeps to the caps, and its labels follow from its votes."""
        plan = self.ballot.plan
        fits = plan.screening is None or len(read.answered) <= plan.max_screened
        return bool(fits and read.answered.sum() <= plan.max_answered and self.ballot.consistent(read).all())

    def _pair(self) -> Pair:
        """Return as many records as may vote, all against one, and one less."""
        ballot, others = self.ballot, self.ballot.plan.n_neighbors - 1
        rows = np.random.default_rng(6).standard_normal((others + 1, DIMENSION))
        y = np.stack([ballot.vote(1), *[ballot.vote(0)] * others])
        sums = others * ballot.worth(0)
        more = Database(rows, y, sums + ballot.worth(1), sums)
        return Pair("one record more, against all others", more, Database(rows[1:], y[1:], sums, sums))


def _joined(rounds: tuple[Answers, ...]) -> Answers:
    """Return the answers of all rounds as one."""
    return Answers(
        *(np.concatenate([getattr(one, name) for one in rounds]) for name in ("labels", "answered", "votes"))
    )
