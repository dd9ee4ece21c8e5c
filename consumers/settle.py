"""Settles deliveries: stores the outcome, publishes the messages that it needs, waits for their confirms, and
acknowledges the delivery.

A delivery is acknowledged only after the broker has confirmed the messages that its outcome needs: the reply, the copy
that is delivered again after a delay, or the dead letter. After a crash between two steps the broker delivers the
request again; a worker then reads the stored outcome and takes the remaining steps with it.
"""

import asyncio
import gzip
import json
import os
import random
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, assert_never

import structlog

from consumers.claiming import Claiming
from consumers.clock import NowMs, moment_text, now_ms
from consumers.flows.webhooks import Webhooks
from consumers.job import SETTLE_WITHIN_S, Job, Source, side_priority, source_of, state_identity
from consumers.large_bodies import Fetching, LargeAnswers
from consumers.lifecycle import Lifecycle
from consumers.outcomes import (
    LATER_MS,
    Answered,
    Batched,
    DeadLettered,
    Deferred,
    Outcome,
    PipelineAdvanced,
    Refused,
    Replayed,
    Retried,
    Superseded,
    bytes_of,
)
from consumers.rate_limit import Parking
from consumers.replies import Replies, ReplyRetries
from consumers.state.base import Completion, StoreUnavailable
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.amqp.tolerant import KEY_BYTES
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import is_request_id, is_word, shown
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import PROBLEMS, BrokerError, MessageTooLarge, RequestProblem
from lanekeeper.telemetry import signals
from lanekeeper.telemetry.tracing import Tracing
from topology.broker.consume import ChannelLost, Delivery
from topology.broker.deadletters import cause_of
from topology.codec.decoding import PACKED_BYTES, input_of
from topology.codec.headers import (
    ERRORS_KEPT,
    KEEPS,
    LOOKS,
    BatchHop,
    HopHeaders,
    batch_header,
    carried,
    hop_headers,
)
from topology.delays import MAX_DELAY_MS, Hop, hop

