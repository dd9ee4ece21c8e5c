"""Sets up logs and traces of one process from a spec. Spans are sent by OTLP over HTTP if an endpoint is given.

The SDK itself reads all other `OTEL_*` variables (sampler, headers, limits, resource attributes, OTEL_SDK_DISABLED).
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TextIO

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from lanekeeper.telemetry import signals
from lanekeeper.telemetry.logs import logger
from service.telemetry import logs

FLUSH_S: Final = 2.5
log = logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySpec:
    """What a process logs and traces, and where it is sent."""

    service_name: str = "lanekeeper"
    log_level: str = "INFO"
    log_format: logs.Format = "auto"
    """auto: columns on a terminal, else JSON lines."""
    log_content: bool = False
    """Also log texts of exceptions and fields that may quote prompts and answers. Spans never contain them."""
    otlp_endpoint: str | None = None
    """Base URL of a collector (`http://localhost:4318`); spans go to `/v1/traces` under it."""
    otlp_traces_endpoint: str | None = None
    """The full URL for spans; overrides `otlp_endpoint`."""

    @property
    def traces_url(self) -> str | None:
        """The URL to which spans are sent; None: none are sent."""
        if self.otlp_traces_endpoint or not self.otlp_endpoint:
            return self.otlp_traces_endpoint or None
        return self.otlp_endpoint.rstrip("/") + "/v1/traces"


@contextmanager
def running(spec: TelemetrySpec, *, stream: TextIO | None = None) -> Iterator[TracerProvider | None]:
    """Logs and traces for as long as the block lasts; yields the provider for `Tracing`, None if no spans are sent.

    The provider is not made the global one, so that two in one process (tests, an application that embeds us) do not
    affect each other. Leaving takes about `FLUSH_S` at most, even if the endpoint does not answer.
    """
    with logs.written(
        service=spec.service_name,
        level=spec.log_level,
        format=spec.log_format,
        with_content=spec.log_content,
        stream=stream,
    ):
        if spec.traces_url is None:
            yield None
            return
        with exporting(spec.traces_url, service_name=spec.service_name) as provider:
            yield provider


@contextmanager
def exporting(url: str, *, service_name: str) -> Iterator[TracerProvider]:
    """Send spans to `url` for as long as the block lasts."""
    exporter = OTLPSpanExporter(endpoint=url)
    # The queue is bounded (OTEL_BSP_MAX_QUEUE_SIZE, 2048 spans): further spans are dropped, so nothing blocks.
    provider = TracerProvider(resource=_resource(service_name), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    log.info(signals.TRACES_EXPORTED_TO, endpoint=url)
    try:
        yield provider
    finally:
        # The SDK's shutdown waits up to 30 s, which cannot be changed; a daemon thread does not delay the exit.
        flush = threading.Thread(target=provider.shutdown, name="traces flush", daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        if flush.is_alive():
            exporter.shutdown()  # type: ignore[no-untyped-call]  # ends the pause before its next attempt
            flush.join(0.2)
            log.warning(signals.TRACES_LOST, endpoint=url, error=f"not all spans were taken within {FLUSH_S:g} s")


def _resource(service_name: str) -> Resource:
    """The sender of the spans. OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES override `service_name`."""
    found = Resource.create({SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{os.getpid()}"})
    if str(found.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: service_name}))
    return found
