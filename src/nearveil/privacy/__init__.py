"""Guarantees and what they rest on: events, noise, sensitivity and accountants."""

from typing import TYPE_CHECKING

from nearveil.lazy import import_later

if TYPE_CHECKING:
    from nearveil.privacy.guarantee import Basis, Guarantee, compose, compose_events, noise_guarantee

__all__ = ["Basis", "Guarantee", "compose", "compose_events", "noise_guarantee"]

# Lazy: `privacy.checks` serves the graph, which needs NumPy, SciPy and scikit-learn alone.
__getattr__ = import_later(__name__, {".guarantee": "Basis Guarantee compose compose_events noise_guarantee"})
