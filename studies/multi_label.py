"""Many labels on real data: make, body and year of cars by private votes, clipped as the supplement proposes."""

import functools
import warnings
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nearveil.privacy.noise import unsafe_seeded
from nearveil.private_knn import NoiseWarning, PrivateKNeighborsClassifier
from nearveil.private_knn.student_model import HalfWhitening
from studies import _figures as draw
from studies._report import show
from studies._study import Case, Row, Study, list_cases, mean, select
from studies.data import find

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

FILE = "cars196_cropped_lite0/cars196_cropped_lite0.npz"
BODIES = ("Sedan", "SUV", "Coupe", "Convertible", "Hatchback", "Wagon", "Minivan", "Van", "Cab")  # or another
ATTRIBUTES = ("make", "body", "year")
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
CLIPS = (1.0, 2.0, 3.0)
QUERIES = 300
COMPONENTS = 64
DELTA = 1e-5
SEEDS = (0, 1, 2)
NEIGHBOURS = 5  # without privacy
APART, NOISELESS, FLOOR = "one vote for each attribute", "neighbours, no privacy", "commonest value"


def describe_class(name: str) -> tuple[str, str, str]:
    """Return make, body and year of a class of Cars196.

    Examples
    --------
    >>> describe_class("Land Rover LR2 SUV 2012")
    ('Land', 'SUV', '2012')
    """
    words = name.split()
    body = next((body for body in BODIES if body.lower() in name.lower().replace("supercab", "cab").split()), "other")
    return words[0], body, words[-1]


@functools.cache
def load_cars() -> tuple[Floats, NDArray[Any], Floats, NDArray[Any]]:
    """Return private rows and their attributes, and public ones: the training and the test images."""
    with np.load(find(FILE)) as arrays:
        X, y, train = arrays["features"].astype(np.float64), arrays["labels"], arrays["is_train"].astype(bool)
        attributes = np.array([describe_class(str(name)) for name in arrays["class_names"]])[y]
    return X[train], attributes[train], X[~train], attributes[~train]


def split_queries(seed: int) -> tuple[Floats, NDArray[Any], Floats, NDArray[Any]]:
    """Return private rows in half-whitened public components, and the queries of a seed."""
    private, known, public, truth = load_cars()
    space = HalfWhitening.learn(public, COMPONENTS)
    chosen = np.random.default_rng(seed).permutation(len(public))[:QUERIES]
    return space.transform(private), known, space.transform(public[chosen]), truth[chosen]


def list_values(attributes: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the values of each attribute, which are public: those of all classes of the data set."""
    return [np.unique(column) for column in attributes.T]


def encode(attributes: NDArray[Any], values: list[NDArray[Any]]) -> Labels:
    """Return a row of zeros and ones for each record, one column for each value of each attribute."""
    parts = [column[:, None] == known for column, known in zip(attributes.T, values, strict=True)]
    return np.hstack(parts).astype(np.int64)


def choose(votes: Floats, values: list[NDArray[Any]]) -> NDArray[Any]:
    """Return the value with the most votes of each attribute: post-processing."""
    ends = np.cumsum([len(known) for known in values])[:-1]
    parts = np.split(votes, ends, axis=1)
    return np.stack([known[part.argmax(axis=1)] for part, known in zip(parts, values, strict=True)], axis=1)


def vote_together(
    data: tuple[Any, ...], values: list[NDArray[Any]], epsilon: float, clip: float, seed: int
) -> tuple[NDArray[Any], float]:
    """Return the attributes by one release of clipped votes on all of them, and its epsilon."""
    private, known, queries, _ = data
    voter = PrivateKNeighborsClassifier(
        epsilon, DELTA, len(queries), votes="binary", clip=clip, max_screened=0, source=unsafe_seeded(seed)
    )
    answers = voter.fit(private, encode(known, values)).answer(queries)
    return choose(answers.votes, values), voter.guarantee.epsilon


def vote_apart(
    data: tuple[Any, ...], values: list[NDArray[Any]], epsilon: float, seed: int
) -> tuple[NDArray[Any], float]:
    """Return the attributes by a release for each, and the epsilon of all three."""
    private, known, queries, _ = data
    # Three times as many answers of one histogram: the same composition as three voters.
    base = PrivateKNeighborsClassifier(epsilon, DELTA, 3 * len(queries), max_screened=0, classes=range(2))
    plan = base.fit(private[:2], [0, 1]).plan_
    parts = []
    for number, (column, classes) in enumerate(zip(known.T, values, strict=True)):
        voter = PrivateKNeighborsClassifier(
            delta=DELTA, max_answered=len(queries), vote_noise=plan.vote_noise, n_neighbors=plan.n_neighbors,
            max_screened=0, classes=list(classes), source=unsafe_seeded(10 * seed + number),
        )  # fmt: skip
        parts.append(voter.fit(private, column).predict(queries))
    return np.stack(parts, axis=1), base.guarantee.epsilon


def cases() -> list[Case]:
    """Return every epsilon on every draw of queries, and the references."""
    return [*list_cases(epsilon=EPSILONS, seed=SEEDS), *list_cases(epsilon=[None], seed=SEEDS)]


def measure(case: Case) -> list[Row]:
    """Measure the accuracy of each attribute by every way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoiseWarning)  # a small epsilon is shown as it is
        return _measure_ways(case)


