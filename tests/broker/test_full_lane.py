"""A lane that takes no more: the caller chooses how long to wait for a place."""

import asyncio

import pytest

from lanekeeper import Client, PublishRefused
from lanekeeper.amqp.connection import Connection
from tests.support.brokers import Vhost
from tests.support.serving import serving

KEY = "batch.tests.full"


async def fill(client: Client) -> None:
    """Publish until the lane refuses; a quorum queue notices late that it is full."""
    for n in range(50):
        await client.publish({"prompt": f"{n}"}, key=KEY)


async def test_a_caller_waits_for_a_place_as_long_as_it_chooses(vhost: Vhost) -> None:
    async with (
        serving(vhost.amqp_url, works=("critical",), lanes={"batch": {"max_length": 2}}),
        Client(vhost.amqp_url) as client,
        Connection(vhost.amqp_url, name="test") as connection,
    ):
        with pytest.raises(PublishRefused, match=r"the lane is full: lane\.batch") as refused:
            await fill(client)
        assert refused.value.retry_after_s > 0

        patient = asyncio.create_task(client.publish({"prompt": "a"}, key=KEY, message_id="a", full_within_s=120))
        usual = asyncio.create_task(client.publish({"prompt": "b"}, key=KEY))
        with pytest.raises(PublishRefused):
            await client.publish({"prompt": "c"}, key=KEY, full_within_s=0)
        assert not usual.done()
        with pytest.raises(PublishRefused):
            await usual
        assert not patient.done()

        channel = await connection.channel(confirms=False, timeout_s=5)
        await channel.queue_purge("lane.batch")
        assert await patient == "a"
