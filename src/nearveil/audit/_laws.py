"""Noise by itself: zero against a value as far away as the sensitivity."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.audit._experiment import Experiment, Floats, Pair
from nearveil.audit._law import Coin, Law, gaussian_uniforms, laplace_uniforms
from nearveil.mechanisms import (
    OME,
    AnalyticGaussian,
    Cells,
    Covers,
    DPdSNE,
    Latent,
    Message,
    PrivUnit,
    RandomProjection,
    Release,
    Unary,
    VonMisesFisher,
)
from nearveil.privacy import noise_guarantee
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source, add_noise, secure_source

_DELTA = 1e-5
_NOISE_TRIALS = 3_000_000
_CELL_MASS = 0.06  # a cell of 1/8 under a Gaussian of deviation 1 and more holds less
_MOST_SETS = 64  # that are looked at one by one
_WIDE = 8  # from so many dimensions on, no cell of the sphere is likely
_RARE = 2.0**-20

Noise = GaussianNoise | LaplaceNoise


def make_noise_experiment(noise: Noise) -> Experiment:
    """Return the experiment of noise on `size` values, one of which moves by the sensitivity."""
    gaussian = isinstance(noise, GaussianNoise)
    guarantee = noise_guarantee(
        noise, delta=_DELTA, protects="query", unit="value", relation="replace", source=secure_source()
    )
    if isinstance(noise, LaplaceNoise):
        guarantee = replace(guarantee, epsilon=noise.epsilon, delta=noise.extra_delta)
    moved = np.zeros(noise.size)
    moved[0] = noise.sensitivity

    def add(values: Floats, source: Source) -> Floats:
        return add_noise(values, replace(noise, size=values.size), source=source)

    return Experiment(
        name=f"{'gaussian' if gaussian else 'laplace'} noise",
        guarantee=guarantee,
        pairs=(Pair("two values as far apart as the sensitivity", moved, np.zeros(noise.size)),),
        run=lambda values, runs, source: add(np.tile(values, (runs, 1)), source),
        log_ratio=lambda seen, pair: compute_noise_ratio(noise, seen - pair.first, seen - pair.second),
        exact=True,
        law=state_noise_law(noise, lambda seen: seen, lambda values: values),
        together=lambda coins, pair, source: add(np.where(coins[:, None], pair.first, pair.second), source),
        trials=max(200_000, _NOISE_TRIALS // noise.size) if gaussian else 400_000,
    )


def compute_noise_ratio(noise: Noise, first: Floats, second: Floats) -> Floats:
    """Return the log-likelihood ratio of noise that is `first` in one world and `second` in the other."""
    if isinstance(noise, GaussianNoise):
        near, far = ((one**2).sum(axis=1) / (2 * noise.scale**2) for one in (first, second))
    else:
        near, far = (np.abs(one).sum(axis=1) / noise.scale for one in (first, second))
    return np.asarray(far - near)


def state_noise_law(noise: Noise, values: Callable[[Any], Floats], exact: Callable[[Any], Floats]) -> Law:
    """Return the law of noisy `values` of what `run` returned, shape (n, k), around `exact` ones of the input."""
    gaussian = isinstance(noise, GaussianNoise)
    look = gaussian_uniforms if gaussian else laplace_uniforms
    # The density at its highest, times a cell; single precision may make cells of up to 2^-20 of the scale.
    largest = max(noise.grid / noise.scale, 2.0**-20) * (0.4 if gaussian else 0.51)
    return Law(
        uniforms=lambda seen, given: list(look((values(seen) - exact(given)) / noise.scale).T),
        values=values,
        largest_value=largest,
        largest_row=largest**noise.size,
    )


def stack_messages(messages: Sequence[Message]) -> NDArray[Any]:
    """Return all that messages hold as one array, shape (n, k); floating point keeps its width."""
    parts = [
        np.stack([message.arrays[name] for message in messages]).reshape(len(messages), -1)
        for name in messages[0].arrays
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


@singledispatch
def state_law(release: Release) -> Law:
    """Return what a fitted release states about its messages; an empty law where nothing exact is stated."""
    del release
    return Law()


@state_law.register
def _(release: AnalyticGaussian) -> Law:
    return state_noise_law(release.noise_, stack_messages, lambda row: release.projection_(release.features(row[None])))


@state_law.register
def _(release: RandomProjection) -> Law:
    return state_noise_law(release.noise_, stack_messages, lambda row: release.features(row[None]) @ release.matrix_)


@state_law.register(Covers)
@state_law.register(Cells)
def _(release: Any) -> Law:
    return Law(coins=lambda messages, row: _toss_sets(release, messages, row))


@state_law.register(Latent)
@state_law.register(OME)
def _(release: Any) -> Law:
    return _state_bit_law(
        release, lambda row: release.encoding_.encode(release.projection_(release.features(row[None])))
    )


@state_law.register
def _(release: Unary) -> Law:
    return _state_bit_law(release, lambda row: _encode_one_hot(release, row))


@state_law.register
def _(release: PrivUnit) -> Law:
    # A plain Gaussian that is rounded to cells, tilted by at most e^epsilon (docs/theory/privunit.md).
    largest = _CELL_MASS**release.channel_.dimension * math.exp(release.channel_.epsilon)
    return Law(values=stack_messages, largest_row=min(largest, 1.0))


@state_law.register
def _(release: DPdSNE) -> Law:
    del release  # the noise of the last step alone makes every outcome rare
    return Law(values=stack_messages, largest_row=_RARE)


@state_law.register
def _(release: VonMisesFisher) -> Law:
    return Law(values=stack_messages, largest_row=_RARE) if release.n_features_in_ >= _WIDE else Law()


def _toss_sets(release: Any, messages: Sequence[Message], row: Floats) -> list[Coin]:
    """Return how often the good set is named, and each other set: odds of e^epsilon, and all others alike."""
    named, count = stack_messages(messages), release.map_.n_sets
    size, good = named.shape[1], int(release.map_.choose(release.features(row[None]))[0])
    weight = size * math.exp(release.guarantee.epsilon)
    inside = (named == good).any(axis=1)
    coins = [(inside, weight / (weight + count - size))]
    for other in [one for one in range(count) if one != good][:_MOST_SETS]:
        there = (named == other).any(axis=1)
        coins += [(there[inside], (size - 1) / (count - 1)), (there[~inside], size / (count - 1))]
    return coins


def _encode_one_hot(release: Unary, row: Floats) -> NDArray[np.uint8]:
    near = 2 * release.features(row[None]) @ release.centroids_.T - (release.centroids_**2).sum(axis=1)
    return np.asarray(np.eye(release.string_.length, dtype=np.uint8)[near.argmax(axis=1)])


def _state_bit_law(release: Any, bits: Callable[[Floats], NDArray[np.uint8]]) -> Law:
    """Return the law of a string of bits, each of which follows a law of its own."""
    laws, length = release.string_.laws, release.string_.length

    def coins(messages: Sequence[Message], row: Floats) -> list[Coin]:
        seen = np.unpackbits(stack_messages(messages), axis=1, count=length).astype(np.bool_)
        true = bits(row)[0]
        chances = [(laws[i % len(laws)].p if true[i] else laws[i % len(laws)].q) for i in range(length)]
        return list(zip(seen.T, chances, strict=True))

    return Law(coins=coins)
