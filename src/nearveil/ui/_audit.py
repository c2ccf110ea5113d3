"""A short audit in the background: look again and again, each time with more runs, until the time is up."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from nearveil.audit import Report, audit, list_mechanisms, list_specimens
from nearveil.audit.registry import AuditEntry
from nearveil.ui._errors import Trouble

SECONDS = 30.0  # for all looks together
_FIRST = 2_000  # runs of the first look
_GROWTH = 2
_MOST = 512_000
# Some guarantee nothing, so there is nothing to attack; some wait for real clocks, or are fitted anew, for minutes.
_LEFT_OUT = ("raw", "plain-", "covers: clock", "a question sent as soon as it is made", "student")


class _Stopped(Exception):  # noqa: N818
    """Somebody pressed the button, or the time is up."""


@dataclass
class Job:
    """One audit, as far as it has come."""

    name: str
    epsilon: float
    reports: list[Report] = field(default_factory=list)  # one for each look, each of fresh runs; the last one counts
    state: str = "running"
    runs: int = 0  # that were made in the look under way
    wanted: int = _FIRST


class Auditor:
    """Runs one audit at a time, for at most so many seconds."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._job: Job | None = None

    def names(self) -> dict[str, list[str]]:
        """Return what can be audited: what keeps its guarantee, and what is broken on purpose."""
        return {
            kind: [one.name for one in entries if not one.name.startswith(_LEFT_OUT)]
            for kind, entries in (("mechanisms", list_mechanisms()), ("specimens", list_specimens()))
        }

    def start(self, name: str, epsilon: float) -> None:
        """Begin an audit at an epsilon from 0.01 to 12; one that runs must be stopped first."""
        if not 0.01 <= epsilon <= 12:
            raise Trouble(422, "question", "An audit takes an epsilon from 0.01 to 12.")
        entry = next((one for one in (*list_mechanisms(epsilon), *list_specimens()) if one.name == name), None)
        if entry is None:
            raise Trouble(404, "question", "There is no mechanism of this name.")
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                raise Trouble(409, "busy", "An audit is running. Stop it first.")
            self._stop = threading.Event()
            self._job = job = Job(name, epsilon)
            self._thread = threading.Thread(target=self._run, args=(job, entry, self._stop), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the audit that runs, at its next chance."""
        self._stop.set()

    def close(self, timeout: float = 5.0) -> None:
        """End it, and wait for that a while."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout)

    def status(self) -> dict[str, Any]:
        """Return how far the audit has come, as plain values."""
        job = self._job
        if job is None:
            return {"state": "none"}
        reports = list(job.reports)
        return {
            "name": job.name,
            "state": job.state,
            "runs": job.runs,
            "wanted": job.wanted,
            "looks": [
                {"trials": one.trials, "shown": one.as_dict()["shown_epsilon"], "verdict": one.verdict}
                for one in reports
            ],
            "report": None if not reports else _report_dict(reports[-1]),
        }

    def _run(self, job: Job, entry: AuditEntry, stop: threading.Event) -> None:
        ends = time.monotonic() + self._seconds
        try:
            self._look(job, entry, stop, ends)
            job.state = "done"
        except _Stopped:
            job.state = "stopped" if stop.is_set() else "done"
        except Exception:  # told as such: there is nobody to raise it to
            job.state = "failed"

    def _look(self, job: Job, entry: AuditEntry, stop: threading.Event, ends: float) -> None:
        experiment = replace(entry.make(), name=entry.name)
        runs, took = _FIRST, 0.0
        # The next look takes about as many times longer as it has more runs: one that would be cut off is not begun.
        while runs <= _MOST and time.monotonic() + _GROWTH * took < ends:
            began = time.monotonic()
            job.runs, job.wanted = 0, 2 * runs
            job.reports.append(audit(experiment, trials=runs, progress=_make_tick(job, stop, ends)))
            took, runs = time.monotonic() - began, runs * _GROWTH


def _make_tick(job: Job, stop: threading.Event, ends: float) -> Callable[[int], None]:
    def tick(runs: int) -> None:
        job.runs += runs
        if stop.is_set() or time.monotonic() > ends:
            raise _Stopped

    return tick


def _report_dict(report: Report) -> dict[str, Any]:
    plain = report.as_dict()
    return {**plain, "words": _describe(report), "verdict_words": report.verdict_words}


def _describe(report: Report) -> str:
    shown, promised = f"{report.shown_epsilon:.3g}", f"{report.promised_epsilon:.3g}"
    if report.verdict == "broken":
        return f"Broken: it promises epsilon {promised}, and {'; '.join(report.reasons)}."
    if report.verdict == "kept":
        return (
            f"Kept, as far as this short look goes: of the promised epsilon {promised}, {shown} could be shown "
            f"({report.share:.0%}). No attack found more and no check failed; that is no proof."
        )
    return (
        f"Undecided: at least {shown} of the promised {promised} was shown, and the attack may show more than "
        f"{report.limit:.3g}. More runs decide."
    )
