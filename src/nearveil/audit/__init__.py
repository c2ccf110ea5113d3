"""Attacks that measure what leaks, through public interfaces alone.

* :func:`audit` attacks a mechanism's promise and reports the epsilon that could be shown;
* :class:`Experiment` says how to run a mechanism of one's own;
* :func:`time_experiment`, :func:`clock_experiment` and :func:`wire_experiment` look at what surrounds a release: its
  work, its time, and what is sent.
"""

from nearveil.audit._attack_clock import clock_experiment
from nearveil.audit._attack_time import OperationClock, time_experiment
from nearveil.audit._attack_wire import wire_experiment
from nearveil.audit._audit import audit
from nearveil.audit._experiment import Experiment, Pair
from nearveil.audit._registry import Entry, mechanisms, specimens
from nearveil.audit._report import Report

__all__ = [
    "Entry",
    "Experiment",
    "OperationClock",
    "Pair",
    "Report",
    "audit",
    "clock_experiment",
    "mechanisms",
    "specimens",
    "time_experiment",
    "wire_experiment",
]
