"""Creates every part of a worker process, connects the parts, and closes them in reverse order: `assemble`."""

import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import structlog
from opentelemetry.trace import TracerProvider

from consumers import gates
from consumers.attempt import Attempts
from consumers.background import background_task, restarted
from consumers.batches import ticket
from consumers.batches.collect import SLOTS as TICKETS
from consumers.batches.collect import Collector
from consumers.batches.gather import Gatherer, prefetch_of
from consumers.batches.groups import GroupCancelling, GroupEnds, GroupGate
from consumers.brake import Brake
from consumers.budget_gate import BudgetGate
from consumers.claiming import Claiming
from consumers.clock import now_ms
from consumers.control import MESSAGE_BYTES, BrakeCommands, Control, ControlAnswers
from consumers.decoding import Decoding, Parsing
from consumers.failures import ProviderError
from consumers.flows.handlers import Handlers
from consumers.flows.lines import HELD as POSTS
from consumers.flows.pipelines import Pipelines
from consumers.flows.posting import Posting
from consumers.flows.rendering import Rendering
from consumers.flows.schedules import Schedules
from consumers.flows.webhooks import Webhooks
from consumers.gates import Gate
from consumers.handler import Handler
from consumers.housekeeping import DeadLetterLimits
from consumers.job import Job, Route, source_of
from consumers.large_bodies import Fetching, LargeAnswers, WebBodies
from consumers.lifecycle import Lifecycle
from consumers.limits.base import BatchLimits, BudgetSpec
from consumers.limits.budgets import Budgets, own_budgets
from consumers.limits.estimates import Estimates
from consumers.pool import Pool
from consumers.providers import organization
from consumers.providers.anthropic import AnthropicProvider, Reading
from consumers.providers.breakers import Breakers, Pauses
from consumers.providers.cloud import KINDS
from consumers.providers.extras import ExtraMissing
from consumers.providers.openai import CallLimits
from consumers.providers.registry import Provider, Registry
from consumers.providers.routes import OTHER, Routes
from consumers.rate_limit import Parking
from consumers.replies import Replies, ReplyRetries, ReplySender
from consumers.settle import Failpoints, Settler
from consumers.slots.activity import LaneActivity
from consumers.slots.admission import LaneSlots, QueueAdmitter, QueueSlots, SideQueueAdmitter, SideQueues, TenantShare
from consumers.slots.pausing import Pausing, Watchdog
from consumers.slots.scaling import QueueLoad, ScaledQueue, Scaling
from consumers.spending import Spending, Spent
from consumers.state import open_store
from consumers.state.base import StoreUnavailable
from consumers.state.redis_url import is_redis
from consumers.state.store import Store
from consumers.strays import Strays
from lanekeeper.amqp.connection import Connection, depths
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import (
    AccessRefused,
    BrokerBlocked,
    BrokerUnreachable,
    SettingsError,
    TopologyMismatch,
)
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import Tracing
from service.config.names import variable
from service.config.settings import FIRST, OPENAI_KINDS, WEB, Settings
from service.connections import connection_for, management_of
from service.worker.lengths import QueueLengths, side_of
from topology.broker.admin import TopologyWatch, WritingRights, apply, verify
from topology.broker.consume import Deliveries, Delivery
from topology.broker.memory import HeldBytes
from topology.broker.notices import Notices
from topology.codec import decoding
from topology.declaration import RECOMMENDED, Topology, declare, is_before
from topology.lanes import LaneSpec

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerParts:
    """A worker's connections to the broker, what is declared there, and what publishes to it."""

    names: Names
    topology: Topology
    consuming: Connection
    publishing: Connection
    publisher: Publisher
    watch: TopologyWatch
    rights: WritingRights
    notices: Notices
    reply_sender: ReplySender
    held: HeldBytes

    def deliveries(
        self,
        queue: str,
        *,
        prefetch: int,
        holder: str | None = None,
        most_bytes: int | None = None,
        weight: Callable[[Message], int] = lambda message: len(message.body),
    ) -> Deliveries:
        # for the messages of quorum queues the broker counts the deliveries
        counted = any(each.name == queue and each.type == "quorum" for each in self.topology.queues)
        return Deliveries(
            self.consuming,
            queue=queue,
            prefetch=prefetch,
            counted=counted,
            on_missing=self.watch.check_soon,
            held=self.held,
            holder=holder,
            most_bytes=most_bytes,
            weight=weight,
        )

    async def ready(self, queues: list[str]) -> Mapping[str, int]:
        return {queue: depth.ready for queue, depth in (await depths(self.consuming, queues)).items()}


