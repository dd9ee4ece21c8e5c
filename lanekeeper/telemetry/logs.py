"""The client's log events. They go to the standard library's logger `lanekeeper`, which writes nothing until the
application configures logging; Lanekeeper's own processes write them with their own (`service/telemetry/logs.py`)."""

import logging
from typing import Any

_LOGGER = logging.getLogger("lanekeeper")
_LOGGER.addHandler(logging.NullHandler())  # without a handler, Python prints warnings on standard error


def info(event: str, **fields: Any) -> None:
    """Log an event with its fields, if the application logs those of this level."""
    _write(logging.INFO, event, fields)


def warning(event: str, **fields: Any) -> None:
    """Log an event with its fields, unless the application wants only errors."""
    _write(logging.WARNING, event, fields)


def _write(level: int, event: str, fields: dict[str, Any]) -> None:
    if _LOGGER.isEnabledFor(level):
        shown = " ".join(f"{name}={value!r}" for name, value in {"event": event, **fields}.items())
        _LOGGER.log(level, "%s", shown, extra={"event": event, "fields": fields}, stacklevel=3)
