"""The one place that settles deliveries: store the outcome, publish what follows, wait for the confirm, acknowledge.

After a crash between two steps the broker delivers the request again, and the later steps are repeated from what is
stored. A delivery is acknowledged only after its outcome is with the broker. The stored outcome is the one that is
sent.
"""

import asyncio
import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import assert_never

from consumers.bodies.fetching import Fetching
from consumers.claiming import Claiming
from consumers.copies import dead_letter, delayed
from consumers.failpoints import Failpoints
from consumers.job import Job, NowMs
from consumers.lifecycle import Lifecycle
from consumers.outcomes import Answered, Buried, Deferred, Dropped, Outcome, Refused, Replayed, Retried
from consumers.parking import Parking
from consumers.replies.reply import Replies
from consumers.replies.retelling import Retelling
from consumers.state.base import Completion, StoreUnavailable
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import PROBLEMS, BrokerError, MessageTooLarge, RequestProblem, answer_too_large
from lanekeeper.telemetry import logs, signals
from lanekeeper.telemetry.tracing import Tracing
from topology.broker.session import ChannelLost, Delivery, Session
from topology.codec.bounds import ANSWER_BYTES
from topology.codec.headers import ERRORS_KEPT, HopHeaders
from topology.delays import MAX_DELAY_MS, hop

NEVER_KEPT = frozenset({"idempotency_conflict"})
"""Not stored: it concerns this message, not the request that owns the id."""
NOTED = frozenset(
    {"invalid_request", "unsupported_media", "too_large", "forbidden_reply_to", "forbidden_model", "unroutable"}
)
"""Problems of messages that are no valid request: the id stays free for a valid one."""
TAKEN_OVER_WAIT_MS = 1000
RETURN_AFTER_S = 1.0
"""A returned message is delivered again at once. If it fails at once, this keeps it from going round all the time."""
log = logs.logger()


