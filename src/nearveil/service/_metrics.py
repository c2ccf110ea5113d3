"""Figures for Prometheus. Labels are routes, statuses, codes and names of galleries: never what a client chose."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from nearveil.ledger import LedgerError
from nearveil.service._errors import ServiceError
from nearveil.service._galleries import Gallery, OpenGallery

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@runtime_checkable
class Paying(Protocol):
    """A gallery that pays for its answers."""

    @property
    def terms(self) -> Any:
        """What its account was opened for."""
        ...


class Metrics:
    """All figures of one server, in a registry of their own.

    There are none of the process: its memory grows with the records of a protected gallery.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "nearveil_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "nearveil_request_seconds", "How long requests took.", ["route"], buckets=_SECONDS, registry=self.registry
        )
        self.in_flight = Gauge("nearveil_in_flight", "Requests under way.", registry=self.registry)
        self._refused = Counter(
            "nearveil_refused", "Requests that were refused, by the code of the problem.", ["code"],
            registry=self.registry,
        )  # fmt: skip
        self._bytes = Counter(
            "nearveil_answer_bytes", "Bytes of bodies that were sent.", ["route"], registry=self.registry
        )
        self.log_lines_dropped = Gauge(
            "nearveil_log_lines_dropped", "Lines that could not be written.", registry=self.registry
        )
        self._known: dict[tuple[str, int], tuple[Callable[[], None], Callable[[float], None], Callable[[float], None]]]
        self._known = {}

    def count(self, route: str, status: int, seconds: float, sent: int) -> None:
        """Count a request that has ended."""
        found = self._known.get((route, status))
        if found is None:  # there are few routes and statuses; looking up labels anew takes longer than counting
            requests = self._requests.labels(route, str(status))
            found = requests.inc, self._seconds.labels(route).observe, self._bytes.labels(route).inc
            self._known[route, status] = found
        found[0]()
        found[1](seconds)
        found[2](sent)

    def refuse(self, code: str) -> None:
        """Count a refusal, by its code."""
        self._refused.labels(code).inc()

    def exposition(self, galleries: Sequence[Gallery], dropped: int) -> bytes:
        """Look at some galleries; return their figures and those of the server, as Prometheus reads them."""
        self.log_lines_dropped.set(dropped)
        return generate_latest(self.registry) + generate_latest(_looked_at(galleries))


def _looked_at(galleries: Sequence[Gallery]) -> CollectorRegistry:
    """Return figures of galleries, made anew: whoever asks next may be told of others."""
    registry = CollectorRegistry()
    revision = Gauge("nearveil_gallery_revision", "Of the newest map.", ["gallery"], registry=registry)
    stale = Gauge(
        "nearveil_gallery_stale", "1 where the gallery changed after its newest map.", ["gallery"], registry=registry
    )
    up = Gauge("nearveil_gallery_up", "1 where the gallery can be read.", ["gallery"], registry=registry)
    left = Gauge(
        "nearveil_ledger_left_epsilon", "What a protected gallery's account may still spend.", ["gallery"],
        registry=registry,
    )  # fmt: skip
    for gallery in galleries:
        name = gallery.name
        up.labels(name).set(0)
        with suppress(ServiceError, LedgerError):
            revision.labels(name).set(gallery.info().revision)
            if isinstance(gallery, OpenGallery):
                stale.labels(name).set(int(gallery.stale))
            if isinstance(gallery, Paying):
                left.labels(name).set(gallery.terms.account.balance().left)
            up.labels(name).set(1)
    return registry
