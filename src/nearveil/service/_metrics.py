"""Figures for Prometheus. Labels are routes, statuses, codes and names of galleries: never what a client chose."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.core import GaugeMetricFamily

from nearveil.ledger import Account
from nearveil.service._galleries import Gallery, OpenGallery

_GALLERY = {
    "revision": ("nearveil_gallery_revision", "Of the newest map."),
    "stale": ("nearveil_gallery_stale", "1 where the gallery changed after its newest map."),
    "up": ("nearveil_gallery_up", "1 where the gallery can be read."),
    "left": ("nearveil_ledger_left_epsilon", "What a protected gallery's account may still spend."),
}
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@runtime_checkable
class Paying(Protocol):
    """A gallery that pays for what it publishes."""

    @property
    def account(self) -> Account | None:
        """Who pays; None before the first publication."""
        ...


class Metrics:
    """All figures of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "nearveil_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "nearveil_request_seconds", "How long requests took.", ["route"], buckets=_SECONDS, registry=self.registry
        )
        self.in_flight = Gauge(
            "nearveil_in_flight", "Requests under way.", registry=self.registry, multiprocess_mode="livesum"
        )
        self._refused = Counter(
            "nearveil_refused", "Requests that were refused, by the code of the problem.", ["code"],
            registry=self.registry,
        )  # fmt: skip
        self._bytes = Counter(
            "nearveil_answer_bytes", "Bytes of bodies that were sent.", ["route"], registry=self.registry
        )
        self.log_lines_dropped = Gauge(
            "nearveil_log_lines_dropped", "Lines that could not be written.", registry=self.registry,
            multiprocess_mode="sum",
        )  # fmt: skip
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

    def exposition(self, figures: Sequence["GalleryFigures"], dropped: int) -> bytes:
        """Return figures of some galleries and those of the server, as Prometheus reads them."""
        self.log_lines_dropped.set(dropped)
        galleries = CollectorRegistry()
        galleries.register(_Collector(figures))
        return generate_latest(_whole(self.registry)) + generate_latest(galleries)


def _whole(own: CollectorRegistry) -> CollectorRegistry:
    """Return the figures of all processes of a server, where there are several; else those of this one."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return own
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry


def forget_process(pid: int | None) -> None:
    """Count what a process had under way no more: it has died."""
    multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class GalleryFigures:
    """Figures of one gallery; None where there is none, or the gallery cannot be read."""

    name: str
    up: bool = False
    revision: int | None = None
    stale: bool | None = None
    left: float | None = None

    @classmethod
    def of(cls, gallery: Gallery) -> "GalleryFigures":
        """Look at a gallery. It may wait for a disk or a database."""
        return cls(
            gallery.name,
            True,
            gallery.info().revision,
            gallery.stale if isinstance(gallery, OpenGallery) else None,
            gallery.account.balance().left if isinstance(gallery, Paying) and gallery.account is not None else None,
        )


@dataclass(frozen=True, eq=False)
class _Collector:
    """Gives figures of galleries to a registry. They are kept nowhere: whoever asks next may be told of others."""

    figures: Sequence[GalleryFigures]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the figures, as Prometheus has them."""
        for name, (metric, text) in _GALLERY.items():
            family = GaugeMetricFamily(metric, text, labels=["gallery"])
            for one in self.figures:
                value = getattr(one, name)
                if value is not None:
                    family.add_metric([one.name], float(value))
            yield family
