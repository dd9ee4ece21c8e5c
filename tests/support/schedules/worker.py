"""A worker process: the real pools, handler, gates, claiming and settler, on an event loop that a driver steps,
and on simulated edges: the store, the publisher, the provider and the queues, with the core's interfaces.

Every await of the core on something outside its process is an operation. It is requested, takes effect, and is
answered. The world decides when, and anything may happen between these three moments. The worker may have crashed by
then; the operation may take effect all the same. A `Promise` checks after each thing that happens what is promised for
every request (docs/decisions/0004)."""

import asyncio
import heapq
import json
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextvars import Context, ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from typing_extensions import override

from consumers.claiming import Claiming
from consumers.clock import moment_text
from consumers.decoding import Parsing
from consumers.dialects.answers import Answer, OnEvent
from consumers.failures import TransientError
from consumers.flows.webhooks import Webhooks, WebhookSpec
from consumers.gates import ClaimGate, Gate, defer_until_due, refuse_if_late
from consumers.job import Job, source_of
from consumers.large_bodies import Fetching, LargeAnswers
from consumers.lifecycle import Lifecycle
from consumers.limits.base import CallInProgress
from consumers.pool import Pool
from consumers.providers.breakers import Breakers
from consumers.providers.registry import Provider, Registry
from consumers.rate_limit import Parking
from consumers.replies import Replies, ReplyRetries, ReplyRule, ReplySender
from consumers.settle import Failpoints, Settler
from consumers.slots.activity import LaneActivity
from consumers.slots.admission import LaneSlots, QueueAdmitter, SideQueueAdmitter, SideQueues
from consumers.state import base
from consumers.state.base import ClaimAnswer, Fingerprint, Granted, Held, Identity, StoreSpec, StoreUnavailable
from consumers.state.decisions import KEEP, Change, Row, Times
from consumers.state.requests import Decide, Requests
from consumers.strays import Strays
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import PROBLEMS, ConfirmUnknown
from lanekeeper.telemetry.tracing import Tracing
from tests.support.jobs import attempts, handler
from tests.support.schedules.broker import LANE, NAMES, SIDE_QUEUES, Broker, Channel, Entry
from topology.broker.consume import ChannelLost, Deliveries, Delivery, Session
from topology.broker.notices import Notices
from topology.codec.decoding import Request
from topology.lanes import CRITICAL


