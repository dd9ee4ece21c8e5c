"""The composition root: every part of a worker is made here, handed what it uses, and ended in reverse order."""

import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from opentelemetry.trace import TracerProvider

from consumers.activity import LaneActivity
from consumers.claiming import Claiming
from consumers.control import Control
from consumers.failpoints import Failpoints
from consumers.fallen import Fallen
from consumers.gates.budget import BudgetGate
from consumers.gates.caps import CapsGate
from consumers.gates.claim import ClaimGate
from consumers.gates.deadline import DeadlineGate
from consumers.gates.route import RouteGate
from consumers.gates.schedule import ScheduleGate
from consumers.handler import Handler
from consumers.job import Job, is_trusted, now_ms
from consumers.lifecycle import Lifecycle
from consumers.limits.base import Budgets
from consumers.limits.estimates import Estimates
from consumers.limits.local import LocalBudgets
from consumers.pausing import Pausing
from consumers.pool import Pool
from consumers.providers.breaker import Breakers
from consumers.providers.registry import Registry
from consumers.providers.routes import Routes
from consumers.reply import Replies
from consumers.settle import Settler
from consumers.slots import Depths, Line, Slots
from consumers.spending import Spending
from consumers.state.base import Store
from consumers.state.opening import open_store
from consumers.state.redis_budgets import RedisBudgets
from consumers.state.redis_client import RedisClient
from service.providers import open_providers
from service.settings import Settings
from topology.broker.apply import apply
from topology.broker.connection import Connection
from topology.broker.deliveries import Deliveries
from topology.broker.depth import depths
from topology.broker.management import Management, discover
from topology.broker.notices import Notices
from topology.broker.publisher import Publisher
from topology.broker.session import Delivery
from topology.broker.verify import verify
from topology.broker.watch import FindManagement, TopologyWatch
from topology.contract.messages import Message
from topology.contract.problems import AccessRefused, BrokerBlocked, ConfirmUnknown, TopologyMismatch
from topology.declaration import declare
from topology.lanes import LaneSpec
from topology.model import Topology
from topology.names import Names
from topology.tracing import Tracing

FALLEN_SLOTS = 8
CONTROL_PREFETCH = 8
HELD_FROM_S = 0.5
FINISH_WITHIN_S = 2.0
"""How long an answer that the provider has given may take into the store, when all else has ended."""
DIRECT_REPLY_MENDED = (4, 3, 5)
"""From here on a forged direct reply-to address harms nobody (reliability.md, section 0, item 10)."""
log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Parts:
    """A worker, made and connected; `worker.run` sets it going."""

    names: Names
    lanes: tuple[LaneSpec, ...]
    topology: Topology
    consuming: Connection
    publishing: Connection
    publisher: Publisher
    store: Store
    claiming: Claiming
    control: Control
    pausing: Pausing
    watch: TopologyWatch
    pools: tuple[Pool, ...]
    slots: Slots
    budgets: Budgets
    breakers: Breakers
    spending: Spending
    prices_as_of: str
    activities: tuple[LaneActivity, ...]

    @property
    def version(self) -> str:
        """The broker's."""
        return self.publishing.version

    def reasons(self) -> Mapping[str, str | None]:
        """What must be well for the worker to take work: each part with what is wrong with it, or None."""
        return {
            "consume connection": self.consuming.trouble,
            "publish connection": self.publishing.trouble or self.publishing.blocked,
            "topology": self.watch.trouble,
            "store": self.store.trouble,
            "control queue": self.control.trouble,
            **{f"queue {pool.queue}": pool.trouble for pool in self.pools},
        }