NEVER_KEPT = frozenset({"idempotency_conflict"})
"""Errors with these codes are not stored as a request's outcome: they answer a message that uses the id of another
request, and under that id the other request's outcome is stored."""
NOTED = frozenset(code for code, problem in PROBLEMS.items() if not problem.kept) - NEVER_KEPT
"""The codes of the errors that concern one message. `Claiming.note` stores such an error, but in a way that a valid
request may still use the same id."""
TOO_LARGE = "too_large"
FAULTS_AT_MOST = 5
RETURN_AFTER_S = 1.0
"""The broker delivers a returned message again at once, so without this pause a message that always fails would keep
the worker busy."""
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Settler:
    """Settles deliveries: carries out the outcome of each, and then acknowledges the delivery."""

    publisher: Publisher
    _: KW_ONLY
    replies: Replies
    reply_retries: ReplyRetries
    claiming: Claiming
    lifecycle: Lifecycle
    names: Names
    tracing: Tracing
    now_ms: NowMs = now_ms
    failpoints: "Failpoints"
    parking: Parking
    large_answers: LargeAnswers
    bodies: Fetching
    webhooks: Webhooks

    async def settle(self, job: Job, outcome: Outcome) -> Outcome | None:
        """Settle a delivery, and return the outcome that was carried out: the given one, or another if the request had
        ended already, if another worker has taken the request over, or if the given one could not be stored or sent as
        it was. Return None if the delivery could not be settled, so that the broker delivers it again."""
        if isinstance(outcome, DeadLettered) and not job.parks(outcome.problem.code):
            outcome = Refused(outcome.problem)
        job.delivery.count(bytes_of(outcome))
        try:
            async with asyncio.timeout(SETTLE_WITHIN_S):
                if self.large_answers.is_slow(outcome):
                    outcome = await self.claiming.sheltered(job, self._kept_and_stored(job, outcome))
                else:
                    outcome = await self._kept_and_stored(job, outcome)
                self.failpoints.reach("after_store")
                try:
                    outcome = await self._carried_out(job, outcome)
                except RequestProblem as forbidden:  # the reply could not be sent, for instance to a forged address
                    if not isinstance(outcome, DeadLettered):
                        await self._bury(job, forbidden.code, forbidden.detail, ended_ms=self.now_ms())
                    outcome = DeadLettered(forbidden)
        except (BrokerError, StoreUnavailable, TimeoutError) as error:
            why = str(error) or f"not settled within {SETTLE_WITHIN_S:g} s"
            log.error(signals.HANDLER_FAILED, where="settle", error=why)
            if not isinstance(error, TimeoutError):  # then its outcome may still be on its way to the store
                await self.claiming.release(job)
            await self.nack_later(job.delivery)
            return None
        except Exception:
            self.claiming.forget(job)
            raise
        self.failpoints.reach("after_confirm")
        try:
            with self.tracing.settle(signals.ACK, job.message, queue=job.delivery.queue, delivery_tag=job.delivery.tag):
                await job.delivery.ack()
        except ChannelLost as lost:
            log.warning(signals.DELIVERY_LOST, queue=job.delivery.queue, error=str(lost))
            return None
        self.failpoints.reach("after_ack")
        if not _is_needed_again(outcome):
            self.bodies.forget(job.message)
        self.lifecycle.publish_outcome(job, outcome)
        return outcome

    async def _kept_and_stored(self, job: Job, outcome: Outcome) -> Outcome:
        sendable = outcome
        if not job.is_item:  # the answer of an item is not sent
            sendable = await self.large_answers.sendable(outcome, tenant=job.identity.tenant)
        self.failpoints.reach("after_keep")
        stored = await self._stored(job, sendable)
        if stored is not sendable:
            self.large_answers.forget(sendable)
        return stored

    async def reply_only(self, job: Job) -> Replayed | None:
        """The outcome of a delivery whose request has ended, and of which only the reply is left to be sent; None for
        any other. Raises StoreUnavailable."""
        if not job.hop.reply_try:
            return None
        if (error := job.hop.reply_error) is None:
            found = await self.claiming.find(job.identity)
            if found is None or found.completion is None:  # the store forgot it: the request is worked on again
                return None
            return Replayed(completion=found.completion, is_reply_only=True)
        headers: dict[str, str | int] = {n.ATTEMPT: job.attempts}
        if job.lane is not None:
            headers[n.LANE_NAME] = job.lane.name
        code = str(json.loads(error)["code"])
        completion = Completion(status="error", code=code, body=error.encode(), headers=headers, ended_ms=job.taken_ms)
        return Replayed(completion=completion, is_reply_only=True)

    async def ack(self, delivery: Delivery) -> None:
        """Acknowledge a delivery that has no outcome."""
        with suppress(ChannelLost):
            await delivery.ack()

    async def send_around(self, message: Message, delay_ms: int, *, routing_key: str) -> None:
        """Publish a message that is no request to the delay exchanges. Raises BrokerError."""
        first_hop = hop(delay_ms, self.names)
        message.headers = {**message.headers, **first_hop.headers}
        await self.publisher.publish_surely(message, exchange=first_hop.exchange, routing_key=routing_key)

    async def publish_stray(self, message: Message) -> None:
        """Publish a message of another queue that is not what belongs there to `lane.fallen`, where it is answered or
        kept. Raises BrokerError.

        It goes through the default exchange: workers have no right to the exchange `lane.fallen`. So its routing key is
        in a header, and so is its user, whom the broker would not accept from a worker."""
        names = self.names
        headers = carried(message.headers, of=names)
        is_a_workers = source_of(message, names) is not Source.REQUESTER
        user = message.headers.get(n.USER_ID) if is_a_workers else message.user_id
        if isinstance(user, str):
            headers[n.USER_ID] = user
        # where it can be published again: `lane.batches` has it in a header
        key = message.headers.get(n.ROUTING_KEY) if message.routing_key == names.batches else message.routing_key
        if not isinstance(key, str) or len(key.encode()) > KEY_BYTES:  # no worker has written it
            key = ""
        headers[n.ROUTING_KEY] = key
        fallen = replace(message, exchange="", routing_key="", headers=headers, user_id=None, expiration=None)
        try:
            await self.publisher.publish_surely(fallen, exchange="", routing_key=names.strays)
        except MessageTooLarge as error:
            await self.end_too_large(fallen, error, routing_key=key)

    async def end_too_large(self, message: Message, error: MessageTooLarge, *, routing_key: str) -> None:
        """End a request that is in none of its lane's queues, and whose message is larger than the broker takes: its
        limit was lowered. It is answered and kept, without its body, from `lane.fallen`. Raises BrokerError."""
        log.error(signals.DEAD_LETTER_CUT, size=error.size, limit=error.limit)
        dead = {n.DEAD_CODE: TOO_LARGE, n.DEAD_DETAIL: _too_large(error), n.ROUTING_KEY: routing_key}
        headers = {**message.headers, **dead}
        cut = replace(message, body=b"", exchange="", routing_key="", headers=headers, user_id=None, expiration=None)
        await self.publisher.publish_surely(cut, exchange="", routing_key=self.names.strays)

    async def publish_letter(self, letter: Message, *, routing_key: str) -> None:
        """Publish a dead letter; without its body if the broker does not take it. Raises BrokerError."""
        try:
            await self.publisher.publish_surely(letter, exchange=self.names.dead, routing_key=routing_key)
        except MessageTooLarge as error:
            log.error(signals.DEAD_LETTER_CUT, size=error.size, limit=error.limit)
            letter.body = b""
            await self.publisher.publish_surely(letter, exchange=self.names.dead, routing_key=routing_key)

    async def nack(self, delivery: Delivery) -> None:
        """Return a delivery to its queue, because the worker stops. RabbitMQ 4.3 does not count this towards the
        delivery limit."""
        with suppress(ChannelLost):
            await delivery.nack()

    async def nack_later(self, delivery: Delivery) -> None:
        """Return a delivery to its queue after a pause, because it could not be settled while the broker or the store
        failed."""
        await asyncio.sleep(RETURN_AFTER_S)
        await self.nack(delivery)

    async def reject_later(self, delivery: Delivery) -> None:
        """After an internal error: wait, then reject the delivery, so that the broker requeues it and counts it. A
        message that has caused an error at `FAULTS_AT_MOST` deliveries is parked instead."""
        await asyncio.sleep(RETURN_AFTER_S)
        # None: the queue does not count
        if (delivery.times_delivered or FAULTS_AT_MOST) >= FAULTS_AT_MOST and await self._is_parked(delivery):
            await self.ack(delivery)
            return
        try:
            with self.tracing.settle(signals.REJECT, delivery.message, queue=delivery.queue, delivery_tag=delivery.tag):
                await delivery.reject()
        except ChannelLost as lost:
            log.warning(
                signals.DELIVERY_LOST, queue=delivery.queue, request=delivery.message.message_id, error=str(lost)
            )

    async def _is_parked(self, delivery: Delivery) -> bool:
        """Keep a message that only causes errors: in `lane.fallen`, where its requester is answered; or in `lane.dead`
        if it comes from there, or cannot be published as it is. Returns False if it cannot be kept now."""
        as_stray = () if delivery.queue == self.names.strays else (self._publish_stray,)
        for park in (*as_stray, self._bury_unread):
            try:
                await park(delivery)
            except BrokerError as error:
                log.error(signals.HANDLER_FAILED, where="park", error=str(error))
                return False
            except Exception:
                log.exception(signals.HANDLER_FAILED, where="park")
            else:
                return True
        return False

    async def _publish_stray(self, delivery: Delivery) -> None:
        await self.publish_stray(delivery.message)

    async def _bury_unread(self, delivery: Delivery) -> None:
        message = delivery.message
        letter = Message(
            body=message.body,
            headers={
                n.DEAD_CODE: "internal",
                n.DEAD_DETAIL: f"a fault of Lanekeeper: it could not be handled in {delivery.queue}; see its log",
                n.DEAD_AT: moment_text(self.now_ms()),
                n.ROUTING_KEY: delivery.queue,
            },
            message_id=message.message_id if is_request_id(message.message_id or "") else uuid.uuid4().hex,
        )
        await self.publish_letter(letter, routing_key=delivery.queue)

    async def _stored(self, job: Job, outcome: Outcome) -> Outcome:
        """Store the outcome of a request that has ended, and return the outcome that is valid: the one that was stored
        first for the request. An outcome that is not the end of a request, or that was stored before, is returned
        unchanged. Raises StoreUnavailable."""
        match outcome:
            case Deferred() | Retried() | Batched() | Replayed() | Refused(is_silent=True):
                return outcome
            case PipelineAdvanced(answer=answer):
                if answer is None:
                    return outcome
                completion = self._completion(job, answer)
                valid = await self.claiming.step_ended(job, completion, step=outcome.description)
                job.completion = None
                if valid != completion:  # another worker has stored an outcome of the step first: go on with that one
                    return Deferred(delay_ms=0, reason="running elsewhere")
                return outcome
            case Answered() | Refused() | DeadLettered() | Superseded():
                completion = self._completion(job, outcome)
            case _:
                assert_never(outcome)
        if completion.code in NEVER_KEPT:
            return outcome
        is_parked = bool(completion.code) and job.parks(completion.code)
        if completion.code in NOTED and job.claim is None and not job.is_item and (job.hop.is_fresh or not is_parked):
            if job.redelivered and (before := await self.claiming.find(job.identity)) and before.completion:
                # an earlier delivery of the message has stored an outcome, which stays the valid one
                return Replayed(completion=before.completion, buries=True)
            size = len(job.message.body)
            if is_parked and not self.parking.takes(job.identity.tenant, size, code=completion.code):
                return Refused(outcome.problem) if isinstance(outcome, DeadLettered) else outcome
            await self.claiming.note(job, completion)
            return outcome
        valid = await self.claiming.complete(job, completion)
        if valid is None:
            return Deferred(delay_ms=LATER_MS, reason="running elsewhere")
        if valid.ended_ms != completion.ended_ms or valid.body != completion.body:
            # a worker may have stored this completion and died before it published the dead letter
            came_before = job.came_before or job.message.exchange == self.names.strays
            return Replayed(completion=valid, buries=came_before or isinstance(outcome, DeadLettered))
        return outcome

    async def _carried_out(self, job: Job, outcome: Outcome) -> Outcome:
        """Carry out an outcome. If the broker does not take the message with which the request goes on, the request
        ends: as often as it were delivered, it would be called and paid again."""
        try:
            return await self._carry_out(job, outcome)
        except MessageTooLarge as error:
            step = f"step {outcome.step}: " if isinstance(outcome, PipelineAdvanced) else ""
            problem = RequestProblem(TOO_LARGE, step + _too_large(error))
            job.completion = None
            ended = DeadLettered(problem) if job.parks(TOO_LARGE) else Refused(problem)
            return await self._carry_out(job, await self._stored(job, ended))

    async def _carry_out(self, job: Job, outcome: Outcome) -> Outcome:
        """Returns the outcome that was carried out: another one, if the request is too large for a batch. Raises
        MessageTooLarge."""
        match outcome:
            case Deferred(delay_ms=delay_ms, due_ms=due_ms, redelivered=redelivered):
                due_ms = job.hop.due_ms if due_ms is None else due_ms
                errors = job.hop.errors
                if job.failure is not None:  # it did not count
                    errors = (job.failure, *errors)[:ERRORS_KEPT]
                past = HopHeaders(attempts=job.attempts, errors=errors, due_ms=due_ms, redelivered=redelivered)
                unused = job.batch_result if job.attempted is None else None
                await self._delay(job, delay_ms, past, result=unused)
            case Retried(delay_ms=delay_ms, error=error):
                errors = (f"attempt {job.attempts}: {error}", *job.hop.errors)[:ERRORS_KEPT]
                past = HopHeaders(attempts=job.attempts, errors=errors, due_ms=job.hop.due_ms)
                await self._delay(job, delay_ms, past)
            case PipelineAdvanced():
                return await self._go_on(job, outcome)
            case Batched(params=params):
                message = gathered(job, params, now_ms=self.now_ms(), names=self.names)
                self.failpoints.reach_soon("after_publish")
                try:
                    await self.publisher.publish_surely(message, exchange="", routing_key=self.names.batches)
                except MessageTooLarge:  # with what the provider gets beside what the requester published
                    job.batch = replace(job.batch or BatchHop(), live=True)
                    return await self._carry_out(job, Deferred(delay_ms=0, reason="too large for a batch"))
            case Refused(is_silent=True):
                pass
            case Answered() | Refused() | Superseded():
                await self._answer(job, self._completion(job, outcome))
            case DeadLettered(problem):
                completion = self._completion(job, outcome)
                await self._bury(job, problem.code, problem.detail, ended_ms=completion.ended_ms)
                await self._answer(job, completion)
            case Replayed(completion=completion, buries=buries):
                if buries and completion.code and job.parks(completion.code):
                    detail = str(json.loads(completion.body).get("detail", ""))
                    detail = detail.removesuffix(PROBLEMS[completion.code].advice)
                    await self._bury(job, completion.code, detail, ended_ms=completion.ended_ms)
                await self._answer(job, completion, replayed=not job.hop.reply_error)
            case _:
                assert_never(outcome)
        return outcome

    def _completion(self, job: Job, outcome: Answered | Refused | DeadLettered | Superseded) -> Completion:
        """How the request ended, in the form in which it is stored and sent. It is computed only once for a job, so
        that the stored and the sent outcome are the same, also in their times."""
        if job.completion is not None:
            return job.completion
        ended_ms = self.now_ms()
        headers: dict[str, str | int] = {
            n.ATTEMPT: job.attempts,
            n.WAIT_MS: job.wait_ms,
            n.RUN_MS: job.run_ms,
            n.WAIT_FROM: job.published.by,
        }
        if job.lane is not None:
            headers[n.LANE_NAME] = job.lane.name
        match outcome:
            case Answered(body=body, model=model, provider=provider, request_id=request_id, kept=kept):
                headers |= {n.MODEL: model, n.PROVIDER: provider, **({} if kept is None else kept.headers)}
                headers |= _request_id_header(request_id)
                if outcome.stop_reason is not None:
                    headers[n.STOP_REASON] = shown(outcome.stop_reason)
                job.completion = Completion(
                    status="ok",
                    body=body,
                    headers=headers,
                    ended_ms=ended_ms,
                    saved_usd=0.0 if job.attempted is None else job.attempted.saved_usd,
                )
            case Refused(problem) | DeadLettered(problem) | Superseded(problem):
                headers[n.WAIT_MS] = max(0, job.waited_ms(ended_ms) - job.ran_ms)
                headers[n.RUN_MS] = job.ran_ms  # of all attempts: none of them answered
                headers |= _request_id_header(None if problem.provider is None else problem.provider.request_id)
                job.completion = Completion(
                    status="error",
                    code=problem.code,
                    cause=cause_of(problem.code, problem.detail),
                    body=problem.document(request=job.id, attempts=job.attempts, trace=job.trace_id),
                    headers=headers,
                    ended_ms=ended_ms,
                )
            case _:
                assert_never(outcome)
        return job.completion

    async def _answer(self, job: Job, completion: Completion, *, replayed: bool = False) -> None:
        """Publish the outcome for the webhook, and send the final reply. If the reply queue is full, publish the
        request to the delay exchanges, so that a worker gets it again after a pause and then sends the reply again
        (`reply_only`). After several tries, or if too many replies wait in this way, the reply is given up."""
        if not job.hop.reply_try:  # otherwise it was published before the first try
            await self.webhooks.publish(job, completion)
            self.failpoints.reach("after_webhook")
        if await self.replies.final(job, completion, replayed=replayed):
            return
        if (pause_ms := self.reply_retries.pause_ms(job, now_ms=self.now_ms())) is None:
            self.lifecycle.publish(job, "undelivered", status=completion.status)
            return
        tries = job.hop.reply_try + 1
        error = completion.body.decode() if completion.code in NEVER_KEPT | NOTED else None
        log.debug(signals.REPLY_REFUSED, tries=tries, delay_ms=pause_ms)
        past = HopHeaders(
            attempts=job.attempts, errors=job.hop.errors, due_ms=job.hop.due_ms, reply_try=tries, reply_error=error
        )
        await self._delay(job, pause_ms, past, body=None if error is None else b"")

    async def _delay(
        self, job: Job, delay_ms: int, past: HopHeaders, *, body: bytes | None = None, result: bytes | None = None
    ) -> None:
        first_hop = hop(min(delay_ms, MAX_DELAY_MS), self.names)
        message = delayed(job, first_hop, past, now_ms=self.now_ms(), names=self.names)
        if body is not None:
            message.body = body
        if result is not None:  # it was not read yet
            _append(message, job, result)
        self.failpoints.reach_soon("after_publish")
        await self.publisher.publish_surely(message, exchange=first_hop.exchange, routing_key=job.routing_key)

    async def _go_on(self, job: Job, outcome: PipelineAdvanced) -> Outcome:
        """Publish a pipeline's message to the lane in which it goes on, through the delay exchanges, because nobody may
        publish to the due queues directly."""
        if outcome.keeper_ms:
            flow = replace(outcome.flow, role=KEEPS)
            keeper = replace(outcome, flow=flow, keeper_ms=0, delay_ms=outcome.keeper_ms)
            if (ended := await self._go_on(job, keeper)) is not keeper:
                return ended
            outcome = replace(outcome, flow=replace(outcome.flow, role=LOOKS), keeper_ms=0, state=b"")
        at_ms, first_hop = self.now_ms(), hop(outcome.delay_ms, self.names)
        past = HopHeaders(
            attempts=0 if outcome.of == 0 else 1,  # what a fan-out's items answer is the first attempt
            due_ms=at_ms,
            hop_ms=at_ms,
            back_ms=at_ms + first_hop.delay_ms,
            flow=outcome.flow,
        )
        headers = {**_hop_headers(job, past), **first_hop.headers}
        for of_the_step in (n.RAN_MS, n.DEATHS, n.BATCH):
            headers.pop(of_the_step, None)
        if job.batch is not None and job.batch.ticket:  # which has its mark in the store
            headers |= batch_header(BatchHop(ticket=job.batch.ticket))
        message = _copy(job, headers, names=self.names)
        message.body, message.content_encoding = outcome.state, None
        key = ".".join((outcome.lane, *job.routing_key.split(".")[1:]))
        self.failpoints.reach_soon("after_publish")
        await self.publisher.publish_surely(message, exchange=first_hop.exchange, routing_key=key)
        return outcome

    async def _bury(self, job: Job, code: str, detail: str, *, ended_ms: int) -> None:
        if job.is_item:
            return  # the request of its pipeline is kept
        if (flow := job.hop.flow) is not None and flow.role == LOOKS and not job.message.body:
            if not (state := await self.claiming.state(state_identity(job.identity, flow))):
                raise StoreUnavailable(
                    "the store has lost the state of a pipeline, which the message that keeps it has"
                )
            job.message.body = state
        if job.delivery.cut_bytes:
            log.warning(signals.DEAD_LETTER_CUT, size=job.delivery.cut_bytes, limit=PACKED_BYTES)
        letter = dead_letter(job, code, detail, ended_ms=ended_ms, names=self.names)
        key = letter.headers[n.ROUTING_KEY]
        self.failpoints.reach_soon("after_publish")
        await self.publish_letter(letter, routing_key=key)


