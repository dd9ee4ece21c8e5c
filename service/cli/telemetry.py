"""Writes the logs and sends the traces of a process that runs until somebody stops it, such as a worker."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from service.config.settings import Settings

SERVICE_NAME = "lanekeeper"


@contextmanager
def telemetry_of(settings: "Settings") -> Iterator["TracerProvider | None"]:
    """Write logs and send traces inside the block, as configured in the settings."""
    from service.telemetry import exporters, logs

    with (
        logs.configured(
            service=SERVICE_NAME,
            level=settings.log_level,
            format=settings.log_format,
            with_content=settings.log_content,
        ),
        exporters.exporting(settings.traces_url, service_name=SERVICE_NAME) as provider,
    ):
        yield provider
