"""``python -m nearveil.study.votes``: what a student learns from private votes, and what that costs.

MNIST or the SVHN subset: the training images are private; of the test images a part is public, without labels, and the
rest is held for the student's score. Beside ours stand the parameters that were published for Private-kNN, at what
they really cost, and PATE.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from nearveil.study.accounting import DELTA, PLANS
from nearveil.study.digits import FOLDERS, Digits, Name, load
from nearveil.votes import NetworkStudent, PateClassifier, PrivateKNeighborsClassifier, Student
from nearveil.votes._base import VotingEstimator

EPSILON = 0.47
EPSILONS = {"mnist": (0.1, 0.2, 0.3, 0.47, 1.0), "svhn": (0.47, 1.0, 2.0, 4.0, 8.0)}
HELD = 1000
ANSWERS = 500
EPOCHS = 12
TEACHERS = {"mnist": 250, "svhn": 50}
MARKS = {"ours": "o-", "PATE": "s--", "published parameters": "^:", "PATE, published parameters": "D:"}
PATE_ANSWERS = 100  # fewer, because its counts are smaller
PATE_PUBLISHED = {  # Papernot et al. 2018, table 1: threshold, screening noise, vote noise, screened, answered
    "mnist": (200.0, 150.0, 40.0, 640, 286),
    "svhn": (300.0, 200.0, 40.0, 8500, 3098),
}
CLAIMED = {"mnist": ("MNIST", 0.988), "svhn": ("SVHN", 0.916)}  # plan, and the published accuracy of the student


@dataclass(frozen=True)
class Measured:
    """One way at one epsilon, over all splits.

    Attributes
    ----------
    way : str
    epsilon : float
        What all rounds cost.
    accuracy : tuple of float
        Of the student on held images, a split each.
    answered, label_accuracy : float
        How many public images were answered, and how many of these rightly; means.
    """

    way: str
    epsilon: float
    accuracy: tuple[float, ...]
    answered: float
    label_accuracy: float

    @property
    def mean(self) -> float:
        """Mean accuracy."""
        return float(np.mean(self.accuracy))


def ours(epsilon: float) -> PrivateKNeighborsClassifier:
    """Return our voter: no sampling, no screening, few answers."""
    return PrivateKNeighborsClassifier(epsilon, DELTA, ANSWERS, max_screened=0, classes=range(10))


def published(name: Name) -> PrivateKNeighborsClassifier:
    """Return a voter with the published parameters."""
    plan = PLANS[CLAIMED[name][0]]
    return PrivateKNeighborsClassifier(
        delta=DELTA,
        max_answered=plan.answered,
        n_neighbors=plan.screening.n_neighbors,
        sampling_rate=plan.sampling_rate,
        screening_noise=plan.screening.noise,
        threshold=plan.screening.threshold,
        vote_noise=plan.vote_noise,
        max_screened=plan.screened,
        classes=range(10),
    )


def pate(name: Name, epsilon: float) -> PateClassifier:
    """Return PATE with linear teachers."""
    return PateClassifier(
        TEACHERS[name], mechanism="gnmax", epsilon=epsilon, delta=DELTA, max_answered=PATE_ANSWERS, classes=range(10)
    )


def published_pate(name: Name) -> PateClassifier:
    """Return PATE with its published parameters, as far as teachers and public images go round."""
    threshold, screening_noise, vote_noise, screened, answered = PATE_PUBLISHED[name]
    return PateClassifier(
        250,
        delta=DELTA,
        threshold=threshold,
        screening_noise=screening_noise,
        vote_noise=vote_noise,
        max_screened=screened,
        max_answered=answered,
        classes=range(10),
    )


def ways(name: Name, *, curve: bool) -> list[tuple[str, Callable[[], VotingEstimator]]]:
    """Return what is compared: a name, and what makes a voter.

    Parameters
    ----------
    name : {"mnist", "svhn"}
    curve : bool
        Whether at several epsilons, and with published parameters.

    Returns
    -------
    list of (str, callable)
    """
    found: list[tuple[str, Callable[[], VotingEstimator]]] = []
    for epsilon in EPSILONS[name] if curve else (EPSILON,):
        found += [("ours", partial(ours, epsilon)), ("PATE", partial(pate, name, epsilon))]
    if curve:
        found += [("published parameters", partial(published, name))]
        found += [("PATE, published parameters", partial(published_pate, name))]
    return found


def measure(
    digits: Digits,
    way: str,
    voter: Callable[[], VotingEstimator],
    *,
    splits: int,
    torch: bool,
    rounds: int,
    progress: Progress,
) -> Measured:
    """Train a student on every split and score it on the images held.

    Parameters
    ----------
    digits : Digits
    way : str
    voter : callable
        Makes a voter.
    splits : int
    torch : bool
        Whether the student is a network; else it is a support vector machine.
    rounds : int
    progress : rich.progress.Progress

    Returns
    -------
    Measured
    """
    scores, answered, right, epsilon = [], [], [], 0.0
    for split in progress.track(range(splits), description=f"{digits.name}: {way}"):
        rows = np.random.default_rng(split).permutation(len(digits.test))
        held, public = rows[:HELD], rows[HELD:]
        network = NetworkStudent(digits.name, epochs=EPOCHS) if torch else None
        student = Student(
            voter(),
            network,
            features=digits.features,
            rounds=rounds,
            self_training=0 if torch else 1,
            random_state=split,
        ).fit(digits.private, digits.private_y, digits.test[public])
        scores.append(student.score(digits.test[held], digits.test_y[held]))
        known = [asked.rows[asked.answers.answered] for asked in student.rounds_]
        labels = np.concatenate([answers.labels[answers.answered] for answers in student.answers_])
        answered.append(len(labels))
        right.append(float(np.mean(labels == digits.test_y[public][np.concatenate(known)])))
        epsilon = student.guarantee.epsilon
    return Measured(way, epsilon, tuple(scores), float(np.mean(answered)), float(np.mean(right)))


def cheapest(curve: Iterable[Measured], accuracy: float) -> float | None:
    """Return the least epsilon of a curve at which the student is at least so good.

    Parameters
    ----------
    curve : iterable of Measured
    accuracy : float

    Returns
    -------
    float or None

    Examples
    --------
    >>> curve = [Measured("ours", 0.5, (0.97, 0.99), 500, 0.9), Measured("ours", 1.0, (0.99, 0.99), 500, 0.9)]
    >>> cheapest(curve, 0.98), cheapest(curve, 0.995)
    (0.5, None)
    """
    return min((point.epsilon for point in curve if point.mean >= accuracy), default=None)


def draw(name: Name, kind: str, results: Sequence[Measured], out: Path) -> Path:
    """Write the picture of accuracy over epsilon.

    Parameters
    ----------
    name : {"mnist", "svhn"}
    kind : str
        Of student.
    results : sequence of Measured
    out : Path

    Returns
    -------
    Path
    """
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for way in dict.fromkeys(point.way for point in results):
        points = sorted((point for point in results if point.way == way), key=lambda point: point.epsilon)
        spread = [np.std(point.accuracy) for point in points]
        x, y = [point.epsilon for point in points], [point.mean for point in points]
        axes.errorbar(x, y, yerr=spread, fmt=MARKS[way], capsize=3, label=way)
    axes.set(xscale="log", xlabel=f"epsilon of all answers (delta {DELTA:g})", ylabel="accuracy of the student")
    axes.set_title(f"{name}: learning from private votes")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    path = out / f"votes-{name}-{kind}.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def tell(name: Name, results: Sequence[Measured], console: Console) -> None:
    """Print the table of results, and what the published parameters claim and cost.

    Parameters
    ----------
    name : {"mnist", "svhn"}
    results : sequence of Measured
    console : Console
    """
    table = Table("way", "epsilon", "accuracy", "spread", "answered", "labels right", title=f"{name}, delta {DELTA:g}")
    for point in results:
        table.add_row(
            point.way,
            f"{point.epsilon:.4f}",
            f"{point.mean:.4f}",
            f"{np.std(point.accuracy):.4f}",
            f"{point.answered:.0f}",
            f"{point.label_accuracy:.3f}",
        )
    console.print(table)
    rival = next((point for point in results if point.way == "published parameters"), None)
    if rival is None:
        return
    plan, accuracy = CLAIMED[name]
    curve = [point for point in results if point.way == "ours"]
    table = Table("", "accuracy", "claimed epsilon", "honest epsilon", "ours at that accuracy", title="published")
    for label, wanted in (("as reported", accuracy), ("measured here", rival.mean)):
        least = cheapest(curve, wanted)
        claim = f"{PLANS[plan].claimed:g}"
        table.add_row(
            label, f"{wanted:.4f}", claim, f"{rival.epsilon:.4f}", "not reached" if least is None else f"{least:.4f}"
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", choices=tuple(FOLDERS), default="mnist")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--torch", action="store_true", help="a network as student")
    parser.add_argument(
        "--rounds", type=int, default=1, help="the second looks for neighbours in the student's features"
    )
    parser.add_argument("--curve", action="store_true", help="ours and PATE at several epsilons; published parameters")
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    console, results = Console(), []
    with Progress(console=console) as progress:
        digits = load(given.data, progress)
        for way, voter in ways(given.data, curve=given.curve):
            if not given.torch or way == "ours" or given.curve:
                measured = measure(
                    digits, way, voter, splits=given.splits, torch=given.torch, rounds=given.rounds, progress=progress
                )
                results.append(measured)
    tell(given.data, results, console)
    kind = "torch" if given.torch else "sklearn"
    path = given.out / f"votes-{given.data}-{kind}.json"
    path.write_text(json.dumps([asdict(point) for point in results], indent=1) + "\n")
    console.print(f"written: {path}, {draw(given.data, kind, results, given.out)}")


if __name__ == "__main__":
    main()
