"""Applications that use Lanekeeper over plain AMQP: they share only the contract and the codec of AMQP with our code.

    async with requester(url) as app:
        reply = await app.ask({"prompt": "hello"}, key="critical.tests.ask")
        assert reply.status == "ok"

`publish_raw` sends raw frames, such as no client library would send. A `Ledger` counts confirmed requests and their
outcomes by request id, across any number of crashes:

ledger = Ledger(url)
async with ledger.writing():            publishes with confirms; replies go to a durable queue
    await ledger.ask("batch", "prompt", id="a-1")
…                                       the broker dies and is started again
async with ledger.reading():
    await until(lambda: not ledger.lost)
ledger.check()"""

import asyncio
import json
import struct
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiormq
from aiormq.abc import AbstractChannel, ChannelFrame, DeliveredMessage
from aiormq.channel import Channel
from pamqp import encode
from pamqp.commands import Basic
from yarl import URL

from lanekeeper.amqp.driver import BrokerConnection
from lanekeeper.amqp.tolerant import AS_READ, properties_in, write_table
from tests.support.brokers import At, url_of
from tests.support.waiting import STARTED_S, until

FINAL_S = STARTED_S
"""A test may start a worker meanwhile."""
CRITICAL = ("lane.critical", "lane.critical.due", "lane.fallen")
"""The queues where a critical request may be."""
FRAME_END = b"\xce"


@dataclass(frozen=True)
class Got:
    """A message that was received: a reply, a dead letter, an event."""

    body: bytes
    headers: Mapping[str, Any]
    properties: Basic.Properties
    routing_key: str
    at_s: float
    """`loop.time()` of its arrival."""

    @classmethod
    def of(cls, delivered: DeliveredMessage) -> "Got":
        assert not isinstance(delivered.delivery, Basic.GetEmpty)
        properties: Any = delivered.header.properties
        if (raw := (properties.headers or {}).get(AS_READ)) is not None:  # on a connection of Lanekeeper's
            properties = Basic.Properties(**properties_in(bytes(raw)))
        return cls(
            body=delivered.body,
            headers=properties.headers or {},
            properties=properties,
            routing_key=delivered.delivery.routing_key or "",
            at_s=asyncio.get_running_loop().time(),
        )

    @property
    def status(self) -> str | None:
        return self.headers.get("x-lane-status")

    @property
    def control(self) -> str | None:
        found: str | None = self.headers.get("x-lane-control")
        return found

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return "".join(block.get("text", "") for block in self.json["content"])

    @property
    def code(self) -> str:
        assert self.properties.content_type == "application/problem+json", self
        return str(self.json["code"])


