"""Attacks that measure what leaks, through public interfaces alone.

* :func:`audit` attacks a mechanism's guarantee, checks its conduct, and reports the epsilon that could be shown;
* :class:`Experiment` says how to run a mechanism of one's own, and :class:`Law` what it states about its outcomes;
* :func:`list_mechanisms` and :func:`list_specimens` are what ``nearveil audit`` knows.

:mod:`nearveil.audit.attacks` looks at what surrounds a release: its work, its time, and what is sent.
"""

from nearveil.audit._experiment import Experiment, Law, Pair
from nearveil.audit.auditing import audit
from nearveil.audit.registry import list_mechanisms, list_specimens
from nearveil.audit.report import Check, Report

__all__ = ["Check", "Experiment", "Law", "Pair", "Report", "audit", "list_mechanisms", "list_specimens"]
