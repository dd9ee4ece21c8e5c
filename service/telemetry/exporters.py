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

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from lanekeeper.telemetry import signals
from lanekeeper.telemetry.logs import logger

FLUSH_S: Final = 2.5
log = logger()


@contextmanager
def exporting(url: str | None, *, service_name: str) -> Iterator[TracerProvider | None]:
    """Send trace spans over OTLP to `url` inside the block. Yields OpenTelemetry's `TracerProvider`, which `Tracing`
    needs; None if `url` is None.

    The `TracerProvider` is not made OpenTelemetry's global one, so that two of them in one process (in tests, or beside
    an application's own) do not affect each other. Leaving the block takes about `FLUSH_S` seconds at most, even if the
    endpoint does not answer.
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
    """The OpenTelemetry resource (service name, host and process) that spans and metrics name as their origin. The
    variables OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override `service_name`."""
    found = Resource.create({SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{os.getpid()}"})
    if str(found.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: service_name}))
    return found
