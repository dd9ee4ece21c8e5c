"""Publishes messages. One counts as published only when the broker has confirmed it; one that the broker returns as
unroutable raises an error."""

import asyncio
import random
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from aiormq.channel import Channel
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    PublishError,
)

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.driver import asks_to_stop, close, is_bare
from lanekeeper.amqp.tolerant import KEY_BYTES, Properties
from lanekeeper.contract.messages import Encoded, Message
from lanekeeper.contract.problems import (
    AccessRefused,
    BrokerBlocked,
    BrokerError,
    BrokerUnreachable,
    ClientMisused,
    ConfirmUnknown,
    InvalidArgument,
    MessageTooLarge,
    PublishRefused,
    TopologyMismatch,
    Unroutable,
)
from lanekeeper.telemetry.figures import timings

if TYPE_CHECKING:
    from lanekeeper.telemetry.tracing import Tracing

CONFIRM_TIMEOUT_S = 10.0
CONFIRM_LEAST_S = 1.0
HANGS_AFTER_S = 5.0
LEFT_OPEN_S = 75.0
"""How long a channel that hung is kept open for its answers; RabbitMQ's own wait ends 65 s after it began."""
KEPT_AT_MOST = 4
"""So many channels that hung stay open for replies; the next one that hangs is waited for."""
SURELY_WITHIN_S = 100.0
"""Long enough for a restart of the broker. After that the worker returns the request to its queue, and its stored
result is published when it is delivered again."""
DEFAULT_EXCHANGE = "amq.default"
"""In RabbitMQ's error texts."""
_EXCHANGE_IN_ERROR = re.compile(r"exchange '(.*?)' in vhost")
"""An error that closes a channel fails all publishes that wait on it, and only the exchange in its text tells which of
them caused it."""
_LOST = (AMQPError, RuntimeError, OSError)
COPIES = ("CC", "BCC")
"""Headers with which RabbitMQ routes a message to further keys."""
UNLIMITED = 2**31
FRAME_BYTES = 64
"""Room for what a content header has beside the properties."""
SMALL_BYTES = 1024 * 1024
PROBE_BYTES = 16 * 1024 * 1024
PROBE_WITHIN_S = 20.0
PROBE_AGAIN_S = 5.0
"""For so long after a failed probe none is sent, and publishes of large messages fail at once: else each of them would
wait for those before it, `PROBE_WITHIN_S` each."""
NO_QUEUE = "lanekeeper.nobody"
_LIMIT_IN_ERROR = re.compile(r"larger than configured max size (\d+)")
Confirm = type[BrokerError] | None


