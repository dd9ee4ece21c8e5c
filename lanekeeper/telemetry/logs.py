"""Loggers of what also runs inside other people's processes: our client's part of the code.

Where `structlog` is configured, as the service does it, events go there. Where it is not, they go to the standard
library's logger `lanekeeper`, which is silent until the application that uses us wants to hear it: structlog's own
default would print them between what a script prints.
"""

import logging
from typing import Any, cast

import structlog

_QUIET = logging.getLogger("lanekeeper")
_QUIET.addHandler(logging.NullHandler())  # else warnings go to standard error where nothing is configured
_LIBRARY: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    _QUIET,
    processors=[structlog.stdlib.filter_by_level, structlog.processors.KeyValueRenderer(key_order=["event"])],
    wrapper_class=structlog.stdlib.BoundLogger,
)


class _Either:
    """Asked anew for each event: an application configures logging when it likes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(structlog.get_logger() if structlog.is_configured() else _LIBRARY, name)


def logger() -> structlog.stdlib.BoundLogger:
    """A logger for a module."""
    return cast("structlog.stdlib.BoundLogger", _Either())
