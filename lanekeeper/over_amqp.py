"""The client's transport over AMQP: one connection, which is opened again when it is lost.

The connection has one channel for requests and their replies, and one for control messages. If the user has no
permission to send control messages, the broker closes only the channel for control messages, so no reply to a request
is lost.

Replies arrive by direct reply-to, so the user needs no right to declare queues.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Self
from urllib.parse import unquote, urlsplit

from lanekeeper import control
from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.depth import Depth, depths
from lanekeeper.amqp.direct import DirectReplies
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
    ReplyLost,
    TopologyMismatch,
    Unroutable,
)
from lanekeeper.errors import Cancelled, ControlRefused, NoReply, NotEnded
from lanekeeper.large_bodies import LargeBodies
from lanekeeper.replies import Final, Part, final_of, part_of
from lanekeeper.telemetry.tracing import Tracing
from lanekeeper.transport import OutgoingRequest, until_ended

WORKERS_COUNTED_AFTER_S = 0.5
"""If a client has sent a cancellation, and no answer came within this many seconds, the client asks the broker whether
any worker runs."""
_START_ONE = "start one with `lanekeeper serve` or `lanekeeper consume`"


class OverAmqp:
    """The `Transport` of a `Client` with the URL of a broker: `amqp://` or `amqps://`."""

    def __init__(
        self, url: str, *, names: Names, ssl_context: ssl.SSLContext | None, tracing: Tracing, bodies: LargeBodies
    ) -> None:
        self._bodies = bodies
        self._names = names
        self.user = unquote(urlsplit(urls_of(url)[0]).username or "guest")
        self._connection = Connection(url, name="lanekeeper client", ssl_context=ssl_context)
        self._replies = DirectReplies()
        self._publisher = Publisher(self._connection, tracing=tracing, on_channel=self._replies.consume)
        self._answers = DirectReplies()
        self._asking = Publisher(self._connection, tracing=tracing, on_channel=self._answers.consume)

    @property
    def trouble(self) -> str | None:
        return self._connection.trouble or self._connection.blocked

    async def __aenter__(self) -> Self:
        """Connect to the broker. Raises BrokerUnreachable, AccessRefused."""
        await self._connection.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.__aexit__(*_)
        self._bodies.close()

    async def publish(self, outgoing: OutgoingRequest) -> None:
        await self._bodies.store_body(outgoing)
        try:
            await self._publisher.publish_surely(
                outgoing.message,
                exchange=self._names.requests,
                routing_key=outgoing.key,
                within_s=outgoing.publish_within_s,
                refused_within_s=outgoing.full_within_s,
                absent_within_s=outgoing.absent_within_s,
                gives_up_on=(TopologyMismatch, BrokerBlocked),
            )
        except BrokerError as error:
            if not (error.maybe_published or outgoing.may_be_published):
                await self._bodies.remove_body(outgoing)
            outgoing.may_be_published |= error.maybe_published
            if not isinstance(error, PublishRefused):
                raise
            lane = outgoing.key.partition(".")[0]
            depth = await self.depth(lane)
            holds = "" if depth is None else f" holds {depth.ready} requests and"
            full = PublishRefused(f"the lane is full: {self._names.intake(lane)}{holds} takes no more; try again later")
            full.maybe_published = error.maybe_published
            raise full from error
        outgoing.may_be_published = True

    async def answer(self, outgoing: OutgoingRequest) -> Final:
        while True:
            try:
                async with aclosing(self.replies(outgoing)) as replies:
                    async for reply in replies:
                        if isinstance(reply, Final):
                            return reply
            except ReplyLost as lost:
                if outgoing.chose_id:
                    continue
                try:
                    return await self._stored_result(outgoing, lost)
                except AccessRefused:
                    continue  # publish the request again with the same id: a worker then sends the stored reply

    async def replies(self, outgoing: OutgoingRequest) -> AsyncGenerator[Part | Final, None]:
        with self._replies.expecting(outgoing.message) as arrived:
            await self.publish(outgoing)
            self._replies.published(arrived)
            while True:
                reply = await arrived.next(end=outgoing.end)
                if n.STATUS in reply.headers:
                    yield await self._bodies.whole(final_of(reply), end=outgoing.end)
                    return
                yield part_of(reply)

    async def result(self, id: str, *, tenant: str | None, end: float | None) -> Final:
        return await self._bodies.whole(await self._result(id, tenant=tenant, end=end), end=None)

    async def cancel(self, id: str, *, tenant: str | None) -> Cancelled:
        return control.outcome_of(await self._ask(control.cancellation(id, tenant=tenant, user=self.user)))

    async def send_cancellation(self, id: str, *, tenant: str | None, within_s: float) -> None:
        await self._send(control.cancellation(id, tenant=tenant, user=self.user), within_s=within_s)

    async def depth(self, lane: str) -> Depth | None:
        return await self._depth_of(self._names.intake(lane))

    async def _depth_of(self, queue: str) -> Depth | None:
        try:
            return (await depths(self._connection, [queue]))[queue]
        except BrokerError:
            return None

    async def _send(self, message: Message, *, within_s: float) -> None:
        """Publish a control message."""
        try:
            await self._asking.publish_surely(
                message,
                exchange=self._names.control,
                routing_key=message.type or "",
                within_s=within_s,
                gives_up_on=(TopologyMismatch, Unroutable),
            )
        except Unroutable as error:
            raise TopologyMismatch(f"{error}; run: lanekeeper topology apply") from error

    async def _ask(self, message: Message) -> Message:
        """Publish a control message and return the worker's answer. Raises NoReply, ReplyLost, and the BrokerErrors of
        `publish_surely`."""
        with self._answers.expecting(message) as arrived:
            await self._send(message, within_s=control.ANSWERED_WITHIN_S)
            self._answers.published(arrived)
            began_s = asyncio.get_running_loop().time()
            if message.persistent:
                # a cancellation: the broker keeps it, so without workers there is nothing to wait for
                with suppress(TimeoutError):
                    return await arrived.next(end=began_s + WORKERS_COUNTED_AFTER_S)
                depth = await self._depth_of(self._names.control)
                if depth is not None and not depth.consumers:
                    raise NoReply(f"no worker runs; it is recorded as soon as one runs: {_START_ONE}")
            try:
                return await arrived.next(end=began_s + control.ANSWERED_WITHIN_S)
            except TimeoutError:
                kept = "; it is recorded as soon as one runs" if message.persistent else ""
                raise NoReply(
                    f"no worker answered within {control.ANSWERED_WITHIN_S:g} s{kept}: {_START_ONE}"
                ) from None

    async def _result(self, id: str, *, tenant: str | None, end: float | None) -> Final:
        """Ask for a request's final reply, repeatedly until the request has ended, or until `end` (see `until_ended`).
        If the answer was too large for a message, the reply has only the address of its body."""

        async def ask(_: float | None) -> Final:
            return control.result_of(await self._ask(control.question(id, tenant=tenant, user=self.user)))

        return await until_ended(ask, end=end)

    async def _stored_result(self, outgoing: OutgoingRequest, lost: ReplyLost) -> Final:
        """Wait for the stored result of a request whose reply was lost.

        Raises Problem, TimeoutError, AccessRefused, ReplyLost, BodyError, BodiesUnavailable.
        """
        try:
            final = await self._result(outgoing.id, tenant=outgoing.tenant, end=outgoing.end)
        except (NotEnded, NoReply):
            raise TimeoutError from None
        except AccessRefused:
            raise
        except (BrokerError, ControlRefused) as error:
            raise ReplyLost(f"{lost}; fetching its result failed: {error}") from error
        return await self._bodies.whole(final, end=outgoing.end)
