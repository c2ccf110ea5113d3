"""Who teaches the students of the study of Private-kNN: ours, PATE, published parameters, and nobody."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC

from nearveil.privacy.noise import Source
from nearveil.votes import PateClassifier, PrivateKNeighborsClassifier
from nearveil.votes._base import VotingEstimator
from nearveil.votes._propagation import HalfWhitening, unit
from studies.accounting import DELTA, PLANS, Plan
from studies.digits import Digits, Name

Make = Callable[[Source], VotingEstimator]
"""From a source of noise to a voter."""

CLASSES = range(10)
ANSWERS, PATE_ANSWERS = 500, 100  # PATE's are fewer, in its favour: its counts are smaller
TEACHERS: dict[Name, int] = {"mnist": 250, "svhn": 50}
PLAN_OF: dict[Name, str] = {"mnist": "MNIST", "svhn": "SVHN"}
REPORTED: dict[Name, float] = {"mnist": 0.988, "svhn": 0.916}  # accuracy of the students of Private-kNN, as published
PATE_PUBLISHED: dict[Name, tuple[float, float, float, int, int]] = {
    # Papernot et al. 2018, table 1: threshold, screening noise, vote noise, screened, answered
    "mnist": (200.0, 150.0, 40.0, 640, 286),
    "svhn": (300.0, 200.0, 40.0, 8500, 3098),
}
EPSILONS: dict[Name, tuple[float, ...]] = {
    "mnist": (0.01, 0.03, 0.1, 0.47, 2.0, 16.0),
    "svhn": (0.01, 0.1, 0.47, 1.0, 2.0, 4.0, 8.0, 16.0),
}
# Figure 4 of the supplement varies the sampling rate, the noise and the number of queries.
RATES = (0.05, 0.15)
SCREENED = (50, 200, 1000)
FIGURE_4 = tuple(f"sampling rate {rate:g}" for rate in RATES)
NEIGHBOURS = 5  # of the search without privacy
OURS, PATE = "ours", "PATE"
GIVEN, PATE_GIVEN = "published parameters", "PATE, published parameters"
COMMONEST, TRUE, NEAREST = "commonest class", "true labels", "neighbours, no privacy"


def make_ours(epsilon: float, source: Source) -> PrivateKNeighborsClassifier:
    """Return our voter: no sampling, no screening, few answers."""
    return PrivateKNeighborsClassifier(epsilon, DELTA, ANSWERS, max_screened=0, classes=CLASSES, source=source)


def make_private_knn(plan: Plan, source: Source) -> PrivateKNeighborsClassifier:
    """Return a voter with parameters as published."""
    return PrivateKNeighborsClassifier(
        delta=DELTA,
        max_answered=plan.answered,
        n_neighbors=plan.screening.n_neighbors,
        sampling_rate=plan.sampling_rate,
        screening_noise=plan.screening.noise,
        threshold=plan.screening.threshold,
        vote_noise=plan.vote_noise,
        max_screened=plan.screened,
        classes=CLASSES,
        source=source,
    )


def make_pate(teachers: int, epsilon: float, source: Source) -> PateClassifier:
    """Return PATE with linear teachers."""
    return PateClassifier(
        teachers,
        mechanism="gnmax",
        epsilon=epsilon,
        delta=DELTA,
        max_answered=PATE_ANSWERS,
        classes=CLASSES,
        source=source,
    )


def make_published_pate(name: Name, source: Source) -> PateClassifier:
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
        classes=CLASSES,
        source=source,
    )


def list_ways(name: Name) -> dict[str, list[Make]]:
    """Return who teaches, a voter for each point of a curve."""
    found: dict[str, list[Make]] = {
        OURS: [partial(make_ours, epsilon) for epsilon in EPSILONS[name]],
        PATE: [partial(make_pate, TEACHERS[name], epsilon) for epsilon in EPSILONS[name]],
        GIVEN: [partial(make_private_knn, PLANS[PLAN_OF[name]])],
        PATE_GIVEN: [partial(make_published_pate, name)],
    }
    return found | _list_figure_4() if name == "mnist" else found


def _list_figure_4() -> dict[str, list[Make]]:
    """Return the curves of figure 4: all but sampling rate and number of queries as published for MNIST."""
    base = PLANS["MNIST"]
    curves: dict[str, list[Make]] = {}
    for label, rate in zip(FIGURE_4, RATES, strict=True):
        plans = [
            Plan(rate, base.screening, count, base.vote_noise, round(count * base.answered / base.screened), None)
            for count in SCREENED
        ]
        curves[label] = [partial(make_private_knn, plan) for plan in plans]
    return curves


def score_references(digits: Digits, public: NDArray[np.int64], held: NDArray[np.int64]) -> dict[str, float]:
    """Return the accuracy without votes, and without privacy."""
    components = min(max(len(public) // 40, 8), 64)  # as many as a student takes by default
    space = HalfWhitening(components).fit(digits.features(digits.test[public]).astype(np.float64))
    rows = {
        part: unit(space.transform(digits.features(images).astype(np.float64)))
        for part, images in (
            ("private", digits.private),
            ("public", digits.test[public]),
            ("held", digits.test[held]),
        )
    }
    truth = digits.test_y[held]
    student = SVC().fit(rows["public"], digits.test_y[public])
    nearest = KNeighborsClassifier(NEIGHBOURS, algorithm="brute").fit(rows["private"], digits.private_y)
    commonest = np.bincount(digits.private_y).argmax()
    return {
        COMMONEST: float(np.mean(truth == commonest)),
        TRUE: float(student.score(rows["held"], truth)),
        NEAREST: float(nearest.score(rows["held"], truth)),
    }
