"""The requester's side of control messages: cancels a request or fetches its result over `lane.control`.

    key     body of the message            body of the answer, which one worker sends, after its header `x-lane-control`
    cancel  {"cancel": id, "tenant": "…"}  accepted: {"id", "outcome": "recorded" | "told" | "ended" | "unseen"}
    result  {"result": id, "tenant": "…"}  pending: {"id", "status": "running" | "waiting" | "unknown", "due_at": "…"}
    cancel or result, if it is refused     error: a problem document

If the request has ended, the answer to `result` is its final reply, which has the header `x-lane-status` instead of
`x-lane-control`.

The broker keeps a cancellation until a worker has recorded it. It drops a question for a result after
`ANSWERED_WITHIN_S`, because the client no longer waits then. Workers accept a tenant only if the message also has a
`user_id`, which the broker checks; so a message that names a tenant always carries it."""

import asyncio
import json
import uuid
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass

from lanekeeper.amqp.depth import depths
from lanekeeper.amqp.direct import DirectReplies
from lanekeeper.amqp.publisher import Publisher
from lanekeeper.asking_again import until_ended
from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import BrokerError, TopologyMismatch, Unroutable
from lanekeeper.errors import Cancelled, ControlRefused, NoReply, NotEnded
from lanekeeper.replies import Final, final_of

ANSWERED_WITHIN_S = 5.0
"""For how many seconds a client waits for a worker's answer to a control message. A worker answers from its store
within milliseconds; if no answer came after this time, no worker is running."""
WORKERS_COUNTED_AFTER_S = 0.5
"""If a client has sent a cancellation, and no answer came within this many seconds, it asks the broker whether any
worker runs.
"""
_START_ONE = "start one with `lanekeeper serve` or `lanekeeper consume`"


@dataclass(slots=True, eq=False)
class Control:
    """Sends control messages, which cancel a request or ask for its result, and reads the workers' answers. `user`: the
    connection's AMQP user."""

    publisher: Publisher
    replies: DirectReplies
    _: KW_ONLY
    names: Names
    user: str

    async def cancel(self, id: str, *, tenant: str | None) -> Cancelled:
        """Cancel a request, and return what the answering worker did: one of the words of `Cancelled` (errors.py).

        Raises ControlRefused, NoReply (the broker keeps the cancellation), AccessRefused, TopologyMismatch, other
        BrokerErrors.
        """
        return outcome_of(await self._ask(cancellation(id, tenant=tenant, user=self.user)))

    async def result(self, id: str, *, tenant: str | None, end: float | None) -> Final:
        """Ask for a request's final reply, repeatedly until the request has ended, or until `end` (see `until_ended`).

        Raises Problem, NotEnded, ControlRefused, NoReply, AccessRefused, TopologyMismatch, other BrokerErrors.
        """

        async def ask(_: float | None) -> Final:
            return result_of(await self._ask(question(id, tenant=tenant, user=self.user)))

        return await until_ended(ask, end=end)

    async def send_cancellation(self, id: str, *, tenant: str | None, within_s: float) -> None:
        """Send a cancellation, and wait for the broker's confirm but not for a worker's answer. Raises BrokerError."""
        message = cancellation(id, tenant=tenant, user=self.user)
        await self._send(message, within_s=within_s)

    async def _send(self, message: Message, *, within_s: float) -> None:
        try:
            await self.publisher.publish_surely(
                message,
                exchange=self.names.control,
                routing_key=message.type or "",
                within_s=within_s,
                gives_up_on=(TopologyMismatch, Unroutable),
            )
        except Unroutable as error:
            raise TopologyMismatch(f"{error}; run: lanekeeper topology apply") from error

    async def _ask(self, message: Message) -> Message:
        """Send a control message and return the worker's answer. Raises NoReply, ReplyLost, BrokerErrors of a
        publish."""
        with self.replies.expecting(message) as arrived:
            await self._send(message, within_s=ANSWERED_WITHIN_S)
            self.replies.published(arrived)
            began_s = asyncio.get_running_loop().time()
            if message.persistent:
                # a cancellation: the broker keeps it, so without workers there is nothing to wait for
                with suppress(TimeoutError):
                    return await arrived.next(end=began_s + WORKERS_COUNTED_AFTER_S)
                if not await self._has_worker():
                    raise NoReply(f"no worker runs; it is recorded as soon as one runs: {_START_ONE}")
            try:
                return await arrived.next(end=began_s + ANSWERED_WITHIN_S)
            except TimeoutError:
                kept = "; it is recorded as soon as one runs" if message.persistent else ""
                raise NoReply(f"no worker answered within {ANSWERED_WITHIN_S:g} s{kept}: {_START_ONE}") from None

    async def _has_worker(self) -> bool:
        """Whether a worker consumes control messages; true also if the broker does not say."""
        try:
            return (await depths(self.publisher.connection, [self.names.control]))[self.names.control].consumers > 0
        except BrokerError:
            return True


def cancellation(id: str, *, tenant: str | None, user: str) -> Message:
    """Make the control message that cancels a request. `user`: the AMQP user of the connection that publishes it."""
    return _message(n.CANCEL_KEY, id, tenant=tenant, user=user)


def question(id: str, *, tenant: str | None, user: str) -> Message:
    """Make the control message that asks for a request's result. `user`: the AMQP user of the connection that publishes
    it. The broker drops the message when nobody waits for the answer any more."""
    message = _message(n.RESULT_KEY, id, tenant=tenant, user=user)
    message.persistent = False
    message.expiration = str(round(ANSWERED_WITHIN_S * 1000))
    return message


def outcome_of(reply: Message) -> Cancelled:
    """The outcome in a worker's answer to a cancellation. Raises ControlRefused."""
    _raise_if_refused(reply)
    outcome: Cancelled = json.loads(reply.body)["outcome"]
    return outcome


def result_of(reply: Message) -> Final:
    """The final reply in a worker's answer. Raises Problem if the request failed, NotEnded if it has no result yet, and
    ControlRefused."""
    _raise_if_refused(reply)
    if n.STATUS in reply.headers:
        return final_of(reply)
    found = json.loads(reply.body)
    attempts = int(found.get("attempts", 0))
    raise NotEnded(str(found["id"]), str(found["status"]), attempts=attempts, due_at=found.get("due_at"))


def _message(key: str, id: str, *, tenant: str | None, user: str) -> Message:
    return Message(
        body=json.dumps({key: id} if tenant is None else {key: id, "tenant": tenant}).encode(),
        content_type="application/json",
        type=key,
        message_id=uuid.uuid4().hex,
        user_id=None if tenant is None else user,
    )


def _raise_if_refused(reply: Message) -> None:
    if reply.headers.get(n.CONTROL) == "error":
        raise ControlRefused(json.loads(reply.body))
