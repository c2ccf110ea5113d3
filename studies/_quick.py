"""Studies in miniature: few cases on few rows, in seconds.

A quick run shows that a study works and what its page looks like. It takes a few rows of each real set, or made-up rows
where there is none, so that its figures are rough, or mean nothing.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from nearveil.privacy.events import NoisyScreening
from studies._study import Study
from studies.data import FOLDERS, VARIABLE, DigitSet, data_folder

CLASSES = {"cub200_cropped_lite0": 200, "cars196_cropped_lite0": 196, "cifar100_partial": 100}
PER_CLASS, DIMENSIONS, DIGITS = 5, 64, {"train": 400, "test": 200}
NOTICE = (
    "**A quick run:** few cases, on a few rows of each real set, or on made-up rows where there is none. It shows that "
    "the study works; its figures are rough, or mean nothing."
)

_SMALL_MAIL: dict[str, Any] = {"_privatemail:ANCHORS": 80}
_ONE_SET: dict[str, Any] = {"_search:SETS": {"cub200_cropped_lite0": 100}, "_search:QUERIES": 100}
_EASY: dict[str, Any] = {"screening": NoisyScreening(noise=5.0, threshold=10.0, n_neighbors=20), "sampling_rate": 0.5}
_EASY_PATE = {"threshold": 20, "screening_noise": 10, "vote_noise": 5, "max_screened": 60, "max_answered": 40}
_RECALL = (0.1, 4.0, 16.0)
_FIRST = (0.023, 10.527)


def _keep(mapping: str, *names: Any) -> Callable[[], Any]:
    """Return a function that looks up a mapping of a study's module, and keeps some of its entries."""
    return lambda: {name: _look_up(mapping)[name] for name in names}


def _shrink_plans(claim: float | None = None, **changes: Any) -> Callable[[], Any]:
    """Return a function that changes all published plans, and the claims that there are."""

    def shrink_each() -> dict[str, Any]:
        plans = {name: replace(plan, **changes) for name, plan in _look_up("accounting:PLANS").items()}
        return {
            name: replace(plan, answered=0) if plan.claimed is None else replace(plan, claimed=claim or plan.claimed)
            for name, plan in plans.items()
        }

    return shrink_each


