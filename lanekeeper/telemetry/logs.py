"""Loggers for every module, and whose request their lines are about.

Where Lanekeeper's service writes logs, events go there. Where an application has configured `structlog`, they go to
that. Otherwise they go to the standard library's logger `lanekeeper`, which is silent until the application that uses
us wants to hear it: structlog's own default would print them between what a script prints.
"""

import logging
from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Any, Protocol, cast

import structlog

_QUIET = logging.getLogger("lanekeeper")
_QUIET.addHandler(logging.NullHandler())  # else warnings go to standard error where nothing is configured
_LIBRARY: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    _QUIET,
    processors=[structlog.stdlib.filter_by_level, structlog.processors.KeyValueRenderer(key_order=["event"])],
    wrapper_class=structlog.stdlib.BoundLogger,
)


class LogSubject(Protocol):
    """What log lines are about: a request that is being worked on."""

    def log_fields(self) -> Mapping[str, Any]:
        """The fields that each of its lines carries, as they are at this moment."""
        ...


_subject: ContextVar[LogSubject | None] = ContextVar("lanekeeper_log_subject", default=None)


class about:
    """Lines that are written inside this, and by the tasks that are started inside it, are about `subject`.

    Its fields are asked for when a line is written, not before: a line that nobody reads costs nothing.
    """

    __slots__ = ("_subject", "_token")

    def __init__(self, subject: LogSubject) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        self._token: Token[LogSubject | None] = _subject.set(self._subject)

    def __exit__(self, *_: object) -> None:
        _subject.reset(self._token)


def fields_of_subject() -> Mapping[str, Any]:
    """The fields of what the current line is about; none where it is about no request."""
    return {} if (subject := _subject.get()) is None else subject.log_fields()


class _Logger:
    """Finds out for each event where it goes: an application configures logging when it likes."""

    service: structlog.stdlib.BoundLogger | None = None
    """The service's logger, bound once: to bind it anew for each line takes four times as long."""

    def __getattr__(self, name: str) -> Any:
        if self.service is not None:
            return getattr(self.service, name)
        return getattr(structlog.get_logger() if structlog.is_configured() else _LIBRARY, name)


def use(service: structlog.stdlib.BoundLogger | None) -> structlog.stdlib.BoundLogger | None:
    """Send the events of all loggers there (None: decide for each event); what was used before."""
    before, _Logger.service = _Logger.service, service
    return before


def logger() -> structlog.stdlib.BoundLogger:
    """A logger for a module."""
    return cast("structlog.stdlib.BoundLogger", _Logger())
