"""PrivateMail: release a target's row of the supervised manifold learning query, with noise."""

from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Any, ClassVar, Self, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist
from sklearn.utils._param_validation import StrOptions

from nearveil.mechanisms.base import Release, check_labels, choose_source
from nearveil.mechanisms.messages import Floats, Message, MessageError
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_integer, check_numbers
from nearveil.privacy.noise import Source
from nearveil.privacy.parameters import COMPONENTS, DELTA, EPSILON, allow_integers, allow_reals, parameter
from nearveil.privatemail import engines
from nearveil.privatemail.graph.labels import Encoding
from nearveil.privatemail.manifold import umeyama
from nearveil.privatemail.published import EXPERIMENTS, Experiment, PublishedEngine, Version, find_engine


@dataclass(eq=False, repr=False)
class PrivateMail(Release):
    """Release the position of a target among public anchors, embedded by the supervised manifold learning query.

    Algorithm 1 of Vepakomma, Balla and Raskar (2022), made sound (``docs/theory/privatemail.md``, Theorems 1 to 3):

    1. `fit` embeds the public anchors and calibrates noise to the proved sensitivity of the target's row.
    2. `release` takes one step of the query for the target, adds the noise, and takes public steps on the result.
    3. `rank` embeds the server's gallery in the same way, aligns both embeddings on the anchors, and ranks by distance.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 64.
    delta : float, default=1e-5
        For Gaussian noise. With Laplace noise, delta is the cost of the sampler alone.
    noise : {"gaussian", "laplace"}, default="gaussian"
    n_components : int, default=2
        Columns of the embedding.
    bandwidth : float, default=6.0
        The s of the weights ``exp(-|x_i - x_j|^2 / (2 s^2))``.
    label_weight : float, default=0.6
        Strength of the repulsion between the anchors' labels, from the second step on (none with the defaults).
    n_private_steps : int, default=1
        Steps that use the target; `epsilon` covers all of them.
    n_public_steps : int, default=0
        Steps after the release, up to 100. They are post-processing and cost nothing.
    start_scale : float, default=1.0
        Standard deviation of the start. The noise scales with it, so it only affects public steps.
    label_encoding : {"integer", "one-hot"}, default="integer"
    n_anchors : int, optional
        Number of anchors, drawn from the public rows by `public_seed`. Default: all rows.
    public_seed : int, default=0
        Seed of the start and of that draw: public, equal on both sides, never used for noise.
    as_published : {"2022", "2021", "2022-code"}, optional
        Reproduce a paper or the authors' program; "2021" and "2022-code" need nearveil-studies. All are unsound: they
        take the target's label, and the gallery's. :meth:`published` sets their parameters.
    allow_unsound : bool, default=False
        Required for `as_published`.

    Attributes
    ----------
    noises_ : tuple of GaussianNoise or LaplaceNoise
        The noise of each private step; empty for `as_published`.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> mail = PrivateMail(epsilon=4.0).fit(X[:500], y[:500])
    >>> message = mail.release(X[600])
    >>> message["released"].shape
    (1, 2)
    >>> mail.rank(message, X[700:]).shape
    (1097,)
    """

    name: ClassVar[str] = "privatemail"

    epsilon: float = parameter(MISSING, EPSILON)
    _: KW_ONLY
    delta: float = parameter(1e-5, DELTA)
    noise: engines.Kind = parameter("gaussian", StrOptions({"gaussian", "laplace"}))
    n_components: int = parameter(2, COMPONENTS)
    bandwidth: float = parameter(6.0, allow_reals(0.06, 1e8))
    label_weight: float = parameter(0.6, allow_reals(0, 1e6))
    n_private_steps: int = parameter(1, allow_integers(1, 1000))
    n_public_steps: int = parameter(0, allow_integers(0, engines.MAX_STEPS))
    start_scale: float = parameter(1.0, allow_reals(1e-30, 1e30))
    label_encoding: Encoding = parameter("integer", StrOptions({"integer", "one-hot"}))
    n_anchors: int | None = parameter(None, allow_integers(2), None)
    public_seed: int = parameter(0, allow_integers(0))
    as_published: Version | None = parameter(None, StrOptions(set(get_args(Version))), None)
    allow_unsound: bool = parameter(False, "boolean")

    @classmethod
    def published(cls, version: Version, data: Experiment = "cars196", *, epsilon: float = 0.1, **changes: Any) -> Self:
        """Return a published version with the parameters of its experiments (Table 2 of the 2022 paper).

        The 2021 paper has no such table; its two private and two public iterations are from section 6.2.

        `data` is the column of the table; `changes` are other parameters, including `allow_unsound`.

        Examples
        --------
        >>> paper = PrivateMail.published("2022", "cub200", allow_unsound=True)
        >>> paper.bandwidth, paper.label_weight, paper.start_scale, paper.n_public_steps
        (5.0, 0.5, 1e-08, 5)
        """
        for name, value, choices in (("version", version, get_args(Version)), ("data", data, EXPERIMENTS)):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}")
        steps = {"n_private_steps": 2, "n_public_steps": 2} if version == "2021" else {"n_public_steps": 5}
        table = {"n_components": 2, "start_scale": 1e-8, "delta": 1e-5, **EXPERIMENTS[data], **steps}
        return cls(epsilon, **{**table, **changes, "as_published": version})

    def fit(self, public_X: ArrayLike, public_y: ArrayLike | None = None) -> Self:
        """Choose the anchors and calibrate the noise, from public data alone.

        Rows that equal the mean have no direction and are skipped. Labels count from 0; -1 means unlabelled.
        """
        self._validate_params()
        if self.as_published is not None and not self.allow_unsound:
            raise ValueError(
                f'as_published="{self.as_published}" has no guarantee: {find_engine(self.as_published).reason}. '
                "Set allow_unsound=True to run it anyway"
            )
        return super().fit(public_X, public_y)

    def with_dummies(self, rows: ArrayLike, labels: ArrayLike) -> Self:
        """Return a copy that hides each target among dummies, one of every class, drawn for each message.

        Dummies add nothing to the guarantee (``docs/theory/privatemail.md``). Use rows that the server does not hold,
        because it would recognise its own, and that need no protection: a message reveals as much about its dummies
        as about the target, without a charge.
        """
        features = self.features(rows, "rows")
        return self._with_attributes(_dummies=engines.Dummies(features, check_labels(labels, len(features), "labels")))

    def release(self, X: ArrayLike, *, rng: Source | None = None, labels: ArrayLike | None = None) -> Any:
        """Make a message from a private row, or one from each row of a batch; `labels` are for `as_published` only."""
        return self.release_with_position(X, rng=rng, labels=labels)[0]

    def release_with_position(
        self, X: ArrayLike, *, rng: Source | None = None, labels: ArrayLike | None = None
    ) -> tuple[Any, Any]:
        """Make messages like :meth:`release`, and return the position of the client's target in each.

        Positions are row numbers of :meth:`rank_each`. Never send them.
        """
        self._check_fitted()
        source = choose_source(rng)
        rows = check_numbers(X, "X")
        single = rows.ndim == 1
        features = self.features(rows[None] if single else rows)
        target_labels = None if labels is None else check_labels(np.atleast_1d(labels), len(features), "labels")
        batches, positions = self._engine.release(features, target_labels, self._dummies, source)
        messages = self._messages(source, **batches)
        return (messages[0], int(positions[0])) if single else (messages, positions)

    def continue_embedding(self, message: Message, steps: int) -> Message:
        """Take more public steps of a message. Anyone who fitted the same public rows can do this."""
        self._check_fitted()
        self._check_messages([message])
        more = check_integer(steps, "steps", 0, engines.MAX_STEPS)
        if self._engine.read(message)[2] + more > engines.MAX_STEPS:
            raise ValueError(f"steps must not take the message beyond {engines.MAX_STEPS} in all")
        return Message(self.name, message.public_id, self._engine.take_steps(message, more), message.seeded)

    def embed_gallery(
        self, gallery: ArrayLike, gallery_labels: ArrayLike | None = None, *, steps: int | None = None
    ) -> engines.GalleryEmbedding:
        """Embed the server's items with the anchors, once for many messages.

        `gallery_labels` are for `as_published` only; `steps` are those of the messages, by default `n_public_steps`.
        """
        features = self.features(gallery, "gallery", lenient=True)
        labels = None if gallery_labels is None else check_labels(gallery_labels, len(features), "gallery_labels")
        n_steps = self.n_public_steps if steps is None else check_integer(steps, "steps", 0, engines.MAX_STEPS)
        return self._engine.embed_gallery(features, labels, n_steps)

    def rank_each(
        self, message: Message, gallery: ArrayLike | engines.GalleryEmbedding, gallery_labels: ArrayLike | None = None
    ) -> Floats:
        """Score the server's items for every target of a message, shape (targets, n); `rank` takes the maximum.

        A score is minus the distance after Umeyama alignment on the anchors. The gallery is an array of rows (with
        labels for `as_published` only) or the result of :meth:`embed_gallery`.
        """
        self._check_fitted()
        self._check_messages([message])
        if not isinstance(gallery, engines.GalleryEmbedding):
            gallery = self.embed_gallery(gallery, gallery_labels, steps=self._engine.read(message)[2])
        return self._scores(message, gallery)

    def _make_guarantee(self) -> Guarantee:
        return self._engine.guarantee()

    def _fit(self, features: Floats, labels: engines.Labels | None) -> None:
        if labels is not None and (labels < -1).any():
            raise ValueError("public_y must hold labels from 0, or -1 for a row without label")
        anchors = engines.choose_anchors(features, self.n_anchors, self.public_seed)
        if len(anchors) <= self.n_components:
            raise ValueError(
                f"public_X must have more than n_components={self.n_components} rows that differ from their mean"
            )
        build = self._build_sound if self.as_published is None else self._build_published
        self._dummies: engines.Dummies | None = None
        self._engine = build(features[anchors], None if labels is None else labels[anchors])
        self.noises_ = self._engine.noises

    def _build_sound(self, anchors: Floats, labels: engines.Labels | None) -> engines.SoundEngine:
        generator = np.random.default_rng([self.public_seed, 0])
        start = generator.normal(scale=self.start_scale, size=(len(anchors) + 1, self.n_components))
        setting: Any = {name: getattr(self, name) for name in ("bandwidth", "label_weight", "label_encoding")}
        public = engines.prepare_anchors(anchors, labels, start, steps=self.n_private_steps, **setting)
        delta = self.delta if self.noise == "gaussian" else 0.0
        changes = engines.bound_sensitivities(public, self.noise)
        noises = engines.calibrate_steps(self.noise, self.epsilon, delta, changes, self.n_components)
        return engines.SoundEngine(public, noises, self.epsilon, delta, self.n_public_steps)

    def _build_published(self, anchors: Floats, labels: engines.Labels | None) -> PublishedEngine:
        if labels is None or (labels < 0).any():
            raise ValueError("public_y must label every row, from 0, if as_published is set")
        assert self.as_published is not None
        values, names = self.get_params(), [field.name for field in fields(PublishedEngine)]
        shared: Any = {name: values[name] for name in names if name in values}
        return find_engine(self.as_published)(sigma=self.bandwidth, anchors=anchors, labels=labels, **shared)

    def _public_parts(self) -> tuple[object, ...]:
        # The server depends neither on the noise nor, unless as published, on the client's public steps.
        return (
            *self._list_parameters("bandwidth", "label_weight", "start_scale"),
            *self._list_parameters("n_components", "n_private_steps", "public_seed", "n_anchors"),
            self.label_encoding,
            self.as_published and (self.as_published, int(self.n_public_steps)),
        )

    def _release(self, features: Floats, source: Source) -> list[Message]:
        raise NotImplementedError  # `release` also takes labels and returns positions

    def _prepare(self, features: Floats) -> tuple[Floats, engines.GalleryEmbedding]:
        return features, self._engine.embed_gallery(features, None, self.n_public_steps)

    def _rank(self, message: Message, prepared: tuple[Floats, engines.GalleryEmbedding]) -> Floats:
        features, embedded = prepared
        steps = self._engine.read(message)[2]
        if embedded.steps != steps:  # the message was continued
            embedded = self._engine.embed_gallery(features, None, steps)
        return np.asarray(self._scores(message, embedded).max(axis=0))

    def _scores(self, message: Message, server: engines.GalleryEmbedding) -> Floats:
        targets, anchors, steps = self._engine.read(message)
        if server.steps != steps:
            raise MessageError(f"message has taken {steps} public steps: embed the gallery with as many")
        if not np.array_equal(anchors, server.anchors):
            targets = umeyama(anchors, server.anchors).apply(targets)
        return np.asarray(-cdist(targets, server.gallery))
