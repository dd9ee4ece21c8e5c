"""Builds and sends replies. The final reply is persistent and confirmed; the parts before it are not."""

import uuid
from typing import Any

from consumers.job import Job
from consumers.replies.address import ReplyRule, is_direct
from consumers.replies.direct import DirectSender
from consumers.state.base import Completion
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import (
    PROBLEMS,
    AccessRefused,
    BrokerError,
    MessageTooLarge,
    PublishRefused,
    RequestProblem,
    Unroutable,
    answer_too_large,
)
from lanekeeper.telemetry import logs, signals

JSON = "application/json"
PROBLEM = "application/problem+json"
PART_TIMEOUT_S = 5.0
log = logs.logger()


class Replies:
    """Publishes replies to the default exchange."""

    def __init__(self, publisher: Publisher, *, direct: DirectSender, rule: ReplyRule) -> None:
        self._publisher = publisher
        self._direct = direct
        self._rule = rule

    def refusal(self, job: Job) -> RequestProblem | None:
        """Why no reply may go to the request's address; None if it may, or if the request wants no reply."""
        address = job.message.reply_to
        if not address:
            return None
        if self._rule.allows(address, user=job.user_id):
            return self._direct.refusal(address)
        return self._rule.refusal(address, user=job.user_id)

    async def final(self, job: Job, completion: Completion, *, replayed: bool = False) -> bool:
        """Send the final reply, once. False: the reply queue is full and refused it.

        A requester that has gone is no error. Raises BrokerError if the broker does not take the reply.
        """
        if completion.code and not PROBLEMS[completion.code].answered:
            return True
        # a cancellation that was recorded before the request arrived does not know its wait
        wait = {n.WAIT_MS: job.wait_ms, n.RUN_MS: job.run_ms, n.WAIT_FROM: job.published.by}
        headers: dict[str, Any] = {n.STATUS: completion.status, n.REQUEST_ID: job.id, **wait, **completion.headers}
        if replayed:
            headers[n.REPLAYED] = True
        is_answer = completion.status == "ok"
        try:
            return await self._final(
                job, body=completion.body, content_type=JSON if is_answer else PROBLEM, headers=headers
            )
        except MessageTooLarge as error:  # it was stored while the broker accepted larger messages: send a short error
            log.error(signals.ANSWER_UNSENT, size=error.size, limit=error.limit)
            told = answer_too_large(error.size, error.limit).document(request=job.id, attempts=job.attempts)
            return await self._final(job, body=told, content_type=PROBLEM, headers={**headers, n.STATUS: "error"})

    def parts(self, job: Job) -> "Parts":
        """An object that sends the events of a stream, one for each call."""
        return Parts(self, job)

    async def _final(self, job: Job, *, body: bytes, content_type: str, headers: dict[str, Any]) -> bool:
        address = job.message.reply_to
        if not address or not self._rule.allows(address, user=job.user_id):
            return True
        if (deadly := self._direct.refusal(address)) is not None:
            raise deadly
        message = Message(
            body=body,
            headers=headers,
            content_type=content_type,
            message_id=uuid.uuid4().hex,
            correlation_id=job.message.correlation_id,
        )
        try:
            if is_direct(address):
                await self._direct.send_surely(message, address)
            else:
                await self._publisher.publish_surely(message, exchange="", routing_key=address, refused_within_s=0)
        except Unroutable:
            log.info(signals.REPLY_UNROUTABLE)
        except AccessRefused as error:
            raise RequestProblem("internal", f"the worker's user may not send replies: {error}") from error
        except PublishRefused:
            return False
        return True

    async def part(self, job: Job, address: str, *, part: str, seq: int, body: bytes) -> str | None:
        """Send one part. Return why it was not sent; None: it was. A lost part does not fail the attempt.

        Raises RequestProblem for an address that nothing may be sent to, and for a part that is too large: the final
        reply would be too large as well.
        """
        headers: dict[str, Any] = {n.REQUEST_ID: job.id, n.ATTEMPT: job.attempts, n.PART: part, n.SEQ: seq}
        if job.lane is not None:
            headers[n.LANE_NAME] = job.lane.name
        message = Message(
            body=body,
            headers=headers,
            content_type=JSON,
            correlation_id=job.message.correlation_id,
            persistent=False,
        )
        how: dict[str, Any] = {"timeout_s": PART_TIMEOUT_S, "traced": False}
        try:
            if is_direct(address):
                await self._direct.send(message, address, **how)
            else:
                await self._publisher.publish(message, exchange="", routing_key=address, mandatory=False, **how)
        except MessageTooLarge as error:
            raise answer_too_large(error.size, error.limit) from error
        except BrokerError as error:
            return str(error)
        return None


class Parts:
    """The parts of one attempt, counted from 0.

    Before the first event of a later attempt, or of a second call within an attempt, a part `restart` tells the
    requester to forget the events so far.
    """

    def __init__(self, replies: Replies, job: Job) -> None:
        self._replies = replies
        self._job = job
        self._seq = -1
        self._restarted = False
        self._has_lost = False
        self.has_sent = False
        """Whether anything was sent that the requester must forget if another attempt follows."""

    async def __call__(self, event: bytes, /) -> None:
        address, trail = self._job.message.reply_to, self._job.trail
        if not address and trail is None:
            return
        self.has_sent = True
        if self._seq < 0 and (self._restarted or self._job.attempts > 1 or self._job.redelivered):
            await self._send(address, "restart", b"{}")
        await self._send(address, "event", event)

    async def _send(self, address: str | None, part: str, body: bytes) -> None:
        self._seq += 1
        if not address:
            if self._job.trail is not None:
                self._job.trail.part(part, body)
            return
        why = await self._replies.part(self._job, address, part=part, seq=self._seq, body=body)
        if why is not None and not self._has_lost:  # logged once: a full queue loses all later parts too
            self._has_lost = True
            log.info(signals.PART_LOST, reason=why)

    def restart(self) -> bool:
        """The next events are of another call. Returns whether events had been sent."""
        had_begun = self._seq >= 0
        if had_begun:
            self._seq, self._restarted = -1, True
        return had_begun
