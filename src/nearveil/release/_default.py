"""The best release that there is here."""

from nearveil.release._base import checked_fraction
from nearveil.release._channel import checked_epsilon
from nearveil.release._covers import Covers
from nearveil.release._mapped import MappedRelease


def default(epsilon: float, candidates: float = 0.1) -> MappedRelease:
    """Return the release that finds most on image features, at every epsilon and answer size measured: learned covers.

    Where epsilon is very large and answers very small, :class:`PrivUnit` may find more: evaluate both.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 40.
    candidates : float, default=0.1
        The fraction of the gallery that an answer holds.

    Returns
    -------
    MappedRelease

    Examples
    --------
    >>> default(4.0, 0.1)
    Covers(epsilon=4.0)
    """
    checked_epsilon(epsilon)
    checked_fraction(candidates)
    return Covers(epsilon, candidates)
