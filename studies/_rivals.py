"""All releases that protect a query, each with the settings that the studies compare."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nearveil.mechanisms import (
    OME,
    AnalyticGaussian,
    Cells,
    Covers,
    DPdSNE,
    Latent,
    PrivateMail,
    PrivUnit,
    RandomProjection,
    Release,
    Unary,
    VonMisesFisher,
)
from nearveil.mechanisms.projection import fit_projection

Matrix = NDArray[np.float64]
Make = Callable[[float, float, "Public"], Release]

SETTINGS = {
    "covers": "learned for every epsilon and f",
    "k-means cells": "1/f cells, randomised response",
    "balanced cells, subset": "4/f cells, subset selection",
    "unary, symmetric": "64 cells of the public rows",
    "unary, optimised": "64 cells of the public rows",
    "PrivUnit": "PCA to 64",
    "PrivUnit, all dimensions": "1280",
    "LATENT": "signs, PCA to 8",
    "OME": "11 bits, alpha 1, PCA to 8",
    "analytic Gaussian": "PCA to 64, delta 1e-5",
    "random projection": "64 directions, delta 1e-5",
    "von Mises-Fisher": "PCA to 64",
    "PrivateMail, Gaussian": "k 16, 1,000 anchors, delta 1e-5",
    "PrivateMail, Laplace": "k 2, 1,000 anchors",
    "DP-dSNE": "300 anchors, delta 1e-5",
}
MAPPED = ("covers", "k-means cells", "balanced cells, subset")  # their sets are made for one size of an answer


class Public:
    """Public rows, whose principal directions are computed once for all mechanisms that use them."""

    def __init__(self, rows: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
        self.rows = rows
        self.labels = labels

    def directions(self, n_components: int) -> Matrix:
        """Return the principal directions of the centred rows, shape (d, n_components)."""
        return self._directions[:, :n_components]

    @cached_property
    def _directions(self) -> Matrix:
        features = Cells(1.0).fit(self.rows).features(self.rows, lenient=True)
        matrix = fit_projection("pca", features, None).matrix
        assert matrix is not None
        return matrix


_MAKE: dict[str, Make] = {
    "covers": lambda e, f, _: Covers(e, f),
    "k-means cells": lambda e, f, _: Cells(e, f),
    "balanced cells, subset": lambda e, f, _: Cells(e, f, response="subset"),
    "unary, symmetric": lambda e, _, __: Unary(e, "symmetric"),
    "unary, optimised": lambda e, _, __: Unary(e, "optimised"),
    "PrivUnit": lambda e, _, public: PrivUnit(e, projection=public.directions(64)),
    "PrivUnit, all dimensions": lambda e, _, __: PrivUnit(e),
    "LATENT": lambda e, _, public: Latent(e, projection=public.directions(8)),
    "OME": lambda e, _, public: OME(e, pairs="code words", projection=public.directions(8)),
    "analytic Gaussian": lambda e, _, public: AnalyticGaussian(e, projection=public.directions(64)),
    "random projection": lambda e, _, __: RandomProjection(e),
    "von Mises-Fisher": lambda e, _, public: VonMisesFisher(e, projection=public.directions(64)),
    "PrivateMail, Gaussian": lambda e, _, __: PrivateMail(e, n_components=16, n_anchors=1000),
    "PrivateMail, Laplace": lambda e, _, __: PrivateMail(e, noise="laplace", n_anchors=1000),
    "DP-dSNE": lambda e, _, __: DPdSNE(e, n_anchors=300),
}


def make_rival(name: str, epsilon: float, fraction: float, public: Public) -> Release:
    """Return a mechanism of `SETTINGS`, fitted on public rows, without a gallery."""
    return _MAKE[name](epsilon, fraction, public).fit(public.rows, public.labels)
