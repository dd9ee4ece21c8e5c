"""Runs a worker: its pools, its answers to `status`, a log line a minute for each lane, and its orderly stop."""

import asyncio
import os
import platform
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from consumers.capacity.activity import quantile
from consumers.job import now_ms
from consumers.storekeeping import probing, sweeping
from lanekeeper.amqp.depth import depths
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import STATUS_KEY
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import logs, signals
from service.side_tasks import beside, end
from service.worker.worker import Worker
from topology.broker.inbox import Inbox

SUMMARY_EVERY_S = 60
LOOK_EVERY_S = 0.02
BIND_EVERY_S = 30
log = logs.logger()


async def run(
    worker: Worker, *, stop: asyncio.Event, grace_s: float, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Work until `stop` is set. Then take nothing more, return requests whose call has not begun, let running calls
    finish within `grace_s`, and return the rest. `on_ready` is called once, when every queue is consumed."""
    async with asyncio.TaskGroup() as group:
        pools = [group.create_task(pool.run(), name=f"pool {pool.queue}") for pool in worker.pools]
        side = [
            group.create_task(_answer_status(worker), name="status"),
            group.create_task(_summarise(worker), name="summary"),
            group.create_task(worker.claiming.run(), name="claims"),
            group.create_task(probing(worker.store), name="probing"),
            group.create_task(sweeping(worker.store, owner=uuid.uuid4().hex), name="sweeping"),
            group.create_task(worker.dead_letters.run(owner=uuid.uuid4().hex), name="dead letters"),
        ]
        pools.append(group.create_task(worker.control.run(), name="control"))
        pools.append(group.create_task(worker.slots.run(), name="slots"))
        pools.append(group.create_task(worker.scouting.run(), name="scouting"))
        side.append(
            group.create_task(worker.pausing.run((*worker.pools, worker.slots, worker.scouting)), name="pausing")
        )
        side.append(group.create_task(worker.watch.run(), name="topology watch"))
        announcing = group.create_task(_announce(worker, on_ready), name="announce")
        stopping = group.create_task(stop.wait(), name="stop")
        ended, _ = await asyncio.wait((stopping, *pools, *side), return_when=asyncio.FIRST_COMPLETED)
        if stopping not in ended:  # a lane without consumers must not look like an idle lane
            raise RuntimeError(f"{', '.join(task.get_name() for task in ended)} ended by itself")
        running = sum(activity.running for activity in worker.activities)
        log.info(signals.SERVICE_STOPPING, running=running, grace_s=grace_s)
        stops = [
            group.create_task(_stop(worker), name="stop taking"),
            group.create_task(worker.control.stop(), name="stop control"),
        ]
        _, late = await asyncio.wait((*stops, *pools), timeout=grace_s)
        orphaned = sum(activity.running for activity in worker.activities) if late else 0
        await end((*late, *side, announcing))
        log.info(signals.SERVICE_STOPPED, orphaned=orphaned)


async def _stop(worker: Worker) -> None:
    """Stop all consumers first: else requests that are returned would come back to this worker."""
    await asyncio.gather(*(pool.stop() for pool in worker.pools), worker.slots.stop(), worker.scouting.stop())
    for pool in worker.pools:
        pool.give_back_waiting()
    worker.slots.give_back_waiting()
    worker.scouting.give_back_waiting()


async def _announce(worker: Worker, on_ready: Callable[[], None]) -> None:
    """Call `on_ready` and log each lane as soon as every queue is consumed."""
    while any(pool.trouble for pool in worker.pools):  # noqa: ASYNC110  five or seven queues, once, with no event behind
        await asyncio.sleep(LOOK_EVERY_S)
    for activity in worker.activities:
        snapshot = activity.snapshot()
        log.info(signals.LANE_STARTED, lane=activity.lane, slots=snapshot["slots"], due_slots=snapshot["due_slots"])
    on_ready()


async def _answer_status(worker: Worker) -> None:
    """Answer status questions from a queue of this worker's own. If it is lost, another one is declared."""
    me = f"{platform.node()}:{os.getpid()}"
    while True:
        with suppress(BrokerError):
            async with (
                Inbox(worker.consuming, bindings=((worker.names.control, STATUS_KEY),)) as inbox,
                beside(_bind_again(inbox), name="status binding"),
            ):
                async for question in inbox:
                    if question.type == STATUS_KEY:  # other types are answered from the control queue
                        await _tell(worker, question, me)
        await asyncio.sleep(1)  # the connection itself comes back with its own backoff


async def _bind_again(inbox: Inbox) -> None:
    while True:
        await asyncio.sleep(BIND_EVERY_S)
        with suppress(BrokerError):  # if the channel is lost, the reader below is told
            await inbox.bind()


async def _tell(worker: Worker, question: Message, me: str) -> None:
    figures = {
        "worker": me,
        "lanes": {activity.lane: dict(activity.snapshot()) for activity in worker.activities},
        "waiting": {
            account: {lane: asdict(waiting) for lane, waiting in lanes.items()}
            for account, lanes in worker.budgets.waiting().items()
        },
        "paused_until_ms": {
            account: now_ms() + round(1000 * left_s) for account, left_s in worker.budgets.paused().items()
        },
        "breakers": dict(worker.breakers.states(asyncio.get_running_loop().time())),
        "spent": {
            kind: {name: spent._asdict() for name, spent in each.items()}
            for kind, each in worker.spending.totals().items()
        },
        "prices_as_of": worker.prices_as_of,
        "simulated": worker.simulated,
        "tenants": {lane: turns.snapshot() for lane, turns in worker.turns.items()},
        "undelivered": worker.retelling.given_up,
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
    await worker.answers.tell(question, figures, id=None, as_="accepted")


async def _summarise(worker: Worker) -> None:
    """Log a line for each lane once a minute."""
    while True:
        await asyncio.sleep(SUMMARY_EVERY_S)
        await summarise_once(worker)


async def summarise_once(worker: Worker) -> None:
    """Log what `status` shows: depth, consumers, running, waits and throughput of each lane."""
    queues = {activity.lane: _queues(worker, activity.lane) for activity in worker.activities}
    try:
        found = await depths(worker.consuming, [queue for pair in queues.values() for queue in pair])
    except BrokerError as error:
        log.warning(signals.BROKER_UNREACHABLE, connection="consume", reason=str(error))
        return
    for activity in worker.activities:
        figures = activity.snapshot()
        intake, *others = (found[queue] for queue in queues[activity.lane])
        waits = sorted(figures["waits_ms"])
        log.info(
            signals.LANE_SUMMARY,
            lane=activity.lane,
            depth=intake.ready + sum(each.ready for each in others) + worker.turns[activity.lane].in_hand,
            consumers=intake.consumers,
            running=figures["running"],
            wait_p50_ms=quantile(waits, 0.5),
            wait_p95_ms=quantile(waits, 0.95),
            per_min=figures["throughput_per_min"],
        )


def _queues(worker: Worker, lane: str) -> tuple[str, ...]:
    """The lane's queues, the intake first."""
    sides = (
        worker.names.side(lane, each) for spec in worker.lanes if spec.name == lane for each in range(spec.side_queues)
    )
    return worker.names.intake(lane), worker.names.due(lane), *sides