class Publisher:
    """Publishes on one channel of `connection`, and opens another when it is lost or hangs: if the leader of a quorum
    queue hangs, RabbitMQ's channel may confirm nothing for 65 s, for other queues neither (docs/facts.md, section
    4)."""

    def __init__(
        self,
        connection: Connection,
        *,
        tracing: "Tracing | None",
        on_missing: Callable[[], None] | None = None,
        on_channel: Callable[[Channel], Awaitable[None]] | None = None,
    ) -> None:
        """`on_missing` is called when `publish_surely` meets a missing exchange or binding, `on_channel` with each new
        channel before the first publish on it. With `on_channel` a channel that hung stays open, because the replies
        to what it has published come over it."""
        self.connection = connection
        self._tracing = tracing
        self._confirming: Confirming | None = None
        self._opening = asyncio.Lock()
        self._left: set[asyncio.Task[None]] = set()
        self._kept: list[Channel] = []
        """Channels that hung, and stay open."""
        self._on_missing = on_missing
        self._on_channel = on_channel
        self._limit = MessageLimit(connection)
        self.times = timings()

    async def exceeded_limit(self, size: int) -> int | None:
        """The broker's limit, if a body of `size` bytes exceeds it; None if not, or if it cannot be found out now."""
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
        """Publish once and wait for the confirm. Raises Unroutable (returned), PublishRefused (nack), ConfirmUnknown
        (no confirm came), BrokerBlocked (an alarm for all of `timeout_s`: nothing was published), BrokerUnreachable,
        AccessRefused, MessageTooLarge and InvalidArgument (not sent), TopologyMismatch (no such exchange)."""
        began_s, error_type = time.monotonic(), ""
        try:
            message.message_id = message.message_id or uuid.uuid4().hex
            await self._limit.check(len(message.body))
            span: AbstractContextManager[Any] = nullcontext()
            if self._tracing is not None and traced:
                span = self._tracing.send(message, exchange=exchange, routing_key=routing_key)
            with span:
                confirming, timeout_s = await self._ready_channel(timeout_s)
                try:
                    async with asyncio.timeout(timeout_s):
                        answer = await confirming.write(
                            message, exchange=exchange, routing_key=routing_key, mandatory=mandatory
                        )
                        refused = await asyncio.shield(answer)
                except _LOST as error:
                    raise self._error_of(error, exchange, routing_key, timeout_s) from error
                if refused is Unroutable:
                    raise Unroutable(f"no queue takes {routing_key!r} from exchange {exchange!r}")
                if refused is not None:
                    raise PublishRefused(
                        f"the broker refused {routing_key!r}: a queue that it goes to is full; try again later"
                    )
        except (BrokerError, ClientMisused) as error:
            error_type = type(error).__name__
            raise
        finally:
            self.times[error_type].add(time.monotonic() - began_s)

    async def write(
        self, message: Message, *, exchange: str, routing_key: str, timeout_s: float = CONFIRM_TIMEOUT_S
    ) -> "asyncio.Future[Confirm]":
        """Publish a part of a stream, not `mandatory`, and return a future of the broker's answer, so that several can
        be in flight. The broker gets them in the order of these calls. Raises the errors of `publish`; the future
        raises AMQPError if the channel is lost."""
        message.message_id = message.message_id or uuid.uuid4().hex
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
        """Publish until the broker has confirmed the message (possibly more than once), for at most `within_s`; then
        raise the last error. Its `maybe_published` says whether any of the tries may have published it.
        `refused_within_s`: a shorter limit for nacks. `absent_within_s`: a shorter limit while there is no connection
        and nothing was published yet. Raised at once: AccessRefused, MessageTooLarge, ClientMisused, those in
        `gives_up_on`, and Unroutable from the default exchange (the requester's reply queue is gone). After Unroutable
        from one of our exchanges it tries again: the missing queue may be declared meanwhile."""
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
            except (BrokerError, ClientMisused) as error:
                maybe_published = error.maybe_published = maybe_published or error.maybe_published
                if isinstance(error, TopologyMismatch | Unroutable) and exchange and self._on_missing is not None:
                    self._on_missing()
                is_final = isinstance(error, (AccessRefused, ClientMisused, MessageTooLarge, *gives_up_on))
                if is_final or (isinstance(error, Unroutable) and not exchange):
                    raise
                tries_end = min(end, began + refused_within_s) if isinstance(error, PublishRefused) else end
                if loop.time() + pause_s > tries_end:
                    raise
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(2.0, pause_s * 2)

    async def _ready_channel(self, timeout_s: float) -> "tuple[Confirming, float]":
        if self.connection.blocked is not None or not self.connection.is_open:
            # a message given to a blocked connection would still be published when the alarm ends
            end = asyncio.get_running_loop().time() + timeout_s
            await self.connection.flowing(timeout_s=timeout_s)
            timeout_s = max(CONFIRM_LEAST_S, end - asyncio.get_running_loop().time())
        if (found := self._usable()) is not None:
            return found, timeout_s
        try:
            async with asyncio.timeout(timeout_s):  # also of the wait for those before it, each of which tries it
                return await self._open(timeout_s), timeout_s
        except TimeoutError as error:
            raise BrokerUnreachable(f"no channel on {self.connection.address} within {timeout_s:g} s") from error

    async def _open(self, timeout_s: float) -> "Confirming":
        async with self._opening:
            if (found := self._usable()) is None:
                channel = await self.connection.channel(confirms=True, timeout_s=timeout_s)
                if self._on_channel is not None:
                    try:
                        await self._on_channel(channel)
                    except BaseException:
                        await close(channel)
                        raise
                if (left := self._confirming) is not None and not left.channel.is_closed:
                    self._leave(left)
                found = self._confirming = Confirming(channel)
        return found

    def _leave(self, left: "Confirming") -> None:
        if self._on_channel is not None:
            self._kept = [*(each for each in self._kept if not each.is_closed), left.channel]
            return
        closing = asyncio.create_task(left.close_when_answered(), name="leave a channel")
        self._left.add(closing)
        closing.add_done_callback(self._left.discard)

    def _usable(self) -> "Confirming | None":
        found = self._confirming
        if found is None or found.channel.is_closed:
            return None
        return None if found.hangs and len(self._kept) < KEPT_AT_MOST else found

    def _error_of(self, error: Exception, exchange: str, routing_key: str, timeout_s: float) -> BrokerError:
        if isinstance(error, ChannelNotFoundEntity | ChannelAccessRefused):
            named = _EXCHANGE_IN_ERROR.search(str(error))
            if named is None or named[1] != (exchange or DEFAULT_EXCHANGE):
                return ConfirmUnknown(f"channel lost by another publish: {error}")
            if isinstance(error, ChannelAccessRefused):
                return AccessRefused(str(error))
            return TopologyMismatch(f"{error}; run: lanekeeper topology apply")
        if isinstance(error, TimeoutError):
            why = f": the broker reads nothing, {self.connection.blocked}" if self.connection.blocked else ""
            return ConfirmUnknown(f"no confirm for {routing_key!r} within {timeout_s:g} s{why}")
        return ConfirmUnknown(f"connection lost while publishing {routing_key!r}: {error}")


