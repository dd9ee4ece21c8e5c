"""Publishes messages on one channel with publisher confirms. Many messages may wait for their confirms at the same
time.

The broker numbers the messages of a channel, and a confirm is for one number, or for all numbers up to that one. If no
queue is bound for a mandatory message, the broker first returns the message and then confirms it. A returned message
does not contain its number, so it is matched by its `message_id`; therefore a mandatory message is published only when
no other mandatory message with the same id waits for its confirm.
"""

import asyncio

from aiormq.channel import Channel
from aiormq.exceptions import AMQPError, ChannelInvalidStateError

from lanekeeper.amqp.driver.alarms import tap_of
from lanekeeper.amqp.driver.outgoing import encoded, frames
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerError, PublishRefused, Unroutable

Answer = type[BrokerError] | None
"""What the broker answers to a publish: None if it accepted the message, else the class of the error to raise."""


class Confirming:
    """Publishes on one channel in confirm mode, and matches the broker's confirms and returned messages to the
    publishes that wait for them. Nothing else may publish on this channel, because confirms are matched by counting
    publishes."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._published = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._mandatory: dict[str, asyncio.Future[Answer]] = {}
        tap = tap_of(channel)
        tap.on_confirm, tap.on_return = self._on_confirm, self._on_return
        channel.closing.add_done_callback(self._on_closed)

    async def write(
        self, message: Message, *, exchange: str, routing_key: str, mandatory: bool
    ) -> "asyncio.Future[Answer]":
        """Wait for room in the channel's write queue, put the message into it, and return a future that gets the
        broker's answer: None for an ack, else the class of the error (PublishRefused for a nack, Unroutable for a
        returned message). The future raises AMQPError if the channel is lost before the answer arrives."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        channel = self.channel
        frame = frames(
            channel, message.body, exchange=exchange, routing_key=routing_key, properties=encoded(message),
            mandatory=mandatory,
        )  # fmt: skip
        if mandatory:
            message_id = message.message_id or ""
            while (other := self._mandatory.get(message_id)) is not None:
                await asyncio.wait([other])
            self._mandatory[message_id] = answer
            answer.add_done_callback(lambda _: self._mandatory.pop(message_id))
        try:
            if not channel.is_closed:
                await channel.write_queue.put(frame)
            if channel.is_closed:  # no confirm will come
                raise ChannelInvalidStateError("the channel is closed")
        except BaseException:
            answer.cancel()
            raise
        # no await between writing and counting: the number must equal the tag that the broker gives this message
        self._published += 1
        self._waiting[self._published] = answer
        return answer

    def _on_confirm(self, tag: int, up_to: bool, accepted: bool) -> None:
        for confirmed in [waiting for waiting in self._waiting if waiting <= tag] if up_to else [tag]:
            answer = self._waiting.pop(confirmed, None)
            if answer is not None and not answer.done():
                answer.set_result(None if accepted else PublishRefused)

    def _on_return(self, message: Message) -> None:
        answer = self._mandatory.get(message.message_id or "")
        if answer is not None and not answer.done():
            answer.set_result(Unroutable)

    def _on_closed(self, closing: "asyncio.Future[object]") -> None:
        error = None if closing.cancelled() else closing.exception()
        if not isinstance(error, AMQPError):
            error = ChannelInvalidStateError(f"the channel was lost: {error or 'connection lost'}")
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # marks it as retrieved: asyncio logs errors of futures that nobody awaits
        self._waiting.clear()
