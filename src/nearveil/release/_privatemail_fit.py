"""From parameters and public rows to what a PrivateMail does."""

from dataclasses import dataclass

import numpy as np

from nearveil.graph import Encoding
from nearveil.release._privatemail_common import Engine, Floats, Labels
from nearveil.release._privatemail_published import Recipe, Version
from nearveil.release._privatemail_sound import SoundEngine
from nearveil.release._privatemail_steps import Kind, calibrated, prepare, sensitivities
from nearveil.release._privatemail_unsound import PublishedEngine


@dataclass(frozen=True)
class Parameters:
    """The parameters of :class:`nearveil.release.PrivateMail`, checked one by one."""

    epsilon: float
    delta: float
    noise: Kind
    n_components: int
    bandwidth: float
    label_weight: float
    n_private_steps: int
    n_public_steps: int
    start_scale: float
    label_encoding: Encoding
    n_anchors: int | None
    public_seed: int
    as_published: Version | None
    allow_unsound: bool


def build(given: Parameters, features: Floats, labels: Labels | None) -> Engine:
    """Choose the anchors, then prepare the sound version or a published one."""
    anchors, labels = _anchors(given, features, labels)
    return _sound(given, anchors, labels) if given.as_published is None else _published(given, anchors, labels)


def _anchors(given: Parameters, features: Floats, labels: Labels | None) -> tuple[Floats, Labels | None]:
    """Return the rows that have a direction, or `n_anchors` of them by the public seed."""
    if labels is not None and (labels < -1).any():
        raise ValueError("public_y must hold labels from 0, or -1 for a row without")
    kept = np.flatnonzero(features.any(axis=1))
    if given.n_anchors is not None:
        if given.n_anchors > len(kept):
            raise ValueError(f"n_anchors must be at most the {len(kept)} public rows that differ from their mean")
        kept = np.sort(np.random.default_rng([given.public_seed, 2]).choice(kept, given.n_anchors, replace=False))
    if len(kept) <= given.n_components:
        raise ValueError(
            f"public_X must have more than n_components={given.n_components} rows that differ from their mean"
        )
    return features[kept], None if labels is None else labels[kept]


def _sound(given: Parameters, anchors: Floats, labels: Labels | None) -> Engine:
    generator = np.random.default_rng([given.public_seed, 0])
    public = prepare(
        anchors,
        labels,
        generator.normal(scale=given.start_scale, size=(len(anchors) + 1, given.n_components)),
        bandwidth=given.bandwidth,
        label_weight=given.label_weight,
        label_encoding=given.label_encoding,
        steps=given.n_private_steps,
    )
    delta = given.delta if given.noise == "gaussian" else 0.0
    noises = calibrated(given.noise, given.epsilon, delta, sensitivities(public, given.noise), given.n_components)
    return SoundEngine(public, noises, given.epsilon, delta, given.n_public_steps)


def _published(given: Parameters, anchors: Floats, labels: Labels | None) -> Engine:
    if labels is None or (labels < 0).any():
        raise ValueError("public_y must label every row, from 0, where as_published is set")
    assert given.as_published is not None
    recipe = Recipe(
        given.as_published,
        epsilon=given.epsilon,
        delta=given.delta,
        sigma=given.bandwidth,
        label_weight=given.label_weight,
        start_scale=given.start_scale,
        n_classes=int(labels.max()) + 1,
        private_steps=given.n_private_steps,
        public_steps=given.n_public_steps,
    )
    return PublishedEngine(recipe, anchors, labels, given.n_components, given.public_seed)
