"""Applications that ask all the time, over several connections, and know what they were told.

Each request is published until the broker has confirmed it, under the same id: after a confirm that never came, too.
Some are sent twice on purpose, some again with another body, some streamed, delayed, or refused by the provider.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self

from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

from tests.faults.connections import Publisher, connected, read
from tests.faults.history import OK, Asked, History, Parked, Part, Published, Replied

REPLY_QUEUE = "lane.reply.faults"
DEAD_QUEUE = "lane.dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What is asked; shares from 0 to 1."""

    lanes: Mapping[str, float]
    latency_s: tuple[float, float] = (0.02, 0.6)
    streamed: float = 0.15
    delayed: float = 0.03
    refused: float = 0.02
    twice: float = 0.05
    conflicting: float = 0.01
    """The same id with another body, once the first has been answered; 0 where nobody deduplicates."""


EVERYTHING = Mix(lanes={"critical": 0.3, "normal": 0.4, "batch": 0.3})


class Load:
    """`rate` new requests a second while `asking`. `urls`: the broker's nodes; whoever loses one goes to the next."""

    def __init__(
        self,
        urls: Sequence[str],
        history: History,
        *,
        rng: random.Random,
        rate: float,
        mix: Mix = EVERYTHING,
        publishers: int = 4,
        name: str = "r",
    ) -> None:
        self._urls = urls
        self._history = history
        self._rng = rng
        self._rate = rate
        self._mix = mix
        self._name = name
        self._publishers = [Publisher(urls, n) for n in range(publishers)]
        self._waiting: dict[str, asyncio.Event] = {}
        """Confirmed or on its way, and not answered; set when it is."""
        self._confirmed: set[str] = set()
        self._seen: set[str] = set()
        """Message ids of replies and dead letters: one that is delivered again is no other."""
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        """Questions that were confirmed and not answered."""
        return len(self._confirmed)

    @property
    def confirmed(self) -> int:
        return sum(isinstance(each, Published) and each.told == "confirmed" for each in self._history.events)

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
        """Ask for as long as the block lasts."""
        task = self._spawn(self._ask(), "asks")
        try:
            yield
        finally:
            task.cancel()

    async def answered(self, *, within_s: float) -> bool:
        """Wait until nobody waits for an answer any more, and what is being published is confirmed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for answered in tuple(self._waiting.values()):
                    await answered.wait()
        return not self._waiting

    async def burst(self, copies: int, *, lane: str = "critical") -> str:
        """One request, published so many times at once over all connections; its id."""
        identity = self._next_id()
        prompt = f"{identity} asked {copies} times [[latency: 300ms]]"
        questions = [f"{identity}~{n}" for n in range(copies)]
        for question in questions:
            self._ask_for(question, identity=identity, lane=lane)
        async with asyncio.TaskGroup() as all_at_once:
            for question in questions:
                all_at_once.create_task(self._publish(question, identity=identity, lane=lane, body={"prompt": prompt}))
        return identity

    async def _ask(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + 1 / self._rate, time.monotonic() - 1)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self._spawn(self._one(), "one request")

    async def _one(self) -> None:
        rng, mix = self._rng, self._mix
        identity = self._next_id()
        lane = rng.choices(list(mix.lanes), weights=list(mix.lanes.values()))[0]
        headers: dict[str, Any] = {}
        prompt = f"{identity} [[latency: {round(1000 * rng.uniform(*mix.latency_s))}ms]]"
        expects: tuple[str, ...] = (OK,)
        due_s = 0.0
        if rng.random() < mix.refused:
            prompt, expects = f"{prompt} [[fault: invalid]]", ("provider_rejected",)
        elif rng.random() < mix.streamed:
            headers["x-lane-stream"] = True
        if rng.random() < mix.delayed:
            headers["x-lane-delay-ms"] = delay_ms = rng.randrange(300, 3000)
            due_s = time.monotonic() + delay_ms / 1000
        again = rng.random() < mix.twice
        conflicting = rng.random() < mix.conflicting
        body = {"prompt": prompt}
        answered = self._ask_for(identity, identity=identity, lane=lane, expects=expects, due_s=due_s)
        await self._publish(identity, identity=identity, lane=lane, body=body, headers=headers)
        if again:
            await asyncio.sleep(rng.uniform(0, 1))
            await self._publish(identity, identity=identity, lane=lane, body=body, headers=headers)
        if conflicting:
            await answered.wait()
            question = f"{identity}~other"
            self._ask_for(question, identity=identity, lane=lane, expects=("idempotency_conflict",))
            await self._publish(question, identity=identity, lane=lane, body={"prompt": f"{prompt} and more"})

    def _next_id(self) -> str:
        self._number += 1
        return f"{self._name}-{self._number:06d}"

    def _ask_for(
        self, question: str, *, identity: str, lane: str, expects: tuple[str, ...] = (OK,), due_s: float = 0.0
    ) -> asyncio.Event:
        self._history.add(
            Asked(
                at_s=time.monotonic(),
                question=question,
                identity=identity,
                lane=lane,
                words=identity,
                expects=expects,
                due_s=due_s,
            )
        )
        return self._waiting.setdefault(question, asyncio.Event())

    async def _publish(
        self, question: str, *, identity: str, lane: str, body: object, headers: Mapping[str, Any] | None = None
    ) -> None:
        """Until it is confirmed."""
        properties = Basic.Properties(
            message_id=identity,
            correlation_id=question,
            reply_to=REPLY_QUEUE,
            delivery_mode=2,
            priority=self._rng.randrange(10),
            content_type="application/json",
            headers=dict(headers or {}),
        )
        wait_s = 0.05
        while True:
            sent_s = time.monotonic()
            told = await self._rng.choice(self._publishers).publish(
                json.dumps(body).encode(), key=f"{lane}.tests.faults", properties=properties
            )
            self._history.add(Published(at_s=time.monotonic(), question=question, sent_s=sent_s, told=told))
            if told == "confirmed":
                if question in self._waiting:
                    self._confirmed.add(question)
                return
            await asyncio.sleep(wait_s * self._rng.uniform(0.5, 1.5))
            wait_s = min(2.0, 2 * wait_s)

    def _on_reply(self, delivered: DeliveredMessage) -> None:
        properties = delivered.header.properties
        headers = properties.headers or {}
        question = properties.correlation_id or ""
        at_s = time.monotonic()
        if (status := headers.get("x-lane-status")) is None:
            seq = int(str(headers.get("x-lane-seq", -1)))
            self._history.add(Part(at_s=at_s, question=question, kind=str(headers.get("x-lane-part")), seq=seq))
        elif self._is_new(properties.message_id):
            body = json.loads(delivered.body)
            text = "".join(block.get("text", "") for block in body["content"]) if status == OK else ""
            self._history.add(
                Replied(
                    at_s=at_s,
                    question=question,
                    identity=str(headers.get("x-lane-request-id")),
                    code=OK if status == OK else str(body["code"]),
                    digest=blake2b(delivered.body, digest_size=8).hexdigest(),
                    text=text[:200],
                    replayed=bool(headers.get("x-lane-replayed")),
                )
            )
            self._confirmed.discard(question)
            if (answered := self._waiting.pop(question, None)) is not None:
                answered.set()

    def _on_dead(self, delivered: DeliveredMessage) -> None:
        properties = delivered.header.properties
        code = str((properties.headers or {}).get("x-lane-dead-code"))
        self._history.add(Parked(at_s=time.monotonic(), identity=properties.message_id or "", code=code))

    def _is_new(self, message_id: str | None) -> bool:
        if message_id is None:
            return True
        is_new = message_id not in self._seen
        self._seen.add(message_id)
        return is_new

    def _spawn(self, work: Any, name: str) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.create_task(work, name=f"load {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
