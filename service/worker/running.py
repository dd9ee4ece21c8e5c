"""Runs a worker: consumes its lanes, answers the command `lanekeeper status`, logs one line a minute for each lane, and
at the end stops the worker's parts in the right order."""

import asyncio
import gc
import os
import platform
import random
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from consumers.background import Background, background_task, end
from consumers.clock import now_ms
from consumers.control import MESSAGE_BYTES, object_in
from consumers.housekeeping import probing, sweeping
from consumers.slots.activity import WINDOWS, note_ends
from consumers.spending import CapsSpec, Spending
from consumers.state.base import StoreUnavailable
from consumers.state.rows import HISTORY_MINUTES
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import ASKED_OF_ALL, PROBE_KEY, STATUS_KEY
from lanekeeper.contract.problems import BrokerError, RequestProblem, SettingsError, invalid_request
from lanekeeper.telemetry import signals
from service.status import quantiles
from service.worker.assembly import Worker
from service.worker.figures import MinuteNotes, status
from service.worker.memory import memory_kills
from topology.broker.consume import Inbox

SUMMARY_EVERY_S = 60
READY_CHECK_EVERY_S = 0.02
BIND_EVERY_S = 30
CAPS_EVERY_S = 2.0
NOTED_WITHIN_S = 10.0
PROBED_WITHIN_S = 45.0
"""Two calls, each of at most ten seconds, and two more if a probe runs already."""
log = structlog.get_logger()


