"""What is promised, to whom, and why it is true: guarantees, sensitivity, noise, accountants."""

from nearveil.privacy._compose import compose, compose_events, noise_guarantee
from nearveil.privacy._guarantee import Basis, FilterTerms, Guarantee

__all__ = ["Basis", "FilterTerms", "Guarantee", "compose", "compose_events", "noise_guarantee"]
