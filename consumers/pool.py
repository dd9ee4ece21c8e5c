"""A pool works on the deliveries of one queue, as many at a time as it has slots.

The prefetch of the consumer equals the number of slots, so that no delivery waits in a worker: a delivery that waited
there would run before later messages of higher priority, which the broker still holds (docs/facts.md, section 2).
Deliveries wait in the worker where several tenants use a lane whose slots are all taken, and for a moment after the
number of slots was changed (`consumers/slots/scaling.py`). `consumers/slots/admission.py` decides whose delivery gets
the next slot.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

import structlog

from consumers.job import Job, Source
from consumers.lifecycle import record
from consumers.log_subject import about
from consumers.outcomes import Outcome, end_with
from consumers.settle import Settler
from consumers.slots.activity import LaneActivity
from consumers.slots.admission import Admission, AtOnce, LaneSlots, PausedAdmitter, QueueAdmitter
from consumers.state.base import Pause, StoreUnavailable
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import Tracing
from topology.broker.consume import ChannelLost, Deliveries, Delivery, Session

TAKEN_AT_ONCE = 16
FRONT = 200
"""Of the queue of a paused lane so many requests that are not late yet are looked at, so that few lose their priority:
RabbitMQ delivers what is returned before all others."""
FRONT_BYTES = 16 * 1024 * 1024
LOOK_FOR_S = 5.0
NEXT_LOOK_S = 10.0
ENDED_AT_ONCE = 32
log = structlog.get_logger()


class Pool:
    """Consumes one queue: runs `handle` for each delivery that has a slot, and settles it by the outcome that `handle`
    returns."""

    def __init__(
        self,
        deliveries: Deliveries,
        *,
        job_of: Callable[[Delivery], Job],
        handle: Callable[[Job], Awaitable[Outcome]],
        settler: Settler,
        activity: LaneActivity,
        tracing: Tracing,
        admitter: QueueAdmitter | None = None,
        counts_as: str | None = None,
        brake: Callable[[], Pause | None] = lambda: None,
    ) -> None:
        """`admitter`: decides which delivery gets one of the slots that several pools share; None: this pool shares no
        slots, and has as many as its prefetch. `counts_as`: the queue under which `activity` counts its deliveries;
        None: its own. `brake`: the pause of its lane by an operator."""
        self._deliveries = deliveries
        self._job_of = job_of
        self._handle = handle
        self._settler = settler
        self._activity = activity
        self._tracing = tracing
        self._admitter = admitter or QueueAdmitter(LaneSlots().queue(deliveries.prefetch))
        self._paused = PausedAdmitter()
        self._at_once = AtOnce()
        self._looking = asyncio.Lock()
        self._look_s = 0.0
        self._brake = brake
        self.queue = deliveries.queue
        self._counts_as = counts_as or self.queue
        self.in_hand = 0
        self.taken = 0
        self.jobs: set[Job] = set()
        self._undecided: dict[Job, asyncio.Task[Any]] = {}
        self._stopping = False
        self._gives_back = False

    @property
    def trouble(self) -> str | None:
        if self._stopping:
            return "stopping"
        return None if self.brake is not None else self._deliveries.trouble  # a pool that an operator pauses is well

    @property
    def brake(self) -> str | None:
        return None if (pause := self._brake()) is None else pause.description

    @property
    def has_room(self) -> bool:
        return self.in_hand < self._deliveries.prefetch and not self._deliveries.is_short_of_room

    async def consume_again(self) -> None:
        await self._deliveries.consume_again(keeps_channel=self.in_hand > 0)

    @property
    def prefetch(self) -> int:
        return self._deliveries.prefetch

    @property
    def running(self) -> int:
        return len(self.jobs)

    @property
    def is_taking(self) -> bool:
        return not (self._stopping or self._deliveries.is_paused)

    async def resize(self, prefetch: int) -> None:
        """Let the broker send so many deliveries that are not settled, if it is not enough for what waits there. While
        this pool holds more, nothing is consumed: call it again. So it never holds more than twice as many."""
        deliveries = self._deliveries
        if prefetch < deliveries.prefetch or self.in_hand >= deliveries.prefetch:
            await deliveries.resize(prefetch)
        if deliveries.is_resizing and self.in_hand <= prefetch:
            await deliveries.resized()

    async def run(self) -> None:
        if (reason := self.brake) is not None:
            await self.pause(reason)  # before anything is consumed
        async with aclosing(self._deliveries.sessions()) as sessions:
            async for session in sessions:
                await self._work_session(session)

    async def stop(self) -> None:
        self._stopping = True
        await self._deliveries.stop()

    def give_back_waiting(self) -> None:
        """After `stop` or `pause`: return to the broker each delivery whose call to a provider has not begun, and each
        one that arrives later."""
        self._gives_back = True
        for job, task in self._undecided.items():
            if job.attempted is None:
                task.cancel()

    @property
    def is_paused(self) -> bool:
        return self._deliveries.is_paused and (self._gives_back or self.brake is None)

    async def pause(self, reason: str) -> None:
        await self._deliveries.pause(reason)
        if self.brake is not None:
            self.give_back_waiting()

    async def resume(self) -> None:
        """Take deliveries again, unless this pool holds more deliveries than its prefetch, or looks for late requests:
        later requests would overtake these.

        After several pauses the pool can hold more, because each pause cancels the consumer, and the broker does not
        count deliveries of a cancelled consumer against the prefetch of the next one.
        """
        self._gives_back = self._gives_back and self._stopping
        if self.in_hand <= self._deliveries.prefetch and not self._looking.locked():
            async with self._looking:
                await self._deliveries.resume()

    async def _work_session(self, session: Session) -> None:
        """Work on the deliveries of one channel. If the channel is lost, the work on its deliveries is cancelled."""
        try:
            async with asyncio.TaskGroup() as running:
                async for delivery in session:
                    running.create_task(self._take(delivery), name=f"{self.queue} {delivery.tag}")
                    if delivery.tag % TAKEN_AT_ONCE == 0:
                        await asyncio.sleep(0)
        except* ChannelLost as lost:
            log.warning(signals.DELIVERY_LOST, queue=self.queue, error=str(lost.exceptions[0]))

    async def _take(self, delivery: Delivery) -> None:
        self.in_hand += 1
        self.taken += 1
        self._activity.taken[self._counts_as] += 1
        try:
            if self._gives_back:
                await self._settler.nack(delivery)
                return
            try:
                job = self._job_of(delivery)
            except Exception:
                where = {"request": delivery.message.message_id, "lane": self._activity.lane, "where": "read"}
                log.exception(signals.HANDLER_FAILED, **where)
                await self._settler.reject_later(delivery)
                return
            # what was cut will be refused, and would only wait for a slot
            await self._take_job(job, self._at_once if delivery.cut_bytes else self._admitter)
        except Exception:  # as in `supervised`: nothing in one delivery ends the loop
            log.exception(signals.HANDLER_FAILED, where=self.queue)
            await self._settler.reject_later(delivery)
        finally:
            self.in_hand -= 1

    async def end_late(self) -> None:
        """While an operator pauses the lane: end the requests at the front of its queue whose deadline has passed, and
        return the others in their order."""
        try:
            if time.monotonic() >= self._look_s:
                await self._end_late()
        except* BrokerError:
            pass  # the channel was lost, and with it what was taken: the next look opens another

    async def _end_late(self) -> None:
        until_s, free_bytes, kept = time.monotonic() + LOOK_FOR_S, FRONT_BYTES, list[Delivery]()
        free, now_ms, next_ms = asyncio.Semaphore(ENDED_AT_ONCE), 0, 2**63
        async with asyncio.TaskGroup() as ending, self._looking:
            try:
                async with aclosing(self._deliveries.front()) as front:
                    async for delivery in front:
                        kept.append(delivery)
                        now_ms, job = time.time_ns() // 1_000_000, None
                        with suppress(Exception):  # what cannot be read is reported when the lane is resumed
                            job = self._job_of(delivery)
                        if job is None:
                            pass
                        elif not self._paused.takes(job):
                            next_ms = min(next_ms, job.deadline_ms or next_ms)
                        else:
                            await free.acquire()
                            kept.pop()
                            name = f"{self.queue} {delivery.tag}"
                            task = ending.create_task(self._take_job(job, self._paused), name=name)
                            task.add_done_callback(lambda _: free.release())
                        free_bytes -= len(delivery.message.body)
                        # A look that ends before the last that was returned before puts what it took behind that.
                        if len(kept) == FRONT or free_bytes < 0 or time.monotonic() > until_s or self._stopping:
                            break
            finally:
                for delivery in kept:
                    await self._settler.nack(delivery)
        if len(kept) == FRONT and now_ms < next_ms:  # until then none of these is late, and none comes before them
            self._look_s = time.monotonic() + min(NEXT_LOOK_S, (next_ms - now_ms) / 1000)

    async def _take_job(self, job: Job, admitter: QueueAdmitter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._undecided[job] = task
        try:
            with about(job):
                await self._admit(job, admitter)
        finally:
            self._undecided.pop(job, None)

    async def _admit(self, job: Job, admitter: QueueAdmitter) -> None:
        admission: Admission | None = None
        try:
            admission = await admitter.admit(job)
            if admission is Admission.BEGIN:
                await self._work(job)
                return
            del self._undecided[job]
            if admission is Admission.BACK:
                await self._settler.nack(job.delivery)
            elif (outcome := await admitter.set_aside(job)) is None:
                await self._settler.ack(job.delivery)
            else:
                await self._settle(job, outcome)
        except asyncio.CancelledError:  # its channel is lost, or it goes back: also if the pause has ended meanwhile
            await self._settler.nack(job.delivery)
            raise
        except (BrokerError, StoreUnavailable) as error:
            self._undecided.pop(job, None)
            where = "store" if isinstance(error, StoreUnavailable) else "publish"
            log.error(signals.HANDLER_FAILED, where=where, error=str(error))
            await self._settler.nack_later(job.delivery)
        except Exception:  # one request that cannot even be moved or dead-lettered must not stop the whole lane
            self._undecided.pop(job, None)
            log.exception(signals.HANDLER_FAILED, where="settle" if admission is Admission.BEGIN else "set aside")
            await self._settler.reject_later(job.delivery)
        finally:
            if admission is Admission.BEGIN:
                admitter.leave(job)

    async def _work(self, job: Job) -> None:
        delivery = job.delivery
        self._activity.running += 1
        self.jobs.add(job)
        taken_ns = time.time_ns()
        if job.source is not Source.DELAY:
            self._activity.delivered_ms[self._counts_as] = job.published.ms
        try:
            with self._tracing.process(
                delivery.message, queue=self.queue, delivery_tag=delivery.tag, start_ns=taken_ns
            ) as span:
                job.span = span
                outcome = await self._outcome(job)
                del self._undecided[job]
                settled = await self._settle(job, outcome)
                if span.is_recording():
                    record(self._tracing, job, settled or outcome, taken_ns=taken_ns)
        finally:
            self._activity.end(self._counts_as, took_s=max(0, time.time_ns() - taken_ns) / 1e9)
            self.jobs.discard(job)

    async def _settle(self, job: Job, outcome: Outcome) -> Outcome | None:
        settled = await self._settler.settle(job, outcome)
        if settled is not None:
            attempted = job.attempted
            error = None if attempted is None else attempted.error
            self._activity.record(
                settled,
                wait_ms=job.wait_ms,
                run_ms=attempted.run_ms if attempted is not None and attempted.counts else None,
                total_ms=job.waited_ms(time.time_ns() // 1_000_000),
                cause="other" if error is None else error.cause,
                since_delivery=job.published.by == "delivery" and job.hop.dead_at is None,
            )
        return settled

    async def _outcome(self, job: Job) -> Outcome:
        try:
            if (replayed := await self._settler.reply_only(job)) is not None:
                return replayed
            return await self._handle(job)
        except (BrokerError, StoreUnavailable):  # no outcome: the delivery is returned to its queue
            raise
        except Exception as error:
            log.exception(signals.HANDLER_FAILED, where="handle")
            return end_with("internal", f"a fault of Lanekeeper: {type(error).__name__}; see its log")
