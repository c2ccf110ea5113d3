"""Nearest neighbours with a privacy promise that you can check."""

from nearveil.manifold import SupervisedManifold

__version__ = "0.1.0"

__all__ = ["SupervisedManifold", "__version__"]
