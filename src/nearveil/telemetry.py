"""OpenTelemetry: spans and durations of a server's requests and a client's calls, without private values."""

import os
import time
import uuid
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from nearveil.lazy import require_extra

BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)  # seconds
_SWITCH = "NEARVEIL_TELEMETRY"  # 1 turns telemetry of clients on


class Telemetry:
    """Exports spans and durations by OTLP over HTTP; the variables ``OTEL_*`` choose the collector.

    Parameters
    ----------
    service : str
        The name of the service, unless ``OTEL_SERVICE_NAME`` is set.
    processor : opentelemetry.sdk.trace.SpanProcessor, optional
        Replaces OTLP for spans.
    reader : opentelemetry.sdk.metrics.export.MetricReader, optional
        Replaces OTLP for durations.
    """

    def __init__(self, service: str, *, processor: Any = None, reader: Any = None, is_server: bool = False) -> None:
        with require_extra("telemetry"):
            from opentelemetry.context import Context
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk import metrics, resources, trace
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind

        names = {"service.name": os.environ.get("OTEL_SERVICE_NAME", service)}
        if is_server:
            names["service.instance.id"] = str(uuid.uuid4())  # of one process
        resource = resources.Resource.create(names)
        self._tracing = trace.TracerProvider(resource=resource)
        self._tracing.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._tracing.get_tracer("nearveil")
        reader = reader or PeriodicExportingMetricReader(OTLPMetricExporter())
        no_exemplars = metrics.AlwaysOffExemplarFilter()  # one would have the exact time of the end
        self._metering = metrics.MeterProvider([reader], resource, exemplar_filter=no_exemplars)
        self._seconds = self._metering.get_meter("nearveil").create_histogram(
            "http.server.request.duration" if is_server else "nearveil.client.duration",
            "s",
            "Durations, rounded up to a bucket.",
            explicit_bucket_boundaries_advisory=BUCKETS,
        )
        # The spans of a server have no parent: a client's context would link its queries.
        self._parent: Context | None = Context() if is_server else None
        self._kind = SpanKind.SERVER if is_server else SpanKind.CLIENT

    def record(self, name: str, seconds: float, attributes: Mapping[str, str | int]) -> None:
        """Export a span that ends now, and its duration, rounded up to a bucket; 0 stays 0."""
        started = time.time_ns() - round(1e9 * seconds)
        if seconds:
            seconds = next((edge for edge in BUCKETS if seconds <= edge), 10.0 * -(-seconds // 10.0))
        span = self._tracer.start_span(name, self._parent, self._kind, attributes, start_time=started)
        span.end(started + round(1e9 * seconds))
        self._seconds.record(seconds, attributes)

    def close(self) -> None:
        """Export the remaining spans and metrics. Without this call, a program does so when it ends."""
        self._tracing.shutdown()
        self._metering.shutdown()


@lru_cache(maxsize=1)
def get_client_telemetry() -> Telemetry | None:
    """Return the telemetry of the clients of this process, if the environment turns it on."""
    return Telemetry("nearveil-client") if os.environ.get(_SWITCH) == "1" else None
