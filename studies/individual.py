"""Individual accounting: votes of Private-kNN if each record's own votes are limited, instead of all answers."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nearveil.private_knn import PrivateDiscriminant, PrivateKNeighborsClassifier, Student
from nearveil.private_knn.student_model import HalfWhitening
from studies import _figures as draw
from studies._study import Case, Row, Study, list_cases, select, summarise
from studies.accounting import DELTA
from studies.data import FOLDERS, extract_digit_features, find

COMPONENTS = 64
SIZES = {  # private, public and query rows
    "mnist": (40_000, 3_000, 2_000),
    "svhn": (8_000, 2_000, 2_000),
    "cub": (3_893, 1_000, 2_000),
    "cars": (9_500, 2_500, 2_000),
}
TITLES = {"mnist": "MNIST", "svhn": "SVHN", "cub": "CUB, 15 families", "cars": "Cars, 9 body types"}
SEEDS = (0, 1, 2)
DRAWS = 2  # of the noise
EPSILONS = (0.1, 0.5, 1.0, 2.0)
QUERIES = (100, 500, 2_000)
CROWD_QUERIES, CROWD_EPSILONS = 500, (0.1, 0.5, 2.0)
PERSON_IMAGES, PERSON_QUERIES, PERSON_EPSILONS = 10, 500, (0.1, 0.5, 1.0, 2.0)
LEAST_SPECIES = 4  # of a family of birds
BODY_TYPES = ("Sedan", "SUV", "Convertible", "Coupe", "Cab", "Hatchback", "Van", "Wagon", "Minivan")
STUDENT_ANSWERS, STUDENT_EPSILONS = 500, (0.1, 0.5, 2.0)
WORST, INDIVIDUAL, DISCRIMINANT, ONE_IMAGE = "worst case", "individual", "discriminant", "one image of each person"
CALM, CROWD, PERSONS, STUDENTS = "calm", "one class", "persons", "students"
KINDS = {
    "mnist": (CALM, CROWD, PERSONS, STUDENTS),
    "svhn": (CALM, CROWD, STUDENTS),
    "cub": (CALM, CROWD),
    "cars": (CALM, CROWD, STUDENTS),
}
Rows = NDArray[np.float64]
Labels = NDArray[np.int64]


def cases() -> list[Case]:
    """Return every kind of batch on every split of every set."""
    return [
        case for case in list_cases(data=SIZES, kind=(CALM, CROWD, PERSONS, STUDENTS), seed=SEEDS) if _is_measured(case)
    ]


def _is_measured(case: Case) -> bool:
    return case["kind"] in KINDS[case["data"]]


def measure(case: Case) -> list[Row]:
    """Score the answers to the queries of one split."""
    private, public, queries = split_rows(case["data"], case["seed"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # answers that are mostly noise are a part of the study
        measures = {
            CALM: _measure_calm, CROWD: _measure_crowd, PERSONS: _measure_persons, STUDENTS: _measure_students
        }  # fmt: skip
        return [{**case, **row} for row in measures[case["kind"]](private, public, queries)]


Part = tuple[Rows, Labels]


def _measure_calm(private: Part, public: Part, queries: Part) -> Iterator[Row]:
    for epsilon in EPSILONS:
        for count in QUERIES:
            part = queries[0][:count], queries[1][:count]
            for way in (WORST, INDIVIDUAL):
                yield _score(way, epsilon, private, public, part)
            model = PrivateDiscriminant(epsilon, DELTA, classes=np.unique(private[1]))
            right = np.mean([model.fit(*private, public[0]).score(*part) for _ in range(DRAWS)])
            yield {"way": DISCRIMINANT, "epsilon": epsilon, "queries": count, "right": float(right)}


def _measure_crowd(private: Part, public: Part, queries: Part) -> Iterator[Row]:
    """Ask about a single class at a time: the first, and the largest."""
    for label in sorted({int(np.unique(private[1])[0]), int(np.bincount(private[1]).argmax())}):
        chosen = np.flatnonzero(queries[1] == label)[:CROWD_QUERIES]
        for epsilon in CROWD_EPSILONS:
            for way in (WORST, INDIVIDUAL):
                row = _score(way, epsilon, private, public, (queries[0][chosen], queries[1][chosen]))
                yield {**row, "label": label}


def _measure_persons(private: Part, public: Part, queries: Part) -> Iterator[Row]:
    """Make persons of images of one class, and ask for their votes. Public rows are of persons, too."""
    private, groups = _make_persons(private)
    public, public_groups = _make_persons(public)
    part = queries[0][:PERSON_QUERIES], queries[1][:PERSON_QUERIES]
    alone = tuple(values[::PERSON_IMAGES] for values in private)
    for epsilon in PERSON_EPSILONS:
        yield {**_score(WORST, epsilon, alone, public, part), "way": ONE_IMAGE}  # type: ignore[arg-type]
        for way in (WORST, INDIVIDUAL):
            yield _score(way, epsilon, private, public, part, (groups, public_groups))


def _measure_students(private: Part, public: Part, queries: Part) -> Iterator[Row]:
    """Train students on the answers about public rows, and score them on the queries."""
    for epsilon in STUDENT_EPSILONS:
        for way in (WORST, INDIVIDUAL):
            accounting: Any = "individual" if way == INDIVIDUAL else "worst-case"
            terms: Any = {"max_answered": STUDENT_ANSWERS, "max_screened": 0, "accounting": accounting}
            voter = PrivateKNeighborsClassifier(epsilon, DELTA, classes=np.unique(private[1]), **terms)
            students = [Student(voter, random_state=seed).fit(*private, public[0]) for seed in range(DRAWS)]
            right = np.mean([student.score(*queries) for student in students])
            yield {"way": way, "epsilon": epsilon, "queries": STUDENT_ANSWERS, "right": float(right)}


def _make_persons(part: Part) -> tuple[Part, Labels]:
    """Return images in the order of their persons, and the person of each."""
    order = np.argsort(part[1], kind="stable")
    order = order[: len(order) // PERSON_IMAGES * PERSON_IMAGES]
    return (part[0][order], part[1][order]), np.arange(len(order)) // PERSON_IMAGES


def _score(
    way: str, epsilon: float, private: Part, public: Part, queries: Part, groups: tuple[Labels, Labels] | None = None
) -> Row:
    """Return the share of right labels; every query is answered."""
    rows, truth = queries
    results: list[float] = []
    row: Row = {"way": way, "epsilon": epsilon, "queries": len(rows)}
    for _ in range(DRAWS):
        voter = PrivateKNeighborsClassifier(
            epsilon,
            DELTA,
            len(rows),
            max_screened=0,
            classes=np.unique(private[1]),
            accounting="individual" if way == INDIVIDUAL else "worst-case",
        )
        given: dict[str, Any] = {"groups": None if groups is None else groups[0]}
        if way == INDIVIDUAL:
            given |= {"public": public[0], "public_groups": None if groups is None else groups[1]}
        voter.fit(*private, **given)
        answers = voter.answer(rows)
        results.append(float(np.mean(answers.labels == truth)))
        if answers.forecast is not None:
            forecast = answers.forecast
            row |= {"votes": forecast.max_votes, "noise": forecast.noise, "ratio": forecast.ratio}
    return {**row, "right": float(np.mean(results))}


def split_rows(name: str, seed: int) -> tuple[Part, Part, Part]:
    """Return private, public and query rows of a random split of the pool, in the components of the public ones."""
    pool, labels = _load_pool(name)
    order = np.random.default_rng(seed).permutation(len(labels))
    ends = np.cumsum(SIZES[name])
    private, public, queries = np.split(order[: ends[-1]], ends[:-1])
    if name in FOLDERS:
        used = np.concatenate([private, public, queries])
        features = dict(zip(used.tolist(), extract_digit_features(name, pool[used]), strict=True))
        parts = [np.array([features[number] for number in part.tolist()]) for part in (private, public, queries)]
    else:
        parts = [pool[part].astype(np.float64) for part in (private, public, queries)]
    space = HalfWhitening.learn(parts[1].astype(np.float64), COMPONENTS)
    rows = [space.transform(part.astype(np.float64)) for part in parts]
    return (rows[0], labels[private]), (rows[1], labels[public]), (rows[2], labels[queries])


def _load_pool(name: str) -> tuple[NDArray[Any], Labels]:
    """Return all images or features of a set, and their classes: digits, families of birds, body types of cars."""
    if name in FOLDERS:
        with np.load(find(f"{FOLDERS[name]}/{FOLDERS[name]}.npz")) as arrays:
            images = np.concatenate([arrays["x_train"], arrays["x_test"]])
            return images, np.concatenate([arrays["y_train"], arrays["y_test"]]).astype(np.int64)
    folder = {"cub": "cub200_cropped_lite0", "cars": "cars196_cropped_lite0"}[name]
    with np.load(find(f"{folder}/{folder}.npz")) as arrays:
        features, species, names = arrays["features"], arrays["labels"], arrays["class_names"].tolist()
    kinds = [text.split(".")[-1].split("_")[-1] if name == "cub" else text.split()[-2] for text in names]
    counts = pd.Series(kinds).value_counts()
    chosen = sorted(counts.index[counts >= LEAST_SPECIES]) if name == "cub" else list(BODY_TYPES)
    codes = np.array([chosen.index(kind) if kind in chosen else -1 for kind in kinds])[species]
    return features[codes >= 0], codes[codes >= 0].astype(np.int64)


def figures(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw the share of right labels over epsilon."""
    names = [name for name in SIZES if name in set(rows["data"])]
    figure, (panels,) = draw.make_panels(1, len(names), (3.2 * len(names), 3.6), sharey=True)
    count = min(QUERIES, key=lambda value: abs(value - 500))
    for axes, name in zip(panels, names, strict=True):
        for position, way in enumerate((WORST, INDIVIDUAL, DISCRIMINANT)):
            mine = select(rows, data=name, kind=CALM, way=way, queries=count)
            if len(mine):
                draw.curve(axes, way, summarise(mine, "right", "epsilon"), index=position)
        draw.epsilon_axis(axes, EPSILONS, label="epsilon of all answers")
        axes.set(title=TITLES[name], ylim=(0, 1.02))
    draw.finish(figure, panels, f"right of {count:,} answers")
    return {"accuracy": figure, **_draw_persons(rows)}


