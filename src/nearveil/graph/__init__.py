"""Gaussian-kernel and label graphs as linear operators, in linear time where the kernel allows it."""

from nearveil.graph._base import GaussianGraph, Graph
from nearveil.graph._gaussian import Method, gaussian_graph
from nearveil.graph._labels import UNLABELLED, Encoding, LabelGraph, label_graph

__all__ = ["UNLABELLED", "Encoding", "GaussianGraph", "Graph", "LabelGraph", "Method", "gaussian_graph", "label_graph"]
