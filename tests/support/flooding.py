"""Floods the control queue with cancellations of unused ids, at a fixed rate, from a separate process.

async with flooding(url, per_s=1500, user="bank"):
    …
"""

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiormq
from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from tests.support.waiting import STARTED_S

STEP_S = 0.02
AT_ONCE = 500
"""Largest number sent at once, when it is behind its rate on a busy machine."""
PILED_UP_AT_MOST = 5000
"""Most messages waiting in the queue, as the exported policy sets it."""


async def flood(url: str, *, per_s: int, user: str) -> None:
    """Publish without confirms until killed, with a reply address as an application would."""
    connection = await aiormq.connect(url)
    channel = await connection.channel(publisher_confirms=False)
    assert isinstance(channel, Channel)
    declared = await channel.queue_declare(exclusive=True, auto_delete=True, arguments={"x-max-length": 1000})

    async def drop(_: object) -> None:
        """Ignore the answers."""

    await channel.basic_consume(declared.queue or "", drop, no_ack=True)
    properties = Basic.Properties(message_type="cancel", user_id=user or None, reply_to=declared.queue, delivery_mode=2)
    began, sent = time.monotonic(), 0
    while True:
        waiting = (await channel.queue_declare("lane.control", passive=True)).message_count or 0
        due = min(round((time.monotonic() - began) * per_s) - sent, AT_ONCE, PILED_UP_AT_MOST - waiting)
        if due > 0:
            await channel.write_queue.put(_cancellations(due, channel.number, properties))
            if not sent:
                print("flooding", flush=True)
            sent += due
        await asyncio.sleep(STEP_S)


def _cancellations(count: int, channel: int, properties: Basic.Properties) -> ChannelFrame:
    """The messages as one write, so that making the flood costs little CPU time."""
    publish = Basic.Publish(exchange="lane.control", routing_key="cancel")
    bodies = [b'{"cancel": "%s"}' % uuid.uuid4().hex.encode() for _ in range(count)]
    frames = [each for body in bodies for each in (publish, ContentHeader(0, len(body), properties), ContentBody(body))]
    return ChannelFrame.marshall(channel_number=channel, frames=frames)


@asynccontextmanager
async def flooding(url: str, *, per_s: int, user: str = "") -> AsyncIterator[None]:
    """Flood while the block lasts; it begins once the first messages are written."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.flooding", url, str(per_s), user, stdout=-1
    )
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), timeout=STARTED_S) == b"flooding\n"
        yield
    finally:
        process.kill()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(flood(sys.argv[1], per_s=int(sys.argv[2]), user=sys.argv[3]))
