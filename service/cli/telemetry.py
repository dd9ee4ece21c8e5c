"""Logs and traces of a process that works until it is told to stop."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from service.config.settings import Settings


def telemetry_of(settings: "Settings") -> "AbstractContextManager[TracerProvider | None]":
    """Write logs and send traces as the settings say."""
    from service.telemetry import exporters

    base, traces_endpoint = settings.otlp
    return exporters.running(
        exporters.TelemetrySpec(
            log_level=settings.log_level,
            log_format=settings.log_format,
            log_content=settings.log_content,
            otlp_endpoint=base,
            otlp_traces_endpoint=traces_endpoint,
        )
    )
