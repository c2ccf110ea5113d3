"""Audits of this library: side channels of its releases and clients, and specimens that every audit must catch.

``nearveil audit`` runs them where the studies are installed.
"""

from functools import partial
from importlib.util import find_spec
from typing import Any

from nearveil.audit.registry import EPSILON, FEW_DELTA, AuditEntry, Make, make_entry
from nearveil.mechanisms import AnalyticGaussian, Cells, Covers, PrivUnit
from studies.audits import specimens as broken
from studies.audits.clock import make_clock_experiment, make_time_experiment, time_choice
from studies.audits.wire import make_wire_experiment

__all__ = [
    "list_side_channels",
    "list_specimens",
    "make_clock_experiment",
    "make_time_experiment",
    "make_wire_experiment",
]

_SPECIMEN_TRIALS = 200_000  # of defects that need few runs
_HAS_CLIENT, _HAS_SEALED = find_spec("httpx") is not None, find_spec("cryptography") is not None


def list_side_channels(epsilon: float = EPSILON) -> list[AuditEntry]:
    """Return experiments on work, time and traffic, with the public names that they attack."""
    timed = {
        "covers": Covers(epsilon, n_sets=10),
        "cells (randomized)": Cells(epsilon),
        "privunit": PrivUnit(epsilon),
        "analytic-gaussian": AnalyticGaussian(epsilon),
    }
    channels: dict[str, dict[str, Make]] = {
        "wire.ClientProtocol": {"covers: on the wire": make_wire_experiment},
        "mechanisms.PublicMap": {"covers: choice": partial(make_clock_experiment, time_choice, at_once=1)},
        "mechanisms.Release": {
            f"{name}: time": partial(make_time_experiment, release) for name, release in timed.items()
        },
    }
    if _HAS_CLIENT:
        channels["Client"] = {"covers: clock": make_clock_experiment}
    if _HAS_SEALED:
        from studies.audits.sealed import make_sealed_experiment

        channels["sealed.SealedClient"] = {"sealed: question": make_sealed_experiment}
    return [
        make_entry(name, make, subject=f"nearveil.{subject}")
        for subject, makers in channels.items()
        for name, make in makers.items()
    ]


def list_specimens() -> list[AuditEntry]:
    """Return mechanisms that are broken on purpose. A reliable audit calls each of them broken.

    Examples
    --------
    >>> list_specimens()[0].name, list_specimens()[0].expected
    ('the label kept after the noise', 'broken')
    """
    makers: dict[str, Make] = {
        "the label kept after the noise": broken.make_label_after_noise,
        "a variance for a deviation": broken.make_variance_as_deviation,
        "fixed-size sample charged as Poisson": broken.make_fixed_size_sample,
        "one sample charged as two": broken.make_shared_sample,
        "OME's claim at alpha 7": broken.make_ome_claim,
        "half the noise of privunit": broken.make_quiet_privunit,
        "numpy's Laplace noise": broken.make_float_laplace,
        "a request after the answer": partial(make_wire_experiment, broken.fetch_chosen),
        "work that depends on the record": lambda: make_time_experiment(broken.BusyCells(1.0)),
        "a search with a heap": broken.make_heap_search,
        "half the noise of a discriminant": partial(broken.QuietDiscriminant, EPSILON, FEW_DELTA),
        "a discriminant that does not pay": partial(broken.FreeDiscriminant, EPSILON, FEW_DELTA),
        "the largest private value in a discriminant": partial(broken.ReachingDiscriminant, EPSILON, FEW_DELTA),
        "four fifths of the noise on counts": partial(broken.QuietCounts, EPSILON, FEW_DELTA),
    }
    if _HAS_CLIENT:
        makers["a question sent as soon as it is made"] = broken.make_hasty_question
    if _HAS_SEALED:
        from studies.audits.sealed import SPECIMENS

        makers |= {f"sealed, with {name}": make for name, make in SPECIMENS.items()}
    unscreened: dict[str, Any] = {"max_answered": 1, "max_screened": 0}
    planted: dict[str, Make] = {
        "classical Gaussian at epsilon 12": broken.make_classical_gaussian,
        "four fifths of the vote noise": partial(broken.QuietVotes, EPSILON, **unscreened),
        "exact votes in one of 2,000 answers": partial(broken.OnceExactVotes, EPSILON, **unscreened),
        "labels decided before the noise": partial(broken.NoiselessLabels, EPSILON, **unscreened),
        "caps that are ignored": partial(broken.EndlessVotes, EPSILON, **unscreened),
        "screening that is not charged": partial(broken.FreeScreening, EPSILON, max_answered=1, max_screened=1),
    }
    return [
        *(make_entry(name, make, "broken") for name, make in makers.items()),
        *(make_entry(name, make, "broken", trials=_SPECIMEN_TRIALS) for name, make in planted.items()),
    ]