async def open_broker(
    settings: Settings,
    publishing: Connection,
    consuming: Connection,
    *,
    declares: bool,
    tracing: Tracing,
    stack: AsyncExitStack,
) -> BrokerParts:
    """Also declares or checks the topology. Raises BrokerUnreachable, AccessRefused, TopologyMismatch."""
    await stack.enter_async_context(publishing)
    await stack.enter_async_context(consuming)
    names = settings.names()
    topology = declare(settings.lane_specs(), names=names, broker_version=publishing.version)
    if declares:
        await apply(topology, await publishing.underlying())
    elif differences := (await verify(topology, None, await publishing.underlying())).differences:
        raise TopologyMismatch(
            f"the broker's topology is not as declared ({len(differences)} differences): {differences[0].line}; "
            "run: lanekeeper topology apply"
        )
    watch = TopologyWatch(topology, consuming, declares=declares, find_management=partial(management_of, settings))
    publisher = Publisher(publishing, tracing=tracing, on_missing=watch.check_soon)
    rights = await _checked_rights(
        publishing, names, [(names.requests, each.key) for each in settings.schedule_specs()]
    )
    await stack.enter_async_context(background_task(restarted(rights.run, name="rights"), name="rights"))
    notices = await stack.enter_async_context(Notices(publishing))
    direct = None
    # Older brokers close a connection that sends a direct reply to a forged address, so direct replies get a
    # connection of their own.
    if is_before(publishing.version, RECOMMENDED):
        direct = Publisher(await stack.enter_async_context(connection_for("direct replies", settings)), tracing=tracing)
    return BrokerParts(
        names=names,
        topology=topology,
        consuming=consuming,
        publishing=publishing,
        publisher=publisher,
        watch=watch,
        rights=rights,
        notices=notices,
        reply_sender=ReplySender(publisher, own=direct),
        held=HeldBytes(settings.held_bytes),
    )


async def _checked_rights(connection: Connection, names: Names, more: Sequence[tuple[str, str]]) -> WritingRights:
    """Without these rights a worker would take requests, and return them because no reply can be sent, until they
    are dead-lettered. Raises AccessRefused."""
    rights = WritingRights(
        connection, (("", f"{names.reply_prefix}nobody"), (names.events, "nobody"), (names.webhooks, "nobody"), *more)
    )
    try:
        await rights.check()
    except (BrokerBlocked, BrokerUnreachable):
        pass  # the broker has an alarm or is unreachable: the worker takes no requests until `rights.run` has checked
    except AccessRefused as error:
        raise AccessRefused(
            f"a worker must be allowed to write: {error}; "
            "give its user the rights that `lanekeeper topology export --user NAME:worker` shows"
        ) from error
    return rights


def open_providers(settings: Settings, *, parsing: Parsing) -> tuple[Provider, ...]:
    """The clients of all providers, in the order of calls. Raises SettingsError, which names all that is missing."""
    found: list[Provider] = []
    problems: list[str] = []
    for provider in settings.routes_spec().providers:
        try:
            found.append(open_provider(settings, provider.name, parsing=parsing))
        except SettingsError as wrong:
            problems.append(str(wrong))
    if problems:
        raise SettingsError("\n".join(problems))
    return tuple(found)


