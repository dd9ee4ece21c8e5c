"""Applications that send requests continuously over several connections, and record every reply.

Each request is published until the broker has confirmed it, under the same id: after a confirm that never came, too.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Self
from urllib.parse import urlsplit

from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from lanekeeper import Client
from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.replies import Problem
from tests.faults.connections import Publisher, connected, read
from tests.faults.history import OK, Asked, History, Parked, Published, Replied
from tests.faults.mix import EVERYTHING, REPLY_QUEUE, Mix, Wish, draw

DEAD_QUEUE = "lane.dead"
FETCHED_AT_ONCE = 10
PUBLISHERS = 4


class Load:
    """Sends `rate` new requests a second while `asking`. `urls`: the broker's nodes; a client that loses one uses the
    next."""

    def __init__(
        self,
        urls: Sequence[str],
        history: History,
        *,
        rng: random.Random,
        rate: float,
        mix: Mix = EVERYTHING,
        name: str = "r",
    ) -> None:
        self._urls = urls
        self._user = urlsplit(urls[0]).username or "guest"
        self._history = history
        self._rng = rng
        self._rate = rate
        self._mix = mix
        self._name = name
        self._publishers = [Publisher(urls, n) for n in range(PUBLISHERS)]
        self._waiting: dict[str, asyncio.Event] = {}
        """Asked and not answered; set when it is."""
        self._confirmed: set[str] = set()
        """Those of them that the broker has confirmed."""
        self._unheard: list[Wish] = []
        self._seen: set[str] = set()
        """Message ids of replies: one that is delivered again is no other."""
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        """Requests that are confirmed and not answered."""
        return len(self._confirmed)

    async def __aenter__(self) -> Self:
        async with connected(self._urls[0]) as connection:
            channel = await connection.channel()
            await channel.queue_declare(REPLY_QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        self._spawn(read(self._urls, REPLY_QUEUE, self._on_reply), "reads replies")
        self._spawn(read(self._urls, DEAD_QUEUE, self._on_dead), "reads dead letters")
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in self._publishers:
            await each.close()

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Send requests for as long as the block lasts."""
        task = self._spawn(self._ask(), "asks")
        try:
            yield
        finally:
            task.cancel()

    async def answered(self, *, within_s: float) -> bool:
        """Wait until every request sent so far is answered. Returns whether all are."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._waiting:  # a request that was just being sent is added late
                    for answered in tuple(self._waiting.values()):
                        await answered.wait()
        return not self._waiting

    async def fetched(self, *, within_s: float) -> None:
        """Fetch the results of requests that could not be answered."""
        end_s = time.monotonic() + within_s
        free = asyncio.Semaphore(FETCHED_AT_ONCE)
        async with Client(self._urls[-1]) as client, asyncio.TaskGroup() as all_at_once:
            for wish in self._unheard:
                all_at_once.create_task(self._fetch(client, wish, free, end_s=end_s))

    async def burst(self, copies: int, *, lane: str = "critical") -> str:
        """Publish one request so many times at once over all connections; returns its id."""
        identity = self._next_id()
        prompt = f"{identity} asked {copies} times [[latency: 300ms]]"
        wish = Wish(identity=identity, lane=lane, body={"prompt": prompt})
        async with asyncio.TaskGroup() as all_at_once:
            for n in range(copies):
                all_at_once.create_task(self._publish(wish, self._ask_for(wish, question=f"{identity}~{n}")))
        return identity

    async def at_once(self, counts: Mapping[str, int], *, latency_s: float) -> None:
        """Publish so many requests for each lane at once, each of which takes so long."""
        async with asyncio.TaskGroup() as all_at_once:
            for lane, count in counts.items():
                for _ in range(count):
                    identity = self._next_id()
                    prompt = f"{identity} [[latency: {round(1000 * latency_s)}ms]]"
                    wish = Wish(identity=identity, lane=lane, body={"prompt": prompt})
                    all_at_once.create_task(self._publish(wish, self._ask_for(wish, question=identity)))

    async def _ask(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + 1 / self._rate, time.monotonic() - 1)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self._spawn(self._one(draw(self._rng, self._mix, identity=self._next_id())), "one request")

    async def _one(self, wish: Wish) -> None:
        question = self._ask_for(wish, question=wish.identity)
        answered = self._waiting.get(question)
        if answered is None:
            self._unheard.append(wish)  # before it is sent: it may be sent again after `fetched` was called
        await self._publish(wish, question)
        if wish.is_sent_twice:
            await asyncio.sleep(self._rng.uniform(0, 1))
            await self._publish(wish, question)
        if answered is not None and wish.is_contradicted:
            await answered.wait()
            body = {"prompt": f"{wish.body['prompt']} and more"}
            other = replace(wish, body=body, headers=_tenant_of(wish), expects=("idempotency_conflict",), delay_s=0.0)
            await self._publish(other, self._ask_for(other, question=f"{wish.identity}~other"))

    def _next_id(self) -> str:
        self._number += 1
        return f"{self._name}-{self._number:06d}"

    def _ask_for(self, wish: Wish, *, question: str) -> str:
        """Record that an answer is expected, and wait for it if a reply is possible."""
        now_s = time.monotonic()
        self._history.add(
            Asked(
                at_s=now_s,
                question=question,
                identity=wish.identity,
                lane=wish.lane,
                words=wish.identity,
                expects=wish.expects,
                heard=wish.is_heard,
                due_s=now_s + wish.delay_s if wish.delay_s else 0.0,
            )
        )
        if wish.is_heard:
            self._waiting[question] = asyncio.Event()
        return question

    async def _publish(self, wish: Wish, question: str) -> None:
        """Publish until it is confirmed."""
        properties = Basic.Properties(
            message_id=wish.identity,
            correlation_id=question,
            reply_to=wish.reply_to,
            delivery_mode=2,
            priority=self._rng.randrange(10),
            content_type="application/json",
            headers=dict(wish.headers),
            user_id=self._user if wish.tenant else None,
        )
        wait_s = 0.05
        while True:
            sent_s = time.monotonic()
            told = await self._rng.choice(self._publishers).publish(
                json.dumps(wish.body).encode(), key=f"{wish.lane}.tests.faults", properties=properties
            )
            self._history.add(Published(at_s=time.monotonic(), question=question, sent_s=sent_s, told=told))
            if told == "confirmed":
                if question in self._waiting:
                    self._confirmed.add(question)
                return
            await asyncio.sleep(wait_s * self._rng.uniform(0.5, 1.5))
            wait_s = min(2.0, 2 * wait_s)

    async def _fetch(self, client: Client, wish: Wish, free: asyncio.Semaphore, *, end_s: float) -> None:
        async with free:
            try:
                found = await client.result(
                    wish.identity, tenant=wish.tenant or None, wait_s=max(0.0, end_s - time.monotonic())
                )
            except Problem as problem:
                body, code = json.dumps(dict(problem.fields)).encode(), problem.code
            except LanekeeperError:
                return  # nothing was stored: the request is lost
            else:
                body, code = found.body, OK
        self._keep(wish.identity, wish.identity, code, body, is_replayed=True)

    def _on_reply(self, delivered: DeliveredMessage) -> None:
        properties = delivered.header.properties
        headers = properties.headers or {}
        question = properties.correlation_id or ""
        status = headers.get("x-lane-status")
        if status is not None and (id := properties.message_id or "") not in self._seen:
            self._seen.add(id)
            code = OK if status == OK else str(json.loads(delivered.body)["code"])
            is_replayed = bool(headers.get("x-lane-replayed"))
            self._keep(question, str(headers.get("x-lane-request-id")), code, delivered.body, is_replayed=is_replayed)

    def _keep(self, question: str, identity: str, code: str, body: bytes, *, is_replayed: bool) -> None:
        text = "".join(block.get("text", "") for block in json.loads(body)["content"]) if code == OK else ""
        self._history.add(
            Replied(
                at_s=time.monotonic(),
                question=question,
                identity=identity,
                code=code,
                digest=blake2b(body, digest_size=8).hexdigest(),
                text=text[:200],
                replayed=is_replayed,
            )
        )
        self._confirmed.discard(question)
        if (answered := self._waiting.pop(question, None)) is not None:
            answered.set()

    def _on_dead(self, delivered: DeliveredMessage) -> None:
        properties = delivered.header.properties
        code = str((properties.headers or {}).get("x-lane-dead-code"))
        self._history.add(Parked(at_s=time.monotonic(), identity=properties.message_id or "", code=code))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=f"load {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _tenant_of(wish: Wish) -> dict[str, str]:
    return {"x-lane-tenant": wish.tenant} if wish.tenant else {}
