"""Private discriminants: one record more or less, seen in the noisy sums and in all that is exported."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from nearveil.audit._conduct import ACCOUNT, LEDGER, frozen_check, named_check, open_ledger
from nearveil.audit._experiment import Experiment, Floats, Pair
from nearveil.audit._law import Law, gaussian_uniforms
from nearveil.audit.ballots import LARGEST_VALUE, Database
from nearveil.privacy.noise import Source
from nearveil.votes import ExhaustedError, PrivateDiscriminant
from nearveil.votes._discriminant import class_sums
from nearveil.votes._discriminant_model import COUNT_UNIT, SENSITIVITY
from nearveil.votes._integers import LONGEST

_DIMENSION, _OTHERS = 3, 4  # features, and records of each class
_CLASSES = ("in", "out")
_TRIALS = 400  # every run is a fit


def discriminant_experiment(discriminant: PrivateDiscriminant) -> Experiment:
    """Return the experiment of a discriminant: one record more, near the others or far outside.

    `discriminant`: Its parameters count; what it was fitted on does not.
    """
    trial = _Publishing(discriminant)
    fitted = trial.fit(trial.pairs[0].first)
    return Experiment(
        name="discriminant",
        promise=fitted.guarantee,
        pairs=trial.pairs,
        run=trial.run,
        log_ratio=trial.losses,
        exact=True,
        law=Law(
            uniforms=lambda seen, database: list(gaussian_uniforms((seen - database.sums) / trial.noise).T),
            values=lambda seen: seen,
            largest_value=LARGEST_VALUE,
            largest_row=LARGEST_VALUE**2,
        ),
        checks=(
            named_check("the account", lambda _, __: trial.unpaid()),
            named_check("the export", lambda _, __: trial.exported()),
            frozen_check(fitted),
        ),
        trials=_TRIALS,
    )


class _Publishing:
    """A discriminant, and databases that differ by one record."""

    def __init__(self, discriminant: PrivateDiscriminant) -> None:
        rng = np.random.default_rng(5)
        self.own = clone(discriminant).set_params(classes=_CLASSES, ledger=None, account=None, source=None)
        X = rng.standard_normal((2 * _OTHERS, _DIMENSION))
        y = np.repeat(_CLASSES, _OTHERS)
        fitted = self.own.fit(X, y)
        self.projection = fitted.export().projection
        # What the guarantee states: noise for one record more or less, in units of a record.
        multiplier = fitted.guarantee.events[0].event.noise_multiplier
        values = 2 * self.projection.n_directions
        self.noise = multiplier * SENSITIVITY / np.repeat([LONGEST, COUNT_UNIT], [values, 2]).astype(np.float64)
        self.pairs = tuple(
            Pair(name, self._database([row, *X], ["in", *y]), self._database(X, y))
            for name, row in (("one record more", X[0]), ("one record more, far outside", 1e6 * X[1]))
        )

    def fit(self, database: Database, **more: Any) -> Any:
        """Fit a discriminant to a database."""
        return clone(self.own).set_params(**more).fit(database.X, database.y)

    def run(self, database: Database, runs: int, source: Source) -> Floats:
        """Fit so many discriminants, and keep the noisy sums and counts."""
        found = (self.fit(database, source=source).statistics_ for _ in range(runs))
        return np.stack([np.concatenate([one.sums.ravel(), one.counts]) for one in found])

    def losses(self, seen: Floats, pair: Pair) -> Floats:
        """Return the log-likelihood ratio of all numbers of a run."""
        first, second = (((seen - one.sums) / self.noise) ** 2 for one in (pair.first, pair.second))
        return np.asarray((second - first).sum(axis=1) / 2)

    def unpaid(self) -> str | None:
        """Say what was published and not paid for."""
        with open_ledger() as ledger:
            publications = self.own.publications
            for _ in range(publications):
                self.fit(self.pairs[0].first, ledger=ledger, account=ACCOUNT)
            account = {one.name: one for one in ledger.accounts()}.get(ACCOUNT)
            if account is None or account.remaining():
                return f"{publications} publications were not paid for"
            try:
                self.fit(self.pairs[0].first, ledger=ledger, account=ACCOUNT)
            except ExhaustedError:
                return None
            return f"more than {publications} publications were made"

    def exported(self) -> str | None:
        """Say what an export holds that must not leave."""
        with open_ledger() as ledger:
            held = self.fit(self.pairs[0].first, ledger=ledger, account=ACCOUNT).export().to_bytes()
        if any(row.tobytes() in held for row in self.pairs[0].first.X):
            return "it holds a private row"
        return "it holds the address of the ledger" if LEDGER.encode() in held else None

    def _database(self, rows: Any, labels: Any) -> Database:
        X, y = np.array(rows), np.array(labels)
        sums = _exact_values(self.projection.round(X), y)
        return Database(X, y, sums, sums)


def _exact_values(rows: NDArray[np.int16], y: NDArray[Any]) -> Floats:
    sums = class_sums(rows, np.searchsorted(_CLASSES, y), len(_CLASSES))
    return np.concatenate([(sums[:, :-1] / LONGEST).ravel(), sums[:, -1] / COUNT_UNIT])
