"""Checks whether the worker's user may publish to all exchanges that it needs, without delivering a message."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

from aiormq.exceptions import ChannelAccessRefused, ChannelNotFoundEntity

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver.border import border
from lanekeeper.amqp.publisher import CONFIRM_TIMEOUT_S
from lanekeeper.contract.problems import AccessRefused, BrokerError, BrokerUnreachable, TopologyMismatch
from topology.broker.session import CLOSE_TIMEOUT_S

CHECK_EVERY_S = 1.0
"""The seconds between two checks of the user's permissions while a permission is missing."""
REASON_WITHIN_S = 1.0
"""How many seconds to wait for the broker's reason for closing a channel: aiormq may raise its exception before it has
received the reason."""


class WritingRights:
    """Checks whether the worker's AMQP user may publish to all `routes` (pairs of an exchange and a routing key), and
    keeps the result in `trouble`. During a memory or disk alarm this cannot be checked, because the broker reads no
    publishes."""

    def __init__(self, connection: Connection, routes: Sequence[tuple[str, str]]) -> None:
        self._connection = connection
        self._routes = routes
        self.trouble: str | None = "whether it may write is not known yet"
        """Why the worker must not take requests: its user may not publish to one of the routes, or this was not checked
        yet. None if the user may publish to all routes."""

    async def check(self) -> None:
        """Check once whether the user may publish to all routes. Raises the errors of `check_write_rights`."""
        try:
            await check_write_rights(self._connection, self._routes)
        except AccessRefused as error:
            self.trouble = str(error)
            raise
        self.trouble = None

    async def run(self) -> None:
        """Check repeatedly, with pauses, until the user may publish to all routes."""
        while self.trouble is not None:
            await asyncio.sleep(CHECK_EVERY_S)
            with suppress(BrokerError):
                await self.check()


async def check_write_rights(connection: Connection, routes: Iterable[tuple[str, str]]) -> None:
    """Check that the connection's user may publish to each route (a pair of an exchange and a routing key).

    It publishes in a transaction and rolls it back. The broker checks rights at each publish, and delivers messages
    only at a commit, so nothing is delivered. Raises AccessRefused, TopologyMismatch (no such exchange), or, if the
    rights could not be checked, BrokerBlocked or BrokerUnreachable.
    """
    await connection.flowing(timeout_s=CONFIRM_TIMEOUT_S)
    channel = await connection.channel(confirms=False)
    try:
        with border("whether it may write is not known"):
            async with asyncio.timeout(CONFIRM_TIMEOUT_S):
                await channel.tx_select()
                for exchange, routing_key in routes:
                    await channel.basic_publish(b"", exchange=exchange, routing_key=routing_key)
                await channel.tx_rollback()
    except BrokerUnreachable:
        closing = channel.closing
        await asyncio.wait((closing,), timeout=REASON_WITHIN_S)
        why = closing.exception() if closing.done() and not closing.cancelled() else None
        if isinstance(why, ChannelAccessRefused):
            raise AccessRefused(str(why)) from why
        if isinstance(why, ChannelNotFoundEntity):
            raise TopologyMismatch(f"{why}; run: lanekeeper topology apply") from why
        raise
    finally:
        with suppress(BrokerUnreachable), border("closing"):
            await channel.close(timeout=CLOSE_TIMEOUT_S)
