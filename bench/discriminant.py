"""Measure the private discriminant against what one would use instead: accuracy over epsilon, in one run.

Birds (CUB-200-2011) by family, cars (Cars196) by body, digits of MNIST and SVHN. A part of the images is public and
unlabelled, a part is the private records, the rest are queries; of birds and cars as many of each class. Rivals: a
linear head trained by DP-SGD (Opacus), logistic regression with noise on its weights (output perturbation), students
of Private-kNN and of PATE. No privacy: the ten nearest records, and a discriminant with the records' own covariance.
Floor: the best constant answer. The split for choosing parameters (--split development) shares no image with the one
that is reported. A part of the table can be measured by itself (--data, --epsilon, --method): records of earlier parts
in the same folder are kept. With --forecast, forecasts and probabilities of the private discriminant are compared with
what happens on queries, instead.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLASSES = {
    "birds": (
        "Auklet", "Blackbird", "Flycatcher", "Grebe", "Grosbeak", "Gull", "Kingfisher", "Oriole", "Sparrow", "Swallow",
        "Tern", "Vireo", "Warbler", "Woodpecker", "Wren",
    ),
    "cars": ("Cab", "Convertible", "Coupe", "Hatchback", "Minivan", "SUV", "Sedan", "Van", "Wagon"),
}  # fmt: skip
FILES = {"birds": "cub200_cropped_lite0", "cars": "cars196_cropped_lite0"}
DATA = ("birds", "cars", "mnist", "svhn")
TITLES = {"birds": "birds, 15 families", "cars": "cars, 9 bodies", "mnist": "MNIST", "svhn": "SVHN, 8,000 private"}
EPSILONS = (0.1, 0.5, 2.0, 8.0)
LOWEST = {"mnist": 0.9}  # accuracy that is drawn
DELTA = 1e-5
PUBLIC, DEVELOPMENT = 0.3, 0.4  # shares of the images of birds and cars
QUERIES = 30  # of each class of birds and cars
NEIGHBORS = 10  # of the classifier without any privacy
SGD_COMPONENTS = (16, 32, 64)  # public principal directions; the best for each run is reported, in the rival's favour
SGD = {"epochs": 20, "batches": 2, "clip": 1.0}  # batches: in an epoch
SGD_RATES = ((4.0, 1.0), (math.inf, 4.0))  # learning rates, each up to an epsilon
OUTPUT_COMPONENTS = 32
OUTPUT_PENALTIES = (1e-3, 1e-2, 1e-1)  # likewise
ANSWERS = {"birds": 60, "cars": 60, "mnist": 500, "svhn": 500}
TEACHERS = {"birds": 50, "cars": 50, "mnist": 250, "svhn": 50}
RECORDS = (15, 40, 100)  # of each class, where forecasts are checked
FORECAST_EPSILONS = (0.5, 2.0)
BINS = 15  # of probabilities, where they are compared with how often they are right
PATE_ANSWERS = {"birds": 30, "cars": 30, "mnist": 100, "svhn": 100}
Rows = NDArray[np.float64]


@dataclass(frozen=True)
class Trial:
    """Public rows, private records and queries."""

    data: str
    classes: NDArray[Any]
    public: Rows
    private: Rows
    private_y: NDArray[Any]
    queries: Rows
    query_y: NDArray[Any]


Method = Callable[[Trial, float, int], float]


def labels_of(data: str) -> NDArray[np.str_]:
    """Return the family of every bird, or the body of every car: a word of the name of its class."""
    from studies.data import find

    name = FILES[data]
    with np.load(find(f"{name}/{name}.npz")) as arrays:
        names, numbers = arrays["class_names"], arrays["labels"]
    words = [one.split("_")[-1].split(".")[-1] if data == "birds" else one.split()[-2] for one in names]
    found: NDArray[np.str_] = np.array(words)[numbers]
    return found


def photographs(data: str, part: str) -> Trial:
    """Return the images of one part of birds or cars, cut into public, private and queries."""
    from studies.data import load_features

    rng, labels = np.random.default_rng(0), labels_of(data)
    rows = load_features(FILES[data]).features.astype(np.float32)
    once = np.unique(rows, axis=0, return_index=True)[1]  # some photographs of cars are there twice
    order = rng.permutation(once[np.isin(labels[once], CLASSES[data])])
    cut = round(DEVELOPMENT * len(order))
    here = order[:cut] if part == "development" else order[cut:]
    queries = np.concatenate([here[labels[here] == one][:QUERIES] for one in CLASSES[data]])
    rest = rng.permutation(np.setdiff1d(here, queries))
    public, private = np.split(rest, [round(PUBLIC * len(rest))])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    wide = rows.astype(np.float64)
    classes = np.array(CLASSES[data])
    return Trial(data, classes, wide[public], wide[private], labels[private], wide[queries], labels[queries])


def digits(data: str, part: str) -> Trial:
    """Return digits as HOG features: half of the test images are public, the other half are queries."""
    from studies.data import load_digit_images

    found = load_digit_images(data)
    private, test = (found.features(images).astype(np.float64) for images in (found.private, found.test))
    half = len(test) // 2
    if part == "development":  # of the private images alone
        cut = len(private) // 2
        test, test_y = private[cut:], found.private_y[cut:]
        return Trial(data, np.arange(10), test[::2], private[:cut], found.private_y[:cut], test[1::2], test_y[1::2])
    return Trial(data, np.arange(10), test[:half], private, found.private_y, test[half:], found.test_y[half:])


def split(data: str, part: str) -> Trial:
    """Return the trial of a data set."""
    return photographs(data, part) if data in FILES else digits(data, part)


def right(trial: Trial, predicted: NDArray[Any]) -> float:
    """Return the share of queries that are answered rightly."""
    return float(np.mean(predicted == trial.query_y))


def discriminant(trial: Trial, epsilon: float, seed: int) -> float:
    """Publish a private discriminant and classify with it."""
    from nearveil.privacy.noise import unsafe_seeded
    from nearveil.private_knn import PrivateDiscriminant

    model = PrivateDiscriminant(epsilon, DELTA, classes=trial.classes, source=unsafe_seeded(seed))
    return right(trial, model.fit(trial.private, trial.private_y, public=trial.public).export().predict(trial.queries))


def heads(trial: Trial, components: int) -> tuple[Rows, NDArray[np.int64], Rows]:
    """Return private rows, codes and queries for a linear head: public principal directions, norm one, a constant."""
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import normalize

    space = PCA(components, random_state=0).fit(trial.public)
    rows, queries = (normalize(space.transform(one)) for one in (trial.private, trial.queries))
    return rows, np.searchsorted(np.sort(trial.classes), trial.private_y), queries


def score_head(trial: Trial, scores: Rows, codes: NDArray[np.int64]) -> float:
    """Return the accuracy of a head, corrected for how common classes are where queries are as many of each class.

    The exact counts of private records are used, in the rival's favour.
    """
    if trial.data in FILES:
        scores = scores - np.log(np.bincount(codes, minlength=len(trial.classes)) / len(codes))
    return right(trial, np.sort(trial.classes)[scores.argmax(axis=1)])


def sgd(trial: Trial, epsilon: float, seed: int) -> float:
    """Train linear heads by DP-SGD, with Opacus."""
    return max(train_head(trial, epsilon, seed, components) for components in SGD_COMPONENTS)


@lru_cache
def sgd_noise(epsilon: float, rate: float) -> float:
    """Return the least noise for an epsilon and a sampling rate, by privacy loss distributions."""
    import dp_accounting
    from dp_accounting import pld

    steps = round(SGD["epochs"] / rate)

    def event(noise: float) -> dp_accounting.DpEvent:
        once = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        return dp_accounting.SelfComposedDpEvent(once, steps)

    return float(dp_accounting.calibrate_dp_mechanism(pld.PLDAccountant, event, epsilon, DELTA, tol=1e-2))


def train_head(trial: Trial, epsilon: float, seed: int, components: int) -> float:
    """Train one."""
    import warnings

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    engine = import_module("opacus").PrivacyEngine()
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    rows, codes, queries = heads(trial, components)
    head = torch.nn.Linear(rows.shape[1], len(trial.classes))
    torch.nn.init.zeros_(head.weight)
    optimizer = torch.optim.SGD(
        head.parameters(), lr=next(rate for most, rate in SGD_RATES if epsilon <= most), momentum=0.9
    )
    batches = DataLoader(
        TensorDataset(torch.tensor(rows, dtype=torch.float32), torch.tensor(codes)),
        batch_size=max(1, len(rows) // int(SGD["batches"])),
    )
    head, optimizer, batches = engine.make_private(
        module=head,
        optimizer=optimizer,
        data_loader=batches,
        noise_multiplier=sgd_noise(epsilon, 1 / len(batches)),
        max_grad_norm=SGD["clip"],
    )
    for _ in range(int(SGD["epochs"])):
        for some, truth in batches:
            optimizer.zero_grad()
            loss: Any = torch.nn.functional.cross_entropy(head(some), truth)
            loss.backward()
            optimizer.step()
    scores = head(torch.tensor(queries, dtype=torch.float32)).detach().numpy()
    return score_head(trial, scores, codes)


def output(trial: Trial, epsilon: float, seed: int) -> float:
    """Add noise to the weights of a regularised logistic regression (Chaudhuri et al. 2011, with Gaussian noise).

    The number of records is taken as public and the solver as exact, both in the rival's favour. With rows of norm one
    the softmax loss is sqrt(2)-Lipschitz, so one record moves the minimiser by at most sqrt(2) / (n penalty).
    """
    from sklearn.linear_model import LogisticRegression

    from nearveil.privacy.noise import analytic_gaussian_scale

    rows, codes, queries = heads(trial, OUTPUT_COMPONENTS)
    rng, found = np.random.default_rng(seed), []
    for penalty in OUTPUT_PENALTIES:
        fitted = LogisticRegression(C=1 / (len(rows) * penalty), fit_intercept=False, max_iter=300).fit(rows, codes)
        scale = analytic_gaussian_scale(math.sqrt(2) / (len(rows) * penalty), epsilon, DELTA)
        noisy = fitted.coef_ + scale * rng.standard_normal(fitted.coef_.shape)
        found.append(score_head(trial, queries @ noisy.T, codes))
    return max(found)


def student(trial: Trial, epsilon: float, seed: int) -> float:
    """Train a student on the votes of the nearest records (Private-kNN)."""
    from nearveil.privacy.noise import unsafe_seeded
    from nearveil.private_knn import PrivateKNeighborsClassifier

    voter = PrivateKNeighborsClassifier(
        epsilon, DELTA, ANSWERS[trial.data], max_screened=0, classes=trial.classes, source=unsafe_seeded(seed)
    )
    return learn(trial, voter, seed)


def pate(trial: Trial, epsilon: float, seed: int) -> float:
    """Train a student on the votes of linear teachers (PATE)."""
    from nearveil.privacy.noise import unsafe_seeded
    from studies.pate import PateClassifier

    voter = PateClassifier(
        TEACHERS[trial.data],
        mechanism="gnmax",
        epsilon=epsilon,
        delta=DELTA,
        max_answered=PATE_ANSWERS[trial.data],
        classes=trial.classes,
        source=unsafe_seeded(seed),
    )
    return learn(trial, voter, seed)


def learn(trial: Trial, voter: Any, seed: int) -> float:
    """Return the accuracy of a student of a voter."""
    from nearveil.private_knn import Student

    taught = Student(voter, random_state=seed).fit(trial.private, trial.private_y, public=trial.public)
    return right(trial, taught.predict(trial.queries))


METHODS: dict[str, tuple[str, Method]] = {
    "discriminant": ("private discriminant", discriminant),
    "student": ("Private-kNN's student", student),
    "pate": ("PATE's student", pate),
    "sgd": ("linear head, DP-SGD", sgd),
    "output": ("logistic regression, output noise", output),
}


def references(trial: Trial) -> dict[str, float]:
    """Return the accuracy without privacy, and of the best constant answer."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.neighbors import KNeighborsClassifier

    middle = trial.public.mean(axis=0)
    nearest = KNeighborsClassifier(NEIGHBORS, metric="cosine").fit(trial.private - middle, trial.private_y)
    own = LinearDiscriminantAnalysis(
        solver="lsqr", shrinkage="auto", priors=np.full(len(trial.classes), 1 / len(trial.classes))
    )
    return {
        "neighbours": right(trial, nearest.predict(trial.queries - middle)),
        "discriminant": right(trial, own.fit(trial.private, trial.private_y).predict(trial.queries)),
        "floor": float(np.unique(trial.query_y, return_counts=True)[1].max() / len(trial.query_y)),
    }