CHANGES: dict[str, dict[str, Any]] = {
    "label-leak": {**_SMALL_MAIL, "label_leak:DATA": ("cars196",), "label_leak:SEEDS": (0, 1)},
    "privatemail-recall": {
        **_SMALL_MAIL,
        "privatemail_recall:DATA": ("cub200",),
        "privatemail_recall:SEEDS": (0, 1),
        "privatemail_recall:EPSILONS": _RECALL,
        "privatemail_recall:FIRST_EPSILONS": _FIRST,
        "_privatemail:EPSILONS": _RECALL,
        "_privatemail:FIRST_EPSILONS": _FIRST,
        "_privatemail:PUBLISHED": {
            "2022-code": ((1e-5,), (0.1, 16.0)),
            "2022": ((1e-5,), (0.1, 16.0)),
            "2021": ((0.99, 1e-5), _FIRST),
        },
        "_privatemail:SETS_OF": {1.0: 4, 4.0: 8, 8.0: 16},
        "_privatemail:DSNE_ANCHORS": 40,
    },
    "privatemail-convergence": {
        **_SMALL_MAIL,
        "privatemail_convergence:DATA": ("cars196",),
        "privatemail_convergence:SEEDS": (0, 1),
    },
    "privatemail-parameters": {
        **_SMALL_MAIL,
        "privatemail_parameters:DATA": ("cars196",),
        "privatemail_parameters:SEEDS": (0, 1),
        "privatemail_parameters:VALUES": {
            "n_components": (2, 4),
            "label_weight": (0.0, 0.6),
            "bandwidth": (2.0, 6.0),
        },
    },
    "privatemail-embeddings": {**_SMALL_MAIL, "privatemail_embeddings:SEEDS": (0, 1)},
    "label-weight": {
        "label_weight:BANDWIDTHS": (0.3,),
        "label_weight:LABEL_WEIGHTS": (0.0, 0.6),
        "label_weight:SEEDS": (0, 1),
    },
    "manifold-theorems": {
        "manifold_theorems:DIGITS": 80,
        "manifold_theorems:SEEDS": (0,),
        "manifold_theorems:BANDWIDTHS": (0.3, 0.4),
        "manifold_theorems:PER_CLASS": 250,
        "manifold_theorems:SPREADS": (0.02, 0.4),
    },
    "retrieval": {
        **_ONE_SET,
        "retrieval:SETTINGS": _keep(
            "_search:SETTINGS", "covers", "k-means cells", "unary, symmetric", "PrivUnit", "LATENT", "analytic Gaussian"
        ),
        "retrieval:EPSILONS": (4.0,),
        "retrieval:CLASS_EPSILONS": (4.0,),
        "retrieval:FRACTIONS": (0.1,),
        "retrieval:CLASS_METHODS": ("covers", "PrivUnit"),
        "_search:_FINE": 0.5,
    },
    "covers": {**_ONE_SET, "covers:EPSILONS": (2.0,), "covers:FRACTIONS": (0.2,), "covers:SEEDS": (0, 1)},
    "ceiling": {"ceiling:SHAPES": ((12, 3),), "ceiling:EPSILONS": (1.0, 2.0), "ceiling:STARTS": 2},
    "growth": {
        "growth:WHOLE": 400,
        "growth:SIZES": {"digits as they are": (200, 400), "deformed digits": (400, 600)},
        "growth:ANSWER": 40,
        "growth:QUERIES": 100,
        "growth:SETTINGS": ((0.1, 4.0),),
        "growth:SEEDS": (0,),
    },
    "codes": {**_ONE_SET, "codes:SIZES": (0, 32), "codes:SEEDS": (0, 1)},
    "sensitivity": {
        "sensitivity:SIZES": (20, 40),
        "sensitivity:BANDWIDTHS": (0.5, 6.0),
        "sensitivity:BANDWIDTH_SIZE": 20,
        "sensitivity:TABLE_SIZE": 20,
        "sensitivity:MOST_SEARCHED": 20,
        "sensitivity:SEEDS": (0, 1),
        "sensitivity:STARTS": 2,
    },
    "smooth-sensitivity": {
        "smooth_sensitivity:ANCHORS": 60,
        "smooth_sensitivity:TARGETS": 50,
        "smooth_sensitivity:BANDWIDTHS": (1.0,),
        "smooth_sensitivity:EPSILONS": (0.5, 4.0),
    },
    "latent-ome": {
        **_ONE_SET,
        "latent_ome:NOMINALS": (1.0, 10.0),
        "latent_ome:ALPHAS": (1.0, 7.0, 100.0),
        "latent_ome:EPSILONS": (1.0, 8.0),
        "latent_ome:METHODS": ("PrivUnit", "unary, symmetric", "LATENT", "OME"),
    },
    "screening": {"screening:COUNTS": (1, 16)},
    "data-dependent": {
        "data_dependent:COUNT": 30,
        "data_dependent:NEIGHBOURS": 60,
        "data_dependent:THRESHOLD": 36.0,
        "data_dependent:NOISES": (75.0, 15.0),
        "data_dependent:BETAS": np.geomspace(1e-3, 0.1, 5),
        "data_dependent:DATA": ("mnist", "voters who all agree"),
    },
    "accounting": {
        "accounting:PLANS": _shrink_plans(
            claim=0.3,
            sampling_rate=0.2,
            screening=NoisyScreening(40.0, 20.0, 30),
            screened=40,
            vote_noise=15.0,
            answered=25,
        ),
        "accounting:_INTERVAL": 1e-4,
        "accounting:WHOLE_ORDERS": (2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
    },
    "private-knn": {
        "private_knn:HELD": 60,
        "private_knn:SEEDS": (0,),
        "private_knn:ANSWERS": 60,
        "private_knn:SCREENED": (40,),
        "private_knn:RATES": (0.5, 0.8),
        "private_knn:EPSILONS": {"mnist": (0.05, 40.0), "svhn": (40.0,)},
        "private_knn:TEACHERS": {"mnist": 20, "svhn": 10},
        "private_knn:PUBLISHED_TEACHERS": 40,
        "private_knn:PATE_PUBLISHED": dict.fromkeys(("mnist", "svhn"), _EASY_PATE),
        "private_knn:EPOCHS": 1,
        "accounting:PLANS": _shrink_plans(**_EASY, screened=100, answered=80),
    },
    "abstention": {
        "individual:SIZES": {"mnist": (350, 150, 100), "svhn": (350, 150, 100)},
        "abstention:SEEDS": (0, 1),
        "abstention:EPSILONS": (8.0, 32.0),
    },
    "individual": {
        "individual:SIZES": {"mnist": (350, 150, 100), "svhn": (350, 150, 100)},
        "individual:SEEDS": (0, 1),
        "individual:QUERIES": (50, 100),
        "individual:EPSILONS": (8.0, 32.0),
        "individual:CROWD_EPSILONS": (8.0,),
        "individual:PERSON_IMAGES": 2,
        "individual:PERSON_QUERIES": 50,
        "individual:PERSON_EPSILONS": (8.0, 32.0),
        "individual:STUDENT_ANSWERS": 50,
        "individual:STUDENT_EPSILONS": (8.0,),
    },
    "svhn-student": {
        "svhn_student:EPSILONS": (40.0,),
        "svhn_student:SEEDS": (0,),
        "svhn_student:EPOCHS": 1,
        "svhn_student:ARCHITECTURE": "mnist",
        "private_knn:HELD": 60,
        "private_knn:ANSWERS": 60,
    },
    "multi-label": {
        "multi_label:EPSILONS": (1.0, 16.0),
        "multi_label:CLIPS": (1.0, 3.0),
        "multi_label:QUERIES": 40,
        "multi_label:SEEDS": (0, 1),
    },
    "bridge": {
        "bridge:MobileNetV2": lambda: object,
        "bridge:EfficientNetLite0": lambda: object,
        "bridge:extract_features": lambda: _make_views,
    },
    "cost": {
        "cost:SIZES": (200,),
        "cost:LARGEST": _keep(
            "cost:LARGEST", ("exact (ours, NumPy)", "float32"), ("dense NumPy (the authors' way)", "float64")
        ),
        "cost:PRIVATE": (500,),
        "cost:VOTERS": lambda: dict.fromkeys(_look_up("cost:VOTERS"), 8),
        "cost:REPEATS": 2,
        "_cost_release:DIMENSION": 16,
        "_cost_release:PUBLIC": 40,
        "_cost_release:_TIMED": _keep("_cost_release:_TIMED", "analytic Gaussian", "k-means cells"),
        "_cost_votes:K": 30,
        "_cost_votes:load_rows": lambda: _make_rows,
    },
}
"""Constants of modules that are smaller in a quick run, by study; a function is called for the value."""


@contextmanager
def shrink(study: Study) -> Iterator[Study]:
    """Make a study small while its cases are measured and its page is written, in this process."""
    parameters = {"quick": "constants and rows of a miniature"}
    data = tuple(map(_describe_rows, study.data))  # before the folder of real data is replaced
    notice = f"{NOTICE} Data: {'; '.join(data)}."
    small = replace(study, data=data, parameters=parameters, template=_put_notice(study.page, notice), alone=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_sets(Path(folder))
        write_digits(Path(folder))
        (Path(folder) / "birds_photos").mkdir()
        stack.enter_context(patch.dict(os.environ, {VARIABLE: folder}))
        for target, value in CHANGES.get(study.name, {}).items():
            _change(stack, target, value() if callable(value) else value)
        stack.callback(_clear_caches)
        _clear_caches()
        yield small


def write_sets(folder: Path) -> None:
    """Write a few rows of every class of the real feature sets, made-up ones where a set is missing."""
    for number, (name, classes) in enumerate(CLASSES.items()):
        path = data_folder() / name / f"{name}.npz"
        arrays = _thin(path) if path.exists() else _make_features(classes, number)
        _save(folder, name, arrays)


def _thin(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path) as arrays:
        features, labels = arrays["features"], arrays["labels"]
        names = {"class_names": arrays["class_names"]} if "class_names" in arrays.files else {}
    order = np.argsort(labels, kind="stable")
    position = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order])
    rows = order[position < PER_CLASS]
    return {
        "features": features[rows],
        "labels": labels[rows],
        "is_train": np.arange(len(rows)) % PER_CLASS > 0,
        **names,
    }


