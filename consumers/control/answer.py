"""Answers control messages. All answers have the header `x-lane-control`, except a result: it is the final reply again.

Answers go only to queues that the broker named, to direct reply-to, and to `lane.reply.<user_id>` of the user who asked
(threat T1). A message with another address, or none, cannot be answered: that is logged and counted.
"""

import json
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from consumers.replies.address import ReplyRule, is_direct
from consumers.replies.direct import DirectSender
from consumers.share import Seldom
from consumers.state.base import Completion
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerError, MessageTooLarge, RequestProblem, answer_too_large
from lanekeeper.telemetry import logs, signals
from topology.broker.notices import Notices

JSON = "application/json"
PROBLEM = "application/problem+json"
log = logs.logger()


class Answers:
    """Publishes the answers. `notices`: sends all but results, many in one write. They are not confirmed, because a
    client without an answer asks again."""

    def __init__(
        self, publisher: Publisher, *, direct: DirectSender, rule: ReplyRule, notices: Notices | None = None
    ) -> None:
        self._publisher = publisher
        self._direct = direct
        self._rule = rule
        self._notices = notices
        self._seldom = Seldom()
        self.refused = 0
        """Control messages that were malformed, too many, or about another tenant's request."""
        self.unanswered = 0
        """Control messages whose sender should have been answered, but could not be."""

    async def tell(
        self, question: Message, body: Mapping[str, Any], *, id: str | None, as_: Literal["accepted", "pending"]
    ) -> None:
        """Answer with what was done, or with what is known of the request so far."""
        await self._send(question, json.dumps(body).encode(), JSON, _headers(id, {n.CONTROL: as_}))

    async def refuse(self, question: Message, problem: RequestProblem, *, id: str | None) -> None:
        """Answer with what is wrong with the message."""
        self._log_refusal(question, problem)
        document = problem.document(request=id or "", attempts=0)
        await self._send(question, document, PROBLEM, _headers(id, {n.CONTROL: "error"}), is_due=True)

    def refuse_silently(self, question: Message, problem: RequestProblem) -> None:
        """Refuse without an answer, because there may be thousands: they are counted, and logged once a minute."""
        self._log_refusal(question, problem)
        self.unanswered += 1

    def _log_refusal(self, question: Message, problem: RequestProblem) -> None:
        self.refused += 1
        who = question.user_id or ""
        if count := self._seldom.count(f"{problem.code} {who}"):
            log.warning(
                signals.CONTROL_REFUSED,
                type=(question.type or "")[:40],
                key=question.routing_key[:40],
                user=who,
                reason=problem.brief,
                count=count,
                refused=self.refused,
            )

    async def replay(self, question: Message, completion: Completion, *, id: str) -> None:
        """Answer with the request's final reply, the same as its requester got."""
        headers = {n.STATUS: completion.status, **completion.headers, n.REPLAYED: True}
        content_type = PROBLEM if completion.status == "error" else JSON
        if not self._may_answer(question):
            return
        try:
            await self._publish(question, _answer(question, completion.body, content_type, _headers(id, headers)))
        except MessageTooLarge as error:
            await self.refuse(question, answer_too_large(error.size, error.limit), id=id)

    async def _send(
        self, question: Message, body: bytes, content_type: str, headers: Mapping[str, Any], *, is_due: bool = False
    ) -> None:
        if not self._may_answer(question, is_due=is_due):
            return
        answer = _answer(question, body, content_type, headers)
        address = question.reply_to or ""
        is_apart = self._direct.is_apart and is_direct(address)
        if self._notices is None or is_apart or not self._notices.send(answer, routing_key=address):
            await self._publish(question, answer)

    def _may_answer(self, question: Message, *, is_due: bool = False) -> bool:
        """Whether its address is allowed; if not, that is counted. `is_due`: also count a message without address."""
        address = question.reply_to or ""
        may = self._rule.allows_control(address, user=question.user_id)
        if not may and (address or is_due):
            self.unanswered += 1
            if count := self._seldom.count(f"unanswered {question.user_id or ''}"):
                log.warning(signals.CONTROL_UNANSWERED, reply_to=address[:100], count=count, unanswered=self.unanswered)
        return may

    async def _publish(self, question: Message, answer: Message) -> None:
        """Raises MessageTooLarge."""
        address = question.reply_to or ""
        try:
            if is_direct(address):
                await self._direct.send(answer, address, traced=False)
            else:
                await self._publisher.publish(answer, exchange="", routing_key=address, mandatory=False, traced=False)
        except MessageTooLarge:
            raise
        except (BrokerError, RequestProblem) as error:  # the client can ask again
            log.debug(signals.CONTROL_UNANSWERED, reply_to=address[:100], reason=str(error))


def _answer(question: Message, body: bytes, content_type: str, headers: Mapping[str, Any]) -> Message:
    return Message(
        body=body,
        headers=headers,
        content_type=content_type,
        message_id=uuid.uuid4().hex,
        correlation_id=question.correlation_id,
        persistent=False,
    )


def _headers(id: str | None, headers: Mapping[str, Any]) -> dict[str, Any]:
    return dict(headers) if id is None else {**headers, n.REQUEST_ID: id}