def about(trial: Trial, part: str) -> dict[str, Any]:
    """Return what is known of a trial without a promise."""
    sizes = {"public": len(trial.public), "private": len(trial.private), "queries": len(trial.queries)}
    classes = {"classes": len(trial.classes), "features": trial.public.shape[1]}
    return {"data": trial.data, "split": part, **classes, **sizes, **references(trial)}


def measure(trial: Trial, method: str, epsilon: float, repeats: int) -> dict[str, Any]:
    """Return the accuracy of one method at one epsilon, over draws of its noise."""
    start = time.perf_counter()
    found = [METHODS[method][1](trial, epsilon, seed) for seed in range(repeats)]
    return {
        "data": trial.data,
        "method": method,
        "epsilon": epsilon,
        "accuracy": float(np.mean(found)),
        "deviation": float(np.std(found)),
        "repeats": repeats,
        "seconds": (time.perf_counter() - start) / repeats,
    }


def draw_small(trial: Trial, rng: np.random.Generator) -> Trial:
    """Return four classes of a trial and 40 public rows."""
    classes, public = rng.permutation(trial.classes)[:4], rng.permutation(trial.public)[:40]
    own, asked = np.isin(trial.private_y, classes), np.isin(trial.query_y, classes)
    private, queries = (trial.private[own], trial.private_y[own]), (trial.queries[asked], trial.query_y[asked])
    return Trial(trial.data, classes, public, *private, *queries)


