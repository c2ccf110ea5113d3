"""What releases state about their own messages."""

import math
from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.audit._defaults import Floats
from nearveil.audit._law import Coin, Law
from nearveil.audit._noises import noise_law
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

_CELL_MASS = 0.06  # a cell of 1/8 under a Gaussian of deviation 1 and more holds less
_MOST_SETS = 64  # that are looked at one by one
_WIDE = 8  # from so many dimensions on, no cell of the sphere is likely
_RARE = 2.0**-20


def message_numbers(messages: Sequence[Message]) -> NDArray[Any]:
    """Return all that messages hold as one array, shape (n, k); floating point keeps its width."""
    parts = [
        np.stack([message.arrays[name] for message in messages]).reshape(len(messages), -1)
        for name in messages[0].arrays
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


@singledispatch
def release_law(release: Release) -> Law:
    """Return what a fitted release states about its messages; an empty law where nothing exact is stated."""
    del release
    return Law()


@release_law.register
def _(release: AnalyticGaussian) -> Law:
    return noise_law(release.noise_, message_numbers, lambda row: release.projection_(release.features(row[None])))


@release_law.register
def _(release: RandomProjection) -> Law:
    return noise_law(release.noise_, message_numbers, lambda row: release.features(row[None]) @ release.matrix_)


@release_law.register(Covers)
@release_law.register(Cells)
def _(release: Any) -> Law:
    return Law(coins=lambda messages, row: _named_sets(release, messages, row))


@release_law.register(Latent)
@release_law.register(OME)
def _(release: Any) -> Law:
    return _bit_law(release, lambda row: release.encoding_.encode(release.projection_(release.features(row[None]))))


@release_law.register
def _(release: Unary) -> Law:
    return _bit_law(release, lambda row: _one_hot(release, row))


@release_law.register
def _(release: PrivUnit) -> Law:
    # A plain Gaussian that is rounded to cells, tilted by at most e^epsilon (docs/theory/privunit.md).
    largest = _CELL_MASS**release.channel_.dimension * math.exp(release.channel_.epsilon)
    return Law(values=message_numbers, largest_row=min(largest, 1.0))


@release_law.register
def _(release: DPdSNE) -> Law:
    del release  # the noise of the last step alone makes every outcome rare
    return Law(values=message_numbers, largest_row=_RARE)


@release_law.register
def _(release: VonMisesFisher) -> Law:
    return Law(values=message_numbers, largest_row=_RARE) if release.n_features_in_ >= _WIDE else Law()


def _named_sets(release: Any, messages: Sequence[Message], row: Floats) -> list[Coin]:
    """Return how often the good set is named, and each other set: odds of e^epsilon, and all others alike."""
    named, count = message_numbers(messages), release.map_.n_sets
    size, good = named.shape[1], int(release.map_.choose(release.features(row[None]))[0])
    weight = size * math.exp(release.guarantee.epsilon)
    inside = (named == good).any(axis=1)
    coins = [(inside, weight / (weight + count - size))]
    for other in [one for one in range(count) if one != good][:_MOST_SETS]:
        there = (named == other).any(axis=1)
        coins += [(there[inside], (size - 1) / (count - 1)), (there[~inside], size / (count - 1))]
    return coins


def _one_hot(release: Unary, row: Floats) -> NDArray[np.uint8]:
    near = 2 * release.features(row[None]) @ release.centroids_.T - (release.centroids_**2).sum(axis=1)
    return np.asarray(np.eye(release.string_.length, dtype=np.uint8)[near.argmax(axis=1)])


def _bit_law(release: Any, bits: Callable[[Floats], NDArray[np.uint8]]) -> Law:
    """Return the law of a string of bits, each of which follows a law of its own."""
    laws, length = release.string_.laws, release.string_.length

    def coins(messages: Sequence[Message], row: Floats) -> list[Coin]:
        seen = np.unpackbits(message_numbers(messages), axis=1, count=length).astype(np.bool_)
        true = bits(row)[0]
        chances = [(laws[i % len(laws)].p if true[i] else laws[i % len(laws)].q) for i in range(length)]
        return list(zip(seen.T, chances, strict=True))

    return Law(coins=coins)
