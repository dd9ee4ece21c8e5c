"""Finds out whether a user may write to an exchange, without a message that anybody receives."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

from aiormq.exceptions import ChannelAccessRefused, ChannelNotFoundEntity

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver.border import border
from lanekeeper.amqp.publisher import CONFIRM_TIMEOUT_S
from lanekeeper.contract.problems import AccessRefused, BrokerError, BrokerUnreachable, TopologyMismatch
from topology.broker.session import CLOSE_TIMEOUT_S

AGAIN_S = 1.0
SAID_WITHIN_S = 1.0
"""How long to wait for the reason: aiormq may raise before it knows why the channel was closed."""


class WritingRights:
    """Whether a user may write. During an alarm this is unknown, because the broker reads no publishes."""

    def __init__(self, connection: Connection, routes: Sequence[tuple[str, str]]) -> None:
        self._connection = connection
        self._routes = routes
        self.trouble: str | None = "whether it may write is not known yet"
        """Why no request should be taken; None once the user may write."""

    async def look(self) -> None:
        """Raises as `see_that_it_may_write`."""
        try:
            await see_that_it_may_write(self._connection, self._routes)
        except AccessRefused as error:
            self.trouble = str(error)
            raise
        self.trouble = None

    async def run(self) -> None:
        while self.trouble is not None:
            await asyncio.sleep(AGAIN_S)
            with suppress(BrokerError):
                await self.look()


async def see_that_it_may_write(connection: Connection, routes: Iterable[tuple[str, str]]) -> None:
    """Publish to each exchange with each key in a transaction, and roll it back. The broker checks the rights of each
    publish, and routes only what is committed.

    Raises AccessRefused, TopologyMismatch (no such exchange), BrokerBlocked, BrokerUnreachable (it is not known).
    """
    await connection.flowing(timeout_s=CONFIRM_TIMEOUT_S)
    channel = await connection.raw_channel(confirms=False)
    try:
        with border("whether it may write is not known"):
            async with asyncio.timeout(CONFIRM_TIMEOUT_S):
                await channel.tx_select()
                for exchange, routing_key in routes:
                    await channel.basic_publish(b"", exchange=exchange, routing_key=routing_key)
                await channel.tx_rollback()
    except BrokerUnreachable:
        closing = channel.closing
        await asyncio.wait((closing,), timeout=SAID_WITHIN_S)
        why = closing.exception() if closing.done() and not closing.cancelled() else None
        if isinstance(why, ChannelAccessRefused):
            raise AccessRefused(str(why)) from why
        if isinstance(why, ChannelNotFoundEntity):
            raise TopologyMismatch(f"{why}; run: lanekeeper topology apply") from why
        raise
    finally:
        with suppress(BrokerUnreachable), border("closing"):
            await channel.close(timeout=CLOSE_TIMEOUT_S)
