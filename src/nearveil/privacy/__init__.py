"""Guarantees, and what they rest on: events, noise, sensitivity and accountants."""

from nearveil.privacy.guarantee import Basis, Guarantee, compose, compose_events, noise_guarantee

__all__ = ["Basis", "Guarantee", "compose", "compose_events", "noise_guarantee"]
