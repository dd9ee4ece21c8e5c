"""Direct reply-to: replies come to the channel that published, from no queue; unacknowledged, at most once."""

from collections.abc import Callable

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from aiormq.exceptions import ChannelAccessRefused

from topology.broker.border import border
from topology.broker.frames import message_of
from topology.contract.messages import Message
from topology.contract.problems import AccessRefused
from topology.names import DIRECT_REPLY_TO

RPC_TIMEOUT_S = 30


async def consume(channel: Channel, on_reply: Callable[[Message], None]) -> None:
    """Have replies to what this channel publishes handed to `on_reply`; it must be asked for before the first publish.

    Raises BrokerUnreachable, AccessRefused.
    """

    async def on_delivery(delivered: DeliveredMessage) -> None:
        on_reply(message_of(delivered))

    with border("no direct replies"):
        try:
            await channel.basic_consume(DIRECT_REPLY_TO, on_delivery, no_ack=True, timeout=RPC_TIMEOUT_S)
        except ChannelAccessRefused as error:
            raise AccessRefused(str(error)) from error
