"""An application tries to publish past its topic permissions, by having the broker dead-letter its messages.

The broker looks at topic permissions where something is published, and not where it is dead-lettered.
"""

from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import aio_pika
import pytest
from aiormq.exceptions import ChannelAccessRefused

from tests.support.brokers import Vhost
from tests.support.requester import requester
from tests.support.serving import serving
from tests.support.users import Act, Broker, imported_users
from tests.support.waiting import until

pytestmark = pytest.mark.oldest_version

ESCAPE: dict[str, Any] = {
    "x-dead-letter-exchange": "lane.requests",
    "x-dead-letter-routing-key": "critical.finance.report",
    "x-message-ttl": 0,
}
NAMES = ("", "amq.gen-mine", "mine", "{own}", "{own}.more")
STREAMED = b'{"prompt": "one two three four five six seven eight nine ten"}'


@pytest.fixture
async def broker_with_users(vhost: Vhost) -> AsyncIterator[Broker]:
    async with imported_users(vhost) as it:
        yield it


@pytest.mark.parametrize("role", ["application", "client"])
async def test_an_application_cannot_publish_to_another_lane_by_dead_lettering(
    role: str, broker_with_users: Broker, vhost: Vhost
) -> None:
    it = broker_with_users
    async with serving(vhost.amqp_url, declares=False) as worker, requester(vhost.amqp_url) as admin:
        await admin.read_dead()
        channel = await (await it.connection(role)).channel()
        try:
            queue = (await channel.declare_queue(exclusive=True, arguments=ESCAPE)).name
        except ChannelAccessRefused:
            queue = None
        if queue is not None:
            lane = it.users[role].lanes[0]
            message = aio_pika.Message(STREAMED, reply_to=queue, headers={"x-lane-stream": True}, message_id="streamed")
            requests = await channel.get_exchange("lane.requests", ensure=False)
            await requests.publish(message, f"{lane}.{it.users[role].name}.chat")
            await until(lambda: admin.dead)

        forged = [each for each in admin.dead if each.headers["x-lane-routing-key"] == "critical.finance.report"]
        assert (queue, len(forged), len(worker.api.calls)) == (None, 0, 0)


async def test_an_application_cannot_declare_a_queue_of_any_name(broker_with_users: Broker) -> None:
    it = broker_with_users
    declared: list[str] = []
    for role, arguments, name in product(("application", "client"), ({}, ESCAPE), NAMES):
        queue = name.format(own=f"lane.reply.{it.users[role].name}")
        if await it.may(role, declaring(queue, arguments)):
            declared.append(f"{role}: {name!r} {arguments}")

    assert declared == []


def declaring(queue: str, arguments: dict[str, Any]) -> Act:
    return Act(
        f"declare {queue}",
        lambda channel: channel.declare_queue(queue, durable=bool(queue), arguments=arguments),
    )
