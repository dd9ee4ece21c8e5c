"""The request that log lines are about: lines that are written while it is worked on get its fields."""

from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Any, Protocol


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
