"""aiormq's connection, which also tells when the broker blocks it, a memory or disk alarm, and logs nothing itself.

aiormq 7 hears of it (`Connection.Blocked`) and tells nobody: it only logs, and holds back its writer where that has
not begun. What is private to it and overridden here is here alone; `tests/broker/test_alarms.py` fails if it goes.
RabbitMQ tells a connection only once it publishes, and from then on reads nothing from it: acknowledgements neither.
"""

import ssl
from collections.abc import Callable
from typing import Any

from aiormq.abc import AbstractChannel
from aiormq.connection import Connection as Underlying
from pamqp.commands import Connection as Frames
from yarl import URL

from lanekeeper.amqp.driver.quiet import Ours, quietly

OVERRIDDEN = ("_Connection__handle_connection_blocked", "_Connection__handle_connection_unblocked")

OnAlarm = Callable[[str | None], None]
"""Called with the broker's reason ("low on memory") when it blocks the connection, with None when that is over."""


class Alarmed(Ours, Underlying):
    """A connection that calls `on_alarm`."""

    def __init__(self, url: URL, *, context: ssl.SSLContext | None, on_alarm: OnAlarm) -> None:
        super().__init__(url, context=context)
        self._on_alarm = on_alarm

    async def connect(self, *args: Any, **kwargs: Any) -> bool:
        with quietly():
            return bool(await super().connect(*args, **kwargs))

    async def channel(self, *args: Any, **kwargs: Any) -> AbstractChannel:
        with quietly():
            return await super().channel(*args, **kwargs)

    async def _Connection__handle_connection_blocked(self, frame: Frames.Blocked) -> None:
        self._on_alarm(frame.reason or "alarm")

    async def _Connection__handle_connection_unblocked(self, frame: Frames.Unblocked) -> None:
        self._on_alarm(None)
