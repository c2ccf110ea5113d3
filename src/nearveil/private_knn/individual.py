"""Individual accounting: a record votes within a public radius of a query, and at most a fixed number of times.

All that is here is public: radii, budgets and noise follow from public rows and queries, and the log holds queries
and answers. How often a record has voted is a function of the record and of the log, and is stored nowhere
(``docs/theory/private-knn.md``, Theorems 12 and 13; attacked by ``tests/private_knn/test_individual.py``).
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.private_knn.neighbors import GroupSearch, NeighborSearch, Scores

_LEAST_SHARE, _LEAST_ROWS = 0.0025, 5  # of the public rows within a radius
_LARGEST_SHARE, _RARE_CLASS = 0.1, 0.01  # at most half a class, within these limits
_CLEAR = 12.0  # votes for each unit of noise at which the radius grows no more
# Where the votes do not stand out there, the radius grows on: up to 3 halves of a class, and for a batch that crowds in
# one region (rows pass 2.5 times as often as on average) up to half of all rows, for twice the clear ratio.
_WIDE, _WIDEST_SHARE, _CROWD, _CROWD_RATIO = 3, 0.25, 2.5, 8.0
_LEAST_VOTERS = 30.0  # as many without noise
_COVERED = 0.9  # share of the public rows' own votes that the budget covers
_PLAYED = 1000  # public rows that play the queries of a stream
_MOST_VOTES = 1 << 22  # in an entry of the log: 45 MB
_OPEN = 0.5  # least share of the public voters left near a query of a stream
CLEAR_RATIO = 4.0
"""Expected votes for each unit of noise, below which a private discriminant is better."""
LEAST_PUBLIC = 300
"""Public rows from which on ``accounting="auto"`` relies on them."""


@dataclass(frozen=True)
class VoteForecast:
    """The quality that answers to a batch of queries can have. Computed from public values alone.

    Examples
    --------
    >>> forecast = VoteForecast(voters=120.0, noise=10.0, max_votes=7, n_records=20_000)
    >>> f"{forecast.ratio:.0f} votes for a unit of noise; clear: {forecast.is_clear}"
    '12 votes for a unit of noise; clear: True'
    """

    voters: float  #: expected number of records that vote on a query
    noise: float  #: standard deviation of the noise on each count
    max_votes: int  #: votes of one record on the whole batch, at most
    n_records: float  #: lower bound on the number of records: as given, or released with noise

    @property
    def ratio(self) -> float:
        """Expected votes for each unit of noise."""
        return self.voters / self.noise

    @property
    def is_clear(self) -> bool:
        """Whether the votes stand out. If not, :class:`PrivateDiscriminant` is the better choice."""
        return self.ratio >= CLEAR_RATIO


@dataclass(frozen=True, eq=False)
class Terms:
    """Queries with the radius of each, and the budget of votes and the noise, fixed before any vote is counted."""

    queries: NDArray[np.int16]  # rounded
    radii: Scores  # least score 2 x.y - |y|^2 of a voter
    max_votes: int  # of one record
    noise: float  # standard deviation on each count
    voters: float  # expected number for a query
    n_records: float  # a lower bound
    rank: int  # of the public row at the radius

    @property
    def forecast(self) -> VoteForecast:
        """The expected quality."""
        return VoteForecast(self.voters, self.noise, self.max_votes, self.n_records)

    def to_bytes(self) -> bytes:
        """Return an entry of a log."""
        plan = {name: getattr(self, name) for name in _PLANNED}
        rows = {"queries": _encode_array(self.queries, "<i2"), "columns": self.queries.shape[1]}
        return _encode(**rows, radii=self.radii.tolist(), **plan)

    @classmethod
    def read(cls, entry: dict[str, Any]) -> Self:
        """Return the terms of an entry of a log."""
        queries = _decode_array(entry["queries"], "<i2").reshape(-1, entry["columns"])
        radii = np.array(entry["radii"], dtype=np.int32)
        return cls(queries.astype(np.int16), radii, *(entry[name] for name in _PLANNED))


_PLANNED = ("max_votes", "noise", "voters", "n_records", "rank")


class RadiusRule:
    """Fix radius, budget and noise from public rows and public queries.

    The radius of a query is the score of its m-th nearest public row. From the least m upwards, `max_votes` is the
    least budget that covers 90% of the public rows' own votes over the batch, and the noise follows from it; m grows
    until 12 records for each unit of noise are expected within the radius (docs/theory/private-knn.md, section 13).
    """

    def __init__(
        self,
        public: ArrayLike,
        n_classes: int,
        feature_norm: float | None = None,
        groups: NDArray[np.int64] | None = None,  # of the public rows, if records have groups
    ) -> None:
        rows = NeighborSearch(public, feature_norm=feature_norm, engine="numpy")
        self.search = rows if groups is None else GroupSearch(rows, groups)
        self.n_rows = n_rows = self.search.n_rows
        self._rounded = self.search.round(public)
        digest = hashlib.sha256(self._rounded.tobytes() + (b"" if groups is None else groups.tobytes()))
        self.fingerprint = digest.hexdigest()
        self._numbers = {row.tobytes(): number for number, row in enumerate(self._rounded)}
        if n_rows < 2 * _LEAST_ROWS:
            raise ValueError(
                f"public must hold at least {2 * _LEAST_ROWS} rows (or groups), better 1,000: they set the radius"
            )
        self.least = max(math.ceil(_LEAST_SHARE * n_rows), _LEAST_ROWS)
        half_class = 1 / (2 * n_classes)
        share = min(max(half_class, _RARE_CLASS), _LARGEST_SHARE)
        self.most = min(max(self.least, math.floor(share * n_rows)), n_rows - 1)
        self.widest = min(math.floor(min(_WIDE * half_class, _WIDEST_SHARE) * n_rows), n_rows - 1)

    def plan_batch(self, queries: NDArray[np.int16], unit_noise: float, n_records: float) -> Terms:
        """Return the terms of a batch that pays for each of its queries with one vote at `unit_noise`."""
        return self.continue_stream(queries, self._plan(queries, unit_noise, n_records, len(queries)))

    def plan_stream(
        self, queries: NDArray[np.int16], unit_noise: float, n_records: float, n_queries: int, crowding: float
    ) -> Terms:
        """Return the terms of the first of `n_queries` queries to come: planned for calm ones, times `crowding`."""
        n_rows = len(self._rounded)
        played = self._rounded[np.linspace(0, n_rows - 1, min(_PLAYED, n_rows)).astype(int)]
        return self.continue_stream(queries, self._plan(played, unit_noise, n_records, n_queries, crowding))

    def continue_stream(self, queries: NDArray[np.int16], first: Terms) -> Terms:
        """Return the terms of queries with the rank, the budget and the noise of others."""
        return replace(first, queries=queries, radii=self._rank(queries, first.rank)[1][:, -1])

    def drop_worn(self, terms: Terms, earlier: Sequence[Terms]) -> Terms:
        """Leave out queries near which fewer than half of the public rows would still vote."""
        passes = np.zeros(self.n_rows, dtype=np.int64)
        for entry in earlier:
            for rows in self.search.within(entry.queries, entry.radii):
                passes[self.search.find_units(rows)] += 1
        chosen: list[int] = []
        for number, rows in enumerate(self.search.within(terms.queries, terms.radii)):
            units = self.search.find_units(rows)
            if np.mean(passes[units] < terms.max_votes) >= _OPEN:
                chosen.append(number)
                passes[units] += 1
        return replace(terms, queries=terms.queries[chosen], radii=terms.radii[chosen])

    def _rank(self, queries: NDArray[np.int16], length: int) -> tuple[NDArray[Any], Scores]:
        """Return the nearest public units of each query and their scores, without that of the query itself."""
        rows, scores = self.search.rank(queries, min(length + 1, self.n_rows))
        units = self.search.find_units(rows)
        numbers = np.array([self._numbers.get(query.tobytes(), -1) for query in queries], dtype=np.int32)
        is_own = (units == self.search.find_units(numbers)[:, None]) & (numbers[:, None] >= 0)
        order = np.argsort(is_own, axis=1, kind="stable")[:, :length]
        return np.take_along_axis(units, order, axis=1), np.take_along_axis(scores, order, axis=1)

    def _plan(
        self, played: NDArray[np.int16], unit_noise: float, n_records: float, n_queries: int, crowding: float = 1.0
    ) -> Terms:
        """Return the terms of `n_queries` queries that are spread like those played, without their radii."""
        passes, n_queries = np.zeros(self.n_rows, dtype=np.int64), max(n_queries, 1)
        units, target, limit = self._rank(played, self.most)[0], _CLEAR, self.most
        for rank in range(1, self.n_rows):
            if rank > units.shape[1]:
                units = self._rank(played, limit)[0]
            np.add.at(passes, units[:, rank - 1], 1)
            if rank < self.least:
                continue
            votes = find_budget(passes) * n_queries / max(len(played), 1)
            max_votes = max(1, min(math.ceil(votes * crowding), n_queries))
            noise = unit_noise * math.sqrt(max_votes / n_queries) * (1 + 2.0**-40)
            voters = n_records * rank / self.n_rows
            if rank == self.most:
                is_crowd = votes * self.n_rows > _CROWD * n_queries * rank
                target, limit = (_CROWD_RATIO, self.n_rows // 2) if is_crowd else (CLEAR_RATIO, self.widest)
            if voters >= max(target * noise, _LEAST_VOTERS) or rank >= max(limit, self.most):
                break
        return Terms(played[:0], np.zeros(0, dtype=np.int32), max_votes, noise, voters, n_records, rank)


def find_budget(passes: NDArray[np.int64]) -> int:
    """Return the least number of votes of each row that keeps 90% of all passes."""
    reaching = np.cumsum(np.bincount(passes)[::-1])[::-1][1:]  # rows that pass at least 1, 2, ... times
    covered = np.cumsum(reaching)
    return int(np.searchsorted(covered, _COVERED * covered[-1])) + 1 if len(covered) else 1


@dataclass(frozen=True)
class QueryLog:
    """The public log of an estimator: queries, their answers, and the number of records with noise."""

    entries: Sequence[dict[str, Any]] = field(repr=False)

    @classmethod
    def read(cls, entries: Sequence[bytes]) -> Self:
        """Parse the entries of a log."""
        return cls([json.loads(entry) for entry in entries])

    @property
    def n_records(self) -> float | None:
        """The released lower bound of the number of records."""
        return next((float(entry["n_records"]) for entry in self.entries if "n_records" in entry), None)

    @cached_property
    def asked(self) -> list[Terms]:
        """All queries that were paid for, in their order; also those that were never answered."""
        return [Terms.read(entry) for entry in self.entries if "queries" in entry]

    @property
    def n_asked(self) -> int:
        """The number of queries that were paid for."""
        return sum(len(terms.radii) for terms in self.asked)

    @cached_property
    def answers(self) -> dict[bytes, tuple[NDArray[np.float64], float]]:
        """The votes on each answered query, by its rounded row, and the noise on them."""
        answers: dict[bytes, tuple[NDArray[np.float64], float]] = {}
        for entry in self.entries:
            if "answers" in entry:
                terms = Terms.read(self.entries[entry["answers"]])
                votes = _decode_array(entry["votes"], "<f8").reshape(-1, entry["size"])
                queries = terms.queries[entry["first"] :][: len(votes)]
                answers |= {query.tobytes(): (row, terms.noise) for query, row in zip(queries, votes, strict=True)}
        return answers

    def find_new(self, queries: NDArray[np.int16]) -> NDArray[np.intp]:
        """Return the queries that have no answer, each once."""
        first: dict[bytes, int] = {}
        for number, query in enumerate(queries):
            first.setdefault(query.tobytes(), number)
        return np.array([number for row, number in first.items() if row not in self.answers], dtype=np.intp)


def encode_answers(position: int, votes: NDArray[np.float64]) -> Iterator[bytes]:
    """Yield entries of a log, none too large, with the noisy votes on the queries of the entry at `position`."""
    size = votes.shape[1]
    step = max(1, _MOST_VOTES // size)
    for first in range(0, len(votes), step):
        part = _encode_array(votes[first : first + step], "<f8")
        yield _encode(answers=position, first=first, size=size, votes=part)


def encode_n_records(n_records: float) -> bytes:
    """Return the entry of a log with the released number of records."""
    return _encode(n_records=n_records)


def _encode(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _encode_array(values: NDArray[Any], kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode("ascii")


def _decode_array(text: str, kind: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype=kind)