async def run(
    worker: Worker, *, stop: asyncio.Event, grace_s: float, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Run until `stop` is set. Then take no more, return what has not begun, let calls finish within `grace_s`, and
    return the rest. If a lane has lost slots, `stop` is set here, and RuntimeError raised at the end."""
    if kills := memory_kills():
        log.warning(signals.MEMORY_KILLED, kills=kills)
    beside_lanes = (worker.posting, worker.gatherer, worker.collector)
    async with asyncio.TaskGroup() as group:
        consuming = {
            **{f"pool {pool.queue}": pool.run() for pool in worker.pools},
            "control": worker.control.run(),
            "webhooks": worker.posting.run(),
            "batches": worker.gatherer.run(),
            "tickets": worker.collector.run(),
        }
        supporting = {
            "questions": _answer_questions(worker),
            "summary": _summarise(worker),
            "history": _note_history(worker),
            "lengths": worker.lengths.run(),
            "claims": worker.settler.claiming.run(),
            "brake": worker.brake.run(),
            "probing": probing(worker.store),
            "pace": note_ends(worker.store, worker.activities),
            "sweeping": sweeping(worker.store, worker.settler.bodies.own, owner=uuid.uuid4().hex),
            "group ends": worker.group_ends.run(owner=uuid.uuid4().hex),
            "dead letters": worker.dead_letters.run(owner=uuid.uuid4().hex),
            "pausing": worker.pausing.run((*worker.pools, *(each.deliveries for each in beside_lanes))),
            "slots": worker.scaling.run(),
            "late while paused": worker.pausing.end_late(worker.pools),
            "topology watch": worker.broker.watch.run(),
        }
        if worker.schedules.specs:
            supporting["schedules"] = worker.schedules.run(owner=uuid.uuid4().hex)
        pools = [group.create_task(work, name=name) for name, work in consuming.items()]
        background = [group.create_task(work, name=name) for name, work in supporting.items()]
        announcing = group.create_task(_announce(worker, on_ready), name="announce")
        stopping = group.create_task(stop.wait(), name="stop")
        watching = group.create_task(worker.watchdog.run(), name="watchdog")
        ended, _ = await asyncio.wait((stopping, watching, *pools, *background), return_when=asyncio.FIRST_COMPLETED)
        if watching in ended:
            stop.set()
        elif stopping not in ended:  # the process must end: a lane that nobody consumes would look like an idle lane
            raise RuntimeError(f"{', '.join(task.get_name() for task in ended)} ended by itself")
        running = sum(activity.running for activity in worker.activities)
        log.info(signals.SERVICE_STOPPING, running=running, grace_s=grace_s)
        stops = [
            group.create_task(_stop(worker), name="stop taking"),
            group.create_task(worker.control.stop(), name="stop control"),
            *(group.create_task(each.deliveries.stop(), name="stop beside lanes") for each in beside_lanes),
        ]
        _, late = await asyncio.wait((*stops, *pools), timeout=grace_s)
        orphaned = sum(activity.running for activity in worker.activities) if late else 0
        await end((*late, *background, announcing, watching))
        log.info(signals.SERVICE_STOPPED, orphaned=orphaned)
        if watching in ended:
            raise RuntimeError(worker.watchdog.trouble)


async def _stop(worker: Worker) -> None:
    await asyncio.gather(*(pool.stop() for pool in worker.pools))
    for pool in worker.pools:
        pool.give_back_waiting()


async def _announce(worker: Worker, on_ready: Callable[[], None]) -> None:
    while any(pool.trouble for pool in worker.pools):  # noqa: ASYNC110  only at the start; pools have no event for it
        await asyncio.sleep(READY_CHECK_EVERY_S)
    for activity in worker.activities:
        snapshot = activity.snapshot()
        log.info(signals.LANE_STARTED, lane=activity.lane, slots=snapshot["slots"], due_slots=snapshot["due_slots"])
    on_ready()


async def _answer_questions(worker: Worker) -> None:
    """Answer what is asked of all workers; other messages are answered from the control queue."""
    name, probing = worker_name(), Background()
    bindings = tuple((worker.broker.names.control, key) for key in ASKED_OF_ALL)
    try:
        while True:
            with suppress(BrokerError):
                async with (
                    Inbox(worker.broker.consuming, bindings=bindings, most_bytes=MESSAGE_BYTES) as inbox,
                    background_task(_bind_again(inbox), name="status binding"),
                ):
                    async for question in inbox:
                        if question.type == STATUS_KEY:
                            await worker.control.answers.send(question, status(worker, name), control="accepted")
                        elif question.type == PROBE_KEY:
                            await _probe(worker, question, name, probing)
            await asyncio.sleep(1)  # a lost connection opens again by itself, with its own back-off
    finally:
        await probing.finish(within_s=0)


async def _probe(worker: Worker, question: Message, own_name: str, probing: Background) -> None:
    """Answer at once how the provider stands here and, if it is paused, again when the probe has ended."""
    answers, pauses = worker.control.answers, worker.budgeting.breakers.pauses
    try:
        worker.control.brake.require_operator(question)
        name = object_in(question).get(PROBE_KEY)
        if not isinstance(name, str):
            raise invalid_request(f'body: allowed is {{"{PROBE_KEY}": "<name of a provider>"}}')
    except RequestProblem as problem:
        await answers.refuse(question, problem)
        return

    async def tell(state: str, **more: str) -> None:
        told = {"worker": own_name, "provider": name, "state": state, **more}
        await answers.send(question, told, control="accepted")

    async def probe() -> None:
        async with asyncio.timeout(PROBED_WITHIN_S):
            is_well = await pauses.probe_now(name)
        if is_well is False and (pause := pauses.figures(0).get(name)) is not None:
            await tell("paused", reason=str(pause["reason"]), error=str(pause["error"]))
        else:
            await tell("resumed" if is_well else "called")

    if name not in worker.budgeting.registry.names:
        await tell("unknown")
    elif name not in pauses.reasons():
        await tell("called")
    else:
        log.info(signals.PROBE_ASKED, provider=name, user=question.user_id)
        await tell("probing")
        probing.detached(probe(), name=f"probe {name}")


async def _bind_again(inbox: Inbox) -> None:
    """A binding is lost if somebody deletes the exchange and declares it again."""
    while True:
        await asyncio.sleep(BIND_EVERY_S)
        with suppress(BrokerError):  # if the channel is lost, the loop that reads the inbox ends as well
            await inbox.bind()


async def _summarise(worker: Worker) -> None:
    while True:
        await asyncio.sleep(SUMMARY_EVERY_S)
        summarise_once(worker)


def summarise_once(worker: Worker) -> None:
    """Log one line for each lane."""
    for activity in worker.activities:
        figures, intake = activity.snapshot(), worker.lengths.intake(activity.lane)
        waiting, (waits, _) = worker.lengths.waiting(activity.lane), activity.recent.over(WINDOWS["5m"])
        wait_ms = quantiles(waits)
        log.info(
            signals.LANE_SUMMARY,
            lane=activity.lane,
            depth=None if waiting is None else waiting + worker.lane_slots[activity.lane].in_hand,
            consumers=None if intake is None else intake.consumers,
            running=figures["running"],
            wait_p50_ms=wait_ms["p50"],
            wait_p95_ms=wait_ms["p95"],
            per_min=figures["throughput_per_min"],
        )


async def _note_history(worker: Worker) -> None:
    """Note each minute in the store, in the first seconds of the next one; later if the store is away."""
    notes, unstored = MinuteNotes(worker, began_ms=now_ms()), deque[tuple[int, str]](maxlen=HISTORY_MINUTES)
    while True:
        # workers write at different moments, because they change the same rows
        await asyncio.sleep(60 - time.time() % 60 + random.uniform(0, NOTED_WITHIN_S))
        unstored.append((now_ms() // 60_000 - 1, notes.next()))
        with suppress(StoreUnavailable):
            while unstored:
                await worker.store.note_history(unstored[0][0], worker_name(), unstored[0][1])
                unstored.popleft()


def worker_name() -> str:
    """As status and history name this process."""
    return f"{platform.node()}:{os.getpid()}"


THRESHOLD: Final = 10_000
"""After how many new objects Python's garbage collector runs. Python's default is 700, and a few requests create as
many objects, so the collector would run very often."""


def tune() -> None:
    """Collect garbage less often, and not what exists now. Call it once, when all parts exist."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)


async def reread_caps(spending: Spending, new_caps: Callable[[], CapsSpec | None]) -> None:
    """Use the caps of the settings' file whenever that changes. `new_caps` returns them; None: nothing has changed."""
    while True:
        await asyncio.sleep(CAPS_EVERY_S)
        try:
            spec = await asyncio.to_thread(new_caps)
        except (SettingsError, OSError) as error:
            log.error(signals.CAPS_UNREAD, reason=str(error))
            continue
        if spec is not None and spec != spending.spec:
            spending.spec = spec
            log.info(signals.CAPS_READ)