@asynccontextmanager
async def assemble(
    settings: Settings, *, lanes: Sequence[str] = (), declares: bool, traces: TracerProvider | None = None
) -> AsyncIterator[Parts]:
    """Connect and make every part. `lanes`: the lanes to work, all where empty. `declares`: apply the topology first;
    else it must be there. `traces`: where spans go; None: nowhere, and traces pass through.

    Raises BrokerUnreachable, AccessRefused, TopologyMismatch, SettingsError.
    """
    names = settings.names()
    every = settings.lane_specs()
    worked = tuple(lane for lane in every if not lanes or lane.name in lanes)
    async with AsyncExitStack() as stack:
        publishing = await stack.enter_async_context(_connection(settings, "publish"))
        tracing = Tracing(traces, broker=lambda: publishing.endpoint)
        consuming = await stack.enter_async_context(_connection(settings, "consume"))
        topology = declare(every, names=names, broker_version=publishing.version)
        await _apply_or_check(topology, publishing, declares=declares)
        watch = TopologyWatch(topology, consuming, declares=declares, find_management=_management_finder(settings))
        publisher = Publisher(publishing, tracing=tracing, on_missing=watch.look)
        await _see_that_it_may_write(publisher, names)
        notices = await stack.enter_async_context(Notices(publishing))
        direct = None
        if _before(publishing.version, DIRECT_REPLY_MENDED):
            connection = await stack.enter_async_context(_connection(settings, "direct replies"))
            direct = Publisher(connection, tracing=tracing)
        store = await stack.enter_async_context(
            open_store(settings.store, namespace=names.namespace, spec=settings.store_spec())
        )
        claiming = Claiming(store)
        stack.push_async_callback(claiming.finish, within_s=FINISH_WITHIN_S)
        failpoints = Failpoints(settings.failpoints)
        pausing = Pausing(
            {
                "publish connection": lambda: publishing.trouble or publishing.blocked,
                "store": lambda: store.trouble,
                "topology": lambda: watch.hindrance,
                "control queue": lambda: control.behind,
            }
        )
        rng = random.Random()
        budgets = await _budgets(settings, stack)
        breakers, prices, caps = Breakers(store), settings.price_table(), settings.caps_spec()
        spending = Spending(store, caps)
        stack.push_async_callback(spending.finish, within_s=FINISH_WITHIN_S)
        registry = Registry(
            *open_providers(settings, traceparent=tracing.traceparent),
            tracing=tracing,
            breakers=breakers,
            prices=prices,
            learn=budgets.learn,
        )
        stack.push_async_callback(registry.aclose)
        route_gate = RouteGate(Routes(settings.routes_spec()), breakers, now_ms=now_ms, rng=rng)
        replies = Replies(publisher, names=names, direct=direct, allow=settings.reply_patterns())
        lifecycle = Lifecycle(notices, names=names, now_ms=now_ms)
        budget_gate = BudgetGate(
            budgets,
            route_gate,
            Estimates(
                first_output_tokens=settings.budget_spec().first_output_tokens,
                first_bytes_per_token=settings.budget_spec().first_bytes_per_token,
            ),
            spec=settings.budget_spec(),
            now_ms=now_ms,
            on_wait=lambda job, wait: lifecycle.tell(
                job, "deferred", delay_ms=round(1000 * wait.seconds), reason=wait.reason
            ),
        )
        settler = Settler(
            publisher,
            replies=replies,
            claiming=claiming,
            lifecycle=lifecycle,
            names=names,
            tracing=tracing,
            now_ms=now_ms,
            failpoints=failpoints,
        )
        handler = Handler(
            gates=(
                DeadlineGate(now_ms=now_ms),
                ScheduleGate(now_ms=now_ms),
                ClaimGate(claiming),
                route_gate,
                CapsGate(
                    spending,
                    route_gate,
                    prices=prices,
                    estimate=budget_gate.amounts,
                    now_ms=now_ms,
                    rng=rng,
                    tell=lifecycle.tell,
                ),
                budget_gate,
            ),
            providers=registry,
            elsewhere=route_gate,
            purse=budget_gate,
            replies=replies,
            lifecycle=lifecycle,
            pausing=pausing,
            policy=settings.retry_policy(),
            names=names,
            now_ms=now_ms,
            rng=rng,
            failpoints=failpoints,
        )
        counted = {queue.name for queue in topology.queues if queue.arguments.get("x-queue-type") == "quorum"}
        activities = []
        pools = []
        lines = []
        for lane in worked:
            activity = LaneActivity(lane.name, slots=lane.slots, due_slots=lane.due_slots)
            activities.append(activity)
            for queue, own, kept, most in (  # what comes back goes ahead of its peers; none of its slots is lent
                (names.due(lane.name), lane.due_slots, lane.due_slots, lane.most_due_slots),
                (names.intake(lane.name), lane.slots, lane.kept_slots, lane.most_slots),
            ):
                pool = partial(
                    _pool,
                    partial(Deliveries, consuming, queue=queue, counted=queue in counted, on_missing=watch.look),
                    job_of=_job_maker(lane, names, settings.speakers),
                    handle=handler.handle,
                    settler=settler,
                    activity=activity,
                    tracing=tracing,
                )
                pools.append(pool(own))
                lines.append(
                    Line(
                        lane=lane.name,
                        pool=pools[-1],
                        more=pool,
                        kept=kept,
                        most=most,
                        target_wait_s=lane.target_wait_s,
                        activity=activity,
                    )
                )
        fallen = Fallen(every, names=names, now_ms=now_ms, speakers=settings.speakers)
        pools.append(
            Pool(
                Deliveries(consuming, queue=names.fallen, prefetch=FALLEN_SLOTS, on_missing=watch.look),
                job_of=fallen.job_of,
                handle=fallen.handle,
                settler=settler,
                activity=LaneActivity("fallen", slots=FALLEN_SLOTS, due_slots=0),
                tracing=tracing,
            )
        )
        control = Control(
            Deliveries(consuming, queue=names.control, prefetch=CONTROL_PREFETCH, on_missing=watch.look),
            claiming=claiming,
            settler=settler,
            publisher=publisher,
            now_ms=now_ms,
            ready=_ready_in(names.control, _ready(consuming)),
            speakers=settings.speakers,
        )
        yield Parts(
            names=names,
            lanes=worked,
            topology=topology,
            consuming=consuming,
            publishing=publishing,
            publisher=publisher,
            store=store,
            claiming=claiming,
            control=control,
            pausing=pausing,
            watch=watch,
            pools=tuple(pools),
            slots=Slots(lines, depths=_ready(consuming), now_ms=now_ms, waiting_for=partial(_waiting_for, budgets)),
            budgets=budgets,
            breakers=breakers,
            spending=spending,
            prices_as_of=prices.as_of,
            activities=tuple(activities),
        )


