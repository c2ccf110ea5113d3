"""Metric privacy on the sphere: von Mises-Fisher noise, the nearer two rows the better hidden."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.privacy import Basis, Guarantee
from nearveil.privacy.events import PureDp
from nearveil.privacy.noise import Source
from nearveil.privacy.noise._samplers import gaussian_integers, look_up
from nearveil.release._analytic import LINK
from nearveil.release._base import Floats, Release
from nearveil.release._fisher_channel import BLUR, FINE_BITS, GAUSS_BITS, FisherChannel, calibrate, pieces
from nearveil.release._message import Message, MessageError
from nearveil.release._privunit_channel import CELL
from nearveil.release._privunit_sampler import in_cells
from nearveil.release._projection import fit_projection

_CHUNK = 1 << 17  # coordinates at a time


class VonMisesFisher(Release):
    """Tell a direction by a random one around it, of density ``exp(kappa <g, x>)`` (Weggenmann and Kerschbaum 2021).

    Two rows at a Euclidean distance r are told apart by a factor of at most ``exp(kappa r)``: metric privacy, with
    `metric_epsilon` = kappa for each unit of distance. On the sphere r is at most 2, so it is also a pure local
    promise of epsilon = 2 kappa, which is what `epsilon` and the guarantee state. At equal epsilon PrivUnit hides
    all pairs of rows alike and tells far more; this one hides near rows better.

    The message is the direction times sqrt(D), in cells of 1/8, one byte a coordinate. No draw is rejected; what the
    arithmetic costs is taken off epsilon beforehand.

    Parameters
    ----------
    epsilon : float
        From 0.01 to 64: for the whole sphere.
    projection : None, "pca", "random", "manifold", array-like or fitted transformer, default=None
        A public map to fewer dimensions, as for :class:`~nearveil.release.PrivUnit`. Distances of the
        metric promise are those after it.
    n_components : int, optional
        For "pca", "random" and "manifold"; 64 by default, or as many as there can be.
    projection_seed : int, default=0
        Public.

    Attributes
    ----------
    channel_ : FisherChannel
    projection_ : Projection

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((200, 32))
    >>> release = VonMisesFisher(8.0).fit(rows[:100])
    >>> f"{release.guarantee.epsilon}, {release.metric_epsilon:.3f} for each unit of distance"
    '8.0, 4.000 for each unit of distance'
    >>> release.release(rows[100])["vector"].dtype
    dtype('int8')
    """

    name = "von-mises-fisher"

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
        """For any two rows (Theorem 4 of docs/theory/baselines.md)."""
        return Guarantee(
            epsilon=self.channel_.epsilon,
            delta=self.channel_.extra_delta,
            protects="query",
            unit="record",
            relation="replace",
            basis=Basis("von Mises-Fisher: metric privacy, at the largest distance", LINK),
            events=(PureDp(self.channel_.epsilon),),
            extra_delta=self.channel_.extra_delta,
        )

    @property
    def metric_epsilon(self) -> float:
        """Epsilon for each unit of Euclidean distance between two rows of norm one; `metric_slack` comes on top."""
        self._check_fitted()
        return self.channel_.kappa

    @property
    def metric_slack(self) -> float:
        """What the arithmetic adds to epsilon at every distance, be it ever so small."""
        self._check_fitted()
        return self.channel_.cost

    def log_density(self, messages: Message | Sequence[Message], X: ArrayLike) -> Floats:
        """Return the log-density of messages for each row that may have caused them, up to a constant.

        The blur and the cells are left out: that touches an attack's quality alone.

        Parameters
        ----------
        messages : Message or sequence of Message
        X : array-like of shape (n_rows, d)

        Returns
        -------
        ndarray of shape (n_messages, n_rows)
        """
        given = [messages] if isinstance(messages, Message) else list(messages)
        rows = self.projection_(self.features(X))
        vectors = np.array([self._vector(message) for message in given]).reshape(-1, rows.shape[1])
        return np.asarray(self.channel_.kappa / np.sqrt(self.channel_.dimension) * vectors @ rows.T)

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        projection = fit_projection(
            self.projection, features, labels, n_components=self.n_components, seed=self.projection_seed
        )
        self.channel_: FisherChannel = calibrate(self.epsilon, projection.n_components)
        self.projection_ = projection

    def _release(self, features: Floats, source: Source) -> list[Message]:
        rows = self.projection_(features)
        step = max(1, _CHUNK // self.channel_.dimension)
        cells = [in_cells(draw(self.channel_, rows[i : i + step], source)) for i in range(0, len(rows), step)]
        return self._messages(source, vector=np.concatenate(cells))

    def _prepare(self, features: Floats) -> Floats:
        return self.projection_(features)

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        return np.asarray(prepared @ self._vector(message))

    def _vector(self, message: Message) -> Floats:
        self._check_message(message)
        cells, size = message["vector"], self.projection_.n_components
        if cells.dtype != np.int8 or cells.shape != (size,):
            raise MessageError(f"arrays: 'vector' must hold {size} integers of 8 bits")
        return cells * CELL

    def _public_parts(self) -> tuple[object, ...]:
        return self.projection_.n_components, self.projection_.public_id


def draw(channel: FisherChannel, rows: Floats, source: Source) -> NDArray[np.int64]:
    """Draw a direction around each row, times sqrt(D), with the blur that hides what doubles do.

    `rows`: Of norm one.
    Returns: On the grid of 2^-36. Coordinates that rows were padded with are not told.
    """
    n, d = rows.shape
    axes = np.zeros((n, channel.dimension))
    axes[:, :d] = rows
    along = heights(channel, n, source)[:, None]
    plain = gaussian_integers(Fraction(1 << GAUSS_BITS), axes.size, source).reshape(axes.shape) * 2.0**-GAUSS_BITS
    across = plain - np.einsum("ij,ij->i", plain, axes)[:, None] * axes
    across /= np.sqrt(np.einsum("ij,ij->i", across, across))[:, None]
    found = (np.tanh(along) * axes + across / np.cosh(along)) * np.sqrt(channel.dimension)
    blur = gaussian_integers(Fraction(int(BLUR * 2**FINE_BITS)), axes.size, source).reshape(axes.shape)
    return np.asarray((np.rint(found * 2.0**FINE_BITS).astype(np.int64) + blur)[:, :d])


def heights(channel: FisherChannel, count: int, source: Source) -> Floats:
    """Draw heights s, ``<g, x> = tanh s``: a piece from the table, then a place in it by inversion."""
    table, rises = pieces(channel)
    chosen = look_up(table, source.words(count), source)
    uniform = ((source.words(count) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    rise = rises[chosen]
    places = np.log1p(uniform * np.expm1(rise)) / rise
    return np.asarray(channel.step * (chosen + places) - channel.reach)
