"""Checks that the AMQP user may send replies, and whether the broker adds a timestamp to messages (RabbitMQ 3.12 or
later does so if it is configured to)."""

import asyncio
import uuid

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import BROKER_TIMESTAMP_MS, SENT_MS
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry.tracing import Tracing
from service.checks.providers import Finding
from topology.broker.inbox import Inbox
from topology.declaration import is_before

WITHIN_S = 5.0
"""How many seconds `lanekeeper check` waits for the reply that it sends to its own queue as a test."""
SINCE = (3, 12)
SETTING = "message_interceptors.incoming.set_header_timestamp.overwrite = false"
WITHOUT = f"the wait and the deadline of a request without {SENT_MS} count from its first delivery"


async def replies(connection: Connection) -> list[Finding]:
    """Check that replies can be sent and received: publish a message through the default exchange to a new queue, and
    consume it from there. Returns the results of two checks: of the user's permissions, and of the broker's timestamps.
    """
    try:
        async with Inbox(connection) as inbox:
            message = Message(body=b"{}", message_id=uuid.uuid4().hex, persistent=False)
            await Publisher(connection, tracing=Tracing()).publish(
                message, exchange="", routing_key=inbox.name, traced=False, timeout_s=WITHIN_S
            )
            async with asyncio.timeout(WITHIN_S):
                received = await anext(inbox)
    except TimeoutError:
        return [Finding("permissions", False, f"a reply to a queue of its own did not come within {WITHIN_S:g} s")]
    except BrokerError as error:
        return [Finding("permissions", False, f"{error}; see the users in: lanekeeper topology export")]
    return [
        Finding("permissions", True, "replies can be sent and taken"),
        Finding("clock", True, _clock(connection.version, has_timestamp=BROKER_TIMESTAMP_MS in received.headers)),
    ]


def _clock(version: str, *, has_timestamp: bool) -> str:
    if has_timestamp:
        return f"the broker writes {BROKER_TIMESTAMP_MS}: waits and deadlines count from then"
    if is_before(version, SINCE):
        return f"{WITHOUT}: RabbitMQ {version} cannot tell when it came"
    return f"{WITHOUT}; recommended in rabbitmq.conf: {SETTING}"