def _make_features(classes: int, seed: int) -> dict[str, NDArray[Any]]:
    rng, labels = np.random.default_rng(seed), np.repeat(np.arange(classes), PER_CLASS)
    features = rng.normal(size=(classes, DIMENSIONS))[labels] + 0.3 * rng.normal(size=(len(labels), DIMENSIONS))
    names = np.array([f"Make{c % 7} {('Sedan', 'SUV', 'Coupe')[c % 3]} {2007 + c % 5}" for c in range(classes)])
    train = np.arange(len(labels)) % PER_CLASS > 0
    return {"features": features.astype(np.float16), "labels": labels, "is_train": train, "class_names": names}


def write_digits(folder: Path) -> None:
    """Write a few digits of the real sets, enlarged ones of scikit-learn where a set is missing."""
    for name, place in FOLDERS.items():
        path = data_folder() / place / f"{place}.npz"
        if path.exists():
            with np.load(path) as arrays:
                parts = {f"{x}_{part}": arrays[f"{x}_{part}"][:n] for x in "xy" for part, n in DIGITS.items()}
        else:
            parts = _enlarge_digits(name)
        _save(folder, place, parts)


def _enlarge_digits(name: DigitSet) -> dict[str, NDArray[Any]]:
    X, y = load_digits(return_X_y=True)
    images = np.kron(X.reshape(-1, 8, 8) / 16 * 255, np.ones((3, 3))).astype(np.uint8)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    images = np.repeat(images[..., None], 3, axis=3) if name == "svhn" else images
    ends = np.cumsum([0, *DIGITS.values()])
    cuts = {part: slice(ends[i], ends[i + 1]) for i, part in enumerate(DIGITS)}
    return {f"{name}_{part}": rows[cut] for name, rows in (("x", images), ("y", y)) for part, cut in cuts.items()}


