"""Loggers for every module, and the request that their lines are about.

In Lanekeeper's service, events go to its log. In an application that has configured `structlog`, they go there.
Otherwise they go to the standard library's logger `lanekeeper`, which is silent until the application configures it:
structlog's own default would mix them into the script's output.
"""

import logging
from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Any, Protocol, cast

import structlog

_QUIET = logging.getLogger("lanekeeper")
_QUIET.addHandler(logging.NullHandler())  # else, without configuration, warnings go to standard error
_LIBRARY: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    _QUIET,
    processors=[structlog.stdlib.filter_by_level, structlog.processors.KeyValueRenderer(key_order=["event"])],
    wrapper_class=structlog.stdlib.BoundLogger,
)


class LogSubject(Protocol):
    """What log lines are about: a request being worked on."""

    def log_fields(self) -> Mapping[str, Any]:
        """The fields that each log line about it carries, with their current values."""


_subject: ContextVar[LogSubject | None] = ContextVar("lanekeeper_log_subject", default=None)


class about:
    """Log lines written inside this block, and by tasks started inside it, are about `subject`.

    Its fields are read only when a line is written, so a line that is filtered out costs nothing.
    """

    __slots__ = ("_subject", "_token")

    def __init__(self, subject: LogSubject) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        self._token: Token[LogSubject | None] = _subject.set(self._subject)

    def __exit__(self, *_: object) -> None:
        _subject.reset(self._token)


def fields_of_subject() -> Mapping[str, Any]:
    """The fields of the current subject; empty if there is none."""
    return {} if (subject := _subject.get()) is None else subject.log_fields()


class _Logger:
    """Chooses the target for each event anew, because an application may configure logging at any time."""

    service: structlog.stdlib.BoundLogger | None = None
    """The service's logger, bound once: binding it for each line takes four times as long."""

    def __getattr__(self, name: str) -> Any:
        if self.service is not None:
            return getattr(self.service, name)
        return getattr(structlog.get_logger() if structlog.is_configured() else _LIBRARY, name)


def use(service: structlog.stdlib.BoundLogger | None) -> structlog.stdlib.BoundLogger | None:
    """Send the events of all loggers to `service` (None: choose for each event). Returns the previous target."""
    before, _Logger.service = _Logger.service, service
    return before


def logger() -> structlog.stdlib.BoundLogger:
    """A logger for a module."""
    return cast("structlog.stdlib.BoundLogger", _Logger())
