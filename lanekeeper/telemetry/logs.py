"""Loggers for every module. Lines that are written while a request is worked on get this request's fields.

In Lanekeeper's own processes, events go to the logger that was set with `use`; in an application that has configured
structlog, to structlog; otherwise to the standard library's logger `lanekeeper`, which writes nothing until the
application configures logging. structlog is not needed.
"""

import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar, Token
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import structlog

_STANDARD = logging.getLogger("lanekeeper")
_STANDARD.addHandler(logging.NullHandler())  # without a handler, Python prints warnings on standard error
_LEVELS = logging.getLevelNamesMapping() | {"EXCEPTION": logging.ERROR}


class LogSubject(Protocol):
    """A request that is being worked on."""

    def log_fields(self) -> Mapping[str, Any]: ...


_subject: ContextVar[LogSubject | None] = ContextVar("lanekeeper_log_subject", default=None)


class about:
    """Adds the fields of a request to log lines that are written in this `with` block, or by tasks started in it. They
    are read only when a line is written, so a line that is filtered out costs nothing."""

    __slots__ = ("_subject", "_token")

    def __init__(self, subject: LogSubject) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        self._token: Token[LogSubject | None] = _subject.set(self._subject)

    def __exit__(self, *_: object) -> None:
        _subject.reset(self._token)


def fields_of_subject() -> Mapping[str, Any]:
    """Those of the enclosing `about` block."""
    return {} if (subject := _subject.get()) is None else subject.log_fields()


class _Logger:
    """Chooses where an event goes only when it is logged, because an application may configure logging after our
    modules were imported."""

    service: "structlog.stdlib.BoundLogger | None" = None
    """Bound once: logging takes four times as long if structlog's `bind` is called for each line."""

    def __getattr__(self, name: str) -> Any:
        if self.service is not None:
            return getattr(self.service, name)
        structlog = sys.modules.get("structlog")
        if structlog is not None and structlog.is_configured():
            return getattr(structlog.get_logger(), name)
        return _write if name == "log" else partial(_write, _LEVELS[name.upper()])


def _write(level: int, event: str, **fields: Any) -> None:
    if _STANDARD.isEnabledFor(level):
        shown = " ".join(f"{name}={value!r}" for name, value in {"event": event, **fields}.items())
        _STANDARD.log(level, "%s", shown, stacklevel=2)


def use(service: "structlog.stdlib.BoundLogger | None") -> "structlog.stdlib.BoundLogger | None":
    """Send the log events of this process to this logger. Returns the one that was used before."""
    before, _Logger.service = _Logger.service, service
    return before


def logger() -> "structlog.stdlib.BoundLogger":
    """The logger of a module."""
    return cast("structlog.stdlib.BoundLogger", _Logger())