def open_provider(settings: Settings, name: str, *, parsing: Parsing | None = None) -> Provider:
    """Create the client of one configured provider. Raises SettingsError if a setting is missing."""
    common = Reading(
        parsing=parsing or Parsing(),
        max_answer_bytes=settings.answer_bytes,
        max_values=settings.json_values,
        header_rules=settings.header_rules(name),
    )
    if name == FIRST:
        if settings.api_key is None:
            raise SettingsError(
                "ANTHROPIC_API_KEY is not set: set it, or answer without a provider: lanekeeper serve --simulate"
            )
        return AnthropicProvider.at(settings.provider_url, api_key=settings.api_key, **common)
    section = settings.providers[name]
    for missing_setting in section.missing_for_calls():
        raise SettingsError(f"{key_setting(name)} is {missing_setting.text}")
    given = {
        "api_key": None if section.api_key is None else section.api_key.get_secret_value(),
        "base_url": None if section.base_url is None else section.base_url.get_secret_value(),
        "region": section.region,
        "project": section.project,
        "organization": section.organization,
        "api_version": section.api_version,
        "sends_priority": section.sends_priority or None,
    }
    options: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    if section.kind in OPENAI_KINDS:  # the callers' headers `anthropic-*` are not for it
        del common["header_rules"]
        options["embeddings"] = CallLimits(inputs=section.embeddings_inputs, tokens=section.embeddings_tokens)
    try:
        return KINDS[section.kind](name=name, **common, **options)
    except ExtraMissing as missing:
        raise SettingsError(f"providers.{name}: {missing}") from None


async def open_handlers(
    settings: Settings, lanes: Sequence[LaneSpec], *, tracing: Tracing, stack: AsyncExitStack
) -> Handlers:
    """Import the handlers; `stack` closes their processes. Raises SettingsError, which names all that cannot be."""
    slots = {lane.name: lane.slots_max or lane.slots for lane in lanes}
    handlers = Handlers(
        settings.handler_specs(),
        most_bytes=settings.answer_bytes,
        slots=slots,
        urgent_rank=urgent_rank(lanes),
        tracing=tracing,
    )
    stack.push_async_callback(handlers.aclose, within_s=FINISH_WITHIN_S)
    if problems := await handlers.load():
        raise SettingsError("\n".join(problems))
    for spec in settings.handler_specs():
        narrow = {lane: size for lane, size in slots.items() if size < spec.count}
        if spec.many and narrow:
            log.warning(signals.HANDLER_NARROW, handler=spec.name, count=spec.count, slots=narrow)
    return handlers


def urgent_rank(lanes: Sequence[LaneSpec]) -> int | None:
    """The rank of the most urgent of these lanes; None if there is no other."""
    return min(lane.rank for lane in lanes) if len(lanes) > 1 else None


def key_setting(name: str) -> str:
    """The name of the setting that holds a provider's key."""
    return variable(("anthropic_api_key",) if name == FIRST else ("providers", name, "api_key"))


HELD_FROM_S = 0.5
"""A lane counts as waiting for a provider's budget once one of its requests has waited for that budget for this many
seconds."""


@dataclass(frozen=True, slots=True)
class Budgeting:
    """What limits calls to providers."""

    budgets: Budgets
    breakers: Breakers
    spending: Spending
    registry: Registry
    caps_gate: gates.CapsGate
    budget_gate: BudgetGate

    async def count_late(self, lane: str, route: Route, line: bytes, dialect: str) -> None:
        """Count what an answer in a batch has cost for whose request nobody waits any more."""
        with suppress(ProviderError):
            answer = await self.registry.from_batch(route, line, dialect=dialect)
            tokens = answer.counted.input_tokens + answer.counted.output_tokens
            self.spending.count(lane, None, Spent(0, tokens, answer.cost_usd or 0.0))

    def waiting_for(self) -> Mapping[str, str]:
        return {
            lane: waiting.reason
            for lanes in self.budgets.waiting().values()
            for lane, waiting in lanes.items()
            if waiting.oldest_s >= HELD_FROM_S
        }


