"""Releases of a query: what is told about a row must not tell it from another."""

from typing import Any

import numpy as np
from sklearn.base import clone

from nearveil.audit._conduct import frozen_check
from nearveil.audit._defaults import Floats, gallery, public_set
from nearveil.audit._experiment import Coins, Experiment, Pair, trials_for
from nearveil.audit._law import Law
from nearveil.audit._noises import noise_law
from nearveil.audit._pairs import border, farthest, opposite, pool
from nearveil.audit._release_laws import message_numbers, release_law
from nearveil.audit.attacks._labels import published_session
from nearveil.mechanisms import (
    OME,
    AnalyticGaussian,
    Cells,
    Covers,
    DPdSNE,
    Latent,
    Message,
    PrivateMail,
    RandomProjection,
    Release,
    Unary,
)
from nearveil.privacy.noise import GaussianNoise, Source, secure_source

# Their log_density is the law of the very message, up to the last digits. That of the others is one of the point in
# the middle of a message's cells, which is a good score and no more.
_EXACT = (AnalyticGaussian, Cells, Covers, Latent, OME, RandomProjection, Unary)
_SLOW = 60_000  # trials, where a message takes a while


def fitted(release: Release) -> Release:
    """Return the release, or a clone that is fitted on the default rows where it is not fitted."""
    ready = release if hasattr(release, "mean_") else clone(release).fit(*public_set())
    if hasattr(ready, "index") and not hasattr(ready, "map_"):
        rows = gallery()
        if rows.shape[1] != ready.n_features_in_:
            raise ValueError("the release must have a map: call index(gallery) or use_map(map) before an audit")
        ready.index(rows)
    return ready


def release_experiment(release: Release, source: Source | None = None) -> Experiment:
    """Return the experiment of a release of one row.

    `source`: Of the pilot that looks for the worst pair.
    """
    ready = fitted(release)
    if isinstance(ready, PrivateMail):
        return published_session(ready) if ready.as_published is not None else _sound_mail(ready)
    known = hasattr(ready, "log_density")
    exact = isinstance(ready, _EXACT)
    return Experiment(
        name=ready.name,
        promise=ready.guarantee,
        pairs=_pairs(ready, source or secure_source()) if known else _blind_pairs(ready),
        run=lambda row, runs, words: ready.release(np.tile(row, (runs, 1)), rng=words),
        log_ratio=(lambda messages, pair: _log_ratio(ready, messages, pair)) if known else None,
        exact=exact,
        numbers=message_numbers,
        law=release_law(ready),
        checks=(frozen_check(ready),),
        together=lambda coins, pair, words: ready.release(_rows(coins, pair), rng=words),
        trials=_SLOW if isinstance(ready, DPdSNE) or not known else trials_for(ready.guarantee.delta if exact else 0.0),
    )


def _rows(coins: Coins, pair: Pair) -> Floats:
    return np.asarray(np.where(coins[:, None], pair.first, pair.second))


def _log_ratio(release: Any, messages: list[Message], pair: Pair) -> Floats:
    density = release.log_density(messages, np.stack([pair.first, pair.second]))
    return np.asarray(density[:, 0] - density[:, 1])


def _pairs(release: Any, source: Source) -> tuple[Pair, ...]:
    rows = pool(release)
    found = [opposite(release.mean_, np.eye(release.n_features_in_)[0]), farthest(release, rows, source)]
    across = border(release, rows, source)
    return tuple(found if across is None else [*found, across])


def _blind_pairs(release: Any) -> tuple[Pair, ...]:
    """Return opposite rows along the directions in which the public rows vary most."""
    rows = public_set()[0]
    if rows.shape[1] != release.n_features_in_:
        return tuple(opposite(release.mean_, axis) for axis in np.eye(release.n_features_in_)[:3])
    axes = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)[2]
    return tuple(opposite(release.mean_, axis) for axis in axes[:3])


def _sound_mail(mail: PrivateMail) -> Experiment:
    """Return the experiment of PrivateMail's own row: where it lies without noise is what a server computes anyway."""
    one_step = mail.n_private_steps == 1
    noise = mail.noises_[0]

    def place(row: Floats) -> Floats:
        return np.asarray(mail.embed_gallery(row[None], steps=0).gallery[0])

    def log_ratio(messages: list[Message], pair: Pair) -> Floats:
        released = np.stack([message["released"][0] for message in messages])
        off = [released - place(row) for row in (pair.first, pair.second)]
        if isinstance(noise, GaussianNoise):
            first, second = ((one**2).sum(axis=1) / (2 * noise.scale**2) for one in off)
        else:
            first, second = (np.abs(one).sum(axis=1) / noise.scale for one in off)
        return np.asarray(second - first)

    return Experiment(
        name=f"{mail.name} ({mail.noise})",
        promise=mail.guarantee,
        pairs=_mail_pairs(mail),
        run=lambda row, runs, words: mail.release(np.tile(row, (runs, 1)), rng=words),
        log_ratio=log_ratio if one_step else None,
        exact=one_step,
        numbers=message_numbers,
        law=noise_law(noise, lambda messages: np.stack([one["released"][0] for one in messages]), place)
        if one_step
        else Law(),
        checks=(frozen_check(mail),),
        together=lambda coins, pair, words: mail.release(_rows(coins, pair), rng=words),
        trials=trials_for(mail.guarantee.delta if one_step else 0.0),
    )


def _mail_pairs(mail: PrivateMail) -> tuple[Pair, ...]:
    """Return the opposite rows that the query puts farthest apart, by a linear fit of where it puts random ones."""
    generator = np.random.default_rng(3)
    units = generator.standard_normal((600, mail.n_features_in_))
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    places = mail.embed_gallery(mail.mean_ + units, steps=0).gallery
    slope = np.linalg.lstsq(np.column_stack([units, np.ones(len(units))]), places, rcond=None)[0][:-1]
    signs = np.array(np.meshgrid(*[[1.0, -1.0]] * min(slope.shape[1], 3))).reshape(min(slope.shape[1], 3), -1)
    directions = np.column_stack([np.linalg.svd(slope)[0][:, :1], slope[:, : len(signs)] @ signs]).T
    pairs = [opposite(mail.mean_, direction) for direction in directions]
    order = 2 if mail.noise == "gaussian" else 1
    apart = [
        float(np.linalg.norm(np.subtract(*mail.embed_gallery(np.stack([p.first, p.second]), steps=0).gallery), order))
        for p in pairs
    ]
    return (pairs[int(np.argmax(apart))],)
