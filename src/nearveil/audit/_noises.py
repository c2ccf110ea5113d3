"""Noise by itself: zero against a value as far away as the sensitivity."""

from dataclasses import replace

import numpy as np

from nearveil.audit._experiment import Experiment, Floats, Pair
from nearveil.privacy import Guarantee, noise_guarantee
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source, add_noise, secure_source

_DELTA = 1e-5
_TRIALS = 3_000_000


def noise_experiment(noise: GaussianNoise | LaplaceNoise) -> Experiment:
    """Return the experiment of noise on `size` values, one of which moves by the sensitivity.

    Parameters
    ----------
    noise : GaussianNoise or LaplaceNoise
        Its promise is that of delta 1e-5 for Gaussian noise, and of the noise's own epsilon for Laplace noise.

    Returns
    -------
    Experiment
    """
    moved = np.zeros(noise.size)
    moved[0] = noise.sensitivity

    def run(values: Floats, runs: int, source: Source) -> Floats:
        every = np.tile(values, (runs, 1))
        return add_noise(every, replace(noise, size=every.size), source=source)

    def log_ratio(seen: Floats, pair: Pair) -> Floats:
        off = [seen - values for values in (pair.first, pair.second)]
        if isinstance(noise, GaussianNoise):
            first, second = ((one**2).sum(axis=1) / (2 * noise.scale**2) for one in off)
        else:
            first, second = (np.abs(one).sum(axis=1) / noise.scale for one in off)
        return np.asarray(second - first)

    return Experiment(
        name=f"{'gaussian' if isinstance(noise, GaussianNoise) else 'laplace'} noise",
        promise=_promise(noise),
        pairs=(Pair("two values as far apart as the sensitivity", moved, np.zeros(noise.size)),),
        run=run,
        log_ratio=log_ratio,
        exact=True,
        together=lambda coins, pair, words: run_each(noise, np.where(coins[:, None], pair.first, pair.second), words),
        trials=max(200_000, _TRIALS // noise.size) if isinstance(noise, GaussianNoise) else 400_000,
    )


def run_each(noise: GaussianNoise | LaplaceNoise, values: Floats, source: Source) -> Floats:
    """Release many rows of values at once, each with noise of its own."""
    return add_noise(values, replace(noise, size=values.size), source=source)


def _promise(noise: GaussianNoise | LaplaceNoise) -> Guarantee:
    found = noise_guarantee(
        noise,
        delta=_DELTA,
        protects="query",
        unit="value",
        relation="replace",
        source=secure_source(),
    )
    if isinstance(noise, GaussianNoise):
        return found
    return replace(found, epsilon=noise.epsilon, delta=noise.extra_delta)
