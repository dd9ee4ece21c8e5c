"""Reads control messages as commands, and answers them.

The routing key and the property `type` of a message both name the command. These are the commands with their bodies, in
which `tenant` may be left out:

cancel      {"cancel": "<message_id>", "tenant": "…"}
result      {"result": "<message_id>", "tenant": "…"}
change      This command is refused, because it is not available in this version.
pause, resume, pauses   See `consumers/control/brake.py`.
status      Every worker answers this command: each gets it from a queue of its own (service/worker/running.py).
"""

import json
import uuid
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from consumers.job import tenant_of, user_id_missing
from consumers.rate_limit import LogThrottle
from consumers.replies.reply import JSON, PROBLEM
from consumers.replies.sender import ReplyRule, ReplySender
from consumers.state.base import Completion, Identity
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import REQUEST_ID, is_request_id
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import BrokerError, MessageTooLarge, RequestProblem, answer_too_large, invalid_request
from lanekeeper.telemetry import logs, signals
from topology.broker.notices import Notices

MESSAGE_BYTES = 4096
KNOWN = (*n.CONTROL_KEYS, *n.BRAKE_KEYS, n.STATUS_KEY)
SHOWN = 80
log = logs.logger()


@dataclass(frozen=True, slots=True)
class Command:
    """What a control message asks for."""

    kind: str
    identity: Identity


def read_command(message: Message, *, speakers: Collection[str], needs_user_id: bool) -> Command | None:
    """Return the command of a control message; None if the message asks for a worker's status. Raises RequestProblem if
    the message is invalid.

    `speakers`: the users that may act for other tenants, and so may name one in the body. `needs_user_id`: whether a
    message without the property `user_id` is invalid.
    """
    kind = kind_of(message)
    if kind == n.STATUS_KEY:
        return None
    if needs_user_id and not message.user_id:
        raise user_id_missing()
    if kind == n.CHANGE_KEY:
        raise invalid_request(f"type {kind}: changing a request is not available in this version")
    body = object_in(message)
    id = body.get(kind)
    if not isinstance(id, str):
        raise invalid_request(f'body: allowed is {{"{kind}": "<message_id>"}}, with "tenant" where it has one')
    if not is_request_id(id):
        raise invalid_request(f"{kind}: {id[:SHOWN]!r} can be no request's id: {REQUEST_ID}")
    return Command(kind, Identity(_tenant(message, body.get("tenant"), speakers), id))


def _id_of(message: Message) -> str | None:
    body = _json_object(message) or {}
    ids = [id for kind in n.CONTROL_KEYS if isinstance(id := body.get(kind), str) and is_request_id(id)]
    return ids[0] if len(ids) == 1 else None


def object_in(message: Message) -> dict[str, object]:
    """The JSON object in the body. Raises RequestProblem."""
    if len(message.body) > MESSAGE_BYTES:
        raise invalid_request(f"body: {len(message.body)} bytes, allowed are {MESSAGE_BYTES}")
    body = _json_object(message)
    if body is None:
        raise invalid_request("body: not a JSON object")
    return body


def kind_of(message: Message) -> str:
    """What the message's type and its routing key both name. Raises RequestProblem."""
    found, key = message.type, message.routing_key
    if not found:
        raise invalid_request(f"type: it is missing; known are {', '.join(KNOWN)}, and the routing key says the same")
    if found not in KNOWN:
        raise invalid_request(f"type {found[:SHOWN]!r}: known are {', '.join(KNOWN)}")
    if found != key:
        raise invalid_request(f"routing key {key[:SHOWN]!r} and type {found!r} differ: they say the same")
    return found


def _json_object(message: Message) -> dict[str, object] | None:
    if len(message.body) > MESSAGE_BYTES:
        return None
    try:
        body = json.loads(message.body.decode())
        json.dumps(body, ensure_ascii=False).encode()  # raises for "\ud800", which is no character: no store takes it
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _tenant(message: Message, stated: object, speakers: Collection[str]) -> str:
    if stated is not None and not isinstance(stated, str):
        raise invalid_request("tenant: allowed is a string")
    tenant = tenant_of(message.user_id, stated, speakers)
    if stated is not None and tenant != stated:
        who = f"user {message.user_id!r}" if message.user_id else "a message without user_id"
        raise invalid_request(
            f"{who} may not speak for tenant {stated[:SHOWN]!r}: publish with user_id, "
            "as that tenant or as one of the setting `speakers`"
        )
    return tenant


@dataclass(slots=True, eq=False)
class ControlAnswers:
    """Publishes the answers to control messages: to `result`, if the request has ended, the request's final reply; any
    other has the header `x-lane-control`. They are sent only to direct reply-to, to queues that the broker named, and
    to `lane.reply.<user_id>` of the message's user (threat T1 in docs/security.md). `notices`: sends the answers that
    are not results, many in one write and without confirms, because a client that gets no answer asks again."""

    sender: ReplySender
    _: KW_ONLY
    rule: ReplyRule
    notices: Notices
    refused: int = field(default=0, init=False)
    unanswered: int = field(default=0, init=False)
    _log_throttle: LogThrottle = field(default_factory=LogThrottle, init=False)

    async def tell(self, message: Message, body: Mapping[str, Any], *, control: Literal["accepted", "pending"]) -> None:
        headers = {n.CONTROL: control}
        if "id" in body:
            headers[n.REQUEST_ID] = body["id"]
        await self._send(message, _answer(message, json.dumps(body).encode(), JSON, headers))

    async def refuse(self, message: Message, problem: RequestProblem) -> None:
        self._log_refusal(message, problem)
        id = _id_of(message)
        headers = {n.CONTROL: "error", **({} if id is None else {n.REQUEST_ID: id})}
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
        address = message.reply_to or ""
        may = self.rule.allows_control(address, user=message.user_id)
        if not may and (address or must_answer):
            self.unanswered += 1
            if count := self._log_throttle.count(f"unanswered {message.user_id or ''}"):
                log.warning(signals.CONTROL_UNANSWERED, reply_to=address[:100], count=count, unanswered=self.unanswered)
        return may

    async def _publish(self, message: Message, answer: Message) -> None:
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
