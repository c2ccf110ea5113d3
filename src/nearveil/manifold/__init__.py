"""The supervised manifold learning query, its out-of-sample map, and Umeyama alignment."""

from nearveil.manifold._supervised import SupervisedManifold, smlq_step
from nearveil.manifold._umeyama import SimilarityTransform, umeyama

__all__ = ["SimilarityTransform", "SupervisedManifold", "smlq_step", "umeyama"]
