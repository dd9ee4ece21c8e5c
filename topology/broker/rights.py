"""Whether a user may write to an exchange, found out without a message that anybody could get."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from aiormq.exceptions import ChannelAccessRefused, ChannelNotFoundEntity

from topology.broker.border import border
from topology.broker.connection import Connection
from topology.broker.publisher import CONFIRM_TIMEOUT_S
from topology.broker.session import CLOSE_TIMEOUT_S
from topology.contract.problems import AccessRefused, BrokerUnreachable, TopologyMismatch

SAID_WITHIN_S = 1.0
"""aiormq may raise a moment before it tells why the channel was closed."""


async def see_that_it_may_write(connection: Connection, routes: Iterable[tuple[str, str]]) -> None:
    """Publish to each exchange, under each key, and roll that back: the broker looks at the rights of all that is
    published, and routes only what is committed.

    Raises AccessRefused, TopologyMismatch (no such exchange), BrokerBlocked, BrokerUnreachable (it is not known).
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
