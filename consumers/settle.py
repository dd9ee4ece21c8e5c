"""The one place that settles: publish what comes next, wait for the broker's confirm, then acknowledge.

A crash between two steps repeats the later ones: the delivery is not acknowledged, so it comes again. Nothing is
acknowledged whose outcome is not with the broker.
"""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, assert_never

import structlog

from consumers.job import Answered, Buried, Deferred, Job, NowMs, Outcome, Refused, Retried
from consumers.lifecycle import Lifecycle
from consumers.reply import Replies
from topology import names as n
from topology import signals
from topology.broker.deliveries import ChannelLost, Delivery
from topology.broker.publisher import Publisher
from topology.contract.headers import ERRORS_KEPT, HopHeaders, carried, hop_headers
from topology.contract.messages import Message
from topology.contract.problems import BrokerError, RequestProblem
from topology.delays import MAX_DELAY_MS, hop
from topology.names import Names
from topology.tracing import Tracing

PUT_BACK_AFTER_S = 1.0
"""What fails at once comes back at once: not thousands of times a second."""
log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Settler:
    """Carries an outcome out."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        replies: Replies,
        lifecycle: Lifecycle,
        names: Names,
        tracing: Tracing,
        now_ms: NowMs,
    ) -> None:
        self._publisher = publisher
        self._replies = replies
        self._lifecycle = lifecycle
        self._names = names
        self._tracing = tracing
        self._now_ms = now_ms

    async def settle(self, job: Job, outcome: Outcome) -> bool:
        """Publish, confirm, acknowledge. False where that could not be done: the broker delivers it again."""
        try:
            try:
                await self._carry_out(job, outcome)
            except RequestProblem as forbidden:  # the reply address killed the connection that answered it
                if not isinstance(outcome, Buried):
                    await self._bury(job, forbidden)
                outcome = Buried(forbidden)
        except BrokerError as error:
            log.error(signals.HANDLER_FAILED, request=job.id, lane=job.lane_name, where="settle", error=str(error))
            await self.put_back(job.delivery)
            return False
        try:
            with self._tracing.settle("ack", job.message, queue=job.delivery.queue, delivery_tag=job.delivery.tag):
                await job.delivery.ack()
        except ChannelLost as lost:
            log.warning(signals.DELIVERY_LOST, queue=job.delivery.queue, request=job.id, error=str(lost))
            return False
        self._tell(job, outcome)
        return True

    async def put_back(self, delivery: Delivery) -> None:
        """Put back what could not be settled. The broker counts it: what never can be ends at its delivery limit, in
        `lane.fallen`."""
        await asyncio.sleep(PUT_BACK_AFTER_S)
        try:
            with self._tracing.settle("reject", delivery.message, queue=delivery.queue, delivery_tag=delivery.tag):
                await delivery.reject()
        except ChannelLost as lost:
            log.warning(
                signals.DELIVERY_LOST, queue=delivery.queue, request=delivery.message.message_id, error=str(lost)
            )

    async def _carry_out(self, job: Job, outcome: Outcome) -> None:
        match outcome:
            case Answered():
                await self._replies.answer(job, outcome)
            case Deferred(delay_ms=delay_ms, due_ms=due_ms):
                await self._send_round(job, delay_ms, attempts=job.attempts, due_ms=due_ms, errors=job.hop.errors)
            case Retried(delay_ms=delay_ms, error=error):
                errors = (f"attempt {job.attempts}: {error}", *job.hop.errors)[:ERRORS_KEPT]
                await self._send_round(job, delay_ms, attempts=job.attempts, due_ms=job.hop.due_ms, errors=errors)
            case Refused(problem):
                await self._replies.problem(job, problem)
            case Buried(problem):
                await self._bury(job, problem)
                await self._replies.problem(job, problem)
            case _:
                assert_never(outcome)

    async def _send_round(
        self, job: Job, delay_ms: int, *, attempts: int, due_ms: int | None, errors: tuple[str, ...]
    ) -> None:
        """Send the request into the delay cascade; it comes back to the lane's due queue."""
        way = hop(min(max(0, delay_ms), MAX_DELAY_MS), self._names)
        sent_ms = job.request.sent_ms if job.request else job.taken_ms
        past = HopHeaders(
            attempts=attempts,
            errors=errors,
            first_seen_ms=job.hop.first_seen_ms or min(job.taken_ms, max(sent_ms, 0) or job.taken_ms),
            due_ms=due_ms,
            user_id=job.hop.user_id if job.trusted else job.message.user_id,
            expiration=job.hop.expiration if job.trusted else job.message.expiration,
        )
        message = self._copy(job, {**hop_headers(past), **way.headers})
        await self._publisher.publish_surely(message, exchange=way.exchange, routing_key=job.routing_key)

    async def _bury(self, job: Job, problem: RequestProblem) -> None:
        """Keep the request in `lane.dead`, as it was published, with the cause."""
        now = datetime.fromtimestamp(self._now_ms() / 1000, tz=UTC)
        errors = [f"{problem.code}: {problem.detail}", *job.hop.errors][:ERRORS_KEPT]
        headers: dict[str, Any] = {
            n.DEAD_CODE: problem.code,
            n.DEAD_DETAIL: problem.detail,
            n.DEAD_AT: now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            n.ATTEMPT: job.attempts,
            n.ROUTING_KEY: job.routing_key,
            n.ERRORS: errors,
        }
        user_id = job.hop.user_id if job.trusted else job.message.user_id
        expiration = job.hop.expiration if job.trusted else job.message.expiration
        if user_id:
            headers[n.USER_ID] = user_id
        if expiration:
            headers[n.EXPIRATION] = expiration
        await self._publisher.publish_surely(
            self._copy(job, headers), exchange=self._names.dead, routing_key=job.routing_key
        )

    def _copy(self, job: Job, headers: dict[str, Any]) -> Message:
        """The message as it was published, without `user_id` (a foreign one closes the channel) and `expiration`."""
        original = job.message
        return Message(
            body=original.body,
            headers={**carried(original.headers, of=self._names), **headers},
            content_type=original.content_type,
            content_encoding=original.content_encoding,
            message_id=job.id,
            correlation_id=original.correlation_id,
            reply_to=original.reply_to,
            priority=original.priority,
            type=original.type,
            timestamp_s=original.timestamp_s,
            app_id=original.app_id,
        )

    async def release(self, delivery: Delivery) -> None:
        """Return what the worker, stopping, could not end: through no fault of its own, and uncounted on 4.3."""
        with suppress(ChannelLost):
            await delivery.give_back()

    def _tell(self, job: Job, outcome: Outcome) -> None:
        match outcome:
            case Answered(model=model, provider=provider):
                figures = {"model": model, "provider": provider, "wait_ms": job.wait_ms, "run_ms": job.run_ms}
                log.debug(signals.REQUEST_ANSWERED, request=job.id, lane=job.lane_name, **figures)
                self._lifecycle.tell(job, "completed", **figures)
            case Deferred(delay_ms=delay_ms, reason=reason):
                log.debug(
                    signals.REQUEST_DEFERRED, request=job.id, lane=job.lane_name, delay_ms=delay_ms, reason=reason
                )
                self._lifecycle.tell(job, "deferred", delay_ms=delay_ms, reason=reason)
            case Retried(delay_ms=delay_ms, error=error):
                log.info(
                    signals.REQUEST_RETRIED,
                    request=job.id,
                    lane=job.lane_name,
                    attempt=job.attempts,
                    delay_ms=delay_ms,
                    error=error,
                )
                self._lifecycle.tell(job, "retrying", delay_ms=delay_ms, error=error)
            case Refused(problem) | Buried(problem):
                buried = isinstance(outcome, Buried)
                event = signals.REQUEST_BURIED if buried else signals.REQUEST_REFUSED
                log.info(event, request=job.id, lane=job.lane_name, code=problem.code, detail=problem.detail)
                self._lifecycle.tell(job, "failed", code=problem.code, status=problem.status)
                if buried:
                    self._lifecycle.tell(job, "dead", code=problem.code)
            case _:
                assert_never(outcome)
