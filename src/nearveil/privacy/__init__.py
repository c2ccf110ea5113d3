"""What is promised, to whom, and why it is true: guarantees, sensitivity, noise, accountants."""

from nearveil.privacy.guarantee import Basis, FilterTerms, Guarantee, compose, compose_events, noise_guarantee

__all__ = ["Basis", "FilterTerms", "Guarantee", "compose", "compose_events", "noise_guarantee"]