def open_budgeting(
    settings: Settings,
    providers: Sequence[Provider],
    *,
    store: Store,
    brake: Brake,
    lifecycle: Lifecycle,
    tracing: Tracing,
    stack: AsyncExitStack,
) -> Budgeting:
    """`stack` closes its parts."""
    spec, prices = settings.budget_spec(), settings.prices.table()
    budgets = _budgets(settings, spec, stack)
    registry = Registry(*providers, tracing=tracing, prices=prices, learn=budgets.learn)
    pauses = Pauses(registry.probe)
    stack.push_async_callback(pauses.aclose)
    breakers = Breakers(pauses=pauses, brake=brake, models=prices.models)
    spending = Spending(store, settings.caps.spec())
    stack.push_async_callback(spending.finish, within_s=FINISH_WITHIN_S)
    budget_gate = BudgetGate(
        budgets,
        breakers,
        Estimates(first_output_tokens=spec.first_output_tokens, first_bytes_per_token=spec.first_bytes_per_token),
        spec=spec,
        on_wait=lambda job, wait: lifecycle.publish(
            job,
            "deferred",
            delay_ms=round(1000 * wait.seconds),
            reason=wait.reason,
            **({} if wait.is_known else {"guessed": True}),
        ),
    )
    return Budgeting(
        budgets=budgets,
        breakers=breakers,
        spending=spending,
        registry=registry,
        caps_gate=gates.CapsGate(
            spending,
            breakers,
            prices=prices,
            estimate=budget_gate.amounts,
            publish=lifecycle.publish,
        ),
        budget_gate=budget_gate,
    )


async def read_all_limits(
    settings: Settings, providers: Sequence[Provider], budgets: Budgets
) -> Mapping[str, BatchLimits]:
    """Read the limits of the organizations whose Admin API has a key in the settings. Returns the limits of batches by
    provider."""
    keys, limits = settings.admin_keys(), dict(settings.batch_limits())
    routes = Routes(settings.routes_spec(), priced=settings.prices.table().models)
    for provider in providers:
        if (key := keys.get(provider.name)) is None or not isinstance(provider, AnthropicProvider):
            continue
        found = await organization.read_limits(provider.client, name=provider.name, admin_key=key)
        accounts = {routes.account(provider.name, model): rate for model, rate in found.models.items()}
        budgets.announce({account: rate for account, rate in accounts.items() if not account.endswith(f"/{OTHER}")})
        if found.batch_requests is not None:
            of = limits[provider.name]
            limits[provider.name] = replace(of, requests=min(of.requests, found.batch_requests))
    return limits


def _budgets(settings: Settings, spec: BudgetSpec, stack: AsyncExitStack) -> Budgets:
    if not is_redis(settings.store):
        return own_budgets(spec)

    # Imported here, because these modules take 4 MiB of memory, which a worker with a SQLite store can save.
    from consumers.state.redis.client import RedisClient
    from consumers.state.redis.shared_budget import shared_budgets

    client = RedisClient(settings.store, tls=settings.tls.for_redis())
    stack.push_async_callback(client.aclose)
    shared = shared_budgets(client, namespace=settings.namespace, spec=spec)
    stack.push_async_callback(shared.aclose)
    return shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """All parts of a worker process, created and connected to each other. `running.run` runs it."""

    lanes: tuple[LaneSpec, ...]
    broker: BrokerParts
    store: Store
    settler: Settler
    budgeting: Budgeting
    control: Control
    brake: Brake
    pausing: Pausing
    pools: Sequence[Pool]
    lane_slots: Mapping[str, LaneSlots]
    activities: Sequence[LaneActivity]
    scaling: Scaling
    watchdog: Watchdog
    lengths: QueueLengths
    dead_letters: DeadLetterLimits
    group_ends: GroupEnds
    posting: Posting
    gatherer: Gatherer
    collector: Collector
    schedules: Schedules
    simulated: bool

    @property
    def version(self) -> str:
        return self.broker.publishing.version

    def reasons(self) -> Mapping[str, str | None]:
        paused = self.paused_providers()
        return {
            "consume connection": self.broker.consuming.trouble,
            "publish connection": self.broker.publishing.trouble or self.broker.publishing.blocked,
            "topology": self.broker.watch.trouble,
            "store": self.store.trouble,
            "control queue": self.control.trouble,
            "lanes": self.watchdog.trouble,
            **(paused if len(paused) == len(self.budgeting.registry.names) else {}),
            **{f"queue {pool.queue}": pool.trouble for pool in self.pools},
        }

    def limitations(self) -> Mapping[str, str]:
        braked = (f"lane {lane.name}" for lane in self.lanes if self.brake.of("lane", lane.name))
        others = {
            "webhooks": self.posting.trouble,
            "batches": self.gatherer.deliveries.trouble or self.collector.trouble,
        }
        return {
            **self.paused_providers(),
            **dict.fromkeys(braked, "paused by an operator"),
            **{what: why for what, why in others.items() if why is not None},
        }

    def paused_providers(self) -> Mapping[str, str]:
        """The providers that are paused, each with the reason. While another one can be called, the worker is ready."""
        return {f"provider {name}": why for name, why in self.budgeting.breakers.pauses.reasons().items()}


