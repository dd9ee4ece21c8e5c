"""Reads a control message as a `Command`; if the message is invalid, it raises RequestProblem, which says what is
wrong. Does no I/O.

The routing key and the property `type` of the message both name the command. These are the commands with their bodies,
in which `tenant` may be left out:

cancel      {"cancel": "<message_id>", "tenant": "…"}
result      {"result": "<message_id>", "tenant": "…"}
change      This command is refused, because it is not available in this version.
status      Every worker answers this command: each gets it from a queue of its own (service/worker/running.py).
"""

import json
from collections.abc import Collection
from dataclasses import dataclass

from consumers.job import tenant_of
from consumers.state.base import Identity
from lanekeeper.contract import names as n
from lanekeeper.contract.identity import REQUEST_ID, is_request_id
from lanekeeper.contract.messages import Message
from lanekeeper.contract.problems import invalid_request

MESSAGE_BYTES = 4096
"""The maximum size, in bytes, of the body of a control message."""
KNOWN = (*n.CONTROL_KEYS, n.STATUS_KEY)
SHOWN = 80
"""An error's text quotes at most this many characters of an invalid value in a control message."""


@dataclass(frozen=True, slots=True)
class Command:
    """What a control message asks for. `kind`: the command, one of `n.CONTROL_KEYS` (such as "cancel"). `identity`: the
    request that the message is about."""

    kind: str
    identity: Identity


def read(message: Message, *, speakers: Collection[str], needs_user_id: bool) -> Command | None:
    """Return the command of a control message; None if the message asks for a worker's status. Raises RequestProblem if
    the message is invalid.

    `speakers`: the users that may act for other tenants, and so may name one in the body. `needs_user_id`: whether a
    message without the property `user_id` is invalid.
    """
    kind = _kind(message)
    if kind == n.STATUS_KEY:
        return None
    if needs_user_id and not message.user_id:
        raise invalid_request(
            "user_id: missing; publish with the property user_id, the name of the user that is connected: "
            "without it nobody can tell whose request this is about"
        )
    if kind == n.CHANGE_KEY:
        raise invalid_request(f"type {kind}: changing a request is not available in this version")
    if len(message.body) > MESSAGE_BYTES:
        raise invalid_request(f"body: {len(message.body)} bytes, allowed are {MESSAGE_BYTES}")
    body = _json_object(message)
    if body is None:
        raise invalid_request("body: not a JSON object")
    id = body.get(kind)
    if not isinstance(id, str):
        raise invalid_request(f'body: allowed is {{"{kind}": "<message_id>"}}, with "tenant" where it has one')
    if not is_request_id(id):
        raise invalid_request(f"{kind}: {id[:SHOWN]!r} can be no request's id: {REQUEST_ID}")
    return Command(kind, Identity(_tenant(message, body.get("tenant"), speakers), id))


def id_of(message: Message) -> str | None:
    """The id of the request that a refused control message is about, so that the answer can name the request; None if
    the message's body has no such id, or several."""
    body = _json_object(message) or {}
    ids = [id for kind in n.CONTROL_KEYS if isinstance(id := body.get(kind), str) and is_request_id(id)]
    return ids[0] if len(ids) == 1 else None


def _kind(message: Message) -> str:
    """The name of a control message's command, which must be both the message's type and its routing key. Raises
    RequestProblem if it is not."""
    found, key = message.type, message.routing_key
    if not found:
        raise invalid_request(f"type: it is missing; known are {', '.join(KNOWN)}, and the routing key says the same")
    if found not in KNOWN:
        raise invalid_request(f"type {found[:SHOWN]!r}: known are {', '.join(KNOWN)}")
    if found != key:
        raise invalid_request(f"routing key {key[:SHOWN]!r} and type {found!r} differ: they say the same")
    return found


def _json_object(message: Message) -> dict[str, object] | None:
    """The body of a control message as a JSON object; None if it is too large or no JSON object."""
    if len(message.body) > MESSAGE_BYTES:
        return None
    try:
        body = json.loads(message.body.decode())
        json.dumps(body, ensure_ascii=False).encode()  # raises for "\ud800", which is no character: no store takes it
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _tenant(message: Message, stated: object, speakers: Collection[str]) -> str:
    """The tenant of the request that a control message is about: the tenant that the message's body names (`stated`),
    or, if it names none, the message's user. Raises RequestProblem if the user may not act for the named tenant."""
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
