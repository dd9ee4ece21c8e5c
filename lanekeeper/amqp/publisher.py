"""Publishes messages. A message counts as published only when the broker has confirmed it; a message that the broker
returns as unroutable raises an error.

`publish` makes one attempt; `publish_surely` repeats it until the broker has confirmed the message or time is up.
"""

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from aiormq.channel import Channel
from aiormq.exceptions import AMQPError, ChannelAccessRefused, ChannelNotFoundEntity

from lanekeeper.amqp.confirming import Answer, Confirming
from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.limit import SMALL_BYTES, MessageLimit
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import (
    AccessRefused,
    BrokerBlocked,
    BrokerError,
    BrokerUnreachable,
    ConfirmUnknown,
    MessageTooLarge,
    PublishRefused,
    TopologyMismatch,
    Unroutable,
)
from lanekeeper.telemetry.tracing import Tracing

CONFIRM_TIMEOUT_S = 10.0
"""The time limit, in seconds, for one try to publish a message, including the wait for the broker's confirm."""
CONFIRM_LEAST_S = 1.0
"""The shortest time, in seconds, to wait for a confirm, even if waiting for a connection has used up most of the
publish's time limit."""
SURELY_WITHIN_S = 100.0
"""For how many seconds a worker tries to publish a reply: long enough for a restart of the broker. After that, the
worker returns the request to its queue; when the request is delivered again, its stored result is published."""
DEFAULT_EXCHANGE = "amq.default"
"""The name of the default exchange in RabbitMQ's error texts. It is searched for in the text of an error that closed a
channel: such an error fails all publishes that wait on the channel, and only the exchange in the text tells which of
them caused it."""
_LOST = (AMQPError, RuntimeError, OSError)
"""The exceptions that a publish raises if its channel is lost or its time limit is over (TimeoutError is an OSError).
"""


