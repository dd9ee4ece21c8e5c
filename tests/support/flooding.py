"""Cancellations of ids that nobody uses, so many a second, from a process of its own.

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
from pamqp.commands import Basic

STEP_S = 0.02


async def flood(url: str, *, per_s: int, user: str) -> None:
    """Publish without confirms until killed; with an address that answers go to, as an application would."""
    connection = await aiormq.connect(url)
    channel = await connection.channel(publisher_confirms=False)
    declared = await channel.queue_declare(exclusive=True, auto_delete=True, arguments={"x-max-length": 1000})

    async def drop(_: object) -> None:
        """Nobody reads them."""

    await channel.basic_consume(declared.queue or "", drop, no_ack=True)
    began, sent = time.monotonic(), 0
    while True:
        while sent < (time.monotonic() - began) * per_s:
            sent += 1
            await channel.basic_publish(
                b'{"cancel": "%s"}' % uuid.uuid4().hex.encode(),
                exchange="lane.control",
                routing_key="cancel",
                properties=Basic.Properties(
                    message_type="cancel", user_id=user or None, reply_to=declared.queue, delivery_mode=2
                ),
                wait=False,
            )
            if sent == 1:
                print("flooding", flush=True)
        await asyncio.sleep(STEP_S)


@asynccontextmanager
async def flooding(url: str, *, per_s: int, user: str = "") -> AsyncIterator[None]:
    """From the first message on, until left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.flooding", url, str(per_s), user, stdout=-1
    )
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), timeout=20) == b"flooding\n"
        yield
    finally:
        process.kill()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(flood(sys.argv[1], per_s=int(sys.argv[2]), user=sys.argv[3]))
