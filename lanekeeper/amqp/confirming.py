"""Publishes on one channel with confirms: each message waits for its own confirm, many at once.

The broker counts the messages of a channel and confirms by number, one or all up to it. It sends back a mandatory
message that no queue takes, and confirms it after that; such a message is found by its id, so no two messages with one
id may be in flight (`Publisher` takes care of that).
"""

import asyncio
import uuid

from aiormq.channel import Channel
from aiormq.exceptions import AMQPError, ChannelInvalidStateError

from lanekeeper.amqp.driver.alarms import tap_of
from lanekeeper.amqp.driver.outgoing import encoded, frames
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerError, PublishRefused, Unroutable

Answer = type[BrokerError] | None
"""The broker's answer to a message: None, or why it did not take it."""


class Confirming:
    """A channel in confirm mode, on which nobody else publishes."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._published = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._by_id: dict[str, asyncio.Future[Answer]] = {}
        tap = tap_of(channel)
        tap.on_confirm, tap.on_return = self._on_confirm, self._on_return
        channel.closing.add_done_callback(self._on_closed)

    async def publish(self, message: Message, *, exchange: str, routing_key: str, mandatory: bool) -> Answer:
        """Publish and wait for what the broker says. Raises AMQPError if the channel is lost first."""
        channel, message_id = self.channel, message.message_id or uuid.uuid4().hex
        if channel.is_closed:
            raise ChannelInvalidStateError("the channel is closed")
        properties = encoded(message, message_id=message_id)
        frame = frames(
            channel, message.body, exchange=exchange, routing_key=routing_key, properties=properties,
            mandatory=mandatory,
        )  # fmt: skip
        await channel.write_queue.put(frame)
        if channel.is_closed:  # while it waited for room: nobody confirms it
            raise ChannelInvalidStateError("the channel was closed")
        # no await between writing and counting: the broker counts in the same order
        self._published = tag = self._published + 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[tag] = answer
        if not mandatory:
            return await answer
        self._by_id[message_id] = answer
        try:
            return await answer
        finally:
            del self._by_id[message_id]

    def _on_confirm(self, tag: int, up_to: bool, taken: bool) -> None:
        tags = [each for each in self._waiting if each <= tag] if up_to else [tag]
        for each in tags:
            answer = self._waiting.pop(each, None)
            if answer is not None and not answer.done():
                answer.set_result(None if taken else PublishRefused)

    def _on_return(self, message: Message) -> None:
        answer = self._by_id.get(message.message_id or "")
        if answer is not None and not answer.done():
            answer.set_result(Unroutable)

    def _on_closed(self, closing: "asyncio.Future[object]") -> None:
        error = None if closing.cancelled() else closing.exception()
        if not isinstance(error, AMQPError):
            error = ChannelInvalidStateError(f"the channel was lost: {error or 'connection lost'}")
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
        self._waiting.clear()