STRAY_SLOTS = 8
"""How many messages of `lane.fallen` (those that the broker dead-lettered or could not route) are worked on at a
time."""


@dataclass(slots=True, kw_only=True)
class Pools:
    """The pools, each of which works on the requests of a queue, and what others must know of them."""

    broker: BrokerParts
    settler: Settler
    tracing: Tracing
    brake: Brake
    shares: Mapping[str, TenantShare]
    speakers: Sequence[str]
    made: list[Pool] = field(default_factory=list)
    lane_slots: dict[str, LaneSlots] = field(default_factory=dict)
    scaled: list[ScaledQueue] = field(default_factory=list)
    activities: list[LaneActivity] = field(default_factory=list)

    def add_lane(self, lane: LaneSpec, handler: Handler) -> None:
        names = self.broker.names
        activity = LaneActivity(lane.name, slots=lane.slots, due_slots=lane.due_slots)
        side_queues = None
        if lane.side_queues:
            side_queues = SideQueues(lane, publisher=self.broker.publisher, names=names, now_ms=now_ms)
        lane_slots = LaneSlots(self.shares, None if side_queues is None else side_queues.has)
        self.activities.append(activity)
        self.lane_slots[lane.name] = lane_slots

        def job_of(delivery: Delivery) -> Job:
            source = source_of(delivery.message, names)
            return Job(delivery, lane=lane, source=source, taken_ms=now_ms(), speakers=self.speakers)

        def pool(
            queue: str,
            admitter: QueueAdmitter,
            *,
            prefetch: int,
            most_bytes: int | None = None,
            counts_as: str | None = None,
        ) -> Pool:
            made = Pool(
                self.broker.deliveries(
                    queue, prefetch=prefetch, holder=lane.name, most_bytes=most_bytes, weight=decoding.weight
                ),
                job_of=job_of,
                handle=handler.handle,
                settler=self.settler,
                activity=activity,
                tracing=self.tracing,
                admitter=admitter,
                counts_as=counts_as,
                brake=lambda: self.brake.of("lane", lane.name),
            )
            self.made.append(made)
            return made

        def scaled(
            queue: str, own: QueueSlots, *, reserved: int, max_slots: int, sides: Sequence[Pool] = ()
        ) -> ScaledQueue:
            # what comes back may be larger: a worker has added the state of a pipeline, or the result of a batch
            most_bytes = decoding.PACKED_BYTES if queue == intake else None
            admitter = QueueAdmitter(own, side_queues, names=names)
            return ScaledQueue(
                lane=lane.name,
                pool=pool(queue, admitter, prefetch=own.size, most_bytes=most_bytes),
                sides=sides,
                can_scout=side_queues is not None,
                shared=own,
                load=QueueLoad(slots=own.size, reserved=reserved, max_slots=max_slots),
                target_wait_s=lane.target_wait_s,
                activity=activity,
            )

        intake, due = names.intake(lane.name), names.due(lane.name)
        slots, due_slots = lane_slots.queue(lane.slots), lane_slots.queue(lane.due_slots)
        sides = []
        if side_queues is not None:
            at_sides = SideQueueAdmitter(slots, side_queues)
            sides = [
                pool(queue, at_sides, prefetch=1, counts_as=side_of(intake))
                for queue in (names.side(lane.name, number) for number in range(lane.side_queues))
            ]
        self.scaled += (
            scaled(due, due_slots, reserved=lane.due_slots, max_slots=lane.most_due_slots),
            scaled(intake, slots, reserved=lane.reserved_slots, max_slots=lane.most_slots, sides=sides),
        )

    def add_strays(self, lanes: Sequence[LaneSpec]) -> None:
        names = self.broker.names
        strays = Strays(lanes, names=names, speakers=self.speakers)
        self.made.append(
            Pool(
                self.broker.deliveries(names.strays, prefetch=STRAY_SLOTS),
                job_of=strays.job_of,
                handle=strays.handle,
                settler=self.settler,
                activity=LaneActivity("fallen", slots=STRAY_SLOTS, due_slots=0),
                tracing=self.tracing,
            )
        )

    def lost_slots(self) -> Mapping[str, int]:
        return {each.lane: self.lane_slots[each.lane].running - each.running for each in self.activities}


