"""Attacks that measure privacy loss through public interfaces.

* :func:`audit` attacks a mechanism's guarantee, checks its conduct, and reports the epsilon that could be shown;
* :class:`Experiment` describes how to run your own mechanism, and :class:`Law` the stated law of its outcomes;
* :func:`list_mechanisms` returns the mechanisms of ``nearveil audit``.

The studies add attacks on side channels (work, time and traffic), and mechanisms that are broken on purpose.
"""

from nearveil.lazy import require_extra

with require_extra("audit"):
    from nearveil.audit._experiment import Experiment, Law, Pair
    from nearveil.audit.auditing import audit
    from nearveil.audit.registry import list_mechanisms
    from nearveil.audit.report import Check, Report

__all__ = ["Check", "Experiment", "Law", "Pair", "Report", "audit", "list_mechanisms"]
