"""The Python client: publishes requests, waits for answers or streams their parts, cancels requests, fetches results.

async with Client("amqp://guest:guest@localhost:5672/") as client:
    reply = await client.request({"prompt": "Name three rivers."}, key="critical.docs.example")
    print(reply.text)
    id = await client.publish({"prompt": "Name all rivers."}, key="batch.docs.example")
    later = await client.result(id, wait_s=600)
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, Self, Unpack
from urllib.parse import unquote, urlsplit

from lanekeeper.abandoned import Abandoned
from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.depth import Depth, depths
from lanekeeper.amqp.driver.urls import urls_of
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import (
    AccessRefused,
    BrokerBlocked,
    BrokerError,
    PublishRefused,
    TopologyMismatch,
)
from lanekeeper.control import Cancelled, Control, ControlRefused, NoReply, NotEnded, no_answer
from lanekeeper.options import Options, bound_s, message_of
from lanekeeper.replies import Final, Part, final_of, part_of
from lanekeeper.reply_queue import ReplyLost, ReplyQueue, next_of
from lanekeeper.telemetry.tracing import Tracing

PUBLISH_WITHIN_S = 30.0
REFUSED_WITHIN_S = 2.0
"""A full lane seldom has room a moment later, so the caller gets the error after this time."""


class Client:
    """Publishes requests and receives their replies over one connection, which it reopens when it is lost.

    The connection has two channels: one for requests and their replies, one for control messages. If the user may not
    send control messages, the broker closes only the second, so no reply is lost.

    Replies come by direct reply-to, so the user needs no right to declare queues.
    """

    def __init__(
        self,
        url: str,
        *,
        names: Names | None = None,
        ssl_context: ssl.SSLContext | None = None,
        tracing: Tracing | None = None,
        publish_within_s: float = PUBLISH_WITHIN_S,
        absent_within_s: float | None = None,
        cancel_abandoned: bool = True,
        identified: bool = False,
    ) -> None:
        """`absent_within_s`: how long a request waits for a broker that is not there; None: `publish_within_s`.

        `cancel_abandoned`: if the caller of a request is cancelled (`wait_for`, a task group, Ctrl-C) or leaves its
        stream early, the request is cancelled too. False: the request continues, and its result can be fetched.

        `identified`: every message carries `user_id`, the connection's user, which the broker checks. Then no other
        user can fetch or cancel these requests. Workers may require it (docs/production.md)."""
        self._names = names or Names()
        self._user = unquote(urlsplit(urls_of(url)[0]).username or "guest")
        self._own = self._user if identified else None
        self._connection = Connection(url, name="lanekeeper client", ssl_context=ssl_context)
        tracing = tracing or Tracing()
        self._replies = ReplyQueue()
        self._publisher = Publisher(self._connection, tracing=tracing, on_channel=self._replies.direct.consume)
        self._publish_within_s = publish_within_s
        self._absent_within_s = absent_within_s
        answers = ReplyQueue()
        asking = Publisher(self._connection, tracing=tracing, on_channel=answers.direct.consume)
        self._control = Control(asking, answers, names=self._names, user=self._user)
        self._abandoned = Abandoned(self._control, is_on=cancel_abandoned)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Connect. Raises BrokerUnreachable, AccessRefused."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._connection)
            stack.push_async_callback(self._abandoned.finish)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def publish(self, body: Mapping[str, Any] | bytes, *, key: str, **options: Unpack[Options]) -> str:
        """Publish without waiting for the answer. Returns the request's id, with which `result` fetches the answer.

        Raises PublishRefused (the lane is full), BrokerBlocked, BrokerUnreachable, ConfirmUnknown, AccessRefused,
        TopologyMismatch, MessageTooLarge, and Problem for a wrong priority.
        """
        message = self._message(body, options, stream=False)
        await self._publish(message, key=key)
        assert message.message_id is not None
        return message.message_id

    async def request(
        self,
        body: Mapping[str, Any] | bytes,
        *,
        key: str,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Final:
        """Publish and wait for the answer. Raises what `publish` raises, and Problem, NoReply (after `timeout_s`),
        ReplyLost.

        If this call is cancelled, the request is cancelled too (see `cancel_abandoned`). Its id then keeps this
        outcome: use a new id to try again.

        If the connection is lost meanwhile, the client reconnects and fetches the result by the request's id. It
        publishes the request again instead if the user may not fetch results, or if the caller chose the id: that
        also detects an id used before with another body. ReplyLost means that the result could not be fetched.
        """
        message = self._message(body, options, stream=False)
        timeout_s = bound_s(message) if timeout_s is None else timeout_s
        try:
            return await self._answer(message, key, timeout_s, options)
        except asyncio.CancelledError:
            self._abandon(message, options)
            raise

    async def stream(
        self,
        body: Mapping[str, Any] | bytes,
        *,
        key: str,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Part | Final, None]:
        """Publish and yield the parts of the answer as they come, then the whole answer.

        If the caller leaves before the end (`break`, `aclose`, cancellation), the request is cancelled (see
        `cancel_abandoned`).

        Raises what `publish` raises, and Problem, NoReply (after `timeout_s`), and ReplyLost if the connection is lost
        or the caller reads much too slowly: parts are then missing, but `result` can fetch the whole answer.
        """
        message = self._message(body, options, stream=True)
        timeout_s = bound_s(message) if timeout_s is None else timeout_s
        reply: Part | Final | None = None
        try:
            async with aclosing(self._replied(message, key, _end(timeout_s))) as replies:
                async for reply in replies:
                    yield reply
        except TimeoutError:
            raise no_answer(message.message_id, timeout_s) from None
        except (asyncio.CancelledError, GeneratorExit):
            if not isinstance(reply, Final):
                self._abandon(message, options)
            raise

    async def cancel(self, id: str, *, tenant: str | None = None) -> Cancelled:
        """Cancel a request wherever it is. Returns `recorded`, `told`, `ended` or `unseen`; `Cancelled` explains them.

        Raises ControlRefused, NoReply (no worker runs; the next one to start records the cancellation), AccessRefused,
        TopologyMismatch, BrokerUnreachable.
        """
        return await self._control.cancel(id, tenant=tenant or self._own)

    async def result(self, id: str, *, tenant: str | None = None, wait_s: float = 0) -> Final:
        """Fetch the final reply to a request. While there is none, ask repeatedly for up to `wait_s`.

        Raises Problem if the request ended in an error, NotEnded, ControlRefused, NoReply (no worker runs),
        AccessRefused, TopologyMismatch, BrokerUnreachable.
        """
        return await self._control.result(id, tenant=tenant or self._own, end=_end(wait_s))

    async def depth(self, lane: str) -> Depth | None:
        """How many messages wait in a lane's intake, and how many consumers it has; None if that cannot be found out,
        for example because the user has no right to the queue."""
        queue = self._names.intake(lane)
        try:
            return (await depths(self._connection, [queue]))[queue]
        except BrokerError:
            return None

    @property
    def trouble(self) -> str | None:
        """Why nothing can be published at present; None if it can."""
        return self._connection.trouble or self._connection.blocked

    def _message(self, body: Mapping[str, Any] | bytes, options: Options, *, stream: bool) -> Message:
        if self._own is not None:
            options.setdefault("tenant", self._own)
        return message_of(body, options, stream=stream, user=self._user)

    async def _answer(self, message: Message, key: str, timeout_s: float | None, options: Options) -> Final:
        end = _end(timeout_s)
        while True:
            try:
                async with aclosing(self._replied(message, key, end)) as replies:
                    async for reply in replies:
                        if isinstance(reply, Final):
                            return reply
            except TimeoutError:
                raise no_answer(message.message_id, timeout_s) from None
            except ReplyLost as lost:
                if "message_id" in options:
                    continue
                try:
                    return await self._kept(message, options.get("tenant"), timeout_s, end, lost)
                except AccessRefused:
                    continue  # publish again under the same id: that returns the stored reply

    def _abandon(self, message: Message, options: Options) -> None:
        """Cancel a request whose caller no longer waits."""
        # `reply_to` None: nothing was published yet
        if message.reply_to is not None and options.get("cancel_abandoned", True):
            assert message.message_id is not None
            self._abandoned.cancel(message.message_id, tenant=options.get("tenant"))

    async def _replied(self, message: Message, key: str, end: float | None) -> AsyncGenerator[Part | Final, None]:
        """Publish and yield the replies. Raises TimeoutError at `end` (by the loop's clock), ReplyLost."""
        with self._replies.expecting(message) as arrived:
            await self._publish(message, key=key)
            self._replies.published(arrived)
            while True:
                reply = await next_of(arrived, end=end)
                if n.STATUS in reply.headers:
                    yield final_of(reply)
                    return
                yield part_of(reply)

    async def _kept(
        self, message: Message, tenant: str | None, timeout_s: float | None, end: float | None, lost: ReplyLost
    ) -> Final:
        """Wait for the stored result of a request whose reply was lost. Raises Problem, NoReply, AccessRefused,
        ReplyLost."""
        assert message.message_id is not None
        try:
            return await self._control.result(message.message_id, tenant=tenant, end=end)
        except (NotEnded, NoReply):
            raise no_answer(message.message_id, timeout_s) from None
        except AccessRefused:
            raise
        except (BrokerError, ControlRefused) as error:
            raise ReplyLost(f"{lost}; fetching its result failed: {error}") from error

    async def _publish(self, message: Message, *, key: str) -> None:
        deadline_ms = message.headers.get(n.DEADLINE_MS)
        within_s = self._publish_within_s
        if isinstance(deadline_ms, int):
            # published after its deadline, the request would only be answered deadline_exceeded
            within_s = min(within_s, deadline_ms / 1000)
        try:
            await self._publisher.publish_surely(
                message,
                exchange=self._names.requests,
                routing_key=key,
                within_s=within_s,
                refused_within_s=min(REFUSED_WITHIN_S, within_s),
                absent_within_s=self._absent_within_s,
                gives_up_on=(TopologyMismatch, BrokerBlocked),
            )
        except PublishRefused as error:
            lane = key.partition(".")[0]
            depth = await self.depth(lane)
            holds = "" if depth is None else f" holds {depth.ready} requests and"
            full = PublishRefused(f"the lane is full: {self._names.intake(lane)}{holds} takes no more; try again later")
            full.maybe_published = error.maybe_published
            raise full from error


def _end(timeout_s: float | None) -> float | None:
    """The moment `timeout_s` from now, by the loop's clock."""
    return None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
