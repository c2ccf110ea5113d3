"""The registry of mechanisms, for the audit, the command line and tests."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from nearveil import mechanisms
from nearveil.mechanisms.base import Release
from nearveil.mechanisms.covers.channels import check_channel_epsilon
from nearveil.mechanisms.messages import Floats, Message, check_fraction
from nearveil.privacy.noise import unsafe_seeded
from nearveil.privatemail.mechanism import PrivateMail


def default(epsilon: float, candidates: float = 0.1) -> "mechanisms.Covers":
    """Return learned covers, which had the best recall on image features at every measured epsilon and answer size.

    With a very large epsilon and very small answers, :class:`PrivUnit` may have a better recall: evaluate both.

    Examples
    --------
    >>> default(4.0, 0.1)
    Covers(epsilon=4.0)
    """
    return mechanisms.Covers(check_channel_epsilon(epsilon), check_fraction(candidates))


EPSILON = 4.0
ROWS, DIMENSION, CLASSES = 200, 64, 4


@dataclass(frozen=True, kw_only=True)
class MechanismSummary:
    """Properties at epsilon 4, fitted on 200 rows of 64 features in 4 classes; the defaults if a library is missing."""

    name: str  # name in messages, and variant
    class_name: str
    protects: str = "nothing"  # for example "the query"
    sound: bool = True  # whether its guarantee is proved
    reason: str = ""  # why it is not proved
    kind: str = "none"  # or "pure", "approximate", "metric, pure"
    message_bytes: int | None = None
    source: str  # publication


@dataclass(frozen=True)
class MechanismEntry:
    """The class, parameters and source of a mechanism."""

    kind: type[Any]
    source: str
    variant: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # besides epsilon
    labelled: bool = False  # whether a release needs the label of its row
    needs: str = ""  # an optional package, by the name of its import

    @property
    def name(self) -> str:
        """Name in messages, and variant."""
        return f"{self.kind.name} ({self.variant})" if self.variant else str(self.kind.name)

    def make(self, epsilon: float = EPSILON, **changes: Any) -> Any:
        """Return the unfitted mechanism, with changed parameters."""
        bound = {"epsilon": epsilon} if "epsilon" in signature(self.kind).parameters else {}
        return self.kind(**bound, **{**self.parameters, **changes})

    def make_release(self, private: Floats) -> Release:
        """Return an unfitted release; some learn from private rows."""
        del private
        release: Release = self.make()
        return release


MAIL = "Vepakomma, Balla, Raskar"
UNSOUND = {"allow_unsound": True}

REGISTRY = (
    MechanismEntry(mechanisms.Covers, "this library", parameters={"n_sets": 10}),
    MechanismEntry(mechanisms.PrivUnit, "Bhowmick et al. 2018; Asi et al. 2022"),
    MechanismEntry(PrivateMail, f"{MAIL} 2022, made sound", "gaussian"),
    MechanismEntry(PrivateMail, f"{MAIL} 2021, made sound", "laplace", {"noise": "laplace"}),
    *(
        MechanismEntry(
            PrivateMail, source, f"as published {version}", {"as_published": version, **UNSOUND}, True, needs
        )
        for version, source, needs in (
            ("2022", f"{MAIL} 2022", ""),
            ("2021", f"{MAIL} 2021", "studies"),
            ("2022-code", f"{MAIL} 2022, program", "studies"),
        )
    ),
    MechanismEntry(mechanisms.Latent, "Arachchige et al. 2019"),
    MechanismEntry(mechanisms.OME, "Lyu et al. 2020"),
    MechanismEntry(mechanisms.AnalyticGaussian, "Balle, Wang 2018"),
)
"""All mechanisms of the library; ``studies.baselines`` has those that they are compared with."""


def describe_mechanisms(entries: Iterable[MechanismEntry] = REGISTRY) -> list[MechanismSummary]:
    """Fit mechanisms on a small example and summarize their guarantees and message sizes."""
    generator = np.random.default_rng(0)
    rows, labels = generator.standard_normal((2 * ROWS, DIMENSION)), np.arange(ROWS) % CLASSES
    with threadpool_limits(1):  # faster for few rows
        return [_describe(entry, rows, labels) for entry in entries]


def _describe(entry: MechanismEntry, rows: Floats, labels: NDArray[np.int64]) -> MechanismSummary:
    public, gallery = rows[:ROWS], rows[ROWS:]
    release = entry.make_release(gallery)
    names: dict[str, Any] = {"name": entry.name, "class_name": type(release).__name__, "source": entry.source}
    try:
        release = release.fit(public, labels)
    except ImportError:
        if not entry.needs:
            raise
        return MechanismSummary(**names)
    if hasattr(release, "index"):
        release = release.index(gallery)
    label: dict[str, Any] = {"labels": 0} if entry.labelled else {}
    message: Message = release.release(gallery[0], rng=unsafe_seeded(0), **label)
    # Without the seed: "seeded": false is one byte longer than true.
    size = Message(message.mechanism, message.public_id, message.arrays).nbytes
    guarantee = release.guarantee
    if math.isinf(guarantee.epsilon):
        return MechanismSummary(**names, sound=guarantee.sound, reason=guarantee.reason, message_bytes=size)
    protected = "the query" if guarantee.protects == "query" else f"a {guarantee.unit}; not the query"
    # The delta of finite tables does not make a pure guarantee approximate.
    kind = "pure" if guarantee.delta == guarantee.extra_delta else "approximate"
    return MechanismSummary(
        **names,
        protects=protected if guarantee.sound else f"claims: {protected}",
        sound=guarantee.sound,
        reason=guarantee.reason,
        kind=f"metric, {kind}" if hasattr(release, "metric_epsilon") else kind,
        message_bytes=size,
    )
