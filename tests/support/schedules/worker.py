"""A worker process: the real pools, handler, gates, claiming and settler, on its own event loop and simulated edges."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from consumers.bodies import Fetching, LargeAnswers
from consumers.claiming import Claiming
from consumers.decoding import Parsing
from consumers.fallen import Fallen
from consumers.gates import ClaimGate, Gate, defer_until_due, refuse_if_late
from consumers.job import Job, source_of
from consumers.lifecycle import Lifecycle
from consumers.pool import Pool
from consumers.providers.breakers import Breakers
from consumers.providers.registry import Registry
from consumers.rate_limit import Parking
from consumers.replies import Replies, ReplyRetries, ReplyRule, ReplySender
from consumers.settle import Failpoints, Settler
from consumers.slots.activity import LaneActivity
from consumers.slots.admission import Admitter, QueueAdmitter, SideQueueAdmitter, SideQueues
from consumers.slots.lane_slots import LaneSlots
from lanekeeper.telemetry.tracing import Tracing
from tests.support.jobs import attempts, handler
from tests.support.schedules.broker import LANE, NAMES, SIDE_QUEUES, Channel
from tests.support.schedules.edges import DeliveriesEdge, ProviderEdge, PublisherEdge, SessionEdge, StoreEdge, World
from tests.support.schedules.loop import SteppedLoop
from tests.support.schedules.operation import DELIVERY, Edge
from topology.broker.consume import Delivery, Heads
from topology.broker.notices import Notices
from topology.lanes import CRITICAL

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
        claiming = Claiming(StoreEdge(world, self.edge))
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
        fallen = Fallen((SPEC,), names=NAMES, now_ms=world.now_ms)
        heads = Heads(queue.name for queue in world.broker.sides)
        sides = SideQueues(SPEC, heads, publisher=publisher, names=NAMES, now_ms=world.now_ms)
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
            work(f"{world.broker.intake.name}.side", SIDE_QUEUES, admitter=at_sides, heads=heads),
            self._pool(world.broker.fallen.name, 1, job_of=fallen.job_of, handle=fallen.handle),
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
        admitter: Admitter | None = None,
        heads: Heads | None = None,
    ) -> Pool:
        return Pool(
            DeliveriesEdge(self._world, self, queue, slots, heads),
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