def _draw_persons(rows: pd.DataFrame) -> dict[str, Figure]:
    """Draw utility over privacy for whole persons, as figure 4 of the supplement does for identities."""
    persons = rows[rows["kind"] == PERSONS]
    if not len(persons):
        return {}
    figure, ((axes,),) = draw.make_panels(1, 1, (5.2, 3.6))
    for position, way in enumerate((ONE_IMAGE, WORST, INDIVIDUAL)):
        draw.curve(axes, way, summarise(select(persons, way=way), "right", "epsilon"), index=position)
    draw.epsilon_axis(axes, PERSON_EPSILONS, label="epsilon of all answers, for a person")
    axes.set(title=f"{TITLES['mnist']}, persons of {PERSON_IMAGES} images", ylim=(0, 1.02))
    draw.finish(figure, (axes,), f"right of {PERSON_QUERIES:,} answers")
    return {"persons": figure}


def facts(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the tables; every number is one of the rows."""
    calm = rows[rows["kind"] == CALM]
    tables = {TITLES[name]: _compare(select(calm, data=name)) for name in SIZES if name in set(calm["data"])}
    gains = pd.concat([table["gain"].astype(float) for table in tables.values()])
    crowd, persons, students = (rows[rows["kind"] == kind] for kind in (CROWD, PERSONS, STUDENTS))
    return {
        "tables": {name: _print(table) for name, table in tables.items()},
        "least": gains.min(),
        "mean": gains.mean(),
        "settings": len(gains),
        "crowd": _print(_compare(crowd.assign(set=crowd["data"].map(TITLES)), "set", "label")),
        "students": _print(_compare(students.assign(set=students["data"].map(TITLES)), "set"))
        if len(students)
        else pd.DataFrame(),
        "persons": _print(_pivot(persons, "epsilon")) if len(persons) else pd.DataFrame(),
        **_compare_advice(calm),
    }


def _pivot(rows: pd.DataFrame, *index: str) -> pd.DataFrame:
    values = rows.astype({"right": float})
    return values.pivot_table(index=list(index), columns="way", values="right", sort=False).reset_index()


def _compare(rows: pd.DataFrame, *index: str) -> pd.DataFrame:
    """Return one line for each setting, and what individual accounting gains."""
    # The size of a batch of one class differs between splits.
    settings = [*index, *(["queries"] if CALM in set(rows["kind"]) else []), "epsilon"]
    table, splits = _pivot(rows, *settings), _pivot(rows, *settings, "seed")
    gains = splits.assign(gain=splits[INDIVIDUAL] - splits[WORST]).groupby(settings, sort=False)["gain"]
    return table.merge(gains.agg(["mean", "sem"]).rename(columns={"mean": "gain", "sem": "±"}).reset_index())


def _compare_advice(calm: pd.DataFrame) -> dict[str, Any]:
    """Return how often the forecast points to the better of votes and discriminant."""
    votes = calm[calm["way"] == INDIVIDUAL].set_index(["data", "seed", "queries", "epsilon"])
    model = calm[calm["way"] == DISCRIMINANT].set_index(["data", "seed", "queries", "epsilon"])["right"].astype(float)
    pairs = votes.loc[votes.index.intersection(model.index)]
    ahead = pairs["right"].astype(float) - model.loc[pairs.index]
    weak = pairs["ratio"].astype(float) < 4
    return {
        "weak": int(weak.sum()),
        "weak_lost": int((ahead[weak] < 0).sum()),
        "weak_gap": float(ahead[weak].mean()),
        "clear": int((~weak).sum()),
        "clear_gap": float(ahead[~weak].mean()),
    }


def _print(table: pd.DataFrame) -> pd.DataFrame:
    shown = {
        WORST: ".3f",
        INDIVIDUAL: ".3f",
        DISCRIMINANT: ".3f",
        ONE_IMAGE: ".3f",
        "gain": "+.3f",
        "±": ".3f",
        "epsilon": "g",
    }
    shown |= {"queries": ",d", "label": "d"}
    printed = {name: table[name].map(("{:" + shown.get(str(name), "") + "}").format) for name in table.columns}
    return pd.DataFrame(printed)


ROWS = "rows (private, public, queries)"
PARAMETERS = {
    "delta": DELTA,
    ROWS: {TITLES[name]: list(sizes) for name, sizes in SIZES.items()},
    "draws of noise": DRAWS,
    "images of a person": PERSON_IMAGES,
}
DATA = tuple(
    f"{folder}/{folder}.npz" for folder in (*FOLDERS.values(), "cub200_cropped_lite0", "cars196_cropped_lite0")
)
STUDY = Study("individual", cases, measure, figures, facts, DATA, PARAMETERS, SEEDS)
