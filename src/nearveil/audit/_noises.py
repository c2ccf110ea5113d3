"""Noise by itself: zero against a value as far away as the sensitivity."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from nearveil.audit._experiment import Experiment, Floats, Pair
from nearveil.audit._law import Law, gaussian_uniforms, laplace_uniforms
from nearveil.privacy import Guarantee, noise_guarantee
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source, add_noise, secure_source

_DELTA = 1e-5
_TRIALS = 3_000_000


def noise_experiment(noise: GaussianNoise | LaplaceNoise) -> Experiment:
    """Return the experiment of noise on `size` values, one of which moves by the sensitivity.

    `noise`: Its promise is that of delta 1e-5 for Gaussian noise, and of the noise's own epsilon for Laplace noise.
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
        law=noise_law(noise, lambda seen: seen, lambda values: values),
        together=lambda coins, pair, words: run_each(noise, np.where(coins[:, None], pair.first, pair.second), words),
        trials=max(200_000, _TRIALS // noise.size) if isinstance(noise, GaussianNoise) else 400_000,
    )


def noise_law(
    noise: GaussianNoise | LaplaceNoise, values: Callable[[Any], Floats], exact: Callable[[Any], Floats]
) -> Law:
    """Return the law of outcomes that are exact values plus noise.

    `values`: From what `run` returned to noisy values, shape (n, k).
    `exact`: From an input to its values without noise, shape (k,).
    """
    gaussian = isinstance(noise, GaussianNoise)
    look = gaussian_uniforms if gaussian else laplace_uniforms
    # The density at its highest, times a cell; single precision may make cells of up to 2^-20 of the scale.
    largest = max(noise.grid / noise.scale, 2.0**-20) * (0.4 if gaussian else 0.51)

    def uniforms(seen: Any, given: Any) -> list[Floats]:
        return list(look((values(seen) - exact(given)) / noise.scale).T)

    width = noise.size
    return Law(uniforms=uniforms, values=values, largest_value=largest, largest_row=largest**width)


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
