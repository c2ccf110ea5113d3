"""From a mechanism to the experiment that attacks it."""

from collections.abc import Callable
from typing import Any

from nearveil.audit._experiment import Experiment
from nearveil.audit._noises import noise_experiment
from nearveil.audit._projectors import projector_experiment
from nearveil.audit._releases import release_experiment
from nearveil.audit.attacks._discriminant import discriminant_experiment
from nearveil.audit.attacks._membership import membership_experiment
from nearveil.audit.attacks._student import student_experiment
from nearveil.mechanisms import PrivatePCA, PrivatePCARelease, Release
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source
from nearveil.votes import (
    PateClassifier,
    PrivateDiscriminant,
    PrivateKNeighborsClassifier,
    PrivateKNeighborsRegressor,
    Student,
)


def experiment_of(mechanism: Any, source: Source | None = None) -> Experiment:
    """Return the experiment of any mechanism of this library, or the one that was given.

    `source`: For what must be run to find the worst pair.
    """
    if isinstance(mechanism, Experiment):
        return mechanism
    makers: dict[Any, Callable[[Any], Experiment]] = {
        PrivatePCARelease: lambda release: projector_experiment(release.projector),
        PrivatePCA: projector_experiment,
        Release: lambda release: release_experiment(release, source),
        PrivateKNeighborsClassifier | PrivateKNeighborsRegressor | PateClassifier: membership_experiment,
        Student: student_experiment,
        PrivateDiscriminant: discriminant_experiment,
        GaussianNoise | LaplaceNoise: noise_experiment,
    }
    make = next((make for kind, make in makers.items() if isinstance(mechanism, kind)), None)
    if make is None:
        raise ValueError(
            "mechanism must be a release, a voting estimator, a student, a discriminant, a private PCA, noise, or an "
            "Experiment that runs one"
        )
    return make(mechanism)