class Settler:
    """Carries out the outcome of a delivery."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        replies: Replies,
        retelling: Retelling,
        claiming: Claiming,
        lifecycle: Lifecycle,
        names: Names,
        tracing: Tracing,
        now_ms: NowMs,
        failpoints: Failpoints,
        parking: Parking | None = None,
        answer_bytes: int = ANSWER_BYTES,
        bodies: Fetching | None = None,
    ) -> None:
        self._publisher = publisher
        self._answer_bytes = answer_bytes
        self._bodies = bodies
        self._parking = parking or Parking()
        self._claiming = claiming
        self._failpoints = failpoints
        self._replies = replies
        self._retelling = retelling
        self._lifecycle = lifecycle
        self._names = names
        self._tracing = tracing
        self._now_ms = now_ms

    async def settle(self, job: Job, outcome: Outcome) -> Outcome | None:
        """Store, publish, confirm, acknowledge. Return the valid outcome, which is another one if the request had ended
        already or another worker has it. None if the delivery could not be settled: the broker delivers it again."""
        try:
            outcome = await self._stored(job, await self._sendable(outcome))
            self._failpoints.reach("after_store")
            try:
                await self._carry_out(job, outcome)
            except RequestProblem as forbidden:  # the reply address killed the connection that answered it
                if not isinstance(outcome, Buried):
                    await self._bury(job, forbidden.code, forbidden.detail, ended_ms=self._now_ms())
                outcome = Buried(forbidden)
        except (BrokerError, StoreUnavailable) as error:
            log.error(signals.HANDLER_FAILED, where="settle", error=str(error))
            await self._claiming.release(job)
            await self.nack_later(job.delivery)
            return None
        finally:
            self._claiming.forget(job)
        self._failpoints.reach("after_confirm")
        try:
            with self._tracing.settle("ack", job.message, queue=job.delivery.queue, delivery_tag=job.delivery.tag):
                await job.delivery.ack()
        except ChannelLost as lost:
            log.warning(signals.DELIVERY_LOST, queue=job.delivery.queue, error=str(lost))
            return None
        self._failpoints.reach("after_ack")
        if self._bodies is not None and n.BODY in job.message.headers and not _is_needed_again(outcome):
            self._bodies.forget(job.message)
        self._lifecycle.settled(job, outcome)
        return outcome

    async def ack(self, delivery: Delivery) -> None:
        """Acknowledge what needs no outcome: a request that was set aside, or a control message."""
        with suppress(ChannelLost):
            await delivery.ack()

    async def ack_together(self, session: Session, deliveries: Sequence[Delivery], *, in_hand: Collection[int]) -> None:
        """Acknowledge several deliveries of one channel. `in_hand`: the tags of those that are not settled yet."""
        with suppress(ChannelLost):
            await session.ack(deliveries, in_hand=in_hand)

    async def nack(self, delivery: Delivery) -> None:
        """Return a delivery that the worker cannot finish, because it stops. RabbitMQ 4.3 does not count that."""
        with suppress(ChannelLost):
            await delivery.nack()

    async def nack_later(self, delivery: Delivery) -> None:
        """Return a delivery after a pause, because the broker or the store prevented its settlement. RabbitMQ 4.3 does
        not count that."""
        await asyncio.sleep(RETURN_AFTER_S)
        await self.nack(delivery)

    async def reject_later(self, delivery: Delivery) -> None:
        """Return a delivery that could not be settled, after a pause. The broker counts that: a message that can never
        be settled reaches its delivery limit and goes to `lane.fallen`."""
        await asyncio.sleep(RETURN_AFTER_S)
        try:
            with self._tracing.settle("reject", delivery.message, queue=delivery.queue, delivery_tag=delivery.tag):
                await delivery.reject()
        except ChannelLost as lost:
            log.warning(
                signals.DELIVERY_LOST, queue=delivery.queue, request=delivery.message.message_id, error=str(lost)
            )

    async def _sendable(self, outcome: Outcome) -> Outcome:
        """Replace an answer that is too large to be sent by an error, before it is stored."""
        if not isinstance(outcome, Answered):
            return outcome
        limit: int | None = self._answer_bytes
        if (size := len(outcome.body)) <= self._answer_bytes:
            limit = await self._publisher.refuses(size)
        return outcome if limit is None else Buried(answer_too_large(size, limit))

    async def _stored(self, job: Job, outcome: Outcome) -> Outcome:
        """Store the outcome of a request that has ended, and return the valid one: the first that was stored.
        Raises StoreUnavailable."""
        match outcome:
            case Deferred() | Retried() | Replayed():
                return outcome
            case Answered() | Refused() | Buried() | Dropped():
                completion = self._completion(job, outcome)
            case _:
                assert_never(outcome)
        if completion.code in NEVER_KEPT:
            return outcome
        if completion.code in NOTED and job.claim is None and job.is_fresh:
            if job.redelivered and (before := await self._claiming.find(job.identity)) and before.completion:
                return Replayed(completion=before.completion, buries=True)  # read differently before
            if not self._parking.takes(job.identity.tenant, len(job.message.body), code=completion.code):
                return Refused(outcome.problem) if isinstance(outcome, Buried) else outcome
            await self._claiming.note(job, completion)
            return outcome
        holds = await self._claiming.complete(job, completion)
        if holds is None:
            return Deferred(delay_ms=TAKEN_OVER_WAIT_MS, reason="running elsewhere", due_ms=job.hop.due_ms)
        if holds.ended_ms != completion.ended_ms or holds.body != completion.body:
            # an earlier delivery of the request may have stored this outcome and died before parking it
            came_before = job.came_before or job.message.exchange == self._names.fallen
            return Replayed(completion=holds, buries=came_before or isinstance(outcome, Buried))
        return outcome

    async def _carry_out(self, job: Job, outcome: Outcome) -> None:
        match outcome:
            case Deferred(delay_ms=delay_ms, due_ms=due_ms, redelivered=redelivered):
                past = HopHeaders(attempts=job.attempts, errors=job.hop.errors, due_ms=due_ms, redelivered=redelivered)
                await self._delay(job, delay_ms, past)
            case Retried(delay_ms=delay_ms, error=error):
                errors = (f"attempt {job.attempts}: {error}", *job.hop.errors)[:ERRORS_KEPT]
                past = HopHeaders(attempts=job.attempts, errors=errors, due_ms=job.hop.due_ms)
                await self._delay(job, delay_ms, past)
            case Answered() | Refused() | Dropped():
                await self._answer(job, self._completion(job, outcome))
            case Buried(problem):
                completion = self._completion(job, outcome)
                await self._bury(job, problem.code, problem.detail, ended_ms=completion.ended_ms)
                await self._answer(job, completion)
            case Replayed(completion=completion, buries=buries):
                if buries and completion.code and PROBLEMS[completion.code].parked:
                    detail = str(json.loads(completion.body).get("detail", ""))
                    detail = detail.removesuffix(PROBLEMS[completion.code].advice)
                    await self._bury(job, completion.code, detail, ended_ms=completion.ended_ms)
                await self._answer(job, completion, replayed=not job.hop.reply_error)
            case _:
                assert_never(outcome)

    def _completion(self, job: Job, outcome: Answered | Refused | Buried | Dropped) -> Completion:
        """The outcome as it is stored and sent. It is made once, so that it is the same each time."""
        if job.completion is not None:
            return job.completion
        ended_ms = self._now_ms()
        headers: dict[str, str | int] = {
            n.ATTEMPT: job.attempts,
            n.WAIT_MS: job.waited_ms(ended_ms if job.attempted is None else job.attempted.started_ms),
            n.RUN_MS: job.run_ms,
            n.WAIT_FROM: job.published.by,
        }
        if job.lane is not None:
            headers[n.LANE_NAME] = job.lane.name
        match outcome:
            case Answered(body=body, model=model, provider=provider):
                told = {n.MODEL: model, n.PROVIDER: provider}
                job.completion = Completion(status="ok", body=body, headers={**headers, **told}, ended_ms=ended_ms)
            case Refused(problem) | Buried(problem) | Dropped(problem):
                job.completion = Completion(
                    status="error",
                    code=problem.code,
                    body=problem.document(request=job.id, attempts=job.attempts),
                    headers=headers,
                    ended_ms=ended_ms,
                )
            case _:
                assert_never(outcome)
        return job.completion

    async def _answer(self, job: Job, completion: Completion, *, replayed: bool = False) -> None:
        """Send the final reply. If its queue refuses it, the request comes back later for another try and holds no
        slot."""
        if await self._replies.final(job, completion, replayed=replayed):
            return
        now_ms = self._now_ms()
        if (pause_ms := self._retelling.pause_ms(job, now_ms=now_ms)) is None:
            self._retelling.give_up(job, now_ms=now_ms)
            self._lifecycle.tell(job, "undelivered", status=completion.status)
            return
        tries = job.hop.reply_try + 1
        error = completion.body.decode() if completion.code in NEVER_KEPT | NOTED else None
        log.debug(signals.REPLY_REFUSED, tries=tries, delay_ms=pause_ms)
        past = HopHeaders(
            attempts=job.attempts, errors=job.hop.errors, due_ms=job.hop.due_ms, reply_try=tries, reply_error=error
        )
        await self._delay(job, pause_ms, past, body=None if error is None else b"")

    async def _delay(self, job: Job, delay_ms: int, past: HopHeaders, *, body: bytes | None = None) -> None:
        """Send the request into the delay cascade, from which it comes back to the lane's due queue. `body`: instead of
        its own."""
        way = hop(min(max(0, delay_ms), MAX_DELAY_MS), self._names)
        message = delayed(job, way, past, now_ms=self._now_ms(), names=self._names)
        if body is not None:
            message.body = body
        self._failpoints.reach_soon("after_publish")
        await self._publisher.publish_surely(message, exchange=way.exchange, routing_key=job.routing_key)

    async def _bury(self, job: Job, code: str, detail: str, *, ended_ms: int) -> None:
        """Keep the request in `lane.dead`, as it was published, with the cause."""
        letter = dead_letter(job, code, detail, ended_ms=ended_ms, names=self._names)
        self._failpoints.reach_soon("after_publish")
        try:
            await self._publisher.publish_surely(letter, exchange=self._names.dead, routing_key=job.routing_key)
        except MessageTooLarge as error:  # the broker's limit has been lowered: park the request without its body
            log.error(signals.DEAD_LETTER_CUT, size=error.size, limit=error.limit)
            letter.body = b""
            await self._publisher.publish_surely(letter, exchange=self._names.dead, routing_key=job.routing_key)


def _is_needed_again(outcome: Outcome) -> bool:
    """Whether the stored body of the request is needed after this outcome: by a later attempt, or by a replay of its
    dead letter."""
    match outcome:
        case Deferred() | Retried() | Buried():
            return True
        case Replayed(completion=completion):
            return bool(completion.code) and PROBLEMS[completion.code].parked
        case Answered() | Refused() | Dropped():
            return False
        case _:
            assert_never(outcome)
