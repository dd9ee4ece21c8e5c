"""A memory alarm: publishers get an error, and nothing is written to a connection that the broker does not read."""

import asyncio
import time

import pytest
from aiormq.connection import Connection as Underlying
from structlog.testing import capture_logs

from lanekeeper.amqp import driver
from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerBlocked, BrokerUnreachable, ConfirmUnknown
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import Tracing
from service.private_broker import PrivateBroker
from tests.support.alarms import memory_alarm
from tests.support.waiting import until
from topology.broker.admin import WritingRights

MESSAGE = Message(body=b"x")


def test_the_methods_of_aiormq_that_we_override_still_exist() -> None:
    for name in ("_Connection__handle_connection_blocked", "_Connection__handle_connection_unblocked"):
        assert name in vars(Underlying), "aiormq has changed: an alarm would not be noticed"
        assert name in vars(driver.UnderlyingConnection)


@pytest.mark.every_version
async def test_while_blocked_nothing_is_published_and_afterwards_everything_is(own_broker: PrivateBroker) -> None:
    async with (
        Connection(own_broker.amqp_url, name="publish") as connection,
        Connection(own_broker.amqp_url, name="look") as looking,
    ):
        channel = await looking.channel(confirms=False)
        await channel.queue_declare("some", durable=True, arguments={"x-queue-type": "quorum"})
        publisher = Publisher(connection, tracing=Tracing())
        await publisher.publish(MESSAGE, exchange="", routing_key="some")

        async def publish_surely() -> None:
            await publisher.publish_surely(MESSAGE, exchange="", routing_key="some", within_s=60)

        with capture_logs() as logs:
            async with memory_alarm(own_broker.amqp_url):
                # the first was sent before the broker announced the alarm; its outcome is unknown
                with pytest.raises(ConfirmUnknown, match="low on memory"):
                    await publisher.publish(MESSAGE, exchange="", routing_key="some", timeout_s=2)
                alarms = connection.blocked, looking.blocked
                assert alarms == ("low on memory", None), "who does not publish goes on"
                began_s = time.monotonic()
                with pytest.raises(BrokerBlocked, match="memory or disk alarm") as blocked:
                    await publisher.publish(MESSAGE, exchange="", routing_key="some", timeout_s=0.5)
                assert time.monotonic() - began_s < 10
                assert not blocked.value.maybe_published
                surely = asyncio.create_task(publish_surely())
                with pytest.raises(BrokerBlocked):
                    await publisher.publish_surely(
                        MESSAGE, exchange="", routing_key="some", within_s=30, gives_up_on=(BrokerBlocked,)
                    )
                assert not surely.done()
            ended_s = time.monotonic()
            await asyncio.wait_for(surely, 60)
            assert time.monotonic() - ended_s < 20
            await publisher.publish(MESSAGE, exchange="", routing_key="some")
        assert connection.blocked is None
        assert connection.openings == 1, "the connection was kept"
        told = [each["event"] for each in logs if each["event"] in (signals.BROKER_BLOCKED, signals.BROKER_UNBLOCKED)]
        assert told == [signals.BROKER_BLOCKED, signals.BROKER_UNBLOCKED]

        async def is_there() -> bool:
            return (await depths(looking, ["some"]))["some"].ready == 4

        await until(
            is_there
        )  # the one before, the one whose outcome is unknown, the one published surely, the one after


async def test_a_missing_right_hidden_by_an_alarm_is_found_when_the_alarm_ends(own_broker: PrivateBroker) -> None:
    async with Connection(own_broker.amqp_url, name="publish") as connection:
        may = WritingRights(connection, (("", "some"),))
        may_not = WritingRights(connection, (("", "some"), ("amq.rabbitmq.trace", "x")))
        async with memory_alarm(own_broker.amqp_url):
            for each in (may, may_not):
                with pytest.raises((BrokerUnreachable, BrokerBlocked)):
                    await each.check()
                assert each.trouble is not None, "nothing is taken until it is known"
            runs = [asyncio.create_task(each.run()) for each in (may, may_not)]
        await until(lambda: may.trouble is None)
        await until(lambda: "ACCESS_REFUSED" in (may_not.trouble or ""))
        for run in runs:
            run.cancel()
