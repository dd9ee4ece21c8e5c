"""Builds and sends replies. The final reply is a persistent message, and the worker waits for its confirm. The parts of
a streamed answer (`parts.py`), which are sent before the final reply, are not persistent."""

import asyncio
import uuid
from dataclasses import KW_ONLY, dataclass
from typing import Any

from consumers.job import Job
from consumers.replies.address import ReplyRule
from consumers.replies.sender import ReplySender
from consumers.state.base import Completion
from lanekeeper.amqp.confirming import Answer
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import (
    PROBLEMS,
    AccessRefused,
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
"""The time limit, in seconds, for publishing one part of a stream, and again for the wait for its confirm."""
log = logs.logger()


@dataclass(slots=True, eq=False)
class Replies:
    """Publishes replies to the default exchange. `loses_large_parts`: what happens if a part of a stream is too large
    for a message. True: the part is left out, because the whole answer can be stored outside the broker. False: the
    request ends with an error, because the final reply would be too large too."""

    sender: ReplySender
    _: KW_ONLY
    rule: ReplyRule
    loses_large_parts: bool = False

    def refusal(self, job: Job) -> RequestProblem | None:
        """The error with which a request is refused because no reply may be sent to its reply address; None if replies
        may be sent there, or if the request has no reply address."""
        address = job.message.reply_to
        if not address:
            return None
        if self.rule.allows(address, user=job.hop.user_id):
            return self.sender.refusal(address)
        return self.rule.refusal(address, user=job.hop.user_id)

    async def final(self, job: Job, completion: Completion, *, replayed: bool = False) -> bool:
        """Send the final reply. Return False if the reply queue is full and refused it.

        If the reply queue does not exist any more, that is logged and is no error. Raises BrokerError if the broker
        does not confirm the reply for another reason.
        """
        if completion.code and not PROBLEMS[completion.code].answered:
            return True
        # the completion of a request that was cancelled before it arrived has no headers about its wait: add them here
        wait = {n.WAIT_MS: job.wait_ms, n.RUN_MS: job.run_ms, n.WAIT_FROM: job.published.by}
        headers: dict[str, Any] = {n.STATUS: completion.status, n.REQUEST_ID: job.id, **wait, **completion.headers}
        if replayed:
            headers[n.REPLAYED] = True
        is_answer = completion.status == "ok"
        try:
            return await self._final(
                job, body=completion.body, content_type=JSON if is_answer else PROBLEM, headers=headers
            )
        except MessageTooLarge as error:  # stored while the broker accepted larger messages: send a short error
            log.error(signals.ANSWER_UNSENT, size=error.size, limit=error.limit)
            problem = answer_too_large(error.size, error.limit).document(request=job.id, attempts=job.attempts)
            return await self._final(job, body=problem, content_type=PROBLEM, headers={**headers, n.STATUS: "error"})

    async def _final(self, job: Job, *, body: bytes, content_type: str, headers: dict[str, Any]) -> bool:
        address = job.message.reply_to
        if not address or not self.rule.allows(address, user=job.hop.user_id):
            return True
        message = Message(
            body=body,
            headers=headers,
            content_type=content_type,
            message_id=uuid.uuid4().hex,
            correlation_id=job.message.correlation_id,
        )
        try:
            await self.sender.send_surely(message, address)
        except Unroutable:
            log.info(signals.REPLY_UNROUTABLE)
        except AccessRefused as error:
            raise RequestProblem("internal", f"the worker's user may not send replies: {error}") from error
        except PublishRefused:
            return False
        return True

    async def part(self, job: Job, address: str, *, part: str, seq: int, body: bytes) -> "asyncio.Future[Answer]":
        """Publish one part of a stream, and return the broker's confirm as a future.

        Raises BrokerError if the part was not sent, and RequestProblem if the address is forged. If the part is too
        large for a message, raises MessageTooLarge (a BrokerError) if `loses_large_parts` is true, otherwise
        RequestProblem.
        """
        headers: dict[str, Any] = {n.REQUEST_ID: job.id, n.ATTEMPT: job.attempts, n.PART: part, n.SEQ: seq}
        if job.lane is not None:
            headers[n.LANE_NAME] = job.lane.name
        message = Message(
            body=body, headers=headers, content_type=JSON, correlation_id=job.message.correlation_id, persistent=False
        )
        try:
            return await self.sender.write(message, address, timeout_s=PART_TIMEOUT_S)
        except MessageTooLarge as error:
            if self.loses_large_parts:
                raise
            raise answer_too_large(error.size, error.limit, setting="LANEKEEPER_BODIES__URL") from error
