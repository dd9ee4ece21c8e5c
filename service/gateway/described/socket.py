"""Describes the gateway's WebSocket for its AsyncAPI document. The schemas of a client's messages are made from the
bounds and tables of `socket_messages.py`, which reads these messages."""

from collections.abc import Mapping
from typing import Any, Final, get_args

from lanekeeper.errors import Cancelled
from service.gateway.described import requests
from service.gateway.described.schemas import EVENT, TEXT, TIME, WHOLE, Schema, record
from service.gateway.documents import JSON
from service.gateway.polling import LARGEST_NUMBER
from service.gateway.socket_messages import FIELDS, HEADERS_AT_MOST, LONGEST_HEADER, LONGEST_REF, NEEDED
from topology.codec import schemas as codec

CHANNEL: Final = "socket"
PATH: Final = "/v1/ws"
_SHORT: Final[Schema] = {"type": ["string", "null"], "maxLength": LONGEST_REF}
_FIELD_SCHEMAS: Final[Mapping[str, Schema]] = {
    "ref": {**_SHORT, "description": "Comes back with the answer."},
    "id": {**_SHORT, "description": "The request's id. A `submit` without one gets one."},
    "after": {"type": "integer", "minimum": 0, "maximum": LARGEST_NUMBER},
    "subscribe": {"type": "boolean"},
    "headers": {
        "type": "object",
        "maxProperties": HEADERS_AT_MOST,
        "additionalProperties": {"type": "string", "maxLength": LONGEST_HEADER, "pattern": "^[ -~]*$"},
    },
    "body": {"oneOf": [codec.messages_body(), codec.prompt_body()]},
}
_END: Final = requests.status()
DATA: Final[Mapping[str, Schema]] = {
    "queued": record({"lane": TEXT, "submitted_at": TIME, "due_at": TIME}, optional=["due_at"]),
    "started": record({"attempt": WHOLE, "wait_ms": WHOLE}),
    "event": EVENT,
    "restart": record({}),
    "retrying": record({"attempt": WHOLE, "delay_ms": WHOLE, "error": {}}),
    "truncated": record({}),
    "completed": _END,
    "failed": _END,
    "cancelled": _END,
}
"""The entries of a followed request are its steps (such as `started`) and the events of its answer. For each kind of
entry: the schema of its field `data`."""


def channel() -> dict[str, Any]:
    """The AsyncAPI channel of the WebSocket `GET /v1/ws`."""
    return {
        "address": PATH,
        "description": "A WebSocket; each message is one JSON object.",
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages()},
        "bindings": {"ws": {"method": "GET", "bindingVersion": "0.1.0"}},
    }


def operations() -> dict[str, Any]:
    """The AsyncAPI operations of the WebSocket: which messages the gateway receives, and which it sends."""
    return {"hear": _operation("receive", _received()), "say": _operation("send", _sent())}


def messages() -> dict[str, Any]:
    """The AsyncAPI messages of the WebSocket by name: `socketSubmit`, `socketEntry`, …"""
    return {
        name: {"name": name, "contentType": JSON, "payload": payload}
        for name, payload in {**_received(), **_sent()}.items()
    }


def name_of(type: str) -> str:
    """The name in the AsyncAPI document of the WebSocket message whose field `type` has this value."""
    return f"socket{type.capitalize()}"


def _received() -> dict[str, Schema]:
    return {name_of(type): _received_message(type, FIELDS[type]) for type in FIELDS}


def _received_message(type: str, names: frozenset[str]) -> Schema:
    needed = NEEDED[type]
    fields = {"type": {"const": type}} | {name: _FIELD_SCHEMAS[name] for name in sorted(names - {"type"})}
    if needed == "id":
        fields["id"] = {**_FIELD_SCHEMAS["id"], "type": "string"}
    return record(fields, optional=names - {"type", needed})


def _sent() -> dict[str, Schema]:
    entries = [
        _sent_message("entry", number={**WHOLE, "minimum": 1}, kind={"const": kind}, data=data)
        for kind, data in DATA.items()
    ]
    return {
        name_of("submitted"): _sent_message("submitted", status_url=TEXT, events_url=TEXT),
        name_of("subscribed"): _sent_message("subscribed"),
        name_of("unsubscribed"): _sent_message("unsubscribed"),
        name_of("cancelling"): _sent_message("cancelling", outcome={"enum": list(get_args(Cancelled))}),
        name_of("entry"): {"oneOf": entries},
        name_of("problem"): _sent_message("problem", id={"type": ["string", "null"]}, problem=requests.problem()),
    }


def _sent_message(type: str, **fields: Schema) -> Schema:
    ref = {} if type == "entry" else {"ref": TEXT}
    return record({"type": {"const": type}, "id": TEXT, **fields, **ref}, optional=ref)


def _operation(action: str, some: Mapping[str, Schema]) -> dict[str, Any]:
    here = f"#/channels/{CHANNEL}"
    return {
        "action": action,
        "channel": {"$ref": here},
        "messages": [{"$ref": f"{here}/messages/{name}"} for name in some],
    }