def _save(folder: Path, name: str, arrays: dict[str, NDArray[Any]]) -> None:
    (folder / name).mkdir()
    np.savez(folder / name / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def _make_views(*_: Any) -> tuple[list[NDArray[np.float32]], NDArray[np.intp]]:
    """Return two views of hidden rows: what two networks see of the same photographs."""
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(20), 12)
    hidden = rng.normal(size=(20, 40))[labels] + 0.3 * rng.normal(size=(240, 40))
    views = [hidden @ np.linalg.qr(rng.normal(size=(40, 40)))[0] for _ in range(2)]
    return [(view / np.linalg.norm(view, axis=1, keepdims=True)).astype(np.float32) for view in views], labels


def _make_rows() -> tuple[NDArray[np.float32], str]:
    return np.random.default_rng(0).random((520, 324), np.float32), "random rows"


def _describe_rows(name: str) -> str:
    """Describe the rows that replace a file of real data, or other data, in a quick run."""
    folder, is_file, _ = name.partition("/")
    if not is_file:
        return name
    return f"a few rows of {folder}" if (data_folder() / name).exists() else f"made-up rows in place of {folder}"


def _put_notice(page: str, notice: str) -> str:
    title, _, rest = page.partition("\n")
    return f"{title}\n\n{notice}\n{rest}"


def _look_up(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(f"studies.{module}"), name)


def _change(stack: ExitStack, target: str, value: Any) -> None:
    """Set a constant until the stack closes; a mapping in place, because other modules hold it too."""
    module, _, name = target.partition(":")
    here = import_module(f"studies.{module}")
    before = getattr(here, name)
    if isinstance(before, dict):
        stack.enter_context(patch.dict(before, value, clear=True))
    else:
        stack.enter_context(patch.object(here, name, value))


def _clear_caches() -> None:
    """Forget what was loaded from the data folder before."""
    for name, module in list(sys.modules.items()):
        for entry in vars(module).values() if name.startswith("studies.") else ():
            if isinstance(entry, functools._lru_cache_wrapper):
                entry.cache_clear()