CONTROL_PREFETCH = 512
"""The prefetch of the control queue. It is high, because the store records all delivered control messages together,
with one fsync. Refused control messages take up the prefetch too until the broker has processed their acknowledgements,
for each of which it needs an fsync."""
FINISH_WITHIN_S = 2.0
"""When the worker stops, writes to its stores that have begun may go on for this many seconds. Each kind of write
(results, caps, large bodies, large answers) has this time for itself."""


@asynccontextmanager
async def assemble(
    settings: Settings,
    *,
    lanes: Sequence[str] = (),
    declares: bool,
    traces: TracerProvider | None = None,
    simulated: bool = False,
) -> AsyncIterator[Worker]:
    """Connect, and create every part of a worker, each after those that it uses. `lanes`: empty for all. `declares`:
    the topology is declared, else it must exist. `traces`: None: no spans are written, and contexts are passed on.

    Raises BrokerUnreachable, AccessRefused, TopologyMismatch, SettingsError.
    """
    all_lanes = settings.lane_specs()
    worked_lanes = tuple(lane for lane in all_lanes if not lanes or lane.name in lanes)
    async with AsyncExitStack() as stack:
        publishing, consuming = connection_for("publish", settings), connection_for("consume", settings)
        tracing = Tracing(traces, broker=lambda: publishing.endpoint)
        parsing = Parsing()
        # Before the connections are opened, so that missing settings are reported even if the broker is unreachable.
        providers = open_providers(settings, parsing=parsing)
        for provider in providers:
            stack.push_async_callback(provider.aclose)
        handlers = await open_handlers(settings, worked_lanes, tracing=tracing, stack=stack)
        broker = await open_broker(settings, publishing, consuming, declares=declares, tracing=tracing, stack=stack)
        names = broker.names
        store = await stack.enter_async_context(
            open_store(settings.store, namespace=names.namespace, spec=settings.store_spec())
        )
        brake = Brake(store)
        with suppress(StoreUnavailable):  # then the worker takes no requests until `brake.run` has read it
            await brake.read()
        lifecycle = Lifecycle(broker.notices, names=names)
        settler = _settler(settings, broker, store, lifecycle=lifecycle, tracing=tracing, stack=stack)
        budgeting = open_budgeting(
            settings, providers, store=store, brake=brake, lifecycle=lifecycle, tracing=tracing, stack=stack
        )
        batch_limits = await read_all_limits(settings, providers, budgeting.budgets)
        control = _control(settings, broker, settler, store=store, brake=brake, providers=budgeting.registry.names)
        pausing = Pausing(
            {
                "publish connection": lambda: publishing.trouble or publishing.blocked,
                "permissions": lambda: broker.rights.trouble,
                "store": lambda: store.trouble,
                "topology": lambda: broker.watch.hindrance,
                "control queue": lambda: control.behind,
                "brake": lambda: brake.behind,
            }
        )
        rendering = Rendering(urgent_rank=urgent_rank(worked_lanes))
        stack.push_async_callback(rendering.aclose)
        pipelines = _pipelines(settings, settler, broker, rendering=rendering)
        handler = _handler(
            settings,
            settler,
            budgeting,
            store=store,
            brake=brake,
            pausing=pausing,
            parsing=parsing,
            handlers=handlers,
            pipelines=pipelines,
        )
        pools = Pools(
            broker=broker,
            settler=settler,
            tracing=tracing,
            brake=brake,
            shares=settings.fair.tenants,
            speakers=settings.speakers,
        )
        for lane in worked_lanes:
            pools.add_lane(lane, handler)
        pools.add_strays(all_lanes)
        yield Worker(
            lanes=worked_lanes,
            broker=broker,
            store=store,
            settler=settler,
            budgeting=budgeting,
            control=control,
            brake=brake,
            pausing=pausing,
            pools=pools.made,
            lane_slots=pools.lane_slots,
            activities=pools.activities,
            scaling=Scaling(pools.scaled, ready=broker.ready, waiting_for=budgeting.waiting_for),
            watchdog=Watchdog(pools.made, unfetched=broker.ready, lost_slots=pools.lost_slots),
            lengths=QueueLengths(
                broker.consuming,
                worked_lanes,
                names=names,
                others=[lane for lane in all_lanes if lane not in worked_lanes],
            ),
            dead_letters=DeadLetterLimits(
                broker.consuming,
                names.dead,
                store=store,
                spec=settings.dead.spec(),
                lifecycle=lifecycle,
            ),
            group_ends=GroupEnds(store=store, webhooks=settler.webhooks, lifecycle=lifecycle),
            posting=Posting(
                broker.deliveries(names.webhooks, prefetch=POSTS),
                spec=settler.webhooks.spec,
                settler=settler,
                store=store,
            ),
            gatherer=Gatherer(
                broker.deliveries(names.batches, prefetch=prefetch_of(lane.batches for lane in all_lanes)),
                specs={lane.name: lane.batches for lane in all_lanes},
                publisher=broker.publisher,
                settler=settler,
                store=store,
                pauses=brake,
            ),
            collector=Collector(
                broker.deliveries(names.tickets, prefetch=TICKETS, weight=ticket.ticket_bytes),
                specs={lane.name: lane.batches for lane in all_lanes},
                limits=batch_limits,
                batches=budgeting.registry.batches,
                count_late=budgeting.count_late,
                breakers=budgeting.breakers,
                publisher=broker.publisher,
                settler=settler,
                store=store,
            ),
            schedules=Schedules(
                settings.schedule_specs(),
                store=store,
                publisher=broker.publisher,
                exchange=names.requests,
                brake=brake,
                user=settings.credentials[0] if settings.needs_user_id else None,
            ),
            simulated=simulated,
        )