def _too_large(error: MessageTooLarge) -> str:
    return f"its message has {error.size} bytes, the broker takes {error.limit}"


def _request_id_header(id: str | None) -> Mapping[str, str]:
    """`id`: as the provider has written it."""
    return {n.PROVIDER_REQUEST_ID: id} if id and is_word(id) else {}


def _is_needed_again(outcome: Outcome) -> bool:
    match outcome:
        case Deferred() | Retried() | DeadLettered() | Refused(is_silent=True) | PipelineAdvanced() | Batched():
            return True
        case Replayed(completion=completion):
            return bool(completion.code) and PROBLEMS[completion.code].parked
        case Answered() | Refused() | Superseded():
            return False
        case _:
            assert_never(outcome)


def delayed(job: Job, first_hop: Hop, past: HopHeaders, *, now_ms: int, names: Names) -> Message:
    """The copy of a request that is published to the delay exchanges, which bring it to its lane's due queue."""
    hop = replace(past, hop_ms=now_ms, back_ms=now_ms + first_hop.delay_ms)
    return _copy(job, {**_hop_headers(job, hop), **first_hop.headers}, names=names)


def gathered(job: Job, params: bytes, *, now_ms: int, names: Names) -> Message:
    """The copy of a request that is published to `lane.batches`. The JSON for the provider follows the body, unless it
    is the same."""
    body = job.message.body
    tail = b"" if params == body else params
    past = HopHeaders(
        attempts=job.attempts, errors=job.hop.errors, due_ms=job.hop.due_ms, hop_ms=now_ms, back_ms=now_ms
    )
    headers = _hop_headers(job, past, batch=replace(job.batch or BatchHop(), params_bytes=len(tail)))
    message = _copy(job, {**headers, n.ROUTING_KEY: job.routing_key}, names=names)
    message.body = body + tail
    return message


