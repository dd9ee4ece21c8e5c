"""Describes Lanekeeper's interface over AMQP, and the gateway's WebSocket, as an AsyncAPI 3 document."""

from collections.abc import Collection, Iterable
from importlib.metadata import version
from typing import Any, get_args

from consumers.control.command import MESSAGE_BYTES
from consumers.lifecycle import COMMON, EVENTS
from lanekeeper.contract import names as n
from lanekeeper.contract.names import Names
from lanekeeper.contract.problems import PROBLEMS
from lanekeeper.errors import Cancelled
from service.gateway.described import socket
from service.gateway.described.schemas import (
    DEAD_HEADERS,
    EVENT,
    MESSAGE,
    REPLY_HEADERS,
    TEXT,
    WHOLE,
    Schema,
    headers,
    problem,
    record,
)
from topology.codec import schemas as codec

JSON, PROBLEM = "application/json", "application/problem+json"
_ON_ANSWERS = (n.MODEL, n.PROVIDER, n.BODY, n.BODY_SHA256)
_ON_FINALS = (n.STATUS, n.REQUEST_ID, n.LANE_NAME, n.ATTEMPT, n.WAIT_MS, n.RUN_MS, n.WAIT_FROM, n.REPLAYED)
_ON_PARTS = (n.PART, n.SEQ, n.REQUEST_ID, n.LANE_NAME, n.ATTEMPT)
_ALWAYS_ON_FINALS = (n.STATUS, n.REQUEST_ID, n.ATTEMPT)
_CANCELLED = {"enum": list(get_args(Cancelled))}
_WAITING = {"enum": ["running", "waiting", "unknown"]}


