"""Releases of a query: what is told about a row must not tell it from another. And noise itself, and private PCA."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from nearveil.audit._conduct import make_frozen_check
from nearveil.audit._experiment import (
    CLASSES,
    Coin,
    Experiment,
    Floats,
    Law,
    Pair,
    compute_gaussian_uniforms,
    compute_laplace_uniforms,
    count_trials,
    draw_gallery,
    draw_public_rows,
)
from nearveil.mechanisms import (
    OME,
    AnalyticGaussian,
    Cells,
    Covers,
    DPdSNE,
    Latent,
    Message,
    PrivatePCA,
    PrivUnit,
    RandomProjection,
    Release,
    Unary,
    VonMisesFisher,
)
from nearveil.privacy import noise_guarantee
from nearveil.privacy.noise import GaussianNoise, LaplaceNoise, Source, add_noise, secure_source
from nearveil.privatemail import PrivateMail

_Described = tuple[tuple[Pair, ...], Callable[[Any, Pair], Floats] | None, bool, Law]  # pairs, log_ratio, exact, law
# Their log_density is the law of the very message, up to the last digits. That of the others is one of the point in
# the middle of a message's cells, which is a good score and no more.
_EXACT = (AnalyticGaussian, Cells, Covers, Latent, OME, RandomProjection, Unary)
_SLOW = 60_000  # trials, where a message takes a while
_SESSIONS = 2_000  # trials, where a message embeds all anchors anew
_FITS = 8_000  # trials, where every run is a fit
_PILOT = 24  # messages of each row of the pool
_RANDOM = 24  # rows of the pool that are random, and as many opposite ones
_BISECTIONS = 16  # nearer than that, single precision decides by how many rows are looked at together
_MANY = 256  # messages by which a border is found


def fit_release(release: Release) -> Release:
    """Return the release, or a clone that is fitted on the default rows where it is not fitted."""
    ready = release if hasattr(release, "mean_") else clone(release).fit(*draw_public_rows())
    if hasattr(ready, "index") and not hasattr(ready, "map_"):
        rows = draw_gallery()
        if rows.shape[1] != ready.n_features_in_:
            raise ValueError("the release must have a map: call index(gallery) or use_map(map) before an audit")
        ready.index(rows)
    return ready


def make_release_experiment(release: Release, source: Source | None = None) -> Experiment:
    """Return the experiment of a release of one row; `source` is for the pilot that looks for the worst pair."""
    ready: Any = fit_release(release)
    if isinstance(ready, PrivateMail) and ready.as_published is not None:
        return make_session_experiment(ready)
    is_mail = isinstance(ready, PrivateMail)
    pairs, log_ratio, exact, law = _describe_mail(ready) if is_mail else _describe(ready, source or secure_source())
    slow = isinstance(ready, DPdSNE) or not (is_mail or log_ratio)
    return Experiment(
        name=f"{ready.name} ({ready.noise})" if is_mail else ready.name,
        guarantee=ready.guarantee,
        pairs=pairs,
        run=lambda row, runs, rng: ready.release(np.tile(row, (runs, 1)), rng=rng),
        log_ratio=log_ratio,
        exact=exact,
        numbers=stack_messages,
        law=law,
        checks=(make_frozen_check(ready),),
        run_once=lambda coins, pair, rng: ready.release(np.where(coins[:, None], pair.first, pair.second), rng=rng),
        trials=_SLOW if slow else count_trials(ready.guarantee.delta if exact else 0.0),
    )


def _describe(release: Any, source: Source) -> _Described:
    if not hasattr(release, "log_density"):
        return _choose_blind_pairs(release), None, False, state_law(release)

    def log_ratio(messages: list[Message], pair: Pair) -> Floats:
        density = release.log_density(messages, np.stack([pair.first, pair.second]))
        return np.asarray(density[:, 0] - density[:, 1])

    return _find_pairs(release, source), log_ratio, isinstance(release, _EXACT), state_law(release)


def _describe_mail(mail: PrivateMail) -> _Described:
    """Describe PrivateMail made sound: where its row lies without noise is what a server computes anyway."""
    noise = mail.noises_[0]

    def place(row: Floats) -> Floats:
        return np.asarray(mail.embed_gallery(row[None], steps=0).gallery[0])

    def read(messages: list[Message]) -> Floats:
        return np.stack([message["released"][0] for message in messages])

    def log_ratio(messages: list[Message], pair: Pair) -> Floats:
        return compute_noise_ratio(noise, *(read(messages) - place(row) for row in (pair.first, pair.second)))

    if mail.n_private_steps > 1:
        return _find_mail_pairs(mail), None, False, Law()
    return _find_mail_pairs(mail), log_ratio, True, state_noise_law(noise, read, place)


def _take_opposites(mean: Floats, direction: Floats) -> Pair:
    """Return the two rows that lie in a direction from the public mean, and opposite to it."""
    unit = direction / np.linalg.norm(direction)
    return Pair("opposite unit vectors", mean + unit, mean - unit)


def _find_pairs(release: Any, source: Source) -> tuple[Pair, ...]:
    """Return opposite rows, those that a pilot finds farthest apart, and two sides of a border of cells."""
    rows = _make_pool(release)
    messages = release.release(np.repeat(rows, _PILOT, axis=0), rng=source)
    spread = np.cov(release.log_density(messages, rows), rowvar=False)
    apart = np.diag(spread)[:, None] + np.diag(spread)[None, :] - 2 * spread
    i, j = np.unravel_index(np.argmax(apart), apart.shape)
    across = _find_border(release, rows, source)
    return (
        _take_opposites(release.mean_, np.eye(release.n_features_in_)[0]),
        Pair("the rows that a pilot found farthest apart", rows[i], rows[j]),
        *(() if across is None else (across,)),
    )


def _make_pool(release: Any) -> Floats:
    """Return rows among which the worst pair is looked for: axes, random directions, all with their opposites."""
    mean = release.mean_
    generator = np.random.default_rng(2)
    directions = [np.eye(len(mean))[:64], generator.standard_normal((_RANDOM, len(mean)))]
    # Few large coordinates, and all of one size: codes of bits differ most between such.
    directions.append(np.sign(generator.standard_normal((_RANDOM, len(mean)))))
    if hasattr(release, "matrix_"):  # the direction that a public matrix stretches most
        directions.append(np.linalg.svd(release.matrix_, full_matrices=False)[0].T[:2])
    units = np.concatenate(directions)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    return np.asarray(mean + np.concatenate([units, -units]))


def _find_border(release: Any, rows: Floats, source: Source) -> Pair | None:
    """Return two rows next to each other on either side of a border between cells; None where there are no cells."""
    messages = release.release(np.repeat(rows[:8], _MANY // 8, axis=0), rng=source)
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
    # A density that is smooth hardly differs between two rows that are so near.
    return Pair("two sides of a border", first, second) if np.abs(left - right).max() > 1e-3 else None


def _choose_blind_pairs(release: Any) -> tuple[Pair, ...]:
    """Return opposite rows along the directions in which the public rows vary most."""
    rows = draw_public_rows()[0]
    if rows.shape[1] == release.n_features_in_:
        axes = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)[2]
    else:
        axes = np.eye(release.n_features_in_)
    return tuple(_take_opposites(release.mean_, axis) for axis in axes[:3])


def _find_mail_pairs(mail: PrivateMail) -> tuple[Pair, ...]:
    """Return the opposite rows that the query puts farthest apart, by a linear fit of where it puts random ones."""
    generator = np.random.default_rng(3)
    units = generator.standard_normal((600, mail.n_features_in_))
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    places = mail.embed_gallery(mail.mean_ + units, steps=0).gallery
    slope = np.linalg.lstsq(np.column_stack([units, np.ones(len(units))]), places, rcond=None)[0][:-1]
    signs = np.array(np.meshgrid(*[[1.0, -1.0]] * min(slope.shape[1], 3))).reshape(min(slope.shape[1], 3), -1)
    directions = np.column_stack([np.linalg.svd(slope)[0][:, :1], slope[:, : len(signs)] @ signs]).T
    order = 2 if mail.noise == "gaussian" else 1

    def measure_gap(pair: Pair) -> float:
        first, second = mail.embed_gallery(np.stack([pair.first, pair.second]), steps=0).gallery
        return float(np.linalg.norm(first - second, order))

    return (max((_take_opposites(mail.mean_, direction) for direction in directions), key=measure_gap),)


def make_session_experiment(mail: PrivateMail) -> Experiment:
    """Return the experiment of a published session: row or label is replaced, and a server sees which class is near."""
    width = mail.n_features_in_
    items = draw_gallery()
    items = items if width == items.shape[1] else np.random.default_rng(1).standard_normal((len(items), width))
    labels = np.arange(len(items)) % CLASSES
    server = mail.embed_gallery(items, labels)
    row, last = np.eye(width)[0], CLASSES - 1

    def run(record: tuple[Floats, int], runs: int, source: Source) -> list[Message]:
        found: list[Message] = mail.release(np.tile(record[0], (runs, 1)), labels=np.full(runs, record[1]), rng=source)
        return found

    def numbers(messages: list[Message]) -> NDArray[Any]:
        seen = []
        for message in messages:
            near = mail.rank_each(message, server)[0]
            by_class = np.bincount(labels, near) / np.bincount(labels)
            own = message["embedding"]
            # The target itself, and how near each class of the server's items it comes.
            seen.append(np.concatenate([own[0], own[0] - own[1:].mean(axis=0), by_class, by_class / -near.mean()]))
        return np.array(seen)

    return Experiment(
        name=f"{mail.name} (as published {mail.as_published})",
        guarantee=mail.guarantee,
        pairs=(
            Pair("one row, labels far apart", (mail.mean_ + row, 0), (mail.mean_ + row, last)),
            Pair("opposite unit vectors, one label", (mail.mean_ + row, 0), (mail.mean_ - row, 0)),
        ),
        run=run,
        numbers=numbers,
        trials=_SESSIONS,
    )


def make_projector_experiment(projector: PrivatePCA) -> Experiment:
    """Return the experiment of a private PCA: one record against one across it, in as few dimensions as possible."""
    own = clone(projector).set_params(mean=None)
    dimension = own.n_components + 1
    first, second = np.eye(dimension)[:1], np.eye(dimension)[-1:]

    def numbers(seen: Floats) -> Any:
        # A direction has no sign: what counts is how much of it lies along each record.
        columns = seen.reshape(len(seen), own.n_components, dimension)
        return (columns**2)[:, :, [0, -1]].reshape(len(seen), -1)

    return Experiment(
        name=f"private-pca ({own.method})",
        guarantee=clone(own).fit(first).guarantee,
        pairs=(Pair("a record, and one across it", first, second),),
        run=lambda rows, runs, rng: np.array([clone(own).fit(rows, rng=rng).components_.ravel() for _ in range(runs)]),
        numbers=numbers,
        trials=_FITS,
    )


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
        run_once=lambda coins, pair, source: add(np.where(coins[:, None], pair.first, pair.second), source),
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
    look = compute_gaussian_uniforms if gaussian else compute_laplace_uniforms
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
