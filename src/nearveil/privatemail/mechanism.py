"""PrivateMail: a target's row of the supervised manifold learning query, with noise."""

import copy
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils._param_validation import Interval, StrOptions

from nearveil.mechanisms.base import Floats, Message, MessageError, Release, check_labels, check_source
from nearveil.privacy import Guarantee
from nearveil.privacy.checks import check_integer, check_numbers
from nearveil.privacy.noise import LARGEST_EPSILON, Source, secure_source
from nearveil.privatemail.engines import (
    EXPERIMENTS,
    MOST_STEPS,
    REASONS,
    Dummies,
    Experiment,
    GalleryEmbedding,
    Kind,
    Labels,
    PublishedEngine,
    Recipe,
    SoundEngine,
    Version,
    bound_sensitivities,
    calibrate_steps,
    choose_anchors,
    measure_aligned_distances,
    prepare_anchors,
)
from nearveil.privatemail.graph.labels import Encoding


@dataclass(eq=False, repr=False)
class PrivateMail(Release):
    """Release where the supervised manifold learning query puts a target among public anchors.

    The target's row of one step of the query, from a public start, plus the noise that its proved sensitivity needs;
    after that, steps that use the release and public labels alone. The server embeds its gallery alike and ranks by
    distance. The method of Vepakomma, Balla and Raskar (2021, 2022), made sound: ``docs/theory/privatemail.md``.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 64.
    delta : float, default=1e-5
        For Gaussian noise; Laplace noise has none, but for what its sampler costs.
    noise : {"gaussian", "laplace"}, default="gaussian"
    n_components : int, default=2
        Columns of the embedding.
    bandwidth : float, default=6.0
        The s of the weights ``exp(-|x_i - x_j|^2 / (2 s^2))``.
    label_weight : float, default=0.6
        How strongly the anchors' labels repel, from the second step on: with the defaults there is none.
    n_private_steps : int, default=1
        Steps that look at the target, all paid for by `epsilon`.
    n_public_steps : int, default=0
        Steps after the release, up to 100. They cost nothing and tell nothing new.
    start_scale : float, default=1.0
        Standard deviation of the start. Noise grows with it, so it changes public steps alone.
    label_encoding : {"integer", "one-hot"}, default="integer"
    n_anchors : int, optional
        How many public rows, drawn by `public_seed`, are anchors; all unless given.
    public_seed : int, default=0
        Of the start and of that draw: public, the same on both sides, no source of noise.
    as_published : {"2022", "2021", "2022-code"}, optional
        Do what a paper or the authors' program does instead. All are unsound: `release` then takes the target's
        label, and the server needs the labels of its gallery. :meth:`published` has their parameters.
    allow_unsound : bool, default=False
        Must be set for `as_published`.

    Attributes
    ----------
    noises_ : tuple of GaussianNoise or LaplaceNoise
        Of each private step; empty for `as_published`.

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

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "epsilon": [Interval(Real, 1e-6, LARGEST_EPSILON, closed="both")],
        "delta": [Interval(Real, 1e-18, 0.999, closed="both")],
        "noise": [StrOptions({"gaussian", "laplace"})],
        "n_components": [Interval(Integral, 1, 4096, closed="both")],
        "bandwidth": [Interval(Real, 0.06, 1e8, closed="both")],
        "label_weight": [Interval(Real, 0, 1e6, closed="both")],
        "n_private_steps": [Interval(Integral, 1, 1000, closed="both")],
        "n_public_steps": [Interval(Integral, 0, MOST_STEPS, closed="both")],
        "start_scale": [Interval(Real, 1e-30, 1e30, closed="both")],
        "label_encoding": [StrOptions({"integer", "one-hot"})],
        "n_anchors": [Interval(Integral, 2, None, closed="left"), None],
        "public_seed": [Interval(Integral, 0, None, closed="left")],
        "as_published": [StrOptions({"2022", "2021", "2022-code"}), None],
        "allow_unsound": ["boolean"],
    }

    epsilon: float
    _: KW_ONLY
    delta: float = 1e-5
    noise: Kind = "gaussian"
    n_components: int = 2
    bandwidth: float = 6.0
    label_weight: float = 0.6
    n_private_steps: int = 1
    n_public_steps: int = 0
    start_scale: float = 1.0
    label_encoding: Encoding = "integer"
    n_anchors: int | None = None
    public_seed: int = 0
    as_published: Version | None = None
    allow_unsound: bool = False

    @classmethod
    def published(cls, version: Version, data: Experiment = "cars196", *, epsilon: float = 0.1, **changes: Any) -> Self:
        """Return a published version with the parameters of its experiments: Table 2 of the 2022 paper.

        The 2021 paper has no such table; its two private and two further iterations are from its section 6.2.

        Parameters
        ----------
        version : {"2022", "2021", "2022-code"}
        data : {"cars196", "cub200", "cifar100"}, default="cars196"
            Whose column of the table.
        epsilon : float, default=0.1
        **changes
            Other parameters of the constructor. `allow_unsound` must be among them.

        Examples
        --------
        >>> paper = PrivateMail.published("2022", "cub200", allow_unsound=True)
        >>> paper.bandwidth, paper.label_weight, paper.start_scale, paper.n_public_steps
        (5.0, 0.5, 1e-08, 5)
        """
        for name, value, known in (("version", version, REASONS), ("data", data, EXPERIMENTS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}")
        steps = {"n_private_steps": 2, "n_public_steps": 2} if version == "2021" else {"n_public_steps": 5}
        table = {"n_components": 2, "start_scale": 1e-8, "delta": 1e-5, **EXPERIMENTS[data], **steps}
        return cls(epsilon, **{**table, **changes, "as_published": version})

    def fit(self, public_X: ArrayLike, public_y: ArrayLike | None = None) -> Self:
        """Choose the anchors and compute the noise, from public things alone.

        Rows that equal their mean have no direction and are left out. Labels count from 0; -1 means unlabelled.
        """
        self._validate_params()
        if self.as_published is not None and not self.allow_unsound:
            raise ValueError(
                f'as_published="{self.as_published}" has no guarantee: {REASONS[self.as_published]}. '
                "Set allow_unsound=True to run it all the same"
            )
        return super().fit(public_X, public_y)

    def with_dummies(self, rows: ArrayLike, labels: ArrayLike) -> Self:
        """Return a copy that hides each target among dummies, one of every class, drawn for each message.

        They add nothing to the guarantee (``docs/theory/privatemail.md``). Take rows that the server does not hold,
        since it would recognise its own, and that nobody needs to protect: each message tells as much about its
        dummies as about the target, and nobody is charged for that.
        """
        features = self.features(rows, "rows")
        client = copy.copy(self)
        client._store(_dummies=Dummies(features, check_labels(labels, len(features), "labels")))
        return client

    def release(self, X: ArrayLike, *, rng: Source | None = None, labels: ArrayLike | None = None) -> Any:
        """Make a message of a private row, or one of each row of a batch; `labels` are for `as_published` alone."""
        return self.release_with_position(X, rng=rng, labels=labels)[0]

    def release_with_position(
        self, X: ArrayLike, *, rng: Source | None = None, labels: ArrayLike | None = None
    ) -> tuple[Any, Any]:
        """Make messages as :meth:`release` does, and return which of a message's targets is the client's own.

        The positions are rows of :meth:`rank_each`. Never send them.
        """
        fitted = self._snapshot()
        source = secure_source() if rng is None else check_source(rng)
        rows = check_numbers(X, "X")
        single = rows.ndim == 1
        features = fitted.features(rows[None] if single else rows)
        own = None if labels is None else check_labels(np.atleast_1d(labels), len(features), "labels")
        messages, positions = fitted._make(features, own, source)
        return (messages[0], int(positions[0])) if single else (messages, positions)

    def continue_embedding(self, message: Message, steps: int) -> Message:
        """Take further public steps of a message; whoever fitted the same public rows can do so."""
        self._check_fitted()
        self._check_messages([message])
        further = check_integer(steps, "steps", 0, MOST_STEPS)
        if self._engine.read(message)[2] + further > MOST_STEPS:
            raise ValueError(f"steps must not take the message beyond {MOST_STEPS} in all")
        return Message(self.name, message.public_id, self._engine.take_steps(message, further), message.seeded)

    def embed_gallery(
        self, gallery: ArrayLike, gallery_labels: ArrayLike | None = None, *, steps: int | None = None
    ) -> GalleryEmbedding:
        """Embed the server's items with the anchors, once for many messages.

        Parameters
        ----------
        gallery : array-like of shape (n, d)
        gallery_labels : array-like of shape (n,), optional
            For `as_published` alone.
        steps : int, optional
            Public steps of the messages to come; `n_public_steps` unless given.
        """
        features = self.features(gallery, "gallery", lenient=True)
        labels = None if gallery_labels is None else check_labels(gallery_labels, len(features), "gallery_labels")
        taken = self.n_public_steps if steps is None else check_integer(steps, "steps", 0, MOST_STEPS)
        return self._engine.embed_gallery(features, labels, taken)

    def rank_each(
        self, message: Message, gallery: ArrayLike | GalleryEmbedding, gallery_labels: ArrayLike | None = None
    ) -> Floats:
        """Score the server's items for every target of a message, shape (targets, n); `rank` takes the best of them.

        A score is minus the distance after Umeyama alignment on the anchors. The gallery is rows, with labels for
        `as_published` alone, or what :meth:`embed_gallery` made of them.
        """
        self._check_fitted()
        self._check_messages([message])
        if not isinstance(gallery, GalleryEmbedding):
            gallery = self.embed_gallery(gallery, gallery_labels, steps=self._engine.read(message)[2])
        return self._scores(message, gallery)

    def answer_bytes(self, n: int) -> int:
        """Return the size of an answer that holds `n` candidates for each target, dummies included."""
        self._check_fitted()
        size = super().answer_bytes(n)
        if self._dummies is None:
            return size
        # As published, no dummy has the target's own class.
        return size * (len(np.unique(self._dummies.labels)) + (self.as_published is None))

    def _make_guarantee(self) -> Guarantee:
        return self._engine.guarantee()

    def _fit(self, features: Floats, labels: Labels | None) -> None:
        if labels is not None and (labels < -1).any():
            raise ValueError("public_y must hold labels from 0, or -1 for a row without")
        kept = choose_anchors(features, self.n_anchors, self.public_seed)
        if len(kept) <= self.n_components:
            raise ValueError(
                f"public_X must have more than n_components={self.n_components} rows that differ from their mean"
            )
        build = self._build_sound if self.as_published is None else self._build_published
        self._dummies: Dummies | None = None
        self._engine = build(features[kept], None if labels is None else labels[kept])
        self.noises_ = self._engine.noises

    def _build_sound(self, anchors: Floats, labels: Labels | None) -> SoundEngine:
        generator = np.random.default_rng([self.public_seed, 0])
        public = prepare_anchors(
            anchors,
            labels,
            generator.normal(scale=self.start_scale, size=(len(anchors) + 1, self.n_components)),
            bandwidth=self.bandwidth,
            label_weight=self.label_weight,
            label_encoding=self.label_encoding,
            steps=self.n_private_steps,
        )
        delta = self.delta if self.noise == "gaussian" else 0.0
        noises = calibrate_steps(
            self.noise, self.epsilon, delta, bound_sensitivities(public, self.noise), self.n_components
        )
        return SoundEngine(public, noises, self.epsilon, delta, self.n_public_steps)

    def _build_published(self, anchors: Floats, labels: Labels | None) -> PublishedEngine:
        if labels is None or (labels < 0).any():
            raise ValueError("public_y must label every row, from 0, where as_published is set")
        assert self.as_published is not None
        recipe = Recipe(
            self.as_published,
            epsilon=self.epsilon,
            delta=self.delta,
            sigma=self.bandwidth,
            label_weight=self.label_weight,
            start_scale=self.start_scale,
            n_classes=int(labels.max()) + 1,
            private_steps=self.n_private_steps,
            public_steps=self.n_public_steps,
        )
        return PublishedEngine(recipe, anchors, labels, self.n_components, self.public_seed)

    def _public_parts(self) -> tuple[object, ...]:
        # How much noise there is changes nothing for the server, nor, but as published, how many steps the client took.
        return (
            *(float(number) for number in (self.bandwidth, self.label_weight, self.start_scale)),
            *(int(number) for number in (self.n_components, self.n_private_steps, self.public_seed)),
            None if self.n_anchors is None else int(self.n_anchors),
            self.label_encoding,
            self.as_published and (self.as_published, int(self.n_public_steps)),
        )

    def _make(self, features: Floats, labels: NDArray[np.int64] | None, source: Source) -> tuple[list[Message], Any]:
        found, positions = self._engine.release(features, labels, self._dummies, source)
        public_id, seeded = self.public_id, not source.sound
        return [Message(self.name, public_id, arrays, seeded) for arrays in found], positions

    def _release(self, features: Floats, source: Source) -> list[Message]:
        return self._make(features, None, source)[0]

    def _prepare(self, features: Floats) -> tuple[Floats, GalleryEmbedding]:
        return features, self._engine.embed_gallery(features, None, self.n_public_steps)

    def _rank(self, message: Message, prepared: tuple[Floats, GalleryEmbedding]) -> Floats:
        features, embedded = prepared
        steps = self._engine.read(message)[2]
        if embedded.steps != steps:  # somebody continued the message
            embedded = self._engine.embed_gallery(features, None, steps)
        scores: Floats = self._scores(message, embedded).max(axis=0)
        return scores

    def _scores(self, message: Message, server: GalleryEmbedding) -> Floats:
        targets, anchors, steps = self._engine.read(message)
        if server.steps != steps:
            raise MessageError(f"message has taken {steps} public steps: embed the gallery with as many")
        return -measure_aligned_distances(targets, anchors, server)