def _settler(
    settings: Settings,
    broker: BrokerParts,
    store: Store,
    *,
    lifecycle: Lifecycle,
    tracing: Tracing,
    stack: AsyncExitStack,
) -> Settler:
    claiming, own, spec = Claiming(store), settings.body_store(), settings.bodies
    web = WebBodies([url for url in spec.allow if url.startswith(WEB)], private=spec.allow_private)
    bodies = Fetching(own, others=[*spec.allowed_stores(), web], most_bytes=spec.most_bytes)
    large_answers = LargeAnswers(
        broker.publisher,
        answer_bytes=settings.answer_bytes,
        bodies=own,
        over_bytes=spec.answers_over_bytes,
        keep_s=settings.results.keep_s,
    )
    stack.push_async_callback(claiming.finish, within_s=FINISH_WITHIN_S)
    stack.push_async_callback(bodies.aclose, within_s=FINISH_WITHIN_S)
    stack.push_async_callback(large_answers.aclose, within_s=FINISH_WITHIN_S)
    return Settler(
        broker.publisher,
        replies=Replies(broker.reply_sender, rule=settings.reply_rule(), loses_large_parts=own is not None),
        reply_retries=ReplyRetries(),
        claiming=claiming,
        lifecycle=lifecycle,
        names=broker.names,
        tracing=tracing,
        failpoints=Failpoints(settings.failpoints),
        parking=Parking(invalid_per_hour=settings.dead.invalid_per_hour),
        large_answers=large_answers,
        bodies=bodies,
        webhooks=Webhooks(broker.publisher, spec=settings.webhooks.spec(), names=broker.names, store=store),
    )


def _control(
    settings: Settings,
    broker: BrokerParts,
    settler: Settler,
    *,
    store: Store,
    brake: Brake,
    providers: Collection[str],
) -> Control:
    return Control(
        broker.deliveries(broker.names.control, prefetch=CONTROL_PREFETCH, most_bytes=MESSAGE_BYTES),
        claiming=settler.claiming,
        settler=settler,
        answers=ControlAnswers(broker.reply_sender, rule=settings.reply_rule(), notices=broker.notices),
        ready=broker.ready,
        kept_s=settings.store_spec().cancelled_s,
        per_tenant_s=settings.control.per_tenant_s,
        brake=BrakeCommands(
            brake,
            store,
            operators=settings.operators,
            known={**settings.known_names(), "provider": providers},
        ),
        store=store,
        cancelling=GroupCancelling(store),
        speakers=settings.speakers,
        needs_user_id=settings.needs_user_id,
    )