def check_forecasts(whole: Trial, records: int, epsilon: float, repeats: int, *, small: bool = False) -> str:
    """Return a line: forecasts for draws of the records, and how often models of them are right about queries."""
    from nearveil.privacy.noise import unsafe_seeded
    from nearveil.private_knn import PrivateDiscriminant

    told, right_ones, inside = [], [], []
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        trial = draw_small(whole, rng) if small else whole
        drawn = [rng.permutation(np.flatnonzero(trial.private_y == one))[:records] for one in trial.classes]
        rows, labels = trial.private[np.concatenate(drawn)], trial.private_y[np.concatenate(drawn)]
        forecast = PrivateDiscriminant(epsilon, DELTA, classes=trial.classes).forecast(rows, labels, trial.public)
        told.append(forecast)
        for draw in range(4):
            source = unsafe_seeded(4 * seed + draw)
            model = PrivateDiscriminant(epsilon, DELTA, classes=trial.classes, source=source)
            right_ones.append(right(trial, model.fit(rows, labels, public=trial.public).predict(trial.queries)))
            low, high = forecast.accuracy_range
            inside.append(low <= right_ones[-1] <= high)
    means, seen = np.array([one.accuracy for one in told]), np.array(right_ones).reshape(repeats, 4).mean(axis=1)
    low, high = np.mean([one.accuracy_range for one in told], axis=0)
    error = np.std(means - seen, ddof=1) / math.sqrt(repeats)
    return (
        f"| {whole.data} | {records}{', small' * small} | {epsilon:g} | {means.mean():.3f} ({low:.2f} to {high:.2f}) | "
        f"{seen.mean():.3f} | {(means - seen).mean():+.3f} ± {error:.3f} | {np.mean(inside):.0%} | "
        f"{np.mean([one.without_noise for one in told]):.3f} |"
    )