def asyncapi(*, names: Names, lanes: Collection[str]) -> dict[str, Any]:
    """The AsyncAPI document of an installation: its exchanges (named by `names`) and the gateway's WebSocket."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Lanekeeper",
            "version": version("lanekeeper"),
            "description": "Routes AI requests in lanes of different urgency: RabbitMQ (AMQP 0-9-1), WebSocket.",
        },
        "defaultContentType": JSON,
        "channels": {**_channels(names, sorted(lanes)), socket.CHANNEL: socket.channel()},
        "operations": {**_operations(), **socket.operations()},
        "components": {"messages": {**_messages(), **socket.messages()}, "schemas": {"Message": MESSAGE}},
    }


def _channels(names: Names, lanes: list[str]) -> dict[str, Any]:
    app: Schema = {"description": "The application's own word."}
    lane: Schema = {"enum": lanes}
    return {
        "requests": {
            "address": "{lane}.{app}.{task}",
            "description": "The routing key; the application may add further words.",
            "parameters": {"lane": lane, "app": app, "task": app},
            "messages": _refs("request"),
            "bindings": _exchange(names.requests),
        },
        "replies": {
            "address": None,
            "description": "The queue of the request's `reply_to`, through the default exchange.",
            "messages": _refs("part", "answer", "error"),
        },
        "control": {
            "address": "{type}",
            "parameters": {"type": {"enum": [n.CANCEL_KEY, n.RESULT_KEY, n.STATUS_KEY]}},
            "messages": _refs("cancel", "result", "status"),
            "bindings": _exchange(names.control),
        },
        "controlReplies": {
            "address": None,
            "description": "The queue of the message's `reply_to`. A stored result is the final reply again.",
            "messages": _refs("accepted", "pending", "refused", "answer", "error"),
        },
        "dead": {
            "address": names.dead,
            "description": "Dead letters: requests that can be mended or tried again, as they were published.",
            "messages": _refs("deadLetter"),
            "bindings": {"amqp": {"is": "queue", "queue": {"name": names.dead, "durable": True}}},
        },
        "events": {
            "address": "{lane}.{app}.{event}.{id}",
            "parameters": {"lane": lane, "app": app, "event": {"enum": list(EVENTS)}, "id": {}},
            "messages": _refs(*map(_event_name, EVENTS)),
            "bindings": _exchange(names.events),
        },
    }


def _operations() -> dict[str, Any]:
    reply_to = {"location": "$message.header#/reply_to", "description": "The property `reply_to`."}
    return {
        "work": {
            "action": "receive",
            "channel": _channel("requests"),
            "reply": {"address": reply_to, "channel": _channel("replies")},
        },
        "obey": {
            "action": "receive",
            "channel": _channel("control"),
            "reply": {"address": reply_to, "channel": _channel("controlReplies")},
        },
        "park": {"action": "send", "channel": _channel("dead")},
        "tell": {"action": "send", "channel": _channel("events")},
    }


def _messages() -> dict[str, Any]:
    asked = {**codec.amqp_headers(), **dict.fromkeys(sorted(n.TRACE_CONTEXT), TEXT)}
    body = {"oneOf": [codec.messages_body(), codec.prompt_body()]}
    id = {"id": TEXT}
    return {
        "request": _message("A request.", body, headers(asked)),
        "part": _message(
            "A part of a streamed answer; `restart`: discard all earlier parts.", _part(), _reply_headers(_ON_PARTS)
        ),
        "answer": _message(
            "The final reply.",
            {"anyOf": [MESSAGE, _answer_address()]},
            _reply_headers((*_ON_FINALS, *_ON_ANSWERS), _ALWAYS_ON_FINALS, ok=True),
        ),
        "error": _message(
            "The final reply of a request that failed.",
            problem(),
            _reply_headers(_ON_FINALS, _ALWAYS_ON_FINALS, ok=False),
            content_type=PROBLEM,
        ),
        "cancel": _control(n.CANCEL_KEY, record({n.CANCEL_KEY: TEXT, "tenant": TEXT}, optional=["tenant"])),
        "result": _control(n.RESULT_KEY, record({n.RESULT_KEY: TEXT, "tenant": TEXT}, optional=["tenant"])),
        "status": _control(n.STATUS_KEY, {"type": "object"}),
        "accepted": _control_answer(
            "accepted", record({**id, "outcome": _CANCELLED, "kept_until": TEXT}, optional=["kept_until"])
        ),
        "pending": _control_answer(
            "pending", record({**id, "status": _WAITING, "attempts": WHOLE, "due_at": TEXT}, optional=["due_at"])
        ),
        "refused": {**_control_answer("error", problem()), "contentType": PROBLEM},
        "deadLetter": _message(
            "A dead letter: body and properties as published.",
            {},
            headers({**DEAD_HEADERS, **asked}, required=(n.DEAD_CODE, n.DEAD_DETAIL, n.DEAD_AT, n.ROUTING_KEY)),
        ),
        **{
            _event_name(event): _message(f"The event `{event}`.", _event(event), {"type": "object"}) for event in EVENTS
        },
    }


def _answer_address() -> Schema:
    """The schema of a reply's body if the answer is too large for a message: the body then contains the answer's
    address."""
    described = f"The address of the answer, which is also in the headers {n.BODY} and {n.BODY_SHA256}."
    return {**record({"type": TEXT, "address": TEXT, "sha256": TEXT, "bytes": WHOLE}), "description": described}


def _part() -> Schema:
    return {"anyOf": [EVENT, {"type": "object", "maxProperties": 0}]}


def _event(event: str) -> Schema:
    more = sorted(EVENTS[event])
    fields: dict[str, Schema] = dict.fromkeys(COMMON, TEXT) | {name: {} for name in more}
    fields |= {"event": {"const": event}, "attempt": WHOLE, "at_ms": WHOLE}
    fields |= {name: {"type": "integer"} for name in more if name.endswith("_ms")}
    fields |= {"code": {"enum": list(PROBLEMS)}} if "code" in more else {}
    return record(fields, optional=more)


def _event_name(event: str) -> str:
    return f"event{event.capitalize()}"


def _reply_headers(names: Iterable[str], required: Iterable[str] | None = None, *, ok: bool | None = None) -> Schema:
    """The JSON Schema of a reply's headers: those in `names`, of which those in `required` (None: all) are in every
    reply. `ok`: whether `x-lane-status` is `ok` or `error`; None: the reply has no such header."""
    fields = {name: REPLY_HEADERS[name] for name in names}
    if ok is not None:
        fields[n.STATUS] = {"const": "ok" if ok else "error"}
    return headers(fields, required=tuple(names) if required is None else required)


def _control(kind: str, payload: Schema) -> dict[str, Any]:
    summary = f"The control message `{kind}`: its routing key and its `type` are equal. At most {MESSAGE_BYTES} bytes."
    return {"name": kind, "summary": summary, "contentType": JSON, "payload": payload}


def _control_answer(as_: str, payload: Schema) -> dict[str, Any]:
    fields = {n.CONTROL: {"const": as_}, n.REQUEST_ID: TEXT}
    return _message(f"A control message was answered: {as_}.", payload, headers(fields, required=[n.CONTROL]))


def _message(summary: str, payload: Schema, headers: Schema, *, content_type: str = JSON) -> dict[str, Any]:
    return {"summary": summary, "contentType": content_type, "headers": headers, "payload": payload}


def _refs(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/messages/{name}"} for name in names}


def _channel(name: str) -> dict[str, str]:
    return {"$ref": f"#/channels/{name}"}


def _exchange(name: str) -> dict[str, Any]:
    exchange = {"name": name, "type": "topic", "durable": True}
    return {"amqp": {"is": "routingKey", "exchange": exchange, "bindingVersion": "0.3.0"}}
