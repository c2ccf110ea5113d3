"""All mechanisms by name, and public names that are not audited."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from nearveil.audit._experiment import Experiment
from nearveil.audit._releases import make_noise_experiment, make_projector_experiment, make_release_experiment
from nearveil.audit._voters import make_discriminant_experiment, make_membership_experiment, make_student_experiment
from nearveil.mechanisms import PrivatePCA, PrivatePCARelease, Release
from nearveil.mechanisms.catalog import REGISTRY
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source, calibrate_gaussian, calibrate_laplace
from nearveil.private_knn import (
    PateClassifier,
    PrivateDiscriminant,
    PrivateKNeighborsClassifier,
    PrivateKNeighborsRegressor,
    Student,
)
from nearveil.privatemail import PrivateMail

EPSILON = 4.0
DELTA = 1e-4  # small enough to matter, large enough to be seen in affordable runs
_SLOW_DELTA = 1e-3  # of slow mechanisms
FEW_DELTA = 0.05  # of mechanisms that are fitted in every run

# Parameters for fast runs with events that are frequent enough to be seen, by name prefix.
_CHANGED: dict[str, dict[str, Any]] = {
    "privatemail (gaussian)": {"delta": DELTA},
    "privatemail (as published": {"n_public_steps": 5, "start_scale": 1e-8, "n_anchors": 60},
    "analytic-gaussian": {"delta": DELTA},
    "random-projection": {"delta": DELTA, "n_components": 16},
    "private-pca": {"n_components": 1},
}

Make = Callable[[], Any]
Expected = Literal["kept", "broken", "open"]
_EXPECTED: dict[str, Expected] = {
    **dict.fromkeys(["privatemail (as published 2022-code)", "random-projection (as published)"], "broken"),
    # The papers also use the label after the noise, but no attack shows it at these parameters.
    **dict.fromkeys(["privatemail (as published 2022)", "privatemail (as published 2021)"], "open"),
    **dict.fromkeys(["private-pca (bingham)", "private-pca (gibbs)"], "open"),
}


@dataclass(frozen=True, eq=False)
class AuditEntry:
    """A mechanism that can be audited by name."""

    name: str
    make: Callable[[], Experiment]  # may take a second, because it fits
    expected: Expected = "kept"  # "open": not proved, and no attack is known to work
    subject: str = ""  # the audited public name


def list_mechanisms(epsilon: float = EPSILON) -> list[AuditEntry]:
    """Return all mechanisms of the library, by their names in ``nearveil mechanisms``.

    An entry has a `name`, the public name of its `subject`, and `make()`, which returns the experiment.

    Examples
    --------
    >>> from nearveil.audit import audit
    >>> bits = next(entry for entry in list_mechanisms(1.0) if entry.name == "unary (symmetric)")
    >>> audit(bits.make(), trials=400).verdict != "broken"
    True
    """
    releases = []
    for entry in REGISTRY:
        changed = next((values for prefix, values in _CHANGED.items() if entry.name.startswith(prefix)), {})
        package = "privatemail" if entry.kind is PrivateMail else "mechanisms"
        make, expected = partial(entry.make, epsilon, **changed), _EXPECTED.get(entry.name, "kept")
        releases.append(make_entry(entry.name, make, expected, f"nearveil.{package}.{entry.kind.__name__}"))
    return releases + [
        make_entry(name, make, subject=f"nearveil.{subject}")
        for subject, makers in _list_estimators(epsilon).items()
        for name, make in makers.items()
    ]


def _list_estimators(epsilon: float) -> dict[str, dict[str, Make]]:
    """Return noise and estimators, by their public names."""
    vote: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "max_answered": 1}
    neighbors = partial(PrivateKNeighborsClassifier, **vote, max_screened=0)
    numbers, teachers = partial(PrivateKNeighborsRegressor, 0, 1, **vote), partial(PateClassifier, 40, **vote)
    few = PrivateKNeighborsClassifier(epsilon, FEW_DELTA, 8, max_screened=0)
    return {
        "privacy.noise.GaussianNoise": {
            "gaussian noise": lambda: calibrate_gaussian(epsilon, 1e-5, sensitivity=1.0, size=1)
        },
        "privacy.noise.LaplaceNoise": {"laplace noise": lambda: calibrate_laplace(epsilon, sensitivity=1.0, size=1)},
        "private_knn.PrivateKNeighborsClassifier": {
            "private-knn (votes)": neighbors,
            "private-knn (screened votes)": partial(neighbors, max_screened=1),
            "private-knn (votes, rate 0.25)": partial(neighbors, delta=_SLOW_DELTA, sampling_rate=0.25),
            "private-knn (ten votes)": partial(neighbors, delta=_SLOW_DELTA, max_answered=10),
            "private-knn (soft votes)": partial(neighbors, votes="soft"),
            "private-knn (screened soft votes)": partial(neighbors, max_screened=1, votes="soft"),
            "private-knn (binary votes)": partial(neighbors, votes="binary", clip=2.0),
            "private-knn (nonnegative votes)": partial(neighbors, votes="nonnegative", clip=2.0),
            "private-knn (signed votes)": partial(neighbors, votes="signed", clip=2.0),
        },
        "private_knn.PrivateKNeighborsRegressor": {
            "private-knn (mean)": partial(numbers, method="mean"),
            "private-knn (median)": partial(numbers, method="median"),
        },
        "private_knn.PateClassifier": {
            "pate (gnmax)": partial(teachers, mechanism="gnmax"),
            "pate (lnmax)": partial(teachers, mechanism="lnmax"),
            "pate (confident-gnmax)": partial(teachers, mechanism="confident-gnmax", max_screened=1),
        },
        "private_knn.PrivateDiscriminant": {
            "discriminant": partial(PrivateDiscriminant, epsilon, FEW_DELTA, classes=("in", "out"), publications=2)
        },
        "private_knn.Student": {"student": partial(Student, few, rounds=2)},
    }


def list_not_audited() -> dict[str, str]:
    """Return the public names that no audit attacks, each with its reason."""
    data = "holds values, releases nothing"
    return {
        "nearveil.AsyncClient": "the core of nearveil.Client, which is audited",
        "nearveil.Index": "stores items, releases nothing",
        "nearveil.Ledger": "opens accounts, releases nothing",
        "nearveil.Retriever": "ranks the answers of a mechanism, which is audited",
        "nearveil.SupervisedManifold": "has no guarantee: it is fitted on public rows",
        "nearveil.__version__": "text",
        "nearveil.evaluate": "measures on public rows",
        "nearveil.mechanisms.Message": data,
        "nearveil.mechanisms.MessageError": "an error",
        "nearveil.mechanisms.PrivatePCARelease": "a release without noise by a private PCA, which is audited",
        "nearveil.mechanisms.Release": "the base class; each release is audited",
        "nearveil.mechanisms.default": "returns Covers, which is audited",
        "nearveil.private_knn.AnsweredScore": data,
        "nearveil.private_knn.Answers": data,
        "nearveil.private_knn.ExhaustedError": "an error",
        "nearveil.private_knn.NetworkStudent": "learns from public rows and public labels alone",
        "nearveil.private_knn.PublicDiscriminant": "the export of a discriminant; audited with it",
        "nearveil.private_knn.PublicStudent": "the export of a student; audited with it",
        "nearveil.private_knn.plan_publications": "returns a plan, releases nothing",
    }


def make_entry(
    name: str, make: Make, expected: Expected = "kept", subject: str = "", trials: int | None = None
) -> AuditEntry:
    """Return an entry that makes an experiment of its name; `make` returns a mechanism, or also its claim."""

    def make_named() -> Experiment:
        result = make()
        mechanism, claim = result if isinstance(result, tuple) else (result, None)
        experiment = make_experiment(mechanism)
        return replace(
            experiment, name=name, trials=trials or experiment.trials, guarantee=claim or experiment.guarantee
        )

    return AuditEntry(name, make_named, expected, subject)


def make_experiment(mechanism: Any, source: Source | None = None) -> Experiment:
    """Return the experiment of a mechanism; `source` is for the search for the worst pair."""
    if isinstance(mechanism, Experiment):
        return mechanism
    makers: dict[Any, Callable[[Any], Experiment]] = {
        PrivatePCARelease: lambda release: make_projector_experiment(release.projector),
        PrivatePCA: make_projector_experiment,
        Release: lambda release: make_release_experiment(release, source),
        PrivateKNeighborsClassifier | PrivateKNeighborsRegressor | PateClassifier: make_membership_experiment,
        Student: make_student_experiment,
        PrivateDiscriminant: make_discriminant_experiment,
        GaussianNoise | LaplaceNoise: make_noise_experiment,
    }
    make = next((make for kind, make in makers.items() if isinstance(mechanism, kind)), None)
    if make is None:
        raise ValueError(
            "mechanism must be a release, a voting estimator, a student, a discriminant, a private PCA, noise, or an "
            "Experiment that runs one"
        )
    return make(mechanism)
