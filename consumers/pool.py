"""A pool works on the deliveries of one queue, as many at a time as it has slots.

The prefetch of the queue equals the slots, so that no delivery waits in a worker: with more, lower priorities would
overtake (docs/facts.md, section 2). Deliveries wait only if tenants share a lane that is full:
`consumers/fairness/turns.py` then says who is next.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, assert_never

from opentelemetry.trace import Span

from consumers import waits
from consumers.capacity.activity import LaneActivity
from consumers.fairness.entering import Entering, FromQueue
from consumers.fairness.turns import Turn, Turns
from consumers.job import Job
from consumers.outcomes import Answered, Buried, Deferred, Dropped, Outcome, Refused, Replayed, Retried
from consumers.settle import Settler
from consumers.state.base import StoreUnavailable
from lanekeeper.contract.problems import BrokerError, RequestProblem
from lanekeeper.telemetry import logs, recording, signals
from lanekeeper.telemetry.tracing import Tracing
from topology.broker.deliveries import Deliveries
from topology.broker.session import ChannelLost, Delivery, Session
from topology.codec import decoding

log = logs.logger()


class Pool:
    """Runs `handle` over the deliveries of one queue and has each outcome settled."""

    def __init__(
        self,
        deliveries: Deliveries,
        *,
        job_of: Callable[[Delivery], Job],
        handle: Callable[[Job], Awaitable[Outcome]],
        settler: Settler,
        activity: LaneActivity,
        tracing: Tracing,
        entering: Entering | None = None,
        slots: int | None = None,
    ) -> None:
        """`entering`: how deliveries get slots; None: the pool has slots of its own, as many as its prefetch. `slots`:
        how many it adds to its lane; None: as many as its prefetch."""
        self._deliveries = deliveries
        self._job_of = job_of
        self._handle = handle
        self._settler = settler
        self._activity = activity
        self._tracing = tracing
        self._entering = entering or FromQueue(Turns().bench(deliveries.prefetch))
        self._slots = deliveries.prefetch if slots is None else slots
        self._in_hand = 0
        self._begun = 0
        self._jobs: set[Job] = set()
        self._undecided: dict[asyncio.Task[Any], Job] = {}
        """Tasks without an outcome, each with its job."""
        self._stopping = False
        self._gives_back = False

    @property
    def queue(self) -> str:
        return self._deliveries.queue

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def in_hand(self) -> int:
        """Deliveries that have not ended; at most the prefetch, unless a pause has come between."""
        return self._in_hand

    @property
    def running(self) -> int:
        """Deliveries that have a slot."""
        return self._begun

    @property
    def jobs(self) -> Collection[Job]:
        return self._jobs

    @property
    def trouble(self) -> str | None:
        """Why nothing is delivered at present; None while the queue is consumed."""
        return "stopping" if self._stopping else self._deliveries.trouble

    async def run(self) -> None:
        """Work until stopped. Returns when all running jobs have ended. Cancel it to end at once."""
        async with aclosing(self._deliveries.sessions()) as sessions:
            async for session in sessions:
                await self._work_session(session)

    async def stop(self) -> None:
        """Take no more deliveries; `run` returns as soon as all running jobs have ended."""
        self._stopping = True
        await self._deliveries.stop()

    def give_back_waiting(self) -> None:
        """After `stop`: return to the broker, from now on, every delivery whose call has not begun.

        A job whose wait for the budget ends at this moment is cancelled before its call, and gives its reservation
        back."""
        self._gives_back = True
        for task, job in self._undecided.items():
            if job.attempted is None:
                task.cancel()

    @property
    def is_paused(self) -> bool:
        return self._deliveries.is_paused

    async def pause(self, reason: str) -> None:
        """Take no new deliveries; those in hand go on, as far as they can."""
        await self._deliveries.pause(reason)

    async def resume(self) -> None:
        """Take deliveries again, unless more than the prefetch are in hand. This can follow several pauses: the broker
        does not count the deliveries of a cancelled consumer against the prefetch of the next one.
        """
        if self._in_hand <= self._deliveries.prefetch:
            await self._deliveries.resume()

    async def _work_session(self, session: Session) -> None:
        """Work on the deliveries of one channel. If the channel is lost, this work ends: the broker delivers it
        again."""
        try:
            async with asyncio.TaskGroup() as running:
                async for delivery in session:
                    running.create_task(self._take(delivery), name=f"{self.queue} {delivery.tag}")
        except* ChannelLost as lost:
            log.warning(signals.DELIVERY_LOST, queue=self.queue, error=str(lost.exceptions[0]))

    async def _take(self, delivery: Delivery) -> None:
        """Work on a delivery as soon as it has a slot, or move it to a side queue, where it waits without one."""
        self._in_hand += 1
        try:
            if self._gives_back:
                return await self._settler.nack(delivery)
            if (job := await self._job(delivery)) is None:
                return None
            with logs.about(job):
                try:
                    with self._undecided_yet(job):
                        turn = await self._entering.enter(job)
                except asyncio.CancelledError:
                    if self._stopping:
                        await self._settler.nack(delivery)
                    raise
                if turn is Turn.ASIDE:
                    return await self._set_aside(job)
                self._begun += 1
                try:
                    await self._work(job)
                finally:
                    self._begun -= 1
                    self._entering.leave(job)
        finally:
            self._in_hand -= 1

    async def _job(self, delivery: Delivery) -> Job | None:
        """The job of a delivery; None if it cannot be read: one such message must not stop the whole lane."""
        try:
            return self._job_of(delivery)
        except Exception:
            log.exception(
                signals.HANDLER_FAILED, request=delivery.message.message_id, lane=self._activity.lane, where="read"
            )
            await self._settler.reject_later(delivery)
            self._entering.unread(delivery.queue)
            return None

    async def _set_aside(self, job: Job) -> None:
        try:
            if (outcome := await self._entering.set_aside(job)) is None:
                await self._settler.ack(job.delivery)
            else:
                await self._settle(job, outcome)
        except asyncio.CancelledError:
            if self._stopping:
                await self._settler.nack(job.delivery)
            raise
        except BrokerError as error:
            log.error(signals.HANDLER_FAILED, where="set aside", error=str(error))
            await self._settler.nack_later(job.delivery)
        except Exception:  # one request that cannot be moved must not stop the whole lane
            log.exception(signals.HANDLER_FAILED, where="set aside")
            await self._settler.reject_later(job.delivery)

    async def _work(self, job: Job) -> None:
        """Work on one delivery that has a slot. All exceptions are caught here or in `_outcome`."""
        delivery = job.delivery
        self._activity.running += 1
        self._jobs.add(job)
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
        except asyncio.CancelledError:
            if self._stopping:
                await self._settler.nack(delivery)
            raise
        except StoreUnavailable as away:
            log.error(signals.HANDLER_FAILED, where="store", error=str(away))
            await self._settler.nack_later(delivery)
        except Exception:  # one request that cannot even be dead-lettered must not stop the whole lane
            log.exception(signals.HANDLER_FAILED, where="settle")
            await self._settler.reject_later(delivery)
        finally:
            self._activity.running -= 1
            self._jobs.discard(job)

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
        for each in waits.before(job, taken_ns):
            self._tracing.passed(each.name, start_ns=each.start_ns, end_ns=each.end_ns, came_by=job.message)
        for each in waits.turn(job, taken_ns):
            self._tracing.passed(each.name, start_ns=each.start_ns, end_ns=each.end_ns)

    async def _outcome(self, job: Job) -> Outcome:
        """The outcome of the handler. An unexpected exception is an internal error, and dead-letters the request."""
        try:
            return await self._handle(job)
        except StoreUnavailable:  # without a claim the request may not be worked on
            raise
        except Exception as error:
            log.exception(signals.HANDLER_FAILED, where="handle")
            return Buried(RequestProblem("internal", f"a fault of Lanekeeper: {type(error).__name__}; see its log"))
