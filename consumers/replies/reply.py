"""Replies: where they may go, and what they say. The final one is persistent and confirmed, the parts before it not."""

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
        """Why a reply may not go where the request says; None where it may, or where it wants no reply."""
        address = job.message.reply_to
        if not address:
            return None
        if self._rule.allows(address, user=job.user_id):
            return self._direct.refusal(address)
        return self._rule.refusal(address, user=job.user_id)

    async def final(self, job: Job, completion: Completion, *, replayed: bool = False) -> bool:
        """Send how a request ended, in one try. False: the reply queue refuses it (it is full), and nothing was sent.

        A requester that has gone is no error. Raises BrokerError where the broker does not take it.
        """
        if completion.code and not PROBLEMS[completion.code].answered:
            return True
        # a cancellation that was recorded before the request came knows nothing of its wait
        wait = {n.WAIT_MS: job.wait_ms, n.RUN_MS: job.run_ms, n.WAIT_FROM: job.published.by}
        headers: dict[str, Any] = {n.STATUS: completion.status, n.REQUEST_ID: job.id, **wait, **completion.headers}
        if replayed:
            headers[n.REPLAYED] = True
        is_answer = completion.status == "ok"
        try:
            return await self._final(
                job, body=completion.body, content_type=JSON if is_answer else PROBLEM, headers=headers
            )
        except MessageTooLarge as error:  # kept when the broker took more; what is told then has to be short
            log.error(signals.ANSWER_UNSENT, size=error.size, limit=error.limit)
            told = answer_too_large(error.size, error.limit).document(request=job.id, attempts=job.attempts)
            return await self._final(job, body=told, content_type=PROBLEM, headers={**headers, n.STATUS: "error"})

    def parts(self, job: Job) -> "Parts":
        """Sends one event of the stream each time it is called."""
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
        """Why it was not sent; None: it was. That is no failure of the attempt: the final reply is what counts.

        Raises RequestProblem for an address that nothing may be sent to, and for a part that is too large: the whole
        answer would be, too. There is no sense in going on.
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

    An attempt after the first announces itself before its first event: forget what came so far. So does what begins
    again within an attempt.
    """

    def __init__(self, replies: Replies, job: Job) -> None:
        self._replies = replies
        self._job = job
        self._seq = -1
        self._restarted = False
        self._has_lost = False
        self.has_sent = False
        """Whether the requester was sent anything that an attempt after this one must have it forget."""

    async def __call__(self, event: bytes, /) -> None:
        if not (address := self._job.message.reply_to):
            return
        self.has_sent = True
        if self._seq < 0 and (self._restarted or self._job.attempts > 1 or self._job.redelivered):
            await self._send(address, "restart", b"{}")
        await self._send(address, "event", event)

    async def _send(self, address: str, part: str, body: bytes) -> None:
        self._seq += 1
        why = await self._replies.part(self._job, address, part=part, seq=self._seq, body=body)
        if why is not None and not self._has_lost:  # told once: a full queue loses all that follow
            self._has_lost = True
            log.info(signals.PART_LOST, reason=why)

    def restart(self) -> bool:
        """What comes now is of another call; whether anything had been sent."""
        had_begun = self._seq >= 0
        if had_begun:
            self._seq, self._restarted = -1, True
        return had_begun
