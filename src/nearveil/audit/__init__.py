"""Attacks that measure privacy loss through public interfaces.

* :func:`audit` attacks a mechanism's guarantee, checks its conduct, and reports the epsilon that could be shown;
* :class:`Experiment` describes how to run your own mechanism, and :class:`Law` the stated law of its outcomes;
* :func:`list_mechanisms` and :func:`list_specimens` return the entries of ``nearveil audit``.

:mod:`nearveil.audit.attacks` attacks side channels of a release: its work, its time and its traffic.
"""

from nearveil.audit._experiment import Experiment, Law, Pair
from nearveil.audit.auditing import audit
from nearveil.audit.registry import list_mechanisms, list_specimens
from nearveil.audit.report import Check, Report

__all__ = ["Check", "Experiment", "Law", "Pair", "Report", "audit", "list_mechanisms", "list_specimens"]
