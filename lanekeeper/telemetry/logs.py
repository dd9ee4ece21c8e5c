"""Loggers for every module. Log lines that are written while a request is worked on get this request's fields.

In Lanekeeper's own processes, log events go to the logger that was set with `use`. In an application that uses
Lanekeeper's client and has configured `structlog`, they go to structlog. Otherwise they go to the standard library's
logger `lanekeeper`, which writes nothing until the application configures logging: structlog's own default would print
them into the application's output.
"""

import logging
from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Any, Protocol, cast

import structlog

_QUIET = logging.getLogger("lanekeeper")
_QUIET.addHandler(logging.NullHandler())  # without a handler, Python prints warnings on standard error
_LIBRARY: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    _QUIET,
    processors=[structlog.stdlib.filter_by_level, structlog.processors.KeyValueRenderer(key_order=["event"])],
    wrapper_class=structlog.stdlib.BoundLogger,
)


class LogSubject(Protocol):
    """A request that is being worked on. Its fields are added to the log lines that are written meanwhile."""

    def log_fields(self) -> Mapping[str, Any]:
        """The fields for each log line about this request, with their current values."""


_subject: ContextVar[LogSubject | None] = ContextVar("lanekeeper_log_subject", default=None)


class about:
    """Adds the fields of `subject`, a request, to log lines that are written in this `with` block, or by tasks started
    in it.

    The fields are read only when a line is written, so a line that is filtered out costs nothing.
    """

    __slots__ = ("_subject", "_token")

    def __init__(self, subject: LogSubject) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        self._token: Token[LogSubject | None] = _subject.set(self._subject)

    def __exit__(self, *_: object) -> None:
        _subject.reset(self._token)


def fields_of_subject() -> Mapping[str, Any]:
    """The fields that the enclosing `about` block adds to log lines; empty outside such a block."""
    return {} if (subject := _subject.get()) is None else subject.log_fields()


class _Logger:
    """A logger that chooses the destination of an event only when the event is logged, because an application may
    configure logging after our modules were imported. The destination is the logger `service` if it is set, else
    structlog if it is configured, else the standard library's logger."""

    service: structlog.stdlib.BoundLogger | None = None
    """The logger of Lanekeeper's own processes. structlog's `bind` is called only once for this logger, because logging
    takes four times as long if `bind` is called for each line."""

    def __getattr__(self, name: str) -> Any:
        if self.service is not None:
            return getattr(self.service, name)
        return getattr(structlog.get_logger() if structlog.is_configured() else _LIBRARY, name)


def use(service: structlog.stdlib.BoundLogger | None) -> structlog.stdlib.BoundLogger | None:
    """Send the log events of this process to the logger `service`. If it is None, choose the logger for each event:
    structlog if it is configured, else the standard library's. Returns the logger that was used before, or None."""
    before, _Logger.service = _Logger.service, service
    return before


def logger() -> structlog.stdlib.BoundLogger:
    """Make the logger that a module uses for its log events."""
    return cast("structlog.stdlib.BoundLogger", _Logger())
