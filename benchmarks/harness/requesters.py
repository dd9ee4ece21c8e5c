"""What sends requests to a contestant: the shortest possible requester on aio-pika, Lanekeeper's own client, and HTTP.

Over AMQP, requests go to the exchange BENCH_EXCHANGE with the routing key BENCH_KEY, in which `{lane}` is replaced by
the lane. Replies that nobody waits for go to the queue BENCH_REPLY_TO.
"""

import asyncio
import json
import os
import time
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

import aio_pika
import aiohttp

from benchmarks.harness.load import mark

PRIORITIES = {"critical": 9, "normal": 5, "batch": 1}
DIRECT = "amq.rabbitmq.reply-to"
HEADERS = {"content-type": "application/json", "x-api-key": "benchmark", "anthropic-version": "2023-06-01"}


class Plain:
    """Publishes persistently, with confirms; answers come by direct reply-to."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._waiting: dict[str | None, asyncio.Future[None]] = {}

    async def __aenter__(self) -> Self:
        self._connection = await aio_pika.connect(self._environ["BENCH_AMQP_URL"])
        self._channel = await self._connection.channel(publisher_confirms=True)
        name = self._environ["BENCH_EXCHANGE"]
        self._exchange = await self._channel.get_exchange(name) if name else self._channel.default_exchange
        replies = await self._channel.get_queue(DIRECT, ensure=False)
        await replies.consume(self._answered, no_ack=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()

    async def publish(self, body: bytes, *, number: int, lane: str, tenant: int, reply_to: str | None = None) -> None:
        headers: dict[str, Any] = {"x-lane-sent-ms": time.time_ns() // 1_000_000}
        if tenant:
            headers["x-lane-tenant"] = f"tenant-{tenant}"
        message = aio_pika.Message(
            body,
            content_type="application/json",
            message_id=uuid.uuid4().hex,
            correlation_id=str(number),
            reply_to=reply_to or self._environ["BENCH_REPLY_TO"],
            priority=PRIORITIES[lane],
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            user_id=self._environ.get("BENCH_USER"),
            headers=headers,
        )
        await self._exchange.publish(message, routing_key=self._environ["BENCH_KEY"].format(lane=lane))

    async def ask(self, body: bytes, *, number: int, lane: str, tenant: int) -> None:
        answered = self._waiting[str(number)] = asyncio.get_running_loop().create_future()
        await self.publish(body, number=number, lane=lane, tenant=tenant, reply_to=DIRECT)
        await answered

    async def _answered(self, reply: Any) -> None:
        if reply.headers.get("x-lane-status", "ok") != "ok":
            raise SystemExit(f"a request failed: {reply.body[:500]!r}")
        if (answered := self._waiting.pop(reply.correlation_id, None)) is not None:
            answered.set_result(None)


class Own:
    """Uses `lanekeeper.Client`."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ

    async def __aenter__(self) -> Self:
        from lanekeeper import Client  # other frameworks' environment does not have what it needs
        from lanekeeper.contract.names import Names

        names = Names(self._environ["BENCH_NAMESPACE"])
        self._client = await Client(self._environ["BENCH_AMQP_URL"], names=names).__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(None, None, None)

    async def publish(self, body: bytes, *, lane: str, **_: int) -> None:
        await self._client.publish(body, key=f"{lane}.bench.load", priority=PRIORITIES[lane])

    async def ask(self, body: bytes, *, lane: str, **_: int) -> None:
        await self._client.request(body, key=f"{lane}.bench.load", priority=PRIORITIES[lane])


class Http:
    """Posts to `/v1/messages`. The simulated API echoes the prompt, so each answer is compared with its question."""

    def __init__(self, url: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self._url = f"{url}/v1/messages"
        self._headers = {**HEADERS, **headers}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
            timeout=aiohttp.ClientTimeout(total=300),
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, body: bytes, *, number: int, **_: object) -> None:
        async with self._session.post(self._url, data=body) as response:
            answer = await response.read()
        if response.status != 200 or mark(number) not in json.loads(answer)["content"][0]["text"]:
            raise RuntimeError(f"lost a call: {response.status} {answer[:300]!r}")

    async def first_part(self, body: bytes, *, number: int, **_: object) -> float:
        """Read a stream to its end. Returns the time of the first part of the text."""
        first_s, answer = 0.0, ""
        async with self._session.post(self._url, data=body) as response:
            async for line in response.content:
                if line.startswith(b"data:") and b"content_block_delta" in line:
                    first_s = first_s or time.monotonic()
                    answer += json.loads(line[5:])["delta"].get("text", "")
        if mark(number) not in answer:
            raise RuntimeError(f"lost a stream: {response.status} {answer[:300]!r}")
        return first_s


class Noted:
    """Asks through another requester, and notes when; a request may fail, or be cancelled before its answer."""

    def __init__(self, requester: Any) -> None:
        self._requester = requester
        self.asked: dict[int, float] = {}
        self.answered: dict[int, float] = {}
        self.failed: list[str] = []

    async def ask(self, body: bytes, *, number: int, **how: Any) -> None:
        self.asked[number] = time.monotonic()
        try:
            await self._requester.ask(body, number=number, **how)
        except Exception as error:  # how many failed is a figure
            self.failed.append(f"{type(error).__name__}: {error}")
        else:
            self.answered[number] = time.monotonic()