def _measure_ways(case: Case) -> list[Row]:
    data = split_queries(case["seed"])
    private, known, queries, truth = data
    values, epsilon = list_values(load_cars()[1]), case["epsilon"]
    answers: dict[str, tuple[NDArray[Any], float | None]] = {}
    if epsilon is None:
        unit, asked = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (private, queries))
        near = np.argsort(-(asked @ unit.T), axis=1, kind="stable")[:, :NEIGHBOURS]
        votes = encode(known, values)
        answers[NOISELESS] = choose(votes[near].sum(axis=1).astype(float), values), None
        answers[FLOOR] = choose(np.tile(votes.sum(axis=0).astype(float), (len(queries), 1)), values), None
    else:
        for clip in CLIPS:
            answers[f"tau = {clip:g}"] = vote_together(data, values, epsilon, clip, case["seed"])
        answers[APART] = vote_apart(data, values, epsilon, case["seed"])
    rows = []
    for way, (chosen, spent) in answers.items():
        right = dict(zip(ATTRIBUTES, (chosen == truth).mean(axis=0).tolist(), strict=True))
        whole = float((chosen == truth).all(axis=1).mean())
        rows.append(
            {**case, "way": way, "spent": spent, **right, "all": whole, "mean": float((chosen == truth).mean())}
        )
    return rows


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw accuracy over epsilon, a panel for each attribute."""
    figure, (panels,) = draw.make_panels(1, len(ATTRIBUTES), (10.5, 4.2), sharey=True)
    ways = [*(f"tau = {clip:g}" for clip in CLIPS), APART]
    for axes, attribute in zip(panels, ATTRIBUTES, strict=True):
        voted = rows[rows["way"].isin(ways)]
        draw.curves(axes, voted.astype({"epsilon": float}), attribute, "epsilon", by="way", only=ways)
        top = mean(select(rows, way=NOISELESS)[attribute])
        level = draw.level(top, [min(EPSILONS), max(EPSILONS)])
        draw.curve(axes, NOISELESS, level, index=len(ways))
        draw.floor(axes, float(select(rows, way=FLOOR)[attribute].mean()), label=FLOOR)
        draw.epsilon_axis(axes, EPSILONS, label="epsilon of all answers")
        axes.set(title=attribute, ylim=(0, 1))
    draw.finish(figure, panels, "accuracy")
    return {"accuracy": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return all accuracies, and how many values there are."""
    voted = rows[rows["epsilon"].notna()].astype({"epsilon": float})
    cells = pd.DataFrame(
        {name: show(voted, name, "epsilon", "way", spec=".3f", least=0, most=1) for name in ATTRIBUTES}
    )
    references = pd.DataFrame(
        {name: show(rows[rows["epsilon"].isna()], name, "way", least=0, most=1) for name in ATTRIBUTES}
    )
    best = voted.groupby(["epsilon", "way"])["mean"].mean().unstack("way")
    values = list_values(load_cars()[1])
    return {
        "lines": cells.reset_index().assign(epsilon=lambda frame: frame["epsilon"].map("{:g}".format)),
        "references": references.reset_index(),
        "best": [(epsilon, row.idxmax()) for epsilon, row in best.iterrows()],
        "counts": dict(zip(ATTRIBUTES, map(len, values), strict=True)),
        "private": len(load_cars()[0]),
    }


PARAMETERS = {
    "epsilons": EPSILONS, "tau": CLIPS, "queries": QUERIES, "components": COMPONENTS, "delta": DELTA
}  # fmt: skip
STUDY = Study("multi-label", cases, measure, figures, facts, (FILE,), PARAMETERS, SEEDS)
