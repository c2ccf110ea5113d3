"""What is promised, to whom, and why it is true: guarantees, sensitivity, noise, accountants."""

from nearveil.privacy._compose import compose
from nearveil.privacy._guarantee import Basis, Guarantee
from nearveil.privacy._noisy import noise_guarantee

__all__ = ["Basis", "Guarantee", "compose", "noise_guarantee"]
