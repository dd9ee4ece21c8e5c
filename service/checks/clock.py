"""Whether the broker adds a timestamp to messages: it can since 3.12, if configured."""

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

WITHIN_S = 5.0
SINCE = (3, 12)
SETTING = "message_interceptors.incoming.set_header_timestamp.overwrite = false"
WITHOUT = f"the wait and the deadline of a request without {SENT_MS} count from its first delivery"


async def clock(connection: Connection) -> Finding | None:
    """The finding about time stamps; None if this user may not receive replies, which another finding reports."""
    try:
        async with Inbox(connection) as inbox:
            message = Message(body=b"{}", message_id=uuid.uuid4().hex, persistent=False)
            await Publisher(connection, tracing=Tracing()).publish(
                message, exchange="", routing_key=inbox.name, traced=False, timeout_s=WITHIN_S
            )
            async with asyncio.timeout(WITHIN_S):
                came = await anext(inbox)
    except (BrokerError, TimeoutError):
        return None
    if BROKER_TIMESTAMP_MS in came.headers:
        return Finding("clock", True, f"the broker writes {BROKER_TIMESTAMP_MS}: waits and deadlines count from then")
    if not _can(connection.version):
        return Finding("clock", True, f"{WITHOUT}: RabbitMQ {connection.version} cannot tell when it came")
    return Finding("clock", True, f"{WITHOUT}; recommended in rabbitmq.conf: {SETTING}")


def _can(version: str) -> bool:
    major, _, rest = version.partition(".")
    return (int(major), int(rest.partition(".")[0])) >= SINCE
