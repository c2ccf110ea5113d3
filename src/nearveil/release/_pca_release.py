"""Queries projected on private principal directions: the directions' set is protected, the queries are not."""

import numpy as np
from numpy.typing import NDArray

from nearveil.privacy import Guarantee
from nearveil.privacy.noise import Source
from nearveil.release._base import Floats, Release
from nearveil.release._message import Message, MessageError
from nearveil.release._pca import PrivatePCA


class PrivatePCARelease(Release):
    """Send a query's projection on private principal directions, in the clear.

    The guarantee is that of the set which the directions were learned from. **The query is not protected**: at
    the same epsilon this promises something else than a release that hides its query.

    Parameters
    ----------
    projector : PrivatePCA
        Fitted; inside a ``sklearn.frozen.FrozenEstimator`` where this object is to be cloned.

    Examples
    --------
    >>> rows = np.random.default_rng(0).standard_normal((900, 16))
    >>> projector = PrivatePCA(1.0, n_components=4, mean=rows[:300].mean(axis=0)).fit(rows[300:600])
    >>> release = PrivatePCARelease(projector).fit(rows[:300])
    >>> release.release(rows[700])["vector"].shape
    (4,)
    >>> release.guarantee.protects
    'database'
    """

    name = "private-pca"

    def __init__(self, projector: PrivatePCA) -> None:
        self.projector = projector

    def _make_guarantee(self) -> Guarantee:
        """Return what a record of the projector's set is promised. Nothing is promised about the query."""
        promise: Guarantee = self.projector.guarantee
        return promise

    def _fit(self, features: Floats, labels: NDArray[np.int64] | None) -> None:
        del labels
        if not hasattr(self.projector, "components_"):
            raise ValueError("projector must be a PrivatePCA that has been fitted on its private set")
        if self.projector.components_.shape[1] != features.shape[1]:
            raise ValueError(f"projector must have been fitted on {features.shape[1]} columns, as public_X has")
        self.components_: Floats = self.projector.components_

    def _release(self, features: Floats, source: Source) -> list[Message]:
        return self._messages(source, vector=(features @ self.components_.T).astype(np.float32))

    def _prepare(self, features: Floats) -> Floats:
        return np.asarray(features @ self.components_.T, dtype=np.float64)

    def _rank(self, message: Message, prepared: Floats) -> Floats:
        vector = message["vector"]
        if vector.dtype != np.float32 or vector.shape != (prepared.shape[1],):
            raise MessageError(f"arrays: 'vector' must hold {prepared.shape[1]} floats of 32 bits")
        return np.asarray(prepared @ vector.astype(np.float64), dtype=np.float64)

    def _public_parts(self) -> tuple[object, ...]:
        return (self.components_,)
