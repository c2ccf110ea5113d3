"""Experiments for releases of a query, and for noise."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import singledispatch
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from nearveil import mechanisms
from nearveil.audit._experiment import (
    Coin,
    Experiment,
    Floats,
    Law,
    Pair,
    compute_losses,
    compute_uniforms,
    count_trials,
    draw_gallery,
    draw_public_rows,
    make_frozen_check,
)
from nearveil.lazy import require_extra
from nearveil.privacy import noise_guarantee
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source, add_noise, secure_source
from nearveil.privatemail import PrivateMail

_SLOW_TRIALS = 60_000  # of slow releases
_PILOT = 24  # messages of each candidate row
_RANDOM = 24  # random directions among the candidates
_BISECTIONS = 16  # closer rows may differ only by the rounding of single precision
_BORDER_MESSAGES = 256


def fit_release(release: mechanisms.Release) -> mechanisms.Release:
    """Return the release, or a clone fitted on the default rows if it is not fitted."""
    ready = release if hasattr(release, "mean_") else clone(release).fit(*draw_public_rows())
    if hasattr(ready, "index") and not hasattr(ready, "map_"):
        rows = draw_gallery()
        if rows.shape[1] != ready.n_features_in_:
            raise ValueError("the release must have a map: call index(gallery) or use_map(map) before an audit")
        ready = ready.index(rows)
    return ready


def make_release_experiment(release: mechanisms.Release, source: Source | None = None) -> Experiment:
    """Return the experiment of a release of one row; `source` is for the pilot that searches for the worst pair."""
    ready: Any = fit_release(release)
    if isinstance(ready, PrivateMail) and ready.as_published is not None:
        with require_extra("studies"):
            return import_module("studies.audits.session").make_session_experiment(ready)  # type: ignore[no-any-return]
    is_mail = isinstance(ready, PrivateMail)
    fields = _describe_mail(ready) if is_mail else _describe(ready, source or secure_source())
    return Experiment(
        name=f"{ready.name} ({ready.noise})" if is_mail else ready.name,
        guarantee=ready.guarantee,
        run=lambda row, runs, rng: ready.release(np.tile(row, (runs, 1)), rng=rng),
        numbers=stack_messages,
        checks=(make_frozen_check(ready),),
        run_once=lambda coins, pair, rng: ready.release(np.where(coins[:, None], pair.first, pair.second), rng=rng),
        **{"trials": count_trials(ready.guarantee.delta if fields.get("exact") else 0.0), **fields},
    )


def _describe(release: Any, source: Source) -> dict[str, Any]:
    """Return the pairs, density and law of a release that is not PrivateMail."""
    law = state_law(release)
    if not hasattr(release, "log_density"):
        return {"pairs": _choose_blind_pairs(release), "law": law, "trials": _SLOW_TRIALS}

    def log_ratio(messages: list[mechanisms.Message], pair: Pair) -> Floats:
        density = release.log_density(messages, np.stack([pair.first, pair.second]))
        return np.asarray(density[:, 0] - density[:, 1])

    # Without an exact law, the density is that at the centre of a grid cell, which is only a good score.
    exact = bool(law.uniforms or law.coins)
    return {"pairs": _find_pairs(release, source), "log_ratio": log_ratio, "exact": exact, "law": law}


def _describe_mail(mail: PrivateMail) -> dict[str, Any]:
    """Return the pairs, density and law of sound PrivateMail: a server can compute the exact position of a row."""
    pairs = _find_mail_pairs(mail)
    if mail.n_private_steps > 1:
        return {"pairs": pairs}
    noise = describe_noise(
        mail.noises_[0],
        lambda messages: np.stack([message["released"][0] for message in messages]),
        lambda row: np.asarray(mail.embed_gallery(row[None], steps=0).gallery[0]),
    )
    return {"pairs": pairs, **noise}


def _take_opposites(mean: Floats, direction: Floats) -> Pair:
    """Return the two unit steps from the public mean along a direction and against it."""
    unit = direction / np.linalg.norm(direction)
    return Pair("opposite unit vectors", mean + unit, mean - unit)


def _find_pairs(release: Any, source: Source) -> tuple[Pair, ...]:
    """Return opposite rows, the two rows that differ most in a pilot, and two sides of a border between cells."""
    rows = _make_pool(release)
    messages = release.release(np.repeat(rows, _PILOT, axis=0), rng=source)
    spread = np.cov(release.log_density(messages, rows), rowvar=False)
    distances = np.diag(spread)[:, None] + np.diag(spread)[None, :] - 2 * spread
    i, j = np.unravel_index(np.argmax(distances), distances.shape)
    border = _find_border(release, rows, source)
    return (
        _take_opposites(release.mean_, np.eye(release.n_features_in_)[0]),
        Pair("the rows that a pilot found farthest apart", rows[i], rows[j]),
        *(() if border is None else (border,)),
    )


def _make_pool(release: Any) -> Floats:
    """Return candidates for the worst pair: axes and random directions, with their opposites."""
    mean = release.mean_
    generator = np.random.default_rng(2)
    directions = [np.eye(len(mean))[:64], generator.standard_normal((_RANDOM, len(mean)))]
    # A few large coordinates, or all of equal size: bit codes differ most for these.
    directions.append(np.sign(generator.standard_normal((_RANDOM, len(mean)))))
    if hasattr(release, "matrix_"):  # the directions that a public matrix stretches most
        directions.append(np.linalg.svd(release.matrix_, full_matrices=False)[0].T[:2])
    units = np.concatenate(directions)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    return np.asarray(mean + np.concatenate([units, -units]))


def _find_border(release: Any, rows: Floats, source: Source) -> Pair | None:
    """Return two close rows on either side of a border between cells; None if there are no cells."""
    messages = release.release(np.repeat(rows[:8], _BORDER_MESSAGES // 8, axis=0), rng=source)
    table = release.log_density(messages, rows)
    other = next((i for i in range(1, len(rows)) if np.abs(table[:, i] - table[:, 0]).max() > 0), None)
    if other is None:
        return None
    first, second = rows[0], rows[other]
    for _ in range(_BISECTIONS):
        middle = (first + second) / 2
        same = np.abs(release.log_density(messages, np.stack([first, middle])) @ np.array([1.0, -1.0])).max() == 0
        first, second = (middle, second) if same else (first, middle)
    left, right = release.log_density(messages, np.stack([first, second])).T
    # A smooth density hardly differs between such close rows.
    return Pair("two sides of a border", first, second) if np.abs(left - right).max() > 1e-3 else None


def _choose_blind_pairs(release: Any) -> tuple[Pair, ...]:
    """Return opposite rows along the directions of largest variance of the public rows."""
    rows = draw_public_rows()[0]
    if rows.shape[1] == release.n_features_in_:
        axes = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)[2]
    else:
        axes = np.eye(release.n_features_in_)
    return tuple(_take_opposites(release.mean_, axis) for axis in axes[:3])


def _find_mail_pairs(mail: PrivateMail) -> tuple[Pair, ...]:
    """Return the opposite rows with the most distant embeddings, by a linear fit to random rows."""
    generator = np.random.default_rng(3)
    units = generator.standard_normal((600, mail.n_features_in_))
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    points = mail.embed_gallery(mail.mean_ + units, steps=0).gallery
    slope = np.linalg.lstsq(np.column_stack([units, np.ones(len(units))]), points, rcond=None)[0][:-1]
    signs = np.array(np.meshgrid(*[[1.0, -1.0]] * min(slope.shape[1], 3))).reshape(min(slope.shape[1], 3), -1)
    directions = np.column_stack([np.linalg.svd(slope)[0][:, :1], slope[:, : len(signs)] @ signs]).T
    order = 2 if mail.noise == "gaussian" else 1

    def measure_gap(pair: Pair) -> float:
        first, second = mail.embed_gallery(np.stack([pair.first, pair.second]), steps=0).gallery
        return float(np.linalg.norm(first - second, order))

    return (max((_take_opposites(mail.mean_, direction) for direction in directions), key=measure_gap),)


_DELTA = 1e-5
_NOISE_TRIALS = 3_000_000
_CELL_MASS = 0.06  # bound on the mass of a cell of 1/8 under a Gaussian of deviation at least 1
_MAX_SETS = 64  # tested one by one

Noise = GaussianNoise | LaplaceNoise


def make_noise_experiment(noise: Noise) -> Experiment:
    """Return the experiment of noise on `size` values; the first changes by the sensitivity."""
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
        run_once=lambda coins, pair, source: add(np.where(coins[:, None], pair.first, pair.second), source),
        trials=max(200_000, _NOISE_TRIALS // noise.size) if gaussian else 400_000,
        **describe_noise(noise, lambda outcomes: outcomes, lambda values: values),
    )


def describe_noise(noise: Noise, values: Callable[[Any], Floats], exact: Callable[[Any], Floats]) -> dict[str, Any]:
    """Return the density and law of noisy `values`, shape (n, k), around the `exact` values of the input."""
    laplace = isinstance(noise, LaplaceNoise)
    # The maximum of the density times a cell; single precision may make cells of up to 2^-20 of the scale.
    largest = max(noise.grid / noise.scale, 2.0**-20) * (0.51 if laplace else 0.4)

    def log_ratio(outcomes: Any, pair: Pair) -> Floats:
        return compute_losses(values(outcomes), exact(pair.first), exact(pair.second), noise.scale, laplace=laplace)

    def list_uniforms(outcomes: Any, input_: Any) -> list[Floats]:
        return list(compute_uniforms((values(outcomes) - exact(input_)) / noise.scale, laplace=laplace).T)

    law = Law(uniforms=list_uniforms, values=values, largest_value=largest, largest_row=largest**noise.size)
    return {"log_ratio": log_ratio, "exact": True, "law": law}


def stack_messages(messages: Sequence[mechanisms.Message]) -> NDArray[Any]:
    """Stack all arrays of messages, shape (n, k), without changing the floating point type."""
    parts = [
        np.stack([message.arrays[name] for message in messages]).reshape(len(messages), -1)
        for name in messages[0].arrays
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


@singledispatch
def state_law(release: mechanisms.Release) -> Law:
    """Return the stated law of a fitted release; empty if no exact law is stated."""
    return state_law(release) if import_studies() else Law()


def import_studies() -> bool:
    """Import the audits of the studies, if installed, which register estimators and baselines; False if they have."""
    if find_spec("studies") is None or "studies.audits" in sys.modules:
        return False
    import_module("studies.audits")
    return True


def state_noise_law(release: Any, project: Callable[[Floats], Floats]) -> Law:
    noise = describe_noise(release.noise_, stack_messages, lambda row: project(release.features(row[None])))
    return noise["law"]  # type: ignore[no-any-return]


def _state_privunit_law(release: mechanisms.PrivUnit) -> Law:
    # A Gaussian, rounded to cells and weighted by at most e^epsilon (docs/theory/privunit.md).
    largest = _CELL_MASS**release.channel_.dimension * math.exp(release.channel_.epsilon)
    return Law(values=stack_messages, largest_row=min(largest, 1.0))


def state_set_law(release: Any) -> Law:
    """Return the coins of the good set, with odds of e^epsilon, and of other sets, which are equally likely."""

    def toss(messages: Sequence[mechanisms.Message], row: Floats) -> list[Coin]:
        named, count = stack_messages(messages), release.map_.n_sets
        size, good = named.shape[1], int(release.map_.choose(release.features(row[None]))[0])
        weight = size * math.exp(release.guarantee.epsilon)
        inside = (named == good).any(axis=1)
        coins = [(inside, weight / (weight + count - size))]
        for other in [number for number in range(count) if number != good][:_MAX_SETS]:
            hits = (named == other).any(axis=1)
            coins += [(hits[inside], (size - 1) / (count - 1)), (hits[~inside], size / (count - 1))]
        return coins

    return Law(coins=toss)


def state_bit_law(release: Any, encode: Callable[[Floats], NDArray[np.uint8]]) -> Law:
    """Return the law of a string of independent bits, which `encode` computes from features."""
    laws, length = release.string_.laws, release.string_.length

    def toss(messages: Sequence[mechanisms.Message], row: Floats) -> list[Coin]:
        released = np.unpackbits(stack_messages(messages), axis=1, count=length).astype(np.bool_)
        true = encode(release.features(row[None]))[0]
        chances = [(laws[i % len(laws)].p if true[i] else laws[i % len(laws)].q) for i in range(length)]
        return list(zip(released.T, chances, strict=True))

    return Law(coins=toss)


def _state_value_law(release: Any) -> Law:
    return state_bit_law(release, lambda features: release.encoding_.encode(release.projection_(features)))


for _kinds, _state in (
    (mechanisms.AnalyticGaussian, lambda release: state_noise_law(release, release.projection_)),
    (mechanisms.Covers, state_set_law),
    (mechanisms.Latent | mechanisms.OME, _state_value_law),
    (mechanisms.PrivUnit, _state_privunit_law),
):
    state_law.register(_kinds, _state)
