"""OpenTelemetry: off by default; spans hold nothing of a query, and end where a bucket does."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `telemetry` is not installed")

from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nearveil import Client
from nearveil.server import Settings
from nearveil.server.metrics import Metrics
from nearveil.telemetry import BUCKETS, Telemetry, get_client_telemetry
from tests.service.asking import QUERIES, Scene, make_index, scene

pytestmark = pytest.mark.usefixtures("no_pauses")
DURATIONS = {round(1e9 * edge) for edge in (0, *BUCKETS)}


@dataclass
class Collector:
    """What a server or a client exports."""

    is_server: bool
    spans: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)

    def telemetry(self) -> Telemetry:
        processor = SimpleSpanProcessor(self.spans)
        return Telemetry("test", processor=processor, reader=self.reader, is_server=self.is_server)

    def take(self) -> list[tuple[Any, ...]]:
        """Return all of the spans since the last call but ids and times, which must be those of buckets."""
        spans = self.spans.get_finished_spans()
        assert all((span.end_time or 0) - (span.start_time or 0) in DURATIONS for span in spans)
        assert not any(span.events or span.links for span in spans)
        self.spans.clear()
        return [(span.name, span.kind, span.status.status_code, dict(span.attributes or {})) for span in spans]

    def points(self) -> list[Any]:
        data = self.reader.get_metrics_data()
        if data is None:
            return []
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        return [(metric.name, point) for metric in metrics for point in metric.data.data_points]


@dataclass
class Observed:
    """A client and a server, and what both export."""

    client: Client
    here: Scene
    collectors: tuple[Collector, Collector]

    def take(self) -> list[Any]:
        return [collector.take() for collector in self.collectors]


@pytest.fixture
def observed(tmp_path: Path) -> Iterator[Observed]:
    offers = ("names", "thumbnails", "codes", "metadata", "sealed")
    with scene(make_index(tmp_path / "birds"), tmp_path, epsilon=1000.0, offers=offers) as here:
        here.gallery.prepare()  # type: ignore[attr-defined]
        ends = Collector(is_server=False), Collector(is_server=True)
        here.server.app.state.nearveil.metrics = Metrics(ends[1].telemetry())
        client, _ = here.client(home=tmp_path / "home", telemetry=ends[0].telemetry())
        client.sync()
        yield Observed(client, here, ends)


Ask = Callable[[Client, Any, int], object]
WAYS: dict[str, Ask] = {
    "message": lambda client, row, k: client.nearest(row, k, 4.0, gallery="birds"),
    "home": lambda client, row, k: client.nearest(row, k, by="home", gallery="birds", where={"a": k}),
    "sealed": lambda client, row, k: client.nearest(row, k, by="sealed", gallery="birds"),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_private_queries_export_the_same_but_ids_and_times(observed: Observed, way: str) -> None:
    WAYS[way](observed.client, QUERIES[5], 1)  # fetches the list, the map and tokens
    observed.take()
    exported = []
    for row, k in ((QUERIES[0], 1), (QUERIES[1], 7)):
        WAYS[way](observed.client, row, k)
        exported.append(observed.take())
    assert exported[0] == exported[1]
    (call,), requests = exported[0]
    assert call[3] == {"nearveil.way": way, "nearveil.gallery": "birds"}
    assert bool(requests) == (way != "home")
    names = {"http.request.method", "http.route", "http.response.status_code", "nearveil.gallery"}
    assert all(set(request[3]) == names for request in requests)
    routes = {request[3]["http.route"] for request in requests}
    assert all("{gallery}" in route or route == "/v1/galleries" for route in routes)


def test_durations_are_counted_once_for_each_call_and_request(observed: Observed) -> None:
    for collector in observed.collectors:
        collector.points()
    observed.take()
    WAYS["message"](observed.client, QUERIES[0], 3)
    call, requests = observed.take()
    client, server = (collector.points() for collector in observed.collectors)
    assert [(name, point.count) for name, point in client] == [("nearveil.client.duration", len(call))]
    assert {name for name, _ in server} == {"http.server.request.duration"}
    routes = [request[3]["http.route"] for request in requests]
    counts = {point.attributes["http.route"]: point.count for _, point in server}
    assert all(counts[route] >= routes.count(route) for route in routes)
    assert not any(point.exemplars for _, point in (*client, *server))  # they would have exact times


def test_failures_of_a_query_export_what_other_queries_do(observed: Observed) -> None:
    observed.take()
    WAYS["home"](observed.client, QUERIES[0], 3)
    expected = observed.take()
    with pytest.raises(ValueError, match=r"number|dimension|features"):
        observed.client.nearest(QUERIES[0][:3], 3, by="home", gallery="birds")
    assert observed.take() == expected


def test_a_local_index_exports_no_duration(tmp_path: Path) -> None:
    collector = Collector(is_server=False)
    with Client(str(make_index(tmp_path / "birds")), telemetry=collector.telemetry()) as client:
        client.nearest(QUERIES[0])
    (span,) = collector.spans.get_finished_spans()
    assert span.end_time == span.start_time
    ((_, point),) = collector.points()
    assert point.sum == 0


def test_the_context_of_a_trace_is_never_sent_and_never_received(observed: Observed) -> None:
    tracer, own = TracerProvider().get_tracer("application"), Collector(is_server=False)
    client, wire = observed.here.client(telemetry=own.telemetry())
    app, headers = httpx.ASGITransport(observed.here.server.app), {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}

    async def probe() -> None:
        async with httpx.AsyncClient(transport=app, base_url="https://birds.example:8321") as plain:
            await plain.get("/health", headers=headers)

    with tracer.start_as_current_span("application") as application:
        client.nearest(QUERIES[0], 3, 4.0)
        asyncio.run(probe())  # in the same context as the server
    sent = {name.lower() for _, _, pairs, _ in wire.requests for name, _ in pairs}
    assert not sent & {b"traceparent", b"tracestate", b"baggage"}
    (call,) = own.spans.get_finished_spans()
    assert (call.parent and call.parent.span_id) == application.get_span_context().span_id
    requests = observed.collectors[1].spans.get_finished_spans()
    assert requests[-1].name == "GET /health"
    assert [request.parent for request in requests] == [None] * len(requests)
    assert len({request.context and request.context.trace_id for request in requests}) == len(requests)


def test_telemetry_is_off_and_not_imported_unless_it_is_turned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Settings().telemetry
    assert get_client_telemetry.__wrapped__() is None
    program = "nearveil.Client('http://127.0.0.1:1', 'a.b.c').close(); sys.exit('opentelemetry' in sys.modules)"
    code = f"import sys, nearveil.server, nearveil.telemetry; {program}"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0  # noqa: S603
    monkeypatch.setenv("NEARVEIL_TELEMETRY", "1")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "lab")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    telemetry = get_client_telemetry.__wrapped__()
    assert telemetry is not None
    telemetry.close()


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    with pytest.raises(ModuleNotFoundError, match=r"nearveil\[telemetry\]"):
        Telemetry("test")
