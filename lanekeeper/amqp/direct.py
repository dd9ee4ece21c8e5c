"""Direct reply-to: the broker delivers replies straight to the channel that published, without a queue.

Consumers do not acknowledge such replies, and each reply is delivered at most once.

replies = DirectReplies(on_reply=…, on_lost=…)
publisher = Publisher(connection, tracing=tracing, on_channel=replies.consume)
"""

from collections.abc import Callable
from contextlib import suppress

from aiormq.channel import Channel
from aiormq.exceptions import ChannelAccessRefused

from lanekeeper.amqp.driver.alarms import tap_of
from lanekeeper.amqp.driver.border import border
from lanekeeper.amqp.driver.incoming import Delivered, left_to_the_tap
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import DIRECT_REPLY_TO
from lanekeeper.contract.problems import AccessRefused, BrokerUnreachable

RPC_TIMEOUT_S = 30
"""The time limit, in seconds, for beginning to consume direct replies."""
CLOSE_TIMEOUT_S = 3
"""The time limit, in seconds, for closing the channel of direct replies."""


class DirectReplies:
    """Receives the replies that RabbitMQ's direct reply-to delivers to the channel on which a request was published.
    When that channel is lost, the publisher opens another, and calls `consume` with it."""

    def __init__(self, *, on_reply: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        """`on_reply` is called with each reply. `on_lost` is called when the channel has closed: messages that were
        published on it get no more replies."""
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._channel: Channel | None = None

    @property
    def is_open(self) -> bool:
        return self._channel is not None and not self._channel.is_closed

    async def consume(self, channel: Channel) -> None:
        """Start receiving replies on a channel. This is to be passed to the publisher as `on_channel`, because the
        broker requires the consumer before the first publish.

        Raises BrokerUnreachable, AccessRefused.
        """
        tap_of(channel).on_delivery = self._on_delivery
        with border("no direct replies"):
            try:
                await channel.basic_consume(DIRECT_REPLY_TO, left_to_the_tap, no_ack=True, timeout=RPC_TIMEOUT_S)
            except ChannelAccessRefused as error:
                raise AccessRefused(str(error)) from error
        self._channel = channel
        channel.closing.add_done_callback(lambda _: self._on_lost())

    async def close(self) -> None:
        if self._channel is not None:
            with suppress(BrokerUnreachable), border("closing"):
                await self._channel.close(timeout=CLOSE_TIMEOUT_S)

    def _on_delivery(self, delivered: Delivered) -> None:
        self._on_reply(delivered.message)
