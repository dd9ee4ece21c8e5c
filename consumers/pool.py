"""A pool works the deliveries of one queue, as many at a time as it has slots.

The queue's prefetch equals the slots, so that no delivery ever waits in a worker: more would let lower priorities
overtake (facts.md, section 2).
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import assert_never

import structlog
from opentelemetry.trace import Span

from consumers.activity import LaneActivity
from consumers.job import Answered, Buried, Deferred, Job, Outcome, Refused, Retried
from consumers.settle import Settler
from topology import recording, signals
from topology.broker.deliveries import ChannelLost, Deliveries, Delivery, Session
from topology.contract import codec
from topology.contract.problems import RequestProblem
from topology.tracing import Tracing

log: structlog.stdlib.BoundLogger = structlog.get_logger()


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
    ) -> None:
        self._deliveries = deliveries
        self._job_of = job_of
        self._handle = handle
        self._settler = settler
        self._activity = activity
        self._tracing = tracing
        self._stopping = False

    @property
    def queue(self) -> str:
        return self._deliveries.queue

    @property
    def trouble(self) -> str | None:
        """Why nothing is delivered at present; None while the queue is consumed."""
        return self._deliveries.trouble

    async def run(self) -> None:
        """Work until stopped: returns when what was running has ended. Cancel it to end at once."""
        async with aclosing(self._deliveries.sessions()) as sessions:
            async for session in sessions:
                await self._work_session(session)

    async def stop(self) -> None:
        """Take no more; `run` returns as soon as what is running has ended."""
        self._stopping = True
        await self._deliveries.stop()

    async def _work_session(self, session: Session) -> None:
        """A lost channel ends the work on what it delivered: the broker delivers that again."""
        try:
            async with asyncio.TaskGroup() as running:
                async for delivery in session:
                    running.create_task(self._work(delivery), name=f"{self.queue} {delivery.tag}")
        except* ChannelLost as lost:
            log.warning(signals.DELIVERY_LOST, queue=self.queue, error=str(lost.exceptions[0]))

    async def _work(self, delivery: Delivery) -> None:
        """Work one delivery. Everything is caught here and in `_outcome`, and nowhere else."""
        self._activity.running += 1
        try:
            job = self._job_of(delivery)
            with self._tracing.process(delivery.message, queue=self.queue, delivery_tag=delivery.tag) as span:
                outcome = await self._outcome(job)
                is_settled = await self._settler.settle(job, outcome)
                if span.is_recording():
                    self._record(span, job, outcome)
            if is_settled:
                attempted = job.attempt_started_ms is not None
                self._activity.record(outcome, wait_ms=job.wait_ms, run_ms=job.run_ms if attempted else None)
        except asyncio.CancelledError:
            if self._stopping:
                await self._settler.release(delivery)
            raise
        except Exception:  # one request that cannot even be buried must not end the lane for all others
            log.exception(
                signals.HANDLER_FAILED, request=delivery.message.message_id, lane=self._activity.lane, where="settle"
            )
            await self._settler.put_back(delivery)
        finally:
            self._activity.running -= 1

    def _record(self, span: Span, job: Job, outcome: Outcome) -> None:
        app = codec.app_of(job.routing_key)
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
            case Refused(problem) | Buried(problem):
                recording.outcome(span, name, error=problem.code)
            case Answered():
                recording.outcome(span, name)
            case _:
                assert_never(outcome)

    async def _outcome(self, job: Job) -> Outcome:
        """An unforeseen error is ours, and buries the request."""
        try:
            return await self._handle(job)
        except Exception as error:
            log.exception(signals.HANDLER_FAILED, request=job.id, lane=job.lane_name, where="handle")
            return Buried(RequestProblem("internal", f"a fault of Lanekeeper: {type(error).__name__}; see its log"))