class Requester:
    """One connection, one reply queue; replies are kept by correlation id."""

    def __init__(self, connection: aiormq.Connection, channel: Channel) -> None:
        self.connection = connection
        self.channel = channel
        self.reply_to = ""
        self.replies: dict[str, list[Got]] = defaultdict(list)
        """All replies in order, including parts, by correlation id."""
        self.dead: list[Got] = []
        """Dead letters, after `read_dead` was called."""
        self.events: list[Got] = []
        """Life-cycle events, after `read_events` was called."""

    async def publish(
        self,
        body: Any,
        *,
        key: str = "critical.tests.ask",
        headers: Mapping[str, Any] | None = None,
        exchange: str = "lane.requests",
        mandatory: bool = False,
        **properties: Any,
    ) -> str:
        """Publish with a confirm; returns the correlation id. A `body` that is not bytes is written as JSON.

        Defaults of the properties: a new correlation id, persistent, our reply queue. None leaves a property out.
        """
        given = {"reply_to": self.reply_to, "correlation_id": uuid.uuid4().hex, "delivery_mode": 2, **properties}
        await self.channel.basic_publish(
            body if isinstance(body, bytes) else json.dumps(body).encode(),
            exchange=exchange,
            routing_key=key,
            properties=Basic.Properties(headers=dict(headers) if headers else None, **given),
            mandatory=mandatory,
            timeout=60,
        )
        return str(given["correlation_id"])

    async def waits_s(self, count: int, *, pause_s: float) -> list[float]:
        loop = asyncio.get_running_loop()
        found = []
        for n in range(count):
            began_s = loop.time()
            assert (await self.ask({"prompt": f"quick {n}"}, within_s=60)).status == "ok"
            found.append(loop.time() - began_s)
            await asyncio.sleep(pause_s)
        return found

    async def ask(self, body: Any, *, within_s: float = FINAL_S, **how: Any) -> Got:
        return await self.final(await self.publish(body, **how), within_s=within_s)

    async def control(self, body: Any, *, key: str, **how: Any) -> Got:
        """Send a control message and wait for the answer. Its type is the key, unless given."""
        given = {"message_type": key, **how}
        asked = await self.publish(body, exchange="lane.control", key=key, mandatory=True, **given)
        await until(lambda: self.replies[asked], within_s=FINAL_S)
        return self.replies[asked][0]

    async def final(self, correlation_id: str, *, within_s: float = FINAL_S) -> Got:
        await until(lambda: self.finals(correlation_id), within_s=within_s)
        return self.finals(correlation_id)[0]

    def finals(self, correlation_id: str) -> list[Got]:
        return [each for each in self.replies[correlation_id] if each.status is not None]

    def parts(self, correlation_id: str) -> list[Got]:
        return [each for each in self.replies[correlation_id] if each.status is None]

    async def read_dead(self) -> None:
        """Start reading all dead letters, present and future, without removing them."""
        await self._consume("lane.dead", self.dead)

    async def read_events(self) -> None:
        queue = (await self.channel.queue_declare(exclusive=True)).queue or ""
        await self.channel.queue_bind(queue, "lane.events", "#")
        await self._consume(queue, self.events)

    async def buried(self, message_id: str, *, within_s: float = FINAL_S) -> Got:
        found: list[Got] = await until(lambda: self.dead_of(message_id), within_s=within_s)
        return found[0]

    def dead_of(self, message_id: str) -> list[Got]:
        return [each for each in self.dead if each.properties.message_id == message_id]

    def events_of(self, message_id: str) -> list[str]:
        return [each.json["event"] for each in self.events if each.json["id"] == message_id]

    async def depth(self, queue: str) -> int:
        declared = await self.channel.queue_declare(queue, passive=True)
        return declared.message_count or 0

    async def holds(self, count: int, *queues: str) -> bool:
        return sum([await self.depth(queue) for queue in queues]) == count

    async def _consume(self, queue: str, into: list[Got]) -> None:
        async def keep(delivered: DeliveredMessage) -> None:
            into.append(Got.of(delivered))

        channel = await self.connection.channel()
        await channel.basic_consume(queue, keep)

    async def _keep_reply(self, delivered: DeliveredMessage) -> None:
        got = Got.of(delivered)
        self.replies[got.properties.correlation_id or ""].append(got)

    async def publish_raw(self, body: bytes, *, key: bytes, properties: bytes) -> None:
        """Publish hand-made frames, without a confirm. `properties`: flags and values, as encoded bytes.

        Returns when the broker has read them; raises the error with which the broker closed the channel.
        """
        await self.publish_all_raw([(body, properties)], exchange=b"lane.requests", key=key)

    async def publish_all_raw(self, messages: Iterable[tuple[bytes, bytes]], *, exchange: bytes, key: bytes) -> None:
        """The same for several bodies with their properties, on one channel."""
        channel: Any = await self.connection.channel(publisher_confirms=False)
        publish = struct.pack(">HHH", 60, 40, 0) + short(exchange) + short(key) + b"\x00"
        for body, properties in messages:
            header = struct.pack(">HHQ", 60, 0, len(body)) + properties
            frames = frame(1, channel.number, publish) + frame(2, channel.number, header)
            for at in range(0, len(body), 100_000):
                frames += frame(3, channel.number, body[at : at + 100_000])
            await channel.write_queue.put(ChannelFrame(payload=frames, should_close=False))
        await channel.queue_declare(self.reply_to, passive=True)
        await channel.close()


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """One AMQP frame. Kinds: 1 method, 2 header, 3 body."""
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + FRAME_END


def short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def table(*fields: tuple[bytes, bytes]) -> bytes:
    """A field table of names and values; a value is its type's letter and its encoded content."""
    content = b"".join(short(name) + value for name, value in fields)
    return struct.pack(">I", len(content)) + content


FLAGS = {
    "content_type": 15,
    "content_encoding": 14,
    "headers": 13,
    "delivery_mode": 12,
    "priority": 11,
    "correlation_id": 10,
    "reply_to": 9,
    "expiration": 8,
    "message_id": 7,
    "timestamp": 6,
    "type": 5,
    "user_id": 4,
    "app_id": 3,
}


