"""Our own Python client: publish a request, wait for its answer, or read its parts as they come.

async with Client("amqp://guest:guest@localhost:5672/") as client:
    reply = await client.request({"prompt": "Name three rivers."}, key="critical.docs.example")
    print(reply.text)
"""

import asyncio
import json
import ssl
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from service.replies import Final, Part, final_of, part_of
from topology import names as n
from topology.broker.connection import Connection
from topology.broker.inbox import Inbox
from topology.broker.publisher import Publisher
from topology.contract.messages import Message
from topology.contract.problems import BrokerError, BrokerUnreachable, LanekeeperError
from topology.names import Names
from topology.tracing import Tracing

PRIORITY = 4
"""Said, because a message without one is 4 on quorum queues and 0 on classic ones (contract, section 1)."""
PUBLISH_WITHIN_S = 30.0
RECONNECT_PAUSE_S = 0.2
ANSWER_LATE_S = 5.0
"""After a deadline its problem document should be here; waiting longer is in vain."""


class ReplyLost(BrokerError):
    """The connection was lost while the answer was awaited: the request goes on, its reply finds nobody."""


class NoReply(LanekeeperError):
    """No final reply came in the time that the caller gave it."""


class Wishes(TypedDict, total=False):
    """What a request may say beside its body; what is left out is left to the lane."""

    message_id: str
    """The request's id; one is made where it is left out."""
    priority: int
    deadline_s: float
    delay_s: float
    at: datetime
    """Do not start before; with a time zone."""
    beta: str
    headers: Mapping[str, Any]
    """Further headers, `traceparent` among them; they win over the ones above."""