def set_aside(job: Job, *, now_ms: int, names: Names) -> Message:
    """The copy of a request that is published to a side queue. If the request is fresh (was never delayed or retried)
    and has an `expiration`, the copy's `expiration` is shorter by the time since the request was published."""
    since_ms = job.published.ms
    hop = replace(
        job.hop,
        redelivered=job.redelivered,
        hop_ms=job.hop.hop_ms or since_ms,
        back_ms=job.hop.back_ms or since_ms,
    )
    copy = _copy(job, _hop_headers(job, hop), names=names)
    if job.batch_result is not None:
        _append(copy, job, job.batch_result)
    copy.priority = side_priority(job.message.priority, is_fresh=hop.is_fresh)
    if (end_ms := expires_ms(job)) is not None:
        copy.expiration = str(max(0, end_ms - now_ms))
    return copy


def expires_ms(job: Job) -> int | None:
    """When the broker would let a request expire that was never delayed or retried, if it had not been delivered."""
    expiration = job.hop.expiration
    if not job.hop.is_fresh or expiration is None or not expiration.isdecimal():
        return None
    return job.published.ms + int(expiration)


def dead_letter(job: Job, code: str, detail: str, *, ended_ms: int, names: Names) -> Message:
    """The copy of a failed request that is published to `lane.dead`: of a pipeline's, what its requester published."""
    flow = job.hop.flow
    headers: dict[str, Any] = {
        n.DEAD_CODE: code,
        n.DEAD_DETAIL: detail,
        n.DEAD_AT: moment_text(ended_ms),
        n.ATTEMPT: job.attempts,
        n.ROUTING_KEY: job.routing_key if flow is None or not flow.routing_key else flow.routing_key,
        n.ERRORS: [f"{code}: {detail}", *job.hop.errors][:ERRORS_KEPT],
    }
    if job.hop.user_id:
        headers[n.USER_ID] = job.hop.user_id
    if job.hop.expiration:
        headers[n.EXPIRATION] = job.hop.expiration
    if job.hop.replays:
        headers |= {n.REPLAYS: job.hop.replays, n.REPLAYED_AT: job.hop.replayed_at or headers[n.DEAD_AT]}
    if n.TENANT in job.message.headers or job.identity.tenant != (job.hop.user_id or ""):
        # whoever publishes it again may speak for others, so a tenant that the requester only claimed must not stay
        headers[n.TENANT] = job.identity.tenant
    letter = _copy(job, headers, names=names)
    if flow is not None and flow.input_bytes:
        letter.body = input_of(letter.body, flow.input_bytes)
        if len(letter.body) > PACKED_BYTES:  # it was packed when it was published
            letter.body, letter.content_encoding = gzip.compress(letter.body), "gzip"
    return letter


