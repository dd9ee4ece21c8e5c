"""Logs and traces of one process, set up from a spec; the spans go out by OTLP over HTTP where an endpoint is given.

Everything else that there is in `OTEL_*` (sampler, headers, limits, resource attributes, OTEL_SDK_DISABLED), the SDK
reads by itself.
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
    """What is told of a process, and where to."""

    service_name: str = "lanekeeper"
    log_level: str = "INFO"
    log_format: logs.Format = "auto"
    """auto: columns on a terminal, else JSON lines."""
    log_content: bool = False
    """Texts of exceptions and fields that may quote prompts and answers are written too. Never in spans."""
    otlp_endpoint: str | None = None
    """Base URL of a collector (`http://localhost:4318`); spans go to `/v1/traces` under it."""
    otlp_traces_endpoint: str | None = None
    """The whole URL for spans; comes before `otlp_endpoint`."""

    @property
    def traces_url(self) -> str | None:
        """Where spans go; None: nowhere."""
        if self.otlp_traces_endpoint or not self.otlp_endpoint:
            return self.otlp_traces_endpoint or None
        return self.otlp_endpoint.rstrip("/") + "/v1/traces"


@contextmanager
def running(spec: TelemetrySpec, *, stream: TextIO | None = None) -> Iterator[TracerProvider | None]:
    """Logs and traces for the length of a `with`; yields what `Tracing` takes, None where no spans are sent.

    The provider is not made the global one: two of them in one process (tests, an application that embeds us) must not
    get into each other's way. Leaving takes `FLUSH_S` at most, also when the endpoint does not answer.
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
    """Spans go to `url` for the length of a `with`."""
    exporter = OTLPSpanExporter(endpoint=url)
    # The queue is bounded (OTEL_BSP_MAX_QUEUE_SIZE, 2048 spans): what does not fit is dropped, and nobody waits.
    provider = TracerProvider(resource=_resource(service_name), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    log.info(signals.TRACES_EXPORTED_TO, endpoint=url)
    try:
        yield provider
    finally:
        # The SDK's shutdown waits up to 30 s and can be told no other time; a daemon thread holds up nobody's exit.
        flush = threading.Thread(target=provider.shutdown, name="traces flush", daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        if flush.is_alive():
            exporter.shutdown()  # type: ignore[no-untyped-call]  # ends the pause before its next attempt
            flush.join(0.2)
            log.warning(signals.TRACES_LOST, endpoint=url, error=f"not all spans were taken within {FLUSH_S:g} s")


def _resource(service_name: str) -> Resource:
    """Who sends the spans. What OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES say comes before `service_name`."""
    found = Resource.create({SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{os.getpid()}"})
    if str(found.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: service_name}))
    return found
