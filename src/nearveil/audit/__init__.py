"""Attacks that measure what leaks, through public interfaces alone.

* :func:`audit` attacks a mechanism's guarantee, checks its conduct, and reports the epsilon that could be shown;
* :class:`Experiment` says how to run a mechanism of one's own, and :class:`Law` what it states about its outcomes;
* :func:`mechanisms` and :func:`specimens` are what ``nearveil audit`` knows, :func:`not_auditable` what it leaves out;
* :func:`time_experiment`, :func:`clock_experiment` and :func:`wire_experiment` look at what surrounds a release: its
  work, its time, and what is sent.
"""

from nearveil.audit._audit import audit
from nearveil.audit._experiment import Experiment, Pair
from nearveil.audit._law import Law
from nearveil.audit._registry import Entry, mechanisms, not_auditable, specimens
from nearveil.audit._report import Attack, Check, Report
from nearveil.audit.attacks._clock import clock_experiment
from nearveil.audit.attacks._time import OperationClock, time_experiment
from nearveil.audit.attacks._wire import wire_experiment

__all__ = [
    "Attack",
    "Check",
    "Entry",
    "Experiment",
    "Law",
    "OperationClock",
    "Pair",
    "Report",
    "audit",
    "clock_experiment",
    "mechanisms",
    "not_auditable",
    "specimens",
    "time_experiment",
    "wire_experiment",
]
