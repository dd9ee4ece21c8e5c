"""Requests over AMQP: one connection, which is opened again when it is lost.

The connection has two channels: one for requests and their replies, one for control messages. If the user may not send
control messages, the broker closes only the second, so no reply is lost.

Replies come by direct reply-to, so the user needs no right to declare queues.
"""

import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Self
from urllib.parse import unquote, urlsplit

from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.depth import Depth, depths
from lanekeeper.amqp.driver.urls import urls_of
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import AccessRefused, BrokerBlocked, BrokerError, PublishRefused, TopologyMismatch
from lanekeeper.control import Control
from lanekeeper.errors import Cancelled, ControlRefused, NoReply, NotEnded, ReplyLost
from lanekeeper.large_bodies import LargeBodies
from lanekeeper.replies import Final, Part, final_of, part_of
from lanekeeper.reply_queue import ReplyQueue, next_of
from lanekeeper.telemetry.tracing import Tracing
from lanekeeper.transport import Asked


class OverAmqp:
    """The transport for `amqp://` and `amqps://`."""

    def __init__(
        self,
        url: str,
        *,
        names: Names,
        ssl_context: ssl.SSLContext | None,
        tracing: Tracing,
        bodies: LargeBodies,
    ) -> None:
        self._bodies = bodies
        self._names = names
        self.user = unquote(urlsplit(urls_of(url)[0]).username or "guest")
        self._connection = Connection(url, name="lanekeeper client", ssl_context=ssl_context)
        self._replies = ReplyQueue()
        self._publisher = Publisher(self._connection, tracing=tracing, on_channel=self._replies.direct.consume)
        answers = ReplyQueue()
        asking = Publisher(self._connection, tracing=tracing, on_channel=answers.direct.consume)
        self._control = Control(asking, answers, names=names, user=self.user)

    @property
    def trouble(self) -> str | None:
        return self._connection.trouble or self._connection.blocked

    async def __aenter__(self) -> Self:
        """Connect. Raises BrokerUnreachable, AccessRefused."""
        await self._connection.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.__aexit__(*_)
        self._bodies.close()

    async def publish(self, asked: Asked) -> None:
        await self._bodies.take_out(asked)
        try:
            await self._publish(asked)
        except BrokerError as error:
            if not (error.maybe_published or asked.may_be_published):
                await self._bodies.put_back(asked)
            asked.may_be_published |= error.maybe_published
            raise
        asked.may_be_published = True

    async def _publish(self, asked: Asked) -> None:
        try:
            await self._publisher.publish_surely(
                asked.message,
                exchange=self._names.requests,
                routing_key=asked.key,
                within_s=asked.publish_within_s,
                refused_within_s=asked.full_within_s,
                absent_within_s=asked.absent_within_s,
                gives_up_on=(TopologyMismatch, BrokerBlocked),
            )
        except PublishRefused as error:
            lane = asked.key.partition(".")[0]
            depth = await self.depth(lane)
            holds = "" if depth is None else f" holds {depth.ready} requests and"
            full = PublishRefused(f"the lane is full: {self._names.intake(lane)}{holds} takes no more; try again later")
            full.maybe_published = error.maybe_published
            raise full from error

    async def answer(self, asked: Asked) -> Final:
        while True:
            try:
                async with aclosing(self.replies(asked)) as replies:
                    async for reply in replies:
                        if isinstance(reply, Final):
                            return reply
            except ReplyLost as lost:
                if asked.chose_id:
                    continue
                try:
                    return await self._kept(asked, lost)
                except AccessRefused:
                    continue  # publish again under the same id: that returns the stored reply

    async def replies(self, asked: Asked) -> AsyncGenerator[Part | Final, None]:
        with self._replies.expecting(asked.message) as arrived:
            await self.publish(asked)
            self._replies.published(arrived)
            while True:
                reply = await next_of(arrived, end=asked.end)
                if n.STATUS in reply.headers:
                    yield final_of(reply)
                    return
                yield part_of(reply)

    async def result(self, id: str, *, tenant: str | None, end: float | None) -> Final:
        return await self._control.result(id, tenant=tenant, end=end)

    async def cancel(self, id: str, *, tenant: str | None) -> Cancelled:
        return await self._control.cancel(id, tenant=tenant)

    async def cancel_unheard(self, id: str, *, tenant: str | None, within_s: float) -> None:
        await self._control.cancel_unheard(id, tenant=tenant, within_s=within_s)

    async def depth(self, lane: str) -> Depth | None:
        queue = self._names.intake(lane)
        try:
            return (await depths(self._connection, [queue]))[queue]
        except BrokerError:
            return None

    async def _kept(self, asked: Asked, lost: ReplyLost) -> Final:
        """Wait for the stored result of a request whose reply was lost. Raises Problem, TimeoutError, AccessRefused,
        ReplyLost."""
        try:
            return await self._control.result(asked.id, tenant=asked.tenant, end=asked.end)
        except (NotEnded, NoReply):
            raise TimeoutError from None
        except AccessRefused:
            raise
        except (BrokerError, ControlRefused) as error:
            raise ReplyLost(f"{lost}; fetching its result failed: {error}") from error