def check_probabilities(trial: Trial, epsilon: float, repeats: int) -> str:
    """Return a line: accuracy, mean probability of the answer, and the expected calibration error."""
    from nearveil.privacy.noise import unsafe_seeded
    from nearveil.private_knn import PrivateDiscriminant

    figures = []
    for seed in range(repeats):
        model = PrivateDiscriminant(epsilon, DELTA, classes=trial.classes, source=unsafe_seeded(seed))
        chances = model.fit(trial.private, trial.private_y, public=trial.public).predict_proba(trial.queries)
        sure, hit = chances.max(axis=1), model.classes_[chances.argmax(axis=1)] == trial.query_y
        bins = np.minimum((sure * BINS).astype(int), BINS - 1)
        gaps = [abs((sure - hit)[bins == one].sum()) for one in range(BINS)]
        figures.append((hit.mean(), sure.mean(), sum(gaps) / len(hit)))
    return f"| {trial.data} | {epsilon:g} | " + " | ".join(f"{one:.3f}" for one in np.mean(figures, axis=0)) + " |"


def check(trial: Trial, repeats: int) -> None:
    """Compare forecasts and probabilities with what happens on queries, and print two tables in Markdown."""
    print("| data | records a class | epsilon | forecast (range) | seen | difference | in range | without noise |")
    for records in RECORDS:
        for epsilon in FORECAST_EPSILONS:
            print(check_forecasts(trial, records, epsilon, repeats), flush=True)
    print(check_forecasts(trial, RECORDS[0], FORECAST_EPSILONS[-1], 2 * repeats, small=True), flush=True)
    print("| data | epsilon | accuracy | mean probability | calibration error |")
    for epsilon in EPSILONS[:3]:
        print(check_probabilities(trial, epsilon, repeats), flush=True)


