"""Writes logs: events with fields, on standard error, as JSON lines or, on a terminal, as columns.

Standard output is only for the output of commands. Messages that libraries write with Python's `logging` become events
with the name `library.warned` (those of OpenTelemetry, which sends the trace spans: `traces.lost`). Only messages of
libraries from the level WARNING up are logged, because below that level some libraries log whole requests.
"""

import logging
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from consumers.log_subject import fields_of_subject
from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.telemetry import signals
from service.telemetry import redaction

Format = Literal["auto", "json", "console"]
_FRAMES: Final = 12
_SELDOM_S: Final = 60.0


@contextmanager
def configured(
    *, service: str, level: str, format: Format = "auto", with_content: bool = False, stream: TextIO | None = None
) -> Iterator[None]:
    """Write logs to `stream` (None: standard error) inside the block. `level`: of our events, not of libraries."""
    out = sys.stderr if stream is None else stream
    console = format == "console" or (format == "auto" and out.isatty())
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.configure(
        processors=_processors(service, console=console, colours=out.isatty(), with_content=with_content),
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        # Loggers are created at import; if they were cached, a later configuration (as in tests) would have no effect.
        cache_logger_on_first_use=False,
    )
    client = logging.getLogger("lanekeeper")
    client_level = client.level
    client.setLevel(level.upper())
    libraries = _Libraries()
    root = logging.getLogger()
    # If this block is inside another one, the outer block has added the handler, which uses the current configuration.
    added = not any(isinstance(handler, _Libraries) for handler in root.handlers)
    if added:
        root.addHandler(libraries)
    try:
        yield
    finally:
        if added:
            root.removeHandler(libraries)
        client.setLevel(client_level)
        if before is None:
            structlog.reset_defaults()
        else:
            structlog.configure(**before)


def _processors(service: str, *, console: bool, colours: bool, with_content: bool) -> list[Processor]:
    def order(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        first = {name: event.pop(name) for name in ("timestamp", "level", "event")}
        return {**first, "service": service, **event}

    def subject(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {**fields_of_subject(), **event}

    def explain(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        if error := _error_of(event.pop("exc_info", None)):
            event["exception"] = explained(error, with_content=with_content)
        return event

    def redact(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return redaction.fields(event, with_content=with_content)

    def join_lines(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        if "exception" in event:
            event["exception"] = "\n".join(event["exception"])
        return event

    shared: list[Processor] = [
        subject,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        explain,
    ]
    if console:
        return [*shared, redact, join_lines, structlog.dev.ConsoleRenderer(colors=colours, sort_keys=False)]
    return [*shared, order, redact, structlog.processors.JSONRenderer()]


def explained(error: BaseException, *, with_content: bool = False) -> list[str]:
    """An exception and its causes in lines, without source or variables. Only our own texts and those of OSErrors are
    told, because others may quote content."""
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(lines) < 4 * _FRAMES:
        lines.append(f"{type(cause).__module__}.{type(cause).__qualname__}{_text_of(cause, with_content=with_content)}")
        frames = traceback.extract_tb(cause.__traceback__, limit=-_FRAMES)
        lines += [f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return lines


def _text_of(error: BaseException, *, with_content: bool) -> str:
    if with_content:
        return f": {error}"
    if (brief := getattr(error, "brief", None)) is not None:
        return f": {brief}"
    return f": {error}" if isinstance(error, LanekeeperError | OSError) else ""


def _error_of(exc_info: Any) -> BaseException | None:
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple):
        return exc_info[1] if isinstance(exc_info[1], BaseException) else None
    return sys.exception() if exc_info else None


class _Libraries(logging.Handler):
    """Makes events of libraries' messages; of OpenTelemetry's exporter at most one a minute. Those of our own client
    are events already."""

    def __init__(self) -> None:
        super().__init__()
        self._log = structlog.get_logger()
        self._quiet_until_s = 0.0
        self._suppressed = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # Only the first line, because asyncio quotes a task and its exception in further lines.
            text = record.getMessage().partition("\n")[0]
            if record.name == "lanekeeper":
                self._log.log(record.levelno, record.__dict__["event"], **record.__dict__["fields"])
            elif record.levelno < logging.WARNING:
                return
            elif record.name.startswith("opentelemetry.trace."):
                return  # about headers, which anybody may have written, and with their text
            elif record.name.startswith("opentelemetry."):
                self._log_lost_spans(text)
            else:
                self._log.log(
                    record.levelno, signals.LIBRARY_WARNED, library=record.name, message=text, exc_info=record.exc_info
                )
        except Exception:  # a logging call must not raise in the library that made it
            self.handleError(record)

    def _log_lost_spans(self, text: str) -> None:
        if time.monotonic() < self._quiet_until_s:
            self._suppressed += 1
            return
        self._quiet_until_s = time.monotonic() + _SELDOM_S
        self._log.warning(signals.TRACES_LOST, error=text, suppressed=self._suppressed)
        self._suppressed = 0
