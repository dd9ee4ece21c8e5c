"""Publishing: a message counts as published only when the broker has confirmed it; a returned message is an error.

`publish` makes one attempt; `publish_surely` repeats it until the broker has confirmed the message or time is up.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from aiormq.channel import Channel
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
)

from lanekeeper.amqp.confirming import Confirming
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
CONFIRM_LEAST_S = 1.0
"""Least time for a confirm, even if waiting for the broker used up most of the time."""
SURELY_WITHIN_S = 100.0
"""Long enough for a broker's restart. After that the delivery is returned; when it comes again, the stored result is
sent."""
DEFAULT_EXCHANGE = "amq.default"
"""The default exchange's name in the broker's errors. An error closes the whole channel and names the exchange that
caused it."""


class Publisher:
    """Publishes over one connection, on a channel with confirms."""

    def __init__(
        self,
        connection: Connection,
        *,
        tracing: Tracing,
        on_missing: Callable[[], None] | None = None,
        on_channel: Callable[[Channel], Awaitable[None]] | None = None,
    ) -> None:
        """`on_missing`: called when an exchange, or a queue bound to it, is missing, so that the whole topology can be
        checked. `on_channel`: called with each channel before anything is published on it."""
        self.connection = connection
        self._tracing = tracing
        self._confirming: Confirming | None = None
        self._opening = asyncio.Lock()
        self._in_flight: dict[str, asyncio.Event] = {}
        self._on_missing = on_missing
        self._on_channel = on_channel
        self._limit = MessageLimit(connection)

    async def refuses(self, size: int) -> int | None:
        """The broker's limit if a body of `size` bytes exceeds it. None if it may be published, or if the limit cannot
        be found out now: `publish` checks again."""
        try:
            await self._limit.check(size)
        except MessageTooLarge as error:
            return error.limit
        except BrokerUnreachable:
            return None
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

        Raises Unroutable (returned), PublishRefused (nack), ConfirmUnknown (no confirm: it may or may not be
        published), BrokerBlocked (an alarm for all of `timeout_s`: nothing was published), BrokerUnreachable,
        AccessRefused, MessageTooLarge (not sent), TopologyMismatch (no such exchange). `traced` false: no span, used
        for the parts of a stream.
        """
        if len(message.body) > SMALL_BYTES:
            await self._limit.check(len(message.body))
        span: AbstractContextManager[Any] = (
            self._tracing.send(message, exchange=exchange, routing_key=routing_key) if traced else nullcontext()
        )
        with span:
            if self.connection.blocked is not None or not self.connection.is_open:
                # a message given to a blocked connection would still be published when the alarm ends
                end = asyncio.get_running_loop().time() + timeout_s
                await self.connection.flowing(timeout_s=timeout_s)
                timeout_s = max(CONFIRM_LEAST_S, end - asyncio.get_running_loop().time())
            confirming = await self._confirm_channel(timeout_s=timeout_s)
            turn = await self._take_turn(message.message_id) if mandatory and message.message_id else None
            try:
                async with asyncio.timeout(timeout_s):
                    refused = await confirming.publish(
                        message, exchange=exchange, routing_key=routing_key, mandatory=mandatory
                    )
            except (ChannelNotFoundEntity, ChannelAccessRefused) as error:
                if f"'{exchange or DEFAULT_EXCHANGE}'" not in str(error):
                    raise ConfirmUnknown(f"channel lost by another publish: {error}") from error
                if isinstance(error, ChannelAccessRefused):
                    raise AccessRefused(str(error)) from error
                raise TopologyMismatch(f"{error}; run: lanekeeper topology apply") from error
            except TimeoutError as error:
                why = f": the broker reads nothing, {self.connection.blocked}" if self.connection.blocked else ""
                raise ConfirmUnknown(f"no confirm for {routing_key!r} within {timeout_s:g} s{why}") from error
            except (AMQPError, ChannelInvalidStateError, RuntimeError, OSError) as error:
                raise ConfirmUnknown(f"connection lost while publishing {routing_key!r}: {error}") from error
            finally:
                if turn is not None:
                    del self._in_flight[message.message_id or ""]
                    turn.set()
            if refused is Unroutable:
                raise Unroutable(f"no queue takes {routing_key!r} from exchange {exchange!r}")
            if refused is not None:
                raise PublishRefused(
                    f"the broker refused {routing_key!r}: a queue that it goes to is full; try again later"
                )

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
        """Try to publish until the broker has confirmed it, for at most `within_s`; then raise the last error.

        `refused_within_s`: how long to try again after refusals (nack). The message may be published more than once.
        `absent_within_s`: how long to wait for a connection as long as nothing was published; None: `within_s`.
        Raised at once: AccessRefused, MessageTooLarge, the errors in `gives_up_on`, and Unroutable from the default
        exchange (the requester has gone). Unroutable from one of our exchanges is tried again, because its queue should
        come back. The error's `maybe_published` says whether any of the tries may have published the message.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        end = began + within_s
        pause_s = 0.05
        maybe_published = False
        while True:
            if BrokerBlocked in gives_up_on and self.connection.blocked is not None:
                blocked = BrokerBlocked(
                    f"the broker at {self.connection.address} takes nothing: {self.connection.blocked} (a memory or "
                    "disk alarm; `rabbitmqctl status` says which); try again later, under the same message_id"
                )
                blocked.maybe_published = maybe_published
                raise blocked
            left_s = max(CONFIRM_LEAST_S, end - loop.time())
            if absent_within_s is not None and not maybe_published and not self.connection.is_open:
                await self.connection.underlying(timeout_s=max(0.0, began + absent_within_s - loop.time()))
            try:
                await self.publish(
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
                if isinstance(error, (AccessRefused, MessageTooLarge, *gives_up_on)) or (
                    isinstance(error, Unroutable) and not exchange
                ):
                    raise
                if isinstance(error, PublishRefused) and loop.time() + pause_s > began + refused_within_s:
                    raise
                if loop.time() + pause_s > end:
                    raise
                await asyncio.sleep(pause_s * random.uniform(0.5, 1))
                pause_s = min(2.0, pause_s * 2)
            else:
                return

    async def _confirm_channel(self, *, timeout_s: float) -> Confirming:
        confirming = self._confirming
        if confirming is not None and not confirming.channel.is_closed:
            return confirming
        await self.connection.underlying(timeout_s=timeout_s)  # before the lock, so that all callers wait at once
        async with self._opening:
            if self._confirming is None or self._confirming.channel.is_closed:
                channel = await self.connection.raw_channel(confirms=True, timeout_s=timeout_s)
                if self._on_channel is not None:
                    await self._on_channel(channel)
                self._confirming = Confirming(channel)
            return self._confirming

    async def _take_turn(self, message_id: str) -> asyncio.Event:
        """Wait until no other mandatory publish of this message id is in flight.

        aiormq matches returned messages by their id (docs/facts.md, section 4).
        """
        while (other := self._in_flight.get(message_id)) is not None:
            await other.wait()
        done = self._in_flight[message_id] = asyncio.Event()
        return done
