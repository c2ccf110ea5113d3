"""From a mechanism to the experiment that attacks it."""

from typing import Any

from nearveil.audit._attack_membership import membership_experiment
from nearveil.audit._experiment import Experiment
from nearveil.audit._noises import noise_experiment
from nearveil.audit._projectors import projector_experiment
from nearveil.audit._releases import release_experiment
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source
from nearveil.release import PrivatePCA, PrivatePCARelease, Release
from nearveil.votes import PateClassifier, PrivateKNeighborsClassifier


def experiment_of(mechanism: Any, source: Source | None = None) -> Experiment:
    """Return the experiment of any mechanism of this library, or the one that was given.

    Parameters
    ----------
    mechanism : Release, voting classifier, PrivatePCA, GaussianNoise, LaplaceNoise or Experiment
    source : Source, optional
        For what must be run to find the worst pair.

    Returns
    -------
    Experiment
    """
    if isinstance(mechanism, Experiment):
        return mechanism
    if isinstance(mechanism, PrivatePCARelease):
        return projector_experiment(mechanism.projector)
    if isinstance(mechanism, PrivatePCA):
        return projector_experiment(mechanism)
    if isinstance(mechanism, Release):
        return release_experiment(mechanism, source)
    if isinstance(mechanism, PrivateKNeighborsClassifier | PateClassifier):
        return membership_experiment(mechanism)
    if isinstance(mechanism, GaussianNoise | LaplaceNoise):
        return noise_experiment(mechanism)
    raise ValueError(
        "mechanism must be a release, a voting classifier, a private PCA, noise, or an Experiment that runs one"
    )
