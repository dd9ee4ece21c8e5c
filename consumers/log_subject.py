"""The request that log lines are about: lines that are written while it is worked on get its fields."""

from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Any, Protocol


class LogSubject(Protocol):
    """A request that is being worked on."""

    def log_fields(self) -> Mapping[str, Any]: ...


class _Held:
    """Until its block ends, the subject; then only its fields. The context of a block lives on in tasks that were
    started in it, and in each timer that was cancelled, which the event loop keeps until its time would have come: the
    subject, with the body of its request, would stay for minutes."""

    __slots__ = ("fields", "subject")

    def __init__(self, subject: LogSubject) -> None:
        self.subject: LogSubject | None = subject
        self.fields: Mapping[str, Any] = {}

    def end(self) -> None:
        if self.subject is not None:
            self.fields, self.subject = self.subject.log_fields(), None


_held: ContextVar[_Held | None] = ContextVar("lanekeeper_log_subject", default=None)


class about:
    """Adds the fields of a request to log lines that are written in this `with` block, or by tasks started in it. They
    are read when a line is written, so a line that is filtered out costs nothing, and at the end of the block."""

    __slots__ = ("_held", "_token")

    def __init__(self, subject: LogSubject) -> None:
        self._held = _Held(subject)

    def __enter__(self) -> None:
        self._token: Token[_Held | None] = _held.set(self._held)

    def __exit__(self, *_: object) -> None:
        _held.reset(self._token)
        self._held.end()


def fields_of_subject() -> Mapping[str, Any]:
    """Those of the enclosing `about` block."""
    if (held := _held.get()) is None:
        return {}
    return held.fields if held.subject is None else held.subject.log_fields()