class Publisher:
    """Publishes messages and waits for the broker's confirms. It uses one channel of `connection`, and opens another
    when this channel is lost."""

    def __init__(
        self,
        connection: Connection,
        *,
        tracing: Tracing,
        on_missing: Callable[[], None] | None = None,
        on_channel: Callable[[Channel], Awaitable[None]] | None = None,
    ) -> None:
        """`on_missing` is called when `publish_surely` fails because an exchange is missing, or because no queue is
        bound for the routing key; the caller can then check the whole topology. `on_channel` is called with each new
        channel before the first publish on it."""
        self.connection = connection
        self._tracing = tracing
        self._confirming: Confirming | None = None
        self._opening = asyncio.Lock()
        self._on_missing = on_missing
        self._on_channel = on_channel
        self._limit = MessageLimit(connection)

    async def exceeded_limit(self, size: int) -> int | None:
        """Return the broker's limit for the size of a message in bytes, if a body of `size` bytes exceeds this limit.
        Returns None if it does not, or if the limit cannot be found out now; `publish` then checks the size again."""
        try:
            with suppress(BrokerUnreachable):
                await self._limit.check(size)
        except MessageTooLarge as error:
            return error.limit
        return None

    async def publish(
        self,
        message: Message,
        *,
        exchange: str,
        routing_key: str,
        mandatory: bool = True,
        timeout_s: float = CONFIRM_TIMEOUT_S,
        traced: bool = True,
    ) -> None:
        """Publish once and wait for the confirm.

        `traced`: whether to make a tracing span for the publish. Raises Unroutable (returned), PublishRefused (nack),
        ConfirmUnknown (no confirm came), BrokerBlocked (there was an alarm for all of `timeout_s`, so nothing was
        published), BrokerUnreachable, AccessRefused, MessageTooLarge (not sent), TopologyMismatch (no such exchange).
        """
        message.message_id = message.message_id or uuid.uuid4().hex
        if len(message.body) > SMALL_BYTES:
            await self._limit.check(len(message.body))
        span: AbstractContextManager[Any] = (
            self._tracing.send(message, exchange=exchange, routing_key=routing_key) if traced else nullcontext()
        )
        with span:
            confirming, timeout_s = await self._ready_channel(timeout_s)
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await confirming.write(
                        message, exchange=exchange, routing_key=routing_key, mandatory=mandatory
                    )
                    refused = await answer
            except _LOST as error:
                raise self._error_of(error, exchange, routing_key, timeout_s) from error
            if refused is Unroutable:
                raise Unroutable(f"no queue takes {routing_key!r} from exchange {exchange!r}")
            if refused is not None:
                raise PublishRefused(
                    f"the broker refused {routing_key!r}: a queue that it goes to is full; try again later"
                )

    async def write(
        self, message: Message, *, exchange: str, routing_key: str, timeout_s: float = CONFIRM_TIMEOUT_S
    ) -> "asyncio.Future[Answer]":
        """Publish once, and return a future of the broker's answer. This is used for the parts of a streamed answer, of
        which several are in flight at a time. The parts are published without AMQP's `mandatory` flag and without a
        tracing span. The broker receives them in the order of these calls.

        `timeout_s`: how long to wait for the connection, and for room in the write queue. Raises the errors of
        `publish`; the future raises AMQPError if the channel is lost.
        """
        message.message_id = message.message_id or uuid.uuid4().hex
        if len(message.body) > SMALL_BYTES:
            await self._limit.check(len(message.body))
        confirming, timeout_s = await self._ready_channel(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await confirming.write(message, exchange=exchange, routing_key=routing_key, mandatory=False)
        except _LOST as error:
            raise self._error_of(error, exchange, routing_key, timeout_s) from error

    async def publish_surely(
        self,
        message: Message,
        *,
        exchange: str,
        routing_key: str,
        mandatory: bool = True,
        within_s: float = SURELY_WITHIN_S,
        refused_within_s: float = 60,
        absent_within_s: float | None = None,
        gives_up_on: tuple[type[BrokerError], ...] = (),
    ) -> None:
        """Publish, and repeat the publish until the broker has confirmed the message, for at most `within_s` seconds;
        then raise the last error. The message may be published more than once.

        `refused_within_s`: a shorter time limit, which applies if the broker refuses the message (nack).
        `absent_within_s`: a shorter time limit, which applies while there is no connection and nothing was published
        yet; None: no shorter limit.

        Some errors are raised at once: AccessRefused, MessageTooLarge, those in `gives_up_on`, and Unroutable from the
        default exchange (the requester's reply queue does not exist any more). After Unroutable from one of
        Lanekeeper's exchanges the publish is repeated, because the queue that is missing may be declared again
        meanwhile. The raised error's `maybe_published` says whether any of the tries may have published the message.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        end = began + within_s
        pause_s = 0.05
        maybe_published = False
        while True:
            left_s = max(CONFIRM_LEAST_S, end - loop.time())
            if absent_within_s is not None and not maybe_published and not self.connection.is_open:
                await self.connection.underlying(timeout_s=max(0.0, began + absent_within_s - loop.time()))
            try:
                if BrokerBlocked in gives_up_on and self.connection.blocked is not None:
                    raise self.connection.blocked_error("try again later, under the same message_id")
                return await self.publish(
                    message,
                    exchange=exchange,
                    routing_key=routing_key,
                    mandatory=mandatory,
                    timeout_s=min(CONFIRM_TIMEOUT_S, left_s),
                )
            except BrokerError as error:
                maybe_published = error.maybe_published = maybe_published or error.maybe_published
                if isinstance(error, TopologyMismatch | Unroutable) and exchange and self._on_missing is not None:
                    self._on_missing()
                is_final = isinstance(error, (AccessRefused, MessageTooLarge, *gives_up_on))
                if is_final or (isinstance(error, Unroutable) and not exchange):
                    raise
                tries_end = min(end, began + refused_within_s) if isinstance(error, PublishRefused) else end
                if loop.time() + pause_s > tries_end:
                    raise
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(2.0, pause_s * 2)

    async def _ready_channel(self, timeout_s: float) -> tuple[Confirming, float]:
        """Wait until the broker accepts publishes. Returns the channel to publish on, and how many of the `timeout_s`
        seconds are left to wait for the confirm."""
        if self.connection.blocked is not None or not self.connection.is_open:
            # a message given to a blocked connection would still be published when the alarm ends
            end = asyncio.get_running_loop().time() + timeout_s
            await self.connection.flowing(timeout_s=timeout_s)
            timeout_s = max(CONFIRM_LEAST_S, end - asyncio.get_running_loop().time())
        if self._confirming is None or self._confirming.channel.is_closed:
            async with self._opening:
                if self._confirming is None or self._confirming.channel.is_closed:
                    channel = await self.connection.channel(confirms=True, timeout_s=timeout_s)
                    if self._on_channel is not None:
                        await self._on_channel(channel)
                    self._confirming = Confirming(channel)
        return self._confirming, timeout_s

    def _error_of(self, error: Exception, exchange: str, routing_key: str, timeout_s: float) -> BrokerError:
        """Translate an exception that aiormq raised during a publish to a BrokerError."""
        if isinstance(error, ChannelNotFoundEntity | ChannelAccessRefused):
            if f"'{exchange or DEFAULT_EXCHANGE}'" not in str(error):
                return ConfirmUnknown(f"channel lost by another publish: {error}")
            if isinstance(error, ChannelAccessRefused):
                return AccessRefused(str(error))
            return TopologyMismatch(f"{error}; run: lanekeeper topology apply")
        if isinstance(error, TimeoutError):
            why = f": the broker reads nothing, {self.connection.blocked}" if self.connection.blocked else ""
            return ConfirmUnknown(f"no confirm for {routing_key!r} within {timeout_s:g} s{why}")
        return ConfirmUnknown(f"connection lost while publishing {routing_key!r}: {error}")
