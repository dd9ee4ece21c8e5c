"""Traces a request that a command publishes: starts a span for it, and prints the trace's id on standard error."""

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
    """Run the `with` block in a trace: start the root span, and print the trace's id. Yields the `Tracing` with which
    the command publishes its request. Without a URL to send spans to in the settings, there is no trace."""
    from lanekeeper.telemetry import recording
    from lanekeeper.telemetry.tracing import Tracing

    url = settings.traces_url
    if url is None:
        yield Tracing()
        return
    from service.telemetry import exporters, logs  # the exporter is slow to import

    exit_error: typer.Exit | None = None
    with (
        logs.configured(service=SERVICE_NAME, level="warning"),  # on standard error: scripts read the standard output
        exporters.exporting(url, service_name=SERVICE_NAME) as provider,
    ):
        tracing = Tracing(provider)
        with tracing.ask() as span:
            if span.is_recording():
                tell_trace(tracing.trace_id())
            try:
                yield tracing
            except typer.Exit as error:  # the command has printed the actual error, which is the context of this one
                recording.fail(span, recording.error_type(error.__context__ or error))
                exit_error = error
    if exit_error is not None:
        raise exit_error


def tell_trace_of(answer: "Final") -> None:
    """Print the id of the trace that a reply's headers name. Nothing is printed if the command itself has started a
    trace, because it has then printed that trace's id already."""
    from opentelemetry import trace

    from lanekeeper.telemetry import propagation

    named = propagation.read(answer.headers)
    if named is not None and not trace.get_current_span().get_span_context().is_valid:
        tell_trace(f"{named.trace_id:032x}")


def tell_trace(trace_id: str | None) -> None:
    """Print the trace's id on standard error, if there is a trace."""
    if trace_id is not None:
        print(f"lanekeeper: trace {trace_id}", file=sys.stderr)
