"""Creates every part of a worker process, connects the parts to each other, and closes them in reverse order."""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from opentelemetry.trace import TracerProvider

from consumers.attempt import Attempts
from consumers.bodies.fetching import Fetching
from consumers.bodies.web import WebBodies
from consumers.capacity.pausing import Pausing
from consumers.capacity.scaling import Scaling
from consumers.claiming import Claiming
from consumers.control.answer import Answers
from consumers.control.queue import Control
from consumers.dead_letters import DeadLetters
from consumers.decoding import Decoding
from consumers.failpoints import Failpoints
from consumers.fairness.scouting import Scouting
from consumers.gates.body import BodyGate
from consumers.gates.claim import ClaimGate
from consumers.gates.deadline import DeadlineGate
from consumers.gates.schedule import ScheduleGate
from consumers.handler import Handler
from consumers.job import now_ms
from consumers.lifecycle import Lifecycle
from consumers.parking import Parking
from consumers.parsing import Parsing
from consumers.replies.reply import Replies
from consumers.replies.reply_retries import ReplyRetries
from consumers.replies.sendable import Sendable
from consumers.replies.sender import ReplySender
from consumers.settle import Settler
from consumers.state.opening import open_store
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.telemetry.tracing import Tracing
from service.config.bodies_section import WEB
from service.config.settings import Settings
from service.worker.broker import apply_or_check, connection_for, management_of, watched_rights
from service.worker.budgeting import open_budgeting
from service.worker.open_providers import open_providers
from service.worker.pool_factory import PoolFactory, ready_in
from service.worker.worker import Worker
from topology.broker.admin.deadletters import OldestMessages
from topology.broker.admin.watch import TopologyWatch
from topology.broker.deliveries import Deliveries
from topology.broker.notices import Notices
from topology.declaration import RECOMMENDED, declare, is_before

CONTROL_PREFETCH = 512
"""The prefetch of the control queue. It is high, because the store records all delivered control messages together,
with one fsync. Refused control messages take up the prefetch too until the broker has processed their acknowledgements,
for each of which it needs an fsync."""
FINISH_WITHIN_S = 2.0
"""When the worker stops, writes to its stores that have begun may go on for this many seconds. Each kind of write
(results, daily caps, large bodies, large answers) has this time for itself."""


