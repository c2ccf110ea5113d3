"""Metrics for Prometheus, and heartbeats for systemd."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.core import GaugeMetricFamily

from nearveil.server.galleries import Gallery, OpenGallery
from nearveil.telemetry import BUCKETS, Telemetry

_GALLERY_METRICS = {
    "revision": ("nearveil_gallery_revision", "Revision of the newest map."),
    "stale": ("nearveil_gallery_stale", "1 if the gallery changed after its newest map."),
    "up": ("nearveil_gallery_up", "1 if the gallery can be read."),
    "left": ("nearveil_ledger_left_epsilon", "Epsilon that a protected gallery's account may still spend."),
}


def send_heartbeat() -> None:
    """Send a heartbeat to the service manager, if one waits for it (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(b"READY=1\nWATCHDOG=1", "\0" + address[1:] if address.startswith("@") else address)


class Metrics:
    """The metrics of one server, in a separate registry, and its telemetry."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self.telemetry = telemetry
        registry = self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._requests = counter("nearveil_requests", "Requests by route and status.", ["route", "status"])
        seconds = "nearveil_request_seconds", "Duration of requests.", ["route"]
        self._seconds = Histogram(*seconds, buckets=BUCKETS, registry=registry)
        self.in_flight = gauge("nearveil_in_flight", "Requests in flight.", multiprocess_mode="livesum")
        self.refused = counter("nearveil_refused", "Refused requests by error code.", ["code"])
        self._bytes = counter("nearveil_answer_bytes", "Bytes of bodies that were sent.", ["route"])
        self.answers_made = counter("nearveil_answers_made", "Answers that were not in the cache of a gallery.")
        dropped = "nearveil_log_lines_dropped", "Log lines that were not written."
        self._log_lines_dropped = gauge(*dropped, multiprocess_mode="sum")

    def count(self, method: str, route: str, gallery: str | None, status: int, seconds: float, sent: int) -> None:
        """Count a request that has ended."""
        if self.telemetry is not None:
            attributes = {"http.request.method": method, "http.route": route, "nearveil.gallery": gallery or ""}
            self.telemetry.record(f"{method} {route}", seconds, {**attributes, "http.response.status_code": status})
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        self._bytes.labels(route).inc(sent)

    def exposition(self, galleries: Mapping[str, Mapping[str, float]], log_lines_dropped: int) -> bytes:
        """Return the metrics of the server and of some galleries, by their names, in the format of Prometheus."""
        self._log_lines_dropped.set(log_lines_dropped)
        registry = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # sum over all processes
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        families = [GaugeMetricFamily(name, text, labels=["gallery"]) for name, text in _GALLERY_METRICS.values()]
        for metric, family in zip(_GALLERY_METRICS, families, strict=True):
            for gallery, values in galleries.items():
                if metric in values:
                    family.add_metric([gallery], float(values[metric]))
        return generate_latest(registry) + generate_latest(SimpleNamespace(collect=lambda: families))


def read_gallery_metrics(gallery: Gallery) -> dict[str, float]:
    """Read the metrics of a gallery by name. This may wait for a disk or a database."""
    metrics: dict[str, float] = {"revision": gallery.info().revision, "up": 1.0}
    if isinstance(gallery, OpenGallery):
        metrics["stale"] = gallery.stale
    if gallery.account is not None:
        metrics["left"] = gallery.account.balance().left
    return metrics
