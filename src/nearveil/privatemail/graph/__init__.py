"""Gaussian-kernel and label graphs as linear operators, in linear time where the kernel allows it."""

from nearveil.privatemail.graph._base import GaussianGraph
from nearveil.privatemail.graph.gaussian import gaussian_graph
from nearveil.privatemail.graph.labels import LabelGraph, label_graph

__all__ = ["GaussianGraph", "LabelGraph", "gaussian_graph", "label_graph"]