class Client:
    """Publishes over one connection, and takes replies over another: a blocked publisher still hears its answers."""

    def __init__(
        self,
        url: str,
        *,
        names: Names | None = None,
        ssl_context: ssl.SSLContext | None = None,
        tracing: Tracing | None = None,
        publish_within_s: float = PUBLISH_WITHIN_S,
    ) -> None:
        self._names = names or Names()
        self._publishing = Connection(url, name="lanekeeper client: publish", ssl_context=ssl_context)
        self._consuming = Connection(url, name="lanekeeper client: replies", ssl_context=ssl_context)
        self._publisher = Publisher(self._publishing, tracing=tracing or Tracing())
        self._publish_within_s = publish_within_s
        self._address: asyncio.Future[str] | None = None
        self._waiting: dict[str, asyncio.Queue[Message | BrokerError]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Connect. Raises BrokerUnreachable, AccessRefused."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._publishing)
            await stack.enter_async_context(self._consuming)
            self._address = asyncio.get_running_loop().create_future()
            listener = asyncio.create_task(self._listen(), name="client replies")
            stack.push_async_callback(_ended, listener)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def publish(self, body: Mapping[str, Any] | bytes, *, key: str, **wishes: Unpack[Wishes]) -> str:
        """Publish and wait for no answer. The request's id.

        Raises PublishRefused (the lane is full), BrokerUnreachable, ConfirmUnknown, AccessRefused, TopologyMismatch.
        """
        message = _message(body, wishes, stream=False)
        await self._publish(message, key=key)
        assert message.message_id is not None
        return message.message_id

    async def request(
        self,
        body: Mapping[str, Any] | bytes,
        *,
        key: str,
        timeout_s: float | None = None,
        **wishes: Unpack[Wishes],
    ) -> Final:
        """Publish and wait for the answer. Raises as `publish`, and Problem, ReplyLost, NoReply (after `timeout_s`)."""
        async with aclosing(self._replies(_message(body, wishes, stream=False), key, timeout_s)) as replies:
            async for reply in replies:
                if isinstance(reply, Final):
                    return reply
        raise AssertionError("the last reply is final, or an error")

    async def stream(
        self,
        body: Mapping[str, Any] | bytes,
        *,
        key: str,
        timeout_s: float | None = None,
        **wishes: Unpack[Wishes],
    ) -> AsyncGenerator[Part | Final, None]:
        """Publish and yield the answer's parts as they come, the whole answer last. Raises as `request`."""
        async with aclosing(self._replies(_message(body, wishes, stream=True), key, timeout_s)) as replies:
            async for reply in replies:
                yield reply

    async def _replies(self, message: Message, key: str, timeout_s: float | None) -> AsyncGenerator[Part | Final, None]:
        if timeout_s is None:
            timeout_s = _bound_s(message)
        message.correlation_id = uuid.uuid4().hex
        arrived = self._waiting[message.correlation_id] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        end = None if timeout_s is None else loop.time() + timeout_s
        try:
            message.reply_to = await self._reply_address()
            await self._publish(message, key=key)
            while True:
                try:
                    async with asyncio.timeout_at(end):
                        reply = await arrived.get()
                except TimeoutError:
                    raise NoReply(
                        f"no answer to {message.message_id} within {timeout_s:g} s; it may still come. "
                        "Is a worker running? Ask: lanekeeper status"
                    ) from None
                if isinstance(reply, BrokerError):
                    raise reply
                if n.STATUS in reply.headers:
                    yield final_of(reply)
                    return
                yield part_of(reply)
        finally:
            del self._waiting[message.correlation_id]

    async def _publish(self, message: Message, *, key: str) -> None:
        await self._publisher.publish_surely(
            message, exchange=self._names.requests, routing_key=key, within_s=self._publish_within_s
        )

    async def _reply_address(self) -> str:
        assert self._address is not None, "use the client with `async with`"
        try:
            async with asyncio.timeout(self._publish_within_s):
                return await asyncio.shield(self._address)
        except TimeoutError:
            raise BrokerUnreachable(
                f"no reply queue on {self._consuming.address} within {self._publish_within_s:g} s: "
                f"{self._consuming.trouble or 'unknown'}"
            ) from None

    async def _listen(self) -> None:
        """Keep a reply queue open. With its connection it goes, and with it every answer that it was to take."""
        assert self._address is not None
        while True:
            try:
                async with Inbox(self._consuming) as inbox:
                    self._address.set_result(inbox.name)
                    async for message in inbox:
                        if (waiting := self._waiting.get(message.correlation_id or "")) is not None:
                            waiting.put_nowait(message)
            except BrokerError as error:
                if self._address.done():
                    self._address = asyncio.get_running_loop().create_future()
                for waiting in self._waiting.values():
                    waiting.put_nowait(
                        ReplyLost(
                            f"the connection was lost before the answer came ({error}); ask again under the same id"
                        )
                    )
                await asyncio.sleep(RECONNECT_PAUSE_S)


def _bound_s(message: Message) -> float | None:
    """How long an answer can take that says until when it must be there: where no worker runs, none says so."""
    deadline_ms, at = message.headers.get(n.DEADLINE_MS), message.headers.get(n.AT)
    if not isinstance(deadline_ms, int) or at is not None:
        return None
    return (deadline_ms + int(message.headers.get(n.DELAY_MS, 0))) / 1000 + ANSWER_LATE_S


def _message(body: Mapping[str, Any] | bytes, wishes: Wishes, *, stream: bool) -> Message:
    headers: dict[str, Any] = {n.SENT_MS: int(time.time() * 1000)}
    if stream:
        headers[n.STREAM] = True
    if (deadline_s := wishes.get("deadline_s")) is not None:
        headers[n.DEADLINE_MS] = round(deadline_s * 1000)
    if (delay_s := wishes.get("delay_s")) is not None:
        headers[n.DELAY_MS] = round(delay_s * 1000)
    if (at := wishes.get("at")) is not None:
        headers[n.AT] = at.isoformat()
    if (beta := wishes.get("beta")) is not None:
        headers[n.ANTHROPIC_BETA] = beta
    return Message(
        body=body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode(),
        headers={**headers, **wishes.get("headers", {})},
        content_type="application/json",
        message_id=wishes.get("message_id") or uuid.uuid4().hex,
        priority=wishes.get("priority", PRIORITY),
    )


async def _ended(task: asyncio.Task[None]) -> None:
    """End a task, asking until it has: `asyncio.wait_for` of Python 3.11, which aiormq calls, can lose a cancellation.

    Seen where a client was left while its reply queue was being declared: one in some dozens then waited for ever.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.1)
