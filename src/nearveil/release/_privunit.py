"""PrivUnit: a unit vector, told by a Gaussian vector that lies in its cap somewhat more often than chance."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source
from nearveil.release._base import Floats, Release
from nearveil.release._message import Message, MessageError
from nearveil.release._privunit_channel import CELL, Channel, calibrate
from nearveil.release._privunit_sampler import draw
from nearveil.release._projection import fit_projection

_FORMAT = 1  # of the vector in a message


class PrivUnit(Release):
    """Tell the direction of a private row by a Gaussian vector (Bhowmick et al. 2018, Asi et al. 2022).

    A Gaussian vector g is drawn from the cap ``<g, x> >= t`` with probability p and from the rest of space
    otherwise. Where the cap holds q of all Gaussian vectors, ``p/(1-p) (1-q)/q = e^epsilon``, and t is where
    the signal is largest. The mean of g along x, in units of the noise along any other direction, is 0.397
    at epsilon 1, 0.786 at 2, 1.516 at 4 and 2.743 at 8, in every dimension.

    The message is g rounded to 1/8, one byte a coordinate. The sampler rejects nothing, and what its arithmetic
    costs is taken off epsilon beforehand: ``docs/theory/privunit.md``.

    Parameters
    ----------
    epsilon : float
        From 1e-3 to 64.
    projection : None, "pca", "random", "manifold", array-like or fitted transformer, default=None
        A public map to fewer dimensions, after which rows are brought to norm one again. None keeps all
        dimensions. "pca", "random" (orthonormal directions) and "manifold" (a
        :class:`~nearveil.manifold.SupervisedManifold`) are made in `fit`, of public rows. A matrix has
        shape (d, n_components). A transformer must be fitted and map each row by itself.
    n_components : int, optional
        For "pca", "random" and "manifold"; 64 by default, or as many as there can be.
    projection_seed : int, default=0
        For "random" and "manifold". Public: the server needs it too.

    Attributes
    ----------
    channel_ : Channel
        The law of a message; its ``signal`` is what the server gets.
    projection_ : Projection

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((500, 32))
    >>> client = PrivUnit(4.0, projection="pca", n_components=8).fit(rows[:100])
    >>> message = client.release(rows[100])
    >>> message["vector"].shape
    (8,)
    >>> server = PrivUnit(4.0, projection="pca", n_components=8).fit(rows[:100])
    >>> server.rank(message, rows[101:]).shape
    (399,)
    >>> print(client.guarantee)
    Whoever sees the message comes to any conclusion about which record was asked for with at most 55 times the
    probability that it would have otherwise, plus 6.4e-30.
    """

    name = "privunit"

    def __init__(
        self,
        epsilon: float,
        *,
        projection: Any = None,
        n_components: int | None = None,
        projection_seed: int = 0,
    ) -> None:
        self.epsilon = epsilon
        self.projection = projection
        self.n_components = n_components
        self.projection_seed = projection_seed

    def _make_guarantee(self) -> Guarantee:
        """Theorem 5 of docs/theory/privunit.md."""
        return Guarantee(
            epsilon=self.channel_.epsilon,
            delta=self.channel_.extra_delta,
            protects="query",
            unit="record",
            relation="replace",
            basis=Basis("PrivUnit", "docs/theory/privunit.md"),
            events=(PureDp(self.channel_.epsilon),),
            extra_delta=self.channel_.extra_delta,
        )

    def log_density(self, messages: Message | Sequence[Message], X: ArrayLike) -> Floats:
        """Return the log-density of messages, for each row that may have caused them.

        By the middle of a message's cells; that they are cells is counted as noise. The difference
        between two rows is the evidence that a message holds for one against the other.

        Parameters
        ----------
        messages : Message or sequence of Message
        X : array-like of shape (n_rows, d)

        Returns
        -------
        ndarray of shape (n_messages, n_rows)

        Examples
        --------
        >>> rows = np.random.default_rng(0).standard_normal((50, 4))
        >>> release = PrivUnit(2.0).fit(rows)
        >>> density = release.log_density(release.release(rows[:5]), rows)
        >>> density.shape, bool(np.ptp(density, axis=1).max() <= 2.0)
        ((5, 50), True)
        """
        self._check_fitted()
        given = [messages] if isinstance(messages, Message) else list(messages)
        vectors = np.array([self._vector(message) for message in given]).reshape(-1, self.channel_.dimension)
        candidates = self.projection_(self.features(X))
        squares = np.einsum("ij,ij->i", vectors, vectors)
        return self.channel_.log_density(vectors @ candidates.T, squares[:, None])

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        projection = fit_projection(
            self.projection, features, labels, n_components=self.n_components, seed=self.projection_seed
        )
        self.channel_: Channel = calibrate(self.epsilon, projection.n_components)
        self.projection_ = projection

    def _release(self, features: Floats, source: Source) -> list[Message]:
        cells = draw(self.channel_, self.projection_(features), source)
        public_id = self.public_id
        return [Message(self.name, public_id, {"vector": row}, seeded=not source.sound) for row in cells]

    def _prepare(self, features: Floats) -> Floats:
        return self.projection_(features)

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        return np.asarray(prepared @ self._vector(message))

    def _vector(self, message: Message) -> Floats:
        """Return the middle of a message's cells."""
        self._check_message(message)
        cells = message["vector"]
        if cells.dtype != np.int8 or cells.shape != (self.channel_.dimension,):
            raise MessageError(f"arrays: 'vector' must hold {self.channel_.dimension} integers of 8 bits")
        return cells * CELL

    def _public_parts(self) -> tuple[object, ...]:
        return _FORMAT, self.channel_.epsilon, self.projection_.n_components, self.projection_.public_id
