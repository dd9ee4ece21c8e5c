"""The composition root: every part of a worker is made here, handed what it uses, and ended in reverse order."""

import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog
from opentelemetry.trace import TracerProvider

from consumers.activity import LaneActivity
from consumers.claiming import Claiming
from consumers.control import Control
from consumers.failpoints import Failpoints
from consumers.fallen import Fallen
from consumers.gates.claim import ClaimGate
from consumers.gates.deadline import DeadlineGate
from consumers.gates.schedule import ScheduleGate
from consumers.handler import Handler
from consumers.job import Job, is_trusted, now_ms
from consumers.lifecycle import Lifecycle
from consumers.pausing import Pausing
from consumers.pool import Pool
from consumers.providers.anthropic import AnthropicProvider
from consumers.providers.registry import Registry
from consumers.reply import Replies
from consumers.settle import Settler
from consumers.state.base import Store
from consumers.state.opening import open_store
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
from topology.contract.problems import AccessRefused, BrokerBlocked, ConfirmUnknown, SettingsError, TopologyMismatch
from topology.declaration import declare
from topology.lanes import LaneSpec
from topology.model import Topology
from topology.names import Names
from topology.tracing import Tracing

FALLEN_SLOTS = 8
CONTROL_PREFETCH = 8
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
        provider = _provider(settings, tracing)
        stack.push_async_callback(provider.aclose)
        replies = Replies(publisher, names=names, direct=direct, allow=settings.reply_patterns())
        lifecycle = Lifecycle(notices, names=names, now_ms=now_ms)
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
            gates=(DeadlineGate(now_ms=now_ms), ScheduleGate(now_ms=now_ms), ClaimGate(claiming)),
            providers=Registry(provider, tracing=tracing),
            replies=replies,
            lifecycle=lifecycle,
            pausing=pausing,
            policy=settings.retry_policy(),
            names=names,
            now_ms=now_ms,
            rng=random.Random(),
            failpoints=failpoints,
        )
        counted = {queue.name for queue in topology.queues if queue.arguments.get("x-queue-type") == "quorum"}
        activities = []
        pools = []
        for lane in worked:
            activity = LaneActivity(lane.name, slots=lane.slots, due_slots=lane.due_slots)
            activities.append(activity)
            for queue, slots in ((names.intake(lane.name), lane.slots), (names.due(lane.name), lane.due_slots)):
                pools.append(
                    Pool(
                        Deliveries(
                            consuming, queue=queue, prefetch=slots, counted=queue in counted, on_missing=watch.look
                        ),
                        job_of=_job_maker(lane, names, settings.speakers),
                        handle=handler.handle,
                        settler=settler,
                        activity=activity,
                        tracing=tracing,
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
            ready=_ready(consuming, names.control),
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


def _provider(settings: Settings, tracing: Tracing) -> AnthropicProvider:
    key = settings.api_key
    if key is None:
        raise SettingsError(
            "ANTHROPIC_API_KEY is not set: set it, or answer without a provider: lanekeeper serve --simulate"
        )
    return AnthropicProvider(api_key=key, base_url=settings.provider_url, traceparent=tracing.traceparent)


def _ready(connection: Connection, queue: str) -> Callable[[], Awaitable[int]]:
    async def ready() -> int:
        return (await depths(connection, [queue]))[queue].ready

    return ready


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
