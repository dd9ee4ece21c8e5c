"""Applications that send requests continuously over several connections, drawn at random so that every kind of request
meets every fault, and that record every reply.

Each request is published until the broker has confirmed it, under the same id: after a confirm that never came, too."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Self
from urllib.parse import urlsplit

import aiormq
from aiormq.abc import AbstractChannel, AbstractConnection, DeliveredMessage
from aiormq.channel import Channel
from aiormq.exceptions import AMQPError, DeliveryError, PublishError
from pamqp.commands import Basic

from lanekeeper import Client
from lanekeeper.contract.problems import LanekeeperError
from lanekeeper.replies import Problem
from tests.faults.checker import CANCELLED, OK, Asked, History, Parked, Published, Replied, Told

REPLY_QUEUE = "lane.reply.faults"
NOBODY = ("lane.reply.nobody", None)
"""Reply addresses that nobody reads: a missing queue, or none."""
PIPELINE = "papers"
STEPS = (
    {"name": "one", "prompt": "{{ input.id }}/1 {{ input.prompt }}"},
    {"name": "two", "each": "input.items", "prompt": "{{ input.id }}/2.{{ item }} {{ input.prompt }}", "lane": "batch"},
    {"name": "three", "prompt": "{{ input.id }}/3 {{ one }} {{ two|join(' ') }}"},
)
"""The pipeline's steps. A prompt's first word is the request's id and the number of the step and the item."""
SCHEDULE, SCHEDULE_S = "scheduled", 3
"""A schedule's name, its prompt, and how often it fires."""
ITEMS = (1, 2, 3)
MODELS = ("claude-haiku-5-5", "claude-sonnet-5-5")
BETAS = ("", "one-2026-01-01", "two-2026-01-01")
"""Requests for the provider's batches differ in these, so that several batches are gathered at a time."""
LARGE_BYTES, OVERSIZED_BYTES = 700_000, 1_200_000
"""Below and above the limit of a request's body."""
PADDING_BYTES = 40_000
CANCEL_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The shares of the kinds of requests, from 0 to 1."""

    lanes: Mapping[str, float]
    latency_s: tuple[float, float] = (0.02, 0.6)
    streamed: float = 0.15
    delayed: float = 0.03
    refused: float = 0.02
    """Rejected by the provider for good."""
    unheard: float = 0.0
    """No reply is possible; the result is fetched at the end."""
    twice: float = 0.05
    conflicting: float = 0.01
    """The same id with another body, after the first was answered."""
    posted: float = 0.1
    """Its outcome is posted to a webhook as well."""
    piped: float = 0.0
    """It is a pipeline."""
    padded: float = 0.5
    """Of the pipelines: those whose state is too large to go round with each look."""
    cancelled: float = 0.3
    """Of the pipelines: those that are cancelled, at any moment."""
    batched: float = 0.5
    """Of the requests of the lane `batch`: those that may be put into a provider's batch."""
    large: float = 0.02
    oversized: float = 0.01
    tenants: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})
    """Their shares of the requests; without a name, the connection's user."""