def raw_properties(**given: bytes) -> bytes:
    """Encoded properties. Give short strings as their bytes, everything else already encoded."""
    flags = 0
    values = b""
    for name, bit in FLAGS.items():
        if name in given:
            flags |= 1 << bit
            whole = name in ("headers", "delivery_mode", "priority", "timestamp")
            values += given[name] if whole else short(given[name])
    return struct.pack(">H", flags) + values


@asynccontextmanager
async def requester(broker: str | At, *, direct: bool = False) -> AsyncIterator[Requester]:
    """An application with its own reply queue, named by the broker, or with direct reply-to (`direct`)."""
    # some tests send values that pamqp cannot write; no worker writes headers with pamqp
    encode.METHODS["table"] = write_table
    named = URL(f"{url_of(broker)}?heartbeat=30&name=requester")
    opened = BrokerConnection(named, ssl_context=None, on_alarm=lambda _: None)
    await opened.connect()
    connection: Any = opened.underlay
    try:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        app = Requester(connection, channel)
        if direct:
            app.reply_to = "amq.rabbitmq.reply-to"
        else:
            app.reply_to = (await channel.queue_declare(exclusive=True)).queue or ""
        await channel.basic_consume(app.reply_to, app._keep_reply, no_ack=True)
        yield app
    finally:
        await connection.close(timeout=5)


REPLY_QUEUE = "lane.reply.ledger"


class Ledger:
    """The confirmed requests, and the final replies to each."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._channel: AbstractChannel | None = None
        self.confirmed: dict[str, str] = {}
        """Prompts by id."""
        self.finals: dict[str, list[Got]] = defaultdict(list)
        """In order of arrival. Delivery is at-least-once, so an id may have several."""

    @property
    def lost(self) -> set[str]:
        """Ids of confirmed requests without any outcome so far."""
        return self.confirmed.keys() - self.finals.keys()

    @property
    def repeated(self) -> int:
        return sum(len(each) - 1 for each in self.finals.values())

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Open a connection for publishing, and declare the reply queue."""
        async with self._connection() as connection:
            self._channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            await self._channel.queue_declare(REPLY_QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
            yield

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        async with self._connection() as connection:
            channel = await connection.channel()
            await channel.basic_consume(REPLY_QUEUE, self._keep, no_ack=True)
            yield

    async def ask(self, lane: str, prompt: str, *, id: str, headers: Mapping[str, Any] | None = None) -> None:
        """Publish one request; it is counted once the broker has confirmed it."""
        assert self._channel is not None
        await self._channel.basic_publish(
            json.dumps({"prompt": prompt}).encode(),
            exchange="lane.requests",
            routing_key=f"{lane}.tests.ledger",
            properties=Basic.Properties(
                message_id=id,
                correlation_id=id,
                reply_to=REPLY_QUEUE,
                delivery_mode=2,
                priority=4,
                headers=dict(headers or {}),
            ),
            mandatory=True,
            timeout=60,
        )
        self.confirmed[id] = prompt

    def check(self, *, errors: Mapping[str, str] | None = None) -> None:
        """Check that each request has exactly one kind of outcome, and that no answer belongs to another request.

        `errors`: the codes of the requests that end in an error; all others must be `ok`.
        """
        assert not self.lost, f"{len(self.lost)} lost: {sorted(self.lost)[:10]}"
        assert not self.finals.keys() - self.confirmed.keys(), "an outcome for a request that was never made"
        for id, finals in self.finals.items():
            kinds = {final.code if final.status == "error" else "ok" for final in finals}
            assert kinds == {(errors or {}).get(id, "ok")}, (id, finals)
            for final in finals:
                assert final.properties.correlation_id == id
                assert final.status == "error" or self.confirmed[id] in final.text

    async def _keep(self, delivered: DeliveredMessage) -> None:
        got = Got.of(delivered)
        if got.status is not None:
            self.finals[str(got.headers["x-lane-request-id"])].append(got)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[aiormq.abc.AbstractConnection]:
        connection = await aiormq.connect(f"{self._url}?heartbeat=30&name=ledger")
        try:
            yield connection
        finally:
            with suppress(Exception):  # the broker may be gone
                await connection.close(timeout=5)


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    arguments: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "citations_delta":
                        block["citations"].append(delta["citation"])
                    case "input_json_delta":
                        arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            case "content_block_stop":
                if event["index"] in arguments:
                    message["content"][event["index"]]["input"] = json.loads(arguments[event["index"]])
            case "message_delta":
                message.update(event["delta"])
                message["usage"].update(event["usage"])
    return message
