"""Traces a request that a command publishes: a span of its own, and the trace's id on standard error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from lanekeeper.replies import Final
    from lanekeeper.telemetry.tracing import Tracing
    from service.config.settings import Settings

SERVICE_NAME = "lanekeeper send"


@contextmanager
def traced(settings: "Settings") -> Iterator["Tracing"]:
    """If the settings say where spans go, run with a span that is the root of the trace, and print the trace's id."""
    from lanekeeper.telemetry import recording
    from lanekeeper.telemetry.tracing import Tracing

    base, traces = settings.otlp
    if base is None and traces is None:
        yield Tracing()
        return
    from service.telemetry import exporters as telemetry
    from service.telemetry import logs  # the exporter is slow to import

    spec = telemetry.TelemetrySpec(service_name=SERVICE_NAME, otlp_endpoint=base, otlp_traces_endpoint=traces)
    assert spec.traces_url is not None
    left: typer.Exit | None = None
    with (
        logs.written(service=SERVICE_NAME, level="warning"),  # on standard error: scripts read the standard output
        telemetry.exporting(spec.traces_url, service_name=SERVICE_NAME) as provider,
    ):
        tracing = Tracing(provider)
        with tracing.ask() as span:
            if span.is_recording():
                tell_trace(tracing.trace_id())
            try:
                yield tracing
            except typer.Exit as told:  # the error has been printed, and is this one's context
                recording.fail(span, recording.error_type(told.__context__ or told))
                left = told
    if left is not None:
        raise left


def tell_trace_of(answer: "Final") -> None:
    """Print the trace that the reply names, unless it is the command's own, which was printed before."""
    from opentelemetry import trace

    from lanekeeper.telemetry import propagation

    named = propagation.read(answer.headers)
    if named is not None and not trace.get_current_span().get_span_context().is_valid:
        tell_trace(f"{named.trace_id:032x}")


def tell_trace(trace_id: str | None) -> None:
    """Print the trace's id on standard error, if there is a trace."""
    if trace_id is not None:
        print(f"lanekeeper: trace {trace_id}", file=sys.stderr)
