"""A pool works on the deliveries of one queue, as many at a time as it has slots. (A slot is the right to work on one
request at a time.)

The prefetch of the consumer equals the number of slots, so that no delivery waits in a worker: a delivery that waited
there would run before later messages of higher priority, which the broker still holds (docs/facts.md, section 2). The
exception is a lane that several tenants use: while all its slots are taken, deliveries may wait in the worker, and
`consumers/fairness/lane_slots.py` decides whose delivery gets the next slot.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, assert_never

from opentelemetry.trace import Span

from consumers import waits
from consumers.capacity.activity import LaneActivity
from consumers.fairness.entrance import Entrance, QueueEntrance
from consumers.fairness.lane_slots import Admission, LaneSlots
from consumers.job import Job
from consumers.outcomes import Answered, Buried, Deferred, Dropped, Outcome, Refused, Replayed, Retried, ended
from consumers.settle import Settler
from consumers.state.base import StoreUnavailable
from lanekeeper.contract.problems import BrokerError
from lanekeeper.telemetry import logs, recording, signals
from lanekeeper.telemetry.tracing import Tracing
from topology.broker.deliveries import Deliveries
from topology.broker.session import ChannelLost, Delivery, Session
from topology.codec import decoding

log = logs.logger()


class Pool:
    """Consumes one queue: runs `handle` for each delivery that has a slot, and settles it by the outcome that `handle`
    returns. A slot is the right to work on one request at a time."""

    def __init__(
        self,
        deliveries: Deliveries,
        *,
        job_of: Callable[[Delivery], Job],
        handle: Callable[[Job], Awaitable[Outcome]],
        settler: Settler,
        activity: LaneActivity,
        tracing: Tracing,
        entrance: Entrance | None = None,
        slots: int | None = None,
    ) -> None:
        """`entrance`: decides which delivery gets one of the slots that several pools share; None: this pool shares no
        slots, and has as many as its prefetch. `slots`: by how many this pool increases the number of its queue's
        requests that are worked on at a time; None: by its prefetch."""
        self._deliveries = deliveries
        self._job_of = job_of
        self._handle = handle
        self._settler = settler
        self._activity = activity
        self._tracing = tracing
        self._entrance = entrance or QueueEntrance(LaneSlots().queue(deliveries.prefetch))
        self.queue = deliveries.queue
        self.slots = deliveries.prefetch if slots is None else slots
        self.in_hand = 0
        """How many deliveries this pool has taken and not finished. They are at most as many as its prefetch, except
        after pauses (see `resume`)."""
        self.jobs: set[Job] = set()
        """The jobs of the deliveries that have a slot."""
        self._undecided: dict[asyncio.Task[Any], Job] = {}
        """The tasks that work on a job which has no outcome yet, each with its job."""
        self._stopping = False
        self._gives_back = False
        """True after `give_back_waiting` was called: requests whose call to a provider has not begun are returned to
        the broker."""

    @property
    def trouble(self) -> str | None:
        """The reason why nothing is delivered to this pool at present; None while the pool consumes its queue."""
        return "stopping" if self._stopping else self._deliveries.trouble

    @property
    def running(self) -> int:
        """How many of the pool's deliveries have a slot and are worked on."""
        return len(self.jobs)

    async def run(self) -> None:
        """Work on the queue's deliveries until `stop` is called and all running jobs have ended. To end at once, cancel
        the task that runs this method."""
        async with aclosing(self._deliveries.sessions()) as sessions:
            async for session in sessions:
                await self._work_session(session)

    async def stop(self) -> None:
        """Take no more deliveries; `run` returns as soon as all running jobs have ended."""
        self._stopping = True
        await self._deliveries.stop()

    def give_back_waiting(self) -> None:
        """After `stop`: return to the broker each delivery whose call to a provider has not begun, and each one that
        arrives later.

        This includes deliveries for which budget (a part of the provider's rate limits) is reserved already: the work
        on such a delivery is cancelled before its call, and the budget is given back."""
        self._gives_back = True
        for task, job in self._undecided.items():
            if job.attempted is None:
                task.cancel()

    @property
    def is_paused(self) -> bool:
        return self._deliveries.is_paused

    async def pause(self, reason: str) -> None:
        """Take no new deliveries. The work on deliveries that were taken continues, as far as the cause of the pause
        allows."""
        await self._deliveries.pause(reason)

    async def resume(self) -> None:
        """Take deliveries again, unless this pool holds more deliveries than its prefetch.

        After several pauses the pool can hold more, because each pause cancels the consumer, and the broker does not
        count deliveries of a cancelled consumer against the prefetch of the next one.
        """
        if self.in_hand <= self._deliveries.prefetch:
            await self._deliveries.resume()

    async def _work_session(self, session: Session) -> None:
        """Work on the deliveries of one channel. If the channel is lost, the work on its deliveries is cancelled,
        because the broker delivers them again."""
        try:
            async with asyncio.TaskGroup() as running:
                async for delivery in session:
                    running.create_task(self._take(delivery), name=f"{self.queue} {delivery.tag}")
        except* ChannelLost as lost:
            log.warning(signals.DELIVERY_LOST, queue=self.queue, error=str(lost.exceptions[0]))

    async def _take(self, delivery: Delivery) -> None:
        self.in_hand += 1
        try:
            if self._gives_back:
                await self._settler.nack(delivery)
            elif (job := await self._job(delivery)) is not None:
                with logs.about(job):
                    await self._take_job(job)
        finally:
            self.in_hand -= 1

    async def _job(self, delivery: Delivery) -> Job | None:
        """Return the job for a delivery. If the delivery's message cannot be read, reject it, so that one unreadable
        message does not stop the lane, and return None."""
        try:
            return self._job_of(delivery)
        except Exception:
            log.exception(
                signals.HANDLER_FAILED, request=delivery.message.message_id, lane=self._activity.lane, where="read"
            )
            await self._settler.reject_later(delivery)
            self._entrance.unread(delivery.queue)
            return None

    async def _take_job(self, job: Job) -> None:
        """Wait until a job gets a slot, then work on it. If the job must be set aside, because its tenant uses more
        than its share of the lane or the wait takes too long, move its request to a side queue instead. Exceptions are
        caught here or in `_outcome`, except the cancellation of the task."""
        admission: Admission | None = None
        try:
            with self._undecided_yet(job):
                admission = await self._entrance.enter(job)
            if admission is Admission.BEGIN:
                await self._work(job)
            elif (outcome := await self._entrance.set_aside(job)) is None:
                await self._settler.ack(job.delivery)
            else:
                await self._settle(job, outcome)
        except asyncio.CancelledError:
            if self._stopping:
                await self._settler.nack(job.delivery)
            raise
        except (BrokerError, StoreUnavailable) as error:
            where = "store" if isinstance(error, StoreUnavailable) else "set aside"
            log.error(signals.HANDLER_FAILED, where=where, error=str(error))
            await self._settler.nack_later(job.delivery)
        except Exception:  # one request that cannot even be moved or dead-lettered must not stop the whole lane
            log.exception(signals.HANDLER_FAILED, where="settle" if admission is Admission.BEGIN else "set aside")
            await self._settler.reject_later(job.delivery)
        finally:
            if admission is Admission.BEGIN:
                self._entrance.leave(job)

    async def _work(self, job: Job) -> None:
        """Work on one delivery that has a slot, and record all that is done with it in one trace span."""
        delivery = job.delivery
        self._activity.running += 1
        self.jobs.add(job)
        try:
            taken_ns = time.time_ns()
            with self._tracing.process(
                delivery.message, queue=self.queue, delivery_tag=delivery.tag, start_ns=taken_ns
            ) as span:
                job.span = span
                with self._undecided_yet(job):
                    outcome = await self._outcome(job)
                settled = await self._settle(job, outcome)
                if span.is_recording():
                    self._record(span, job, settled or outcome)
                    self._record_waits(job, taken_ns)
        finally:
            self._activity.running -= 1
            self.jobs.discard(job)

    async def _settle(self, job: Job, outcome: Outcome) -> Outcome | None:
        settled = await self._settler.settle(job, outcome)
        if settled is not None:
            attempted = job.attempted
            self._activity.record(
                settled,
                wait_ms=job.wait_ms,
                run_ms=attempted.run_ms if attempted is not None and attempted.counts else None,
                since_delivery=job.published.by == "delivery",
            )
        return settled

    @contextmanager
    def _undecided_yet(self, job: Job) -> Iterator[None]:
        """Mark the current task as one whose job has no outcome yet, so that `give_back_waiting` can cancel it."""
        task = asyncio.current_task()
        assert task is not None
        self._undecided[task] = job
        try:
            yield
        finally:
            del self._undecided[task]

    def _record(self, span: Span, job: Job, outcome: Outcome) -> None:
        app = decoding.app_of(job.routing_key)
        recording.request(
            span,
            lane=job.lane_name,
            app=app,
            attempt=job.attempts,
            wait_ms=job.wait_ms,
            redelivered=job.delivery.redelivered,
        )
        name = type(outcome).__name__.lower()
        match outcome:
            case Deferred(delay_ms=delay_ms):
                recording.outcome(span, name, delay_ms=delay_ms)
            case Retried(delay_ms=delay_ms):
                recording.outcome(span, name, delay_ms=delay_ms, error="attempt_failed")
            case Refused(problem) | Buried(problem) | Dropped(problem):
                recording.outcome(span, name, error=problem.code)
            case Replayed(completion=completion) if completion.code:
                recording.outcome(span, name, error=completion.code)
            case Answered() | Replayed():
                recording.outcome(span, name)
            case _:
                assert_never(outcome)

    def _record_waits(self, job: Job, taken_ns: int) -> None:
        for wait in waits.before_delivery(job, taken_ns):
            self._tracing.passed(wait.name, start_ns=wait.start_ns, end_ns=wait.end_ns, came_by=job.message)
        for wait in waits.before_call(job, taken_ns):
            self._tracing.passed(wait.name, start_ns=wait.start_ns, end_ns=wait.end_ns)

    async def _outcome(self, job: Job) -> Outcome:
        """The outcome of a job: the one that `handle` returns or, if `handle` raises an unexpected exception, the error
        `internal`, with which the request is kept in `lane.dead`. Raises StoreUnavailable."""
        try:
            return await self._handle(job)
        except StoreUnavailable:  # no outcome: the delivery is returned to its queue
            raise
        except Exception as error:
            log.exception(signals.HANDLER_FAILED, where="handle")
            return ended("internal", f"a fault of Lanekeeper: {type(error).__name__}; see its log")
