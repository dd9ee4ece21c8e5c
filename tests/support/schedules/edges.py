"""A worker's edges, simulated: the store, the publisher, the provider and the queues, with the core's interfaces."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from typing_extensions import override

from consumers.failures import TransientError
from consumers.limits.base import Underway
from consumers.providers.registry import Answer, OnEvent, Provider
from consumers.state.base import (
    ClaimAnswer,
    Completion,
    Fingerprint,
    Found,
    Granted,
    Held,
    Identity,
    Stop,
    StoreUnavailable,
)
from consumers.state.sqlite.store import SqliteStore
from consumers.state.sqlite.tables import Tables, Times
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import ConfirmUnknown
from tests.support.schedules.broker import Broker, Channel
from tests.support.schedules.loop import SteppedLoop
from tests.support.schedules.operation import DELIVERY, Edge
from tests.support.schedules.promise import Promise
from topology.broker.consume import ChannelLost, Deliveries, Delivery, Heads, Session
from topology.codec.decoding import Request

REOPEN_AFTER_S = 0.1
T = TypeVar("T")


class World(Protocol):
    """What all processes share."""

    broker: Broker
    rows: Tables
    promise: Promise
    store_away_until_s: float

    def time_s(self) -> float: ...
    def now_ms(self) -> int: ...
    def times(self) -> Times: ...


class StoreEdge(SqliteStore):
    """Claims and results in the rows that all workers share."""

    trouble = None

    def __init__(self, world: World, edge: Edge) -> None:
        self._world = world
        self._edge = edge

    @override
    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> ClaimAnswer:
        def ask(at: Times) -> ClaimAnswer:
            found = self._world.rows.claim(at, identity, fingerprint)
            if isinstance(found, Granted):
                self._world.promise.on_granted(Held(identity, found.token))
            return found

        found = await self._do("claim", identity, ask, fingerprint)
        if isinstance(found, Granted):
            self._world.promise.on_claimed(DELIVERY.get(), Held(identity, found.token))
        return found

    @override
    async def renew(self, held: Sequence[Held]) -> Mapping[Held, Stop]:
        return await self._do("renew", None, lambda at: self._world.rows.renew(at, held))

    @override
    async def release(
        self, held: Held, *, attempts: int = 0, due_ms: int | None = None, is_survived: bool = True
    ) -> None:
        release = partial(self._world.rows.release, attempts=attempts, due_ms=due_ms, is_survived=is_survived)
        await self._do("release", held.identity, lambda at: release(at, held))

    @override
    async def defer(self, identity: Identity, *, due_ms: int | None, keep_until_ms: int) -> bool:
        defer = partial(self._world.rows.defer, due_ms=due_ms, keep_until_ms=keep_until_ms)
        return await self._do("defer", identity, lambda at: defer(at, identity))

    @override
    async def complete(
        self, identity: Identity, fingerprint: Fingerprint, completion: Completion, *, token: int | None
    ) -> Completion | None:
        def keep(at: Times) -> Completion | None:
            holds = self._world.rows.complete(at, identity, fingerprint, completion, token=token)
            if token is not None:
                self._world.promise.on_completed(Held(identity, token), is_own=holds == completion)
            return holds

        return await self._do("complete", identity, keep, fingerprint)

    @override
    async def note(self, identity: Identity, completion: Completion) -> None:
        await self._do("note", identity, lambda at: self._world.rows.note(at, identity, completion))

    @override
    async def find(self, identity: Identity) -> Found | None:
        return await self._do("find", identity, lambda at: self._world.rows.find(at, identity))

    async def _do(
        self, what: str, identity: Identity | None, call: Callable[[Times], T], fingerprint: Fingerprint | None = None
    ) -> T:
        def effect() -> T:
            result = call(self._world.times())
            self._world.promise.on_stored(fingerprint)
            return result

        if self._world.time_s() < self._world.store_away_until_s:
            raise StoreUnavailable("away")
        return await self._edge.reach(what, identity.id if identity else "", effect, lost=StoreUnavailable)  # type: ignore[no-any-return]


class PublisherEdge(Publisher):
    """The real `publish_surely`; the simulated world decides the result of each try."""

    def __init__(self, world: World, edge: Edge) -> None:
        self._world = world
        self._edge = edge
        self._on_missing = None

    @override
    async def exceeded_limit(self, size: int) -> int | None:
        return None

    @override
    async def publish(
        self, message: Message, *, exchange: str, routing_key: str, timeout_s: float = 10, **_: Any
    ) -> None:
        delivery = DELIVERY.get()
        about = message.headers.get(n.REQUEST_ID, message.message_id)

        def effect() -> None:
            self._world.broker.publish(message, exchange=exchange, routing_key=routing_key)
            self._world.promise.on_published(delivery, message, exchange, routing_key)

        try:
            async with asyncio.timeout(timeout_s):
                await self._edge.reach(f"publish {exchange or 'reply'}", str(about), effect, lost=ConfirmUnknown)
        except TimeoutError:
            raise ConfirmUnknown("no confirm in time") from None


class ProviderEdge(Provider):
    """Gives every call a different answer."""

    name = "model"

    def __init__(self, world: World, edge: Edge) -> None:
        self._world = world
        self._edge = edge

    @override
    async def stream(
        self, request: Request, *, timeout_s: float, parts: OnEvent | None, underway: Underway | None = None
    ) -> Answer:
        body = b'{"answer":%d}' % self._world.promise.on_call(DELIVERY.get(), self._edge.owner, request)

        def effect() -> Answer:
            return Answer(body=body, model="m", provider="model")

        try:
            async with asyncio.timeout(timeout_s):
                answer: Answer = await self._edge.reach("call", request.id, effect, lost=TransientError, stays=False)
                return answer
        except TimeoutError:
            raise TransientError("timed out") from None

    @override
    async def probe(self, model: str, *, by_call: bool) -> None: ...

    @override
    async def aclose(self) -> None: ...


class SessionEdge(Session):
    """The deliveries of one channel."""

    def __init__(self, channel: Channel, loop: SteppedLoop) -> None:
        self._source = channel
        self._arrived: asyncio.Queue[Delivery | None] = asyncio.Queue()
        channel.arrive = lambda delivery: void(loop.call_soon(self._arrived.put_nowait, delivery))
        self.wake: Callable[[], None] = lambda: void(loop.call_soon(self._arrived.put_nowait, None))

    @override
    async def stop(self) -> None:
        self._source.is_consuming = False
        self.wake()

    @override
    def __aiter__(self) -> "SessionEdge":
        return self

    @override
    async def __anext__(self) -> Delivery:
        delivery = await self._arrived.get()
        if self._source.is_known_lost:
            raise ChannelLost("channel lost")
        if delivery is None:
            raise StopAsyncIteration
        return delivery


class Hosting(Protocol):
    """The worker that receives the deliveries."""

    edge: Edge
    loop: SteppedLoop
    sessions: dict[Channel, SessionEdge]


class DeliveriesEdge(Deliveries):
    """A queue's deliveries, on one channel after another."""

    trouble = None
    is_paused = False

    def __init__(self, world: World, worker: "Hosting", queue: str, prefetch: int, heads: Heads | None = None) -> None:
        self._world = world
        self._worker = worker
        self.queue = queue
        self.prefetch = prefetch
        self._heads = heads
        self._ended = False
        self._open_session: SessionEdge | None = None

    @override
    async def sessions(self) -> AsyncGenerator[Session, None]:
        while not self._ended and not self._worker.edge.is_cut:
            broker, owner = self._world.broker, self._worker.edge.owner
            if self._heads is None:
                channel = broker.open(self.queue, prefetch=self.prefetch, owner=owner)
            else:
                channel = broker.open_sides(self._heads, owner=owner)
            session = self._open_session = self._worker.sessions[channel] = SessionEdge(channel, self._worker.loop)
            try:
                yield session
            finally:
                self._open_session = None
                channel.is_consuming = False
                channel.is_known_lost = True  # frames already written still arrive, then the channel's end
            await asyncio.sleep(REOPEN_AFTER_S)

    @override
    async def stop(self) -> None:
        self._ended = True
        if self._open_session is not None:
            await self._open_session.stop()


def void(_: object) -> None: ...