class Confirming:
    """Publishes on one channel in confirm mode. A returned message has no number: aiormq matches it by its id. So of
    mandatory messages with one id only one is on its way, from here until the broker has confirmed it, whether or not
    its publisher still waits; else the next one would get its answer. Each publish is a task of its own, which nobody
    cancels."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._waiting: set[asyncio.Task[Confirm]] = set()
        self._mandatory: dict[str, asyncio.Task[Confirm]] = {}
        self._most_bytes = (channel.connection.connection_tune.frame_max or UNLIMITED) - FRAME_BYTES
        self._clock = asyncio.get_running_loop().time
        self._silent_since_s = 0.0
        """The last answer, or the first publish since all had been answered."""

    @property
    def hangs(self) -> bool:
        """Whether the broker has answered nothing for long, although publishes wait for its answer."""
        return bool(self._waiting) and self._clock() - self._silent_since_s > HANGS_AFTER_S

    async def close_when_answered(self) -> None:
        if self._waiting:
            await asyncio.wait(self._waiting, timeout=LEFT_OPEN_S)
        await close(self.channel)

    async def write(
        self, message: Message, *, exchange: str, routing_key: str, mandatory: bool
    ) -> "asyncio.Future[Confirm]":
        """The broker gets messages in the order of these calls. To cancel the future of a mandatory one would free its
        id too early."""
        id = (message.message_id or "") if mandatory else ""
        while (earlier := self._mandatory.get(id)) is not None:
            await asyncio.wait([earlier])
        try:
            _check(message, routing_key)
            properties = Properties(message, as_id=id or "not mandatory")
            if len(properties.bytes) > self._most_bytes:
                raise ValueError(f"{len(properties.bytes)} bytes of headers, allowed are {self._most_bytes}")
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"the message cannot be written: {error}") from error
        publishing = self._publish(message.body, exchange, routing_key, properties, mandatory)
        task = asyncio.create_task(publishing, name="publish")
        if not self._waiting:
            self._silent_since_s = self._clock()
        self._waiting.add(task)
        if id:
            self._mandatory[id] = task
        task.add_done_callback(partial(self._on_done, id))
        return task

    async def _publish(
        self, body: bytes, exchange: str, routing_key: str, properties: Properties, mandatory: bool
    ) -> Confirm:
        try:
            await self.channel.basic_publish(
                body, exchange=exchange, routing_key=routing_key, properties=properties, mandatory=mandatory, wait=False
            )
        except PublishError:
            return Unroutable
        except DeliveryError:
            return PublishRefused
        except asyncio.CancelledError:
            if asks_to_stop():
                raise
            raise ChannelInvalidStateError("the channel was lost: connection lost") from None
        except Exception as error:
            if is_bare(error):
                raise ChannelInvalidStateError("the channel was lost: connection lost") from None
            raise
        return None

    def _on_done(self, id: str, task: "asyncio.Task[Confirm]") -> None:
        self._waiting.discard(task)
        self._silent_since_s = self._clock()
        if id:
            del self._mandatory[id]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: asyncio logs errors of futures that nobody awaits


def _check(message: Message, routing_key: str) -> None:
    """Raise ValueError for what the broker would close the channel for, with all others that are published on it."""
    if len(routing_key.encode()) > KEY_BYTES:
        raise ValueError(f"routing key {routing_key[:40]!r}…: more than {KEY_BYTES} bytes")
    for name in COPIES:
        copies = message.headers.get(name, [])
        if not (isinstance(copies, list) or (isinstance(copies, Encoded) and copies[:1] == b"A")):
            raise ValueError(f"header {name}: not a list of routing keys")
    expiration = message.expiration
    if expiration is not None and not (expiration.isascii() and expiration.isdigit() and int(expiration) < 2**32):
        raise ValueError(f"expiration {expiration[:40]!r}: not a number of milliseconds below 2^32")


class MessageLimit:
    """Knows the broker's `max_message_size`: 16 MiB on RabbitMQ 4.x, 128 MiB on 3.x, or what its operator set. RabbitMQ
    checks it when the whole message has arrived and closes the channel, and the connection if more is on its way. The
    limit is named only in that error. So a test message goes first, on a connection of its own, to a queue that does
    not exist; the size is checked before permissions."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._probing = asyncio.Lock()
        self._accepted_bytes = SMALL_BYTES
        self._limit: int | None = None
        self._opening = connection.openings
        self._failed: tuple[float, str] | None = None
        """Until when (the event loop's time) no other probe is sent, and why the last one failed."""

    async def check(self, size: int) -> None:
        if size <= SMALL_BYTES:
            return
        async with self._probing:
            if self._opening != self._connection.openings:
                self._accepted_bytes, self._limit, self._opening = SMALL_BYTES, None, self._connection.openings
                self._failed = None
            if self._limit is None and size > self._accepted_bytes:
                await self._probe(max(size, PROBE_BYTES))
        if self._limit is not None and size > self._limit:
            raise MessageTooLarge(size, self._limit)

    async def _probe(self, size: int) -> None:
        clock = asyncio.get_running_loop().time
        if self._failed is not None and clock() < self._failed[0]:
            raise BrokerUnreachable(self._failed[1])
        try:
            async with asyncio.timeout(PROBE_WITHIN_S), self._connection.another("size") as connection:
                channel = await connection.channel(confirms=True)
                try:
                    await channel.basic_publish(bytes(size), routing_key=NO_QUEUE)
                except ChannelPreconditionFailed as error:
                    if (named := _LIMIT_IN_ERROR.search(str(error))) is None:
                        raise
                    self._limit = int(named[1])
                    return
                except ChannelAccessRefused:
                    pass  # the size is checked before permissions, so it is within the limit
                self._accepted_bytes = size
        except (AMQPError, BrokerError, OSError, RuntimeError, TimeoutError) as error:
            why = f"how large a message the broker takes is not known: {error}"
            self._failed = clock() + PROBE_AGAIN_S, why
            raise BrokerUnreachable(why) from error
