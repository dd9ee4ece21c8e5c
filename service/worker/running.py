"""Runs a worker: consumes its lanes, answers the command `lanekeeper status`, logs one line a minute for each lane, and
at the end stops the worker's parts in the right order."""

import asyncio
import os
import platform
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from consumers.capacity.activity import quantile
from consumers.capacity.pace import noting
from consumers.job import now_ms
from consumers.storekeeping import probing, sweeping
from lanekeeper.amqp.depth import depths
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import STATUS_KEY, Names
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import logs, signals
from service.side_tasks import beside, end
from service.worker.worker import Worker
from topology.broker.inbox import Inbox
from topology.lanes import LaneSpec

SUMMARY_EVERY_S = 60
"""The seconds between two log events that sum up the state of a lane (its depth, waits and throughput)."""
READY_CHECK_EVERY_S = 0.02
"""The seconds between two checks, at the start, whether a worker is ready."""
BIND_EVERY_S = 30
"""The seconds between two renewals of the binding of the queue in which a worker receives status questions."""
log = logs.logger()


async def run(
    worker: Worker, *, stop: asyncio.Event, grace_s: float, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Run a worker until `stop` is set. Then stop consuming, return to the broker the requests for which no call to a
    provider has begun, let running calls finish within `grace_s` seconds, and return the requests whose calls have not
    finished by then. `on_ready` is called once, when every queue is consumed."""
    async with asyncio.TaskGroup() as group:
        consuming = {
            **{f"pool {pool.queue}": pool.run() for pool in worker.pools},
            "control": worker.control.run(),
            "slots": worker.scaling.run(),
            "scouting": worker.scouting.run(),
        }
        supporting = {
            "status": _answer_status(worker),
            "summary": _summarise(worker),
            "claims": worker.claiming.run(),
            "probing": probing(worker.store),
            "pace": noting(worker.store, worker.activities),
            "sweeping": sweeping(worker.store, worker.bodies, owner=uuid.uuid4().hex),
            "dead letters": worker.dead_letters.run(owner=uuid.uuid4().hex),
            "pausing": worker.pausing.run((*worker.pools, worker.scaling, worker.scouting)),
            "topology watch": worker.watch.run(),
        }
        pools = [group.create_task(work, name=name) for name, work in consuming.items()]
        background = [group.create_task(work, name=name) for name, work in supporting.items()]
        announcing = group.create_task(_announce(worker, on_ready), name="announce")
        stopping = group.create_task(stop.wait(), name="stop")
        ended, _ = await asyncio.wait((stopping, *pools, *background), return_when=asyncio.FIRST_COMPLETED)
        if stopping not in ended:  # the process must end: a lane that nobody consumes would look like an idle lane
            raise RuntimeError(f"{', '.join(task.get_name() for task in ended)} ended by itself")
        running = sum(activity.running for activity in worker.activities)
        log.info(signals.SERVICE_STOPPING, running=running, grace_s=grace_s)
        stops = [
            group.create_task(_stop(worker), name="stop taking"),
            group.create_task(worker.control.stop(), name="stop control"),
        ]
        _, late = await asyncio.wait((*stops, *pools), timeout=grace_s)
        orphaned = sum(activity.running for activity in worker.activities) if late else 0
        await end((*late, *background, announcing))
        log.info(signals.SERVICE_STOPPED, orphaned=orphaned)


async def _stop(worker: Worker) -> None:
    """First stop all consumers, and only then return to the broker the requests for which no call has begun; in another
    order, the broker would deliver the returned requests to this worker again."""
    await asyncio.gather(*(pool.stop() for pool in worker.pools), worker.scaling.stop(), worker.scouting.stop())
    for pool in worker.pools:
        pool.give_back_waiting()
    worker.scaling.give_back_waiting()
    worker.scouting.give_back_waiting()


async def _announce(worker: Worker, on_ready: Callable[[], None]) -> None:
    """Wait until every queue is consumed; then log each lane and call `on_ready`."""
    while any(pool.trouble for pool in worker.pools):  # noqa: ASYNC110  only at the start; pools have no event for it
        await asyncio.sleep(READY_CHECK_EVERY_S)
    for activity in worker.activities:
        snapshot = activity.snapshot()
        log.info(signals.LANE_STARTED, lane=activity.lane, slots=snapshot["slots"], due_slots=snapshot["due_slots"])
    on_ready()


async def _answer_status(worker: Worker) -> None:
    """Answer the status questions that arrive in this worker's own queue. If that queue is lost, declare a new one."""
    worker_name = f"{platform.node()}:{os.getpid()}"
    while True:
        with suppress(BrokerError):
            async with (
                Inbox(worker.consuming, bindings=((worker.names.control, STATUS_KEY),)) as inbox,
                beside(_bind_again(inbox), name="status binding"),
            ):
                async for question in inbox:
                    if question.type == STATUS_KEY:  # other types are answered from the control queue
                        await _send_status(worker, question, worker_name)
        await asyncio.sleep(1)  # a lost connection opens again by itself, with its own back-off


async def _bind_again(inbox: Inbox) -> None:
    """Renew the binding of the worker's own queue for status questions from time to time, because the binding is lost
    if somebody deletes the exchange and declares it again."""
    while True:
        await asyncio.sleep(BIND_EVERY_S)
        with suppress(BrokerError):  # if the channel is lost, the loop that reads the inbox ends as well
            await inbox.bind()


async def _send_status(worker: Worker, question: Message, worker_name: str) -> None:
    """Answer a status question with the counts and states of this worker's lanes, budgets, circuit breakers and
    tenants."""
    budgeting = worker.budgeting
    figures = {
        "worker": worker_name,
        "lanes": {activity.lane: dict(activity.snapshot()) for activity in worker.activities},
        "waiting": {
            account: {lane: asdict(waiting) for lane, waiting in lanes.items()}
            for account, lanes in budgeting.budgets.waiting().items()
        },
        "paused_until_ms": {
            account: now_ms() + round(1000 * remaining_s) for account, remaining_s in budgeting.budgets.paused().items()
        },
        "breakers": dict(budgeting.breakers.states(asyncio.get_running_loop().time())),
        "spent": {
            kind: {name: spent._asdict() for name, spent in by_name.items()}
            for kind, by_name in budgeting.spending.totals().items()
        },
        "prices_as_of": budgeting.prices_as_of,
        "simulated": worker.simulated,
        "tenants": {lane: slots.snapshot() for lane, slots in worker.lane_slots.items()},
        "undelivered": worker.reply_retries.given_up,
        "dead_letters": {
            "exported": worker.dead_letters.exported,
            "dropped": worker.dead_letters.dropped,
            "unparked": worker.parking.unparked,
        },
        "control": {
            "refused": worker.answers.refused,
            "unanswered": worker.answers.unanswered,
            "displaced": worker.control.displaced,
        },
    }
    await worker.answers.tell(question, figures, control="accepted")


async def _summarise(worker: Worker) -> None:
    """Log a summary of each lane once a minute, until cancelled."""
    while True:
        await asyncio.sleep(SUMMARY_EVERY_S)
        await summarise_once(worker)


async def summarise_once(worker: Worker) -> None:
    """Log one line for each lane, with values that `lanekeeper status` shows too: depth, consumers, running requests,
    waits, throughput."""
    queues = {lane.name: _queues(worker.names, lane) for lane in worker.lanes}
    try:
        depth_of = await depths(worker.consuming, [queue for names in queues.values() for queue in names])
    except BrokerError as error:
        log.warning(signals.BROKER_UNREACHABLE, connection="consume", reason=str(error))
        return
    for activity in worker.activities:
        figures = activity.snapshot()
        intake, *others = (depth_of[queue] for queue in queues[activity.lane])
        waits = sorted(figures["waits_ms"])
        log.info(
            signals.LANE_SUMMARY,
            lane=activity.lane,
            depth=intake.ready + sum(queue.ready for queue in others) + worker.lane_slots[activity.lane].in_hand,
            consumers=intake.consumers,
            running=figures["running"],
            wait_p50_ms=quantile(waits, 0.5),
            wait_p95_ms=quantile(waits, 0.95),
            per_min=figures["throughput_per_min"],
        )


def _queues(names: Names, lane: LaneSpec) -> tuple[str, ...]:
    """The names of a lane's queues: intake, due queue, side queues."""
    sides = (names.side(lane.name, number) for number in range(lane.side_queues))
    return names.intake(lane.name), names.due(lane.name), *sides