def kept(path: Path) -> dict[str, Any]:
    """Return what earlier parts have measured."""
    return json.loads(path.read_text()) if path.exists() else {"about": {}, "records": {}}


def table(found: dict[str, Any]) -> str:
    """Return all records as a table in Markdown."""
    lines = ["| data | method | " + " | ".join(f"{one:g}" for one in EPSILONS) + " |", "|---|---|" + "---|" * 4]
    for data in (one for one in DATA if one in found["about"]):
        for method, (title, _) in METHODS.items():
            mine = [found["records"].get(f"{data} {method} {epsilon:g}") for epsilon in EPSILONS]
            cells = ["" if one is None else f"{one['accuracy']:.3f}" for one in mine]
            lines.append(f"| {data} | {title} | {' | '.join(cells)} |")
        told = found["about"][data]
        lines.append(
            f"| {data} | *floor {told['floor']:.3f}; no privacy: neighbours {told['neighbours']:.3f}, "
            f"discriminant {told['discriminant']:.3f}* | | | | |"
        )
    return "\n".join(lines)


def picture(found: dict[str, Any], path: Path) -> None:
    """Draw accuracy over epsilon, one panel for each data set."""
    from matplotlib.figure import Figure

    names = [one for one in DATA if one in found["about"]]
    figure = Figure(figsize=(4.2 * len(names), 4.4), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(names)))
    for axes, data in zip(panels, names, strict=True):
        told = found["about"][data]
        axes.axhline(told["neighbours"], color="0.3", linestyle="--", label="no privacy: ten nearest records")
        axes.axhline(told["discriminant"], color="0.3", linestyle="-.", label="no privacy: discriminant")
        axes.axhline(told["floor"], color="0.3", linestyle=":", label="floor: best constant answer")
        for place, (method, (title, _)) in enumerate(METHODS.items()):
            mine = [one for one in found["records"].values() if (one["data"], one["method"]) == (data, method)]
            mine.sort(key=lambda one: float(one["epsilon"]))
            points = [(one["epsilon"], one["accuracy"], one["deviation"]) for one in mine]
            if points:
                width = 2.5 if method == "discriminant" else 1.2
                x, y, error = zip(*points, strict=True)
                axes.errorbar(x, y, error, fmt="o-", ms=4, lw=width, capsize=2, color=f"C{place}", label=title)
        axes.set(xscale="log", xlabel="epsilon (delta 1e-5)", ylim=(LOWEST.get(data, 0), 1), title=TITLES[data])
        axes.set_xticks(EPSILONS, [f"{one:g}" for one in EPSILONS])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("accuracy")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, draw and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the JSON and the picture")
    parser.add_argument("--split", choices=("reported", "development"), default="reported")
    parser.add_argument("--data", nargs="*", choices=DATA, default=DATA)
    parser.add_argument("--method", nargs="*", choices=tuple(METHODS), default=tuple(METHODS))
    parser.add_argument("--epsilon", nargs="*", type=float, default=EPSILONS)
    parser.add_argument("--repeats", type=int, default=8, help="draws of the noise")
    parser.add_argument("--forecast", action="store_true", help="check forecasts and probabilities instead")
    options = parser.parse_args()
    from studies.data import DataMissingError

    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "discriminant.json"
    for data in options.data:
        try:
            trial = split(data, options.split)
        except DataMissingError as missing:
            print(f"no accuracy was measured: {missing}")
            continue
        if options.forecast:
            check(trial, options.repeats)
            continue
        told = about(trial, options.split)
        print(told, flush=True)
        for method in options.method:
            for epsilon in options.epsilon:
                try:
                    record = measure(trial, method, epsilon, options.repeats)
                except ImportError as missing:
                    print(f"{METHODS[method][0]} is left out, as it is not installed: {missing}")
                    break
                print(record, flush=True)
                found = kept(path)
                found["about"][data] = told
                found["records"][f"{data} {method} {epsilon:g}"] = record
                path.write_text(json.dumps(found, indent=1) + "\n")
    if path.exists() and not options.forecast:
        print(table(kept(path)))
        picture(kept(path), options.out / "discriminant.png")
        print(f"kept in {path} and discriminant.png")


if __name__ == "__main__":
    main()