@asynccontextmanager
async def assemble(
    settings: Settings,
    *,
    lanes: Sequence[str] = (),
    declares: bool,
    traces: TracerProvider | None = None,
    simulated: bool = False,
) -> AsyncIterator[Worker]:
    """Connect to the broker and create every part of a worker. `lanes`: the lanes that it consumes; empty: all.
    `declares`: whether the worker first declares the topology (queues, exchanges, bindings); if not, the topology must
    exist. `traces`: receives the trace spans; None: no spans are written, and the publisher's trace context is passed
    on unchanged.

    Raises BrokerUnreachable, AccessRefused, TopologyMismatch, SettingsError.
    """
    names = settings.names()
    all_lanes = settings.lane_specs()
    worked_lanes = tuple(lane for lane in all_lanes if not lanes or lane.name in lanes)
    async with AsyncExitStack() as stack:
        tracing = Tracing(traces, broker=lambda: publishing.endpoint)
        # Providers are created first, so that their missing settings are reported even if the broker is unreachable.
        parsing = Parsing()
        providers = open_providers(settings, traceparent=tracing.traceparent, parsing=parsing)
        for provider in providers:
            stack.push_async_callback(provider.aclose)
        publishing = await stack.enter_async_context(connection_for("publish", settings))
        consuming = await stack.enter_async_context(connection_for("consume", settings))
        topology = declare(all_lanes, names=names, broker_version=publishing.version)
        await apply_or_check(topology, publishing, declares=declares)
        watch = TopologyWatch(topology, consuming, declares=declares, find_management=partial(management_of, settings))
        publisher = Publisher(publishing, tracing=tracing, on_missing=watch.check_soon)
        rights = await stack.enter_async_context(watched_rights(publishing, names))
        notices = await stack.enter_async_context(Notices(publishing))
        direct_publisher = None
        # Older brokers close a connection that sends a direct reply to a forged address, so direct replies get a
        # connection of their own.
        if is_before(publishing.version, RECOMMENDED):
            direct_publisher = Publisher(
                await stack.enter_async_context(connection_for("direct replies", settings)), tracing=tracing
            )
        reply_sender = ReplySender(publisher, own=direct_publisher)
        reply_rule = settings.reply_rule()
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
        replies = Replies(reply_sender, rule=reply_rule, loses_large_parts=settings.bodies_url is not None)
        lifecycle = Lifecycle(notices, names=names, now_ms=now_ms)
        budgeting = open_budgeting(
            settings, providers, store=store, lifecycle=lifecycle, tracing=tracing, rng=rng, stack=stack
        )
        stack.push_async_callback(budgeting.spending.finish, within_s=FINISH_WITHIN_S)
        reply_retries = ReplyRetries(claiming, max_waiting=settings.reply_to.waiting)
        parking = Parking(invalid_per_hour=settings.dead.invalid_per_hour)
        decoding = Decoding(parsing, budgeting.routes, max_values=settings.json_values)
        body_store, spec = settings.body_store(), settings.bodies
        web = WebBodies([url for url in spec.allow if url.startswith(WEB)], private=spec.allow_private)
        bodies = Fetching(body_store, others=[*spec.allowed_stores(), web], most_bytes=spec.most_bytes)
        stack.push_async_callback(bodies.aclose, within_s=FINISH_WITHIN_S)
        sendable = Sendable(
            publisher,
            answer_bytes=settings.answer_bytes,
            bodies=body_store,
            over_bytes=spec.answers_over_bytes,
            keep_s=settings.results.keep_s,
        )
        stack.push_async_callback(sendable.aclose, within_s=FINISH_WITHIN_S)
        settler = Settler(
            publisher,
            replies=replies,
            reply_retries=reply_retries,
            claiming=claiming,
            lifecycle=lifecycle,
            names=names,
            tracing=tracing,
            now_ms=now_ms,
            failpoints=failpoints,
            parking=parking,
            sendable=sendable,
            bodies=bodies,
        )
        handler = Handler(
            gates=(
                DeadlineGate(now_ms=now_ms),
                ScheduleGate(claiming, now_ms=now_ms),
                ClaimGate(claiming, now_ms=now_ms),
                BodyGate(bodies, decoding, now_ms=now_ms),
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
            replies=replies,
            names=names,
            failpoints=failpoints,
            decoding=decoding,
            needs_user_id=settings.needs_user_id,
        )
        pools = PoolFactory(
            deliveries=partial(Deliveries, consuming, on_missing=watch.check_soon),
            counted={queue.name for queue in topology.queues if queue.type == "quorum"},
            names=names,
            speakers=settings.speakers,
            settler=settler,
            reply_retries=reply_retries,
            tracing=tracing,
            publisher=publisher,
            shares=settings.fair.tenants,
        )
        for lane in worked_lanes:
            pools.add_lane(lane, handler)
        pools.add_fallen(all_lanes)
        answers = Answers(reply_sender, rule=reply_rule, notices=notices)
        control = Control(
            Deliveries(consuming, queue=names.control, prefetch=CONTROL_PREFETCH, on_missing=watch.check_soon),
            claiming=claiming,
            settler=settler,
            answers=answers,
            now_ms=now_ms,
            ready=partial(ready_in, consuming, [names.control]),
            kept_s=settings.store_spec().cancelled_s,
            per_tenant_s=settings.control.per_tenant_s,
            speakers=settings.speakers,
            needs_user_id=settings.needs_user_id,
        )
        yield Worker(
            names=names,
            lanes=worked_lanes,
            topology=topology,
            consuming=consuming,
            publishing=publishing,
            store=store,
            bodies=body_store,
            claiming=claiming,
            control=control,
            answers=answers,
            parking=parking,
            dead_letters=DeadLetters(
                partial(OldestMessages, consuming, names.dead),
                store=store,
                spec=settings.dead.spec(),
                lifecycle=lifecycle,
                now_ms=now_ms,
            ),
            reply_retries=reply_retries,
            pausing=pausing,
            watch=watch,
            pools=tuple(pools.made),
            scaling=Scaling(
                pools.scaled,
                depths=partial(pools.ready_with_sides, consuming),
                now_ms=now_ms,
                waiting_for=budgeting.waiting_for,
            ),
            scouting=Scouting(pools.scouted, depths=partial(ready_in, consuming)),
            lane_slots=pools.lane_slots,
            budgeting=budgeting,
            simulated=simulated,
            activities=tuple(pools.activities),
        )