def _connection(settings: Settings, purpose: str) -> Connection:
    return Connection(settings.broker_url, name=f"lanekeeper {purpose}", ssl_context=settings.ssl_context())


def _management_finder(settings: Settings) -> FindManagement:
    async def find(connection: Connection) -> Management | None:
        return await discover(
            settings.broker_url,
            settings.management,
            connection=await connection.underlying(),
            ssl_context=settings.tls.given_context(),
        )

    return find


async def _budgets(settings: Settings, stack: AsyncExitStack) -> Budgets:
    """One budget for all processes where they share a Redis, else this process's own."""
    spec, names = settings.budget_spec(), settings.names()
    if not settings.store.startswith(("redis://", "rediss://")):
        return LocalBudgets(spec)
    client = RedisClient(settings.store)
    stack.push_async_callback(client.aclose)
    shared = RedisBudgets(client, namespace=names.namespace, spec=spec)
    stack.push_async_callback(shared.aclose)
    return shared


def _waiting_for(budgets: Budgets) -> Mapping[str, str]:
    """What each lane waits for at its provider, where that is longer than a moment."""
    return {
        lane: waiting.reason
        for lanes in budgets.waiting().values()
        for lane, waiting in lanes.items()
        if waiting.oldest_s >= HELD_FROM_S
    }


def _pool(deliveries: Callable[..., Deliveries], slots: int, **of: Any) -> Pool:
    return Pool(deliveries(prefetch=slots), **of)


def _ready(connection: Connection) -> Depths:
    async def ready(queues: list[str]) -> Mapping[str, int]:
        return {queue: depth.ready for queue, depth in (await depths(connection, queues)).items()}

    return ready


def _ready_in(queue: str, ready: Depths) -> Callable[[], Awaitable[int]]:
    async def ready_in() -> int:
        return (await ready([queue]))[queue]

    return ready_in


def _job_maker(lane: LaneSpec, names: Names, speakers: Sequence[str]) -> Callable[[Delivery], Job]:
    return lambda delivery: Job(
        delivery,
        lane=lane,
        trusted=is_trusted(delivery.message, names),
        taken_ms=now_ms(),
        speakers=speakers,
    )


async def _see_that_it_may_write(publisher: Publisher, names: Names) -> None:
    """A worker that may answer nobody would take requests and put them back until they are buried as poison."""
    nothing = Message(body=b"", persistent=False)
    for exchange, routing_key in (("", f"{names.reply_prefix}nobody"), (names.events, "nobody")):
        try:
            await publisher.publish(nothing, exchange=exchange, routing_key=routing_key, mandatory=False, traced=False)
        except (BrokerBlocked, ConfirmUnknown):
            return  # an alarm: it is known when it is over, and nothing is taken until then
        except AccessRefused as error:
            raise AccessRefused(
                f"a worker must be allowed to write: {error}; "
                "give its user the rights that `lanekeeper topology export --user NAME:worker` shows"
            ) from error


async def _apply_or_check(topology: Topology, connection: Connection, *, declares: bool) -> None:
    """Declare the topology, or see that it is there."""
    if declares:
        await apply(topology, await connection.underlying())
        return
    differences = (await verify(topology, None, await connection.underlying())).differences
    if differences:
        raise TopologyMismatch(
            f"the broker's topology is not as declared ({len(differences)} differences): {differences[0].line}; "
            "run: lanekeeper topology apply"
        )


def _before(version: str, floor: tuple[int, ...]) -> bool:
    """Whether a broker's version, as it reports it ("4.3.6+deb"), is older than `floor`."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[: len(floor)]) < floor
