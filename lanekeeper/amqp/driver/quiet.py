"""aiormq logs a traceback for each connection that is lost, and a line for each try: of ours, we tell that ourselves.

In an application that has configured no logging, Python prints both on standard error. aiormq's tasks inherit the
context that they are begun in, and what it logs in a caller's task names the channel: so what concerns our connections
is known, and what the application does with aiormq itself is told as before.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_OURS: ContextVar[bool] = ContextVar("aiormq_works_for_lanekeeper", default=False)


class Ours:
    """A connection of which we log ourselves."""


class _OfOthers(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        named = record.args if isinstance(record.args, tuple) else ()
        return not (_IS_OURS.get() or any(isinstance(getattr(each, "connection", None), Ours) for each in named))


_OF_OTHERS = _OfOthers()


def hush() -> None:
    """Pass over what aiormq logs `quietly`. Safe to call more than once."""
    for name in ("aiormq.connection", "aiormq.connection.marshall", "aiormq.channel"):
        logging.getLogger(name).addFilter(_OF_OTHERS)


@contextmanager
def quietly() -> Iterator[None]:
    """For calls in which aiormq begins its tasks for a connection or a channel of ours."""
    token = _IS_OURS.set(True)
    try:
        yield
    finally:
        _IS_OURS.reset(token)
