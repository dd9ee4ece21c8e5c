"""Silences aiormq's log lines about our connections, because we log these events ourselves.

aiormq logs a traceback for each lost connection and a line for each try to connect; in an application without logging,
Python prints both on standard error. To recognise lines about our connections: aiormq's tasks inherit the context in
which they are started, and what it logs in a caller's task names the channel. Lines about the application's own use of
aiormq are logged as before.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_OURS: ContextVar[bool] = ContextVar("aiormq_works_for_lanekeeper", default=False)


class Ours:
    """Marks a connection whose events we log ourselves."""


class _OfOthers(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        named = record.args if isinstance(record.args, tuple) else ()
        return not (_IS_OURS.get() or any(isinstance(getattr(each, "connection", None), Ours) for each in named))


_OF_OTHERS = _OfOthers()


def hush() -> None:
    """Drop what aiormq logs about our connections. Safe to call more than once."""
    for name in ("aiormq.connection", "aiormq.connection.marshall", "aiormq.channel"):
        logging.getLogger(name).addFilter(_OF_OTHERS)


@contextmanager
def quietly() -> Iterator[None]:
    """Around calls in which aiormq starts its tasks for one of our connections or channels."""
    token = _IS_OURS.set(True)
    try:
        yield
    finally:
        _IS_OURS.reset(token)
