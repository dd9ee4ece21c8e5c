"""Answers control messages, with which clients cancel a request (`cancel`) or ask for its result (`result`). If the
request has ended, the answer to `result` is the request's final reply. Any other answer has the header
`x-lane-control`.

Answers are sent only to direct reply-to, to queues that the broker named, and to `lane.reply.<user_id>` of the
message's user (threat T1 in docs/security.md). A message with any other `reply_to`, or without one, cannot be answered,
which is logged and counted.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from consumers.control.command import id_of
from consumers.rate_limit import LogThrottle
from consumers.replies.address import ReplyRule
from consumers.replies.reply import JSON, PROBLEM
from consumers.replies.sender import ReplySender
from consumers.state.base import Completion
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerError, MessageTooLarge, RequestProblem, answer_too_large
from lanekeeper.telemetry import logs, signals
from topology.broker.notices import Notices

log = logs.logger()


@dataclass(slots=True, eq=False)
class Answers:
    """Publishes the answers to control messages (cancel, result). `notices`: sends the answers that are not results,
    many of them in one write, and without waiting for confirms, because a client that gets no answer asks again."""

    sender: ReplySender
    _: KW_ONLY
    rule: ReplyRule
    notices: Notices
    refused: int = field(default=0, init=False)
    """How many control messages were refused: they were malformed, exceeded their tenant's limit, were about another
    tenant's request, or have failed."""
    unanswered: int = field(default=0, init=False)
    """How many control messages were not answered although they should have been, because their `reply_to` is missing
    or not allowed, or because too many of their user's messages exceeded the limit."""
    _log_throttle: LogThrottle = field(default_factory=LogThrottle, init=False)

    async def tell(self, message: Message, body: Mapping[str, Any], *, control: Literal["accepted", "pending"]) -> None:
        """Answer a control message with the JSON object `body`. If the message is about a request, the object's field
        `id` is the request's id. `control`: "accepted" for a cancellation that was recorded, "pending" for the state of
        a request that has not ended."""
        headers = {n.CONTROL: control}
        if "id" in body:
            headers[n.REQUEST_ID] = body["id"]
        await self._send(message, _answer(message, json.dumps(body).encode(), JSON, headers))

    async def refuse(self, message: Message, problem: RequestProblem) -> None:
        """Answer a control message that is invalid, exceeds its tenant's limit or has failed, with a problem
        document."""
        self._log_refusal(message, problem)
        id = id_of(message)
        headers = {n.CONTROL: "error"} if id is None else {n.CONTROL: "error", n.REQUEST_ID: id}
        document = problem.document(request=id or "", attempts=0)
        await self._send(message, _answer(message, document, PROBLEM, headers), must_answer=True)

    def refuse_silently(self, message: Message, problem: RequestProblem) -> None:
        """Refuse a control message without sending an answer, because there may be thousands of them: count it, and
        write at most one log line a minute about such messages of a user."""
        self._log_refusal(message, problem)
        self.unanswered += 1

    def _log_refusal(self, message: Message, problem: RequestProblem) -> None:
        self.refused += 1
        who = message.user_id or ""
        if count := self._log_throttle.count(f"{problem.code} {who}"):
            log.warning(
                signals.CONTROL_REFUSED,
                type=(message.type or "")[:40],
                key=message.routing_key[:40],
                user=who,
                reason=problem.brief,
                count=count,
                refused=self.refused,
            )

    async def replay(self, message: Message, completion: Completion, *, id: str) -> None:
        """Answer a control message `result` about a request that has ended with the request's final reply."""
        headers = {n.STATUS: completion.status, **completion.headers, n.REPLAYED: True, n.REQUEST_ID: id}
        content_type = PROBLEM if completion.status == "error" else JSON
        if not self._may_answer(message):
            return
        try:
            await self._publish(message, _answer(message, completion.body, content_type, headers))
        except MessageTooLarge as error:
            await self.refuse(message, answer_too_large(error.size, error.limit))

    async def _send(self, message: Message, answer: Message, *, must_answer: bool = False) -> None:
        if not self._may_answer(message, must_answer=must_answer):
            return
        address = message.reply_to or ""
        if self.sender.needs_own_connection(address) or not self.notices.send(answer, routing_key=address):
            await self._publish(message, answer)

    def _may_answer(self, message: Message, *, must_answer: bool = False) -> bool:
        """Whether an answer may be sent to the `reply_to` of a control message. If not, this is counted and logged; but
        for a message without `reply_to` only if `must_answer` is true."""
        address = message.reply_to or ""
        may = self.rule.allows_control(address, user=message.user_id)
        if not may and (address or must_answer):
            self.unanswered += 1
            if count := self._log_throttle.count(f"unanswered {message.user_id or ''}"):
                log.warning(signals.CONTROL_UNANSWERED, reply_to=address[:100], count=count, unanswered=self.unanswered)
        return may

    async def _publish(self, message: Message, answer: Message) -> None:
        """Publish the answer to a control message once. Raises MessageTooLarge; other errors are only logged."""
        address = message.reply_to or ""
        try:
            await self.sender.send(answer, address, traced=False)
        except MessageTooLarge:
            raise
        except (BrokerError, RequestProblem) as error:  # the client can ask again
            log.debug(signals.CONTROL_UNANSWERED, reply_to=address[:100], reason=str(error))


def _answer(message: Message, body: bytes, content_type: str, headers: Mapping[str, Any]) -> Message:
    return Message(
        body=body,
        headers=headers,
        content_type=content_type,
        message_id=uuid.uuid4().hex,
        correlation_id=message.correlation_id,
        persistent=False,
    )
