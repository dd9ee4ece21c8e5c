"""Reads strictly what a control message asks for; a refusal names what is wrong. Pure.

key, type   body
cancel      {"cancel": "<message_id>", "tenant": "…"}
result      {"result": "<message_id>", "tenant": "…"}
change      not in this version
status      every worker answers it, from a queue of its own (service/worker/running.py)
"""

import json
from collections.abc import Collection
from dataclasses import dataclass

from consumers.job import tenant_of
from consumers.state.base import Identity
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import REQUEST_ID, is_request_id
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import RequestProblem

MESSAGE_BYTES = 4096
KNOWN = (*n.CONTROL_KEYS, n.STATUS_KEY)
SHOWN = 80  # characters of a wrong value that an error quotes


@dataclass(frozen=True, slots=True)
class Question:
    """A control message: one of `n.CONTROL_KEYS`, and the request it is about."""

    kind: str
    identity: Identity


def read(message: Message, *, speakers: Collection[str], needs_user_id: bool = False) -> Question | None:
    """Read a control message; None for `status`, which every worker answers. `needs_user_id`: refuse one without
    `user_id`.

    Raises RequestProblem.
    """
    kind = _kind(message)
    if kind == n.STATUS_KEY:
        return None
    if needs_user_id and not message.user_id:
        raise _wrong(
            "user_id: missing; publish with the property user_id, the name of the user that is connected: "
            "without it nobody can tell whose request this is about"
        )
    if kind == n.CHANGE_KEY:
        raise _wrong(f"type {kind}: changing a request is not available in this version")
    if len(message.body) > MESSAGE_BYTES:
        raise _wrong(f"body: {len(message.body)} bytes, allowed are {MESSAGE_BYTES}")
    said = _said(message)
    if said is None:
        raise _wrong("body: not a JSON object")
    id = said.get(kind)
    if not isinstance(id, str):
        raise _wrong(f'body: allowed is {{"{kind}": "<message_id>"}}, with "tenant" where it has one')
    if not is_request_id(id):
        raise _wrong(f"{kind}: {id[:SHOWN]!r} can be no request's id: {REQUEST_ID}")
    return Question(kind, Identity(_tenant(message, said.get("tenant"), speakers), id))


def id_of(message: Message) -> str | None:
    """The id of the request it is about, if that can be read: for the answer that says what is wrong."""
    said = _said(message) or {}
    ids = [id for kind in n.CONTROL_KEYS if isinstance(id := said.get(kind), str) and is_request_id(id)]
    return ids[0] if len(ids) == 1 else None


def _kind(message: Message) -> str:
    found, key = message.type, message.routing_key
    if not found:
        raise _wrong(f"type: it is missing; known are {', '.join(KNOWN)}, and the routing key says the same")
    if found not in KNOWN:
        raise _wrong(f"type {found[:SHOWN]!r}: known are {', '.join(KNOWN)}")
    if found != key:
        raise _wrong(f"routing key {key[:SHOWN]!r} and type {found!r} differ: they say the same")
    return found


def _said(message: Message) -> dict[str, object] | None:
    if len(message.body) > MESSAGE_BYTES:
        return None
    try:
        said = json.loads(message.body.decode())
        json.dumps(said, ensure_ascii=False).encode()  # "\ud800" is no character: no store could keep it
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def _tenant(message: Message, said: object, speakers: Collection[str]) -> str:
    """The tenant of the request. Only users that may speak for others may name another than themselves."""
    if said is not None and not isinstance(said, str):
        raise _wrong("tenant: allowed is a string")
    believed = tenant_of(message.user_id, said, speakers)
    if said is not None and believed != said:
        who = f"user {message.user_id!r}" if message.user_id else "a message without user_id"
        raise _wrong(
            f"{who} may not speak for tenant {said[:SHOWN]!r}: publish with user_id, "
            "as that tenant or as one of the setting `speakers`"
        )
    return believed


def _wrong(detail: str) -> RequestProblem:
    return RequestProblem("invalid_request", detail)
