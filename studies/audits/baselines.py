"""Experiments for the baselines: the laws of their releases, and private PCA."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from nearveil.audit._experiment import Experiment, Floats, Law, Pair
from nearveil.audit._releases import stack_messages, state_bit_law, state_law, state_noise_law, state_set_law
from studies.baselines import Cells, DPdSNE, PrivatePCA, RandomProjection, Unary, VonMisesFisher

_FIT_TRIALS = 8_000  # if every run is a fit
_WIDE = 8  # dimensions from which no cell of the sphere is likely
_RARE_LAW = Law(values=stack_messages, largest_row=2.0**-20)


state_law.register(Cells, state_set_law)


@state_law.register
def _(release: RandomProjection) -> Law:
    return state_noise_law(release, lambda features: features @ release.matrix_)


@state_law.register
def _(release: Unary) -> Law:
    def encode(features: Floats) -> NDArray[np.uint8]:
        near = 2 * features @ release.centroids_.T - (release.centroids_**2).sum(axis=1)
        return np.asarray(np.eye(release.string_.length, dtype=np.uint8)[near.argmax(axis=1)])

    return state_bit_law(release, encode)


@state_law.register
def _(release: DPdSNE) -> Law:
    del release
    return _RARE_LAW  # the noise of the last step makes every outcome rare


@state_law.register
def _(release: VonMisesFisher) -> Law:
    return _RARE_LAW if release.n_features_in_ >= _WIDE else Law()


def make_projector_experiment(projector: PrivatePCA) -> Experiment:
    """Return the experiment of a private PCA: two orthogonal records, in as few dimensions as possible."""
    pca = clone(projector).set_params(mean=None)
    dimension = pca.n_components + 1
    first, second = np.eye(dimension)[:1], np.eye(dimension)[-1:]

    def numbers(outcomes: Floats) -> Any:
        # A direction has no sign, so square its coordinates along each record.
        columns = outcomes.reshape(len(outcomes), pca.n_components, dimension)
        return (columns**2)[:, :, [0, -1]].reshape(len(outcomes), -1)

    return Experiment(
        name=f"private-pca ({pca.method})",
        guarantee=clone(pca).fit(first).guarantee,
        pairs=(Pair("a record, and one across it", first, second),),
        run=lambda rows, runs, rng: np.array([clone(pca).fit(rows, rng=rng).components_.ravel() for _ in range(runs)]),
        numbers=numbers,
        trials=_FIT_TRIALS,
    )
