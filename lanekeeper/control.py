"""The requester's side of control messages: cancels a request or fetches its result over `lane.control`.

    key     body                           any one worker answers, with `x-lane-control`
    cancel  {"cancel": id, "tenant": "…"}  accepted: {"id", "outcome": "recorded" | "told" | "ended" | "unseen"}
    result  {"result": id, "tenant": "…"}  pending: {"id", "status": "running" | "waiting" | "unknown", "due_at": "…"};
                                           once it has ended: the final reply again, with `x-lane-status` instead
    both    if it is not allowed           error: a problem document

The broker keeps a cancellation until a worker has recorded it. It drops a question for a result after
`ANSWERED_WITHIN_S`, because the client no longer waits then. Workers accept a tenant only together with the user that
the broker has checked, so a message that names a tenant also carries `user_id`."""

import asyncio
import json
import uuid
from datetime import datetime

from lanekeeper.amqp.publisher import Publisher
from lanekeeper.asking_again import until_ended
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import TopologyMismatch, Unroutable
from lanekeeper.errors import Cancelled, ControlRefused, NoReply, NotEnded
from lanekeeper.replies import Final, final_of
from lanekeeper.reply_queue import ReplyQueue, next_of

ANSWERED_WITHIN_S = 5.0
"""A worker answers from its store within milliseconds. No answer for this long means that no worker takes control
messages."""


class Control:
    """Sends control messages as `user` (the connection's user) and reads the answers."""

    def __init__(self, publisher: Publisher, replies: ReplyQueue, *, names: Names, user: str) -> None:
        self._publisher = publisher
        self._replies = replies
        self._names = names
        self._user = user

    async def cancel(self, id: str, *, tenant: str | None) -> Cancelled:
        """Cancel a request. Raises ControlRefused, NoReply (the broker keeps the cancellation), AccessRefused,
        TopologyMismatch, other BrokerErrors."""
        return outcome_of(await self._asked(cancellation(id, tenant=tenant, user=self._user)))

    async def result(self, id: str, *, tenant: str | None, end: float | None) -> Final:
        """Ask repeatedly until the request has ended (`until_ended`).

        Raises Problem, NotEnded, ControlRefused, NoReply, AccessRefused, TopologyMismatch, other BrokerErrors.
        """

        async def ask(_: float | None) -> Final:
            return result_of(await self._asked(question(id, tenant=tenant, user=self._user)))

        return await until_ended(ask, end=end)

    async def cancel_unheard(self, id: str, *, tenant: str | None, within_s: float) -> None:
        """Send a cancellation and wait only until the broker has stored it, not for a worker. Raises BrokerError."""
        message = cancellation(id, tenant=tenant, user=self._user)
        await self._say(message, within_s=within_s)

    async def _say(self, message: Message, *, within_s: float) -> None:
        try:
            await self._publisher.publish_surely(
                message,
                exchange=self._names.control,
                routing_key=message.type or "",
                within_s=within_s,
                gives_up_on=(TopologyMismatch, Unroutable),
            )
        except Unroutable as error:
            raise TopologyMismatch(f"{error}; run: lanekeeper topology apply") from error

    async def _asked(self, message: Message) -> Message:
        """Send a control message and return the worker's answer."""
        with self._replies.expecting(message) as arrived:
            await self._say(message, within_s=ANSWERED_WITHIN_S)
            self._replies.published(arrived)
            try:
                return await next_of(arrived, end=asyncio.get_running_loop().time() + ANSWERED_WITHIN_S)
            except TimeoutError:
                kept = "; it is recorded as soon as one runs" if message.persistent else ""
                raise NoReply(
                    f"no worker answered within {ANSWERED_WITHIN_S:g} s{kept}: "
                    "start one with `lanekeeper serve` or `lanekeeper consume`"
                ) from None


def cancellation(id: str, *, tenant: str | None, user: str) -> Message:
    """The control message that cancels a request."""
    return _message(n.CANCEL_KEY, id, tenant=tenant, user=user)


def question(id: str, *, tenant: str | None, user: str) -> Message:
    """The control message that asks for a request's result."""
    message = _message(n.RESULT_KEY, id, tenant=tenant, user=user)
    message.persistent = False
    message.expiration = str(round(ANSWERED_WITHIN_S * 1000))
    return message


def outcome_of(reply: Message) -> Cancelled:
    """The outcome of a cancellation. Raises ControlRefused."""
    _see_that_it_is_done(reply)
    outcome: Cancelled = json.loads(reply.body)["outcome"]
    return outcome


def result_of(reply: Message) -> Final:
    """The request's final reply. Raises Problem if it ended in an error, NotEnded, ControlRefused."""
    _see_that_it_is_done(reply)
    if n.STATUS in reply.headers:
        return final_of(reply)
    found = json.loads(reply.body)
    due_at = found.get("due_at")
    raise NotEnded(
        str(found["id"]),
        str(found["status"]),
        attempts=int(found.get("attempts", 0)),
        due_at=None if due_at is None else datetime.fromisoformat(due_at),
    )


def _message(key: str, id: str, *, tenant: str | None, user: str) -> Message:
    return Message(
        body=json.dumps({key: id} if tenant is None else {key: id, "tenant": tenant}).encode(),
        content_type="application/json",
        type=key,
        message_id=uuid.uuid4().hex,
        user_id=None if tenant is None else user,
    )


def _see_that_it_is_done(reply: Message) -> None:
    if reply.headers.get(n.CONTROL) == "error":
        raise ControlRefused(json.loads(reply.body))
