"""Control messages as a client writes and reads them: they cancel a request or fetch its result over `lane.control`.

    key     body of the message            answer of a worker: value of its header `x-lane-control`, and then its body
    cancel  {"cancel": id, "tenant": "…"}  accepted: {"id", "outcome": "recorded" | "told" | "ended" | "unseen"}
    result  {"result": id, "tenant": "…"}  pending: {"id", "status": "running" | "waiting" | "unknown", "due_at": "…"}
    cancel or result, if it is refused     error: a problem document

If the request has ended, the answer to `result` is its final reply, which has the header `x-lane-status` instead of
`x-lane-control`.

The broker keeps a cancellation until a worker has recorded it. It drops a question for a result after
`ANSWERED_WITHIN_S`, because the client no longer waits then. Workers accept a tenant only if the message also has a
`user_id`, which the broker checks; so each message that names a tenant gets a `user_id`."""

import json
import uuid

from lanekeeper.contract import names as n
from lanekeeper.contract.messages import Message
from lanekeeper.errors import Cancelled, ControlRefused, NotEnded
from lanekeeper.replies import Final, final_of

ANSWERED_WITHIN_S = 5.0
"""For how many seconds a client waits for a worker's answer to a control message. A worker answers from its store
within milliseconds; if no answer came after this time, no worker is running."""


def cancellation(id: str, *, tenant: str | None, user: str) -> Message:
    """Make the control message that cancels a request. `user`: the AMQP user of the connection that publishes it."""
    return _message(n.CANCEL_KEY, id, tenant=tenant, user=user)


def question(id: str, *, tenant: str | None, user: str) -> Message:
    """Make the control message that asks for a request's result. `user`: the AMQP user of the connection that publishes
    it. The broker drops the message after `ANSWERED_WITHIN_S`, because by then nobody waits for the answer any more."""
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
