"""Learned covers: the release that comes nearest to the ceiling."""

from nearveil.release._channel import RandomizedResponse
from nearveil.release._learning import Rows, learned_sets
from nearveil.release._map import PublicMap
from nearveil.release._mapped import Grouping, MappedRelease, standing_for


class Covers(MappedRelease):
    """Name one of a few overlapping sets of the gallery, learned so that this very channel finds most neighbours.

    The message names the good set of the record with odds e^epsilon against every other set, exactly. The
    server returns the set's items, the client re-ranks them with its true feature. Popular items enter many sets.
    Few sets are best where epsilon is small: then the good one is named more often, and what none covers is given up.

    Parameters
    ----------
    epsilon : float
        From 1e-6 to 40. Pure: delta is 0.
    candidates : float, default=0.1
        The fraction f of the gallery that each answer holds.
    n_sets : int, optional
        The number L of sets; by default that with the best recall on a fifth of the gallery, held out.

    Attributes
    ----------
    map_ : PublicMap
        What the server publishes.
    members_ : csr array of shape (n_sets, n_items)
        Which items are in which set; at the server alone.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X = load_digits().data
    >>> server = Covers(epsilon=4.0, candidates=0.2, n_sets=6).fit(X[:300]).index(X[300:1700])
    >>> client = Covers(epsilon=4.0, candidates=0.2, n_sets=6).fit(X[:300]).use_map(server.map_)
    >>> message = client.release(X[1700])
    >>> int(server.rank(message, X[300:1700]).sum())
    280
    >>> print(client.guarantee)
    Whoever sees the message can change their odds about which record was asked for by at most a factor of 55.
    """

    name = "covers"

    def __init__(self, epsilon: float, candidates: float = 0.1, *, n_sets: int | None = None) -> None:
        self.epsilon = epsilon
        self.candidates = candidates
        self.n_sets = n_sets

    def _channel(self, public_map: PublicMap) -> RandomizedResponse:
        return RandomizedResponse(self.epsilon, public_map.n_sets)

    def _group(self, features: Rows, set_size: int) -> Grouping:
        if self.n_sets is not None and not 2 <= self.n_sets <= len(features):
            raise ValueError("n_sets must be at least 2 and at most the number of items in the gallery")
        members = learned_sets(features, set_size, self.epsilon, self.n_sets)
        prototypes, coverage = standing_for(features, members)
        return Grouping(members, prototypes, coverage)
