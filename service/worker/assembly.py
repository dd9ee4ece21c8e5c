"""The composition root: every part of a worker is made here, handed what it uses, and ended in reverse order."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from opentelemetry.trace import TracerProvider

from consumers.attempt import Attempts
from consumers.capacity.activity import LaneActivity
from consumers.capacity.pausing import Pausing
from consumers.capacity.slots import Depths, Slots
from consumers.claiming import Claiming
from consumers.control.answer import Answers
from consumers.control.queue import Control
from consumers.dead_letters import DeadLetters
from consumers.failpoints import Failpoints
from consumers.fairness.scouting import Scouting
from consumers.fairness.turns import Shares, Turns
from consumers.gates.claim import ClaimGate
from consumers.gates.deadline import DeadlineGate
from consumers.gates.schedule import ScheduleGate
from consumers.handler import Handler
from consumers.job import now_ms
from consumers.lifecycle import Lifecycle
from consumers.limits.base import Budgets
from consumers.parking import Parking
from consumers.pool import Pool
from consumers.providers.breaker import Breakers
from consumers.reading import Reading
from consumers.replies.direct import DirectSender
from consumers.replies.reply import Replies
from consumers.replies.retelling import Retelling
from consumers.settle import Settler
from consumers.spending import Spending
from consumers.state.base import Store
from consumers.state.opening import open_store
from lanekeeper.amqp.connection import Connection
from lanekeeper.amqp.depth import depths
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import AccessRefused, BrokerBlocked, BrokerUnreachable, TopologyMismatch
from lanekeeper.telemetry.tracing import Tracing
from service.config.settings import Settings
from service.worker.budgeting import open_budgeting
from service.worker.open_providers import open_providers
from service.worker.pool_factory import Pools
from topology.broker.admin.apply import apply
from topology.broker.admin.deadletters import Oldest
from topology.broker.admin.management import Management, discover
from topology.broker.admin.rights import WritingRights
from topology.broker.admin.verify import verify
from topology.broker.admin.watch import FindManagement, TopologyWatch
from topology.broker.deliveries import Deliveries
from topology.broker.heads import Heads
from topology.broker.notices import Notices
from topology.declaration import RECOMMENDED, declare, is_before
from topology.lanes import LaneSpec
from topology.model import Topology

CONTROL_PREFETCH = 512
"""Recorded at once: the store writes them with one fsync. And far enough ahead of what is refused: an
acknowledgement makes room only after an fsync of the broker's."""
FINISH_WITHIN_S = 2.0
"""How long an answer that the provider has given may take into the store, when all else has ended."""


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
    answers: Answers
    parking: Parking
    dead_letters: DeadLetters
    retelling: Retelling
    pausing: Pausing
    watch: TopologyWatch
    pools: tuple[Pool, ...]
    slots: Slots
    scouting: Scouting
    turns: Mapping[str, Turns]
    """By lane."""
    budgets: Budgets
    breakers: Breakers
    spending: Spending
    prices_as_of: str
    simulated: bool
    """Answers come from a simulated provider: nothing is spent."""
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
    settings: Settings,
    *,
    lanes: Sequence[str] = (),
    declares: bool,
    traces: TracerProvider | None = None,
    simulated: bool = False,
) -> AsyncIterator[Parts]:
    """Connect and make every part. `lanes`: the lanes to work, all where empty. `declares`: apply the topology first;
    else it must be there. `traces`: where spans go; None: nowhere, and traces pass through.

    Raises BrokerUnreachable, AccessRefused, TopologyMismatch, SettingsError.
    """
    names = settings.names()
    every = settings.lane_specs()
    worked = tuple(lane for lane in every if not lanes or lane.name in lanes)
    async with AsyncExitStack() as stack:
        tracing = Tracing(traces, broker=lambda: publishing.endpoint)
        # First, because what is missing for them no broker can mend.
        reading = Reading()
        providers = open_providers(settings, traceparent=tracing.traceparent, reading=reading)
        for each in providers:
            stack.push_async_callback(each.aclose)
        publishing = await stack.enter_async_context(_connection(settings, "publish"))
        consuming = await stack.enter_async_context(_connection(settings, "consume"))
        topology = declare(every, names=names, broker_version=publishing.version)
        await _apply_or_check(topology, publishing, declares=declares)
        watch = TopologyWatch(topology, consuming, declares=declares, find_management=_management_finder(settings))
        publisher = Publisher(publishing, tracing=tracing, on_missing=watch.look)
        rights = await stack.enter_async_context(_rights(publishing, names))
        notices = await stack.enter_async_context(Notices(publishing))
        own = None
        if is_before(publishing.version, RECOMMENDED):
            own = Publisher(await stack.enter_async_context(_connection(settings, "direct replies")), tracing=tracing)
        direct = DirectSender(publisher, own=own)
        rule = settings.reply_rule()
        store = await stack.enter_async_context(
            open_store(settings.store, namespace=names.namespace, spec=settings.store_spec())
        )
        claiming = Claiming(store)
        stack.push_async_callback(claiming.finish, within_s=FINISH_WITHIN_S)
        failpoints = Failpoints(settings.failpoints)
        pausing = Pausing(
            {
                "publish connection": lambda: publishing.trouble or publishing.blocked,
                "permissions": lambda: rights.trouble,
                "store": lambda: store.trouble,
                "topology": lambda: watch.hindrance,
                "control queue": lambda: control.behind,
            }
        )
        rng = random.Random()
        replies = Replies(publisher, direct=direct, rule=rule)
        lifecycle = Lifecycle(notices, names=names, now_ms=now_ms)
        budgeting = await stack.enter_async_context(
            open_budgeting(settings, providers, store=store, lifecycle=lifecycle, tracing=tracing, rng=rng)
        )
        stack.push_async_callback(budgeting.spending.finish, within_s=FINISH_WITHIN_S)
        retelling = Retelling(claiming, waiting=settings.reply_to.waiting)
        parking = Parking(invalid_per_hour=settings.dead.invalid_per_hour)
        settler = Settler(
            publisher,
            replies=replies,
            retelling=retelling,
            claiming=claiming,
            lifecycle=lifecycle,
            names=names,
            tracing=tracing,
            now_ms=now_ms,
            failpoints=failpoints,
            parking=parking,
            answer_bytes=settings.results.answer_bytes,
        )
        handler = Handler(
            gates=(
                DeadlineGate(now_ms=now_ms),
                ScheduleGate(claiming, now_ms=now_ms),
                ClaimGate(claiming, now_ms=now_ms),
                budgeting.route_gate,
                budgeting.caps_gate,
                budgeting.budget_gate,
            ),
            attempts=Attempts(
                budgeting.registry,
                breakers=budgeting.breakers,
                route_gate=budgeting.route_gate,
                budget_gate=budgeting.budget_gate,
                replies=replies,
                lifecycle=lifecycle,
                pausing=pausing,
                policy=settings.retry_policy(),
                now_ms=now_ms,
                rng=rng,
            ),
            routes=budgeting.routes,
            replies=replies,
            names=names,
            failpoints=failpoints,
            reading=reading,
            values=settings.json_values,
            needs_user_id=settings.needs_user_id,
        )
        pools = Pools(
            deliveries=partial(Deliveries, consuming, on_missing=watch.look),
            counted={queue.name for queue in topology.queues if queue.arguments.get("x-queue-type") == "quorum"},
            names=names,
            speakers=settings.speakers,
            settler=settler,
            retelling=retelling,
            tracing=tracing,
            publisher=publisher,
            shares=Shares(settings.fair.tenants),
        )
        for lane in worked:
            pools.add_lane(lane, handler)
        pools.add_fallen(every)
        answers = Answers(publisher, direct=direct, rule=rule, notices=notices)
        control = Control(
            Deliveries(consuming, queue=names.control, prefetch=CONTROL_PREFETCH, on_missing=watch.look),
            claiming=claiming,
            settler=settler,
            answers=answers,
            now_ms=now_ms,
            ready=_ready_in(names.control, _ready(consuming)),
            kept_s=settings.store_spec().cancelled_s,
            per_tenant_s=settings.control.per_tenant_s,
            speakers=settings.speakers,
            needs_user_id=settings.needs_user_id,
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
            answers=answers,
            parking=parking,
            dead_letters=DeadLetters(
                partial(Oldest, consuming, names.dead),
                store=store,
                spec=settings.dead.spec(),
                lifecycle=lifecycle,
                now_ms=now_ms,
            ),
            retelling=retelling,
            pausing=pausing,
            watch=watch,
            pools=tuple(pools.made),
            slots=Slots(
                pools.lines,
                depths=_ready_or_aside(consuming, pools.heads),
                now_ms=now_ms,
                waiting_for=budgeting.waiting_for,
            ),
            scouting=Scouting(pools.scouted, depths=_ready(consuming)),
            turns=pools.turns,
            budgets=budgeting.budgets,
            breakers=budgeting.breakers,
            spending=budgeting.spending,
            prices_as_of=budgeting.prices_as_of,
            simulated=simulated,
            activities=tuple(pools.activities),
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


def _ready(connection: Connection) -> Depths:
    async def ready(queues: list[str]) -> Mapping[str, int]:
        return {queue: depth.ready for queue, depth in (await depths(connection, queues)).items()}

    return ready


def _ready_or_aside(connection: Connection, heads: Mapping[str, Heads]) -> Depths:
    """What waits in a queue, and of an intake what was set aside."""
    ready = _ready(connection)

    async def both(queues: list[str]) -> Mapping[str, int]:
        return {
            queue: count + (heads[queue].ready if queue in heads else 0)
            for queue, count in (await ready(queues)).items()
        }

    return both


def _ready_in(queue: str, ready: Depths) -> Callable[[], Awaitable[int]]:
    async def ready_in() -> int:
        return (await ready([queue]))[queue]

    return ready_in


@asynccontextmanager
async def _rights(connection: Connection, names: Names) -> AsyncIterator[WritingRights]:
    """A worker that may answer nobody would take requests and put them back until they are buried as poison."""
    rights = WritingRights(connection, (("", f"{names.reply_prefix}nobody"), (names.events, "nobody")))
    try:
        await rights.look()
    except (BrokerBlocked, BrokerUnreachable):
        pass  # an alarm: nothing is taken until it is over, and this is known
    except AccessRefused as error:
        raise AccessRefused(
            f"a worker must be allowed to write: {error}; "
            "give its user the rights that `lanekeeper topology export --user NAME:worker` shows"
        ) from error
    looking = asyncio.create_task(rights.run(), name="rights")
    try:
        yield rights
    finally:
        looking.cancel()
        await asyncio.wait([looking])


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
