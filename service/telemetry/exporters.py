"""Sends the trace spans of a process by OTLP over HTTP.

Lanekeeper's settings give only the endpoint; OpenTelemetry's SDK itself reads all other `OTEL_*` variables (sampler,
headers, limits, resource attributes, OTEL_SDK_DISABLED).
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from lanekeeper.telemetry import signals

FLUSH_S: Final = 2.5
log = structlog.get_logger()


@contextmanager
def exporting(url: str | None, *, service_name: str) -> Iterator[TracerProvider | None]:
    """Send spans to `url` inside the block; yields what `Tracing` needs, None without a URL.

    The provider is not made OpenTelemetry's global one: two in one process do not affect each other.
    """
    if url is None:
        yield None
        return
    exporter = OTLPSpanExporter(endpoint=url)
    # The queue is bounded (OTEL_BSP_MAX_QUEUE_SIZE, 2048 spans): further spans are dropped, so nothing blocks.
    provider = TracerProvider(resource=resource_of(service_name), shutdown_on_exit=False)
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


def resource_of(service_name: str) -> Resource:
    """What spans and metrics name as their origin; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override it."""
    found = Resource.create({SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{os.getpid()}"})
    if str(found.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: service_name}))
    return found
