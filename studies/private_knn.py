"""What a student learns from private votes, and what that costs: ours, PATE, and parameters as published."""

import importlib.util
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import normalize
from sklearn.svm import SVC

from nearveil.privacy.noise import Source, unsafe_seeded
from nearveil.private_knn import PrivateKNeighborsClassifier, Student
from nearveil.private_knn.student_model import HalfWhitening
from studies import _figures as draw
from studies._report import interval
from studies._study import Case, Row, Study, summarise
from studies.accounting import DELTA, PLANS, Plan
from studies.data import FOLDERS, Digits, DigitSet, load_digit_images
from studies.networks import NetworkStudent
from studies.pate import PateClassifier

Make = Callable[[Source], PrivateKNeighborsClassifier | PateClassifier]
"""From a source of noise to a voter."""

CLASSES = range(10)
_COMMON: dict[str, Any] = {"delta": DELTA, "classes": CLASSES}
ANSWERS, PATE_ANSWERS = 500, 100  # PATE's are fewer, in its favour: its counts are smaller
TEACHERS: dict[DigitSet, int] = {"mnist": 250, "svhn": 50}
PLAN_OF: dict[DigitSet, str] = {"mnist": "MNIST", "svhn": "SVHN"}
REPORTED: dict[DigitSet, float] = {"mnist": 0.988, "svhn": 0.916}  # accuracy of Private-kNN's students, as published
PUBLISHED_TEACHERS = 250
PATE_PUBLISHED: dict[DigitSet, dict[str, Any]] = {  # Papernot et al. 2018, table 1
    "mnist": {"threshold": 200, "screening_noise": 150, "vote_noise": 40, "max_screened": 640, "max_answered": 286},
    "svhn": {"threshold": 300, "screening_noise": 200, "vote_noise": 40, "max_screened": 8500, "max_answered": 3098},
}
EPSILONS: dict[DigitSet, tuple[float, ...]] = {
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
SEEDS = (0, 1, 2, 3, 4)
NAMES: tuple[DigitSet, ...] = ("mnist", "svhn")
HELD = 1000
NETWORK, NETWORK_EPSILON, EPOCHS = "ours, network", 0.47, 4
REFERENCES = "references"
ACCURACY = "accuracy (95% interval)"
TITLES: dict[DigitSet, str] = {"mnist": "MNIST", "svhn": "SVHN, 8,000 private digits"}


def cases() -> list[Case]:
    """Return every way of teaching on every split, a split after the other."""
    ways = {name: (*list_ways(name), REFERENCES) for name in NAMES}
    ways["mnist"] = (NETWORK, *ways["mnist"])
    return [{"data": name, "way": way, "seed": seed} for seed in SEEDS for name in NAMES for way in ways[name]]


def measure(case: Case) -> list[Row]:
    """Train a student of each voter of a way on one split, and score it on the images held."""
    name, way, seed = case["data"], case["way"], case["seed"]
    if way == NETWORK and importlib.util.find_spec("torch") is None:
        return [{**case, "left_out": "torch is not installed (the extra `torch`)"}]
    digits = load_digit_images(name)
    order = np.random.default_rng(seed).permutation(len(digits.test))
    testing, public = order[:HELD], order[HELD:]
    if way == REFERENCES:
        results = score_references(digits, public, testing)
        return [{"data": name, "way": entry, "seed": seed, "accuracy": value} for entry, value in results.items()]
    makers = [lambda source: make_ours(NETWORK_EPSILON, source)] if way == NETWORK else list_ways(name)[way]
    learner = NetworkStudent(digits.name, epochs=EPOCHS) if way == NETWORK else None
    return [{**case, **teach(digits, make, public, testing, seed, learner=learner)} for make in makers]


def teach(
    digits: Digits, make: Make, public: "np.ndarray", testing: "np.ndarray", seed: int, *, learner: Any = None
) -> Row:
    """Teach a student by votes on public images, and score it; without a learner, the default student."""
    student = Student(
        make(unsafe_seeded(seed)),
        learner,
        features=digits.features,
        self_training=0 if learner is not None else 1,
        random_state=seed,
    ).fit(digits.private, digits.private_y, digits.test[public])
    (answers,) = student.rounds_
    answered = answers.answers.answered
    right = answers.answers.labels[answered] == digits.test_y[public][answers.rows[answered]]
    return {
        "epsilon": student.guarantee.epsilon,
        "accuracy": float(student.score(digits.test[testing], digits.test_y[testing])),
        "answered": int(answered.sum()),
        "labels_right": float(np.mean(right)),
    }


def make_ours(epsilon: float, source: Source) -> PrivateKNeighborsClassifier:
    """Return our voter: no sampling, no screening, few answers."""
    caps: Any = {"max_answered": ANSWERS, "max_screened": 0, "accounting": "worst-case"}
    return PrivateKNeighborsClassifier(epsilon, **caps, **_COMMON, source=source)


def make_private_knn(plan: Plan, source: Source) -> PrivateKNeighborsClassifier:
    """Return a voter with parameters as published."""
    screening = plan.screening
    votes: Any = {"sampling_rate": plan.sampling_rate, "vote_noise": plan.vote_noise, "max_answered": plan.answered}
    screened: Any = {
        "screening_noise": screening.noise,
        "threshold": screening.threshold,
        "max_screened": plan.screened,
    }
    k = screening.n_neighbors
    return PrivateKNeighborsClassifier(n_neighbors=k, **votes, **screened, **_COMMON, source=source)


def make_pate(teachers: int, source: Source, **options: Any) -> PateClassifier:
    """Return PATE with linear teachers, as far as teachers and public images go round."""
    return PateClassifier(teachers, **options, **_COMMON, source=source)


def list_ways(name: DigitSet) -> dict[str, list[Make]]:
    """Return who teaches, a voter for each point of a curve."""
    pate = partial(make_pate, TEACHERS[name], mechanism="gnmax", max_answered=PATE_ANSWERS)
    results: dict[str, list[Make]] = {
        OURS: [partial(make_ours, epsilon) for epsilon in EPSILONS[name]],
        PATE: [partial(pate, epsilon=epsilon) for epsilon in EPSILONS[name]],
        GIVEN: [partial(make_private_knn, PLANS[PLAN_OF[name]])],
        PATE_GIVEN: [partial(make_pate, PUBLISHED_TEACHERS, **PATE_PUBLISHED[name])],
    }
    if name == "mnist":  # figure 4: all but sampling rate and number of queries as published
        base = PLANS["MNIST"]
        for way, rate in zip(FIGURE_4, RATES, strict=True):
            answered = {count: round(count * base.answered / base.screened) for count in SCREENED}
            plans = [replace(base, sampling_rate=rate, screened=m, answered=answered[m]) for m in SCREENED]
            results[way] = [partial(make_private_knn, plan) for plan in plans]
    return results


def score_references(digits: Digits, public: NDArray[np.int64], testing: NDArray[np.int64]) -> dict[str, float]:
    """Return the accuracy without votes, and without privacy."""
    components = min(max(len(public) // 40, 8), 64)  # as many as a student takes by default
    images = (digits.test[public], digits.private, digits.test[testing])
    features = [digits.features(part).astype(np.float64) for part in images]
    space = HalfWhitening.learn(features[0], components)
    public_rows, private_rows, held_rows = (normalize(space.transform(rows)) for rows in features)
    truth = digits.test_y[testing]
    student = SVC().fit(public_rows, digits.test_y[public])
    nearest = KNeighborsClassifier(NEIGHBOURS, algorithm="brute").fit(private_rows, digits.private_y)
    commonest = np.bincount(digits.private_y).argmax()
    return {
        COMMONEST: float(np.mean(truth == commonest)),
        TRUE: float(student.score(held_rows, truth)),
        NEAREST: float(nearest.score(held_rows, truth)),
    }


def find_curve(rows: pd.DataFrame, name: str, way: str) -> pd.DataFrame:
    """Return the accuracy of a way over epsilon, and how many answers there were and how many of them right."""
    mine = rows[(rows["data"] == name) & (rows["way"] == way) & rows["accuracy"].notna()]
    columns = [column for column in ("answered", "labels_right") if mine[column].notna().any()]
    groups = mine.astype(dict.fromkeys(("epsilon", *columns), float)).groupby("epsilon", sort=False, dropna=False)
    results = summarise(mine.astype({"epsilon": float}), "accuracy", "epsilon")
    return results.join(groups[columns].mean()).assign(splits=groups.size()).sort_index()


def find_cheapest(results: pd.DataFrame, accuracy: float) -> float | None:
    """Return the least epsilon of a curve whose mean accuracy reaches a value."""
    reached = results.index[results["value"] >= accuracy]
    return float(reached.min()) if len(reached) else None


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw accuracy over epsilon, and figure 4 of the supplement."""
    accuracy, (panels,) = draw.make_panels(1, 3, (11, 4.6))
    shown: tuple[tuple[DigitSet, str, tuple[float, float]], ...] = (
        ("mnist", TITLES["mnist"], (0, 1.02)),
        ("mnist", "MNIST, from 0.94 on", (0.94, 1)),
        ("svhn", TITLES["svhn"], (0, 1.02)),
    )
    for axes, (name, title, limits) in zip(panels, shown, strict=True):
        _draw_accuracy(axes, rows, name)
        axes.set(title=title, ylim=limits)
    trade_off, (pair,) = draw.make_panels(1, 2, (9.5, 4.6))
    for axes, (_, title, limits) in zip(pair, shown[:2], strict=True):
        for position, way in enumerate((*FIGURE_4, PATE, OURS)):
            label = f"{way}, queries varied" if way in FIGURE_4 else way
            draw.curve(axes, way, find_curve(rows, "mnist", way), index=position + 1, label=label)
        _draw_references(axes, rows, "mnist")
        axes.set(title=title, ylim=limits)
    for figure, line in ((accuracy, panels), (trade_off, pair)):
        draw.finish(figure, line, "accuracy of the student on held-out images")
    return {"accuracy": accuracy, "trade-off": trade_off}


def _draw_accuracy(axes: Axes, rows: pd.DataFrame, name: DigitSet) -> None:
    """Draw all ways at their honest epsilon, and the published parameters at the one that is claimed, too."""
    for way in (OURS, PATE, GIVEN, PATE_GIVEN, NETWORK):
        results = find_curve(rows, name, way)
        if len(results):
            draw.curve(axes, way, results, index=7)
    claimed, published = PLANS[PLAN_OF[name]].claimed, find_curve(rows, name, GIVEN)
    ends = [claimed, published.index[0]]
    axes.plot(ends, [published["value"].iloc[0]] * 2, color=draw.COLOURS["red"], linestyle=":", linewidth=1.2)
    label = "published parameters, at the epsilon claimed"
    draw.curve(axes, GIVEN, published.set_axis([claimed]), sound=False, label=label)
    _draw_references(axes, rows, name)


def _draw_references(axes: Axes, rows: pd.DataFrame, name: DigitSet) -> None:
    low, top, near = (find_curve(rows, name, way)["value"].iloc[0] for way in (COMMONEST, TRUE, NEAREST))
    draw.floor(axes, low, label="floor: the most common class")
    axes.axhline(top, color="black", linestyle="-.", linewidth=1.1, label="the same student, true labels")
    axes.axhline(near, color="0.5", linestyle=(0, (6, 2)), linewidth=1.1, label=NEAREST)
    draw.epsilon_axis(axes, (0.01, 0.1, 1, 10), label="epsilon of all answers")


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return what was learned at what cost; every number is one of the rows."""
    missing = list(rows["left_out"].dropna()) if "left_out" in rows else []
    ways = (NETWORK, OURS, PATE, GIVEN, PATE_GIVEN, COMMONEST, TRUE, NEAREST)
    figure_4 = pd.concat([_list_curve(rows, "mnist", way) for way in FIGURE_4])
    curves = {name: pd.concat([_list_curve(rows, name, way) for way in ways]) for name in NAMES}
    return {
        "sets": {
            name: {"title": TITLES[name], "curves": curves[name], **_compare_curves(rows, name)} for name in NAMES
        },
        "missing": missing[:1],
        "claims": pd.DataFrame([line for name in NAMES for line in _list_claims(rows, name)]),
        "networks": list(find_curve(rows, "mnist", NETWORK).itertuples()),
        "figure_4": figure_4[["method", "epsilon", "answered", ACCURACY]],
        "rates": ", ".join(f"{rate:g}" for rate in RATES),
        "screened": ", ".join(f"{count:,}" for count in SCREENED),
    }


def _list_curve(rows: pd.DataFrame, name: DigitSet, way: str) -> pd.DataFrame:
    """Return the points of a curve in print."""
    return pd.DataFrame(
        [
            {
                "method": {GIVEN: "Private-kNN, published parameters", COMMONEST: "most common class"}.get(way, way),
                "epsilon": "" if math.isnan(point.Index) else f"{point.Index:.4f}",
                ACCURACY: interval(point, ".4f", 0, 1),
                "answered": f"{point.answered:.0f}" if hasattr(point, "answered") else "",
                "labels right": f"{point.labels_right:.3f}" if hasattr(point, "answered") else "",
            }
            for point in find_curve(rows, name, way).itertuples()
        ]
    )


def _compare_curves(rows: pd.DataFrame, name: DigitSet) -> dict[str, Any]:
    """Return what a reader should see on the curve of one set of data."""
    mine, rival = find_curve(rows, name, OURS), find_curve(rows, name, PATE)
    top = find_curve(rows, name, TRUE)["value"].iloc[0]
    low = find_curve(rows, name, COMMONEST)["high"].iloc[0]
    ahead = mine["low"].to_numpy() > rival["high"].to_numpy()
    good = mine.loc[mine["value"] >= top - 0.01, "value"]
    return {
        "top": top,
        "reached": good.index.min() if len(good) else None,
        "ahead": _join(mine.index[ahead]),
        "behind": _join(mine.index[~ahead]) if not ahead.all() else "",
        "unlike": _join(mine.index[mine["low"] > low]),
        "best": good.max(),
        "spread": good.max() - good.min(),
    }


def _join(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.2g}" for value in values) or "none"


def _list_claims(rows: pd.DataFrame, name: DigitSet) -> list[dict[str, str]]:
    """Return what published accuracies cost by the published parameters, and by ours."""
    mine, published, low = (find_curve(rows, name, way) for way in (OURS, GIVEN, COMMONEST))
    lines = []
    for label, target in (
        ("as reported", REPORTED[name]),
        ("published parameters, measured here", published["value"].iloc[0]),
    ):
        least = find_cheapest(mine, target)
        if least is None:
            text = f"not reached (best: {mine['value'].max():.4f} at {mine['value'].idxmax():.2g})"
        elif target <= low[["value", "high"]].max(axis=None):
            text = "none: the most common class is as good"
        else:
            text = f"{least:.2g}"
        epsilons = {
            "claimed epsilon": f"{PLANS[PLAN_OF[name]].claimed:g}",
            "honest epsilon": f"{published.index[0]:.4f}",
        }
        accuracy = {"": f"{PLAN_OF[name]}, {label}", "accuracy": f"{target:.4f}"}
        lines.append({**accuracy, **epsilons, "least epsilon of ours": text})
    return lines


PARAMETERS = {
    "delta": DELTA,
    "epsilons of ours and PATE": {PLAN_OF[name]: list(EPSILONS[name]) for name in NAMES},
    "held": HELD,
    "network": f"epsilon {NETWORK_EPSILON:g}, {EPOCHS} epochs",
}
DATA = tuple(f"{folder}/{folder}.npz" for folder in FOLDERS.values())
STUDY = Study("private-knn", cases, measure, figures, facts, DATA, PARAMETERS, SEEDS)
