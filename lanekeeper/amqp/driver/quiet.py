"""Silences aiormq's log lines about our connections, because we log these events ourselves.

aiormq logs a traceback for each lost connection and a line for each try to connect; in an application without logging,
Python prints both on standard error. Lines about our connections are recognised in two ways: the tasks that aiormq
starts for our connection inherit a context variable that we set before, and a line that aiormq logs in a caller's task
has the channel as an argument, which leads to the connection. Lines about the application's own use of aiormq are
logged as before.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IN_OWN_CONNECTION: ContextVar[bool] = ContextVar("aiormq_works_for_lanekeeper", default=False)


class QuietConnection:
    """The base class of Lanekeeper's own connections. It marks them, so that aiormq's log lines about them are
    dropped."""


class _OwnConnectionsFilter(logging.Filter):
    """Logging filter that drops aiormq's log lines about Lanekeeper's own connections, because Lanekeeper logs their
    failures itself. Lines about other connections of the application pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        logged = record.args if isinstance(record.args, tuple) else ()
        return not (
            _IN_OWN_CONNECTION.get()
            or any(isinstance(getattr(value, "connection", None), QuietConnection) for value in logged)
        )


_FILTER = _OwnConnectionsFilter()


def drop_log_lines() -> None:
    """Install a logging filter that drops what aiormq logs about Lanekeeper's connections, and no other log lines. Safe
    to call more than once."""
    for name in ("aiormq.connection", "aiormq.connection.marshall", "aiormq.channel"):
        logging.getLogger(name).addFilter(_FILTER)


@contextmanager
def quietly() -> Iterator[None]:
    """Mark the tasks that aiormq starts inside this `with` block as tasks of Lanekeeper's connections, so that their
    log lines are dropped."""
    token = _IN_OWN_CONNECTION.set(True)
    try:
        yield
    finally:
        _IN_OWN_CONNECTION.reset(token)
