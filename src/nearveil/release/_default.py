"""The best release that there is here."""

from nearveil.release._covers import Covers
from nearveil.release._mapped import MappedRelease


def default(epsilon: float, candidates: float = 0.1) -> MappedRelease:
    """Return the release with the highest NN-recall known at this epsilon and answer size: learned covers.

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
    return Covers(epsilon, candidates)
