"""Writes the logs and sends the traces of a process that runs until somebody stops it, such as a worker."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from service.config.settings import Settings


def telemetry_of(settings: "Settings") -> "AbstractContextManager[TracerProvider | None]":
    """Write logs and send traces inside the block, as configured in the settings."""
    from service.telemetry import exporters

    return exporters.running(
        traces_url=settings.traces_url,
        log_level=settings.log_level,
        log_format=settings.log_format,
        log_content=settings.log_content,
    )
