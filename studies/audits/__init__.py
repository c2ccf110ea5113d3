"""Audits of this library: its estimators, baselines and side channels, and specimens that every audit must catch.

``nearveil audit`` runs them where the studies are installed.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from nearveil.audit import Experiment
from nearveil.audit.registry import (
    DELTA,
    EPSILON,
    FEW_DELTA,
    AuditEntry,
    Expected,
    Make,
    list_releases,
    make_entry,
    make_experiment,
    name_subject,
)
from nearveil.mechanisms import AnalyticGaussian, Covers, PrivUnit
from nearveil.mechanisms.catalog import REGISTRY
from nearveil.private_knn import (
    PrivateDiscriminant,
    PrivateKNeighborsClassifier,
    PrivateKNeighborsRegressor,
    Student,
)
from studies.audits import specimens as broken
from studies.audits.baselines import make_projector_experiment
from studies.audits.clock import make_clock_experiment, make_time_experiment, time_choice
from studies.audits.estimators import (
    make_discriminant_experiment,
    make_membership_experiment,
    make_student_experiment,
)
from studies.audits.wire import make_wire_experiment
from studies.baselines import BASELINES, Cells, PrivatePCA, PrivatePCARelease
from studies.pate import PateClassifier

__all__ = [
    "list_baselines",
    "list_estimators",
    "list_side_channels",
    "list_specimens",
    "make_clock_experiment",
    "make_time_experiment",
    "make_wire_experiment",
]

_EXPERIMENTS: dict[Any, Callable[[Any], Experiment]] = {
    PrivateKNeighborsClassifier | PrivateKNeighborsRegressor | PateClassifier: make_membership_experiment,
    Student: make_student_experiment,
    PrivateDiscriminant: make_discriminant_experiment,
    PrivatePCA: make_projector_experiment,
    PrivatePCARelease: lambda release: make_projector_experiment(release.projector),
}
for _kinds, _make in _EXPERIMENTS.items():
    make_experiment.register(_kinds, lambda mechanism, _=None, *, make=_make: make(mechanism))

_SLOW_DELTA = 1e-3  # of slow mechanisms
_CHANGED: dict[str, dict[str, Any]] = {
    "privatemail (as published": {"n_public_steps": 5, "start_scale": 1e-8, "n_anchors": 60},
    "random-projection": {"delta": DELTA, "n_components": 16},
    "private-pca": {"n_components": 1},
}
_EXPECTED: dict[str, Expected] = {
    "privatemail (as published 2022-code)": "broken",
    # The papers also use the label after the noise, but no attack shows it at these parameters.
    **dict.fromkeys(["privatemail (as published 2022)", "privatemail (as published 2021)"], "open"),
    "random-projection (as published)": "broken",
    **dict.fromkeys(["private-pca (bingham)", "private-pca (gibbs)"], "open"),
}
_SPECIMEN_TRIALS = 200_000  # of defects that need few runs
_HAS_CLIENT, _HAS_SEALED = find_spec("httpx") is not None, find_spec("cryptography") is not None


def list_baselines(epsilon: float = EPSILON) -> list[AuditEntry]:
    """Return mechanisms as published and the baselines of the papers, by their names in ``nearveil mechanisms``."""
    published = [entry for entry in REGISTRY if entry.labelled]
    return list_releases([*published, *BASELINES], epsilon, _CHANGED, _EXPECTED)


def list_estimators(epsilon: float = EPSILON) -> list[AuditEntry]:
    """Return Private-kNN, PATE, students and the discriminant."""
    vote: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "max_answered": 1}
    neighbors = partial(PrivateKNeighborsClassifier, **vote, max_screened=0)
    numbers, teachers = partial(PrivateKNeighborsRegressor, 0, 1, **vote), partial(PateClassifier, 40, **vote)
    few = PrivateKNeighborsClassifier(epsilon, FEW_DELTA, 8, max_screened=0)
    return _make_entries(
        {
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
            "PateClassifier": {
                "pate (gnmax)": partial(teachers, mechanism="gnmax"),
                "pate (lnmax)": partial(teachers, mechanism="lnmax"),
                "pate (confident-gnmax)": partial(teachers, mechanism="confident-gnmax", max_screened=1),
            },
            "private_knn.PrivateDiscriminant": {
                "discriminant": partial(PrivateDiscriminant, epsilon, FEW_DELTA, classes=("in", "out"), publications=2)
            },
            "private_knn.Student": {"student": partial(Student, few, rounds=2)},
        }
    )


def list_side_channels(epsilon: float = EPSILON) -> list[AuditEntry]:
    """Return experiments on work, time and traffic, with the public names that they attack."""
    timed = {
        "covers": Covers(epsilon, n_sets=10),
        "cells (randomized)": Cells(epsilon),
        "privunit": PrivUnit(epsilon),
        "analytic-gaussian": AnalyticGaussian(epsilon),
    }
    channels: dict[str, dict[str, Make]] = {
        "wire.ClientProtocol": {"covers: on the wire": make_wire_experiment},
        "mechanisms.PublicMap": {"covers: choice": partial(make_clock_experiment, time_choice, at_once=1)},
    }
    if _HAS_CLIENT:
        channels["Client"] = {"covers: clock": make_clock_experiment}
    if _HAS_SEALED:
        from studies.audits.sealed import make_sealed_experiment

        channels["sealed.SealedClient"] = {"sealed: question": make_sealed_experiment}
    return _make_entries(channels) + [
        make_entry(f"{name}: time", partial(make_time_experiment, release), subject=name_subject(type(release)))
        for name, release in timed.items()
    ]


def _make_entries(makers_by_subject: dict[str, dict[str, Make]]) -> list[AuditEntry]:
    return [
        make_entry(name, make, subject=f"nearveil.{subject}")
        for subject, makers in makers_by_subject.items()
        for name, make in makers.items()
    ]


def list_specimens() -> list[AuditEntry]:
    """Return mechanisms that are broken on purpose. A reliable audit calls each of them broken.

    Examples
    --------
    >>> list_specimens()[0].name, list_specimens()[0].expected
    ('the label kept after the noise', 'broken')
    """
    makers: dict[str, Make] = {
        "the label kept after the noise": broken.make_label_after_noise,
        "a variance for a deviation": broken.make_variance_as_deviation,
        "fixed-size sample charged as Poisson": broken.make_fixed_size_sample,
        "one sample charged as two": broken.make_shared_sample,
        "OME's claim at alpha 7": broken.make_ome_claim,
        "half the noise of privunit": broken.make_quiet_privunit,
        "numpy's Laplace noise": broken.make_float_laplace,
        "a request after the answer": partial(make_wire_experiment, broken.fetch_chosen),
        "work that depends on the record": lambda: make_time_experiment(broken.BusyCells(1.0)),
        "a search with a heap": broken.make_heap_search,
        "half the noise of a discriminant": partial(broken.QuietDiscriminant, EPSILON, FEW_DELTA),
        "a discriminant that does not pay": partial(broken.FreeDiscriminant, EPSILON, FEW_DELTA),
        "the largest private value in a discriminant": partial(broken.ReachingDiscriminant, EPSILON, FEW_DELTA),
        "four fifths of the noise on counts": partial(broken.QuietCounts, EPSILON, FEW_DELTA),
    }
    if _HAS_CLIENT:
        makers["a question sent as soon as it is made"] = broken.make_hasty_question
    if _HAS_SEALED:
        from studies.audits.sealed import SPECIMENS

        makers |= {f"sealed, with {name}": make for name, make in SPECIMENS.items()}
    unscreened: dict[str, Any] = {"max_answered": 1, "max_screened": 0}
    planted: dict[str, Make] = {
        "classical Gaussian at epsilon 12": broken.make_classical_gaussian,
        "four fifths of the vote noise": partial(broken.QuietVotes, EPSILON, **unscreened),
        "exact votes in one of 2,000 answers": partial(broken.OnceExactVotes, EPSILON, **unscreened),
        "labels decided before the noise": partial(broken.NoiselessLabels, EPSILON, **unscreened),
        "caps that are ignored": partial(broken.EndlessVotes, EPSILON, **unscreened),
        "screening that is not charged": partial(broken.FreeScreening, EPSILON, max_answered=1, max_screened=1),
    }
    return [
        *(make_entry(name, make, "broken") for name, make in makers.items()),
        *(make_entry(name, make, "broken", trials=_SPECIMEN_TRIALS) for name, make in planted.items()),
    ]
