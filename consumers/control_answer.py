"""How control messages are answered: in one shape, with `x-lane-control`; a result is the final reply again.

Answers go to queues that the broker named and by direct reply-to, and to no other address (threat T1). Who asked from
elsewhere, or from nowhere, cannot be told: that is logged and counted, and nothing more can be done.
"""

import json
import uuid
from collections.abc import Mapping
from typing import Any, Literal

import structlog

from consumers.state.base import Completion
from topology import names as n
from topology import signals
from topology.broker.publisher import Publisher
from topology.contract.messages import Message
from topology.contract.problems import BrokerError, MessageTooLarge, RequestProblem, answer_too_large

ANSWERED = ("amq.gen-", f"{n.DIRECT_REPLY_TO}.")
"""How addresses begin that nobody could choose."""
JSON = "application/json"
PROBLEM = "application/problem+json"
log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Answers:
    """Publishes them; before RabbitMQ 4.3.5 over a connection of their own, for a forged direct address kills it."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.refused = 0
        """Control messages that could not be understood, or asked for what is another's."""
        self.unanswered = 0
        """Of whatever came of so many, nobody could be told, though somebody should have been."""

    async def tell(
        self, question: Message, body: Mapping[str, Any], *, id: str | None, as_: Literal["accepted", "pending"]
    ) -> None:
        """What was done, or what is known so far."""
        await self._send(question, json.dumps(body).encode(), JSON, _headers(id, {n.CONTROL: as_}))

    async def refuse(self, question: Message, problem: RequestProblem, *, id: str | None) -> None:
        """What is wrong with it."""
        self.refused += 1
        log.warning(
            signals.CONTROL_REFUSED,
            type=(question.type or "")[:40],
            key=question.routing_key[:40],
            reason=problem.brief,
            refused=self.refused,
        )
        document = problem.document(request=id or "", attempts=0)
        await self._send(question, document, PROBLEM, _headers(id, {n.CONTROL: "error"}), is_due=True)

    async def replay(self, question: Message, completion: Completion, *, id: str) -> None:
        """How the request ended, as its requester was told."""
        headers = {n.STATUS: completion.status, **completion.headers, n.REPLAYED: True}
        content_type = PROBLEM if completion.status == "error" else JSON
        try:
            await self._send(question, completion.body, content_type, _headers(id, headers))
        except MessageTooLarge as error:
            await self.refuse(question, answer_too_large(error.size, error.limit), id=id)

    async def _send(
        self, question: Message, body: bytes, content_type: str, headers: Mapping[str, Any], *, is_due: bool = False
    ) -> None:
        """Whoever has gone wants no answer. `is_due`: whoever gave no address should be told all the same."""
        address = question.reply_to or ""
        if not address.startswith(ANSWERED):
            if address or is_due:
                self.unanswered += 1
                log.warning(signals.CONTROL_UNANSWERED, reply_to=address[:100], unanswered=self.unanswered)
            return
        answer = Message(
            body=body,
            headers=headers,
            content_type=content_type,
            message_id=uuid.uuid4().hex,
            correlation_id=question.correlation_id,
            persistent=False,
        )
        try:
            await self._publisher.publish(answer, exchange="", routing_key=address, mandatory=False, traced=False)
        except MessageTooLarge:
            raise
        except BrokerError:
            pass  # asked again, it is told again


def _headers(id: str | None, headers: Mapping[str, Any]) -> dict[str, Any]:
    return dict(headers) if id is None else {**headers, n.REQUEST_ID: id}
