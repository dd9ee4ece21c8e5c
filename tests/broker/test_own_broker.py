"""A broker that is killed and started again is the same broker, with the same data at the same place."""

import asyncio

import aiormq
from pamqp.commands import Basic

from service.private_broker.broker import PrivateBroker


async def test_a_killed_broker_comes_back_with_what_it_had_confirmed(own_broker: PrivateBroker) -> None:
    before = await aiormq.connect(own_broker.amqp_url)
    channel = await before.channel()
    await channel.queue_declare("kept", durable=True, arguments={"x-queue-type": "quorum"})
    # A quorum queue younger than that may not come back after SIGKILL: seen on 3.10, 4.0 and 4.3.
    await asyncio.sleep(2)
    await channel.basic_publish(b"confirmed", routing_key="kept", properties=Basic.Properties(delivery_mode=2))

    await own_broker.kill()
    await own_broker.start()

    after = await aiormq.connect(own_broker.amqp_url)
    message = await (await after.channel()).basic_get("kept", no_ack=True)
    assert message.body == b"confirmed"
    await after.close()
