"""All mechanisms by name, the specimens that must be caught, and public names that are not audited."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from nearveil.audit import _specimens as broken
from nearveil.audit._experiment import Experiment
from nearveil.audit._releases import make_noise_experiment, make_projector_experiment, make_release_experiment
from nearveil.audit._voters import make_discriminant_experiment, make_membership_experiment, make_student_experiment
from nearveil.audit.attacks._clock import make_clock_experiment, make_time_experiment, time_choice
from nearveil.audit.attacks._wire import make_wire_experiment
from nearveil.mechanisms import AnalyticGaussian, Cells, Covers, PrivatePCA, PrivatePCARelease, PrivUnit, Release
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
_FEW_DELTA = 0.05  # of mechanisms that are fitted in every run
_SPECIMEN_TRIALS = 200_000  # of defects that need few runs

_PUBLISHED = {"n_public_steps": 5, "start_scale": 1e-8, "n_anchors": 60}
# Parameters for fast runs with events that are frequent enough to be seen.
_CHANGED: dict[str, dict[str, Any]] = {
    "privatemail (gaussian)": {"delta": DELTA},
    "privatemail (as published 2022)": _PUBLISHED,
    "privatemail (as published 2021)": _PUBLISHED,
    "privatemail (as published 2022-code)": _PUBLISHED,
    "analytic-gaussian": {"delta": DELTA},
    "random-projection": {"delta": DELTA, "n_components": 16},
    "random-projection (as published)": {"delta": DELTA, "n_components": 16},
    "private-pca (gaussian)": {"n_components": 1},
    "private-pca (bingham)": {"n_components": 1},
    "private-pca (gibbs)": {"n_components": 1},
}

Make = Callable[[], Any]
Expected = Literal["kept", "broken", "open"]
_EXPECTED: dict[str, Expected] = {
    "privatemail (as published 2022-code)": "broken",
    "random-projection (as published)": "broken",
    # The papers also use the label after the noise, but no attack shows it at these parameters.
    "privatemail (as published 2022)": "open",
    "privatemail (as published 2021)": "open",
    "private-pca (bingham)": "open",
    "private-pca (gibbs)": "open",
}


@dataclass(frozen=True, eq=False)
class AuditEntry:
    """A mechanism that can be audited by name."""

    name: str
    make: Callable[[], Experiment]  # may take a second, because it fits
    expected: Expected = "kept"  # "open": not proved, and no attack is known to work
    subject: str = ""  # the audited public name


def list_mechanisms(epsilon: float = EPSILON) -> list[AuditEntry]:
    """Return all mechanisms of the library, by their names in ``nearveil mechanisms``, and their side channels.

    Parameters
    ----------
    epsilon : float, default=4.0
        Of each mechanism.

    Returns
    -------
    list of AuditEntry
        With a `name`, the public name of its `subject`, and `make()`, which returns the experiment.

    Examples
    --------
    >>> from nearveil.audit import audit
    >>> bits = next(entry for entry in list_mechanisms(1.0) if entry.name == "unary (symmetric)")
    >>> audit(bits.make(), trials=400).verdict != "broken"
    True
    """
    releases = [
        _make_entry(
            entry.name,
            partial(entry.make, epsilon, **_CHANGED.get(entry.name, {})),
            _EXPECTED.get(entry.name, "kept"),
            f"nearveil.{'privatemail' if entry.kind is PrivateMail else 'mechanisms'}.{entry.kind.__name__}",
        )
        for entry in REGISTRY
    ]
    more = _list_noises(epsilon) | _list_voters(epsilon) | _list_side_channels(epsilon)
    return releases + [
        _make_entry(name, make, subject=f"nearveil.{subject}")
        for subject, made in more.items()
        for name, make in made.items()
    ]


def _list_noises(epsilon: float) -> dict[str, dict[str, Make]]:
    return {
        "privacy.noise.GaussianNoise": {
            "gaussian noise": lambda: calibrate_gaussian(epsilon, 1e-5, sensitivity=1.0, size=1)
        },
        "privacy.noise.LaplaceNoise": {"laplace noise": lambda: calibrate_laplace(epsilon, sensitivity=1.0, size=1)},
    }


def _list_voters(epsilon: float) -> dict[str, dict[str, Make]]:
    def neighbors(delta: float = DELTA, answered: int = 1, screened: int = 0, **more: Any) -> Make:
        return lambda: PrivateKNeighborsClassifier(epsilon, delta, answered, max_screened=screened, **more)

    def numbers(method: Literal["mean", "median"]) -> Make:
        return lambda: PrivateKNeighborsRegressor(0, 1, epsilon=epsilon, delta=DELTA, max_answered=1, method=method)

    def teachers(mechanism: Any, screened: int | None = None) -> Make:
        return lambda: PateClassifier(
            40, mechanism=mechanism, epsilon=epsilon, delta=DELTA, max_answered=1, max_screened=screened
        )

    return {
        "private_knn.PrivateKNeighborsClassifier": {
            "private-knn (votes)": neighbors(),
            "private-knn (screened votes)": neighbors(screened=1),
            "private-knn (votes, rate 0.25)": neighbors(_SLOW_DELTA, sampling_rate=0.25),
            "private-knn (ten votes)": neighbors(_SLOW_DELTA, 10),
            "private-knn (soft votes)": neighbors(votes="soft"),
            "private-knn (screened soft votes)": neighbors(screened=1, votes="soft"),
            "private-knn (binary votes)": neighbors(votes="binary", clip=2.0),
            "private-knn (nonnegative votes)": neighbors(votes="nonnegative", clip=2.0),
            "private-knn (signed votes)": neighbors(votes="signed", clip=2.0),
        },
        "private_knn.PrivateKNeighborsRegressor": {
            "private-knn (mean)": numbers("mean"),
            "private-knn (median)": numbers("median"),
        },
        "private_knn.PateClassifier": {
            "pate (gnmax)": teachers("gnmax"),
            "pate (lnmax)": teachers("lnmax"),
            "pate (confident-gnmax)": teachers("confident-gnmax", 1),
        },
        "private_knn.PrivateDiscriminant": {
            "discriminant": lambda: PrivateDiscriminant(epsilon, _FEW_DELTA, classes=("in", "out"), publications=2)
        },
        "private_knn.Student": {
            "student": lambda: Student(PrivateKNeighborsClassifier(epsilon, _FEW_DELTA, 8, max_screened=0), rounds=2)
        },
    }


def _list_side_channels(epsilon: float) -> dict[str, dict[str, Make]]:
    """Return experiments on work, time and traffic."""
    # The client needs httpx.
    has_client = find_spec("httpx") is not None
    client: dict[str, dict[str, Make]] = {"Client": {"covers: clock": make_clock_experiment}} if has_client else {}
    sealed: dict[str, dict[str, Make]] = {}
    if find_spec("cryptography") is not None:
        from nearveil.audit.attacks._sealed import make_sealed_experiment

        sealed = {"sealed.SealedClient": {"sealed: question": make_sealed_experiment}}
    return {
        "wire.ClientProtocol": {"covers: on the wire": make_wire_experiment},
        "mechanisms.PublicMap": {
            "covers: choice": lambda: make_clock_experiment(time_choice, name="covers: choice", at_once=1),
        },
        "audit.attacks.make_time_experiment": {
            "covers: time": lambda: make_time_experiment(Covers(epsilon, n_sets=10)),
            "cells (randomized): time": lambda: make_time_experiment(Cells(epsilon)),
            "privunit: time": lambda: make_time_experiment(PrivUnit(epsilon)),
            "analytic-gaussian: time": lambda: make_time_experiment(AnalyticGaussian(epsilon)),
        },
        **client,
        **sealed,
    }


def list_specimens() -> list[AuditEntry]:
    """Return mechanisms that are broken on purpose. A reliable audit calls each of them broken.

    Returns
    -------
    list of AuditEntry

    Examples
    --------
    >>> list_specimens()[0].name, list_specimens()[0].expected
    ('the label kept after the noise', 'broken')
    """
    made: dict[str, Make] = {
        "the label kept after the noise": broken.make_label_after_noise,
        "a variance for a deviation": broken.make_variance_as_deviation,
        "fixed-size sample charged as Poisson": broken.make_fixed_size_sample,
        "one sample charged as two": broken.make_shared_sample,
        "OME's claim at alpha 7": broken.make_ome_claim,
        "half the noise of privunit": lambda: (
            PrivUnit(2 * EPSILON),
            broken.make_claim(EPSILON, 0.0, "half of the noise is missing"),
        ),
        "numpy's Laplace noise": broken.make_float_laplace,
        "a request after the answer": lambda: make_wire_experiment(broken.fetch_chosen),
        "work that depends on the record": lambda: make_time_experiment(broken.BusyCells(1.0)),
        "a search by a heap": broken.make_heap_search,
        "half the noise of a discriminant": lambda: broken.QuietDiscriminant(EPSILON, _FEW_DELTA),
        "a discriminant that does not pay": lambda: broken.FreeDiscriminant(EPSILON, _FEW_DELTA),
        "the largest private value in a discriminant": lambda: broken.ReachingDiscriminant(EPSILON, _FEW_DELTA),
        "four fifths of the noise on counts": lambda: broken.QuietCounts(EPSILON, _FEW_DELTA),
    }
    if find_spec("httpx") is not None:
        made["a question sent as soon as it is made"] = broken.make_hasty_question
    if find_spec("cryptography") is not None:
        from nearveil.audit.attacks._sealed import SPECIMENS

        made |= {f"sealed, with {name}": make for name, make in SPECIMENS.items()}
    planted: dict[str, Make] = {
        "classical Gaussian at epsilon 12": broken.make_classical_gaussian,
        "four fifths of the vote noise": lambda: broken.QuietVotes(EPSILON, max_answered=1, max_screened=0),
        "exact votes in one of 2,000 answers": lambda: broken.OnceExactVotes(EPSILON, max_answered=1, max_screened=0),
        "labels decided before the noise": lambda: broken.NoiselessLabels(EPSILON, max_answered=1, max_screened=0),
        "caps that are ignored": lambda: broken.EndlessVotes(EPSILON, max_answered=1, max_screened=0),
        "screening that is not charged": lambda: broken.FreeScreening(EPSILON, max_answered=1, max_screened=1),
    }
    return [
        *(_make_entry(name, make, "broken") for name, make in made.items()),
        *(_make_entry(name, make, "broken", trials=_SPECIMEN_TRIALS) for name, make in planted.items()),
    ]


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


def _make_entry(
    name: str, make: Make, expected: Expected = "kept", subject: str = "", trials: int | None = None
) -> AuditEntry:
    def experiment() -> Experiment:
        result = make()
        mechanism, claim = result if isinstance(result, tuple) else (result, None)
        made = make_experiment(mechanism)
        return replace(made, name=name, trials=trials or made.trials, guarantee=claim or made.guarantee)

    return AuditEntry(name, experiment, expected, subject)


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
