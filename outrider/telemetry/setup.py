"""Starts and stops a process's OpenTelemetry SDK, and passes trace contexts between processes. Sets
no global providers, because Ray uses its own SDK in the same process."""

from __future__ import annotations

import asyncio
import copy
import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NoOpTracer, Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider.config.telemetry_destination import Destination
from outrider.errors import SettingError
from outrider.registry.registry import Role

if TYPE_CHECKING:
    from prometheus_client import Metric

EXPORT_TIMEOUT_S = 3.0  # timeout of each export, also of a process's last export
SCOPE = "outrider"
VLLM_COUNTERS = tuple(
    f"spec_decode_num_{name}"
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)
"""Counters that vLLM also exports, under the same names with the prefix `vllm:`."""

_log = logging.getLogger(__name__)


class Scrape:
    """A process's metrics in Prometheus' text format. The OpenMetrics format is not used, because
    prometheus_client 0.26 would replace the colons of vLLM's names by underscores."""

    def __init__(self, vllm_model: str | None = None) -> None:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CollectorRegistry

        self._collected, self._vllm_model = CollectorRegistry(), vllm_model
        self.reader: MetricReader = PrometheusMetricReader(
            scope_info_enabled=False, registry=self._collected
        )
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.address = ""  # HOST:PORT of the HTTP server; empty before `serve`
        self.stop: Callable[[], None] = lambda: None  # stops the HTTP server

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics. With a `vllm_model`, also yields copies of `VLLM_COUNTERS` that have
        vLLM's names. OpenTelemetry does not allow such names, because they contain a colon."""
        for metric in self._collected.collect():
            yield metric
            name = metric.name.removeprefix(SCOPE + "_")
            if self._vllm_model is None or name not in VLLM_COUNTERS:
                continue
            sums: dict[str, float] = defaultdict(float)  # over the labels that vLLM lacks
            for sample in metric.samples:
                sums[sample.labels.get("position", "")] += sample.value
            copied = copy.copy(metric)
            copied.name, copied.samples = f"vllm:{name}", []
            for position, value in sums.items():
                labels = {"position": position} if position else {}
                labels["model_name"] = self._vllm_model
                copied.add_sample(f"vllm:{name}_total", labels, value)
            yield copied

    def serve(self, host: str, port: int) -> None:
        """Serves the metrics by HTTP at any path; port 0 = any free port. Raises `SettingError`."""
        from prometheus_client import start_http_server

        try:
            server, thread = start_http_server(port, host, self._registry)
        except (OSError, OverflowError) as error:  # OverflowError: a port above 65535.
            reason = getattr(error, "strerror", error)
            raise SettingError(
                "telemetry", f"cannot serve Prometheus on {host}:{port}: {reason}"
            ) from error
        app: Any = server.get_app()
        server.set_app(lambda environ, start: app({**environ, "HTTP_ACCEPT": ""}, start))
        self.address = f"{host}:{server.server_port}"
        _log.info("metrics are served on %s", self.address)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self.stop = stop

    def render(self) -> bytes:
        """Returns the metrics in Prometheus' text format. Blocks."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


class Exports:
    """A process's tracer and meter, and their exporters."""

    def __init__(
        self,
        role: str,
        span_processor: SpanProcessor | None,
        readers: list[MetricReader],
        scrape: Scrape | None = None,
    ) -> None:
        self.scrape = scrape
        own_version = version("outrider")
        resource = Resource.create(
            {
                "service.name": f"outrider-{role}",
                "service.namespace": "outrider",
                "service.version": own_version,
                "host.name": socket.gethostname(),
            }
        )
        self._meters = MeterProvider(readers, resource, shutdown_on_exit=False)
        self.meter: Meter = self._meters.get_meter(SCOPE, own_version)
        self._tracers: TracerProvider | None = None
        self.tracer: Tracer = NoOpTracer()
        if span_processor is not None:
            self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._tracers.add_span_processor(span_processor)
            self.tracer = self._tracers.get_tracer(SCOPE, own_version)

    async def close(self) -> None:
        """Like `shut_down`, but takes at most `EXPORT_TIMEOUT_S` and does not block."""
        try:
            async with asyncio.timeout(EXPORT_TIMEOUT_S):
                await asyncio.to_thread(self.shut_down)
        except TimeoutError:
            _log.warning("the last traces and metrics were not exported in time")

    def shut_down(self) -> None:
        """Exports the remaining traces and metrics. Blocks."""
        if self._tracers is not None:
            self._tracers.shutdown()
        self._meters.shutdown()
        if self.scrape is not None:
            self.scrape.stop()


def start_exports(
    telemetry: str,
    role: Role,
    host: str,
    index: int = 0,
    *,
    scraped: bool = False,
    vllm_model: str | None = None,
) -> Exports | None:
    """Starts the exports of the setting `telemetry`. Returns None if there is nothing to export.
    Serves Prometheus on `host`, at the port `Destination.port(role, index)`. If `scraped`, creates
    `Exports.scrape` even without a port. With `vllm_model`, exports `VLLM_COUNTERS` also under
    vLLM's names, labelled with this model's name. Raises `SettingError` if the port is taken."""
    destination = Destination.parse(telemetry)
    endpoint, port = destination.otlp_endpoint, destination.port(role, index)
    if not endpoint and port is None and not scraped:
        return None
    span_processor: SpanProcessor | None = None
    readers: list[MetricReader] = []
    if endpoint:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        options: Any = {"insecure": endpoint.startswith("http://"), "timeout": EXPORT_TIMEOUT_S}
        span_processor = BatchSpanProcessor(OTLPSpanExporter(endpoint, **options))
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter(endpoint, **options)))
    scrape = None if port is None and not scraped else Scrape(vllm_model)
    if scrape is not None:
        readers.append(scrape.reader)
        if port is not None:
            scrape.serve(host, port)
    return Exports(role, span_processor, readers, scrape)


_PROPAGATOR = TraceContextTextMapPropagator()


def write_traceparent(span: Span, *, sampled: bool = True) -> str:
    """Returns the W3C `traceparent` of `span`; "" if the span is invalid. If `sampled` is false,
    receivers create no spans."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    flags = context.trace_flags if sampled else 0
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"


def read_traceparent(text: str) -> Context | None:
    """Returns the context of a remote span; None if the text is invalid."""
    return _PROPAGATOR.extract({"traceparent": text}, Context()) or None


def read_sampled(text: str) -> Context | None:
    """Like `read_traceparent`, but also returns None if the trace is not sampled."""
    return read_traceparent(text) if text[-1:] in {*"13579bdf"} else None
