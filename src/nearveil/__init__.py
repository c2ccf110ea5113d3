"""Nearest neighbours with a privacy promise that you can check."""

from nearveil.manifold import SupervisedManifold
from nearveil.votes import PrivateKNeighborsClassifier, PrivateKNeighborsRegressor

__version__ = "0.1.0"

__all__ = ["PrivateKNeighborsClassifier", "PrivateKNeighborsRegressor", "SupervisedManifold", "__version__"]