def _pipelines(settings: Settings, settler: Settler, broker: BrokerParts, *, rendering: Rendering) -> Pipelines:
    return Pipelines(
        specs=settings.pipeline_specs(),
        lanes={lane.name: lane for lane in settings.lane_specs()},
        claiming=settler.claiming,
        publisher=broker.publisher,
        names=broker.names,
        rendering=rendering,
        chain_of=Routes(settings.routes_spec(), priced=settings.prices.table().models).of,
        reach_soon=settler.failpoints.reach_soon,
        needs_rights=settings.needs_user_id,
        trusted={*settings.speakers, settings.credentials[0]},
    )


def _handler(
    settings: Settings,
    settler: Settler,
    budgeting: Budgeting,
    *,
    store: Store,
    brake: Brake,
    pausing: Pausing,
    parsing: Parsing,
    handlers: Handlers,
    pipelines: Pipelines,
) -> Handler:
    claiming, lifecycle, breakers, rng = settler.claiming, settler.lifecycle, budgeting.breakers, random.Random()
    routes = Routes(settings.routes_spec(), priced=budgeting.registry.prices.models)
    decoding = Decoding(
        parsing,
        routes.of,
        forbidden_to=routes.forbidden_to,
        max_values=settings.json_values,
        handlers=settings.handlers.keys(),
        pipelines=settings.pipelines.keys(),
    )
    brake_gate = gates.BrakeGate(brake, claiming, publish=lifecycle.publish)
    group_gate = GroupGate(store, settings.store_spec())
    claim_gate, caps_gate = gates.ClaimGate(claiming), budgeting.caps_gate

    def has_batches(provider: str) -> bool:
        batches = budgeting.registry.batches(provider)
        return batches is not None and not batches.is_missing

    batch_gate = gates.BatchGate(breakers, estimate=budgeting.budget_gate.amounts, has_batches=has_batches)
    return Handler(
        gates=(
            Gate(pipelines.arrive),
            Gate(caps_gate.enter_first, caps_gate.leave_last, is_for_models=True),
            Gate(partial(gates.refuse_if_late, breakers=breakers, now_ms=now_ms)),
            Gate(partial(gates.defer_until_due, claiming=claiming, bodies=settler.bodies, now_ms=now_ms)),
            Gate(brake_gate.enter),
            Gate(group_gate.enter),
            Gate(claim_gate.enter, claim_gate.leave),
            Gate(partial(gates.fetch_body, fetching=settler.bodies, decoding=decoding, now_ms=now_ms)),
            Gate(pipelines.enter),
            Gate(partial(gates.bind_files, claiming=claiming), is_for_models=True),
            Gate(partial(gates.await_route, breakers=breakers, now_ms=now_ms, rng=rng), is_for_models=True),
            Gate(caps_gate.enter, caps_gate.leave, is_for_models=True),
            Gate(batch_gate.enter, is_for_models=True),
            Gate(budgeting.budget_gate.enter, budgeting.budget_gate.leave, is_for_models=True),
        ),
        attempts=Attempts(
            budgeting.registry,
            breakers=breakers,
            budget_gate=budgeting.budget_gate,
            handlers=handlers,
            replies=settler.replies,
            lifecycle=lifecycle,
            pausing=pausing,
            policy=settings.retry_policy(),
            call_begins=claiming.call_begins,
            hold_again=caps_gate.hold_again,
            keep_files=claiming.keep_files,
            fallback_on_refusal=settings.models.fallback_on_refusal,
        ),
        replies=settler.replies,
        webhooks=settler.webhooks,
        exchange=settler.names.requests,
        failpoints=settler.failpoints,
        decoding=decoding,
        pipelines=pipelines,
        needs_user_id=settings.needs_user_id,
    )