class SteppedLoop(asyncio.AbstractEventLoop):
    """The parts of an event loop that tasks, futures, locks and timeouts need."""

    def __init__(self, time_s: Callable[[], float]) -> None:
        self._time_s = time_s
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[asyncio.TimerHandle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.unhandled: list[str] = []

    def step(self) -> None:
        """Run until every task waits."""
        asyncio._set_running_loop(self)
        try:
            now_s = self._time_s()
            while self._timers and self._timers[0].when() <= now_s:
                self._ready.append(heapq.heappop(self._timers))
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    def next_timer_s(self) -> float | None:
        while self._timers and self._timers[0].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0].when() if self._timers else None

    def discard(self) -> None:
        """Cancel every task. What they still do must have no effect any more."""
        for _ in range(5):
            left = [task for task in self.tasks if not task.done()]
            for task in left:
                task.cancel()
            self.step()
            if not left:
                break
        self.tasks.clear()
        self._timers.clear()

    # what asyncio requires of a loop

    def time(self) -> float:
        return self._time_s()

    def call_soon(  # type: ignore[override]  # typeshed has type variables here
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._time_s() + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None, **_: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.append(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.unhandled.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: a cancelled timer stays in the heap until its time has come."""


DELIVERY: ContextVar[object] = ContextVar("delivery")
"""The delivery that is being worked on, in whichever task."""


@dataclass(eq=False)
class Operation:
    """A pending operation of a worker."""

    what: str
    about: str
    """The request's id; empty for an operation on several requests."""
    owner: str
    effect: Callable[[], Any]
    lost: Callable[[str], Exception]
    """The error that its worker gets if it fails, or if its outcome is unknown."""
    answer: "asyncio.Future[Any]"
    is_done: bool = False
    result: Any = None
    is_hung: bool = False
    """Whether it never ends by itself."""
    stays: bool = True
    """Whether it may take effect after its worker has stopped waiting for it."""

    @property
    def is_waited_for(self) -> bool:
        return not self.answer.done()

    @property
    def is_over(self) -> bool:
        """Whether it can have no effect any more."""
        return not self.is_waited_for and (self.is_done or not self.stays)

    def __str__(self) -> str:
        return f"{self.owner} {self.what} {self.about}"

    def do(self) -> None:
        self.result, self.is_done = self.effect(), True

    def do_and_tell(self) -> None:
        self.do()
        self.tell()

    def tell(self) -> None:
        if not self.answer.done():
            self.answer.set_result(self.result)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(eq=False)
class Edge:
    """The pending operations of one process."""

    owner: str
    under_way: list[Operation] = field(default_factory=list)
    is_cut: bool = False
    """Whether the process is gone: code of it that still runs can reach nothing."""

    async def reach(
        self,
        what: str,
        about: str,
        effect: Callable[[], Any],
        *,
        lost: Callable[[str], Exception],
        stays: bool = True,
    ) -> Any:
        if self.is_cut:
            raise asyncio.CancelledError
        answer = asyncio.get_running_loop().create_future()
        self.under_way.append(Operation(what, about, self.owner, effect, lost, answer, stays=stays))
        return await answer


NOT_KEPT = "idempotency_conflict"
UNKNOWN_BODY = ("poison", "deadline_exceeded")
"""Codes that a copy with another body than its id's stored request may be answered with, although they are not
stored."""


class Ending(NamedTuple):
    status: str
    code: str
    body: bytes
    ended_ms: int


class Promise:
    """Collects all violations. `bodies`: the bodies that were published under each id."""

    def __init__(self, rows: Mapping[Identity, Row], bodies: Mapping[str, set[bytes]]) -> None:
        self._rows = rows
        self._bodies = bodies
        self.violations: list[str] = []
        self.calls: dict[str, int] = defaultdict(int)
        self.doomed: set[str] = set()
        """Workers that a poison request will crash."""
        self.endings: dict[str, list[Ending]] = defaultdict(list)
        """Stored endings by id, in order. Those that were only noted are in `noted`."""
        self.noted: dict[str, list[Ending]] = defaultdict(list)
        self._holds: dict[str, Ending] = {}
        self._granted: dict[object, Held] = {}
        self._latest: dict[Identity, int] = {}
        self._told: dict[object, set[tuple[str, str]]] = defaultdict(set)
        self._numbers = 0

    def on_stored(self, fingerprint: Fingerprint | None) -> None:
        """Check that an id has at most one ending, unless the dead letter of exactly this ending is run again."""
        for id, row in ((identity.id, row) for identity, row in self._rows.items()):
            now = None
            if row.status is not None and not row.cancelling:
                now = Ending(row.status, row.code or "", row.body or b"", row.ended_ms or 0)
            if row.noted:
                if now is not None and now not in self.noted[id]:
                    self.noted[id].append(now)
                continue
            before = self._holds.get(id)
            if now == before:
                continue
            if before is not None:
                again = (
                    fingerprint is not None and fingerprint.dead_at_ms == before.ended_ms and before.status == "error"
                )
                if not again:
                    self.violations.append(f"{id}: {_short(before)} was replaced by {_short(now)}")
                del self._holds[id]
            if now is not None:
                self._holds[id] = now
                self.endings[id].append(now)
                if now.code == "internal":
                    self.violations.append(f"{id}: an unforeseen error buried it: {now.body.decode()}")

    def on_granted(self, held: Held) -> None:
        """The store has granted a claim; the worker may never learn of it."""
        self._latest[held.identity] = held.token

    def on_claimed(self, delivery: object, held: Held) -> None:
        """The worker has learnt that its claim was granted."""
        self._granted[delivery] = held

    def on_completed(self, held: Held, *, is_own: bool) -> None:
        """Check that a worker whose claim was granted to another since does not complete the request."""
        if is_own and held.token < self._latest[held.identity]:
            self.violations.append(f"{held.identity.id}: completed by a worker that was fenced off")

    def on_call(self, delivery: object, owner: str, request: Request) -> int:
        """Check that the provider is called only with a claim granted to this delivery. Returns the call's number."""
        held = self._granted.get(delivery)
        if held is None or held.identity.id != request.id:
            self.violations.append(f"{request.id}: its provider was called without a claim")
        self.calls[request.id] += 1
        self._numbers += 1
        if request.id.startswith("poison"):
            self.doomed.add(owner)
        return self._numbers

    def on_published(self, delivery: object, message: Message, exchange: str, routing_key: str) -> None:
        """Check that replies and dead letters say what is stored."""
        if exchange == "":
            self._told[delivery].add(("reply", routing_key))
            self._check_reply(message)
        elif exchange == NAMES.dead:
            self._check_dead(message)
        else:
            self._told[delivery].add(("delay", message.message_id or ""))

    def on_settle(self, channel: Channel, entry: Entry, how: str) -> None:
        """Check that a delivery is settled only once, and acknowledged only after its own work has answered the request
        or sent it through a delay."""
        message = entry.message
        told = self._told[DELIVERY.get(None)]  # what a paused lane gives back is no request of a worker yet
        if how == "twice":
            self.violations.append(f"{message.message_id}: settled twice")
        done = ("reply", message.reply_to or "") in told or ("delay", message.message_id or "") in told
        if how == "ack" and not done:
            self.violations.append(f"{message.message_id}: acknowledged, and nothing came of it")

    def _check_reply(self, message: Message) -> None:
        id, status = str(message.headers[n.REQUEST_ID]), message.headers[n.STATUS]
        code = "" if status == "ok" else json.loads(message.body)["code"]
        if code == NOT_KEPT or self._is_foreign(id, code):
            return
        if (status, message.body) not in {(each.status, each.body) for each in self._kept(id)}:
            self.violations.append(f"{id}: told {status} {code} {message.body[:80]!r}, which is not stored")

    def _check_dead(self, message: Message) -> None:
        id, code, at = message.message_id or "", message.headers[n.DEAD_CODE], message.headers[n.DEAD_AT]
        if self._is_foreign(id, code):
            return
        if code not in {each.code for each in self.noted[id]} and not any(
            (each.code, moment_text(each.ended_ms)) == (code, at) for each in self.endings[id]
        ):
            self.violations.append(f"{id}: buried with {code} at {at}, which is not stored")

    def _kept(self, id: str) -> list[Ending]:
        return self.endings[id] + self.noted[id]

    def _is_foreign(self, id: str, code: str) -> bool:
        return code == "invalid_request" or (len(self._bodies[id]) > 1 and code in UNKNOWN_BODY)

    def unburied(self, dead: list[Message]) -> list[str]:
        """Endings that should have a dead letter but have none."""
        there = {(each.message_id, each.headers[n.DEAD_CODE]) for each in dead}
        return [
            f"{id}: ended as {each.code}, and lies nowhere"
            for id, kept in self.endings.items()  # not `noted`: such a request may have ended differently since
            for each in kept
            if each.code and PROBLEMS[each.code].parked and (id, each.code) not in there
        ]


def _short(ending: Ending | None) -> str:
    return "nothing" if ending is None else f"{ending.status} {ending.code} {ending.body[:40]!r}"


REOPEN_AFTER_S = 0.1
T = TypeVar("T")


class World(Protocol):
    """What all processes share. `rows`: what the store keeps."""

    broker: Broker
    rows: dict[Identity, Row]
    promise: Promise
    store_away_until_s: float

    def time_s(self) -> float: ...
    def now_ms(self) -> int: ...
    def times(self) -> Times: ...


def swap(world: World, identity: Identity, decide: Decide[T]) -> Change[T]:
    """What an engine of the store does."""
    row = world.rows.get(identity)
    change = decide(None if row is None or row.is_over(world.times()) else row, world.times())
    if change.row is None:
        world.rows.pop(identity, None)
    elif change.row is not KEEP:
        world.rows[identity] = change.row
    return change


class StoreEdge(Requests):
    """Claims and results in the rows that all workers share."""

    trouble = None
    spec = StoreSpec()

    def __init__(self, world: World, edge: Edge) -> None:
        self._world = world
        self._edge = edge

    @override
    async def claim(self, identity: Identity, fingerprint: Fingerprint) -> ClaimAnswer:
        found = await super().claim(identity, fingerprint)
        if isinstance(found, Granted):
            self._world.promise.on_claimed(DELIVERY.get(), Held(identity, found.token))
        return found

    @override
    async def change_all(
        self, name: str, wanted: Sequence[tuple[Identity, Decide[T]]], *, durable: bool = True, bodies: bool = True
    ) -> Sequence[Change[T]]:
        promise = self._world.promise

        def effect() -> list[Change[T]]:
            done = []
            for identity, decide in wanted:
                change = swap(self._world, identity, decide)
                asked = decide.keywords if isinstance(decide, partial) else {}
                if isinstance(change.answer, Granted):
                    promise.on_granted(Held(identity, change.answer.token))
                if name == "complete" and asked["token"] is not None:
                    is_own = change.answer == asked["completion"]
                    promise.on_completed(Held(identity, asked["token"]), is_own=is_own)
                promise.on_stored(asked.get("message"))
                done.append(change)
            return done

        if self._world.time_s() < self._world.store_away_until_s:
            raise StoreUnavailable("away")
        about = wanted[0][0].id if len(wanted) == 1 else ""
        return await self._edge.reach(name, about, effect, lost=StoreUnavailable)  # type: ignore[no-any-return]

    @override
    async def endings(self, requests: Sequence[Identity]) -> Sequence[base.Ending | None]:
        raise NotImplementedError

    @override
    async def count_unseen(self, identity: Identity, keep_ms: int) -> Sequence[str]:
        return ()


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
    batches = None

    def __init__(self, world: World, edge: Edge) -> None:
        self._world = world
        self._edge = edge

    @override
    async def stream(
        self,
        request: Request,
        *,
        timeout_s: float,
        parts: OnEvent | None,
        in_progress: CallInProgress | None = None,
        **_: Any,
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

    def __init__(self, world: World, worker: "Hosting", queue: str, prefetch: int) -> None:
        self._world = world
        self._worker = worker
        self.queue = queue
        self.prefetch = prefetch
        self._ended = False
        self._open_session: SessionEdge | None = None

    @override
    async def sessions(self) -> AsyncGenerator[Session, None]:
        while not self._ended and not self._worker.edge.is_cut:
            broker, owner = self._world.broker, self._worker.edge.owner
            channel = broker.open(self.queue, prefetch=self.prefetch, owner=owner)
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


SPEC = replace(CRITICAL, name=LANE, slots=2, side_queues=SIDE_QUEUES)
SCOUT_PREFETCH = 2
GRACE_S = 5.0
TRACING = Tracing()


class NoNotices(Notices):
    def __init__(self) -> None: ...

    @override
    def publish(self, body: bytes, **_: Any) -> None: ...


class Worker:
    """One process. `loop.step` runs it until it waits; what it waits for is in `edge.under_way`."""

    def __init__(self, world: World, name: str, *, settler: type[Settler] = Settler) -> None:
        self.name = name
        self.is_suspended = False
        self.is_stopping = False
        self.is_over = False
        self.sessions: dict[Channel, SessionEdge] = {}
        self.loop = SteppedLoop(world.time_s)  # type: ignore[abstract]  # as much of a loop as is used
        self.edge = Edge(name)
        self._world = world
        publisher = PublisherEdge(world, self.edge)
        store: Any = StoreEdge(world, self.edge)  # the rest of a store is not used
        claiming = Claiming(store)
        replies = Replies(ReplySender(publisher, own=None), rule=ReplyRule(names=NAMES))
        reply_retries = ReplyRetries()
        lifecycle = Lifecycle(NoNotices(), names=NAMES, now_ms=world.now_ms)
        self._settler = settler(
            publisher,
            replies=replies,
            reply_retries=reply_retries,
            claiming=claiming,
            lifecycle=lifecycle,
            names=NAMES,
            tracing=TRACING,
            now_ms=world.now_ms,
            failpoints=Failpoints(),
            parking=Parking(),
            large_answers=LargeAnswers(publisher),
            bodies=Fetching(None, most_bytes=0),
            webhooks=Webhooks(publisher, spec=WebhookSpec(), names=NAMES, store=store),
        )
        claim, bodies = ClaimGate(claiming, now_ms=world.now_ms), Fetching(None, most_bytes=0)
        steps = handler(
            attempts(
                Registry(ProviderEdge(world, self.edge), tracing=TRACING),
                replies=replies,
                lifecycle=lifecycle,
                now_ms=world.now_ms,
            ),
            gates=(
                Gate(partial(refuse_if_late, breakers=Breakers(), now_ms=world.now_ms)),
                Gate(partial(defer_until_due, claiming=claiming, bodies=bodies, now_ms=world.now_ms)),
                Gate(claim.enter, claim.leave),
            ),
            provider=ProviderEdge.name,
            replies=replies,
            parsing=Parsing(clock=lambda: 0.0),
        )
        strays = Strays((SPEC,), names=NAMES, now_ms=world.now_ms)
        sides = SideQueues(SPEC, publisher=publisher, names=NAMES, now_ms=world.now_ms)
        self.lane_slots = LaneSlots(has_aside=sides.has)
        intake, due = self.lane_slots.queue(SPEC.slots), self.lane_slots.queue(SPEC.due_slots)
        intake.set_surplus_aside(True)
        at_intake, at_due, at_sides = (
            QueueAdmitter(intake, sides, names=NAMES),
            QueueAdmitter(due, sides, names=NAMES),
            SideQueueAdmitter(intake, sides),
        )
        work = partial(self._pool, job_of=self._job_of, handle=steps.handle)
        self._pools = (
            work(world.broker.intake.name, SPEC.slots, admitter=at_intake),
            work(world.broker.due.name, SPEC.due_slots, admitter=at_due),
            work(world.broker.intake.name, SCOUT_PREFETCH, admitter=at_intake),
            *(work(queue.name, 1, admitter=at_sides) for queue in world.broker.sides),
            self._pool(world.broker.fallen.name, 1, job_of=strays.job_of, handle=strays.handle),
        )
        self._running = [self.loop.create_task(pool.run()) for pool in self._pools]
        self._running.append(self.loop.create_task(claiming.run()))

    @property
    def fell_over(self) -> bool:
        """Whether a task that should run for ever has ended by itself."""
        return not (self.is_stopping or self.is_over) and any(task.done() for task in self._running)

    def stop(self) -> None:
        """Stop as on SIGTERM."""
        self.is_stopping = True
        self.loop.create_task(self._stop())

    def learn_lost(self, channel: Channel) -> None:
        channel.is_known_lost = True
        self.sessions.pop(channel).wake()

    def kill(self) -> None:
        """End the process; nothing that it does from now on has an effect."""
        self.edge.is_cut = self.is_over = True
        for channel in self.sessions:
            channel.is_known_lost = True
        self.loop.discard()

    async def _stop(self) -> None:
        for pool in self._pools:
            await pool.stop()
        for pool in self._pools:
            pool.give_back_waiting()
        *pools, claims = self._running
        _, late = await asyncio.wait(pools, timeout=GRACE_S)
        for task in (*late, claims):
            task.cancel()
        await asyncio.wait(self._running)
        self.is_over = True

    def _pool(
        self,
        queue: str,
        slots: int,
        *,
        job_of: Callable[[Delivery], Job],
        handle: Any,
        admitter: QueueAdmitter | None = None,
    ) -> Pool:
        return Pool(
            DeliveriesEdge(self._world, self, queue, slots),
            admitter=admitter,
            job_of=lambda delivery: _noted(job_of, delivery),
            handle=handle,
            settler=self._settler,
            activity=LaneActivity(LANE, slots=slots, due_slots=0),
            tracing=TRACING,
        )

    def _job_of(self, delivery: Delivery) -> Job:
        source = source_of(delivery.message, NAMES)
        return Job(delivery, lane=SPEC, source=source, taken_ms=self._world.now_ms())


def _noted(job_of: Callable[[Delivery], Job], delivery: Delivery) -> Job:
    DELIVERY.set(delivery)
    return job_of(delivery)
