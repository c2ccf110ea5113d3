"""What the tests of ``nearveil label`` share."""

import csv
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import typer
from dp_accounting import GaussianDpEvent
from PIL import Image
from typer.testing import CliRunner

from nearveil.cli._label import label
from nearveil.ledger import Account
from nearveil.privacy import Basis, Guarantee
from nearveil.private_knn import Answers, ExhaustedError
from nearveil.private_knn.spending import name_inferred_unit

RARE = "zanthoxylum"  # a label of PRIVATE
HIDDEN = "quarantined-patient"  # part of the paths inside PRIVATE

app = typer.Typer()
app.command()(label)


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def fine(*words: object) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return str(result.output)


def refused(*words: object, code: int = 1) -> str:
    result = run(*words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert not Path("labels.csv").exists()
    assert not list(Path().glob(".*.part"))
    return " ".join(result.output.split())


def rows_of(path: Path | str = "labels.csv") -> list[list[str]]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def small(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def write_png(path: Path, image: np.ndarray[Any, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((image * 255).astype(np.uint8)).save(path)


@dataclass
class Plain:
    """The nearest records vote, without noise: what the command does around them is quick and sure."""

    epsilon: float
    delta: float
    max_answered: int
    n_neighbors: int | None
    max_screened: int | None
    classes: Any
    unit: str
    account: Account | None
    guarantee: Guarantee = field(init=False)

    def fit(self, X: Any, y: Any, public: Any = None) -> Self:  # noqa: ARG002
        self.plan_ = SimpleNamespace(n_neighbors=1, threshold=1.0, vote_noise=0.0, individual=False)
        self._X, self._y, self._left = _unit(X), np.asarray(y), self.max_answered
        self.guarantee = Guarantee(
            epsilon=self.epsilon,
            delta=self.delta,
            protects="database",
            unit=self.unit if self.classes is not None else name_inferred_unit(self.unit),
            relation="add-remove",
            basis=Basis("none"),
            events=(GaussianDpEvent(5.0 / self.epsilon),),
        )
        return self

    def answer(self, X: Any, *, progress: Any = None) -> Answers:
        if not self._left:
            raise ExhaustedError
        if self.account is not None:
            self.account.spend(self.guarantee)
        nearest = np.argsort(-_unit(X) @ self._X.T, axis=1)[:, : self.n_neighbors or 15]
        votes = np.stack([np.bincount(self._y[rows], minlength=self._y.max() + 1) for rows in nearest])
        answered = np.arange(len(X)) < self._left
        self._left -= answered.sum()
        progress(len(X))
        return Answers(np.where(answered, votes.argmax(axis=1), -1), answered, votes.astype(float))


def _unit(X: Any) -> Any:
    return X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-9)