EVERYTHING = Mix(
    lanes={"critical": 0.3, "normal": 0.4, "batch": 0.3},
    unheard=0.02,
    piped=0.05,
    tenants={"": 0.1, "many": 0.6, "some": 0.2, "few": 0.1},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    identity: str
    lane: str
    body: Mapping[str, Any]
    headers: Mapping[str, Any] = field(default_factory=dict)
    expects: tuple[str, ...] = (OK,)
    reply_to: str | None = REPLY_QUEUE
    delay_s: float = 0.0
    is_sent_twice: bool = False
    is_contradicted: bool = False
    tenant: str = ""
    words: str = ""
    """Words that the answer must contain; without them, the id."""
    cancelled_after_s: float = 0.0
    """0: it is not cancelled."""

    @property
    def is_heard(self) -> bool:
        return self.reply_to == REPLY_QUEUE


def draw(rng: random.Random, mix: Mix, *, identity: str, webhooks: Sequence[str] = ()) -> Wish:
    """The next request. `webhooks`: where outcomes can be posted, below a path for each tenant."""
    script = f"[[latency: {round(1000 * rng.uniform(*mix.latency_s))}ms]]"
    headers: dict[str, Any] = {}
    is_refused = rng.random() < mix.refused
    if is_refused:
        script += " [[fault: invalid]]"
    elif rng.random() < mix.streamed:
        headers["x-lane-stream"] = True
    delay_ms = rng.randrange(300, 3000) if rng.random() < mix.delayed else 0
    if delay_ms:
        headers["x-lane-delay-ms"] = delay_ms
    is_unheard = rng.random() < mix.unheard and not headers
    is_oversized = is_large = False
    tenant = rng.choices(list(mix.tenants), weights=list(mix.tenants.values()))[0]
    if tenant:
        headers["x-lane-tenant"] = tenant
    if webhooks and rng.random() < mix.posted:
        headers["x-lane-webhook"] = f"{rng.choice(webhooks)}/{tenant}"
    body: dict[str, Any] = {"prompt": f"{identity} {script}"}
    words, cancelled_after_s = identity, 0.0
    if rng.random() < mix.piped and "x-lane-stream" not in headers:
        headers["x-lane-pipeline"] = PIPELINE
        body = {"id": identity, "prompt": script, "items": ITEMS}
        echoes = (f"echo: {identity}/{step} {script}" for step in ("1", *(f"2.{item}" for item in ITEMS)))
        words = f"echo: {identity}/3 {' '.join(echoes)}"
        if rng.random() < mix.padded:
            body["padding"] = "x" * PADDING_BYTES
        if not is_unheard and not is_refused and rng.random() < mix.cancelled:
            cancelled_after_s = rng.uniform(0.01, 3)
    lane = rng.choices(list(mix.lanes), weights=list(mix.lanes.values()))[0]
    is_plain = "x-lane-pipeline" not in headers and not is_refused
    if lane == "batch" and rng.random() >= mix.batched:
        headers["x-lane-no-batch"] = True
    elif lane == "batch" and is_plain:
        body["model"] = rng.choice(MODELS)
        if beta := rng.choice(BETAS):
            headers["anthropic-beta"] = beta
    if is_plain and not is_unheard:
        is_oversized, is_large = rng.random() < mix.oversized, rng.random() < mix.large
    if is_oversized or is_large:
        body["system"] = "x" * (OVERSIZED_BYTES if is_oversized else LARGE_BYTES)
    return Wish(
        identity=identity,
        tenant=tenant,
        lane=lane,
        body=body,
        words=words,
        headers=headers,
        expects=("provider_rejected",)
        if is_refused
        else ("too_large",)
        if is_oversized
        else (OK, CANCELLED)
        if cancelled_after_s
        else (OK,),
        cancelled_after_s=cancelled_after_s,
        reply_to=rng.choice(NOBODY) if is_unheard else REPLY_QUEUE,
        delay_s=delay_ms / 1000,
        is_sent_twice=rng.random() < mix.twice,
        is_contradicted=rng.random() < mix.conflicting and not (is_unheard or cancelled_after_s or is_oversized),
    )


LOST = (AMQPError, OSError, TimeoutError, RuntimeError, asyncio.CancelledError)
CONFIRM_S = 10.0
HEARTBEAT_S = 3
PREFETCH = 200


class Publisher:
    """One connection with one confirming channel; after any uncertain outcome it is opened again at the next node."""

    def __init__(self, urls: Sequence[str], node: int) -> None:
        self._urls = urls
        self._node = node
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None
        self._opening = asyncio.Lock()

    async def publish(self, body: bytes, *, key: str, properties: Basic.Properties) -> Told:
        channel: AbstractChannel | None = None
        try:
            channel = await self._open()
            await channel.basic_publish(
                body,
                exchange="lane.requests",
                routing_key=key,
                properties=properties,
                mandatory=True,
                timeout=CONFIRM_S,
            )
            return "confirmed"
        except PublishError:
            return "returned"
        except DeliveryError:
            return "refused"
        except (Exception, asyncio.CancelledError) as error:
            # aiormq raises a bare Exception if the connection is lost while it drains
            if asks_to_stop(error) or not (type(error) is Exception or isinstance(error, LOST)):
                raise
            # A new channel each time, because aiormq matches returned messages by message id only.
            if channel is self._channel:
                await self.close()
            return "unknown"

    async def close(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            with suppress(Exception):
                await asyncio.wait_for(connection.close(), timeout=0.5)

    async def _open(self) -> AbstractChannel:
        async with self._opening:
            if self._channel is None or self._channel.is_closed:
                await self.close()
                self._node = (self._node + 1) % len(self._urls)
                async with asyncio.timeout(CONFIRM_S):
                    self._connection = await aiormq.connect(_named(self._urls[self._node], "asks"))
                    self._channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
            return self._channel


async def read(urls: Sequence[str], queue: str, take: Callable[[DeliveredMessage], None]) -> None:
    """Pass on everything that arrives in a queue, for ever; when a node is lost, from the next one."""
    node = len(urls) - 1  # the last node, because faults affect the others as far as there are others
    while True:
        ended = asyncio.Event()

        async def taken(delivered: DeliveredMessage) -> None:
            take(delivered)
            with suppress(AMQPError, RuntimeError, OSError):
                assert isinstance(delivered.delivery, Basic.Deliver)
                await delivered.channel.basic_ack(delivered.delivery.delivery_tag or 0, wait=False)

        def end(_: object, ended: asyncio.Event = ended) -> None:
            ended.set()

        try:
            async with connected(urls[node], name="reads") as connection:
                channel = await connection.channel()
                assert isinstance(channel, Channel)
                connection.closing.add_done_callback(end)
                channel.closing.add_done_callback(end)
                channel.on_consumer_cancel_callbacks.add(end)
                await channel.basic_qos(prefetch_count=PREFETCH)
                await channel.basic_consume(queue, taken, timeout=CONFIRM_S)
                await ended.wait()
        except (AMQPError, OSError, TimeoutError, RuntimeError, asyncio.CancelledError) as error:
            if asks_to_stop(error):
                raise
        node = (node + 1) % len(urls)
        await asyncio.sleep(0.1)


@asynccontextmanager
async def connected(url: str, name: str = "declares") -> AsyncIterator[AbstractConnection]:
    async with asyncio.timeout(CONFIRM_S):
        connection = await aiormq.connect(_named(url, name))
    try:
        yield connection
    finally:
        with suppress(Exception):
            await asyncio.wait_for(connection.close(), timeout=1)


def _named(url: str, name: str) -> str:
    return f"{url}?heartbeat={HEARTBEAT_S}&name=faults+{name}"


def asks_to_stop(error: BaseException) -> bool:
    """Whether a cancellation was requested. aiormq also cancels whatever waits on a connection that is lost."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


DEAD_QUEUE = "lane.dead"
FETCHED_AT_ONCE = 10
PUBLISHERS = 4
MOST_WAITING = 300
"""While so many requests are unanswered no other is sent: on a machine that is too busy for the load, the backlog would
grow for as long as a fault or the start of a worker lasts."""


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
        webhooks: Sequence[str] = (),
    ) -> None:
        self._urls = urls
        self._user = urlsplit(urls[0]).username or "guest"
        self._history = history
        self._rng = rng
        self._rate = rate
        self.mix = mix
        self._name = name
        self._webhooks = webhooks
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
        return len(self._confirmed)

    @property
    def unanswered(self) -> list[str]:
        """The correlation ids of the requests for which a reply is expected."""
        return list(self._waiting)

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

    def expect_scheduled(self, identities: Iterable[str]) -> None:
        """Requests that the schedule has published: they are fetched like those without a reply."""
        for identity in identities:
            wish = Wish(identity=identity, lane="normal", body={}, reply_to=None, words=SCHEDULE)
            self._ask_for(wish, question=identity)
            now_s = time.monotonic()
            self._history.add(Published(at_s=now_s, question=identity, sent_s=now_s, told="confirmed"))
            self._unheard.append(wish)

    async def answered(self, *, within_s: float) -> bool:
        """Wait until every request sent so far is answered. Returns whether all are."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._waiting:  # a request that was just being sent is added late
                    for answered in tuple(self._waiting.values()):
                        await answered.wait()
        return not self._waiting

    async def fetched(self, *, within_s: float) -> None:
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
                    live = {"x-lane-no-batch": True}
                    wish = Wish(identity=identity, lane=lane, body={"prompt": prompt}, headers=live)
                    all_at_once.create_task(self._publish(wish, self._ask_for(wish, question=identity)))

    async def _ask(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + 1 / self._rate, time.monotonic() - 1)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if len(self._waiting) >= MOST_WAITING:
                continue
            wish = draw(self._rng, self.mix, identity=self._next_id(), webhooks=self._webhooks)
            self._spawn(self._one(wish), "one request")

    async def _one(self, wish: Wish) -> None:
        question = self._ask_for(wish, question=wish.identity)
        answered = self._waiting.get(question)
        if answered is None:
            self._unheard.append(wish)  # before it is sent: it may be sent again after `fetched` was called
        await self._publish(wish, question)
        if wish.cancelled_after_s:
            self._spawn(self._cancel(wish), "one cancellation")
        if wish.is_sent_twice:
            await asyncio.sleep(self._rng.uniform(0, 1))
            await self._publish(wish, question)
        if answered is not None and wish.is_contradicted:
            await answered.wait()
            body = {"prompt": f"{wish.body['prompt']} and more"}
            other = replace(wish, body=body, headers=_tenant_of(wish), expects=("idempotency_conflict",), delay_s=0.0)
            await self._publish(other, self._ask_for(other, question=f"{wish.identity}~other"))

    async def _cancel(self, wish: Wish) -> None:
        await asyncio.sleep(wish.cancelled_after_s)
        with suppress(
            LanekeeperError, TimeoutError
        ):  # it may end before it can be cancelled, as when nothing is broken
            async with asyncio.timeout(CANCEL_WITHIN_S), Client(self._rng.choice(self._urls)) as client:
                await client.cancel(wish.identity, tenant=wish.tenant or None)

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
                words=wish.words or wish.identity,
                expects=wish.expects,
                heard=wish.is_heard,
                due_s=now_s + wish.delay_s if wish.delay_s else 0.0,
                posted="x-lane-webhook" in wish.headers,
                piped="x-lane-pipeline" in wish.headers,
            )
        )
        if wish.is_heard:
            self._waiting[question] = asyncio.Event()
        return question

    async def _publish(self, wish: Wish, question: str) -> None:
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
                text=text[:400],
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