def _hop_headers(job: Job, hop: HopHeaders, *, batch: BatchHop | None = None) -> dict[str, Any]:
    hop = replace(
        hop,
        first_seen_ms=job.hop.first_seen_ms or job.published.ms or job.taken_ms,
        user_id=job.hop.user_id,
        expiration=job.hop.expiration,
        dead_at=job.hop.dead_at,
        flow=hop.flow or job.hop.flow,
        flow_unread=job.hop.flow_unread,
        batch=batch or job.batch,
        batch_unread=job.hop.batch_unread,
        replays=job.hop.replays,
        replayed_at=job.hop.replayed_at,
        ran_ms=job.ran_ms,
        deaths=job.deaths,
    )
    headers = hop_headers(hop)
    if job.identity.tenant != (job.hop.user_id or ""):
        # the tenant of a republished dead letter: the header USER_ID now names who republished it
        headers[n.TENANT] = job.identity.tenant
    return headers


def _append(copy: Message, job: Job, result: bytes) -> None:
    assert job.batch is not None
    copy.body += result
    copy.headers = {**copy.headers, **batch_header(replace(job.batch, result_bytes=len(result)))}


def _copy(job: Job, headers: Mapping[str, Any], *, names: Names) -> Message:
    return replace(
        job.message,
        exchange="",
        routing_key="",
        headers={**carried(job.message.headers, of=names), **headers},
        message_id=job.id,
        user_id=None,  # the broker closes a channel that publishes with another user's; a header keeps it
        expiration=None,  # the broker would apply it again in each queue; a header keeps it
        persistent=True,
    )


FAILPOINTS = frozenset({
    "before_claim", "after_claim", "after_call", "after_keep", "after_store", "after_publish", "after_webhook",
    "after_confirm", "after_ack", "after_post", "after_repost", "after_gather_mark", "after_ticket",
    "after_submit_mark", "after_create", "after_submitted", "after_result", "after_results",
})  # fmt: skip
"""The places at which fault tests let a worker kill itself, in the order in which a request reaches them."""
FAILPOINT_EXIT_CODE = 86
SOON_S = 0.0005


class Failpoints:
    """For tests: kills the process with a certain probability when a request reaches a named place."""

    def __init__(self, chances: Mapping[str, float] | None = None) -> None:
        self._chances = dict(chances or {})

    def reach(self, name: str) -> None:
        if self._strikes(name):
            os._exit(FAILPOINT_EXIT_CODE)

    def reach_soon(self, name: str) -> None:
        if self._strikes(name):
            asyncio.get_running_loop().call_later(SOON_S, os._exit, FAILPOINT_EXIT_CODE)

    def _strikes(self, name: str) -> bool:
        return random.random() < self._chances.get(name, 0)
